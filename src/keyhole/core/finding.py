"""One exposure of a target and what an attack made of it, and what could not be checked."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Any, Self

from keyhole.core.errors import InputError
from keyhole.core.exposure import NOT_CHECKED, Exposure
from keyhole.core.result import restored
from keyhole.core.status import OUTCOMES, Outcome, Status
from keyhole.core.text import percent


@dataclass(frozen=True)
class Remedied:
    """What was left to the same attack once a remedy was in place, measured.

    `left` is the share still given away, `words` say what was counted.
    """

    remedy: str
    left: float
    words: str


@dataclass(frozen=True)
class Finding:
    """One exposure of a target, and what one attack made of it.

    `sought` is what the attacker is after, `lower_bound` how many queries any attack needs.
    `control` marks an attack without any choice, run for comparison: it is no exposure, whatever it
    achieves. `texts`, where text is sought, shows it as it was and as it came back, in each
    precision; `cuts`, where it is a prediction, where attention was cut for it. `estimate` is what
    a sample says of all the texts of a store, `remedied` what was left where a remedy was tried.
    `extra` names what is not installed, where more could be found out or proved with it. `tried` is
    how many predictions `known` is a share of.

    A finding is one of two kinds. *Recovered*: an attack was run, and a judge compared what it gave
    with the target. *Exposed*: a route or a setting is open; the reason says what it gives,
    `command` what tries it. Nothing of it was read, so it has no exactness and is never proved.

    `observed` says that a server, a store or a file gave it; otherwise the auditor made the model
    give it, and whether a service does is for its owner to say.
    """

    exposure: Exposure
    attack: str
    status: Status
    reason: str
    remedy: str
    error: float | None = None
    queries: int = 0
    seconds: float = 0.0
    lower_bound: int | None = None
    known: float = 0.0
    trace: tuple[tuple[int, float], ...] = ()
    sought: str = "weights"
    texts: tuple[Readings, ...] = ()
    cuts: tuple[Cut, ...] = ()
    control: bool = False
    estimate: Estimate | None = None
    remedied: tuple[Remedied, ...] = ()
    extra: str = ""
    tried: int = 0
    command: str = ""
    observed: bool = False

    def __post_init__(self) -> None:  # a file may say anything
        if self.exposure.rule == NOT_CHECKED:
            raise InputError(f"a finding falls under a rule, not under {NOT_CHECKED}")

    @property
    def part(self) -> str:
        """The part of the target that it is about, where a target has several."""
        return self.exposure.part

    @property
    def outcome(self) -> Outcome:
        return OUTCOMES[self.status]

    @property
    def exposed(self) -> bool:
        """Did the attacker come away with the secret, exactly or nearly, or is a way to it open?"""
        return self.outcome in (Outcome.GIVEN_AWAY, Outcome.EXPOSED) and not self.control

    @property
    def open(self) -> bool:
        """Is a way to the secret open, which nobody went?"""
        return self.outcome is Outcome.EXPOSED

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Finding:
        return restored(cls, data)


@dataclass(frozen=True)
class Skip:
    """An attack that was not run, and why: silence is not a clean bill of health.

    `unchecked` says that it would apply but could not be run: then the target is not clean.
    `absent` says that it was looked for, and that the target has no such thing: what a baseline has
    of it is gone. `layers` are those that were left out, where others were tried; `extra` names
    what is not installed and would be needed.
    """

    exposure: Exposure
    attack: str
    reason: str
    unchecked: bool = False
    layers: tuple[int, ...] = ()
    extra: str = ""
    absent: bool = False


# A flipped prediction and where attention was cut for it: what a report shows of a disruption.

_MOST = 4096  # layers, and heads: no model has as many, and a picture has a square for each


@dataclass(frozen=True)
class Cut:
    """One input: its tokens, the answers before and after, and the units between.

    A unit is (layer, head, query, key), positions counted in `tokens`. `layers` and `heads` say how
    many the model has; `share` is over all its units on this input.
    """

    tokens: tuple[str, ...]
    before: str
    after: str
    sure_before: float
    sure_after: float
    share: float
    layers: int
    heads: int
    units: tuple[tuple[int, int, int, int], ...]

    def __post_init__(self) -> None:
        for name, count in (("layers", self.layers), ("heads", self.heads)):
            if not 0 <= count <= _MOST:
                raise InputError(f"a cut has 0 to {_MOST:,} {name}, not {count}")
        if self.layers * self.heads > _MOST:
            raise InputError(
                f"a cut has at most {_MOST:,} heads in all layers, not {self.layers * self.heads}"
            )
        sizes = (self.layers, self.heads, len(self.tokens), len(self.tokens))
        for unit in self.units:
            if not all(0 <= place < size for place, size in zip(unit, sizes, strict=True)):
                raise InputError(
                    f"the unit {unit} of a cut is outside of its {self.layers} layers, "
                    f"{self.heads} heads and {len(self.tokens)} tokens"
                )


# What a sample says of a whole store: how many of its texts can be read.


@dataclass(frozen=True)
class Estimate:
    """`exact` of `sample` texts were read; of all `population`, from `least` to `most` can be."""

    exact: int
    sample: int
    population: int
    least: int
    most: int

    def __post_init__(self) -> None:  # a file may say anything
        ordered = 0 <= self.exact <= self.least <= self.most <= self.population
        if not (ordered and self.exact <= self.sample <= self.population and self.sample):
            raise InputError(
                f"no sample gives this estimate: {self.exact} of {self.sample} texts read, "
                f"{self.least} to {self.most} of {self.population}"
            )

    @classmethod
    def of(cls, exact: int, sample: int, population: int) -> Self:
        return cls(exact, sample, population, *hits_in_all(exact, sample, population))

    @property
    def share(self) -> str:
        """84–93%, or one figure where both ends are written alike."""
        low, high = (percent(count / self.population) for count in (self.least, self.most))
        return low if low == high else f"{low.removesuffix('%')}–{high}"

    def __str__(self) -> str:
        tried = f"{self.exact} of {self.sample} tried were"
        if self.sample == self.population:
            return f"of {self.population:,} texts, {self.exact:,} can be read exactly: all tried"
        return (
            f"of {self.population:,} texts, {self.share} can be read exactly "
            f"({tried}; {percent(CONFIDENCE)} confidence)"
        )


# Recovered text next to the original: what a report shows of a finding about text.


@dataclass(frozen=True)
class Piece:
    """One token as it is written, how far it is to be believed, and whether it is right.

    `right` is None where nobody knows the original: then a verified token counts as right.
    """

    text: str
    mark: str
    right: bool | None

    @property
    def counts(self) -> bool:
        return self.mark == "verified" if self.right is None else self.right


@dataclass(frozen=True)
class Reading:
    """One text, and what was read of it; `original` is empty where a store has it no longer.

    `exact`: every character came back, up to what the tokenizer's own normaliser changes. `note`
    says what could not: characters that the tokenizer has no token for, an end that was cut off.

    Of a stored embedding also: `tokens`, the length of the original or, where nobody knows it, of
    what was read, without special tokens; `overlap`, the F1 of the tokens wherever they stand,
    where the original is known; `similarity`, the cosine of the stored vector with that of what was
    read. They say how near a text came that is not exact.
    """

    original: str
    pieces: tuple[Piece, ...]
    exact: bool
    verified: bool
    note: str = ""
    tokens: int | None = None
    overlap: float | None = None
    similarity: float | None = None

    @property
    def known(self) -> float:
        """The share of the tokens that are right."""
        return sum(piece.counts for piece in self.pieces) / max(1, len(self.pieces))


@dataclass(frozen=True)
class Readings:
    """The texts read from one exposure in one precision: a cell of the exposure matrix.

    `chance` is the share of tokens that guesses without the leak would have right, where that was
    looked at.
    """

    kind: str
    layer: int
    precision: str
    readings: tuple[Reading, ...]
    chance: float | None = None

    @property
    def known(self) -> float:
        """The share of all tokens that are right."""
        pieces = [piece for reading in self.readings for piece in reading.pieces]
        return sum(piece.counts for piece in pieces) / max(1, len(pieces))

    @property
    def exact(self) -> int:
        """Texts that came back exactly, and verified."""
        return sum(reading.exact and reading.verified for reading in self.readings)


# How much of a whole a sample of it vouches for.
#
# Of N things n are drawn without replacement, and k of them are hits. The interval holds every
# number K of hits in the whole under which neither so few nor so many hits had a chance of (1 −
# c)/2 or less: Clopper and Pearson's (1934), with the hypergeometric distribution in place of the
# binomial, which it becomes as N grows. Where all are drawn it is k alone.

CONFIDENCE = 0.95
_ROUNDING = 1e-9  # relative: a chance that equals the limit may come out a little above it


def hits_in_all(
    hits: int, drawn: int, population: int, confidence: float = CONFIDENCE
) -> tuple[int, int]:
    """The least and the most hits there may be in all, by those among the drawn."""
    if not 0 <= hits <= drawn <= population or drawn < 1 or not 0 < confidence < 1:
        raise InputError(
            f"hits must be among the drawn, and those among all: got {hits}, {drawn}, {population}"
        )
    tail = (1 - confidence) / 2 * (1 + _ROUNDING)
    least = _least(hits, drawn, population, tail)
    return least, population - _least(drawn - hits, drawn, population, tail)


def _least(hits: int, drawn: int, population: int, tail: float) -> int:
    """The smallest K under which `hits` or more have a better chance than `tail`.

    That chance grows with K, so it is found by bisection.
    """
    from scipy.stats import hypergeom  # with the models, without which no store is sampled

    possible = range(hits, population - (drawn - hits) + 1)
    return possible[
        bisect_left(
            possible, True, key=lambda K: hypergeom.sf(hits - 1, population, K, drawn) > tail
        )
    ]
