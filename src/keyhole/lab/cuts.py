"""What cuts do: each unit alone, exactly; k units together, within a bound.

Every unit is cut alone, in at most `layers·heads·n²` passes: a cut leaves the layers below as they
were, so each pass starts at its layer. For k = 1 that is the answer. For larger k, let δ_u be how
far the states of a pass move when unit u alone is cut, which is then known exactly. With the units
C cut they move by `Δ = Σ_C λ_u δ_u + E`, 1 ≤ λ_u ≤ Λ_u, and E is of second order. At every stage f
(attention, norm, feed-forward, norm, pooler) with Jacobian J

    f(x̄+Δ) − f(x̄) − Σ_C λ_u (f(x̄+δ_u) − f(x̄)) = J E + Pairs
    |Pairs| ≤ sup|f''|·(Σ_{u<v} |λ_u δ_u||λ_v δ_v| + Σ_u ½λ_u(λ_u − 1)|δ_u|²)

because `f(x+a+b) − f(x+a) − f(x+b) + f(x) = ∫∫ f''(x+sa+tb)[a, b] ds dt`; E counts as one more unit
here, and is itself a sum of shares of the units. The gradient g of the margin m obeys
`g_before = Jᵀ g_after`, so the sum telescopes:

    m(C) − m(∅) − Σ_C λ_u (m(u) − m(∅)) = Σ_stages g·Pairs + Σ_layers g·(D(x, C) − Σ_C λ_u D(x̄, u))

with D what a cut adds to its row. No product of Lipschitz constants weighs any of it; the size of E
(`E' ≤ ‖J‖E + |Pairs|`, written_out.py) enters where it meets the moves. What f'' is at most:

- **Norm**: with ĉ the direction of the centred row and a_⊥ what of a is across it,
  `√d σ² N''[a, b] = −a_⊥(b·ĉ) − b_⊥(a·ĉ) − ĉ(a_⊥·b_⊥)`, of norm √(4/3)|a||b| at most, with γg
  at most `|Pγg| + |γg·ĉ|`, P the centring. σ ≥ σ̄(1−ω) within ω = |Δ|/(√d σ̄).
- **Feed-forward, pooler**: `Σ_m w_m |Δ_m||Δ'_m| ≤ q q'`, q² = Σ_m w_m Δ_m² over hidden units m, w_m
  the slope behind m times the largest second derivative.
- **Attention**: scores of a row change by θ, their range by 2T at most, so that probabilities
  change by factors within e^±2T. With t² the variance of θ, s² = Σ_j a_j r_j², W = max_j
  |G·(v_j−o)| and W₂ its root mean square, e^2T times
  `(W + W̄) t t' + |VᵀG|(t s' + t' s) + γW₂(r_i s' + r'_i s)`, with how far the row's mean
  has moved, W̄ = (e^2T−1)W₂ + e^2T|VᵀG|Σ a_j r_j.
- **D**: keys S of a row together give `Σ_{j∈S} a_j (o − v_j)/(1 − a(S))`: each what it gives alone
  times λ_j, `Λ_j = (1−a_j)/(1−a_j−(k−1 largest others))`. In a row that cuts below have changed,
  odds have changed by factors within e^±2T, and values and output by what moves them.

A sum over pairs is at most `Σ_u ½|δ_u|·(the k−1 largest)`, so every unit has a cost of its own, and
the k largest bound what any k units do.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from keyhole.lab.written_out import Classifier, Sizes, Slopes, Trace

_NUMBERS = 4_000_000  # of the largest tensor of one batch of passes
_MOST, _MOST_SCORE = 0.7, 3.0  # of ω and T: beyond, a bound of second order says nothing


@dataclass(frozen=True, eq=False)
class Moves:
    """How far one layer's stages move, for each unit of this layer and those below.

    `x`, `y`, `z` (units, n) are norms per token; `t` and `T` (units, heads, n) the root mean
    square (weighed with a) and half the range of a row's change of scores; `fed` (units, n) the
    root of Σ_m weight_m·(change of hidden unit m)², with the weights of the margin, and `wide` with
    those of the norm.
    """

    x: Tensor
    t: Tensor
    T: Tensor
    y: Tensor
    fed: Tensor
    wide: Tensor
    z: Tensor

    def of(self, units: Tensor) -> Moves:
        """Those of some of the units."""
        return Moves(*(getattr(self, name)[units] for name in self.__dataclass_fields__))

    def scaled(self, factor: Tensor) -> Moves:
        """Each unit's moves, (units,) times as far."""
        parts = (getattr(self, name) for name in self.__dataclass_fields__)
        return Moves(*(part * factor.view(-1, *[1] * (part.ndim - 1)) for part in parts))

    @classmethod
    def none(cls, heads: int, n: int, like: Tensor) -> Moves:
        """Of a layer below all cuts."""
        token, score = like.new_zeros(0, n), like.new_zeros(0, heads, n)
        return cls(token, score, score, token, token, token, token)


@dataclass(frozen=True, eq=False)
class SingleCuts:
    """`margins` (units, classes) of the label over each class; `moves` layer by layer.

    Units stand as `free.nonzero()` lists them; `last` (units,) is the pooler's root, as `fed`.
    """

    margins: Tensor
    moves: list[Moves]
    last: Tensor

    def of_layer(self, number: int, free: Tensor) -> SingleCuts:
        """Those of one layer's units."""
        layers = free.nonzero()[:, 0]
        moves = [move.of(layers[: len(move.x)] == number) for move in self.moves]
        chosen = layers == number
        return SingleCuts(self.margins[chosen], moves, self.last[chosen])


def cut_each(
    classifier: Classifier, traces: list[Trace], slopes: list[Slopes], pooled: Tensor,
    free: Tensor, label: int,
) -> SingleCuts:  # fmt: skip
    """`pooled` weighs the bends of the pooler's units."""
    layers = len(traces)
    parts: list[list[Moves]] = [[] for _ in range(layers)]
    margins: list[Tensor] = []
    last: list[Tensor] = []
    for start, cut in _batches(free):
        logits, passed = classifier.passed(traces[start].x, cut, start)
        margins.append(logits[:, label, None] - logits)
        for offset, trace in enumerate(passed):
            number = start + offset
            weights = slopes[number].feed, classifier.layers[number].feed_weights
            parts[number].append(_moves(trace, traces[number], weights, own=offset == 0))
        change = (passed[-1].out - traces[-1].out)[:, 0] @ classifier.pooler[0].mT
        last.append((pooled * change.square()).sum(-1).sqrt())
    empty = Moves.none(free.shape[1], free.shape[2], traces[0].x)
    moves = [_joined(part) if part else empty for part in parts]
    return SingleCuts(torch.cat(margins), moves, torch.cat(last))


def _batches(free: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Masks (m, heads, n, n) of single units, with their layer."""
    _, heads, n, _ = free.shape
    size = max(1, _NUMBERS // (heads * n * n + 1024 * n))
    for number, allowed in enumerate(free):
        for units in allowed.nonzero().split(size):
            cut = torch.zeros(len(units), heads, n, n, dtype=torch.bool, device=free.device)
            cut[torch.arange(len(units)), units[:, 0], units[:, 1], units[:, 2]] = True
            yield number, cut


def _moves(trace: Trace, clean: Trace, weights: tuple[Tensor, Tensor], own: bool) -> Moves:
    """Of one batch; `own` where the cut was made in this layer, whose scores have not changed."""
    wide = (trace.wide - clean.wide).square()
    fed, norm = ((weight * wide).sum(-1).sqrt() for weight in weights)
    if own:
        t = T = trace.s.new_zeros(trace.s.shape[:-1])
    else:
        change = trace.s - clean.s
        centred = change - (clean.a * change).sum(-1, keepdim=True)
        t = (clean.a * centred.square()).sum(-1).sqrt()
        T = (change.amax(-1) - change.amin(-1)) / 2
    return Moves(
        x=(trace.x - clean.x).norm(dim=-1), t=t, T=T, y=(trace.y - clean.y).norm(dim=-1),
        fed=fed, wide=norm, z=(trace.z - clean.z).norm(dim=-1),
    )  # fmt: skip


def _joined(parts: list[Moves]) -> Moves:
    names = Moves.__dataclass_fields__
    return Moves(*(torch.cat([getattr(part, name) for part in parts]) for name in names))


class Unbounded(Exception):
    """A change too large for a bound of second order."""


def interplay(
    layers: list[Sizes],
    slopes: list[Slopes],
    alone: SingleCuts,
    pooled: Tensor,
    free: Tensor,
    k: int,
) -> tuple[Tensor, Tensor]:
    """Costs (units,) and Λ with `m(C) ≥ m(∅) − Σ_C (Λ_u (m(∅) − m(u))⁺ + cost_u)` for |C| ≤ k.

    Units stand as `free.nonzero()` lists them; `pooled` is what a move of 1 of the first token
    makes of the pooler's root.
    """
    sweep = _Sweep(k, free)
    for number, (size, slope) in enumerate(zip(layers, slopes, strict=True)):
        sweep.layer(size, slope, alone.moves[number], free[number])
    last = sweep.pairs(sweep.more * alone.last, pooled * sweep.E[:, 0])
    return sweep.cost + last, sweep.more


class _Sweep:
    """From layer to layer: each unit's share of E (units, n), and what it costs."""

    def __init__(self, k: int, free: Tensor) -> None:
        self.k, n = k, free.shape[-1]
        self.cost = torch.zeros(0, dtype=torch.float64, device=free.device)
        self.E, self.more = self.cost.view(0, n), self.cost

    def most(self, values: Tensor, count: int | None = None) -> Tensor:
        """What any k units add up to at most, of values (units, …)."""
        count = min(self.k if count is None else count, len(values))
        return values.topk(count, 0).values.sum(0) if count else values.new_zeros(values.shape[1:])

    def others(self, values: Tensor) -> Tensor:
        """What k−1 units add up to at most."""
        return self.most(values, self.k - 1)

    def pairs(self, move: Tensor, E: Tensor) -> Tensor:
        """Each unit's share of the sum over pairs of moves, of moves and E, and half E's square.

        A move is Λ times as far as when its unit is cut alone, which is a pair with itself.
        """
        own = move * self._bowed(move)
        return (move * self.others(move) + own) / 2 + E * (
            move + self.others(move) + (E + self.others(E)) / 2
        )

    def products(self, t: Tensor, tE: Tensor, s: Tensor, sE: Tensor) -> Tensor:
        """The same where two different sizes of the moves are multiplied, both ways."""
        first = t * (self.others(s) + self._bowed(s)) + tE * (s + self.others(s))
        return first + sE * (t + self.others(t)) + tE * (sE + self.others(sE))

    def _bowed(self, move: Tensor) -> Tensor:
        """(1 − 1/Λ)·move: of a move Λ times as far, what is not Λ times the same."""
        return move * (1 - 1 / self.more).view(-1, *[1] * (move.ndim - 1))

    def layer(self, size: Sizes, slope: Slopes, move: Moves, free: Tensor) -> None:
        new = int(free.sum())  # units of this layer, which nothing has moved so far
        if not new and not len(self.E):
            return
        self.more = torch.cat([self.more, _renormalised(size.a, free, self.k)[free]])
        if not bool(self.more.isfinite().all()):
            raise Unbounded
        move = move.scaled(self.more)
        self.E = torch.cat([self.E, self.E.new_zeros(new, self.E.shape[1])])
        changed = _Changed(self, size, move)
        cut = _Cut(size, slope, free, changed, self.more[len(self.more) - new :])
        moved = changed.moved.clone()
        moved[len(moved) - new :] += cut.at_row()
        move = replace(move, y=move.y * size.seen, z=move.z * size.seen)
        Ey = self.E @ size.attention.mT + moved
        Ry = self.most(move.y + Ey)
        Py = self.pairs(move.y, Ey)
        first = _bend(None, size, 0, Ry) * Py
        Eu = size.first * Ey + first
        fed = self.pairs(move.wide, size.bend * Eu)
        Ez = size.feed_norm * Ey + size.feed * first + fed
        Rz = self.most(move.z + Ez)
        Pz = self.pairs(move.z, Ez)
        cost = changed.cost(slope) + (
            _bend(slope.first, size, 0, Ry) * Py + self.pairs(move.fed, slope.fed * Eu)
            + _bend(slope.second, size, 1, Rz) * Pz
        ).sum(1)  # fmt: skip
        cost[len(cost) - new :] += cut.cost
        self.cost = torch.cat([self.cost, self.cost.new_zeros(new)]) + cost
        end = size.norm_feed * first + size.norm * fed + _bend(None, size, 1, Rz) * Pz
        self.E = self.E @ size.whole.mT + size.token * moved + end


class _Changed:
    """A layer's attention when its input has changed; values are (units, heads, n).

    `t` bounds a row's root mean square of θ along a unit's move, wherever the others have gone; `s`
    is that of the keys' radii; `tE` and `sE` are those of its share of E.
    """

    def __init__(self, sweep: _Sweep, size: Sizes, move: Moves) -> None:
        self.sweep, self.size, self.x, self.E = sweep, size, move.x, sweep.E
        both = self.both = size.by_both.view(-1, 1)
        self.R = sweep.most(move.x + self.E)
        self.s, self.sE = (
            torch.einsum("hij,uj->uhi", size.a, radii.square()).sqrt() for radii in (move.x, self.E)
        )
        x, E, sR = move.x.unsqueeze(1), self.E.unsqueeze(1), sweep.most(self.s + self.sE)
        mean = (size.a * size.by_query.square()).sum(-1).sqrt()
        self.tE = size.by_key * self.sE + mean * E + both * (E * sR + self.R * self.sE)
        self.t = move.t + both * (x * sR + 2 * self.R * self.s)
        largest = self.E.amax(1).view(-1, 1, 1) if len(E) else E
        self.ranges = move.T + size.by_key * largest + size.by_query.amax(-1) * E
        # Twice: scores are bilinear, and Λ times a move has Λ² times that part.
        self.bilinear = 2 * both * self.R * self.R.amax()
        self.T = (sweep.most(self.ranges) + self.bilinear) * size.seen
        if float(self.T.max()) > _MOST_SCORE:
            raise Unbounded
        self.factor = (2 * self.T).exp()
        self.moved = self._pairs(size.values.unsqueeze(1), size.reach).sum(1)

    def cost(self, slope: Slopes) -> Tensor:
        """The attention's pairs in the margin, (units,)."""
        return self._pairs(slope.value, slope.along.abs()).sum((1, 2))

    def _pairs(self, value: Tensor, reach: Tensor) -> Tensor:
        """Pairs (units, heads, n) in the direction or norm that `value` and `reach` are of."""
        wide = reach + value.unsqueeze(-1) * self.R
        mean = (self.size.a * wide.square()).sum(-1).sqrt()
        sweep, t, tE, s, sE = self.sweep, self.t, self.tE, self.s, self.sE
        x, E = self.x.unsqueeze(1), self.E.unsqueeze(1)
        centre = (self.factor - 1) * mean + self.factor * value * (self.size.a @ self.R)
        near = (wide.amax(-1) + centre) * sweep.pairs(t, tE)
        far = value * sweep.products(t, tE, s, sE)
        bilinear = self.both * mean * sweep.products(x, E, s, sE)
        return self.factor * self.size.seen * (near + far + bilinear)

    def turned(self, value: Tensor, reach: Tensor) -> Tensor:
        """How far odds·(v_j − o_i) moves, for odds of 1, if k−1 others have changed the row."""
        sweep = self.sweep
        factor = (2 * (sweep.others(self.ranges) + self.bilinear)).exp()
        shift = factor * (1 + factor) * sweep.others(self.t + self.tE)
        mean = (self.size.a * reach.square()).sum(-1).sqrt()
        keys = sweep.others(self.s + self.sE) * (1 + shift)
        moved = value.unsqueeze(-1) * sweep.others(self.x + self.E)
        moved = moved + (shift * mean + value * keys).unsqueeze(-1)
        return (factor - 1).unsqueeze(-1) * reach + factor.unsqueeze(-1) * moved


class _Cut:
    """What cuts of this layer do to their rows, because other cuts have changed these: per unit."""

    def __init__(
        self, size: Sizes, slope: Slopes, free: Tensor, changed: _Changed, more: Tensor
    ) -> None:
        self.rows, self.n = free.nonzero()[:, 1], free.shape[-1]
        odds = size.odds[free] * more
        self.cost = odds * changed.turned(slope.value, slope.along.abs())[free]
        self.size = odds * changed.turned(size.values.unsqueeze(1), size.reach)[free]

    def at_row(self) -> Tensor:
        """(units, n): each at its own row."""
        zeros = self.size.new_zeros(len(self.size), self.n)
        return zeros.scatter(1, self.rows[:, None], self.size[:, None])


def _renormalised(a: Tensor, free: Tensor, k: int) -> Tensor:
    """Λ: how much more a cut does because k−1 others of its row may go too."""
    offered = torch.where(free, a, 0.0)
    k = min(k, a.shape[-1])
    top = offered.topk(k, -1).values
    others = torch.where(
        offered >= top[..., k - 2 : k - 1], top.sum(-1, keepdim=True) - offered,
        top[..., : k - 1].sum(-1, keepdim=True),
    )  # fmt: skip
    left = 1 - offered - others
    return torch.where(left > 1e-9, (1 - offered) / left, torch.inf)


def _bend(slope: tuple[Tensor, Tensor] | None, size: Sizes, norm: int, R: Tensor) -> Tensor:
    """The largest second derivative of a norm (n,) within R, in the margin or as a size."""
    spread, length, root = size.spread[norm], size.length[norm], math.sqrt(size.width)
    omega = R / (root * spread)
    if float(omega.max()) > _MOST:
        raise Unbounded
    least = spread * (1 - omega)
    # ε in σ² keeps |c|² a little below dσ²: the formula is off by 3ε/σ² at most.
    scale = (1 + 3 * size.least / least.square()) / (root * least.square())
    if slope is None:
        return math.sqrt(4 / 3) * size.gain[norm] * scale
    along, whole = slope
    turned = (along * length + whole * R) / (length - R).clamp(min=1e-300)
    return scale * (whole + torch.where(length > R, torch.minimum(whole, turned), whole))
