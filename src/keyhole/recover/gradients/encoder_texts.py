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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from keyhole.recover.attack import Target
from keyhole.recover.gradients.contexts import Contexts
from keyhole.recover.gradients.inputs import second_inputs
from keyhole.recover.gradients.places import Places
from keyhole.recover.gradients.span import Span

_WON = 0.999  # of the misfit: a sweep that leaves more is the last


@dataclass(frozen=True)
class Search:
    """So many `lengths` are tried of a text, `sweeps` over each, and `starts` a text."""

    lengths: int = 3
    sweeps: int = 8
    starts: int = 12


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
    tried: int = 0

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
            clear = self._left.masked_fill(tried, 0)
            best = int(clear.argmax())
            number, place = divmod(best, clear.shape[1])
            if not float(clear[number, place]):
                return
            tried[number, place] = True
            yield number, place

    def _read(self, number: int, place: int) -> Read:
        """The nearest text to the span that begins its search with a token at a place."""
        guess = self._guess(number, place)
        best: Read | None = None
        tried: set[int] = set()
        for _ in range(self.search.lengths):
            ends = [end for end in self._ends if end > place and end not in tried]
            if not ends:
                break
            misfits = [float(self.contexts.misfit(self._ended(guess, end))) for end in ends]
            end = ends[min(range(len(ends)), key=misfits.__getitem__)]
            tried.add(end)
            text, misfit = self._improved(self._ended(guess, end), min(misfits), place)
            if best is None or misfit < best.misfit:
                ids = self.places.tokens[text].tolist()
                best = Read(ids, self._fits(ids), misfit)
                guess = torch.cat([text[:end], guess[end:]])
            if best.fits:
                for at, id_ in enumerate(text.tolist()):
                    self._left[id_, at] = 0
                break
        return best or Read([], False, float("inf"))

    def _guess(self, number: int, place: int) -> Tensor:
        """At each position the token most like the start by its gradient, as far as it is there."""
        score = self._left * (1 + self.places.alike[:, number, None]) + self._may * 1e-9
        guess = score.argmax(0)
        guess[: len(self._before)] = torch.tensor(self._before, device=guess.device)
        guess[place] = number
        return guess

    def _ended(self, guess: Tensor, end: int) -> Tensor:
        return torch.cat([guess[:end], torch.tensor(self._after, device=guess.device).long()])

    def _improved(self, text: Tensor, misfit: float, place: int) -> tuple[Tensor, float]:
        """One token after the other changed for the better, outwards from `place`."""
        inside = range(len(self._before), len(text) - len(self._after))
        for _ in range(self.search.sweeps):
            before = misfit
            for at in sorted(inside, key=lambda at: abs(at - place)):
                misfits = self.contexts.changed(text, at)
                misfits = misfits.masked_fill(~self._may[:, at], torch.inf)
                best = int(misfits.argmin())
                self.tried += len(misfits)
                if float(misfits[best]) < misfit:
                    text, misfit = text.clone(), float(misfits[best])
                    text[at] = best
            if misfit > _WON * before or misfit < self.span.tolerance**2:
                break
        return text, misfit

    def _fits(self, ids: list[int]) -> bool:
        """Does every row that the second attention would receive lie in its span?"""
        given = torch.tensor([ids], device=self.target.parts.device)
        far = self.span.distance(second_inputs(self.target, given)[0])
        return bool((far <= self.span.tolerance).all())
