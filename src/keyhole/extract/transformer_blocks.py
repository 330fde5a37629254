"""Stacked Transformer blocks, with norms in front of their parts (ours).

For blocks l = 1 … L of oracle/block.py, each with heads, units and biases b_l and c_l
of its own,

    h = x + b_l + Attention_l(N(x)),    x ← h + F_l(N(h)),    F_l(u) = C_l·f(u) + c_l

let u be tokens of length √d, which N leaves unchanged up to its ε.

**Theorem (depth is invisible from afar).** The last of the tokens Λu_1, …, Λu_n answers

    Λu_n + Σ_h Σ_j a_hj·u_j M_h + Σ_l b_l + Σ_l F_l(u_n) + O(1/Λ),    M_h = V_h O_h

with the weights a_h that heads have for u_1, …, u_n: one block with the heads and units
of all. *Proof.* What a block adds to Λu_j is bounded, so every norm returns u_j +
O(1/Λ), masked or not.

So the units of all blocks are read like those of one (blocks/pre_norm.py), and pairs of
tokens show the heads of all:

    y([Λ(u+δ) ; Λu]) − y([Λu]) → Σ_h σ(u·g_h)·δM_h,    g_h = B_h δ − 2(r_h·δ)/|δ|²·δ

with B_h = Q_h K_hᵀ and r_h = K_h q_h. As u + δ is as long as u, u·δ = −|δ|²/2. For each
δ this is a network of H units, one for each head; its g_h are linear in B_h and r_h,
which are solved for from many δ. Σ_h M_h tells the signs of the feed-forward units
(block.py).

**Theorem (blocks are identifiable).** In general position the term of order 1/Λ of
single tokens shows the block of every unit and head, and all biases
(docs/mathematics.md): a unit of block l has N(h) moved by u·Σ M_h over the heads up to
block l, by biases, and by the units of earlier blocks.

Blocks are found by least squares on tokens of ordinary length: every unit and head is
in all blocks at once, with unknown shares that add up to 1. They converge to 0 or 1;
then all numbers are fitted together. The number of blocks is the smallest that explains
the answers.

Limits. The units of all blocks together are as many as block.py reads: about d²/2, half
as many with gates. There must be fewer than d heads in all, since a rank shows their
number. No positions. Norms behind sums and blocks without norms are refused: the
theorem does not hold for them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import normalize

from keyhole.core import Unsuccessful, not_applicable
from keyhole.core.float64 import Stream, identity, normal, random_stream, uniform, zeros
from keyhole.core.numerics import least_squares
from keyhole.core.text import number
from keyhole.extract.attention_layers import find_network, fit_network
from keyhole.extract.bilinear import max_abs, random_units
from keyhole.extract.block import explain_precision_failure, factored
from keyhole.extract.blocks.heads import attempted
from keyhole.extract.blocks.pre_norm import far_units
from keyhole.extract.blocks.units import Units
from keyhole.extract.blocks.view import FAR, View, last
from keyhole.extract.extraction import Step
from keyhole.extract.gauss_newton import refined
from keyhole.extract.judge import Method
from keyhole.oracle.block import Blocks
from keyhole.oracle.planted import Parametric
from keyhole.oracle.protocol import Oracle, ask

_ATTEMPTS = 3  # to find the units
# of δ, relative to √d: the next one if heads are not found
_LENGTHS = (1.0, 0.7, 1.3, 0.5)
_NEAR = (0.3, 0.1)  # how far the next δ are from the first, relative to its length
_RANK = 1e-3  # the least singular value that counts, relative to the largest
# lengths of single tokens that show which block a unit is in
_SHORTER = (64.0, 16.0, 4.0)
_DEEPEST = 3  # the most blocks that are tried
_STARTS = 3  # starts of the shares: equal ones, then random ones
# the share of y − x that may be unexplained before all numbers are fitted
_CLOSE = 1e-3
_WHOLE = 0.1  # how far from 0 or 1 a share may be
_ANSWERS = 1.5  # answers for each unknown
_TOKENS = 4  # of a sequence in the last fit
_MAX_RESIDUAL = 1e-7  # the share of the answers that may be unexplained in the end


@dataclass(frozen=True)
class TransformerBlocks(Method):
    """Exact extraction of stacked blocks that return vectors."""

    seed: int = 0
    tolerance: float = 1e-8

    @explain_precision_failure
    def steps(self, oracle: Oracle) -> Iterator[Step]:
        stream = random_stream(self.seed)
        view = View.open(oracle, stream)
        if view.norm not in ("rms", "layer"):
            raise _refusal(
                "there are no norms in front of attention and feed-forward layers"
            )
        if view.scores:
            raise _refusal("the answers are numbers, and not vectors")
        units, linear = attempted(lambda: far_units(view, stream), _ATTEMPTS)
        heads = _read_heads(view, stream)
        flips = units.flips(linear[:-1] - heads.M.sum(0))
        if flips is None:
            raise _refusal("heads and units do not add up to what single tokens answer")
        model = _assigned(view, units.flipped(flips), heads, stream)
        model = _polished(view, model, stream)
        yield Step(
            model,
            model.unknowns,
            model.unknowns,
            numbers=view.dim,
            remark=_described(model),
        )


@dataclass(frozen=True)
class _Heads:
    """`B` (H, e, e), `r` (H, e) and `M` (H, e, d) of all heads, in the view's e coordinates."""

    B: Tensor
    r: Tensor
    M: Tensor

    def g(self, delta: Tensor) -> Tensor:
        """Return g_h (H, e) of all heads at δ."""
        across = self.r @ delta / delta.square().sum()
        return self.B @ delta - 2 * across[:, None] * delta

    @classmethod
    def of(
        cls,
        deltas: Tensor,
        g: Tensor,
        moved: Tensor,
    ) -> _Heads:
        """Return the heads, given g_h (n, H, e) and δM_h (n, H, d) at δ (n, e) of one length."""
        n, e = deltas.shape
        square = deltas[0].square().sum()
        of_B = torch.einsum("ab,nc->nabc", identity(e), deltas).reshape(n * e, e * e)
        of_r = -2 * torch.einsum("na,nb->nab", deltas, deltas) / square
        system = torch.cat([of_B, of_r.reshape(n * e, e)], 1)
        solved = least_squares(system, g.transpose(1, 2).reshape(n * e, -1))
        B = solved[: e * e].mT.unflatten(1, (e, e))
        M = least_squares(deltas, moved.flatten(1)).unflatten(1, moved.shape[1:])
        return cls(B, solved[e * e :].mT, M.transpose(0, 1))


def _sigmoid(z: Tensor) -> tuple[Tensor, Tensor]:
    """Return σ(z) and its derivative."""
    value = torch.sigmoid(z)
    return value, value * (1 - value)


@dataclass(frozen=True)
class _Pairs:
    """Pairs [Λ(u+δ) ; Λu] for many u, with δ of one length."""

    view: View
    directions: Tensor  # (N, e) of u, before `points` makes them fit a δ

    def points(self, delta: Tensor) -> Tensor:
        """Return tokens u of length √d with u + δ of the same length."""
        along = normalize(delta, dim=0)
        across = self.directions - (self.directions @ along)[:, None] * along
        length = math.sqrt(self.view.dim - float(delta.square().sum()) / 4)
        return length * normalize(across, dim=1) - delta / 2

    def answers(self, delta: Tensor) -> tuple[Tensor, Tensor]:
        """Return the points u, and what the pairs add to y([Λu]): Σ_h σ(u·g_h)·δM_h."""
        u = self.points(delta)
        far, other = (FAR * each @ self.view.axes.mT for each in (u, u + delta))
        y = last(self.view.oracle, torch.stack([other, far], 1)) - self.view.ask(far)
        return u, y


def _read_heads(view: View, stream: Stream) -> _Heads:
    """Return all heads, from the networks of many δ.

    The network of the first δ is searched for. Those of δ near it are fitted from
    there, so that heads keep their order; they give B and r, from which the networks of
    all other δ are fitted.
    """
    e = view.axes.shape[1]
    for share in _LENGTHS:
        length = share * math.sqrt(view.dim)
        pairs = _Pairs(view, random_units(3 * e + 16, e, stream))
        first = length * random_units(1, e, stream)[0]
        found = find_network(_sigmoid, *pairs.answers(first), stream)
        if found is None:
            continue
        g, _ = found
        fewer = replace(pairs, directions=pairs.directions[: e + 2 * len(g) + 8])
        for near in _NEAR:
            aside = near * random_units(e + 3, e, stream)
            deltas = length * normalize(first / length + aside, dim=1)
            heads = _fitted_heads(fewer, deltas, g.expand(len(deltas), -1, -1))
            if heads is None:
                continue
            deltas = length * random_units(e + 6, e, stream)
            starts = torch.stack([heads.g(each) for each in deltas])
            heads = _fitted_heads(fewer, deltas, starts)
            if heads is not None:
                return heads
    raise _refusal(
        "no network of as many heads as there seem to be explains the answers"
    )


def _fitted_heads(
    pairs: _Pairs,
    deltas: Tensor,
    starts: Tensor,
) -> _Heads | None:
    """Return the heads from g_h that are fitted at each δ, given starts; None if a fit fails."""
    g: list[Tensor] = []
    moved: list[Tensor] = []
    for delta, start in zip(deltas, starts, strict=True):
        u, y = pairs.answers(delta)
        here, moved_here, explained = fit_network(_sigmoid, u, y, start)
        if not explained:
            return None
        g.append(here)
        moved.append(moved_here)
    return _Heads.of(deltas, torch.stack(g), torch.stack(moved))


@dataclass(frozen=True, eq=False)
class _Shares(Parametric):
    """Answers to single tokens, with a share of each unit and head in every block.

    The shares of a unit or head add up to 1; those in all blocks but the last are
    parameters.
    """

    view: View
    known: Units
    M: Tensor
    of_heads: Tensor  # (L − 1, H)
    of_units: Tensor  # (L − 1, width)
    b: Tensor  # (L, d)
    c: Tensor
    kind = "shares"

    def tensors(self) -> dict[str, Tensor]:
        names = ("of_heads", "of_units", "b", "c")
        return {name: getattr(self, name) for name in names}

    @property
    def shares(self) -> tuple[Tensor, Tensor]:
        """The shares of the heads (L, H) and of the units (L, width)."""
        heads, units = (
            torch.cat([part, 1 - part.sum(0, keepdim=True)])
            for part in (self.of_heads, self.of_units)
        )
        return heads, units

    @property
    def are_whole(self) -> bool:
        """Whether each head and unit is in one block, and no block is empty."""
        return all(
            max_abs(each - each.round()) <= _WHOLE and bool(each.round().any(1).all())
            for each in self.shares
        )

    def blocks(self, heads: _Heads) -> Blocks:
        """Return the blocks, with each head and unit in its own; the widths of heads are ranks."""
        (of_heads, by_head), (of_units, by_unit) = (
            each.argmax(0).sort(stable=True) for each in self.shares
        )
        view = self.view
        lift = view.axes
        B = torch.cat([heads.B, heads.r[:, None]], 1)
        scores, keys = factored(B[by_head], _RANK)
        mixed, out = factored(heads.M[by_head], _RANK)
        units = self.known
        gated = by_unit[: len(units.G)]  # all of them or none
        parts = {
            "Q": lift @ scores[:, :-1],
            "q": scores[:, -1],
            "K": lift @ keys,
            "V": lift @ mixed,
            "O": out.mT,
            "A": units.A[by_unit] @ lift.mT,
            "a": units.a[by_unit],
            "G": units.G[gated] @ lift.mT,
            "g": units.g[gated],
            "C": units.C[:, by_unit],
            "b": self.b,
            "c": self.c,
            "epsilon": zeros(len(self.b), 2),
            "heads": of_heads.double(),
            "units": of_units.double(),
        }
        return Blocks(
            **{name: part.contiguous() for name, part in parts.items()},
            activation=units.activation,
            norm=view.norm,
            every_token=view.every_token,
            causal=view.causal,
        )

    def answers(self, tokens: Tensor) -> Tensor:
        x = tokens[:, -1]
        for heads, units, b, c in zip(*self.shares, self.b, self.c, strict=True):
            M = torch.einsum("h,hed->ed", heads, self.M)
            x = x + self.view.normed(x, 0.0) @ M + b
            features = units * self.known.features(self.view.normed(x, 0.0))
            x = x + features @ self.known.C.mT + c
        return x


def _assigned(
    view: View,
    units: Units,
    heads: _Heads,
    stream: Stream,
) -> Blocks:
    """Return the fewest blocks of these heads and units that explain answers to single tokens."""
    width = len(units.A)
    count = len(heads.M)
    unknowns = (_DEEPEST - 1) * (count + width) + 2 * _DEEPEST * view.dim
    per_length = math.ceil(_ANSWERS * unknowns / view.dim) + 8
    samples: list[tuple[Tensor, Tensor]] = []
    for length in _SHORTER:
        tokens = view.tokens(per_length, length, stream)
        samples.append((tokens[:, None], view.ask(tokens)))
    residual = math.inf
    for depth in range(1, _DEEPEST + 1):
        bias = zeros(depth, view.dim)
        for start in range(_STARTS if depth > 1 else 1):
            sizes = uniform(stream, depth, count + width)
            if start == 0:
                sizes = torch.ones_like(sizes)
            of_heads, of_units = (sizes / sizes.sum(0))[:-1].split([count, width], 1)
            model = _Shares(view, units, heads.M, of_heads, of_units, bias, bias)
            for tokens, y in samples:
                answers = [(tokens, y, torch.ones_like(y))]
                model = refined(model, tuple(model.tensors()), answers)
                change = (y - tokens[:, 0]).norm()
                residual = float((model.answers(tokens) - y).norm() / change)
            if residual <= _CLOSE and model.are_whole:
                return model.blocks(heads)
    raise _refusal(
        f"{count} heads and {width} units in up to {_DEEPEST} blocks leave {residual:.0e} of what "
        "ordinary tokens answer"
    )


def _polished(
    view: View,
    model: Blocks,
    stream: Stream,
) -> Blocks:
    """Fit all numbers at once, by least squares: long tokens have lost half of the digits."""
    free = [name for name in model.NUMBERS if getattr(model, name).numel()]
    unknowns = sum(getattr(model, name).numel() for name in free)
    d = view.dim
    count = math.ceil(_ANSWERS * max(unknowns / d, d**2 / (_TOKENS - 1))) + 16
    tokens = normal(stream, count, _TOKENS, d)
    tokens[::2] /= 4  # short ones show every ε
    y = ask(view.oracle, tokens)
    model = refined(model, free, [(tokens, y, torch.ones_like(y))])
    residual = float((model(tokens) - y).norm() / y.norm())
    if not residual <= _MAX_RESIDUAL:
        raise _refusal(
            f"{_described(model)} leave {residual:.0e} of the answers unexplained"
        )
    return replace(model, epsilon=model.epsilon.clamp(min=0.0))


def _described(model: Blocks) -> str:
    """Return the parts of each block, in words."""

    kind = f"gated {model.activation}" if len(model.G) else model.activation
    parts: list[str] = []
    for block in model.blocks:
        heads = number(len(block.Q), "head", "heads")
        units = number(len(block.A), f"{kind} unit", f"{kind} units")
        parts.append(f"{heads} and {units}")
    return number(len(parts), "block", "blocks") + ": " + ", then ".join(parts)


def _refusal(why: str) -> Unsuccessful:
    return not_applicable(f"not read as stacked blocks: {why}")
