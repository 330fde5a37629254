"""Read text from what a causal decoder exposes at any layer, left to right, exactly.

`DecoderStates` takes the model and a row of numbers for each position (hidden states,
keys and values, attention outputs), and proposes token ids. Where no token fits, the
proposal says so.

This is the idea of SipIt (*Language Models are Injective and Hence Invertible*, arXiv
2510.15511). Position t depends on tokens ≤ t only. So after the true prefix the right
token reproduces what leaked at t, and is recognised at once. The cost is linear in the
length. Departures:

- A candidate costs one token through the layers below the leak. The prefix is kept in a cache from
  which all candidates branch (models/branches.py), so a thousand tokens need no more
  than their own cache.
- Candidates are ordered by a likelihood that is fitted on random tokens (ordering.py), not by
  gradient steps, which cost a backward pass each and find one candidate.
- The first guesses for the next positions are tried as one chain. All that are right are accepted
  in one pass.
- If the likeliest tokens do not fit, the rest of the vocabulary is tried, in passes as large as
  memory allows. So the ordering decides how long the search takes, and never whether it
  finds the text: random weights, which no regression predicts, are read as exactly as
  trained ones.
- Rounded or noisy leaks are accepted by a test against their own error (`Tolerance`). The model's
  own arithmetic adds to it, because batches of other sizes round differently
  (precision.py). If arithmetic or stated noise exceeds 1% of the leak's spread, the
  first token that passes need not be the best (states of the first position hardly
  differ at the last layer), so several are compared at each position. If arithmetic
  exceeds 5% of a row, as in bfloat16 with large random weights, near tokens are run
  again as the leak was: in the whole text alone.
- If nothing in the vocabulary fits, an earlier token may have been accepted wrongly. In 8 bits the
  row of an attention sink is a few large numbers and zeros, which half the vocabulary
  fits. Other tokens that fit there are tried before the position is called unexplained,
  each together with the nearest tokens at this position.

Keys and values, and attention outputs, are searched in the same way: only the compared
rows differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from keyhole.core import not_applicable
from keyhole.core.tensors import row_numbers
from keyhole.models.branches import Branches
from keyhole.models.capture import Exposure, capture
from keyhole.recover.attack import Proposal, Proposals, Target
from keyhole.recover.layers.ordering import MANY, Orderings, contents, fit
from keyhole.recover.layers.precision import Precision, precision_of, rounding_error
from keyhole.recover.leaks import KeyValues, Leak, rows_of

# noise or arithmetic above this share of the leak's spread lets several tokens pass
_COARSE = 0.01
_ROUGH = 0.1  # rounding above this share of the leak's spread does so too
# arithmetic above this share of a row: near tokens are run in the leak's own shape
_CHAOTIC = 0.05
# the share of a number's spread granted to another machine's arithmetic
_ARITHMETIC = 1e-4
_ACCEPTED = 6.0  # standard deviations of a chi-square that the right token is granted
# how much worse random tokens must do for an unknown error to be believed
_BELIEVED = 1.5
# how much worse they must do for the rest of the vocabulary to be skipped
_CLEAR = 16.0
_ALONE = 4.0  # how much worse the second best token must do for that
# the share of random tokens that the order must have among its first for that
_REACH = 0.95
# of the limit: if accepted tokens fit better, the leak has no noise to be learnt
_CLEAN = 0.1
# candidates compared at each position but the first, if several may pass
_COMPARED = 32
_FAILURES = 2  # unexplained positions in a row that end the search
# positions looked back for another token, and times that this may happen
_MAX_REOPENED = 16
# pairs of an earlier token and the nearest ones that are run together
_TOGETHER = 50_000
_NEAREST = 16  # tried tokens that are kept, by each way to compare them


@dataclass(frozen=True)
class DecoderStates:
    """Left-to-right search.

    `samples`: random tokens for the ordering (None: eight for each number in a row).
    `fan`: candidates in the first pass of a position; each further pass is four times
    as large, up to `widest`; then come the others, until `most` tokens are tried (None:
    the whole vocabulary). `draft`: maximum length of a chain. `batch`: texts searched
    at once (None: one on a CPU, sixteen on a GPU).
    """

    samples: int | None = None
    fan: int = 8
    widest: int = 512
    most: int | None = None
    draft: int = 16
    batch: int | None = None
    seed: int = 0

    def __call__(self, target: Target, leaks: Sequence[Leak]) -> Proposals:
        if not target.parts.causal:
            reason = "only a causal model is read left to right"
            raise not_applicable(reason)
        texts, orders = texts_of(target, leaks, self.samples, self.seed)
        fitting = orders.spent
        batch = self.batch or (1 if target.device.type == "cpu" else 16)
        for start in range(0, len(texts), batch):
            search = Search(self, target, leaks[0].exposure, orders)
            for text in search(texts[start : start + batch]):
                yield text.number, text.proposal(target, fitting)
                fitting = 0  # spent once for all texts


class Text:
    """The search for one text: what leaked, what is accepted, and the state of the next position.

    A pass runs `guesses`, a first guess for every position, as a chain of `reach`
    tokens, or a fan of candidates for the next position. There, `tried` tokens gave the
    rows `given`; those in `alone` were run in the whole text alone; `forced` is the
    token once it is chosen.

    `misfits` are those of the accepted `ids`, as shares of the limit (NaN: nothing
    leaked), and `others` the other tokens that fit at earlier positions. `excluded` is
    the first position where nothing in the vocabulary fits. `row` is the text's place
    in the batch.
    """

    def __init__(
        self,
        target: Target,
        leak: Leak,
        number: int,
    ) -> None:
        self.number = number
        # Padding before the text is skipped: nothing attends to it.
        self.start = 0 if leak.mask is None else int(leak.mask.nonzero().min())
        self.mask = None if leak.mask is None else leak.mask[None].to(target.device)
        tensors = {name: part.to(target.device) for name, part in leak.tensors.items()}
        batch = {name: part[None] for name, part in tensors.items()}
        self.rows = contents(target, leak.exposure, batch)[0, self.start :]
        leak = replace(leak, **tensors)
        arithmetic = rounding_error(target, leak.exposure)
        precision = precision_of(leak, arithmetic)
        self.tolerance = Tolerance.of(target, leak, self.start, precision)
        # what arithmetic alone explains, if it is large
        self.rounded: Tolerance | None = None
        if arithmetic > _CHAOTIC:
            self.rounded = self.tolerance
            self.tolerance = Tolerance.of(target, leak, self.start, precision_of(leak))
        noisy = bool(leak.noise) or _COARSE < arithmetic <= _CHAOTIC
        limit = _COARSE if noisy else _ROUGH
        self.coarse = precision.relative > limit  # several tokens may pass
        self.guesses = torch.zeros(0, dtype=torch.long)
        self.ids: list[int] = []
        self.misfits: list[float] = []
        self.others: dict[int, list[int]] = {}
        self.excluded: int | None = None
        self.learnt = False  # the error is larger than stated
        self.given_up = False
        self.reopened = 0
        self.failed = 0
        self.unexplained = 0
        self.passes = 0
        self.tested = 0
        self.row = 0
        self.reach = 4
        self.begin_position(None)

    @property
    def position(self) -> int:
        return len(self.ids)

    @property
    def fans(self) -> bool:
        """Whether candidates for one position are next, and not a chain of first guesses."""
        leaked = not bool(self.rows[self.position].isnan().any())
        return self.forced is None and (bool(self.tried) or (self.coarse and leaked))

    @property
    def done(self) -> bool:
        return self.given_up or self.position == len(self.rows)

    def begin_position(self, token: int | None) -> None:
        """Forget what was tried; the next token may be chosen already."""
        self.tried: list[int] = []
        self.given: list[Tensor] = []
        self.alone: set[int] = set()
        self.forced = token

    def accept(self, tokens: list[int], misfits: list[float]) -> None:
        """Accept tokens with their misfits, and begin a new position."""
        self.ids += tokens
        self.misfits += misfits
        self.begin_position(None)

    def count_pass(self, tokens: int) -> None:
        """Count a pass of the model that tests so many tokens."""
        self.passes += 1
        self.tested += tokens

    def force(self, token: int) -> None:
        """Choose a token that fits for the next position."""
        self.failed = 0
        self.begin_position(token)

    def return_to(self, position: int, token: int) -> None:
        """Forget what was accepted from `position` on, and choose another token there."""
        self.ids = self.ids[:position]
        self.misfits = self.misfits[:position]
        earlier = [place for place in self.others if place <= position]
        self.others = {place: self.others[place] for place in earlier}
        self.begin_position(token)
        self.reopened += 1

    def proposal(self, target: Target, fitting: int) -> Proposal:
        pads = [target.pads()[0]] * self.start
        note = f"{self.tested} tokens tested for {len(self.rows)} positions"
        if self.unexplained or self.given_up:
            note += f"; nothing explains {self.unexplained} of them"
        if self.given_up:
            note += f", and the search ended at {self.position}"
        excluded = ""
        if self.excluded is not None:
            excluded = f"no token of the vocabulary fits at position {self.start + self.excluded}"
        return Proposal(
            [*pads, *self.ids, *self.guesses[self.position :].tolist()],
            self.passes,
            self.passes,
            fitting,
            note,
            self.tested,
            excluded,
        )


def texts_of(
    target: Target,
    leaks: Sequence[Leak],
    samples: int | None,
    seed: int,
) -> tuple[list[Text], Orderings]:
    """Return the texts of leaks, none of them read yet, and the order in which tokens are tried."""
    texts = [Text(target, leak, number) for number, leak in enumerate(leaks)]
    error = torch.stack([text.tolerance.error for text in texts]).median(0).values
    samples = samples or 8 * min(max(texts[0].rows.shape[-1], 128), MANY)
    return texts, fit(target, leaks[0].exposure, samples, seed, error)


@dataclass(frozen=True, eq=False)
class Tolerance:
    """Tests whether a tried token explains what leaked at its position.

    After the true prefix, the right token leaves exactly the leak's own error, from
    rounding and noise; it does not grow from position to position. With `u_j` its
    standard deviation for each number, `q = mean_j (difference_j / u_j)²` is near 1 for
    the right token. For any other it is larger by the squared distance of the two
    tokens' rows. A token is accepted if `q ≤ 1 + 6 √(2/f)`, six standard deviations of
    a chi-square over `f` numbers.

    `u² = rounding² + noise² + (κ s)²`. The `rounding` (n, f) is stated, inferred from
    the numbers or measured of the model's arithmetic. The `noise` is stated or learnt.
    A `share` κ of each number's spread `s` over tokens covers another machine's
    arithmetic. If nothing is accepted, the best of the tried tokens shows how large the
    error would have to be (equal for all numbers, or in proportion to their spread,
    whichever is likelier). This error is believed if random tokens would do much worse,
    and then kept.
    """

    rounding: Tensor
    noise: float
    share: float = _ARITHMETIC

    @classmethod
    def of(
        cls,
        target: Target,
        leak: Leak,
        start: int,
        precision: Precision,
    ) -> Tolerance:
        """Return the tolerance of a leak from position `start` on."""
        rounding = precision.rounding.nan_to_num(0.0)
        if isinstance(leak, KeyValues):
            rounding = _unrotated(target, leak, rounding)
        return cls(rounding[start:], float(precision.noise or 0.0))

    @property
    def error(self) -> Tensor:
        """The typical error (f,) of each number, for the ordering."""
        return (self.rounding.square().median(0).values + self.noise**2).sqrt()

    def misfit(
        self,
        position: int,
        off: Tensor,
        spread: Tensor,
    ) -> Tensor:
        """Return `q` for differences (k, f) from what leaked, as shares of what is accepted."""
        own = self.rounding[position].square() + self.noise**2
        variance = own + (self.share * spread).square()
        limit = 1 + _ACCEPTED * (2 / off.shape[-1]) ** 0.5
        return (off.square() / variance).nanmean(-1) / limit

    def learnt(self, off: Tensor, spread: Tensor) -> Learnt | None:
        """Return the error that explains the best of differences (k, f), if it can be believed."""
        explanations: list[tuple[float, Learnt]] = []
        for unit, name in ((torch.ones_like(spread), "noise"), (spread, "share")):
            q = (off / unit).square().nanmean(-1)
            best = int(q.argmin())
            size = float(q[best].sqrt())
            # of two tokens in one context
            usual = float(2 * (spread / unit).square().mean())
            if usual >= _BELIEVED * size**2:
                # −log likelihood of a Gaussian error
                surprise = float((unit * size).log().mean())
                larger = 1.1 * max(size, getattr(self, name))
                learnt = Learnt(best, usual / size**2, replace(self, **{name: larger}))
                explanations.append((surprise, learnt))
        return min(explanations, key=lambda each: each[0], default=(0.0, None))[1]


def _unrotated(
    target: Target,
    leak: KeyValues,
    sigma: Tensor,
) -> Tensor:
    """Return the errors (n, f) of keys and values once the rotation of keys is undone.

    That mixes the errors of two numbers of a key, which are neighbours or half a key
    apart. The mean square over four choices of signs, in half of which the two differ,
    is the sum of squares.
    """
    heads, length, size = leak.keys.shape
    by_head = sigma.view(length, heads, -1).transpose(0, 1)
    keys, values = by_head.split([size, leak.values.shape[-1]], -1)
    places = torch.arange(size, device=sigma.device)
    halves = 1.0 - 2 * (places >= size // 2)
    odd = 1.0 - 2 * (places % 2)
    signs = torch.stack([torch.ones_like(odd), halves, odd, halves * odd])
    positions = row_numbers(sigma).expand(len(signs), -1)
    signed = signs[:, None, None] * keys
    mixed = target.parts.unrotated(leak.layer, signed, positions)
    return rows_of({"keys": mixed.square().mean(0).sqrt(), "values": values})


class Learnt(NamedTuple):
    """A larger error, with which the tried token number `best` is right.

    The squared error of random tokens is `times` as large.
    """

    best: int
    times: float
    tolerance: Tolerance


@dataclass(eq=False)
class Search:
    """Searches several texts at once: a pass tries a chain or a fan of tokens for each of them."""

    method: DecoderStates
    target: Target
    exposure: Exposure
    orders: Orderings

    @torch.no_grad()
    def __call__(self, texts: Sequence[Text]) -> Iterator[Text]:
        for text in texts:
            self._guess(text)
        starts = self.target.tensor([text.start for text in texts])
        self.branches = Branches(self.target.model, starts)
        active = list(texts)
        while active:
            chunks = [self._next_tokens(text) for text in active]
            given = self._run(active, chunks)
            left: list[list[int]] = []  # row, first accepted token, how many
            for row, (text, chunk) in enumerate(zip(active, chunks, strict=True)):
                text.row = row
                accept = self._accept_from_fan if text.fans else self._accept_chain
                accepted = accept(text, chunk, given[row, : len(chunk)])
                self.target.count.set(text.number, text.position)
                if text.done:
                    yield text
                else:
                    left.append([row, *accepted])
            if left:
                rows, first, counts = self.target.tensor(left).mT
                self.branches.accept(first, counts, rows)
            active = [text for text in active if not text.done]

    def _guess(self, text: Text) -> None:
        """Guess a token for every position; the first are the special tokens of every text."""
        positions = row_numbers(text.rows)
        text.guesses = self.orders.first(text.rows, positions, 1)[:, 0]
        frame = self.target.frame()[0][: len(text.rows)]
        text.guesses[: len(frame)] = torch.tensor(frame, dtype=torch.long)

    def _next_tokens(self, text: Text) -> list[int]:
        """Return a chain of first guesses, or the next candidates for one position."""
        at = text.position
        if text.forced is not None:
            return [text.forced]
        if not text.fans:
            return text.guesses[at : at + text.reach].tolist()
        least = self.method.fan
        # at the first position no context helps, so more tokens are compared
        if text.coarse:
            least = _COMPARED if at else self.method.widest
        size = min(max(least, 4 * len(text.tried)), self.method.widest)
        order = self._order(text, size + len(text.tried)).tolist()
        order = [int(text.guesses[at]), *order]  # the guess may be a special token
        fresh = [token for token in dict.fromkeys(order) if token not in text.tried]
        return fresh[:size]

    def _order(self, text: Text, count: int) -> Tensor:
        """Return the `count` likeliest tokens (count,) at the next position."""
        context = 0.0
        if len(text.tried) >= self.method.fan:
            tried = self.target.tensor(text.tried)
            context = self.orders.context(text.position, tried, torch.stack(text.given))
        place = self.target.tensor([text.position])
        return self.orders.first(text.rows, place, count, context)[0]

    def _run(self, texts: Sequence[Text], chunks: Sequence[list[int]]) -> Tensor:
        """Run the chunks, padded to one length, and return their rows (b, q, f)."""
        counts = [len(chunk) for chunk in chunks]
        padded = [chunk + [chunk[-1]] * (max(counts) - len(chunk)) for chunk in chunks]
        given = self.branches.expose(
            self.exposure,
            self.target.tensor([not text.fans for text in texts]),
            self.target.tensor(padded),
            self.target.tensor(counts),
        )
        for text, count in zip(texts, counts, strict=True):
            text.count_pass(count)
        return contents(self.target, self.exposure, given, self.branches.positions)

    def _accept_chain(
        self,
        text: Text,
        chunk: list[int],
        rows: Tensor,
    ) -> tuple[int, int]:
        """Accept the first tokens of a chain that fit; return the first and how many."""
        at = text.position
        misfits = [
            float(self._misfit(text, at + number, row[None]))
            for number, row in enumerate(rows)
        ]
        right = 0 if text.forced is None else 1
        # The misfit of a row that did not leak is NaN, and any token is accepted there.
        while right < len(chunk) and not misfits[right] > 1:
            right += 1
        if right and text.forced is None:
            text.failed = 0
        text.accept(chunk[:right], misfits[:right])
        if right == len(chunk):
            text.reach = min(2 * text.reach, self.method.draft)
        else:
            text.reach = right + 1
            text.tried = [chunk[right]]
            text.given = [rows[right]]
        return 0, right

    def _accept_from_fan(
        self,
        text: Text,
        chunk: list[int],
        rows: Tensor,
    ) -> tuple[int, int]:
        """Accept the best candidate for one position if it fits; return its place and how many."""
        misfits = self._misfit(text, text.position, rows)
        best = int(misfits.argmin())
        if misfits[best] <= 1:
            text.accept([chunk[best]], [float(misfits[best])])
            text.failed = 0
            return best, 1
        if text.rounded is not None:
            nearest = self._nearest(text, self.target.tensor(chunk), rows)
            if self._fits_alone(text, self._explained(text, nearest)):
                return 0, 0
        text.tried += chunk
        text.given += list(rows)
        if len(text.tried) >= min(self.method.widest, self._most):
            self._exhaust(text)
        return 0, 0

    @property
    def _most(self) -> int:
        """The number of candidates at one position."""
        return min(self.method.most or self.target.vocabulary, self.target.vocabulary)

    def _exhaust(self, text: Text) -> None:
        """Try the rest of the vocabulary, and choose a token for the next position."""
        position = text.position
        tried = self.target.tensor(text.tried)
        nearest = self._nearest(text, tried, torch.stack(text.given))
        order = self._order(text, self._most)
        order = order[~torch.isin(order, tried)]
        done = len(tried)
        while True:
            if self._fits_alone(text, self._explained(text, nearest)):
                return
            learnt = text.tolerance.learnt(nearest.off, self.orders.spread(position))
            if not len(order) or self._is_noise(text, nearest, learnt):
                break
            size = min(3 * done, self.branches.at_once(position))
            tokens = order[:size]
            order = order[size:]
            done += len(tokens)
            rows = self._rows_of_each(text, position, tokens)
            nearest = self._nearest(text, tokens, rows, nearest)
            if nearest.misfits[0] <= 1:
                text.force(int(nearest.tokens[0]))
                return
            tested = (
                f"{done:,} of {self._most:,} tried at position {text.start + position}"
            )
            self.target.count.set(text.number, position, tested)
        if text.rounded is not None:
            if self._fits_alone(text, nearest.tokens):
                return
            explained = self._explained(text, nearest)
            if len(explained):
                text.force(int(explained[0]))
                return
        elif not len(order) and self._reopen(text, nearest.tokens):
            return
        if text.excluded is None and done == self.target.vocabulary:
            text.excluded = position
        self._leave_unexplained(text, nearest, learnt)

    def _is_noise(
        self,
        text: Text,
        nearest: Nearest,
        learnt: Learnt | None,
    ) -> bool:
        """Return whether the leak is noisy so clearly that no more tokens need be tried.

        Then noise is at all positions, the best token stands out among those tried, and
        the order in which they are tried seldom misses.
        """
        if learnt is None or learnt.times < _CLEAR or not nearest.alone:
            return False
        misfits = torch.tensor(text.misfits)
        clean = len(misfits) > 0 and not misfits.nanmedian() > _CLEAN
        if clean and not text.learnt:
            return False
        return self.orders.at(text.position).reach(self.method.widest) >= _REACH

    def _rows_of_each(
        self,
        text: Text,
        position: int,
        tokens: Tensor,
    ) -> Tensor:
        """Return the rows (k, f) of tokens (k,), each alone after a text's first tokens."""
        given, places = self.branches.each(self.exposure, text.row, position, tokens)
        text.count_pass(len(tokens))
        return contents(self.target, self.exposure, given, places)[0]

    def _fits_alone(self, text: Text, tokens: Tensor) -> bool:
        """Choose the first of these tokens that fits if the whole text is run alone."""
        position = text.position
        before = [self.target.pads()[0]] * text.start + text.ids
        after = text.guesses[position + 1 :].tolist()
        for token in tokens.tolist():
            if token in text.alone:
                continue
            text.alone.add(token)
            ids = self.target.tensor([[*before, token, *after]])
            given = capture(self.target.model, self.exposure, ids=ids, mask=text.mask)
            text.count_pass(1)
            rows = contents(self.target, self.exposure, given)[0, text.start :]
            if self._misfit(text, position, rows[position : position + 1])[0] <= 1:
                text.force(token)
                return True
        return False

    def _reopen(self, text: Text, nearest: Tensor) -> bool:
        """Put another token that fits at the latest earlier position that has one.

        With it, one of the `nearest` tokens should fit at this position. Where none
        does, the few tokens that fit at the earlier position are tried in turn.
        """
        position = text.position
        # many tokens pass a test against noise
        if text.learnt or text.reopened >= _MAX_REOPENED:
            return False
        for place in reversed(range(max(0, position - _MAX_REOPENED), position)):
            if place not in text.others:
                fits = text.misfits[place] <= 1  # false if nothing leaked there
                text.others[place] = self._other_fits(text, place) if fits else []
            others = text.others[place]
            chosen = self._fits_before(text, place, others, nearest)
            if chosen is None and 0 < len(others) <= _MAX_REOPENED:
                chosen = others[0]
            if chosen is not None:
                others.remove(chosen)
                text.return_to(place, chosen)
                self.branches.lengths[text.row] = place
                return True
        return False

    def _fits_before(
        self,
        text: Text,
        place: int,
        others: list[int],
        nearest: Tensor,
    ) -> int | None:
        """Return the token of `others` at `place` with which all up to a `nearest` one fit."""
        if not others:
            return None
        between = nearest.new_tensor(text.ids[place + 1 :])
        size = max(1, self.branches.at_once(place) // (len(between) + 2))
        for last in nearest[: max(1, _TOGETHER // len(others))]:
            after = torch.cat([between, last[None]])
            for tokens in nearest.new_tensor(others).split(size):
                ids = torch.cat([tokens[:, None], after.expand(len(tokens), -1)], 1)
                given, places = self.branches.chains(
                    self.exposure, text.row, place, ids
                )
                rows = contents(self.target, self.exposure, given, places)
                text.count_pass(ids.numel())
                misfits = [
                    self._misfit(text, place + number, each)
                    for number, each in enumerate(rows.unbind(1))
                ]
                fits = ~(torch.stack(misfits) > 1).any(0)  # NaN where nothing leaked
                if fits.any():
                    return int(tokens[fits][0])
        return None

    def _other_fits(self, text: Text, place: int) -> list[int]:
        """Return the other tokens that fit at an earlier position, the best first."""
        parts = self.target.tokens.split(self.branches.at_once(place))
        rows = [self._rows_of_each(text, place, tokens) for tokens in parts]
        misfits = torch.cat([self._misfit(text, place, each) for each in rows])
        misfits[text.ids[place]] = torch.inf
        order = misfits.argsort(stable=True)
        return order[misfits[order] <= 1].tolist()

    def _leave_unexplained(
        self,
        text: Text,
        nearest: Nearest,
        learnt: Learnt | None,
    ) -> None:
        """Choose the nearest token though it does not fit; learn the error or count a failure."""
        best = 0
        if learnt is None:
            text.failed += 1
            text.unexplained += 1
            text.given_up = text.failed >= _FAILURES
        else:
            text.tolerance = learnt.tolerance
            text.learnt = True
            best = learnt.best
        text.begin_position(int(nearest.tokens[best]))

    def _misfit(
        self,
        text: Text,
        position: int,
        rows: Tensor,
    ) -> Tensor:
        """Return the misfit (k,) of rows (k, f) at a position; 1 is the limit."""
        off = rows - text.rows[position]
        return text.tolerance.misfit(position, off, self.orders.spread(position))

    def _nearest(
        self,
        text: Text,
        tokens: Tensor,
        rows: Tensor,
        others: Nearest | None = None,
    ) -> Nearest:
        """Return the nearest of tokens (k,) by their rows (k, f), and of `others`.

        A token counts by its misfit, and by errors that are yet to be learnt.
        """
        off = rows - text.rows[text.position]
        misfits = self._misfit(text, text.position, rows)
        if others is not None:
            tokens = torch.cat([others.tokens, tokens])
            off = torch.cat([others.off, off])
            misfits = torch.cat([others.misfits, misfits])
        relative = off / self.orders.spread(text.position)
        sizes = (misfits, off.square().nanmean(-1), relative.square().nanmean(-1))
        count = min(_NEAREST, len(tokens))
        best = [size.topk(count, largest=False).indices for size in sizes]
        kept = torch.cat(best).unique()
        kept = kept[misfits[kept].argsort()]
        return Nearest(tokens[kept], off[kept], misfits[kept])

    def _explained(self, text: Text, nearest: Nearest) -> Tensor:
        """Return the tokens that arithmetic explains, the best first; none if it is small."""
        if text.rounded is None:
            return nearest.tokens[:0]
        spread = self.orders.spread(text.position)
        misfits = text.rounded.misfit(text.position, nearest.off, spread)
        order = misfits.argsort()
        return nearest.tokens[order[misfits[order] <= 1]]


class Nearest(NamedTuple):
    """The nearest of the tried tokens (k,), the best first, with their differences (k, f)."""

    tokens: Tensor
    off: Tensor
    misfits: Tensor

    @property
    def alone(self) -> bool:
        """Whether the best token is so much nearer than the second that no other need be tried."""
        if len(self.misfits) < 2:
            return True
        best, second = self.misfits[:2].tolist()
        return second >= _ALONE * best
