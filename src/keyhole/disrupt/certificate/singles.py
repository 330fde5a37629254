"""Every unit cut alone: the margin that is left, and how far each token moves at every stage.

For k = 1 this is the answer itself, by trying all units. A cut in a layer leaves the layers below
as they were, so the pass starts there. For larger k, bound.py takes the moves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from keyhole.disrupt.certificate.classifier import Classifier, Trace
from keyhole.disrupt.certificate.jacobians import Slopes

_NUMBERS = 4_000_000  # of the largest tensor of one batch of passes


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
class Singles:
    """`margins` (units, classes) of the label over each class; `moves` layer by layer.

    Units stand as `free.nonzero()` lists them; `last` (units,) is the pooler's root, as `fed`.
    """

    margins: Tensor
    moves: list[Moves]
    last: Tensor

    def of_layer(self, number: int, free: Tensor) -> Singles:
        """Those of one layer's units."""
        layers = free.nonzero()[:, 0]
        moves = [move.of(layers[: len(move.x)] == number) for move in self.moves]
        chosen = layers == number
        return Singles(self.margins[chosen], moves, self.last[chosen])


def singles(
    classifier: Classifier, traces: list[Trace], slopes: list[Slopes], pooled: Tensor,
    free: Tensor, label: int,
) -> Singles:  # fmt: skip
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
    return Singles(torch.cat(margins), moves, torch.cat(last))


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
