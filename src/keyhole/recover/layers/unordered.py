"""Text from hidden states in random order: of an encoder, and of a causal decoder.

**An encoder.** What a row says about its own token it says in any order; where it stood it says
too, in part. The attacker runs random texts through the model; with μ_p the mean of the rows at
position p and C the covariance of rows around the mean of their position, a row h is at p with
likelihood N(h; μ_p, C) (Fisher's linear discriminant), and the order is the assignment of least
total

    D(i, p) = (h_i − μ_p)ᵀ C⁻¹ (h_i − μ_p).

C⁻¹ looks past the directions in which tokens differ. In that order rows are read as if it were
theirs (encoder.py, forward passes only). The right order fits as a whole. In another one the
model's own answer shows which rows stand wrong: with f_i what it gives for row i's token at the
position q_i that the row was put to,

    D(i, p) = r ᵀ R⁻¹ r,   r = (h_i − μ_p) − (f_i − μ_{q_i}),

where the token is gone from the difference. R is the covariance of such r between random texts and
the same with tokens exchanged, and a small part of C for tokens that are wrong. The order is
corrected by it, and the likeliest exchanges of two neighbours are tried, until an order fits or
none is left to try. What has not come back by then is searched for in the best order of all.

**A decoder**, left to right. Position t depends on tokens ≤ t only (decoder.py), so behind the true
prefix one token and one row belong to each other: the token reproduces the row exactly, and all
other pairs do not. What a row says about its token needs no position (ordering.py). So at each
position the likeliest tokens of all rows that are left are run as one fan behind the prefix, and
each answer is compared with each of those rows. The pair that fits extends the prefix and takes its
row out; where none does, the fan is widened. A text of n tokens costs about n²/2 tokens through the
model where first guesses are right.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import torch
from torch import Tensor

from keyhole.core.errors import InputError, expect_count
from keyhole.core.numerics import with_ridge
from keyhole.models.branches import Branches
from keyhole.models.capture import Exposure, capture
from keyhole.recover.attack import Proposal, Target
from keyhole.recover.layers.decoder import Text, begun
from keyhole.recover.layers.encoder import EncoderStates
from keyhole.recover.layers.inverse_map import random_texts
from keyhole.recover.layers.ordering import Orderings
from keyhole.recover.layers.precision import compare, precision_of
from keyhole.recover.layers.row_length import whole_rows
from keyhole.recover.leaks import HiddenStates, Leak

_RIDGE = 1e-5
_AT_ONCE = 2048  # tokens in one pass
_INSIDE = 4  # tokens of the shortest random text between what opens and what closes it
_SHORTER = 16  # random texts of each of three lengths
_EXCHANGED = 0.3  # of the tokens of a random text change places with one that is near
_WRONG = 0.01  # of C that is added to R


@dataclass(frozen=True)
class UnorderedStates:
    """Order the rows, read them, correct the order: at most `rounds` times.

    In a round, `orders` of them are tried: the corrected one, and exchanges of two neighbours.
    `samples` random tokens fit what positions look like (None: 128 for each number in a row).
    `states` is the attack on rows in order.
    """

    states: EncoderStates = field(default_factory=EncoderStates)
    rounds: int = 8
    orders: int = 6
    samples: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        expect_count("rounds", self.rounds, least=0)
        expect_count("orders", self.orders)

    def __call__(self, target: Target, leaks: Sequence[Leak]) -> Iterator[tuple[int, Proposal]]:
        rows = [cast("HiddenStates", leak) for leak in whole_rows(target, leaks)]
        samples = self.samples or max(4000, 128 * target.parts.width)
        max_length = max(len(leak.values) for leak in rows)
        marks = places(target, rows[0].exposure, max_length, samples, self.seed)
        texts = [_Text(number, leak, marks) for number, leak in enumerate(rows)]
        brief = replace(self.states, rounds=0, sweeps=0)
        for _ in range(self.rounds + 1):
            target.count.begin(text.number for text in texts)
            _try(target, brief, texts)
            yield from ((text.number, text.proposal(marks)) for text in texts if text.fits)
            texts = [text for text in texts if not text.fits]
            for text in texts:
                text.think(marks, self.orders)
            if not any(text.wanted for text in texts):
                break
        for text in texts:
            text.wanted = [text.order]
        _try(target, self.states, texts)
        yield from ((text.number, text.proposal(marks)) for text in texts)


class _Text:
    """One text under way: the best order so far, what was read in it, what to try next."""

    def __init__(self, number: int, leak: HiddenStates, marks: Places) -> None:
        self.number, self.leak = number, leak
        self.order = marks.order(leak.values.to(marks.means.device))
        self.wanted = [self.order]
        self.tried: set[tuple[int, ...]] = set()
        self.best, self.fits, self.loss = Proposal([]), False, float("inf")
        self.given = leak.values
        self.passes = self.forwards = 0

    def note(self, order: Tensor, read: Proposal, given: Tensor) -> None:
        """Take down what was read in an order, and what the model gives for it."""
        self.tried.add(tuple(order.tolist()))
        self.passes += read.passes + 1
        self.forwards += read.forwards + 1
        leak = self.leak.ordered(order)
        leaked = leak.values.to(given)
        loss = float((given - leaked).square().nansum())
        fits = compare(precision_of(leak), leaked, given).settled
        if (fits, -loss) > (self.fits, -self.loss):
            self.order, self.best, self.given = order, read, given
            self.fits, self.loss = fits, loss

    def think(self, marks: Places, most: int) -> None:
        """The next orders to try: the corrected one, then the likeliest exchanges."""
        rows = self.leak.values[self.order].to(marks.means.device)
        corrected, rising = marks.reordered(rows, self.given.to(rows))
        orders = [self.order[corrected]]
        for place in rising.argsort().tolist():
            swapped = self.order.clone()
            swapped[[place, place + 1]] = self.order[[place + 1, place]]
            orders.append(swapped)
        untried = [order for order in orders if tuple(order.tolist()) not in self.tried]
        self.wanted = untried[:most]

    def proposal(self, marks: Places) -> Proposal:
        return replace(
            self.best, passes=self.passes, forwards=self.forwards,
            fitting=self.best.fitting + marks.passes, note=f"{len(self.tried)} orders tried",
        )  # fmt: skip


def _try(target: Target, states: EncoderStates, texts: Sequence[_Text]) -> None:
    """Read every text in all orders that are wanted of it, as one batch."""
    trials = [(text, order) for text in texts for order in text.wanted]
    if not trials:
        return
    quiet = Target.of(target.model, target.tokenizer)  # trials are no texts to be counted
    leaks = [text.leak.ordered(order) for text, order in trials]
    for number, read in states(quiet, leaks):
        text, order = trials[number]
        ids = torch.tensor([read.ids], device=target.parts.device)
        text.note(order, read, target.rows(leaks[number], ids)[0])


@dataclass(frozen=True)
class UnorderedPrefixes:
    """Left-to-right search for the token and its row.

    `fans`: how many of each row's likeliest tokens are tried, in turn, until one fits. `widest`:
    tokens in one pass. `samples`: random tokens for the ordering (None: eight for each number in a
    row).
    """

    fans: tuple[int, ...] = (1, 4, 16, 64, 256)
    widest: int = 512
    samples: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.fans or min(self.fans) < 1 or self.widest < 1:
            raise InputError(f"fans and widest must be positive: got {self.fans} and {self.widest}")

    def __call__(self, target: Target, leaks: Sequence[Leak]) -> Iterator[tuple[int, Proposal]]:
        leaks = whole_rows(target, leaks)
        texts, orders = begun(target, leaks, self.samples, self.seed)
        fitting = orders.spent
        for text in texts:
            target.count.begin([text.number])
            self._read(target, leaks[0].exposure, orders, text)
            yield text.number, text.proposal(target, fitting)
            fitting = 0  # spent once for all texts

    @torch.no_grad()
    def _read(self, target: Target, exposure: Exposure, orders: Orderings, text: Text) -> None:
        device = text.rows.device
        branches = Branches(target.model, torch.zeros(1, dtype=torch.long, device=device))
        left = text.rows.isfinite().all(-1).nonzero().flatten()
        # Where the search ends early, the rest is proposed in the order in which it leaked.
        likeliest = orders.rest.likelihood(text.rows).argmax(-1)
        while len(left):
            pair = self._pair(branches, exposure, orders, text, left)
            if pair is None:
                text.given_up, text.unexplained = True, len(text.rows) - text.position
                break
            token, row = pair
            text.settle([token])
            left = left[left != row]
            target.count.set(text.number, text.position)
        gaps = (~text.rows.isfinite().all(-1)).nonzero().flatten()
        text.guesses = torch.cat([likeliest[:0].new_zeros(text.position), likeliest[left],
                                  likeliest[gaps]])[: len(text.rows)]  # fmt: skip

    def _pair(
        self, branches: Branches, exposure: Exposure, orders: Orderings, text: Text, left: Tensor
    ) -> tuple[int, int] | None:
        """The next token and the row that it reproduces; the prefix is extended by it."""
        device, at = text.rows.device, text.position
        ordering = orders.rest if at else orders.opening
        scores, spread = ordering.likelihood(text.rows[left]), orders.spread(at)
        limit, tried = text.tolerance.limit(text.rows.shape[-1]), torch.zeros(0, device=device)
        for count in self.fans:
            wanted = scores.topk(min(count, scores.shape[1])).indices.T.flatten().unique()
            fresh = wanted[~torch.isin(wanted, tried)]
            tried = torch.cat([tried, fresh])
            for fan in fresh.split(self.widest):
                side = torch.zeros(1, dtype=torch.bool, device=device)
                given = branches.expose(exposure, side, ids=fan[None])["values"][0]
                text.passes, text.tested = text.passes + 1, text.tested + len(fan)
                misfits = torch.stack([
                    text.tolerance.misfit(row, given - text.rows[row], spread)
                    for row in left.tolist()
                ])  # fmt: skip
                best = int(misfits.argmin())
                row, token = divmod(best, len(fan))
                fits = bool(misfits[row, token] <= limit)
                first, accepted, text_ = torch.tensor([[token], [fits], [0]], device=device)
                branches.accept(first, accepted, text_)
                if fits:
                    return int(fan[token]), int(left[row])
        return None


@dataclass(frozen=True, eq=False)
class Places:
    """`means` (n, d) of the rows at each position, `plain` C⁻¹ and `corrected` R⁻¹ (d, d).

    `ends` is what the special tokens that close a text add to the mean of their positions.
    """

    means: Tensor
    ends: Tensor
    plain: Tensor
    corrected: Tensor
    passes: int

    def order(self, rows: Tensor) -> Tensor:
        """The row (n,) at each position, from the rows (n, d) alone."""
        means = self.means[: len(rows)].clone()
        means[len(means) - len(self.ends) :] += self.ends[-len(means) :]
        return assigned(_distances(rows, means, self.plain))

    def reordered(self, rows: Tensor, given: Tensor) -> tuple[Tensor, Tensor]:
        """The same for `rows` in a tried order, of which the model gives `given` (n, d) there.

        With it by how much the distance rises (n − 1,) if a row and the next one change places.
        """
        means = self.means[: len(rows)]
        costs = _distances(rows.double() - given + means, means, self.corrected)
        now, exchanged = costs.diagonal(), costs.diagonal(1) + costs.diagonal(-1)
        return assigned(costs), (exchanged - now[1:] - now[:-1]).nan_to_num(torch.inf)


def _distances(rows: Tensor, means: Tensor, precision: Tensor) -> Tensor:
    """D (rows, positions), up to a constant for each row."""
    pull = means @ precision
    return (pull * means).sum(-1) - 2 * rows.to(means) @ pull.T


def assigned(costs: Tensor) -> Tensor:
    """The row (n,) at each position for costs (rows, positions); rows of NaN fill what is left."""
    seen = costs.isfinite().all(-1).cpu()
    from scipy.optimize import linear_sum_assignment  # on demand: no other attack needs it

    rows = seen.nonzero().flatten()
    chosen, places = linear_sum_assignment(costs.cpu()[rows].numpy())
    order = torch.full((len(costs),), -1)
    order[torch.as_tensor(places)] = rows[torch.as_tensor(chosen)]
    order[order < 0] = (~seen).nonzero().flatten()
    return order


@torch.no_grad()
def places(target: Target, exposure: Exposure, length: int, samples: int, seed: int) -> Places:
    """Fit positions up to `length`, from about `samples` random tokens.

    Most of them in texts of that length, a few in shorter ones, for what closes a text.
    """
    stream = torch.Generator().manual_seed(seed)
    opening, closing = (len(side) for side in target.frame())
    least = opening + closing + _INSIDE
    # So long that any token may stand at every position of a text, its last ones too.
    max_length = min(max(length, least) + closing, target.parts.max_length)
    lengths = sorted(
        {least + (max_length - least) * part // 4 for part in (1, 2, 3)} - {max_length}
    )
    few = [random_texts(target, _SHORTER, shorter, stream) for shorter in lengths]
    ids = random_texts(target, max(8, -(-samples // max_length)), max_length, stream)
    rows = _run(target, exposure, ids)
    means = rows.mean(0)
    around = (rows - means)[:, opening : max_length - closing].flatten(0, 1)
    ends = _ends(target, exposure, few, means, closing)
    spread = around.T @ around / len(around)
    left = _left_over(target, exposure, ids, rows, means, stream)
    between = left.T @ left / len(left) + _WRONG * spread
    passes = 2 * len(ids) + _SHORTER * len(few)
    return Places(means, ends, _inverse(spread), _inverse(between), passes)


def _run(target: Target, exposure: Exposure, ids: Tensor) -> Tensor:
    """Rows (b, n, d) of random texts."""
    device, size = target.parts.device, max(1, _AT_ONCE // ids.shape[1])
    return torch.cat([
        capture(target.model, exposure, ids=part.to(device))["values"].double()
        for part in ids.split(size)
    ])  # fmt: skip


def _ends(
    target: Target, exposure: Exposure, texts: list[Tensor], means: Tensor, closing: int
) -> Tensor:
    """What (closing, d) the last tokens of texts add to what others give at their positions."""
    added = means.new_zeros(closing, means.shape[1])
    for ids in texts:
        last = slice(ids.shape[1] - closing, ids.shape[1])
        added += (_run(target, exposure, ids)[:, last].mean(0) - means[last]) / len(texts)
    return added


def _left_over(
    target: Target, exposure: Exposure, ids: Tensor, rows: Tensor, means: Tensor,
    stream: torch.Generator,
) -> Tensor:  # fmt: skip
    """What (m, d) a row differs by from its token's in the same text with tokens exchanged."""
    opening, closing = (len(side) for side in target.frame())
    moved = _exchanged(len(ids), ids.shape[1], opening, closing, stream)
    other = _run(target, exposure, ids.gather(1, moved)) - means
    places = moved.to(rows.device)[..., None].expand_as(rows)
    own = (rows - means).gather(1, places)  # of the token that was moved there
    return (other - own)[:, opening : len(means) - closing].flatten(0, 1)


def _inverse(covariance: Tensor) -> Tensor:
    return torch.linalg.inv(with_ridge(covariance, _RIDGE))


def _exchanged(
    count: int, length: int, opening: int, closing: int, stream: torch.Generator
) -> Tensor:
    """Orders (count, length) in which some tokens changed places with one of the next three."""
    orders = torch.arange(length).repeat(count, 1)
    each = torch.arange(count)
    for place in range(opening, length - closing - 3):
        swap = torch.rand(count, generator=stream) < _EXCHANGED / 2
        other = place + 1 + torch.randint(3, (count,), generator=stream)
        first, second = orders[each, place].clone(), orders[each, other].clone()
        orders[each, place] = torch.where(swap, second, first)
        orders[each, other] = torch.where(swap, first, second)
    return orders
