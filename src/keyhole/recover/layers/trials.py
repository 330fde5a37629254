"""Texts improved by trying other tokens: four ways, all by running the model.

- `substitute`: one position at a time. Each candidate at each position is put into the text as it
  stands, and the best of each position are put in one after another, the best first; the prefix
  with the smallest loss is kept.
- `try_rows`: many positions in a pass. A wrong token shows most in its own row: once most of a text
  is right, putting the right one in takes that row's residual to nearly nothing, whatever is still
  wrong at other positions. Positions are dealt to a few groups, neighbours to different ones; a
  pass puts one candidate at every position of a group, and each is judged by its own row. What won
  is put in, the largest gain first, as far as the whole text fits better.
- `try_sums`: several wrong tokens at once, by what each change does alone (ours). Where two tokens
  near each other are wrong, neither right one by itself takes much of the residual away, and a
  wrong one may take more. But what changes at different positions do to the leaked rows nearly adds
  up (embeddings/sums.py): every candidate is run once, alone; sets of them whose effects add up to
  what is missing are found without the model, and the best of those are run.
- `try_all`: the whole vocabulary at a few positions. Where most heads rest on one mark (a full stop
  in MPNet), its state is the same whatever the mark is: no list of candidates that is drawn from
  that row holds the right one, and only what the mark does to other rows tells it.

`Comparison` says how far a text is from a leak, as one number. Hidden states, attention outputs and
pooled embeddings are compared in units of the leak's standard deviation. Maps are compared by their
logarithms, less each row's mean: those are the scores `q·k`, which are nearly linear in the hidden
states where the probabilities are not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from keyhole.models.capture import capture
from keyhole.recover.attack import Target
from keyhole.recover.embeddings.sums import Effects, Sets
from keyhole.recover.layers.map_scores import LogMaps
from keyhole.recover.layers.precision import precision_of
from keyhole.recover.leaks import AttentionMaps, Leak

_BLURRED = 0.1  # the error of a score above which it counts less: scores of tokens differ by more
_SMALLEST = 1e-30
_ARITHMETIC = 1e-7  # the loss that another machine's float32 may leave; a wrong token's is larger

Misfits = Callable[[Tensor], Tensor]
_TOKENS = 4096  # in one pass
_TEXTS = 4096  # tried in one sweep at most: long texts get fewer candidates for each position
_WORTH = 0.8  # a further sweep is worth it while the loss falls by a fifth
_WON = 0.5  # of a row's squared residual, or less, must be left for a candidate to count
_WIDTH = 32  # of the beam over sets
_DEPTH = 4  # tokens of a set, at most
_RUN = 16  # sets that are run
_COMMON = 4096  # tokens that come first at all positions, before the others at any
_SOME = 512  # tokens of the vocabulary in a pass


@dataclass(frozen=True, eq=False)
class Comparison:
    """A leak in the numbers it is compared by; `tolerance` is the loss its own error explains."""

    target: Target
    leak: Leak
    expected: Tensor
    weights: Tensor
    tolerance: float

    @classmethod
    def of(cls, target: Target, leak: Leak) -> Comparison:
        device = target.parts.device
        if isinstance(leak, AttentionMaps):
            logs = LogMaps.of(leak, device)
            error = 1.0 / logs.weights.clamp(min=_SMALLEST)
            weights = torch.where(logs.weights > 0, 1.0 / (1.0 + error / _BLURRED**2), 0.0)
            explained = float((weights * error.clamp(max=1.0)).sum() / weights.sum())
            expected = _centred(logs.values, weights)
            return cls(target, leak, expected, weights, 4.0 * explained + _ARITHMETIC)
        values = leak.rows(leak.tensors).to(device)
        known = values.isfinite()
        precision = precision_of(leak)
        scaled = torch.where(known, values, 0.0) / precision.scale
        explained = precision.relative**2
        return cls(target, leak, scaled, known / precision.scale, 4.0 * explained + _ARITHMETIC)

    def loss(self, embeddings: Tensor) -> Tensor:
        """The mean square difference of each text's exposure (b,) from the leak."""
        exposed = capture(self.target.model, self.leak.exposure, embeddings=embeddings)
        if isinstance(self.leak, AttentionMaps):
            scores = _centred(exposed["values"].clamp(min=_SMALLEST).log(), self.weights)
            off = (scores - self.expected).square() * self.weights
            return off.flatten(1).sum(1) / self.weights.sum()
        off = (self.leak.rows(exposed) * self.weights - self.expected).square()
        return off.flatten(1).sum(1) / (self.weights > 0).sum()

    def losses(self, ids: Tensor) -> Tensor:
        """The loss of each of many texts (b, n), without gradients."""
        step = max(1, min(_TOKENS, self.target.parts.at_once(ids.shape[1])) // ids.shape[1])
        with torch.no_grad():
            return torch.cat([self.loss(self.target.parts.tokens(b)) for b in ids.split(step)])


def _centred(scores: Tensor, weights: Tensor) -> Tensor:
    """Scores less their row's weighted mean: a map leaves each row's constant open."""
    total = weights.sum(-1, keepdim=True).clamp(min=_SMALLEST)
    return scores - (scores * weights).sum(-1, keepdim=True) / total


@dataclass(frozen=True, eq=False)
class Tried:
    """A text, its loss, and the forward passes that finding it took."""

    ids: Tensor
    loss: float
    forwards: int


def substitute(
    comparison: Comparison, ids: Tensor, candidates: Tensor, known: Tensor, sweeps: int
) -> Tried:
    """Improve `ids` (n,) with `candidates` (k, n), wherever `known` (n,) is -1."""
    places = (known < 0).nonzero().flatten()
    each = max(2, min(len(candidates), _TEXTS // max(1, len(places))))
    loss, forwards = float(comparison.losses(ids[None])[0]), 1
    for _ in range(sweeps):
        if loss <= comparison.tolerance or len(places) == 0:
            break
        better = _sweep(comparison, ids, candidates[:each], places, loss)
        forwards += better.forwards
        enough = better.loss <= _WORTH * loss
        ids, loss = better.ids, better.loss
        if not enough:
            break
    return Tried(ids, loss, forwards)


def _sweep(
    comparison: Comparison, ids: Tensor, candidates: Tensor, places: Tensor, loss: float
) -> Tried:
    texts = ids.repeat(len(places), len(candidates), 1)
    rows = torch.arange(len(places), device=ids.device)
    texts[rows, :, places] = candidates[:, places].T
    losses = comparison.losses(texts.flatten(0, 1)).view(len(places), len(candidates))
    best = losses.min(1)
    order = best.values.argsort()
    order = order[best.values[order] < loss]
    spent = losses.numel()
    if len(order) == 0:
        return Tried(ids, loss, spent)
    tokens = candidates[best.indices[order], places[order]]
    return _joined(comparison.losses, ids, places[order], tokens, spent)


def _joined(losses: Misfits, ids: Tensor, places: Tensor, tokens: Tensor, spent: int) -> Tried:
    """Put `tokens` at `places` one after the other: the number of them that fits best."""
    prefixes = ids.repeat(len(places), 1)
    for number, (place, token) in enumerate(zip(places, tokens, strict=True)):
        prefixes[number:, place] = token
    joint = losses(prefixes)
    kept = int(joint.argmin())
    return Tried(prefixes[kept], float(joint[kept]), spent + len(places))


def try_rows(
    misfits: Misfits, ids: Tensor, places: Tensor, candidates: Tensor, batch_size: int
) -> Tried:
    """Improve `ids` (n,) at `places` (m,) with `candidates` (m, k), `batch_size` in a pass.

    `misfits` gives the squared residual of each row, (b, n), for texts (b, n).
    """
    before = misfits(ids[None])[0]
    order = places.argsort()
    places, candidates = places[order], candidates[order]
    own = torch.full(candidates.shape, torch.inf, dtype=before.dtype, device=ids.device)
    groups = -(-len(places) // batch_size)
    for group in range(groups):
        chosen = torch.arange(group, len(places), groups, device=ids.device)
        texts = ids.repeat(candidates.shape[1], 1)
        texts[:, places[chosen]] = candidates[chosen].T
        own[chosen] = misfits(texts)[:, places[chosen]].T
    spent = 1 + groups * candidates.shape[1]
    least, winner = own.min(1)
    gain = before[places] - least
    won = (least < _WON * before[places]).nonzero().flatten()
    won = won[gain[won].argsort(descending=True)]
    best = Tried(ids, float(before.sum()), spent)
    if len(won) == 0:
        return best
    tokens = candidates[won, winner[won]]
    joined = _joined(lambda ids: misfits(ids).sum(-1), ids, places[won], tokens, spent)
    return joined if joined.loss < best.loss else replace(best, forwards=joined.forwards)


def try_sums(missing: Misfits, ids: Tensor, places: Tensor, candidates: Tensor) -> Tried:
    """Improve `ids` (n,) at `places` (m,) with `candidates` (m, k).

    `missing` gives what texts (b, n) leave unexplained, (b, numbers).
    """
    m, k = candidates.shape
    off = missing(ids[None])[0]
    changed = ids.repeat(m * k, 1)
    slots = torch.arange(m, device=ids.device).repeat_interleave(k)
    changed[torch.arange(m * k, device=ids.device), places[slots]] = candidates.flatten()
    left = missing(changed)
    moves = off - left
    effects = Effects(moves[None], moves.square().sum(-1)[None], slots, m)
    depth = min(_DEPTH, m)
    sets = effects.grown(Sets.none(off[None]), _WIDTH, depth, _RUN)[0] if depth > 1 else None
    texts, losses, spent = changed, left.square().sum(-1), 1 + m * k
    if sets is not None:
        sets = sets[(sets >= 0).any(-1)]
        several = ids.repeat(len(sets), 1)
        for changes in sets.unbind(1):
            rows = (changes >= 0).nonzero().flatten()
            several[rows, places[slots[changes[rows]]]] = candidates.flatten()[changes[rows]]
        texts = torch.cat([texts, several])
        losses = torch.cat([losses, missing(several).square().sum(-1)])
        spent += len(several)
    best, before = int(losses.argmin()), float(off.square().sum())
    if float(losses[best]) >= before:
        return Tried(ids, before, spent)
    return Tried(texts[best], float(losses[best]), spent)


def try_all(misfits: Misfits, ids: Tensor, places: Tensor, tokens: Tensor, most: int) -> Tried:
    """Put each of `tokens` (v,) at each of `places` (m,), in at most `most` texts; keep the best.

    `misfits` gives the losses (b,) of texts (b, n). A text that has half the loss is taken at once.
    """
    start, forwards = float(misfits(ids[None])[0]), 1
    best, loss = ids, start
    for part in tokens.tensor_split([_COMMON]):
        for place in places.tolist() if len(part) else ():
            for some in part[: most - forwards].split(_SOME):
                texts = ids.repeat(len(some), 1)
                texts[:, place] = some
                losses, forwards = misfits(texts), forwards + len(some)
                if losses.min() < loss:
                    best, loss = texts[losses.argmin()], float(losses.min())
                if loss <= _WON * start or forwards >= most:
                    return Tried(best, loss, forwards)
    return Tried(best, loss, forwards)
