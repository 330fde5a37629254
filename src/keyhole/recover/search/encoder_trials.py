"""Other tokens for texts that are nearly right: what attacks/encoder.py tries by running the model.

Three ways, from the cheapest: the token that the residual asks for at the positions that fit worst
(`flip`), a few candidates at those positions, judged row by row and then by sums of what they do
(`replace`, row_trials.py, sum_trials.py), and all positions one at a time (`substitute`,
substitution.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from keyhole.recover.search.comparison import Comparison
from keyhole.recover.search.encoder_batch import EncoderBatch
from keyhole.recover.search.row_trials import Misfits, try_rows
from keyhole.recover.search.substitution import Tried
from keyhole.recover.search.substitution import substitute as try_all
from keyhole.recover.search.sum_trials import try_sums

_WORST = (0.8, 0.4, 0.2)  # of the largest squared residual: positions given another token
_ROUGHLY = 0.5  # of the leak's variance left unexplained: rows say something of their own tokens
_NEAR = 0.1  # of the leak's variance left unexplained: a few tokens are wrong, no more
_PLACES, _TOGETHER = 40, 8  # positions tried in a sweep, and in one pass, …
_ALONE = 8  # … and positions tried one by one, once that has nothing more to give
_SWEEPS = 12
_MORE = 3  # times as many candidates where sums of them are looked at
_AT_ONCE = 4096  # tokens in one pass


def flip(texts: EncoderBatch) -> list[int]:
    """Give another token to the positions that fit worst, in texts that have just come nearer.

    Once most tokens are right, those that are not have the largest residuals, and the estimate
    moved by that residual points at the token that is missing. How many positions to change is
    tried: those within 80%, 40% and 20% of the largest squared residual.
    """
    rows = (texts.stale == 0).nonzero().flatten()
    if not len(rows):
        return []
    ids, missing, free = texts.ids[rows], texts.missing[rows], texts.free[rows]
    moved = texts.estimates[rows] + missing @ texts.back.M
    size = missing.square().sum(-1).where(free, 0.0)
    worst = free & (size >= min(_WORST) * size.amax(-1, keepdim=True)) & (size > 0)
    nearest = texts.table.nearest(moved[worst], 2)
    wished = ids.clone()
    same = nearest[:, 0] == ids[worst]
    wished[worst] = torch.where(same, nearest[:, 1], nearest[:, 0])
    trials = torch.stack(
        [
            torch.where(worst & (size >= share * size.amax(-1, keepdim=True)), wished, ids)
            for share in _WORST
        ]
    )
    given = torch.stack([texts.run(rows, trial) for trial in trials])
    off = (given - texts.leaked[rows]) * texts.seen[rows, :, None]
    winner = off.square().sum((2, 3)).argmin(0)
    each = torch.arange(len(rows), device=rows.device)
    return texts.note(rows, trials[winner, each], given[winner, each], len(_WORST))


def replace(texts: EncoderBatch, candidates: int) -> list[int]:
    """Try so many candidates at the positions that fit worst, as long as that helps.

    Many positions at once first; what they do to each other hides the last few wrong tokens, so
    then the worst positions one by one, with twice the candidates; and where no single token helps
    any more, several of them together.
    """
    done: list[int] = []
    for row in _within(texts, _ROUGHLY):
        rows = torch.tensor([row], device=texts.ids.device)
        ids, n = texts.ids[row].clone(), len(texts.precisions[row].sigma)
        fits: list[int] = []
        alone = False
        for _ in range(_SWEEPS):
            places = _worst_places(texts, row, alone)
            if fits or (alone and len(places) == 0):
                break
            count, together = (2 * candidates, 1) if alone else (candidates, _TOGETHER)
            proposed = _proposed(texts, row, places, count)
            tried = try_rows(_misfits(texts, row), ids[:n], places, proposed, together)
            helped = not torch.equal(tried.ids, ids[:n])
            ids[:n] = tried.ids
            fits = texts.note(rows, ids[None], texts.run(rows, ids[None]), tried.forwards + 1)
            if alone and not helped and not fits:
                tried = _by_sums(texts, row, ids[:n], candidates)
                helped = not torch.equal(tried.ids, ids[:n])
                ids[:n] = tried.ids
                given = texts.run(rows, ids[None])
                fits = texts.note(rows, ids[None], given, tried.forwards + 1)
                if not helped:
                    break
            alone = alone or not helped
        done += fits
    return done


def _by_sums(texts: EncoderBatch, row: int, ids: Tensor, candidates: int) -> Tried:
    """Several tokens at the worst positions of a text that is nearly right."""
    places = _worst_places(texts, row, alone=True)
    if row not in _within(texts, _NEAR) or len(places) < 2:
        return Tried(ids, 0.0, 0)
    leaked, seen = texts.leaked[row, : len(ids)], texts.seen[row, : len(ids), None]

    def missing(tried: Tensor) -> Tensor:
        parts: list[Tensor] = []
        for part in tried.split(max(1, _AT_ONCE // len(ids))):
            rows = torch.full((len(part),), row, device=ids.device)
            parts.append(((leaked - texts.run(rows, part)) * seen).flatten(1))
        return torch.cat(parts)

    return try_sums(missing, ids, places, _proposed(texts, row, places, _MORE * candidates))


def _misfits(texts: EncoderBatch, row: int) -> Misfits:
    """The squared residuals (b, n) of texts (b, n) that are tried for a row of the batch."""

    def misfits(ids: Tensor) -> Tensor:
        n = ids.shape[1]
        leaked, seen = texts.leaked[row, :n], texts.seen[row, :n]
        sizes: list[Tensor] = []
        for part in ids.split(max(1, _AT_ONCE // n)):
            rows = torch.full((len(part),), row, device=ids.device)
            sizes.append((texts.run(rows, part) - leaked).square().sum(-1) * seen)
        return torch.cat(sizes)

    return misfits


def _worst_places(texts: EncoderBatch, row: int, alone: bool) -> Tensor:
    """Where tokens are tried: the rows that fit worst; together, only where none is clear."""
    open_ = texts.free[row] & texts.seen[row] & ~texts.good[row]
    if not alone:
        open_ &= ~texts.clear(row)
    size = texts.missing[row].square().sum(-1).where(open_, 0.0)
    return size.topk(min(_ALONE if alone else _PLACES, int(open_.sum()))).indices


def _proposed(texts: EncoderBatch, row: int, places: Tensor, count: int) -> Tensor:
    """The candidates (m, count) for some positions: five lists, the best of each first.

    Nearest to the estimate, and to the estimate moved by what its row leaves unexplained; of all
    tokens, and of those that the text has elsewhere: a long text repeats its words. And nearest to
    the token that is there, moved likewise: what a trial chose wrongly is often akin to the truth.
    """
    estimates, nearest = texts.estimates[row, places], texts.table.nearest
    push = texts.missing[row, places] @ texts.back.M
    akin = texts.table.vectors[texts.ids[row, places]] + push
    own = texts.ids[row][texts.mask[row]].unique()
    lists = [
        nearest(estimates + push, count), nearest(estimates + push, count, own),
        nearest(akin, count), nearest(estimates, count), nearest(estimates, count, own),
    ]  # fmt: skip
    width = min(part.shape[1] for part in lists)
    mixed = torch.stack([part[:, :width] for part in lists], -1).flatten(1)
    return _distinct(mixed, texts.ids[row, places], count)


def _distinct(lists: Tensor, present: Tensor, count: int) -> Tensor:
    """The first `count` tokens of each list (m, k) that are new: neither there nor before."""
    same = lists[:, :, None] == lists[:, None, :]
    again = same.tril(-1).any(-1) | (lists == present[:, None])
    order = again.long().argsort(dim=1, stable=True)
    return lists.gather(1, order)[:, :count]


def substitute(texts: EncoderBatch, candidates: int, sweeps: int) -> list[int]:
    """Try the tokens nearest to the estimates at each position of texts that are nearly right.

    That is a few hundred forward passes for a text, so it comes last.
    """
    done: list[int] = []
    for row in _within(texts, _NEAR):
        n = len(texts.precisions[row].sigma)
        estimates = texts.best_estimates[row, :n]
        tried = try_all(
            Comparison.of(texts.target, texts.leaks[row]),
            texts.best_ids[row, :n],
            texts.table.nearest(estimates, candidates).T.contiguous(),
            torch.where(texts.free[row, :n], -1, texts.ids[row, :n]),
            sweeps,
        )
        ids = texts.best_ids[row].clone()
        ids[:n] = tried.ids
        rows = torch.tensor([row], device=ids.device)
        given = texts.run(rows, ids[None])
        done += texts.note(rows, ids[None], given, tried.forwards + 1)
    return done


def _within(texts: EncoderBatch, share: float) -> list[int]:
    """The texts whose residual is less than a share of their leak's variance."""
    sizes = torch.tensor([p.scale for p in texts.precisions], device=texts.best.device).square()
    numbers = texts.seen.sum(-1) * texts.leaked.shape[-1]
    return (texts.best < share * sizes * numbers).nonzero().flatten().tolist()
