"""A one-layer Transformer with a ReLU network: about m·d queries for the network, 2d² for W.

Section 4.1 of *Provably Learning Attention with Queries* (arXiv 2601.16873), for

    F(X) = wᵀ ReLU(A · attn(X)),   attn(X) = Σ_i softmax_i(x_iᵀ W x_N) x_i,   no biases:

    F([x]) = wᵀ ReLU(A x)                     the network, by relu_network.py
    F(X) − F(−X) = (Aᵀw)ᵀ attn(X)             scores are even in X: one head, two queries each

and any method for a head learns W from the second line. Departures:

- (Aᵀw)ᵀx is known once the network is, so a head's length-one questions cost nothing.
- The paper gives up where Aᵀw = 0. But F = φ(attn(X)) with φ known and linear between hyperplanes:
  with x scaled up by t and δ down by t the score δᵀWx is the same, and for t large enough x and
  x + δ lie in one region of φ. There, with y = tx + δ/t,

      (F([y ; tx]) − F([tx])) / (F([y]) − F([tx])) = σ(δᵀWx),

  again two queries for one question to a head (F([tx]) = t·F([x]) is shared), now with any v we
  like. Differences of nearly equal answers cost a factor of about t² in precision, so this is
  the second choice.
- Only φ = 0 leaves W unknown: then every answer is zero.
- Several heads, F(X) = wᵀ ReLU(Σ_h A_h attn_h(X)), which the paper leaves out. The second line
  becomes Σ_h (A_hᵀw)ᵀ attn_h(X), from which a method for several heads learns all W_h; then φ is a
  network of Hd inputs that known heads can be steered to (`Steered`). Equal W_h act as one
  head with the sum of the A_h. Heads with A_hᵀw = 0 are invisible in the odd part; what is found
  without them does not agree with fresh answers, and the judge says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from keyhole.core import Status, Unsuccessful
from keyhole.core.errors import InputError, KeyholeError
from keyhole.core.numerics import least_squares
from keyhole.extract.bilinear import ask_through, scalar
from keyhole.extract.extraction import Step, setting
from keyhole.extract.judge import Method
from keyhole.extract.multi_head import MultiHead
from keyhole.extract.relu_network import Folds, ReluNetwork, neurons
from keyhole.extract.single_head import SingleHead
from keyhole.oracle import planted
from keyhole.oracle.planted import Head, OneLayer, ReluFfn
from keyhole.oracle.protocol import Oracle, ask

_WEAK = 1e-3  # ‖Aᵀw‖ below this share of the network: one region gives more digits
_MARGIN = 1.01  # how much farther than x + δ the region's nearest wall has to be
_FARTHEST = 1e12  # for t²: beyond, nothing is left of the difference
_SAMPLE = 8  # answers that show whether there is an odd part


@dataclass(frozen=True)
class OneLayerTransformer(Method):
    """Exact extraction of attention and network from scores (Section 4.1).

    `attention` is any method for one head, or `MultiHead()` for several.
    """

    width: int | None = setting(None, "the largest number of neurons, if it is known")
    attention: Method = field(default_factory=SingleHead)
    seed: int = 0
    tolerance: float = 1e-8
    resolution: float = setting(
        1e-12, "answers so near to a linear piece are on it; more if they are rounded"
    )

    def __post_init__(self) -> None:
        self._network()  # refuses what it cannot use

    def _network(self) -> ReluNetwork:
        return ReluNetwork(
            self.width, seed=self.seed, tolerance=self.tolerance, resolution=self.resolution
        )

    def expected_queries(self, dim: int) -> int | None:
        heads, free = 1, dim  # one head's questions of length one are free
        if isinstance(self.attention, MultiHead):
            heads, free = self.attention.heads or 1, 0
        network = self._network().expected_queries(heads * dim)
        attention = self.attention.expected_queries(dim)
        if network is None or attention is None:
            return None
        return network + 2 * (attention - free)

    def steps(self, oracle: Oracle) -> Iterator[Step]:
        if isinstance(self.attention, MultiHead):
            return self._heads_first(oracle)
        return self._network_first(oracle)

    def _network_first(self, oracle: Oracle) -> Iterator[Step]:
        d = oracle.dim
        nothing = torch.zeros(d, d, dtype=torch.float64)
        network, known, unknowns = ReluFfn(nothing[:0], nothing[:0, 0]), 0, None
        for step in self._network().steps(oracle):
            if isinstance(step.model, ReluFfn):
                network, known, unknowns = step.model, step.known, step.unknowns
                yield Step(OneLayer(nothing, network.A, network.w), known, _sum(unknowns, d * d))
        for step in self.attention.steps(_as_head(oracle, network)):
            if not isinstance(step.model, Head):
                raise Unsuccessful(
                    Status.NOT_APPLICABLE,
                    f"attention must be a method for one head, not for {step.model.kind}",
                )
            model = OneLayer(step.model.W, network.A, network.w)
            yield Step(model, known + step.known - d, _sum(unknowns, step.unknowns, -d))

    def _heads_first(self, oracle: Oracle) -> Iterator[Step]:
        _require_odd_part(oracle, self.seed)
        last: Step | None = None
        heads: list[Tensor] = []
        for last in self.attention.steps(_Antisymmetric(oracle)):
            if isinstance(last.model, planted.MultiHead):
                heads, v = list(last.model.W), torch.cat(list(last.model.v))
                network, _ = neurons(Folds.none(len(v)), 0.5 * v)  # the odd part of F
                width = None if self.width is None else len(v) * max(1, self.width - 1)
                unknowns = _sum(last.unknowns, width)
                yield Step(_join(heads, network), last.known, unknowns, remark=last.remark)
        if last is None:
            return
        inputs = len(heads) * oracle.dim
        known, unknowns = last.known - inputs, _sum(last.unknowns, -inputs)  # v is in the network
        try:
            features = Steered(oracle, torch.stack(heads), self.seed) if len(heads) > 1 else oracle
            for step in self._network().steps(features):
                if isinstance(step.model, ReluFfn):
                    model = _join(heads, step.model)
                    every = _sum(unknowns, step.unknowns)
                    yield Step(model, known + step.known, every, remark=last.remark)
        except NotSteerable as obstacle:
            raise Unsuccessful(
                Status.NOT_APPLICABLE, f"{last.remark}, but the network cannot be read: {obstacle}"
            ) from obstacle


def _sum(*counts: int | None) -> int | None:
    """How many unknowns there are in all; None where some of them are not counted yet."""
    return None if None in counts else sum(count for count in counts if count is not None)


def _join(heads: list[Tensor], network: ReluFfn) -> OneLayer:
    """Heads and the network of their joint output, as one Transformer."""
    if len(heads) == 1:
        return OneLayer(heads[0], network.A, network.w)
    A = network.A.unflatten(1, (len(heads), -1)).transpose(0, 1)
    return OneLayer(torch.stack(heads), A.contiguous(), network.w)


def _require_odd_part(oracle: Oracle, seed: int) -> None:
    """Refuse what a method for heads would see as rounding only."""
    stream = torch.Generator().manual_seed(seed)
    X = torch.randn(_SAMPLE, 3, oracle.dim, generator=stream, dtype=torch.float64)
    answers = scalar(ask(oracle, torch.cat([X, -X]))).unflatten(0, (2, -1))
    largest = answers.abs().max()
    if largest == 0:
        raise Unsuccessful(Status.NOT_IDENTIFIABLE, "every answer is zero, whatever W may be")
    if (answers[0] - answers[1]).abs().max() <= _WEAK**3 * largest:
        raise Unsuccessful(
            Status.NOT_APPLICABLE,
            "F(−X) = F(X): several heads can only be read where A_hᵀw is not zero",
        )


def _as_head(oracle: Oracle, network: ReluFfn) -> Oracle:
    size = torch.linalg.vector_norm(network.A, dim=1) @ network.w.abs()
    if size == 0:
        raise Unsuccessful(
            Status.NOT_IDENTIFIABLE, "the network is zero: so is every answer, whatever W may be"
        )
    v = network.w @ network.A
    if torch.linalg.vector_norm(v) > _WEAK * size:
        return _Antisymmetric(oracle, v)
    return _InOneRegion(oracle, network)


class _Antisymmetric:
    """`F(X) − F(−X)`: heads with v_h = A_hᵀw, whose sum may be known."""

    def __init__(self, inner: Oracle, v: Tensor | None = None) -> None:
        self._inner, self._v = inner, v
        self.dim = inner.dim

    def __call__(self, sequences: Tensor) -> Tensor:
        if sequences.shape[1] == 1 and self._v is not None:
            return sequences[:, 0] @ self._v
        return _ask_pairs(self._inner, sequences, -sequences, lambda F: F[:, 0] - F[:, 1])


class _InOneRegion:
    """A head with v = (1, …, 1), read inside single regions of φ; for one token or two."""

    def __init__(self, inner: Oracle, network: ReluFfn) -> None:
        self._inner, self._network = inner, network
        self.dim = network.dim

    def __call__(self, sequences: Tensor) -> Tensor:
        x = sequences[:, -1]
        if sequences.shape[1] == 1:
            return x.sum(1)
        if sequences.shape[1] > 2:
            raise InputError(f"a sequence must have one or two tokens: got {sequences.shape[1]}")
        delta = sequences[:, 0] - x
        sign, t = self._place(x, delta)
        far = x * t.unsqueeze(1)
        end = far + delta * (sign / t).unsqueeze(1)
        different, same = torch.unique(x, dim=0, return_inverse=True)
        start = t * ask(self._inner, different.unsqueeze(1))[same]  # φ(tx) = t·φ(x)

        def answer(F: Tensor) -> Tensor:
            rise, whole = (F - start[: len(F)].unsqueeze(1)).unbind(1)
            alpha = 0.5 + sign[: len(F)] * (rise / whole - 0.5)  # σ(−z) = 1 − σ(z)
            return sequences[: len(F), 1].sum(1) + alpha * delta[: len(F)].sum(1)

        # Two equal tokens attend to that token, whatever the weights: F([y ; y]) = φ(y).
        both = torch.stack([end, far], 1), torch.stack([end, end], 1)
        return _ask_pairs(self._inner, *both, answer)

    def _place(self, x: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        """The sign of δ with the farther wall, and a t for which x ± δ/t² stays before it."""
        at, move = x @ self._network.A.mT, delta @ self._network.A.mT
        towards = (-move / at).nan_to_num(0.0, _FARTHEST, -_FARTHEST)
        ahead, behind = towards.amax(1), (-towards).amax(1)
        sign = torch.where(ahead <= behind, 1.0, -1.0).to(torch.float64)
        return sign, (_MARGIN * torch.minimum(ahead, behind)).clamp(1.0, _FARTHEST).sqrt()


def _ask_pairs(
    oracle: Oracle, first: Tensor, second: Tensor, answer: Callable[[Tensor], Tensor]
) -> Tensor:
    """`answer` of the pairs (n, 2) of scores; if the budget ends, whole pairs are kept."""

    def paired(scores: Tensor) -> Tensor:
        return answer(scores[: len(scores) // 2 * 2].unflatten(0, (-1, 2)))

    return ask_through(oracle, torch.stack([first, second], 1).flatten(0, 1), paired)


# Known heads, each made to attend to a token of its own: one network of all their outputs.
#
# With H heads whose W_h are known, a one-layer Transformer is a ReLU network of Hd inputs,
#
#     F(X) = wᵀ ReLU(Σ_h A_h u_h),   u_h = attn_h(X) = Σ_i softmax_i(x_iᵀ W_h x_N) x_i,
#
# and any generic u = (u_1, …, u_H) can be had. Send [ρu_1 ; … ; ρu_H ; λx] with x such that
#
#     (u_h − u_k)ᵀ W_h x > 0  for k ≠ h,        u_hᵀ W_h x > μ·xᵀ W_h x,   μ = λ/ρ:
#
# with ρλ large enough head h sees ρu_h alone, the others being below e^-45, and F(X) = ρ·φ(u). ρ
# and λ apart are free, so that x can be made as small next to the u as the second line wants.
#
# - The conditions are H² rows in d unknowns, and if H² ≤ d all of them can be set to 1. Where only
#   the first H(H − 1) fit into d, or the rows depend on one another, the first are set and the
#   rest is left to chance, many times over: it also holds where xᵀW_hx is negative enough. Nearly
#   every u has its x then, but one without is enough to fail. More heads are refused.
# - x need not be exact, so it is rounded, and ρ and λ are powers of two: the last digits of W,
#   which linear algebra does not give twice alike, do not show in the questions, and a ledger
#   knows them again.
# - A head with W = 0 takes the mean of all tokens. Its token carries what brings the mean to ρu_h,
#   and as it looks nowhere there are H rows less.
# - The rows are also necessary: whatever the tokens, u_hᵀW_hx is no less than any token's score
#   less log n, as softmax averages lean to large scores. Heads with proportional W, or three and
#   more of rank 1, cannot be brought to every u by any query.

_SATURATED = 45.0  # e^-45 of a token is below rounding, also next to one a thousand times smaller
_TRIES = 1024  # at x by chance; most u need a few, and only those left over are tried again
_SPREAD = 2.0  # of the wanted rows around 1, as an exponent, when x is left to chance
_SHARES = 2.0 ** torch.arange(-8, 9)  # of μ, around the value at which both sides are alike
_BITS = (16, 36)  # of x in the first attempt, and after it
_DEPENDENT = 1e-10  # rows of related heads (W and −W) depend on one another, up to their errors
_LEAST = 1e-8  # of the largest that a row could be: below, rounding decides where a head looks


class NotSteerable(KeyholeError):
    """There is no query for which every head looks at a token of its own."""


class Steered:
    """`φ(u) = wᵀ ReLU(Σ_h A_h u_h)` as an oracle of one token u of dimension H·d."""

    def __init__(self, inner: Oracle, W: Tensor, seed: int) -> None:
        self._inner, self._W = inner, W
        self.dim = W.shape[0] * W.shape[1]
        self._stream = torch.Generator().manual_seed(seed)
        heads = len(W)
        moving = [h for h in range(heads) if bool(W[h].any())]
        self._still = [h for h in range(heads) if h not in moving]
        # Row (h, i): head h prefers its token to token i; number H is the asking token itself.
        rows = [(h, i) for h in moving for i in range(heads + 1) if i != h]
        self._head, self._other = torch.tensor(rows).reshape(-1, 2).unbind(1)
        # What μ does: the asking token counts against a row, and the still head's token holds −μx.
        still = torch.tensor(self._still, dtype=torch.long)
        self._turn = torch.isin(self._other, still).double() - (self._other == heads).double()
        self._firm = self._other < heads
        firm = int(self._firm.sum())
        if firm > inner.dim:
            raise NotSteerable(f"{heads} heads look {firm} ways and x has {inner.dim} components")

    def __call__(self, sequences: Tensor) -> Tensor:
        tokens, rho = self.tokens(sequences[:, -1].unflatten(1, self._W.shape[:2]))
        return ask_through(self._inner, tokens, lambda F: F / rho[: len(F)])

    def tokens(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """Queries (n, H+1, d) that bring the heads to ρu for u (n, H, d), and ρ (n,)."""
        wanted = torch.cat([u, torch.zeros_like(u[:, :1])], 1)
        for h in self._still:
            wanted[:, h] += len(self._W) * u[:, h] - (u.sum(1) - u[:, h])
        stacked = self._W.transpose(0, 1).flatten(1)
        keys = (wanted @ stacked).unflatten(
            2, self._W.shape[:2]
        )  # of token i for head h, [:, i, h]
        rows = keys[:, self._head, self._head] - keys[:, self._other, self._head]
        x, mu, margin = self._asking(rows)
        wanted[:, self._still] -= (mu.unsqueeze(1) * x).unsqueeze(1)
        wanted[:, -1] = mu.unsqueeze(1) * x
        rho = 2.0 ** (_SATURATED / (margin * mu)).log2().div(2).ceil()
        return rho[:, None, None] * wanted, rho

    def _asking(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x, μ and the smallest row that they leave, for each of the wanted u."""
        n, _, d = rows.shape
        x = torch.ones(n, d, dtype=torch.float64)
        mu, margin = torch.ones(2, n, dtype=torch.float64)
        left = torch.arange(n)
        for attempt in range(_TRIES):
            exact = self._candidate(rows[left], by_chance=attempt > 1)
            x[left] = _rounded(exact, _BITS[min(attempt, 1)])
            mu[left], margin[left] = self._balance(rows[left], x[left])
            most = torch.linalg.vector_norm(rows[left], dim=2).amax(1)
            least = _LEAST * most * torch.linalg.vector_norm(x[left], dim=1)
            left = left[~(margin[left] > least)]
            if not len(left):
                return x, mu, margin
        raise NotSteerable(f"no x was found for which all {len(self._W)} heads look apart")

    def _candidate(self, rows: Tensor, *, by_chance: bool) -> Tensor:
        """The least x that sets all rows to 1; or a random one that sets the firm ones above 0."""
        if by_chance or rows.shape[1] > rows.shape[2]:
            rows = rows[:, self._firm]
        n, count, d = rows.shape
        z = torch.zeros(n, d, 1, dtype=torch.float64)
        to = torch.ones(n, count, 1, dtype=torch.float64)
        if by_chance:
            to = torch.randn(to.shape, generator=self._stream, dtype=torch.float64)
            to = (_SPREAD * to).exp()
            least = _least_squares(rows, to)
            size = torch.linalg.vector_norm(least, dim=1, keepdim=True) / d**0.5
            z = size * torch.randn(z.shape, generator=self._stream, dtype=torch.float64)
        return (z + _least_squares(rows, to - rows @ z)).squeeze(2)

    def _balance(self, rows: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """The best μ of a few, and the smallest row with it."""
        base = (rows @ x.unsqueeze(2)).squeeze(2)
        own = torch.einsum("ni,hij,nj->nh", x, self._W, x)
        slope = self._turn * own[:, self._head]
        tiny = torch.finfo(torch.float64).tiny
        unit = base.abs().amax(1).clamp(min=tiny) / slope.abs().amax(1).clamp(min=tiny)
        shares = _SHARES * 2.0 ** unit.log2().round().unsqueeze(1)
        margins = (base.unsqueeze(1) + shares.unsqueeze(2) * slope.unsqueeze(1)).amin(2)
        margin, best = margins.max(1)
        return shares.gather(1, best.unsqueeze(1)).squeeze(1), margin


def _least_squares(rows: Tensor, to: Tensor) -> Tensor:
    return least_squares(rows, to, rcond=_DEPENDENT)


def _rounded(x: Tensor, bits: int) -> Tensor:
    """x to so many bits of its largest component."""
    _, exponent = torch.frexp(x.abs().amax(1, keepdim=True))
    grain = 2.0 ** (exponent - bits).double()
    return (x / grain).round() * grain
