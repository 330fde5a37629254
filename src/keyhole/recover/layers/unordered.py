"""Read text from hidden states in random order.

Both attacks take the model and rows whose order did not leak, and propose token ids in
the order of the text.

**An encoder** (`UnorderedStates`). A row identifies its token in any order, and partly
its position. The attacker runs random texts through the model. With μ_p the mean of the
rows at position p, and C the covariance of rows around the mean of their position, a
row h is at p with likelihood N(h; μ_p, C) (Fisher's linear discriminant). The order is
the assignment of least total

    D(i, p) = (h_i − μ_p)ᵀ C⁻¹ (h_i − μ_p).

C⁻¹ gives little weight to the directions in which tokens differ. Rows are read in that
order as if it were right (encoder.py, forward passes only). In the right order, the
text so read reproduces all rows. In a wrong order, the model's answer shows which rows
are misplaced. With f_i what it gives for row i's token at the position q_i that the row
was assigned to,

    D(i, p) = r ᵀ R⁻¹ r,   r = (h_i − μ_p) − (f_i − μ_{q_i}),

where the token cancels in the difference. R is the covariance of r between random texts
and the same texts with some tokens exchanged, plus a small part of C for tokens that
were read wrongly. The order is corrected by this D, and the likeliest exchanges of two
neighbours are tried, until an order fits or none is left. Texts that are not found get
a full search in their best order.

**A causal decoder** (`UnorderedPrefixes`). Position t depends on tokens ≤ t only
(decoder.py). So after the true prefix exactly one token reproduces exactly one of the
rows. The likelihood of a token given a row needs no position (ordering.py). So at each
position the likeliest tokens of all remaining rows are run after the prefix, and each
answer is compared with each of those rows. The pair that fits extends the prefix, and
its row is removed; if none fits, more tokens are tried. A text of n tokens costs about
n²/2 tokens through the model if first guesses are right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, cast

import torch
from torch import Tensor

from keyhole.core.errors import InputError, expect_count
from keyhole.core.numerics import with_ridge
from keyhole.core.tensors import indices_of, row_numbers, seeded
from keyhole.models.branches import Branches
from keyhole.models.capture import Exposure
from keyhole.recover.attack import Proposal, Proposals, Target, TokenCount
from keyhole.recover.layers.decoder import Text, texts_of
from keyhole.recover.layers.encoder import EncoderStates
from keyhole.recover.layers.inverse_map import random_texts
from keyhole.recover.layers.ordering import Orderings
from keyhole.recover.layers.precision import compare, precision_of
from keyhole.recover.leaks import HiddenStates, Leak

_SHORTEST = 4  # tokens of the shortest random text, without its special tokens
_SHORT_TEXTS = 16  # random texts of each of three shorter lengths
# the share of a random text's tokens that are exchanged with a token nearby
_EXCHANGED = 0.3
_MAX_CHUNK = 512  # tokens tried in one pass
_ADDED = 0.01  # the share of C that is added to R


@dataclass(frozen=True)
class UnorderedStates:
    """Order the rows, read them, correct the order: at most `rounds` times.

    In a round, `orders` orders are tried: the corrected one, and exchanges of two
    neighbours. `samples` random tokens fit the position model (None: 128 for each
    number in a row).
    """

    rounds: int = 8
    orders: int = 6
    samples: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        expect_count("rounds", self.rounds, least=0)
        expect_count("orders", self.orders)

    def __call__(self, target: Target, leaks: Sequence[Leak]) -> Proposals:
        rows = [cast("HiddenStates", leak) for leak in leaks]
        samples = self.samples or max(4000, 128 * target.parts.width)
        max_length = max(len(leak.values) for leak in rows)
        positions = fit_positions(target, rows[0], max_length, samples, self.seed)
        texts = [_Text(number, leak, positions) for number, leak in enumerate(rows)]
        forward_only = EncoderStates(rounds=0, sweeps=0, most=0)
        for _ in range(self.rounds + 1):
            _try(target, forward_only, texts)
            for text in texts:
                if text.fits:
                    yield text.number, text.proposal(positions)
            texts = [text for text in texts if not text.fits]
            for text in texts:
                text.choose_orders(positions, self.orders)
            if not any(text.next_orders for text in texts):
                break
        for text in texts:
            text.next_orders = [text.order]
        _try(target, EncoderStates(), texts)
        for text in texts:
            yield text.number, text.proposal(positions)


class _Text:
    """The search for one text: the best order so far, what was read in it, the orders to try."""

    def __init__(
        self,
        number: int,
        leak: HiddenStates,
        positions: PositionModel,
    ) -> None:
        self.number = number
        self.leak = leak
        self.order = positions.order(leak.values.to(positions.means.device))
        self.next_orders = [self.order]
        self.tried: set[tuple[int, ...]] = set()
        self.best = Proposal([])
        self.given = leak.values
        self.fits = False
        self.loss = float("inf")
        self.passes = 0
        self.forwards = 0

    def record(
        self,
        order: Tensor,
        read: Proposal,
        given: Tensor,
    ) -> None:
        """Record what was read in an order, and what the model gives for that text."""
        self.tried.add(tuple(order.tolist()))
        self.passes += read.passes + 1
        self.forwards += read.forwards + 1
        leak = self.leak.ordered(order)
        leaked = leak.values.to(given)
        loss = float((given - leaked).square().nansum())
        fits = compare(precision_of(leak), leaked, given).settled
        if (fits, -loss) > (self.fits, -self.loss):
            self.order = order
            self.best = read
            self.given = given
            self.fits = fits
            self.loss = loss

    def choose_orders(self, positions: PositionModel, most: int) -> None:
        """Choose the next orders to try: the corrected one, then the likeliest exchanges."""
        rows = self.leak.values[self.order].to(positions.means.device)
        corrected, increases = positions.reordered(rows, self.given.to(rows))
        orders = [self.order[corrected]]
        for place in increases.argsort().tolist():
            orders.append(swapped(self.order, place, place + 1))
        untried = [order for order in orders if tuple(order.tolist()) not in self.tried]
        self.next_orders = untried[:most]

    def proposal(self, positions: PositionModel) -> Proposal:
        return replace(
            self.best,
            passes=self.passes,
            forwards=self.forwards,
            fitting=self.best.fitting + positions.passes,
            note=f"{len(self.tried)} orders tried",
        )


def _try(
    target: Target,
    states: EncoderStates,
    texts: Sequence[_Text],
) -> None:
    """Read every text in its next orders, all as one batch."""
    trials = [(text, order) for text in texts for order in text.next_orders]
    if not trials:
        return
    quiet = replace(target, count=TokenCount())  # trials are not progress
    leaks = [text.leak.ordered(order) for text, order in trials]
    for number, read in states(quiet, leaks):
        text, order = trials[number]
        rows = target.rows(leaks[number], target.tensor([read.ids]))
        text.record(order, read, rows[0])


class PositionModel(NamedTuple):
    """How rows depend on their position: `means` (n, d), `plain` C⁻¹ and `corrected` R⁻¹ (d, d).

    `ends` (closing, d) are what the special tokens that end a text add to their
    positions' means.
    """

    means: Tensor
    ends: Tensor
    plain: Tensor
    corrected: Tensor
    passes: int

    def order(self, rows: Tensor) -> Tensor:
        """Return the likeliest row (n,) for each position, from the rows (n, d) alone."""
        means = self.means[: len(rows)].clone()
        means[len(means) - len(self.ends) :] += self.ends[-len(means) :]
        return assigned(_distances(rows, means, self.plain))

    def reordered(self, rows: Tensor, given: Tensor) -> tuple[Tensor, Tensor]:
        """Return the order corrected by what the model gives (n, d) for the text as read.

        Also return by how much the distance increases (n − 1,) if a row and the next
        are exchanged.
        """
        means = self.means[: len(rows)]
        costs = _distances(rows.double() - given + means, means, self.corrected)
        now = costs.diagonal()
        exchanged = costs.diagonal(1) + costs.diagonal(-1)
        return assigned(costs), (exchanged - now[1:] - now[:-1]).nan_to_num(torch.inf)


def _distances(
    rows: Tensor,
    means: Tensor,
    precision: Tensor,
) -> Tensor:
    """Return D (rows, positions), up to a constant for each row."""
    weighted = means @ precision
    return (weighted * means).sum(-1) - 2 * rows.to(means) @ weighted.T


def swapped(
    order: Tensor,
    first: int,
    second: int,
) -> Tensor:
    """Return the order (n,) with two places exchanged."""
    other = order.clone()
    other[[first, second]] = order[[second, first]]
    return other


def assigned(costs: Tensor) -> Tensor:
    """Return the row (n,) for each position by costs (rows, positions); rows of NaN come last."""
    from scipy.optimize import linear_sum_assignment  # on demand: it loads slowly

    seen = costs.isfinite().all(-1).cpu()
    rows = indices_of(seen)
    chosen, places = linear_sum_assignment(costs.cpu()[rows].numpy())
    order = torch.full((len(costs),), -1)
    order[torch.as_tensor(places)] = rows[torch.as_tensor(chosen)]
    order[order < 0] = indices_of(~seen)
    return order


@torch.no_grad()
def fit_positions(
    target: Target,
    leak: Leak,
    length: int,
    samples: int,
    seed: int,
) -> PositionModel:
    """Fit the model of positions up to `length` of such leaks, on about `samples` random tokens.

    Most are in texts of that length; a few shorter texts show what closing tokens add.
    """
    stream = seeded(seed)
    opening, closing = (len(side) for side in target.frame())
    least = opening + closing + _SHORTEST
    # Long enough that ordinary tokens occur at every position of a text, also the last
    # ones.
    length = min(max(length, least) + closing, target.parts.max_length)
    inside = slice(opening, length - closing)
    shorter = {least + (length - least) * part // 4 for part in (1, 2, 3)} - {length}
    short = [
        random_texts(target, _SHORT_TEXTS, each, stream) for each in sorted(shorter)
    ]
    ids = random_texts(target, max(8, -(-samples // length)), length, stream)
    rows = target.rows(leak, ids).double()
    means = rows.mean(0)
    ends = means.new_zeros(closing, means.shape[1])
    for texts in short:
        last = slice(texts.shape[1] - closing, texts.shape[1])
        own = target.rows(leak, texts).double()[:, last].mean(0)
        ends += (own - means[last]) / len(short)
    # How a token's row changes in the same text with some tokens exchanged.
    orders = _exchanged(len(ids), opening, length - closing, length, stream)
    orders = orders.to(ids.device)
    other = target.rows(leak, ids.gather(1, orders)).double() - means
    moved = (rows - means).gather(1, orders[..., None].expand_as(rows))
    covariance = _covariance((rows - means)[:, inside])
    corrected = _covariance((other - moved)[:, inside]) + _ADDED * covariance
    passes = 2 * len(ids) + _SHORT_TEXTS * len(short)
    plain = torch.linalg.inv(with_ridge(covariance))
    return PositionModel(
        means, ends, plain, torch.linalg.inv(with_ridge(corrected)), passes
    )


def _covariance(rows: Tensor) -> Tensor:
    """Return the mean of the outer products of rows (b, n, d)."""
    flat = rows.flatten(0, 1)
    return flat.T @ flat / len(flat)


def _exchanged(
    count: int,
    first: int,
    last: int,
    length: int,
    stream: torch.Generator,
) -> Tensor:
    """Return orders (count, length) with some tokens exchanged with one of the next three.

    They are exchanged at the places from `first` to before `last`.
    """
    orders = torch.arange(length).repeat(count, 1)
    each = row_numbers(orders)
    for place in range(first, last - 3):
        swap = torch.rand(count, generator=stream) < _EXCHANGED / 2
        other = place + 1 + torch.randint(3, (count,), generator=stream)
        other = torch.where(swap, other, place)
        taken = orders[each, other]
        orders[each, other] = orders[:, place]
        orders[:, place] = taken
    return orders


@dataclass(frozen=True)
class UnorderedPrefixes:
    """Left-to-right search for the next token and its row.

    `fans`: how many of each row's likeliest tokens are tried, one number after another
    until a token fits; in the end all tokens are tried. `samples`: random tokens that
    fit the ordering (None: eight for each number in a row).
    """

    fans: tuple[int, ...] = (1, 4, 16, 64, 256)
    samples: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.fans or min(self.fans) < 1:
            raise InputError(f"fans must be positive: got {self.fans}")

    def __call__(self, target: Target, leaks: Sequence[Leak]) -> Proposals:
        texts, orderings = texts_of(target, leaks, self.samples, self.seed)
        fitting = orderings.spent
        for text in texts:
            self._read(target, leaks[0].exposure, orderings, text)
            yield text.number, text.proposal(target, fitting)
            fitting = 0  # spent once for all texts

    @torch.no_grad()
    def _read(
        self,
        target: Target,
        exposure: Exposure,
        orderings: Orderings,
        text: Text,
    ) -> None:
        """Extend the text by one token and its row at a time, until no row is left or none fits."""
        branches = target.branches()
        leaked = text.rows.isfinite().all(-1)
        remaining = indices_of(leaked)
        # If the search ends early, the rest is proposed in the order in which it
        # leaked.
        likeliest = orderings.rest.likelihood(text.rows).argmax(-1)
        while len(remaining):
            pair = self._pair(branches, exposure, orderings, text, remaining)
            if pair is None:
                text.given_up = True
                text.unexplained = len(text.rows) - text.position
                text.excluded = text.position
                break
            token, row = pair
            text.accept([token], [0.0])
            remaining = remaining[remaining != row]
            target.count.set(text.number, text.position)
        gaps = indices_of(~leaked)
        # placeholders: these tokens are in text.ids
        found = likeliest.new_zeros(text.position)
        guesses = torch.cat([found, likeliest[remaining], likeliest[gaps]])
        text.guesses = guesses[: len(text.rows)]

    def _pair(
        self,
        branches: Branches,
        exposure: Exposure,
        orderings: Orderings,
        text: Text,
        remaining: Tensor,
    ) -> tuple[int, int] | None:
        """Return the next token and the row that it reproduces, and extend `branches` by it."""
        position = text.position
        scores = orderings.at(position).likelihood(text.rows[remaining])
        spread = orderings.spread(position)
        tried = remaining[:0]
        no_chain = remaining.new_zeros(1, dtype=torch.bool)  # tokens are alternatives
        for count in (*self.fans, scores.shape[1]):
            best = scores.topk(min(count, scores.shape[1])).indices
            wanted = best.unique()
            fresh = wanted[~torch.isin(wanted, tried)]
            tried = torch.cat([tried, fresh])
            for tokens in fresh.split(_MAX_CHUNK) if len(fresh) else ():
                exposed = branches.expose(exposure, no_chain, tokens[None])
                given = exposed["values"][0]
                text.count_pass(len(tokens))
                misfits = [
                    text.tolerance.misfit(row, given - text.rows[row], spread)
                    for row in remaining.tolist()
                ]
                whole = torch.stack(misfits)
                row, token = divmod(int(whole.argmin()), len(tokens))
                fits = bool(whole[row, token] <= 1)
                node, accepted, first_text = remaining.new_tensor(
                    [[token], [fits], [0]]
                )
                branches.accept(node, accepted, first_text)
                if fits:
                    return int(tokens[token]), int(remaining[row])
        return None
