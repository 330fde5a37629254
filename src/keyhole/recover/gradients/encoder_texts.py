"""The texts of an encoder's batch, one by one, by a search that later spans judge.

Which tokens stand together in a text does not show in what the first attention receives. What it
gives for a text lies in the span of its output map's gradient at every position if all tokens of
the text are right, and is the nearer to it the more of them are. So a text is searched by changing
one token after the other, at each position to the one that brings all rows nearest to the span; it
is read once what the second attention receives lies in the span of that one's gradient, too.

DAGER combines all tokens that may stand at each position, which grows with the power of a text's
length. Here a text starts from one token whose place is clear, and from those at the other
positions that resemble it by their gradients (places.py); contexts.py makes a change cheap. What
texts that are read had of a token is no longer looked for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations

import torch
from torch import Tensor

from keyhole.recover.attack import Target
from keyhole.recover.gradients.contexts import Contexts
from keyhole.recover.gradients.inputs import second_inputs
from keyhole.recover.gradients.places import Places
from keyhole.recover.gradients.span import Span

_WON = 0.999  # of the misfit: a sweep that leaves more is the last
_NEAR = 5e-3  # the misfit from which on what is clear may change as well
_CLEAR = 0.7  # of a token's share: it stands there
_TOGETHER = 0.65  # how much a token resembles a text's others, at least


@dataclass(frozen=True)
class Search:
    """So many `lengths` are tried of a text, `sweeps` over each, and `starts` a text; `few` tokens
    are tried at a position first, and `kicks` of them where no single change helps."""

    lengths: int = 5
    sweeps: int = 8
    starts: int = 6
    few: int = 32
    kicks: int = 3


@dataclass(frozen=True, eq=False)
class Read:
    """A text's ids, whether all its rows lie in the span, and how far off they are."""

    ids: list[int]
    fits: bool
    misfit: float


@dataclass(eq=False)
class EncoderTexts:
    """What is known of a batch: tokens that may stand at each position, their places, and how texts
    of them are compared with the gradient. `span` is that of the second attention's inputs."""

    target: Target
    span: Span
    contexts: Contexts
    tokens: Sequence[Tensor]
    places: Places
    texts: int
    search: Search = field(default_factory=Search)

    def __post_init__(self) -> None:
        known, count = self.places.tokens, len(self.tokens)
        self._numbers = {int(id_): number for number, id_ in enumerate(known)}
        before, after = self.target.frame()
        self._before = [self._numbers[id_] for id_ in before if id_ in self._numbers]
        self._after = [self._numbers[id_] for id_ in after if id_ in self._numbers]
        self._may = torch.stack([torch.isin(known, here) for here in self.tokens], 1)
        self._ends = [
            place
            for place in range(len(before), count - len(self._after) + 1)
            if all(self._may[id_, place + off] for off, id_ in enumerate(self._after))
        ]
        special = torch.tensor([*before, *after, *self.target.pads()], device=known.device)
        self._may &= ~torch.isin(known, special)[:, None]
        order = self.places.shares.argsort(0, descending=True)
        self._likeliest = [
            order[:, at][self._may[order[:, at], at]] for at in range(len(self.tokens))
        ]
        # Shares that no text explains yet: where texts start, and what they start with.
        self._left = self.places.shares.clamp(min=0) * self._may

    def __iter__(self) -> Iterator[Read]:
        """Each text once; those that do not fit come last, the nearest ones first."""
        read: set[tuple[int, ...]] = set()
        others: dict[tuple[int, ...], Read] = {}
        for number, place in self._starts():
            text = self._read(number, place)
            key = tuple(text.ids)
            if text.fits and key not in read:
                read.add(key)
                yield text
            elif not text.fits:
                others[key] = text
            if len(read) == self.texts:
                return
        nearest = sorted(others.values(), key=lambda text: text.misfit)
        yield from nearest[: self.texts - len(read)]

    def _starts(self) -> Iterator[tuple[int, int]]:
        """Tokens whose places are clear and in no text that is read, the clearest first."""
        tried = torch.zeros_like(self._left, dtype=torch.bool)
        for _ in range(self.search.starts * self.texts):
            clear = (1 - (1 - self._left).abs()).masked_fill(tried, 0)  # a share of 1: all of it
            number, place = divmod(int(clear.argmax()), clear.shape[1])
            if float(clear[number, place]) <= 0:
                return
            tried[number, place] = True
            yield number, place

    def _read(self, number: int, place: int) -> Read:
        """The nearest text to the span that begins its search with a token at a place."""
        guess, clear = self._guess(number, place)
        last = int(clear.nonzero().max())
        best, misfit = self._ended(guess, last + 1), math.inf
        tried: set[int] = set()
        for _ in range(self.search.lengths):
            ends = [end for end in self._ends if end > last and end not in tried]
            if not ends or misfit < self._exact:
                break
            misfits = [float(self.contexts.misfit(self._ended(guess, end))) for end in ends]
            end = ends[min(range(len(ends)), key=misfits.__getitem__)]
            tried.add(end)
            text, reached = self._swept(self._ended(guess, end), min(misfits), clear)
            if reached < misfit:
                best, misfit = text, reached
                guess = torch.cat([text[:end], guess[end:]])
        for _ in range(self.search.sweeps):
            if not self._exact < misfit < _NEAR:
                break
            text, reached = self._kicked(best, misfit, clear)
            if not reached < misfit:
                break
            best, misfit = self._swept(text, reached, clear)
        ids = self.places.tokens[best].tolist()
        read = Read(ids, misfit < math.inf and self._fits(ids), misfit)
        if read.fits:
            for at, each in enumerate(best.tolist()):
                whole = self.places.shares[each, at] > _CLEAR  # then it stands nowhere else
                self._left[each, slice(None) if whole else at] = 0
        return read

    def _guess(self, number: int, place: int) -> tuple[Tensor, Tensor]:
        """At each position the likeliest token beside the start, and where (n,) it is clear."""
        beside = self.places.beside(number)[:, None].clamp(min=0)
        score = self._left * beside.square() + self._may * 1e-9
        guess = score.argmax(0)
        guess[place] = number
        at = torch.arange(len(guess), device=guess.device)
        clear = (self._left[guess, at] > _CLEAR) & (beside[guess, 0] > _TOGETHER)
        clear[place] = True
        guess[: len(self._before)] = torch.tensor(self._before, device=guess.device)
        return guess, clear

    def _ended(self, guess: Tensor, end: int) -> Tensor:
        return torch.cat([guess[:end], torch.tensor(self._after, device=guess.device).long()])

    def _swept(self, text: Tensor, misfit: float, clear: Tensor) -> tuple[Tensor, float]:
        """One token after the other changed for the better, first where none is clear."""
        inside = self._inside(text)
        free, few = [at for at in inside if not clear[at]], self.search.few
        for _ in range(self.search.sweeps):
            before = misfit
            for at in free:
                best, reached = self._best(text, at, few)
                if reached < misfit:
                    text, misfit = _with(text, at, best), reached
            if misfit < self._exact:
                break
            if misfit > _WON * before:
                if few == len(self._may) or misfit > _NEAR:
                    break
                free, few = inside, len(self._may)
        return text, misfit

    def _kicked(self, text: Tensor, misfit: float, clear: Tensor) -> tuple[Tensor, float]:
        """Two tokens changed at once, where one alone does not help: exchanged, or both others."""
        inside = self._inside(text)
        for one, other in combinations(inside, 2):
            exchanged = _with(_with(text, one, int(text[other])), other, int(text[one]))
            if self._may[text[other], one] and self._may[text[one], other]:
                reached = float(self.contexts.misfit(exchanged))
                if reached < misfit:
                    return exchanged, reached
        free = [at for at in inside if not clear[at]]
        for at in free:
            numbers, misfits = self._changed(text, at, self.search.few)
            for number in numbers[misfits.argsort()[: self.search.kicks]].tolist():
                changed = _with(text, at, number)
                for other in free:
                    best, reached = self._best(changed, other, self.search.few)
                    if reached < misfit:
                        return _with(changed, other, best), reached
        return text, misfit

    def _inside(self, text: Tensor) -> list[int]:
        """The positions between the special tokens."""
        return list(range(len(self._before), len(text) - len(self._after)))

    def _changed(self, text: Tensor, at: int, few: int) -> tuple[Tensor, Tensor]:
        """The likeliest tokens at a position, and the misfits of the text with each of them."""
        numbers = self._likeliest[at][:few]
        return numbers, self.contexts.changed(text, at, numbers)

    def _best(self, text: Tensor, at: int, few: int) -> tuple[int, float]:
        """The one of them that fits best, and its misfit."""
        numbers, misfits = self._changed(text, at, few)
        if not len(numbers):
            return int(text[at]), math.inf
        best = int(misfits.argmin())
        return int(numbers[best]), float(misfits[best])

    @property
    def _exact(self) -> float:
        """The misfit of a text that is right."""
        return self.span.tolerance**2

    def _fits(self, ids: list[int]) -> bool:
        """Does every row that the second attention would receive lie in its span?"""
        given = torch.tensor([ids], device=self.target.parts.device)
        far = self.span.distance(second_inputs(self.target, given)[0])
        return bool((far <= self.span.tolerance).all())


def _with(text: Tensor, place: int, number: int) -> Tensor:
    """The text with another token at a place."""
    changed = text.clone()
    changed[place] = number
    return changed
