"""Read text from hidden states of a bidirectional encoder, at any layer.

`EncoderStates` takes the model and a row of numbers for each position, and proposes
token ids. The state of a token depends on the whole text, so tokens cannot be found one
after the other.

The plain way is to minimise ‖f_ℓ(e) − h‖² over the input embeddings e by L-BFGS, to
take the nearest tokens ("snap") and to verify them. This attack starts with cheaper
steps:

1. Estimate e = h M + b by a linear map learnt from the weights (inverse_map.py), and read tokens
   off by cosine (TokenTable). One forward pass shows whether they are right.
2. Error feedback: run the model on the snapped tokens and move the estimate by the residual,
   e ← e + (h − f_ℓ(snap(e))) M. These are forward passes only. At the lower layers this
   ends the search.
3. Search: L-BFGS on e from the best estimate, preconditioned by the covariance of the map's error,
   with a snap and a step of feedback after every few steps. Deeper layers need it. In
   long texts most tokens are clear early, but the search for all of them converges
   slowly. So the search goes in stages. After each stage, candidates are tried at the
   positions that fit worst, each judged by its own row (trials.py). Tokens that are
   clear are fixed, and the next stage moves the others.
4. Substitution: if the search stops near the text, a few tokens of many are wrong. The tokens
   nearest to the estimates are tried at each position, one at a time. Then every token
   is tried at the positions that fit worst, or on which the loss depends most.

The special tokens that the tokenizer puts around a text (its frame) are fixed first. A
text that is not found with them is tried again without. Texts run in batches of similar
length, and each leaves its batch when it fits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from keyhole.core.errors import expect_count
from keyhole.core.lbfgs import LBFGS
from keyhole.core.tensors import indices_of, row_numbers, squared_norms
from keyhole.recover.attack import Proposal, Proposals, Target
from keyhole.recover.layers.inverse_map import InverseMap, TokenTable, inverse_map
from keyhole.recover.layers.precision import compare, precision_of, rounding_error
from keyhole.recover.layers.token_search import TokenSearch
from keyhole.recover.layers.trials import (
    Comparison,
    Tried,
    substitute,
    try_all,
    try_rows,
    try_sums,
)
from keyhole.recover.leaks import Leak

# of L-BFGS, per token, in units of the inverse map's error
_FIRST_STEP = 0.3
_LATER_STEP = 0.1
_STAGE = 4  # rounds of a stage after the first
_HISTORY = 60  # steps that L-BFGS remembers
_FLIPS = 3  # times that the worst positions get another token after a round that helped
_TRIED = 12  # candidates at each of the worst positions, after a stage
_CANDIDATES = 8  # candidates at every position, at the end
_WORTH = 0.9  # a pass is progress if the loss falls to this share of the best
_PATIENCE = 2  # passes without progress that end feedback
# a token is clear if its squared distance is below this share of the second's
_DOUBT = 0.94
# a clear token stays open if its squared residual exceeds this many medians …
_MISFIT = 4.0
_PART = 0.02  # … and this share of the largest
_WORST = (
    0.8,
    0.4,
    0.2,
)  # shares of the largest squared residual above which tokens are changed
# unexplained share of the leak's variance below which rows identify their tokens
_ROUGHLY = 0.5
# unexplained share of the leak's variance below which only a few tokens are wrong
_NEAR = 0.1
_SWEEPS = 12  # sweeps of trials after a stage, at most
_PLACES = 40  # positions tried in a sweep
_IN_A_PASS = 8  # positions of a sweep tried in one pass
_ALONE = 8  # positions tried one by one, once sweeps of many no longer help
_MORE = 3  # the factor of candidates if several tokens are changed at once


@dataclass(frozen=True)
class EncoderStates:
    """Feedback, search and trials for the hidden states of an encoder.

    At most `feedback` forward passes come before the search. It takes `rounds` rounds
    of `steps` forward–backward passes: a stage of `opening` rounds, then shorter ones.
    At the end a few tokens are tried at each position, in at most `sweeps` sweeps, and
    then all tokens at some positions, in at most `most` texts (None: 2,048 on a CPU,
    128 times as many on a GPU). `samples` random tokens fit the map (None: 48 for each
    number in a hidden state). `batch` tokens are searched at once.
    """

    feedback: int = 8
    rounds: int = 64
    steps: int = 4
    opening: int = 48
    sweeps: int = 4
    most: int | None = None
    samples: int | None = None
    batch: int = 4096
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "opening"):
            expect_count(name, getattr(self, name))
        for name in ("feedback", "rounds"):
            expect_count(name, getattr(self, name), least=0)

    def __call__(self, target: Target, leaks: Sequence[Leak]) -> Proposals:
        samples = self.samples or max(4000, 48 * target.parts.width)
        back = inverse_map(target, leaks[0], samples, self.seed)
        table = TokenTable.of(target.parts.table, without=target.pads())
        order = sorted(range(len(leaks)), key=lambda number: leaks[number].length or 0)
        while order:  # texts of similar length, about `batch` tokens of them
            size = 1
            for number in order[1:]:
                if (leaks[number].length or 0) * (size + 1) > self.batch:
                    break
                size += 1
            batch = {number: leaks[number] for number in order[:size]}
            order = order[size:]
            yield from self._recover(EncoderBatch(target, batch, back, table))

    def _recover(self, texts: EncoderBatch) -> Proposals:
        most = self.most
        if most is None:
            most = 2**11 if texts.ids.device.type == "cpu" else 2**18
        for framed in (True, False):
            texts.begin(framed)
            yield from self._by_feedback(texts)
            yield from self._by_search(texts)
            if self.sweeps:
                yield from texts.leave(try_everywhere(texts, self.sweeps))
            yield from texts.leave(try_vocabulary(texts, most))
            yield from texts.leave(texts.frame_fits())

    def _by_feedback(self, texts: EncoderBatch) -> Proposals:
        """Run forward passes as long as they help."""
        texts.snap()
        for spent in range(self.feedback):
            if not len(texts):
                return
            yield from texts.leave(texts.check())
            if spent + 1 == self.feedback or not texts.improving():
                break
            # Move the estimates by what the snapped tokens leave unexplained.
            texts.estimates = texts.pushed()
            texts.snap()
        if self.feedback:  # without feedback nothing was tried yet
            texts.return_to_best()

    def _by_search(self, texts: EncoderBatch) -> Proposals:
        """Alternate gradients and trials; tokens that are clear after a stage are fixed."""
        rounds_left = self.rounds
        stage = self.opening
        first_step = _FIRST_STEP
        while rounds_left > 0 and len(texts):
            yield from self._by_gradients(texts, min(stage, rounds_left), first_step)
            rounds_left -= stage
            stage = _STAGE
            first_step = _LATER_STEP
            yield from texts.leave(try_worst(texts))
            texts.fix_clear()

    def _by_gradients(
        self,
        texts: EncoderBatch,
        rounds: int,
        first_step: float,
    ) -> Proposals:
        """Run L-BFGS, with a snap and a few flips of the worst tokens after every few steps."""
        start = texts.anchored()
        root = texts.back.root
        first = first_step * texts.unknowns**0.5
        search = LBFGS.begin(torch.zeros_like(start).flatten(1), first, _HISTORY)
        for _ in range(rounds):
            for _ in range(self.steps):
                search = search.step(texts.objective(start))
            texts.estimates = start + search.x.view_as(start) @ root
            texts.snap()
            done = texts.check()
            for flips in range(_FLIPS + 1):
                kept = torch.ones(len(texts), dtype=torch.bool, device=start.device)
                kept[done] = False
                yield from texts.leave(done)
                search = search.keep(kept)
                start = start[kept]
                if not len(texts):
                    return
                if flips == _FLIPS or not texts.improving(1):
                    break
                done = change_worst(texts)


@dataclass(frozen=True)
class SubLayerOutput:
    """Read the output of an encoder's attention sub-layer, before the residual.

    This is the inversion of one attention layer (keyhole.invert) with the vocabulary as
    prior. At layer 1 the output is `B = Σ_h softmax(X W_h Xᵀ) X V_h`. It has as many
    numbers as the embeddings, but at each position it is a mixture of all tokens and
    holds little of its own. Levenberg–Marquardt alone would not know which of the
    solutions is a text. So `states` come first, as for hidden states: a linear map
    learnt from the weights is a start from which gradients find the text (on MiniLM
    that reads layer 1). `search`, from the vocabulary's mean, takes the texts that are
    left.
    """

    search: TokenSearch = field(default_factory=TokenSearch)
    states: EncoderStates = field(default_factory=EncoderStates)

    def __call__(self, target: Target, leaks: Sequence[Leak]) -> Proposals:
        left: list[int] = []
        for number, proposal in self.states(target, leaks):
            comparison = Comparison.of(target, leaks[number])
            losses = comparison.losses(target.tensor([proposal.ids]))
            if losses[0] <= comparison.tolerance:
                yield number, proposal
            else:
                left.append(number)
        others = [leaks[number] for number in left]
        for place, proposal in self.search.each(target, others):
            yield left[place], proposal


class EncoderBatch:
    """The state of the search for b texts of at most n positions; every tensor has b rows.

    Texts of different lengths are padded and masked; each leaves as soon as it fits its
    leak. A position is free unless the frame fixes its token. A free position is sure
    while the search keeps its token fixed, and open otherwise. It is good if the model
    reproduces the leaked row.
    """

    def __init__(
        self,
        target: Target,
        leaks: dict[int, Leak],
        back: InverseMap,
        table: TokenTable,
    ) -> None:
        self.target = target
        self.back = back
        self.table = table
        self.numbers = list(leaks)
        self.leaks = list(leaks.values())
        rows = [leak.rows(leak.tensors).to(target.device) for leak in self.leaks]
        leaked = pad_sequence(rows, batch_first=True, padding_value=torch.nan)
        marks = [
            torch.ones(len(row)).long() if leak.mask is None else leak.mask
            for leak, row in zip(self.leaks, rows, strict=True)
        ]
        mask = pad_sequence(marks, batch_first=True)
        self.mask = mask.to(target.device).bool()  # true on text
        rounding = rounding_error(target, self.leaks[0].exposure)
        self.precisions = [precision_of(leak, rounding) for leak in self.leaks]
        self.seen = leaked.isfinite().all(-1) & self.mask  # true if a row leaked
        self.leaked = leaked.where(self.seen[..., None], 0.0)
        # leak minus what the model gave for `ids`
        self.missing = torch.zeros_like(leaked)
        self.ids = torch.full_like(self.mask, target.pads()[0], dtype=torch.long)
        self.best_ids = self.ids.clone()
        self.best_estimates = table.centre.expand(*self.ids.shape, -1).clone()
        self.passes = torch.zeros_like(self.ids[:, 0])
        self.forwards = torch.zeros_like(self.passes)
        self.begin(framed=False)

    def __len__(self) -> int:
        return len(self.numbers)

    def length(self, row: int) -> int:
        """Return how many positions a text has."""
        return len(self.precisions[row].rounding)

    @property
    def unknowns(self) -> float:
        """The average number of open positions in a text."""
        return float(self.open.sum()) / max(1, len(self))

    @property
    def scales(self) -> Tensor:
        """The variance (b,) of each leak's numbers."""
        scales = [precision.scale for precision in self.precisions]
        return self.target.tensor(scales).square()

    @property
    def open(self) -> Tensor:
        """The positions (b, n) whose tokens the search may change."""
        return self.free & ~self.sure

    def begin(self, framed: bool) -> None:
        """Start again from estimates by the inverse map, with or without the frame fixed."""
        before, after = self.target.frame()
        self.framed = framed and bool(before or after)
        self.free = self.mask.clone()
        self.sure = ~self.mask
        self.good = ~self.mask
        self.best = self.leaked.new_full(self.passes.shape, torch.inf)  # least loss
        self.stale = torch.zeros_like(self.passes)  # passes since the last progress
        guess = self.back.estimate(self.leaked)
        self.estimates = torch.where(self.seen[..., None], guess, self.table.centre)
        if not self.framed:
            return
        frame = self.ids.new_tensor([*before, *after])
        for row, mask in enumerate(self.mask):
            places = indices_of(mask)
            if len(places) >= len(frame):
                last = len(places) - len(after)
                fixed = torch.cat([places[: len(before)], places[last:]])
                self.ids[row, fixed] = frame
                self.free[row, fixed] = False

    def frame_fits(self) -> list[int]:
        """Return the texts whose fixed special tokens fit no worse than their other tokens."""
        if not self.framed:
            return list(range(len(self)))
        fixed = self.seen & ~self.free
        misfit = (fixed & (self.sizes > self.typical)).any(-1)
        return indices_of(~misfit).tolist()

    @property
    def sizes(self) -> Tensor:
        """The squared residual (b, n) of each row."""
        return squared_norms(self.missing)

    @property
    def typical(self) -> Tensor:
        """The median (b, 1) of each text's squared residuals."""
        leaked = self.sizes.where(self.seen, torch.nan)
        return leaked.nanmedian(-1, keepdim=True).values

    def snap(self) -> None:
        """Take the token nearest to each estimate, except where the present one is good."""
        snapped = self.free & ~self.good
        ids = self.ids.clone()
        ids[snapped] = self.table.nearest(self.estimates[snapped])[:, 0]
        self.ids = ids

    def check(self) -> list[int]:
        """Run the model on the snapped tokens, and return the texts that fit their leaks."""
        rows = row_numbers(self.ids)
        return self.record(rows, self.ids.clone(), self.run(rows, self.ids), 1)

    def run(self, rows: Tensor, ids: Tensor) -> Tensor:
        """Return what the model gives for `ids` (…, n or fewer) as the texts of these rows."""
        return self.target.rows(self.leaks[0], ids, self.mask[rows, : ids.shape[1]])

    def record(
        self,
        rows: Tensor,
        ids: Tensor,
        given: Tensor,
        forwards: int,
    ) -> list[int]:
        """Record what the model gave for the texts of some rows; return those that fit."""
        self.passes[rows] += forwards
        self.forwards[rows] += forwards
        missing = (self.leaked[rows] - given) * self.seen[rows, :, None]
        loss = missing.square().sum((1, 2))
        progress = loss < _WORTH * self.best[rows]
        self.stale[rows] = (self.stale[rows] + 1).where(~progress, 0)
        better = loss < self.best[rows]
        won = rows[better]
        self.best[won] = loss[better]
        self.best_ids[won] = ids[better]
        self.best_estimates[won] = self.estimates[won]
        self.missing[rows] = missing
        self.ids[rows] = ids
        done: list[int] = []
        for row, numbers in zip(rows.tolist(), given, strict=True):
            n = self.length(row)
            seen = self.seen[row, :n]
            leaked = self.leaked[row, :n].where(seen[:, None], torch.nan)
            fit = compare(self.precisions[row], leaked, numbers[:n])
            self.good[row, :n] = fit.good & seen
            self.target.count.set(self.numbers[row], int(self.good[row, :n].sum()))
            if fit.settled:
                done.append(row)
        return done

    def unexplained(self, row: int, ids: Tensor) -> Tensor:
        """Return what texts (b, n) that are tried for a row leave unexplained (b, n, d)."""
        n = ids.shape[1]
        rows = torch.full_like(ids[:, 0], row)
        return (self.leaked[row, :n] - self.run(rows, ids)) * self.seen[row, :n, None]

    def pull(self, row: int, ids: Tensor) -> Tensor:
        """Return how steeply (n,) a row's loss changes with the embedding at each position."""
        n = len(ids)
        leak = self.leaks[row]
        some = slice(row, row + 1)

        def loss(given: Mapping[str, Tensor]) -> Tensor:
            off = (leak.rows(given) - self.leaked[some, :n]) * self.seen[some, :n, None]
            return off.square().sum((1, 2))

        words = self.table.vectors[ids][None]
        mask = self.mask[some, :n].long()
        return self.target.slopes(leak.exposure, words, loss, mask)[1][0].norm(dim=-1)

    def take(self, row: int, tried: Tried) -> list[int]:
        """Run and record the text that trials gave a row; return [row] if it fits, or []."""
        rows = self.ids.new_tensor([row])
        ids = self.ids[rows]
        ids[0, : len(tried.ids)] = tried.ids
        return self.record(rows, ids, self.run(rows, ids), tried.forwards + 1)

    def improving(self, patience: int = _PATIENCE) -> bool:
        """Return whether any text made progress in its last `patience` passes."""
        return len(self) > 0 and bool((self.stale < patience).any())

    def pushed(self) -> Tensor:
        """Return the estimates moved by their rows' residuals (error feedback)."""
        return self.estimates + self.missing @ self.back.M

    def return_to_best(self) -> None:
        """Return to the ids and estimates with the least loss."""
        self.estimates = self.best_estimates.clone()
        self.ids = self.best_ids.clone()
        self.good = ~self.mask

    def fix_clear(self) -> None:
        """Fix the tokens that are clear, so that the next stage has less to search.

        A token that a trial chose against the estimate is fixed too, if its row fits
        better than most. A token that was fixed wrongly is among the rows that fit
        worst, and is open again.
        """
        sizes = self.sizes
        typical = self.typical
        least = torch.maximum(_MISFIT * typical, _PART * sizes.amax(-1, keepdim=True))
        meant, doubt = self.table.meant(self.estimates.flatten(0, 1))
        tried = meant.view_as(self.ids) != self.ids
        clear = ~tried & (doubt <= _DOUBT).view_as(self.ids)
        fits = (clear & (sizes <= least)) | (tried & (sizes <= typical)) | self.good
        self.sure = self.free & self.seen & fits
        # An estimate that points clearly at a wrong token would not move, so it is
        # reset.
        stuck = (self.open & self.seen & clear)[..., None]
        fresh = self.back.estimate(self.leaked)
        self.estimates = torch.where(stuck, fresh, self.estimates)

    def anchored(self) -> Tensor:
        """Return the estimates, with the token's own embedding where the token is known."""
        known = ~self.open[..., None]
        return torch.where(known, self.table.vectors[self.ids], self.estimates)

    def objective(self, start: Tensor) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        """Return the loss at embeddings start + z·root, and its gradient in z, as a function."""
        moves = self.open[..., None]
        scales = self.scales
        root = self.back.root
        leak = self.leaks[0]

        def loss(given: Mapping[str, Tensor]) -> Tensor:
            off = (leak.rows(given) - self.leaked) * self.seen[..., None]
            return off.square().sum((1, 2)) / scales

        def at(z: Tensor) -> tuple[Tensor, Tensor]:
            self.passes += 1
            words = start + torch.where(moves, z.view_as(start) @ root, 0.0)
            losses, slopes = self.target.slopes(
                leak.exposure, words, loss, self.mask.long()
            )
            return losses, (torch.where(moves, slopes, 0.0) @ root.T).flatten(1)

        return at

    def leave(self, rows: list[int]) -> Proposals:
        """Yield the best texts of these rows, and drop the rows from the batch."""
        for row in rows:
            ids = self.best_ids[row, : self.length(row)].tolist()
            passes = int(self.passes[row])
            forwards = int(self.forwards[row])
            yield self.numbers[row], Proposal(ids, passes, forwards, self.back.passes)
        kept = sorted(set(range(len(self))) - set(rows))
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(self, name, value[kept])
            elif isinstance(value, list):
                setattr(self, name, [value[row] for row in kept])

    def explained_to(self, share: float) -> list[int]:
        """Return the texts that leave less than a share of their leak's variance unexplained."""
        numbers = self.seen.sum(-1) * self.leaked.shape[-1]
        explained = self.best < share * self.scales * numbers
        return indices_of(explained).tolist()


def change_worst(texts: EncoderBatch) -> list[int]:
    """Give another token to the positions that fit worst, in texts that have just made progress.

    Once most tokens are right, the wrong ones have the largest residuals, and the
    estimate moved by its residual points at the right token. Three sets of positions
    are tried: those above 80%, 40% and 20% of the largest squared residual.
    """
    rows = indices_of(texts.stale == 0)
    if not len(rows):
        return []
    ids = texts.ids[rows]
    free = texts.free[rows]
    moved = texts.pushed()[rows]
    size = texts.sizes[rows].where(free, 0.0)
    largest = size.amax(-1, keepdim=True)
    worst = free & (size >= min(_WORST) * largest) & (size > 0)
    nearest = texts.table.nearest(moved[worst], 2)
    changed = ids.clone()
    same = nearest[:, 0] == ids[worst]
    changed[worst] = torch.where(same, nearest[:, 1], nearest[:, 0])
    trials = torch.stack(
        [
            torch.where(worst & (size >= share * largest), changed, ids)
            for share in _WORST
        ]
    )
    given = torch.stack([texts.run(rows, trial) for trial in trials])
    off = (given - texts.leaked[rows]) * texts.seen[rows, :, None]
    winner = off.square().sum((2, 3)).argmin(0)
    each = row_numbers(rows)
    return texts.record(rows, trials[winner, each], given[winner, each], len(_WORST))


def try_worst(texts: EncoderBatch) -> list[int]:
    """Try candidates at the positions that fit worst, as long as that helps.

    Many positions are tried in one pass first. Their effects on each other hide the
    last few wrong tokens, so then the worst positions are tried one by one, with twice
    the candidates. If no single token helps any more, several are changed at once.
    """
    done: list[int] = []
    for row in texts.explained_to(_ROUGHLY):
        ids = texts.ids[row, : texts.length(row)].clone()
        fits: list[int] = []
        alone = False
        for _ in range(_SWEEPS):
            places = _worst_places(texts, row, alone)
            if alone and not len(places):
                break
            count, batch_size = (2 * _TRIED, 1) if alone else (_TRIED, _IN_A_PASS)
            proposed = _proposed(texts, row, places, count)
            tried = try_rows(
                lambda ids, row=row: squared_norms(texts.unexplained(row, ids)),
                ids,
                places,
                proposed,
                batch_size,
            )
            helped = not torch.equal(tried.ids, ids)
            fits = texts.take(row, tried)
            if alone and not helped and not fits:
                tried = _by_sums(texts, row, ids)
                helped = not torch.equal(tried.ids, ids)
                fits = texts.take(row, tried)
                if not helped:
                    break
            if fits:
                break
            ids = tried.ids
            alone = alone or not helped
        done += fits
    return done


def _by_sums(
    texts: EncoderBatch,
    row: int,
    ids: Tensor,
) -> Tried:
    """Change several tokens at the worst positions of a text that is nearly right."""
    places = _worst_places(texts, row, alone=True)
    if row not in texts.explained_to(_NEAR) or len(places) < 2:
        return Tried(ids, 0.0, 0)
    proposed = _proposed(texts, row, places, _MORE * _TRIED)
    return try_sums(
        lambda ids: texts.unexplained(row, ids).flatten(1), ids, places, proposed
    )


def _worst_places(
    texts: EncoderBatch,
    row: int,
    alone: bool,
) -> Tensor:
    """Return the positions that fit worst; if tried in groups, only those that are not clear."""
    bad = texts.free[row] & texts.seen[row] & ~texts.good[row]
    most = _ALONE
    if not alone:
        meant, doubt = texts.table.meant(texts.estimates[row])
        bad &= (meant != texts.ids[row]) | (doubt > _DOUBT)
        most = _PLACES
    size = texts.sizes[row].where(bad, 0.0)
    return size.topk(min(most, int(bad.sum()))).indices


def _proposed(
    texts: EncoderBatch,
    row: int,
    places: Tensor,
    count: int,
) -> Tensor:
    """Return the candidates (m, count) for some positions, in turn from five lists.

    These are the tokens nearest to the estimate, and to the estimate moved by its row's
    residual; each among all tokens, and among those that the text already has, since
    long texts repeat words. The fifth list is nearest to the present token, moved
    likewise: a wrong choice is often similar to the right one.
    """
    estimates = texts.estimates[row, places]
    nearest = texts.table.nearest
    push = texts.missing[row, places] @ texts.back.M
    present = texts.ids[row, places]
    own = texts.ids[row][texts.mask[row]].unique()
    lists = [
        nearest(estimates + push, count),
        nearest(estimates + push, count, own),
        nearest(texts.table.vectors[present] + push, count),
        nearest(estimates, count),
        nearest(estimates, count, own),
    ]
    width = min(part.shape[1] for part in lists)
    mixed = torch.stack([part[:, :width] for part in lists], -1).flatten(1)
    # Repeats, and the present token, come last.
    same = mixed[:, :, None] == mixed[:, None, :]
    repeated = same.tril(-1).any(-1) | (mixed == present[:, None])
    order = repeated.long().argsort(dim=1, stable=True)
    return mixed.gather(1, order)[:, :count]


def try_everywhere(texts: EncoderBatch, sweeps: int) -> list[int]:
    """Try the tokens nearest to the estimates at each position of texts that are nearly right.

    This takes a few hundred forward passes for a text, so it comes late.
    """
    done: list[int] = []
    for row in texts.explained_to(_NEAR):
        n = texts.length(row)
        estimates = texts.best_estimates[row, :n]
        tried = substitute(
            Comparison.of(texts.target, texts.leaks[row]),
            texts.best_ids[row, :n],
            texts.table.nearest(estimates, _CANDIDATES).T.contiguous(),
            torch.where(texts.free[row, :n], -1, texts.ids[row, :n]),
            sweeps,
        )
        done += texts.take(row, tried)
    return done


def try_vocabulary(texts: EncoderBatch, most: int) -> list[int]:
    """Try all tokens, in at most `most` texts for each row, if texts are roughly right.

    The tokens of the text itself come first. The others follow as tokenizers number
    them, with punctuation and frequent words before the rest.
    """
    done: list[int] = []
    for row in texts.explained_to(_ROUGHLY):
        ids = texts.best_ids[row, : texts.length(row)].clone()
        left = most
        fits = texts.take(row, Tried(ids, 0.0, 0))
        while not fits and left > 0:
            own = ids[texts.free[row, : len(ids)]].unique()
            every = texts.target.tokens
            tried = try_all(
                lambda ids, row=row: texts.unexplained(row, ids).square().sum((1, 2)),
                ids,
                _causes(texts, row, ids),
                torch.cat([own, every[~torch.isin(every, own)]]),
                left,
            )
            if not tried.loss < _WORTH * float(texts.best[row]):
                break
            ids = tried.ids
            left -= tried.forwards
            fits = texts.take(row, tried)
        done += fits
    return done


def _causes(
    texts: EncoderBatch,
    row: int,
    ids: Tensor,
) -> Tensor:
    """Return the positions that fit worst, alternating with those of the steepest loss."""
    worst = _worst_places(texts, row, alone=True)
    pull = texts.pull(row, ids).where(texts.free[row, : len(ids)], 0.0)
    steep = pull.topk(len(worst)).indices
    both = torch.stack([worst, steep], 1).flatten().tolist()
    return ids.new_tensor(list(dict.fromkeys(both))[:_ALONE])
