"""Improve texts by trying other tokens: four searches that only run the model.

Each takes a text that is partly right and candidates for its tokens, and returns the
best text that it tried (`Tried`). encoder.py and token_search.py end with them.

- `substitute` tries one position at a time. Each candidate at each position is put into the present
  text. Then the best candidates of all positions are put in one after another, the best
  first, and the number of them with the least loss is kept.
- `try_rows` tries many positions in a pass. A wrong token shows most in its own row: once most of a
  text is right, the right token takes its row's residual to nearly zero, even if other
  positions are wrong. Positions are dealt to groups, neighbours to different ones. A
  pass has one candidate at every position of a group, and each is judged by its own
  row. The winners are put in, the largest gain first, as long as the whole text fits
  better.
- `try_sums` changes several tokens at once, by what each change does alone (ours). If two tokens
  near each other are wrong, neither right token alone removes much of the residual, and
  a wrong one may remove more. But the effects of changes at different positions on the
  leaked rows nearly add up (embeddings/sums.py). So every candidate is run once, alone;
  sets whose effects add up to the residual are found without the model; and the best of
  them are run.
- `try_all` tries the whole vocabulary at a few positions. If most heads attend to one punctuation
  mark (a full stop in MPNet), its state is the same whichever mark it is. Then no list
  of candidates from that row holds the right one; only its effect on other rows shows
  it.

`Comparison` measures the distance of a text from a leak as one number. Hidden states,
attention outputs and pooled embeddings are compared in units of the leak's standard
deviation. Maps are compared by their logarithms less each row's mean. These are the
scores `q·k`, which are nearly linear in the hidden states where the probabilities are
not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from keyhole.core.tensors import indices_of, row_numbers, squared_norms
from keyhole.models.capture import capture
from keyhole.recover.attack import Target
from keyhole.recover.embeddings.sums import Effects, Sets
from keyhole.recover.layers.map_scores import LogMaps
from keyhole.recover.layers.precision import precision_of
from keyhole.recover.leaks import AttentionMaps, Leak

# the error of a score that halves its weight: scores of tokens differ by more
_BLURRED = 0.1
_SMALLEST = 1e-30
# the loss that another machine's float32 may leave; a wrong token's is larger
_ARITHMETIC = 1e-7
_MAX_TEXTS = 4096  # of a sweep: in long texts each position gets fewer candidates
_WORTHWHILE = 0.8  # another sweep follows if the loss falls to this share
_WON = 0.5  # a candidate counts if it leaves at most this share of a squared residual
_BEAM = 32  # width of the beam over sets
_MAX_SET = 4  # tokens of a set
_SETS_RUN = 16
_COMMON = 4096  # the first tokens are tried at all positions before any of the others
_CHUNK = 512  # tokens of the vocabulary in a pass

Misfits = Callable[[Tensor], Tensor]


class Comparison(NamedTuple):
    """A leak as the numbers that texts are compared by; its error explains a loss `tolerance`."""

    target: Target
    leak: Leak
    expected: Tensor
    weights: Tensor
    tolerance: float

    @classmethod
    def of(cls, target: Target, leak: Leak) -> Comparison:
        if isinstance(leak, AttentionMaps):
            logs = LogMaps.of(leak, target.device)
            error = 1.0 / logs.weights.clamp(min=_SMALLEST)
            weights = 1.0 / (1.0 + error / _BLURRED**2)
            weights = weights.where(logs.weights > 0, 0.0)
            explained = float((weights * error.clamp(max=1.0)).sum() / weights.sum())
            expected = _centred(logs.values, weights)
        else:
            values = leak.rows(leak.tensors).to(target.device)
            precision = precision_of(leak)
            explained = precision.relative**2
            weights = values.isfinite() / precision.scale
            expected = values.nan_to_num(0.0) / precision.scale
        return cls(target, leak, expected, weights, 4.0 * explained + _ARITHMETIC)

    def loss(self, embeddings: Tensor) -> Tensor:
        """Return the mean square difference (b,) of the exposures of texts from the leak."""
        exposed = capture(self.target.model, self.leak.exposure, embeddings=embeddings)
        if isinstance(self.leak, AttentionMaps):
            logs = exposed["values"].clamp(min=_SMALLEST).log()
            off = _centred(logs, self.weights) - self.expected
            losses = off.square() * self.weights / self.weights.sum()
        else:
            off = self.leak.rows(exposed) * self.weights - self.expected
            losses = off.square() / (self.weights > 0).sum()
        return losses.flatten(1).sum(1)

    @torch.no_grad()
    def losses(self, ids: Tensor) -> Tensor:
        """Return the loss (b,) of texts (b, n), without gradients."""
        parts = ids.split(self.target.batch_size(ids.shape[1]))
        return torch.cat([self.loss(self.target.parts.tokens(part)) for part in parts])


def _centred(scores: Tensor, weights: Tensor) -> Tensor:
    """Return scores less their row's weighted mean: a map leaves each row's constant open."""
    total = weights.sum(-1, keepdim=True).clamp(min=_SMALLEST)
    return scores - (scores * weights).sum(-1, keepdim=True) / total


@dataclass(frozen=True, eq=False)
class Tried:
    """A text, its loss, and the forward passes that finding it took."""

    ids: Tensor
    loss: float
    forwards: int


def substitute(
    comparison: Comparison,
    ids: Tensor,
    candidates: Tensor,
    known: Tensor,
    sweeps: int,
) -> Tried:
    """Improve `ids` (n,) with `candidates` (k, n) at the positions where `known` (n,) is -1."""
    places = indices_of(known < 0)
    each = max(2, min(len(candidates), _MAX_TEXTS // max(1, len(places))))
    best = Tried(ids, float(comparison.losses(ids[None])[0]), 1)
    for _ in range(sweeps):
        if best.loss <= comparison.tolerance or len(places) == 0:
            break
        before = best.loss
        best = _sweep(comparison, best, candidates[:each], places)
        if not best.loss <= _WORTHWHILE * before:
            break
    return best


def _sweep(
    comparison: Comparison,
    best: Tried,
    candidates: Tensor,
    places: Tensor,
) -> Tried:
    """Try each candidate (k, n) at each of the `places` (m,) alone, then the winners jointly."""
    texts = best.ids.repeat(len(places), len(candidates), 1)
    texts[row_numbers(places), :, places] = candidates[:, places].T
    losses = comparison.losses(texts.flatten(0, 1)).view(len(places), len(candidates))
    best = replace(best, forwards=best.forwards + losses.numel())
    least, winners = losses.min(1)
    order = least.argsort()
    order = order[least[order] < best.loss]
    if len(order) == 0:
        return best
    tokens = candidates[winners[order], places[order]]
    return _joined(comparison.losses, best, places[order], tokens)


def _joined(
    losses: Misfits,
    best: Tried,
    places: Tensor,
    tokens: Tensor,
) -> Tried:
    """Put `tokens` at `places` one after another, and return the best of these texts."""
    prefixes = best.ids.repeat(len(places), 1)
    for number, (place, token) in enumerate(zip(places, tokens, strict=True)):
        prefixes[number:, place] = token
    joint = losses(prefixes)
    kept = int(joint.argmin())
    return Tried(prefixes[kept], float(joint[kept]), best.forwards + len(places))


def try_rows(
    misfits: Misfits,
    ids: Tensor,
    places: Tensor,
    candidates: Tensor,
    batch_size: int,
) -> Tried:
    """Improve `ids` (n,) at `places` (m,) with `candidates` (m, k), `batch_size` places in a pass.

    `misfits` gives the squared residual of each row (b, n) for texts (b, n).
    """
    before = misfits(ids[None])[0]
    order = places.argsort()
    places = places[order]
    candidates = candidates[order]
    own = torch.full_like(candidates, torch.inf, dtype=before.dtype)
    groups = -(-len(places) // batch_size)
    for group in range(groups):
        chosen = row_numbers(places)[group::groups]
        texts = ids.repeat(candidates.shape[1], 1)
        texts[:, places[chosen]] = candidates[chosen].T
        own[chosen] = misfits(texts)[:, places[chosen]].T
    least, winner = own.min(1)
    gain = before[places] - least
    won = indices_of(least < _WON * before[places])
    won = won[gain[won].argsort(descending=True)]
    best = Tried(ids, float(before.sum()), 1 + groups * candidates.shape[1])
    if len(won) == 0:
        return best
    tokens = candidates[won, winner[won]]
    joined = _joined(lambda ids: misfits(ids).sum(-1), best, places[won], tokens)
    if joined.loss < best.loss:
        return joined
    return replace(best, forwards=joined.forwards)


def try_sums(
    missing: Misfits,
    ids: Tensor,
    places: Tensor,
    candidates: Tensor,
) -> Tried:
    """Improve `ids` (n,) at `places` (m,) with `candidates` (m, k), several at once.

    `missing` gives what texts (b, n) leave unexplained, (b, numbers).
    """
    m, k = candidates.shape
    off = missing(ids[None])[0]
    before = float(off.square().sum())
    tokens = candidates.flatten()
    texts = ids.repeat(len(tokens), 1)
    slots = row_numbers(places).repeat_interleave(k)
    texts[row_numbers(texts), places[slots]] = tokens
    left = missing(texts)
    moves = off - left
    losses = squared_norms(left)
    size = min(_MAX_SET, m)
    if size > 1:
        effects = Effects(moves[None], squared_norms(moves)[None], slots, m)
        sets = effects.grown(Sets.none(off[None]), _BEAM, size, _SETS_RUN)[0]
        sets = sets[(sets >= 0).any(-1)]
        several = ids.repeat(len(sets), 1)
        for changes in sets.unbind(1):
            rows = indices_of(changes >= 0)
            several[rows, places[slots[changes[rows]]]] = tokens[changes[rows]]
        texts = torch.cat([texts, several])
        losses = torch.cat([losses, squared_norms(missing(several))])
    spent = 1 + len(texts)
    best = int(losses.argmin())
    if losses[best] >= before:
        return Tried(ids, before, spent)
    return Tried(texts[best], float(losses[best]), spent)


def try_all(
    misfits: Misfits,
    ids: Tensor,
    places: Tensor,
    tokens: Tensor,
    most: int,
) -> Tried:
    """Put each of `tokens` (v,) at each of `places` (m,), in at most `most` texts; keep the best.

    `misfits` gives the losses (b,) of texts (b, n). A text with half the loss ends the
    search.
    """
    start = float(misfits(ids[None])[0])
    best = Tried(ids, start, 1)
    for part in tokens.tensor_split([_COMMON]):
        for place in places.tolist() if len(part) else ():
            for some in part[: most - best.forwards].split(_CHUNK):
                texts = ids.repeat(len(some), 1)
                texts[:, place] = some
                losses = misfits(texts)
                best = replace(best, forwards=best.forwards + len(some))
                if losses.min() < best.loss:
                    loss = float(losses.min())
                    best = Tried(texts[losses.argmin()], loss, best.forwards)
                if best.loss <= _WON * start or best.forwards >= most:
                    return best
    return best
