"""Stacked layers of attention with residual connections (ours).

Head h has scores `x_N W_h x_j` and values `x_j V_h`, for tokens x_j as rows of d
numbers. For heads in layers 1 … L, with A_l = Σ_h V_h over the heads of layer l and 1
the identity matrix, let

    W̃_h = (1 + A_1)…(1 + A_{l−1})·W_h      Ṽ_h = V_h·(1 + A_{l+1})…(1 + A_L)      h in layer l

**Theorem (depth is invisible from afar).** To `[x/ε + εδ_1 ; … ; x/ε + εδ_n]`, long
tokens that differ little, the answer at the last token is

    xP/ε + ε(δ_n + Σ_h Σ_j softmax_j(x W̃_h δ_j)·δ_j Ṽ_h) + O(ε³),    P = (1 + A_1)…(1 + A_L):

that of one layer with all heads. *Proof* by induction over layers: tokens stay `x_l/ε +
ε(δ_j + c)` with one c for all j, and terms that do not depend on j cancel in the
softmax.

One layer has one set of heads up to order (canonical.py), so W̃_h and Ṽ_h follow from
the answers, and what remains is which head is in which layer. Every assignment gives
other W_h, V_h, and in general position only one explains the answers to short tokens
(docs/mathematics.md).

With a causal mask c depends on j. Instead, m copies of x/ε in front of `x/ε + εδ` make
the weight of the last token small in every layer: the answer is `xP/ε + ε(δ + Σ_h e^{x
W̃_h δ}·δV_h/m) + O(ε/m²)`, extrapolated to m = ∞.

The stages, at a scale at which scores are about 1:

1. P and the mask, from d + 3 queries.
2. g_h = W̃_h δ_0 and u_h = δ_0 Ṽ_h for one δ_0. The answers to [x_i/ε + εδ_0 ; x_i/ε] are a matrix
   Σ_h σ(x_i g_h)·u_h of rank H: a small network, fitted from random starts.
3. W̃_h and Ṽ_h, from the same fits for d other δ, which start from the result for δ_0 nearby.
4. The layers: of all assignments of heads to layers, the one that gives the target's answers.
5. All numbers again, by least squares on sequences of ordinary tokens.

Limits. H < d heads in all, since the rank shows their number. Two layers take 2^H
assignments, more layers take more. No biases, norms, positions or feed-forward layers.
ε costs half of the digits of an answer: float32 is enough, bfloat16 is not.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from keyhole.core import Status, Unsuccessful, not_applicable
from keyhole.core.float64 import identity, normal, random_stream, tensor, zeros
from keyhole.core.numerics import least_squares, thin_svd
from keyhole.extract.bilinear import lengths, max_abs, random_orthogonal
from keyhole.extract.blocks.view import expect_vectors, last
from keyhole.extract.extraction import Step
from keyhole.extract.gauss_newton import levenberg, refined
from keyhole.extract.judge import Method
from keyhole.oracle import planted
from keyhole.oracle.protocol import Oracle, ask

_FAR = (
    2.0**11
)  # 1/ε at most: the theorem neglects ε², and errors of answers grow by 1/ε²
_COPIES = (32, 64, 128, 256)  # m, with a causal mask
_SAME = 1e-9  # the relative difference of equal answers
_SCALES = 40  # lengths of tokens that are tried
_BENT = (
    0.06,
    0.2,
)  # how far from linear the answers should be, to fit a network to them
_CLEAR = 30.0  # the ratio of singular values at which the rank ends
_LENGTHS = (
    1.0,
    0.7,
    1.4,
    0.5,
)  # relative to the fitting length: the next where no heads are found
_STARTS = 16
_NEAR = (
    0.25,
    0.06,
    0.015,
)  # the distance of other δ from δ_0; smaller where the fit loses heads
_FITTED = (
    1e-6  # the relative residual of a network that fits the answers for one δ, or …
)
_LEFT = 30.0  # … this many times the part of the answers beyond rank H, if that is more
_TOGETHER = 0.01  # the relative residual for a δ that W̃ and Ṽ were not fitted to
_CLOSE = (
    1e-4  # the relative residual of ordinary answers at which no more layers are tried
)
_COARSE = 1e-5  # a deviation from linearity up to which answers are taken to be rounded
_MOST = 5000  # assignments of heads to layers that are tried
_PROBES = 8  # sequences that compare assignments
_TOKENS = 4  # in a sequence of ordinary tokens
_MORE = 1.5  # equations for each unknown of the last fit
_UNKNOWNS = (
    8192  # that are fitted at once; models with more stay as far tokens show them
)
_EXACT = 1e-7  # the relative residual that the last fit may leave


@dataclass(frozen=True)
class AttentionLayers(Method):
    """Exact extraction of layers of attention that return vectors: two or more, or one."""

    seed: int = 0
    tolerance: float = 1e-8

    def steps(self, oracle: Oracle) -> Iterator[Step]:
        stream = random_stream(self.seed)
        far = _Far.open(oracle, stream)
        W, V, length = _heads(far, stream)
        model = _polished(far, _assigned(far, W, V, length, stream), length, stream)
        numbers = model.unknowns if far.every_token else far.dim
        words = " and ".join(str(size) for size in model.sizes)
        remark = f"{len(model.sizes)} layers of {words} heads"
        yield Step(
            model, model.unknowns, model.unknowns, numbers=numbers, remark=remark
        )


@dataclass(frozen=True)
class _Far:
    """The target, asked with long tokens: Σ_h f(x W̃_h δ)·u_h, f a shifted logistic or exp."""

    oracle: Oracle
    P: Tensor
    every_token: bool
    causal: bool
    error: float  # of answers, relative

    @property
    def dim(self) -> int:
        return self.oracle.dim

    @classmethod
    def open(cls, oracle: Oracle, stream: torch.Generator) -> _Far:
        """Read P from single tokens, and find out whether the mask is causal.

        With a causal mask the first token attends to itself alone, and exchanging the
        first two tokens changes the last one's answer.
        """
        d = oracle.dim
        basis = random_orthogonal(d, stream)
        tokens = torch.cat([basis, basis.sum(0, keepdim=True)])
        answers = ask(oracle, tokens[:, None])
        expect_vectors(answers, d)
        every_token = answers.ndim == 3
        y = answers[:, -1] if every_token else answers
        nonlinear = float((y[:-1].sum(0) - y[-1]).abs().max() / y.abs().max())
        if not nonlinear <= _COARSE:
            raise not_applicable(
                "answers to single tokens are not linear: there is more than attention"
            )
        error = max(4 * nonlinear, 2.0**-52)
        P = basis.mT @ y[:-1]
        three = normal(stream, 3, d) / math.sqrt(d)
        both = ask(oracle, torch.stack([three, three[[1, 0, 2]]]))
        difference = both[0, 0] - three[0] @ P if every_token else both[0] - both[1]
        allowed = max(_SAME, 16 * error) * max_abs(both)
        equal = max_abs(difference) <= allowed
        return cls(oracle, P, every_token, equal == every_token, error)

    def __call__(self, x: Tensor, delta: Tensor) -> Tensor:
        """Return Σ_h f(x_i W̃_h δ)·δṼ_h, (N, d).

        Without a mask, ½Σ_h δṼ_h = ½(δP − δ) is subtracted: f = ½tanh(z/2) has rank H
        at any scale.
        """
        scale = min(_FAR, self.error**-0.25)
        far = scale * x
        near = delta / scale
        if not self.causal:
            y = last(self.oracle, torch.stack([far + near, far], 1)) - far @ self.P
            return scale * (y - 0.5 * (near @ self.P - near))
        rows: list[Tensor] = []
        for copies in _COPIES:
            tokens = far[:, None].repeat(1, copies + 1, 1)
            tokens[:, -1] += near
            y = last(self.oracle, tokens) - far @ self.P - near
            rows.append(scale * copies * y)
        while len(rows) > 1:  # Neville's scheme in 1/m, which halves from row to row
            step = 2.0 ** (len(_COPIES) - len(rows) + 1)
            rows = [(step * b - a) / (step - 1) for a, b in itertools.pairwise(rows)]
        return rows[0]

    def gates(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Return f and its slope."""
        if self.causal:
            return z.exp(), z.exp()
        tanh = torch.tanh(z / 2)
        return tanh / 2, (1 - tanh.square()) / 4


def _heads(far: _Far, stream: torch.Generator) -> tuple[Tensor, Tensor, float]:
    """Return W̃ and Ṽ (with a causal mask V) of all heads, (H, d, d), and the length of tokens."""
    d = far.dim
    for share in _LENGTHS:
        x = normal(stream, 3 * d + 16, d) / math.sqrt(d)
        basis = random_orthogonal(d, stream)
        length = share * _fitting_length(far, x[:8], basis[0])
        x = length * x
        first = length * basis[0]
        found = find_network(far.gates, x, far(x, first), stream)
        if found is not None:
            break
    else:
        raise _unread(
            "no network of as many heads as there seem to be explains the answers"
        )
    g, u = found
    if not far.causal:
        # −g and −u fit as well as g and u: choose the signs with Σ_h u_h = δP − δ.
        total = first @ far.P - first
        signs = tensor(list(itertools.product((1.0, -1.0), repeat=len(u))))
        best = signs[lengths(signs @ u - total).argmin(), :, None]
        g = best * g
        u = best * u
    x = x[: d + 2 * len(u) + 4]  # a few more than unknowns of each head
    for share in _NEAR:
        followed = _followed(far, x, (first, g, u), share * length * basis)
        if followed is not None:
            return *followed, length
    raise _unread("heads could not be followed from one token to others")


def _followed(
    far: _Far,
    x: Tensor,
    known: tuple[Tensor, Tensor, Tensor],
    steps: Tensor,
) -> tuple[Tensor, Tensor] | None:
    """Return W̃ and Ṽ from g and u at d orthogonal steps from δ_0; `known` are δ_0 and its g and u.

    Return None if a fit fails or has exchanged two heads, which the sum of all steps
    shows.
    """
    first, g, u = known
    W, V = zeros(2, len(u), far.dim, far.dim)
    for step in steps:
        near, value, explained = fit_network(far.gates, x, far(x, first + step), g)
        if not explained:
            return None
        inverse = step / step.square().sum()
        W += (near - g)[..., None] * inverse
        V += inverse[:, None] * (value - u)[:, None]
    other = first + steps.sum(0) / math.sqrt(far.dim)
    wanted = far(x, other)
    gates = far.gates(x @ (W @ other).mT)[0]
    left = float((gates @ (other @ V) - wanted).norm() / wanted.norm())
    return (W, V) if left <= _TOGETHER else None


def _fitting_length(
    far: _Far,
    x: Tensor,
    delta: Tensor,
) -> float:
    """Return the length of x and δ at which f is neither linear nor saturated."""
    length = 1.0
    for _ in range(_SCALES):
        points = length * torch.cat([0 * x[:1], x / 2, x])
        none, half, full = far(points, length * delta).split([1, len(x), len(x)])
        bend = abs(float((half - none).norm() / (full - none).norm()) - 0.5)
        if not bend <= _BENT[1]:
            length /= 1.5
        elif bend < _BENT[0]:
            length *= 1.25 if bend > 0.01 else 2
        else:
            return length
    raise Unsuccessful(
        Status.SATURATED, "answers are linear or saturated at every scale tried"
    )


Gates = Callable[[Tensor], tuple[Tensor, Tensor]]  # f and its slope


def find_network(
    gates: Gates,
    x: Tensor,
    wanted: Tensor,
    stream: torch.Generator,
) -> tuple[Tensor, Tensor] | None:
    """Return g (H, d) and u (H, d) with `wanted = Σ_h f(x g_h)·u_h`, or None; H is its rank."""
    sizes = torch.linalg.svdvals(wanted)
    after = torch.cat([sizes[1:], sizes[-1:]])
    ratios = sizes / after.clamp(min=1e-16 * float(sizes[0]))
    heads = int(ratios.argmax()) + 1
    if not ratios.max() > _CLEAR:
        raise not_applicable(
            f"the layers have {len(sizes)} heads or more in all: an answer has too few numbers"
        )
    for _ in range(_STARTS):
        g = normal(stream, heads, x.shape[1]) / lengths(x).mean()
        g, u, explained = fit_network(gates, x, wanted, g)
        if explained:
            return g, u
    return None


def fit_network(
    gates: Gates,
    x: Tensor,
    wanted: Tensor,
    g: Tensor,
) -> tuple[Tensor, Tensor, bool]:
    """Return g and u by least squares, starting from g, and whether they fit."""
    heads, d = g.shape
    _, sizes, frame = thin_svd(wanted)
    # the u are in the span of `frame`
    frame = frame[:heads]
    size = float(sizes.norm())
    allowed = max(_FITTED, _LEFT * float(sizes[heads:].norm()) / size)
    inside = wanted @ frame.mT / size

    def misses(point: Tensor) -> tuple[Tensor, Tensor]:
        g, u = point.view(heads, -1).split([d, heads], 1)
        value, slopes = gates(x @ g.mT)
        by_g = torch.einsum("nh,hm,nd->nmhd", slopes, u, x)
        by_u = torch.einsum("nh,mk->nmhk", value, identity(heads))
        by_both = torch.cat([by_g, by_u], 3).flatten(2).flatten(0, 1)
        return (value @ u - inside).flatten(), by_both

    start = torch.cat([g, least_squares(gates(x @ g.mT)[0], inside)], 1)
    point, left = levenberg(misses, start.flatten())
    g, u = point.view(heads, -1).split([d, heads], 1)
    return g, size * u @ frame, left <= allowed


def _assigned(
    far: _Far,
    W: Tensor,
    V: Tensor,
    length: float,
    stream: torch.Generator,
) -> planted.AttentionLayers:
    """Return the assignment of heads to layers that best explains answers to ordinary tokens."""
    tokens = _ordinary(_PROBES, far.dim, length, stream)
    wanted = last(far.oracle, tokens)
    best = None
    least = math.inf
    for depth in range(1, len(W) + 1):
        if depth ** len(W) > _MOST or least <= _CLOSE * float(wanted.norm()):
            break
        for layers in itertools.product(range(depth), repeat=len(W)):
            if len(set(layers)) == depth:
                model = _in_layers(far, W, V, tensor(layers))
                off = float((last(model, tokens) - wanted).norm())
                if off < least:
                    best = model
                    least = off
    if best is None:
        raise _unread("no assignment of the heads to layers gives finite answers")
    return best


def _in_layers(
    far: _Far,
    W: Tensor,
    V: Tensor,
    layers: Tensor,
) -> planted.AttentionLayers:
    """Return the layers, with V of their heads from Ṽ, the last layer first, and then W from W̃."""
    layers, order = layers.sort(stable=True)
    sizes = layers.unique_consecutive(return_counts=True)[1].tolist()
    values = list(V[order].split(sizes))
    behind = identity(far.dim)
    if not far.causal:
        for depth in reversed(range(len(sizes))):
            values[depth] = values[depth] @ torch.linalg.inv(behind)
            behind = behind + values[depth].sum(0) @ behind
    forms: list[Tensor] = []
    front = identity(far.dim)
    for form, value in zip(W[order].split(sizes), values, strict=True):
        forms.append(torch.linalg.solve(front, form))
        front = front + front @ value.sum(0)
    return planted.AttentionLayers(
        torch.cat(forms),
        torch.cat(values),
        layers,
        every_token=far.every_token,
        causal=far.causal,
    )


def _polished(
    far: _Far,
    model: planted.AttentionLayers,
    length: float,
    stream: torch.Generator,
) -> planted.AttentionLayers:
    """Fit all numbers at once to answers for ordinary tokens, which have lost no digits."""
    if model.unknowns > _UNKNOWNS:
        return model
    # An answer gives so many equations, and depends on so many free scores of each
    # head.
    numbers = model.dim
    scores = _TOKENS - 1
    if model.every_token:
        numbers = _TOKENS * numbers
        scores = scores * (_TOKENS // 2 if model.causal else _TOKENS)
    count = math.ceil(_MORE * max(model.unknowns / numbers, model.dim**2 / scores)) + 16
    tokens = _ordinary(count, model.dim, length, stream)
    y = ask(far.oracle, tokens)
    model = refined(model, ("W", "V"), [(tokens, y, torch.ones_like(y))])
    left = float((model(tokens) - y).norm() / y.norm())
    if not left <= max(_EXACT, 4 * far.error):
        raise _unread(
            f"layers of {model.sizes} heads leave {left:.0e} of the answers unexplained"
        )
    return model


def _ordinary(
    count: int,
    d: int,
    length: float,
    stream: torch.Generator,
) -> Tensor:
    """Draw sequences of tokens of about this length, and of half of it."""
    tokens = normal(stream, count, _TOKENS, d)
    tokens[::2] /= 2
    return length / math.sqrt(d) * tokens


def _unread(why: str) -> Unsuccessful:
    return not_applicable(f"not read as layers of attention alone: {why}")
