"""Known heads, each made to attend to a token of its own: one network of all their outputs.

Section 4.1 of *Provably Learning Attention with Queries* (arXiv 2601.16873) learns a one-layer
Transformer with one head. With H heads whose W_h are known it is a ReLU network of Hd inputs,

    F(X) = wᵀ ReLU(Σ_h A_h u_h),   u_h = attn_h(X) = Σ_i softmax_i(x_iᵀ W_h x_N) x_i,

and any generic u = (u_1, …, u_H) can be had. Send [ρu_1 ; … ; ρu_H ; λx] with x such that

    (u_h − u_k)ᵀ W_h x > 0  for k ≠ h,        u_hᵀ W_h x > μ·xᵀ W_h x,   μ = λ/ρ:

with ρλ large enough head h sees ρu_h alone, the others being below e^-45, and F(X) = ρ·φ(u). ρ and
λ apart are free, so that x can be made as small beside the u as the second line wants.

- The conditions are H² rows in d unknowns, and if H² ≤ d all of them can be set to 1. Where only
  the first H(H − 1) fit into d, or the rows depend on one another, the first are set and the rest
  is left to chance, many times over: it also holds where xᵀW_hx is negative enough. Nearly every u
  has its x then, but one without is enough to fail. More heads are refused.
- x need not be exact, so it is rounded, and ρ and λ are powers of two: the last digits of W, which
  linear algebra does not give twice alike, do not show in the questions, and a ledger knows them
  again.
- A head with W = 0 takes the mean of all tokens. Its token carries what brings the mean to ρu_h,
  and as it looks nowhere there are H rows less.
- The rows are not only sufficient: whatever the tokens, u_hᵀW_hx is no less than any token's score
  less log n, as softmax averages lean to large scores. Heads with proportional W, or three and
  more of rank 1, cannot be brought to every u by any query.
"""

from __future__ import annotations

import torch
from torch import Tensor

from keyhole.core.errors import KeyholeError
from keyhole.core.numerics import least_squares
from keyhole.oracle.protocol import BudgetExhausted, Oracle, ask

_SATURATED = 45.0  # e^-45 of a token is below rounding, also beside one a thousand times smaller
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
        self._inner = inner
        self._W = W
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

    @property
    def dim(self) -> int:
        return self._W.shape[0] * self._W.shape[1]

    def __call__(self, sequences: Tensor) -> Tensor:
        tokens, rho = self.tokens(sequences[:, -1].unflatten(1, self._W.shape[:2]))
        try:
            return _divide(ask(self._inner, tokens), rho)
        except BudgetExhausted as end:
            if end.answers is None:
                raise
            raise BudgetExhausted(end.budget, _divide(end.answers, rho)) from end

    def tokens(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """Queries (n, H+1, d) that bring the heads to ρu for u (n, H, d), and ρ (n,)."""
        wanted = torch.cat([u, torch.zeros_like(u[:, :1])], 1)
        for h in self._still:
            wanted[:, h] += len(self._W) * u[:, h] - (u.sum(1) - u[:, h])
        together = self._W.transpose(0, 1).flatten(1)
        keys = (wanted @ together).unflatten(
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


def _divide(answers: Tensor, rho: Tensor) -> Tensor:
    rho = rho[: len(answers)]
    return answers / rho.reshape(-1, *[1] * (answers.ndim - 1))
