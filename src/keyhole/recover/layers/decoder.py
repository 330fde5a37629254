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
- Leaks that are rounded or noisy are accepted by a test against their own error (Tolerance).
  Where noise is stated that is more than 1% of the leak's spread, the first token that passes need
  not be the best (states of the first position hardly differ at the last layer): several are
  compared at each position.

Keys and values, and attention outputs, are searched in the same way: what is compared is the leak.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import torch
from torch import Tensor

from keyhole.core import Status, Unsuccessful
from keyhole.models.branches import Branches
from keyhole.models.capture import Exposure
from keyhole.recover.attack import Proposal, Target
from keyhole.recover.layers.ordering import Orderings, contents, fit
from keyhole.recover.layers.precision import precision_of
from keyhole.recover.layers.row_length import whole_rows
from keyhole.recover.leaks import Leak

_COARSE = 0.01  # of the leak's spread: with stated noise above it several tokens may pass
_ARITHMETIC = 1e-4
_ACCEPTED = 6.0
_BELIEVED = 1.5  # how much worse random tokens must do before an unknown error is believed


@dataclass(frozen=True)
class DecoderStates:
    """Left-to-right search.

    `samples`: random tokens for the ordering (None: eight for each number in a row). `fan`:
    candidates in the first fan of a position; each next one is four times as large, up to `widest`,
    until `most` have been tried. `compared`: candidates at each position of a leak whose stated
    noise is coarse (at the first `widest`). `draft`: tokens of a chain, at most. `failures`:
    positions in a row that nothing explains before the search ends. `batch`: texts at a time (None:
    one on a CPU, sixteen on a GPU).
    """

    samples: int | None = None
    fan: int = 8
    widest: int = 512
    most: int = 4096
    compared: int = 32
    draft: int = 16
    failures: int = 2
    batch: int | None = None
    seed: int = 0

    def __call__(self, target: Target, leaks: Sequence[Leak]) -> Iterator[tuple[int, Proposal]]:
        if not target.parts.causal:
            raise Unsuccessful(Status.NOT_APPLICABLE, "only a causal model is read left to right")
        leaks = whole_rows(target, leaks)
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
    ids: list[int] = field(default_factory=lambda: cast("list[int]", []))
    guesses: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))
    tried: list[int] = field(default_factory=lambda: cast("list[int]", []))
    given: list[Tensor] = field(default_factory=lambda: cast("list[Tensor]", []))
    forced: int | None = None
    reach: int = 4
    failed: int = 0
    unexplained: int = 0
    passes: int = 0
    tested: int = 0
    given_up: bool = False

    @classmethod
    def of(cls, target: Target, leak: Leak, number: int) -> Text:
        """Padding before the text is passed over: nothing attends to it."""
        device = target.parts.device
        start = 0 if leak.mask is None else int(leak.mask.nonzero().min())
        tensors = {name: tensor[None].to(device) for name, tensor in leak.tensors.items()}
        positions = torch.arange(leak.length or 0, device=device)[None]
        rows = contents(target, leak.exposure, tensors, positions)[0, start:]
        leak = replace(leak, **{name: tensor[0] for name, tensor in tensors.items()})
        coarse = bool(leak.noise) and precision_of(leak).relative > _COARSE
        return cls(number, rows, start, Tolerance.of(leak, start), coarse)

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

    def settle(self, tokens: list[int]) -> None:
        self.ids += tokens
        self.tried, self.given, self.forced = [], [], None

    def proposal(self, target: Target, fitting: int) -> Proposal:
        ids = [target.pads()[0]] * self.start + self.ids
        ids += self.guesses[self.position :].tolist()
        note = f"{self.tested} tokens tested for {len(self.rows)} positions"
        if self.unexplained or self.given_up:
            note += f"; nothing explains {self.unexplained} of them"
        if self.given_up:
            note += f", and the search ended at {self.position}"
        return Proposal(
            ids, self.passes, self.passes, fitting=fitting, note=note, tested=self.tested
        )


def begun(
    target: Target, leaks: Sequence[Leak], samples: int | None, seed: int
) -> tuple[list[Text], Orderings]:
    """The texts of leaks, none of them read yet, and in which order tokens are tried for them."""
    texts = [Text.of(target, leak, number) for number, leak in enumerate(leaks)]
    error = torch.tensor([text.tolerance.error for text in texts]).median()
    samples = samples or 8 * max(texts[0].rows.shape[-1], 128)
    return texts, fit(target, leaks[0].exposure, samples, seed, float(error))


@dataclass(frozen=True, eq=False)
class Tolerance:
    """Does a tried token explain what leaked at its position? A test against the leak's own error.

    Behind the true prefix, the right token leaves exactly that error: what rounding and noise put
    there, nothing of it grows from position to position. With `u_j` its standard deviation for each
    number, `q = mean_j (difference_j / u_j)²` is near 1 for the right token and larger for any
    other, by the squared distance of the two tokens' rows. A token is accepted when
    `q ≤ 1 + 6 √(2/f)`, six deviations of a chi-square over `f` numbers.

    `u² = rounding² + noise² + (κ s)²`: the `rounding` (n, f) that is stated or visible in the
    numbers, the `noise` that is stated or learnt, and a `share` κ of each number's spread `s` over
    tokens for arithmetic in another order or on another machine. Where nothing is accepted, the
    best of the tried tokens tells what the error would have to be (the same for all numbers, or in
    proportion to their spread, whichever is likelier); it is believed if random tokens would do
    much worse, and kept for what follows.
    """

    rounding: Tensor
    noise: float
    share: float = _ARITHMETIC

    @classmethod
    def of(cls, leak: Leak, start: int) -> Tolerance:
        """What the leak says about itself, from position `start` on."""
        sigma = precision_of(replace(leak, noise=0.0)).sigma[start:]
        if leak.kind == "kv":
            # Undoing the rotation mixes the errors of two numbers: the row's own mean is right.
            sigma = sigma.square().nanmean(-1, keepdim=True).sqrt().expand_as(sigma)
        return cls(sigma.nan_to_num(0.0), float(leak.noise or 0.0))

    @property
    def error(self) -> float:
        """The typical error of one number, for the ordering."""
        return float((self.rounding.square().mean(-1).median() + self.noise**2).sqrt())

    def misfit(self, position: int, differences: Tensor, spread: Tensor) -> Tensor:
        """`q` of differences (k, f) between what tokens gave and what leaked at a position."""
        unit = self.rounding[position].square() + self.noise**2 + (self.share * spread).square()
        return (differences.square() / unit).nanmean(-1)

    def limit(self, numbers: int) -> float:
        return 1 + _ACCEPTED * (2 / numbers) ** 0.5

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
            explanations.append(Learnt(best, surprise, better))
        return min(explanations, key=lambda learnt: learnt.surprise, default=None)


@dataclass(frozen=True, eq=False)
class Learnt:
    """An error that would make the tried token number `best` right."""

    best: int
    surprise: float
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
        branches = Branches(self.target.model, starts)
        active = list(texts)
        while active:
            chunks = [self._chunk(text) for text in active]
            given = self._try(branches, active, chunks)
            moves = [
                self._read(text, chunk, rows[: len(chunk)])
                for text, chunk, rows in zip(active, chunks, given, strict=True)
            ]
            for text in active:
                self.target.count.set(text.number, text.position)
            yield from (text for text in active if text.done)
            on = [number for number, text in enumerate(active) if not text.done]
            if on:
                first, counts = torch.tensor([moves[number] for number in on], device=device).mT
                branches.accept(first, counts, torch.tensor(on, device=device))
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
            least = self.method.compared if at else self.method.widest
        size = min(max(least, 4 * len(text.tried)), self.method.widest)
        place = torch.tensor([at], device=text.rows.device)
        order = self.orders.first(text.rows, place, size + len(text.tried))[0].tolist()
        tried = set(text.tried)
        order = dict.fromkeys([int(text.guesses[at]), *order])  # the guess may be a special token
        return [token for token in order if token not in tried][:size]

    def _try(
        self, branches: Branches, texts: Sequence[Text], chunks: Sequence[list[int]]
    ) -> Tensor:
        """Run the chunks, padded to one length, and return their rows (b, q, f)."""
        device = self.target.parts.device
        size = max(len(chunk) for chunk in chunks)
        padded = [chunk + [chunk[-1]] * (size - len(chunk)) for chunk in chunks]
        chain = torch.tensor([not text.fans for text in texts], device=device)
        given = branches.expose(self.exposure, chain, ids=torch.tensor(padded, device=device))
        for text, chunk in zip(texts, chunks, strict=True):
            text.passes += 1
            text.tested += len(chunk)
        return contents(self.target, self.exposure, given, branches.positions)

    def _read(self, text: Text, chunk: list[int], rows: Tensor) -> tuple[int, int]:
        """Accept what explains the leak: (first accepted node of the chunk, how many)."""
        if not text.fans:
            return self._read_chain(text, chunk, rows)
        return self._read_fan(text, chunk, rows)

    def _read_chain(self, text: Text, chunk: list[int], rows: Tensor) -> tuple[int, int]:
        right = 0 if text.forced is None else 1
        # A row that did not leak has no misfit: whatever stands there is passed over.
        while right < len(chunk) and not self._misfit(text, right, rows[right : right + 1])[0] > 1:
            right += 1
        text.failed = 0 if right and text.forced is None else text.failed
        text.settle(chunk[:right])
        text.reach = min(2 * text.reach, self.method.draft) if right == len(chunk) else right + 1
        if right < len(chunk):
            text.tried, text.given = [chunk[right]], [rows[right]]
        return 0, right

    def _read_fan(self, text: Text, chunk: list[int], rows: Tensor) -> tuple[int, int]:
        misfits = self._misfit(text, 0, rows)
        best = int(misfits.argmin())
        if misfits[best] <= 1:
            text.settle([chunk[best]])
            text.failed = 0
            return best, 1
        text.tried += chunk
        text.given += list(rows)
        if len(text.tried) < min(self.method.most, self.target.vocabulary):
            return 0, 0
        self._unexplained(text)
        return 0, 0

    def _unexplained(self, text: Text) -> None:
        """Nothing fits: either the leak errs more than was thought, or this is the end."""
        at = text.position
        spread = self.orders.spread(at)
        off = torch.stack(text.given) - text.rows[at]
        learnt = text.tolerance.learnt(off, spread)
        if learnt is None:
            text.failed += 1
            text.unexplained += 1
            text.given_up = text.failed >= self.method.failures
            best = int(text.tolerance.misfit(at, off, spread).argmin())
        else:
            best, text.tolerance = learnt.best, learnt.tolerance
        text.forced = text.tried[best]
        text.tried, text.given = [], []

    def _misfit(self, text: Text, ahead: int, rows: Tensor) -> Tensor:
        """How far rows (k, f) miss what leaked `ahead` of the next position; 1 is the limit."""
        at = text.position + ahead
        off = rows - text.rows[at]
        spread = self.orders.spread(at)
        return text.tolerance.misfit(at, off, spread) / text.tolerance.limit(off.shape[-1])
