"""Text from what a causal decoder exposes at any layer, left to right, exactly.

The SipIt idea (*Language Models are Injective and Hence Invertible*, arXiv 2510.15511): position t
depends on tokens ≤ t only, so behind the true prefix the right token reproduces what leaked at t
and is recognised at once; the cost is linear in the length. Departures:

- A candidate costs one token through the layers below the leak: the prefix is kept in a cache from
  which all candidates branch (models/branches.py), so a thousand tokens need no more than their
  own cache.
- Candidates are ordered by a likelihood that is fitted on random tokens (ordering.py)
  instead of by gradient steps, which cost a backward pass each and find one candidate.
- The first guesses of the next positions are tried as one chain: all that are right are accepted in
  one pass.
- Where the likeliest tokens do not fit, the rest of the vocabulary is gone through, in passes as
  large as memory allows. So the ordering decides how long it takes and never whether the text is
  found: random weights, which no regression predicts, are read as exactly as trained ones.
- Leaks that are rounded or noisy are accepted by a test against their own error (Tolerance), to
  which the model's own arithmetic adds: in a pass of another size it rounds otherwise
  (precision.py). Where that or stated noise is more than 1% of the leak's spread, the first token
  that passes need not be the best (states of the first position hardly differ at the last layer):
  several are compared at each position. Where it is more than 5% of a row, as for large random
  weights in bfloat16, tokens that are near are run again as the leak was: the whole text alone.
- Where nothing in the vocabulary fits, an earlier token may have been wrong within the tolerance:
  others that fit in its place are tried first. Only what is left then is called unexplained.

Keys and values, and attention outputs, are searched in the same way: what is compared is the leak.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from keyhole.core import Status, Unsuccessful
from keyhole.models.branches import Branches
from keyhole.models.capture import Exposure, capture
from keyhole.recover.attack import Proposal, Target
from keyhole.recover.layers.ordering import MANY, Orderings, contents, fit
from keyhole.recover.layers.precision import Precision, precision_of, rounding_error
from keyhole.recover.leaks import KeyValues, Leak, rows_of

_COARSE = 0.01  # of the leak's spread: with stated noise above it several tokens may pass
_ROUGH = 0.1  # … and so they may with steps that are coarser than that
_ARITHMETIC = 1e-4
_ACCEPTED = 6.0
_BELIEVED = 1.5  # how much worse random tokens must do before an unknown error is believed
_CLEAR, _ALONE = 16.0, 4.0  # … and they and the second best, before all other tokens are tried,
_REACH = 0.95  # … which must be of an order that has so many random tokens among its first
_CLEAN = 0.1  # of the limit: where accepted tokens fit so well, the leak has no noise to be learnt
_COMPARED = 32  # candidates at each position of a leak whose error is coarse, but at the first
_FAILURES = 2  # positions in a row that nothing explains before the search ends
_BACK = 16  # positions that are looked at again, and times that one gets another token, at most
_NEAREST = 16  # tried tokens that are kept, of each way to compare them
_CHAOTIC = 0.05  # of a row: where rounding moves it so far, near tokens are run in the leak's shape


@dataclass(frozen=True)
class DecoderStates:
    """Left-to-right search.

    `samples`: random tokens for the ordering (None: eight for each number in a row). `fan`:
    candidates in the first fan of a position; each next one is four times as large, up to `widest`;
    then come all others, of which `most` are tried (None: the whole vocabulary). `draft`: tokens of
    a chain, at most. `batch`: texts at a time (None: one on a CPU, sixteen on a GPU).
    """

    samples: int | None = None
    fan: int = 8
    widest: int = 512
    most: int | None = None
    draft: int = 16
    batch: int | None = None
    seed: int = 0

    def __call__(self, target: Target, leaks: Sequence[Leak]) -> Iterator[tuple[int, Proposal]]:
        if not target.parts.causal:
            raise Unsuccessful(Status.NOT_APPLICABLE, "only a causal model is read left to right")
        texts, orders = begun(target, leaks, self.samples, self.seed)
        fitting = orders.spent
        batch = self.batch or (1 if target.parts.device.type == "cpu" else 16)
        for start in range(0, len(texts), batch):
            search = Search(self, target, leaks[0].exposure, orders)
            for text in search(texts[start : start + batch]):
                yield text.number, text.proposal(target, fitting)
                fitting = 0  # spent once for all texts


@dataclass(eq=False)
class Text:
    """One text under way: what leaked, what is accepted, what was tried at the next position."""

    number: int
    rows: Tensor
    start: int
    tolerance: Tolerance
    coarse: bool = False
    mask: Tensor | None = None
    rounded: Tolerance | None = None  # where rounding alone may move rows far: what it explains
    ids: list[int] = field(default_factory=list[int])
    guesses: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))
    tried: list[int] = field(default_factory=list[int])
    given: list[Tensor] = field(default_factory=list[Tensor])
    alone: set[int] = field(default_factory=set[int])
    forced: int | None = None
    reach: int = 4
    misfits: list[float] = field(default_factory=list[float])
    others: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    learnt: bool = False  # the leak errs more than it says
    reopened: int = 0
    failed: int = 0
    unexplained: int = 0
    excluded: int | None = None  # the first position where nothing in the vocabulary fits
    passes: int = 0
    tested: int = 0
    given_up: bool = False
    row: int = 0  # of the branches that keep its prefix

    @classmethod
    def of(cls, target: Target, leak: Leak, number: int) -> Text:
        """Padding before the text is passed over: nothing attends to it."""
        device = target.parts.device
        start = 0 if leak.mask is None else int(leak.mask.nonzero().min())
        tensors = {name: tensor[None].to(device) for name, tensor in leak.tensors.items()}
        positions = torch.arange(leak.length or 0, device=device)[None]
        rows = contents(target, leak.exposure, tensors, positions)[0, start:]
        leak = replace(leak, **{name: tensor[0] for name, tensor in tensors.items()})
        rounding = rounding_error(target, leak.exposure)
        precision = precision_of(leak, rounding)
        tolerance, rounded = Tolerance.of(target, leak, start, precision), None
        if rounding > _CHAOTIC:
            tolerance, rounded = Tolerance.of(target, leak, start, precision_of(leak)), tolerance
        relative = precision.relative
        coarse = bool(leak.noise) or _COARSE < rounding <= _CHAOTIC
        coarse = (coarse and relative > _COARSE) or relative > _ROUGH
        mask = None if leak.mask is None else leak.mask[None].to(device)
        return cls(number, rows, start, tolerance, coarse, mask, rounded)

    @property
    def position(self) -> int:
        return len(self.ids)

    @property
    def fans(self) -> bool:
        """Are candidates for one position next, and not a chain of first guesses?"""
        leaked = not bool(self.rows[self.position].isnan().any())
        return self.forced is None and (bool(self.tried) or (self.coarse and leaked))

    @property
    def done(self) -> bool:
        return self.given_up or self.position == len(self.rows)

    def settle(self, tokens: list[int], misfits: list[float]) -> None:
        """Accept tokens with their misfits; 1 is the limit, NaN where nothing leaked."""
        self.ids += tokens
        self.misfits += misfits
        self.tried, self.given, self.forced, self.alone = [], [], None, set()

    def return_to(self, position: int, token: int) -> None:
        """Forget what was accepted from `position` on, and go on with another token there."""
        self.ids, self.misfits = self.ids[:position], self.misfits[:position]
        self.others = {place: left for place, left in self.others.items() if place <= position}
        self.tried, self.given, self.forced = [], [], token
        self.reopened += 1

    def proposal(self, target: Target, fitting: int) -> Proposal:
        ids = [target.pads()[0]] * self.start + self.ids
        ids += self.guesses[self.position :].tolist()
        note = f"{self.tested} tokens tested for {len(self.rows)} positions"
        if self.unexplained or self.given_up:
            note += f"; nothing explains {self.unexplained} of them"
        if self.given_up:
            note += f", and the search ended at {self.position}"
        excluded = ""
        if self.excluded is not None:
            excluded = f"no token of the vocabulary fits at position {self.start + self.excluded}"
        return Proposal(
            ids, self.passes, self.passes, fitting=fitting, note=note, tested=self.tested,
            excluded=excluded,
        )  # fmt: skip


def begun(
    target: Target, leaks: Sequence[Leak], samples: int | None, seed: int
) -> tuple[list[Text], Orderings]:
    """The texts of leaks, none of them read yet, and in which order tokens are tried for them."""
    texts = [Text.of(target, leak, number) for number, leak in enumerate(leaks)]
    error = torch.stack([text.tolerance.error for text in texts]).median(0).values
    samples = samples or 8 * min(max(texts[0].rows.shape[-1], 128), MANY)
    return texts, fit(target, leaks[0].exposure, samples, seed, error)


@dataclass(frozen=True, eq=False)
class Tolerance:
    """Does a tried token explain what leaked at its position? A test against the leak's own error.

    Behind the true prefix, the right token leaves exactly that error: what rounding and noise put
    there, nothing of it grows from position to position. With `u_j` its standard deviation for each
    number, `q = mean_j (difference_j / u_j)²` is near 1 for the right token and larger for any
    other, by the squared distance of the two tokens' rows. A token is accepted when
    `q ≤ 1 + 6 √(2/f)`, six deviations of a chi-square over `f` numbers.

    `u² = rounding² + noise² + (κ s)²`: the `rounding` (n, f) that is stated, visible in the numbers
    or measured of the model's arithmetic, the `noise` that is stated or learnt, and a `share` κ of
    each number's spread `s` over tokens, for another machine. Where nothing is accepted, the
    best of the tried tokens tells what the error would have to be (the same for all numbers, or in
    proportion to their spread, whichever is likelier); it is believed if random tokens would do
    much worse, and kept for what follows.
    """

    rounding: Tensor
    noise: float
    share: float = _ARITHMETIC

    @classmethod
    def of(cls, target: Target, leak: Leak, start: int, precision: Precision) -> Tolerance:
        """What the leak says about itself, from position `start` on, and the model's arithmetic."""
        rounding = precision.rounding.nan_to_num(0.0)
        if isinstance(leak, KeyValues):
            rounding = _unrotated(target, leak, rounding)
        return cls(rounding[start:], float(precision.noise or 0.0))

    @property
    def error(self) -> Tensor:
        """The typical error (f,) of each number, for the ordering."""
        return (self.rounding.square().median(0).values + self.noise**2).sqrt()

    def misfit(self, position: int, differences: Tensor, spread: Tensor) -> Tensor:
        """`q` of differences (k, f) between what tokens gave and what leaked at a position."""
        unit = self.rounding[position].square() + self.noise**2 + (self.share * spread).square()
        return (differences.square() / unit).nanmean(-1)

    def limit(self, numbers: int) -> float:
        return 1 + _ACCEPTED * (2 / numbers) ** 0.5

    def share_of_limit(self, position: int, differences: Tensor, spread: Tensor) -> Tensor:
        """`q` as a share of what is accepted."""
        return self.misfit(position, differences, spread) / self.limit(differences.shape[-1])

    def learnt(self, differences: Tensor, spread: Tensor) -> Learnt | None:
        """The best of the tried `differences` (k, f), if random tokens would do much worse."""
        explanations: list[Learnt] = []
        for unit, name in ((torch.ones_like(spread), "noise"), (spread, "share")):
            q = (differences / unit).square().nanmean(-1)
            usual = float(2 * (spread / unit).square().mean())  # of two tokens in one context
            best = int(q.argmin())
            size = float(q[best].sqrt())
            if not usual >= _BELIEVED * size**2:
                continue
            # Of the two explanations the likelier one: Gaussian errors of size · unit.
            surprise = float((unit * size).log().mean())
            better = replace(self, **{name: 1.1 * max(size, getattr(self, name))})
            explanations.append(Learnt(best, surprise, usual / size**2, better))
        return min(explanations, key=lambda learnt: learnt.surprise, default=None)


def _unrotated(target: Target, leak: KeyValues, sigma: Tensor) -> Tensor:
    """The errors (n, f) of keys and values once the rotation of keys is undone.

    That mixes the errors of two numbers of a key, which are neighbours or half a key apart. With
    signs that differ between the two in half of four cases, the mean square is the sum of squares.
    """
    heads, length, size = leak.keys.shape
    keys, values = (
        sigma.view(length, heads, -1).transpose(0, 1).split([size, leak.values.shape[-1]], -1)
    )
    places = torch.arange(size, device=sigma.device)
    halves, odd = (1.0 - 2 * (places >= size // 2), 1.0 - 2 * (places % 2))
    signs = torch.stack([torch.ones_like(odd), halves, odd, halves * odd])[:, None, None]
    positions = torch.arange(length, device=sigma.device).expand(len(signs), -1)
    mixed = target.parts.unrotated(leak.layer, signs * keys, positions)
    return rows_of({"keys": mixed.square().mean(0).sqrt(), "values": values})


@dataclass(frozen=True, eq=False)
class Learnt:
    """An error that would make the tried token number `best` right.

    Random tokens have `times` its square.
    """

    best: int
    surprise: float
    times: float
    tolerance: Tolerance


class Search:
    """Some texts side by side: each pass tries a chain or a fan behind every prefix."""

    def __init__(
        self, method: DecoderStates, target: Target, exposure: Exposure, orders: Orderings
    ) -> None:
        self.method = method
        self.target = target
        self.exposure = exposure
        self.orders = orders

    @torch.no_grad()
    def __call__(self, texts: Sequence[Text]) -> Iterator[Text]:
        device = self.target.parts.device
        for text in texts:
            self._guess(text)
        starts = torch.tensor([text.start for text in texts], device=device)
        self.branches = Branches(self.target.model, starts)
        active = list(texts)
        while active:
            chunks = [self._chunk(text) for text in active]
            given = self._try(active, chunks)
            moves: list[tuple[int, int]] = []
            for row, (text, chunk, rows) in enumerate(zip(active, chunks, given, strict=True)):
                text.row = row
                moves.append(self._read(text, chunk, rows[: len(chunk)]))
                self.target.count.set(text.number, text.position)
            yield from (text for text in active if text.done)
            on = [number for number, text in enumerate(active) if not text.done]
            if on:
                first, counts = torch.tensor([moves[number] for number in on], device=device).mT
                self.branches.accept(first, counts, torch.tensor(on, device=device))
            active = [active[number] for number in on]

    def _guess(self, text: Text) -> None:
        """A first guess for every position, and the special tokens that open every text."""
        positions = torch.arange(len(text.rows), device=text.rows.device)
        text.guesses = self.orders.first(text.rows, positions, 1)[:, 0]
        frame = self.target.frame()[0][: len(text.rows)]
        text.guesses[: len(frame)] = torch.tensor(frame, dtype=torch.long)

    def _chunk(self, text: Text) -> list[int]:
        """What to try next: a chain of first guesses, or the next candidates for one position."""
        at = text.position
        if text.forced is not None:
            return [text.forced]
        if not text.fans:
            return text.guesses[at : at + text.reach].tolist()
        least = self.method.fan
        if text.coarse:  # at the first position nothing but the token itself tells tokens apart
            least = _COMPARED if at else self.method.widest
        size = min(max(least, 4 * len(text.tried)), self.method.widest)
        order = self._order(text, size + len(text.tried)).tolist()
        tried = set(text.tried)
        order = dict.fromkeys([int(text.guesses[at]), *order])  # the guess may be a special token
        return [token for token in order if token not in tried][:size]

    def _order(self, text: Text, count: int) -> Tensor:
        """The tokens (count,) to try first at the next position, by all that is known of it."""
        device, context = text.rows.device, 0.0
        if len(text.tried) >= self.method.fan:
            tried = torch.tensor(text.tried, device=device)
            context = self.orders.context(text.position, tried, torch.stack(text.given))
        place = torch.tensor([text.position], device=device)
        return self.orders.first(text.rows, place, count, context)[0]

    def _try(self, texts: Sequence[Text], chunks: Sequence[list[int]]) -> Tensor:
        """Run the chunks, padded to one length, and return their rows (b, q, f)."""
        device = self.target.parts.device
        counts = [len(chunk) for chunk in chunks]
        padded = [chunk + [chunk[-1]] * (max(counts) - len(chunk)) for chunk in chunks]
        chain = torch.tensor([not text.fans for text in texts], device=device)
        given = self.branches.expose(
            self.exposure, chain, ids=torch.tensor(padded, device=device),
            counts=torch.tensor(counts, device=device),
        )  # fmt: skip
        for text, chunk in zip(texts, chunks, strict=True):
            text.passes += 1
            text.tested += len(chunk)
        return contents(self.target, self.exposure, given, self.branches.positions)

    def _read(self, text: Text, chunk: list[int], rows: Tensor) -> tuple[int, int]:
        """Accept what explains the leak: (first accepted node of the chunk, how many)."""
        return (self._read_fan if text.fans else self._read_chain)(text, chunk, rows)

    def _read_chain(self, text: Text, chunk: list[int], rows: Tensor) -> tuple[int, int]:
        right = 0 if text.forced is None else 1
        misfits = [float(self._misfit(text, n, rows[n : n + 1])[0]) for n in range(len(chunk))]
        # A row that did not leak has no misfit: whatever stands there is passed over.
        while right < len(chunk) and not misfits[right] > 1:
            right += 1
        text.failed = 0 if right and text.forced is None else text.failed
        text.settle(chunk[:right], misfits[:right])
        text.reach = min(2 * text.reach, self.method.draft) if right == len(chunk) else right + 1
        if right < len(chunk):
            text.tried, text.given = [chunk[right]], [rows[right]]
        return 0, right

    def _read_fan(self, text: Text, chunk: list[int], rows: Tensor) -> tuple[int, int]:
        misfits = self._misfit(text, 0, rows)
        best = int(misfits.argmin())
        if misfits[best] <= 1:
            text.settle([chunk[best]], [float(misfits[best])])
            text.failed = 0
            return best, 1
        if text.rounded is not None:
            spread = self.orders.spread(text.position)
            tokens = torch.tensor(chunk, device=rows.device)
            nearest = Nearest.of(tokens, rows - text.rows[text.position], text, spread)
            if self._in_own_shape(text, nearest.explained(text, spread)):
                return 0, 0
        text.tried += chunk
        text.given += list(rows)
        if len(text.tried) >= min(self.method.widest, self._most):
            self._exhaust(text)
        return 0, 0

    @property
    def _most(self) -> int:
        """Candidates at one position."""
        return min(self.method.most or self.target.vocabulary, self.target.vocabulary)

    def _exhaust(self, text: Text) -> None:
        """Go through the rest of the vocabulary, and decide what stands at the next position."""
        position = text.position
        spread = self.orders.spread(position)
        off = torch.stack(text.given) - text.rows[position]
        tried = torch.tensor(text.tried, device=off.device)
        nearest = Nearest.of(tried, off, text, spread)
        order = self._order(text, self._most)
        order, done = order[~torch.isin(order, tried)], len(tried)
        while True:
            if self._in_own_shape(text, nearest.explained(text, spread)):
                return
            learnt = text.tolerance.learnt(nearest.off, spread)
            if learnt is not None and self._is_noise(text, nearest, learnt):
                break
            if not len(order):
                break
            size = min(3 * done, self.branches.at_once(position))
            tokens, order, done = order[:size], order[size:], done + len(order[:size])
            off = self._behind(text, position, tokens) - text.rows[position]
            nearest = nearest.joined(Nearest.of(tokens, off, text, spread), spread)
            if nearest.misfits[0] <= 1:
                text.failed, text.forced = 0, int(nearest.tokens[0])
                return
            note = f"{done:,} of {self._most:,} tokens tried at position {text.start + position}"
            self.target.count.set(text.number, position, note)
        if text.rounded is not None:
            if self._in_own_shape(text, nearest.tokens):
                return
            if len(tokens := nearest.explained(text, spread)):
                text.failed, text.forced = 0, int(tokens[0])
                return
        elif not len(order) and self._reopen(text):
            return
        if text.excluded is None and done == self.target.vocabulary:
            text.excluded = position
        self._unexplained(text, nearest, learnt)

    def _is_noise(self, text: Text, nearest: Nearest, learnt: Learnt) -> bool:
        """Is the leak noisy, so clearly that the rest of the vocabulary need not be tried?

        Noise is at all positions, the best of the tried tokens stands out, and the order in which
        they are tried is one that seldom misses.
        """
        clean = bool(text.misfits) and not torch.tensor(text.misfits).nanmedian() > _CLEAN
        clear = learnt.times >= _CLEAR and nearest.alone
        if not clear or (clean and not text.learnt):
            return False
        return self.orders.at(text.position).reach(self.method.widest) >= _REACH

    def _behind(self, text: Text, position: int, tokens: Tensor) -> Tensor:
        """The rows (k, f) of many tokens (k,), each by itself behind a text's first tokens."""
        given, places = self.branches.each(self.exposure, text.row, position, tokens)
        text.passes, text.tested = text.passes + 1, text.tested + len(tokens)
        return contents(self.target, self.exposure, given, places)[0]

    def _in_own_shape(self, text: Text, tokens: Tensor) -> bool:
        """Does one of these tokens fit where the whole text is run alone, as it leaked?"""
        position, pads = text.position, [self.target.pads()[0]] * text.start
        device = text.rows.device
        places = torch.arange(text.start + len(text.rows), device=device)[None]
        for token in tokens.tolist():
            if token in text.alone:
                continue
            text.alone.add(token)
            after = text.guesses[position + 1 :].tolist()
            ids = torch.tensor([[*pads, *text.ids, token, *after]], device=device)
            given = capture(self.target.model, self.exposure, ids=ids, mask=text.mask)
            text.passes, text.tested = text.passes + 1, text.tested + 1
            row = contents(self.target, self.exposure, given, places)[0, text.start + position]
            if self._misfit(text, 0, row[None])[0] <= 1:
                text.failed, text.forced = 0, token
                return True
        return False

    def _reopen(self, text: Text) -> bool:
        """Put another token that fits as well at an earlier position, the latest such one."""
        position = text.position
        if text.learnt or text.reopened >= _BACK:  # noise accepts many tokens, and proves none
            return False
        for place in reversed(range(max(0, position - _BACK), position)):
            if place not in text.others:
                fits = text.misfits[place] <= 1  # or else nothing does, or nothing leaked there
                text.others[place] = self._fitting(text, place) if fits else []
            if text.others[place]:
                text.return_to(place, text.others[place].pop(0))
                self.branches.lengths[text.row] = place
                return True
        return False

    def _fitting(self, text: Text, place: int) -> list[int]:
        """The other tokens of the vocabulary that fit at an earlier position, the best first."""
        found = dict[int, float]()
        vocabulary = torch.arange(self.target.vocabulary, device=text.rows.device)
        for tokens in vocabulary.split(self.branches.at_once(place)):
            misfits = self._misfits(text, place, self._behind(text, place, tokens))
            for number in (misfits <= 1).nonzero().flatten().tolist():
                found[int(tokens[number])] = float(misfits[number])
        found.pop(text.ids[place], None)
        return sorted(found, key=lambda token: found[token])

    def _unexplained(self, text: Text, nearest: Nearest, learnt: Learnt | None) -> None:
        """Nothing fits: either the leak errs more than was thought, or this is the end."""
        if learnt is None:
            text.failed += 1
            text.unexplained += 1
            text.given_up = text.failed >= _FAILURES
        else:
            text.tolerance, text.learnt = learnt.tolerance, True
        text.forced = int(nearest.tokens[0 if learnt is None else learnt.best])
        text.tried, text.given = [], []

    def _misfit(self, text: Text, ahead: int, rows: Tensor) -> Tensor:
        """How far rows (k, f) miss what leaked `ahead` of the next position; 1 is the limit."""
        return self._misfits(text, text.position + ahead, rows)

    def _misfits(self, text: Text, position: int, rows: Tensor) -> Tensor:
        off = rows - text.rows[position]
        return text.tolerance.share_of_limit(position, off, self.orders.spread(position))


@dataclass(frozen=True, eq=False)
class Nearest:
    """Of tried tokens (k,) the nearest, the best first, with what each is off (k, f).

    They are compared by their misfits, and as errors that are yet to be learnt.
    """

    tokens: Tensor
    off: Tensor
    misfits: Tensor

    @classmethod
    def of(cls, tokens: Tensor, off: Tensor, text: Text, spread: Tensor) -> Nearest:
        misfits = text.tolerance.share_of_limit(text.position, off, spread)
        return cls(tokens, off, misfits)._kept(spread)

    def joined(self, other: Nearest, spread: Tensor) -> Nearest:
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Nearest(*(torch.cat(pair) for pair in pairs))._kept(spread)

    def explained(self, text: Text, spread: Tensor) -> Tensor:
        """Those that rounding explains, the best first; none where it does not move rows far."""
        if text.rounded is None:
            return self.tokens[:0]
        shares = text.rounded.share_of_limit(text.position, self.off, spread)
        order = shares.argsort()
        return self.tokens[order[shares[order] <= 1]]

    def _kept(self, spread: Tensor) -> Nearest:
        sizes = (self.misfits, *((self.off / u).square().nanmean(-1) for u in (1.0, spread)))
        count = min(_NEAREST, len(self.tokens))
        kept = torch.cat([size.topk(count, largest=False).indices for size in sizes]).unique()
        kept = kept[self.misfits[kept].argsort()]
        return Nearest(self.tokens[kept], self.off[kept], self.misfits[kept])

    @property
    def alone(self) -> bool:
        """Is the best so much nearer than the second that no other token need be tried?"""
        best, second = self.misfits[:2].tolist() if len(self.misfits) > 1 else (0.0, 1.0)
        return second >= _ALONE * best
