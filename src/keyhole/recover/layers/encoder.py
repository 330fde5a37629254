"""Text from hidden states of a bidirectional encoder, at any layer.

The plain way is to minimise ‖f_ℓ(e) − h‖² over the input embeddings e from scratch by L-BFGS,
take the nearest tokens ("snap"), and verify. This attack starts with what is cheaper:

1. Estimate e = h M + b by a linear map learnt from the weights (inverse_map.py), and read tokens
   off by cosine (TokenTable). One forward pass says whether they are right.
2. Error feedback: run the model on the snapped tokens and push the estimate by what is missing,
   e ← e + (h − f_ℓ(snap(e))) M, forward passes only. At the lower layers this ends the search.
3. Search: L-BFGS on e from the best estimate, preconditioned by the covariance of the map's error,
   a snap and one step of feedback after every few steps. Deeper layers need it. It goes in stages.
   All tokens of a long text converge slowly, though most are clear early; so after each
   stage candidates are tried at the positions that fit worst, each judged by its own row
   (trials.py), tokens that are clear are fixed, and the next stage moves only the rest.
4. Substitution: where the search came near and stopped, a few tokens of many are wrong. The tokens
   nearest to the estimates are tried at each position, one at a time; then every token at the
   positions that fit worst or on which the loss depends most.

The special tokens that the tokenizer puts around a text (its frame) are fixed at first; a text that
is not found so is tried again without. Texts run in batches of similar length; each leaves its
batch when it fits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from keyhole.core.errors import expect_count
from keyhole.core.numerics import BatchedLBFGS
from keyhole.models.capture import capture
from keyhole.recover.attack import Proposal, Target
from keyhole.recover.layers.inverse_map import InverseMap, TokenTable, inverse_map
from keyhole.recover.layers.precision import Precision, compare, precision_of, rounding_error
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

_FIRST_STEP, _LATER_STEP = 0.3, 0.1  # of L-BFGS, per token, in units of the inverse map's error


@dataclass(frozen=True)
class EncoderStates:
    """Text from an encoder's hidden states.

    `feedback` forward passes at most are spent before the search, which takes `rounds` rounds of
    `steps` forward–backward passes: a stage of `opening` rounds, then shorter ones. In the end a
    few tokens are tried at each position, in at most `sweeps` sweeps, and then all tokens at some,
    in at most `most` texts (None: 2,048 on a CPU, 128 times as many on a GPU).
    `samples` random tokens fit the map (None: 48 for each number in a hidden state). `batch` is how
    many tokens go through the model at once.
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

    def __call__(self, target: Target, leaks: Sequence[Leak]) -> Iterator[tuple[int, Proposal]]:
        samples = self.samples or max(4000, 48 * target.parts.width)
        back = inverse_map(target, leaks[0], samples, self.seed)
        table = TokenTable.of(target.parts.table, without=target.pads())
        for numbers in _batches(leaks, self.batch):
            batch = {number: leaks[number] for number in numbers}
            texts = EncoderBatch.of(target, batch, back, table)
            yield from self._recover(texts, back)

    def _recover(self, texts: EncoderBatch, back: InverseMap) -> Iterator[tuple[int, Proposal]]:
        for framed in (True, False):
            texts.begin(framed)
            yield from self._by_feedback(texts)
            yield from self._by_search(texts, back)
            if self.sweeps:
                yield from texts.leave(try_everywhere(texts, self.sweeps))
            most = 2**11 if texts.ids.device.type == "cpu" else 2**18
            yield from texts.leave(try_vocabulary(texts, most if self.most is None else self.most))
            yield from texts.leave(texts.frame_fits())

    def _by_feedback(self, texts: EncoderBatch) -> Iterator[tuple[int, Proposal]]:
        """Forward passes only, while they help."""
        texts.snap()
        for spent in range(self.feedback):
            if not len(texts):
                return
            yield from texts.leave(texts.check())
            if spent + 1 < self.feedback and texts.improving():
                texts.push()
                texts.snap()
            else:
                break
        if self.feedback:  # else nothing was tried yet
            texts.return_to_best()

    def _by_search(self, texts: EncoderBatch, back: InverseMap) -> Iterator[tuple[int, Proposal]]:
        """Gradients and trials in turn: what is clear after one stage is fixed in the next."""
        rounds_left, stage, first_step = self.rounds, self.opening, _FIRST_STEP
        while rounds_left > 0 and len(texts):
            yield from self._by_gradients(texts, back, min(stage, rounds_left), first_step)
            rounds_left, stage, first_step = rounds_left - stage, _STAGE, _LATER_STEP
            yield from texts.leave(try_worst(texts))
            texts.fix_clear()

    def _by_gradients(
        self, texts: EncoderBatch, back: InverseMap, rounds: int, first_step: float
    ) -> Iterator[tuple[int, Proposal]]:
        """L-BFGS, with a snap and a step of feedback after every few steps."""
        start = texts.anchored()
        search = BatchedLBFGS(
            torch.zeros_like(start).flatten(1), first_step * texts.unknowns**0.5, history=60
        )
        for _ in range(rounds):
            for _ in range(self.steps):
                search.step(texts.objective(start, back.root))
            texts.estimates = start + (search.z.view_as(start) @ back.root)
            texts.snap()
            done = texts.check()
            for flips in range(_FLIPS + 1):
                kept = torch.ones(len(texts), dtype=torch.bool, device=start.device)
                kept[done] = False
                yield from texts.leave(done)
                search.keep(kept)
                start = start[kept]
                if not len(texts):
                    return
                if flips == _FLIPS or not texts.improving(1):
                    break
                done = change_worst(texts)


def _batches(leaks: Sequence[Leak], tokens: int) -> Iterator[list[int]]:
    """The numbers of the leaks in batches of similar length, about `tokens` positions each."""
    order = sorted(range(len(leaks)), key=lambda number: leaks[number].length or 0)
    batch: list[int] = []
    for number in order:
        length = leaks[number].length or 0
        if batch and length * (len(batch) + 1) > tokens:
            yield batch
            batch = []
        batch.append(number)
    if batch:
        yield batch


@dataclass(frozen=True)
class SubLayerOutput:
    """Text from the attention sub-layer's output, before the residual, of one layer of an encoder.

    The inversion of one attention layer (keyhole.invert) with the vocabulary as prior. At layer 1
    that is `B = Σ_h softmax(X W_h Xᵀ) X V_h`: as many numbers as the embeddings have, but each
    position's output is a mixture of all tokens and holds little of its own. Levenberg–Marquardt
    alone would not know which of the solutions is a text. So first `states`, as for hidden states:
    a linear map learnt from the weights is a start from which gradients find the text (on MiniLM
    that reads layer 1). `search`, from the vocabulary's mean, takes what is left.
    """

    search: TokenSearch = field(default_factory=TokenSearch)
    states: EncoderStates = field(default_factory=EncoderStates)

    def __call__(self, target: Target, leaks: Sequence[Leak]) -> Iterator[tuple[int, Proposal]]:
        left: list[int] = []
        for number, proposal in self.states(target, leaks):
            comparison = Comparison.of(target, leaks[number])
            ids = torch.tensor([proposal.ids], device=target.parts.device)
            if float(comparison.losses(ids)[0]) <= comparison.tolerance:
                yield number, proposal
            else:
                left.append(number)
        for place, proposal in self.search.each(target, [leaks[number] for number in left]):
            yield left[place], proposal


_STAGE = 4  # rounds of a stage after the first
_FLIPS = 3  # times that the worst positions get another token after a round that helped
_TRIED = 12  # tokens at each of the positions that fit worst, after a stage, …
_CANDIDATES = 8  # … and at every position in the end
_WORTH = 0.9  # the loss must fall to this share of the best for a pass to count as progress
_PATIENCE = 2  # passes without progress after which feedback ends
_DOUBT = 0.94  # a token is clear if its squared distance is below this share of the second's
_MISFIT = 4.0  # a clear token stays open if its squared residual is so many times the median …
_PART = 0.02  # … and so large a share of the largest
_WORST = (0.8, 0.4, 0.2)  # shares of the largest squared residual: tokens above it are changed
_ROUGHLY = 0.5  # of the leak's variance unexplained: below, rows say something of their own tokens
_NEAR = 0.1  # of the leak's variance unexplained: below, only a few tokens are wrong
_SWEEPS = 12  # sweeps of trials after a stage, at most
_PLACES = 40  # positions tried in a sweep …
_IN_A_PASS = 8  # … and how many of them in one pass
_ALONE = 8  # positions tried one by one, once sweeps of many no longer help
_MORE = 3  # times as many candidates where several tokens are changed at once


@dataclass(eq=False)
class EncoderBatch:
    """The state of the search for b texts of at most n positions; tensors have the batch first.

    Texts of different lengths are padded and masked; each leaves as soon as it fits its leak.
    Positions are free unless the frame fixes their token. A free position is sure while the search
    holds its token fixed, and open otherwise. It is good where the model reproduces the leaked row.
    """

    target: Target
    back: InverseMap
    table: TokenTable
    numbers: list[int]
    leaks: list[Leak]
    precisions: list[Precision]
    leaked: Tensor  # (b, n, d), 0 where nothing leaked
    seen: Tensor  # (b, n), true where a row leaked
    mask: Tensor  # (b, n), true on text
    free: Tensor  # (b, n), true where the frame does not fix the token
    sure: Tensor  # (b, n), true where the search holds the token fixed, for now
    estimates: Tensor  # (b, n, e)
    ids: Tensor  # (b, n)
    missing: Tensor  # (b, n, d), leak minus what the model gave for `ids`
    good: Tensor  # (b, n), true where `missing` is within the leak's own error
    best: Tensor  # (b,), the least loss of any ids so far
    best_ids: Tensor
    best_estimates: Tensor
    stale: Tensor  # (b,), passes since the last progress
    passes: Tensor  # (b,), forward–backward and forward
    forwards: Tensor  # (b,)
    framed: bool = False

    _ROWS = (
        "leaked", "seen", "mask", "free", "sure", "estimates", "ids", "missing", "good", "best",
        "best_ids", "best_estimates", "stale", "passes", "forwards",
    )  # fmt: skip

    @classmethod
    def of(
        cls, target: Target, leaks: dict[int, Leak], back: InverseMap, table: TokenTable
    ) -> EncoderBatch:
        device = target.parts.device
        rows = [leak.rows(leak.tensors).to(device) for leak in leaks.values()]
        leaked = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=torch.nan)
        shape = leaked.shape[:2]
        lengths = torch.tensor([len(row) for row in rows], device=device)
        mask = torch.arange(shape[1], device=device) < lengths[:, None]
        for index, leak in enumerate(leaks.values()):
            if leak.mask is not None:
                mask[index, : len(leak.mask)] &= leak.mask.to(device).bool()
        seen = leaked.isfinite().all(-1) & mask
        leaked = leaked.nan_to_num().where(seen[..., None], torch.zeros_like(leaked))
        ids = torch.full(shape, target.pads()[0], device=device)
        estimates = table.centre.expand(*shape, -1)
        zeros = torch.zeros(shape[0], dtype=torch.long, device=device)
        rounding = rounding_error(target, next(iter(leaks.values())).exposure)
        precisions = [precision_of(leak, rounding) for leak in leaks.values()]
        return cls(
            target, back, table, list(leaks), list(leaks.values()), precisions, leaked, seen, mask,
            mask, ~mask,
            estimates, ids, torch.zeros_like(leaked), ~mask, zeros.float(), ids.clone(),
            estimates.clone(), zeros, zeros.clone(), zeros.clone(),
        )  # fmt: skip

    def __len__(self) -> int:
        return len(self.numbers)

    def length(self, row: int) -> int:
        """How many positions a text has."""
        return len(self.precisions[row].rounding)

    @property
    def unknowns(self) -> float:
        """The average number of open positions in a text."""
        return float(self.open.sum()) / max(1, len(self))

    @property
    def open(self) -> Tensor:
        """The positions (b, n) whose tokens the search may change."""
        return self.free & ~self.sure

    def begin(self, framed: bool) -> None:
        """Start over from estimates by the inverse map, with or without the frame fixed."""
        before, after = self.target.frame()
        self.framed = framed and bool(before or after)
        self.free, self.sure = self.mask.clone(), ~self.mask
        self.ids = self.ids.clone()
        self.best = torch.full_like(self.best, torch.inf)
        self.stale = torch.zeros_like(self.stale)
        self.good = ~self.mask
        guess = self.back.estimate(self.leaked)
        self.estimates = torch.where(self.seen[..., None], guess, self.table.centre)
        if not self.framed:
            return
        for row in range(len(self)):
            places = self.mask[row].nonzero().flatten()
            if len(places) < len(before) + len(after):
                continue
            for place, token in zip(places.tolist(), before, strict=False):
                self.ids[row, place], self.free[row, place] = token, False
            for place, token in zip(reversed(places.tolist()), reversed(after), strict=False):
                self.ids[row, place], self.free[row, place] = token, False

    def frame_fits(self) -> list[int]:
        """The texts whose fixed special tokens fit no worse than their other tokens."""
        if not self.framed:
            return list(range(len(self)))
        fixed = self.seen & ~self.free
        sizes = self.missing.square().sum(-1)
        typical = sizes.where(self.seen, torch.nan).nanmedian(-1).values
        misfit = (fixed & (sizes > typical[:, None])).any(-1)
        return (~misfit).nonzero().flatten().tolist()

    def snap(self) -> None:
        """Take the token nearest to each estimate, except where the present one is good."""
        open_ = self.free & ~self.good
        ids = self.ids.clone()
        ids[open_] = self.table.nearest(self.estimates[open_])[:, 0]
        self.ids = ids

    def check(self) -> list[int]:
        """Run the model on the snapped tokens; which texts fit their leaks?"""
        rows = torch.arange(len(self), device=self.ids.device)
        ids = self.ids.clone()
        return self.record(rows, ids, self.run(rows, ids), 1)

    def run(self, rows: Tensor, ids: Tensor) -> Tensor:
        """What the model gives for `ids` (…, n or fewer) as the texts of these rows."""
        return self.target.rows(self.leaks[0], ids, self.mask[rows, : ids.shape[1]])

    def record(self, rows: Tensor, ids: Tensor, given: Tensor, forwards: int) -> list[int]:
        """Record what the model gave for the texts of some rows; which of them fit their leaks?"""
        self.passes[rows] += forwards
        self.forwards[rows] += forwards
        missing = (self.leaked[rows] - given) * self.seen[rows, :, None]
        loss = missing.square().sum((1, 2))
        self.stale[rows] = torch.where(loss < _WORTH * self.best[rows], 0, self.stale[rows] + 1)
        better = loss < self.best[rows]
        won = rows[better]
        self.best[won], self.best_ids[won] = loss[better], ids[better]
        self.best_estimates[won] = self.estimates[won]
        self.missing[rows] = missing
        self.ids[rows] = ids
        done: list[int] = []
        for row, numbers in zip(rows.tolist(), given, strict=True):
            n = self.length(row)
            leaked = self.leaked[row, :n].where(self.seen[row, :n, None], torch.nan)
            fit = compare(self.precisions[row], leaked, numbers[:n])
            self.good[row, :n] = fit.good & self.seen[row, :n]
            self.target.count.set(self.numbers[row], int(self.good[row, :n].sum()))
            if fit.settled:
                done.append(row)
        return done

    def unexplained(self, row: int, ids: Tensor) -> Tensor:
        """What texts (b, n) that are tried for a row leave unexplained (b, n, d)."""
        n, rows = ids.shape[1], torch.full(ids.shape[:1], row, device=ids.device)
        return (self.leaked[row, :n] - self.run(rows, ids)) * self.seen[row, :n, None]

    def pull(self, row: int, ids: Tensor) -> Tensor:
        """How steeply (n,) a row's loss changes with the embedding at each position of `ids`."""
        n = len(ids)
        with torch.enable_grad():
            words = self.table.vectors[ids][None].requires_grad_()
            mask = self.mask[row, None, :n].long()
            given = capture(
                self.target.model, self.leaks[row].exposure, embeddings=words, mask=mask
            )
            off = (self.leaks[row].rows(given)[0] - self.leaked[row, :n]) * self.seen[row, :n, None]
            (gradient,) = torch.autograd.grad(off.square().sum(), words)
        return gradient[0].norm(dim=-1)

    def take(self, row: int, tried: Tried) -> list[int]:
        """Run and record the text that trials gave a row: [row] if it fits its leak, or []."""
        rows = torch.tensor([row], device=self.ids.device)
        ids = self.ids[rows].clone()
        ids[0, : len(tried.ids)] = tried.ids
        return self.record(rows, ids, self.run(rows, ids), tried.forwards + 1)

    def improving(self, patience: int = _PATIENCE) -> bool:
        """Has any text made progress in its last `patience` passes?"""
        return len(self) > 0 and bool((self.stale < patience).any())

    def push(self) -> None:
        """Error feedback: move the estimates by what the snapped tokens leave unexplained."""
        self.estimates = self.estimates + self.missing @ self.back.M

    def return_to_best(self) -> None:
        """Go back to the ids and estimates with the least loss."""
        self.estimates, self.ids = self.best_estimates.clone(), self.best_ids.clone()
        self.good = ~self.mask

    def clear(self, row: int) -> Tensor:
        """Where (n,) a text's estimates are much nearer to its present tokens than to any other."""
        meant, doubt = self.table.meant(self.estimates[row])
        return (meant == self.ids[row]) & (doubt <= _DOUBT)

    def fix_clear(self) -> None:
        """Fix the tokens that are clear, so that the next stage has less to search.

        A token that a trial chose against the estimate is fixed too, if its row fits better than
        most. A token that was fixed wrongly is among the rows that fit worst, and is open again.
        """
        sizes = self.missing.square().sum(-1)
        typical = sizes.where(self.seen, torch.nan).nanmedian(-1, keepdim=True).values
        least = torch.maximum(_MISFIT * typical, _PART * sizes.amax(-1, keepdim=True))
        meant, doubt = self.table.meant(self.estimates.flatten(0, 1))
        tried = meant.view_as(self.ids) != self.ids
        clear = ~tried & (doubt <= _DOUBT).view_as(self.ids)
        fits = (clear & (sizes <= least)) | (tried & (sizes <= typical)) | self.good
        self.sure = self.free & self.seen & fits
        # An estimate that points clearly at a wrong token would stay there: it starts anew.
        stuck = (self.open & self.seen & clear)[..., None]
        self.estimates = torch.where(stuck, self.back.estimate(self.leaked), self.estimates)

    def anchored(self) -> Tensor:
        """The estimates, with the token's own embedding wherever the token is known."""
        known = ~self.open[..., None]
        return torch.where(known, self.table.vectors[self.ids], self.estimates)

    def objective(self, start: Tensor, root: Tensor) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        """The loss at embeddings start + z·root, and its gradient in z; what is known is fixed."""
        moves = self.open[..., None]
        sizes = torch.tensor([p.scale for p in self.precisions], device=start.device).square()

        def at(z: Tensor) -> tuple[Tensor, Tensor]:
            self.passes = self.passes + 1
            with torch.enable_grad():
                z = z.detach().requires_grad_()
                words = start + torch.where(moves, z.view_as(start) @ root, 0.0)
                leak = self.leaks[0]
                given = capture(
                    self.target.model, leak.exposure, embeddings=words, mask=self.mask.long()
                )
                off = (leak.rows(given) - self.leaked) * self.seen[..., None]
                losses = off.square().sum((1, 2)) / sizes
                (gradient,) = torch.autograd.grad(losses.sum(), z)
            return losses.detach(), gradient

        return at

    def leave(self, rows: list[int]) -> Iterator[tuple[int, Proposal]]:
        """Yield the best texts of these rows, and drop the rows from the batch."""
        for row in rows:
            n = self.length(row)
            yield (
                self.numbers[row],
                Proposal(
                    ids=self.best_ids[row, :n].tolist(),
                    passes=int(self.passes[row]),
                    forwards=int(self.forwards[row]),
                    fitting=self.back.passes,
                ),
            )
        gone = set(rows)
        kept = [row for row in range(len(self)) if row not in gone]
        for name in self._ROWS:
            setattr(self, name, getattr(self, name)[kept])
        self.numbers = [self.numbers[row] for row in kept]
        self.leaks = [self.leaks[row] for row in kept]
        self.precisions = [self.precisions[row] for row in kept]


def change_worst(texts: EncoderBatch) -> list[int]:
    """Give another token to the positions that fit worst, in texts that have just made progress.

    Once most tokens are right, the wrong ones have the largest residuals, and the estimate moved by
    its residual points at the right token. Three numbers of positions are tried: those above 80%,
    40% and 20% of the largest squared residual.
    """
    rows = (texts.stale == 0).nonzero().flatten()
    if not len(rows):
        return []
    ids, missing, free = texts.ids[rows], texts.missing[rows], texts.free[rows]
    moved = texts.estimates[rows] + missing @ texts.back.M
    size = missing.square().sum(-1).where(free, 0.0)
    worst = free & (size >= min(_WORST) * size.amax(-1, keepdim=True)) & (size > 0)
    nearest = texts.table.nearest(moved[worst], 2)
    changed = ids.clone()
    same = nearest[:, 0] == ids[worst]
    changed[worst] = torch.where(same, nearest[:, 1], nearest[:, 0])
    trials = torch.stack(
        [
            torch.where(worst & (size >= share * size.amax(-1, keepdim=True)), changed, ids)
            for share in _WORST
        ]
    )
    given = torch.stack([texts.run(rows, trial) for trial in trials])
    off = (given - texts.leaked[rows]) * texts.seen[rows, :, None]
    winner = off.square().sum((2, 3)).argmin(0)
    each = torch.arange(len(rows), device=rows.device)
    return texts.record(rows, trials[winner, each], given[winner, each], len(_WORST))


def try_worst(texts: EncoderBatch) -> list[int]:
    """Try candidates at the positions that fit worst, as long as that helps.

    First many positions in one pass. Their effects on each other hide the last few wrong tokens, so
    then the worst positions one by one, with twice the candidates. Where no single token helps any
    more, several are changed at once.
    """
    done: list[int] = []
    for row in _within(texts, _ROUGHLY):
        ids = texts.ids[row, : texts.length(row)].clone()
        fits: list[int] = []
        alone = False
        for _ in range(_SWEEPS):
            places = _worst_places(texts, row, alone)
            if fits or (alone and len(places) == 0):
                break
            count, batch_size = (2 * _TRIED, 1) if alone else (_TRIED, _IN_A_PASS)
            proposed = _proposed(texts, row, places, count)
            tried = try_rows(
                lambda ids, row=row: texts.unexplained(row, ids).square().sum(-1),
                ids, places, proposed, batch_size,
            )  # fmt: skip
            helped, fits = not torch.equal(tried.ids, ids), texts.take(row, tried)
            if alone and not helped and not fits:
                tried = _by_sums(texts, row, ids)
                helped, fits = not torch.equal(tried.ids, ids), texts.take(row, tried)
                if not helped:
                    break
            ids, alone = tried.ids, alone or not helped
        done += fits
    return done


def _by_sums(texts: EncoderBatch, row: int, ids: Tensor) -> Tried:
    """Several tokens at the worst positions of a text that is nearly right."""
    places = _worst_places(texts, row, alone=True)
    if row not in _within(texts, _NEAR) or len(places) < 2:
        return Tried(ids, 0.0, 0)
    proposed = _proposed(texts, row, places, _MORE * _TRIED)
    return try_sums(lambda ids: texts.unexplained(row, ids).flatten(1), ids, places, proposed)


def _worst_places(texts: EncoderBatch, row: int, alone: bool) -> Tensor:
    """The positions that fit worst; unless each is tried alone, only those that are not clear."""
    open_ = texts.free[row] & texts.seen[row] & ~texts.good[row]
    if not alone:
        open_ &= ~texts.clear(row)
    size = texts.missing[row].square().sum(-1).where(open_, 0.0)
    return size.topk(min(_ALONE if alone else _PLACES, int(open_.sum()))).indices


def _proposed(texts: EncoderBatch, row: int, places: Tensor, count: int) -> Tensor:
    """The candidates (m, count) for some positions, from five lists in turn.

    The tokens nearest to the estimate, and to the estimate moved by its row's residual; each among
    all tokens, and among those that the text already has, as long texts repeat words. And those
    nearest to the present token, moved likewise: a wrong choice is often similar to the right one.
    """
    estimates, nearest = texts.estimates[row, places], texts.table.nearest
    push = texts.missing[row, places] @ texts.back.M
    present = texts.table.vectors[texts.ids[row, places]] + push
    own = texts.ids[row][texts.mask[row]].unique()
    lists = [
        nearest(estimates + push, count), nearest(estimates + push, count, own),
        nearest(present, count), nearest(estimates, count), nearest(estimates, count, own),
    ]  # fmt: skip
    width = min(part.shape[1] for part in lists)
    mixed = torch.stack([part[:, :width] for part in lists], -1).flatten(1)
    return _distinct(mixed, texts.ids[row, places], count)


def _distinct(lists: Tensor, present: Tensor, count: int) -> Tensor:
    """The first `count` tokens of each list (m, k), with repeats and the present token last."""
    same = lists[:, :, None] == lists[:, None, :]
    repeated = same.tril(-1).any(-1) | (lists == present[:, None])
    order = repeated.long().argsort(dim=1, stable=True)
    return lists.gather(1, order)[:, :count]


def try_everywhere(texts: EncoderBatch, sweeps: int) -> list[int]:
    """Try the tokens nearest to the estimates at each position of texts that are nearly right.

    That is a few hundred forward passes for a text, so it comes last.
    """
    done: list[int] = []
    for row in _within(texts, _NEAR):
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
    """Try all tokens, in at most `most` texts for each, where texts are nearly right.

    Those that the text already has come first, then the others as tokenizers number them: marks and
    frequent words before the rest.
    """
    done: list[int] = []
    for row in _within(texts, _ROUGHLY):
        ids, left = texts.best_ids[row, : texts.length(row)].clone(), most
        fits = texts.take(row, Tried(ids, 0.0, 0))
        while not fits and left > 0:
            own = ids[texts.free[row, : len(ids)]].unique()
            every = torch.arange(len(texts.table.vectors), device=ids.device)
            tried = try_all(
                lambda ids, row=row: texts.unexplained(row, ids).square().sum((1, 2)),
                ids, _causes(texts, row, ids), torch.cat([own, every[~torch.isin(every, own)]]),
                left,
            )  # fmt: skip
            if not tried.loss < _WORTH * float(texts.best[row]):
                break
            ids, left, fits = tried.ids, left - tried.forwards, texts.take(row, tried)
        done += fits
    return done


def _causes(texts: EncoderBatch, row: int, ids: Tensor) -> Tensor:
    """The positions that fit worst, and in turn with them those on which the loss depends most."""
    worst = _worst_places(texts, row, alone=True)
    steep = texts.pull(row, ids).where(texts.free[row, : len(ids)], 0.0).topk(len(worst)).indices
    both = torch.stack([worst, steep], 1).flatten().tolist()
    return torch.tensor(list(dict.fromkeys(both))[:_ALONE], device=ids.device)


def _within(texts: EncoderBatch, share: float) -> list[int]:
    """The texts whose residual is less than a share of their leak's variance."""
    sizes = torch.tensor([p.scale for p in texts.precisions], device=texts.best.device).square()
    numbers = texts.seen.sum(-1) * texts.leaked.shape[-1]
    return (texts.best < share * sizes * numbers).nonzero().flatten().tolist()
