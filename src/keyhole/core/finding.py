"""The results of an audit: findings with their evidence, and the checks that were not made.

Pages and tables are made from an `Audit` and nothing else.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import ClassVar, Self

from keyhole.core.errors import InputError
from keyhole.core.exposure import (
    NOT_CHECKED,
    Exposure,
    expect_returns,
    is_returned,
)
from keyhole.core.result import Result, environment
from keyhole.core.status import OUTCOMES, Outcome, Status, exit_code, joint_exit_code
from keyhole.core.text import percent


@dataclass(frozen=True)
class Remedied:
    """The measured effect of a remedy."""

    remedy: str
    left: float
    """The share that the same attack still gets."""
    words: str
    """What was counted."""


@dataclass(frozen=True)
class Finding:
    """One exposure of a target, and the result of one attack on it.

    There are two kinds of findings. Either an attack was run, and a judge compared what
    it gave with the target. Or a route or a setting is open: the reason says what it
    gives and `command` tries it, but nothing was read, so it has no exactness and is
    never proved.
    """

    exposure: Exposure
    attack: str
    status: Status
    reason: str
    remedy: str
    error: float | None = None
    """The largest error."""
    queries: int = 0
    """What was spent, in the unit of the rule: queries, texts, passes, outputs."""
    seconds: float = 0.0
    lower_bound: int | None = None
    """How many queries any attack needs."""
    known: float = 0.0
    """The share of the secret that is known."""
    trace: tuple[tuple[int, float], ...] = ()
    """Queries asked, and the worst error on fresh ones by then."""
    sought: str = "weights"
    """What the attacker is after: weights, input, text, prediction, …"""
    texts: tuple[Readings, ...] = ()
    """Originals and recovered texts in each precision, if text is sought."""
    cuts: tuple[Cut, ...] = ()
    """Where attention was cut, if a prediction is sought."""
    control: bool = False
    """The attack chooses at random, for comparison: never an exposure."""
    estimate: Estimate | None = None
    """How many texts of a whole store can be read, estimated from a sample."""
    remedied: tuple[Remedied, ...] = ()
    """The measured effects of remedies."""
    extra: str = ""
    """The extra that is not installed and would find out or prove more."""
    tried: int = 0
    """How many predictions `known` is a share of."""
    command: str = ""
    """What tries a way that is open."""
    observed: bool = False
    """A server, a store or a file gave it away.

    Otherwise the auditor made the model give it, and only its owner knows whether a
    service does.
    """

    def __post_init__(self) -> None:
        if self.exposure.rule == NOT_CHECKED:
            raise InputError(f"a finding falls under a rule, not under {NOT_CHECKED}")

    @property
    def part(self) -> str:
        return self.exposure.part

    @property
    def outcome(self) -> Outcome:
        return OUTCOMES[self.status]

    @property
    def exposed(self) -> bool:
        """The attacker has the secret, exactly or nearly, or a way to it is open."""
        return (
            self.outcome in (Outcome.GIVEN_AWAY, Outcome.EXPOSED) and not self.control
        )

    @property
    def open(self) -> bool:
        """A way to the secret is open, and nobody tried it."""
        return self.outcome is Outcome.EXPOSED


@dataclass(frozen=True)
class Skip:
    """An attack that was not run, and the reason."""

    exposure: Exposure
    attack: str
    reason: str
    unchecked: bool = False
    """It applies but could not be run, so the target is not clean."""
    layers: tuple[int, ...] = ()
    """The layers that were left out, if others were tried."""
    extra: str = ""
    """The extra that is not installed and would be needed."""
    absent: bool = False
    """The target has nothing of this kind, so a finding of a baseline about it is gone."""


_MAX_HEADS = 4096  # of a model in all; a picture has a square for each of them


@dataclass(frozen=True)
class Cut:
    """A prediction that flipped: the tokens, the answer before and after, and what was cut."""

    tokens: tuple[str, ...]
    before: str
    after: str
    sure_before: float
    sure_after: float
    share: float
    """The share of all units on this input."""
    layers: int
    """Of the model, as `heads`."""
    heads: int
    units: tuple[tuple[int, int, int, int], ...]
    """Layer, head, query and key, which are positions in `tokens`."""

    def __post_init__(self) -> None:
        squares = max(1, self.layers) * max(1, self.heads)
        if min(self.layers, self.heads) < 0 or squares > _MAX_HEADS:
            raise InputError(
                f"a cut has 0 to {_MAX_HEADS:,} heads, not {self.layers} layers of {self.heads}"
            )
        sizes = (self.layers, self.heads, len(self.tokens), len(self.tokens))
        for unit in self.units:
            places = zip(unit, sizes, strict=True)
            if not all(0 <= place < size for place, size in places):
                raise InputError(
                    f"the unit {unit} of a cut is outside of its {self.layers} layers, "
                    f"{self.heads} heads and {len(self.tokens)} tokens"
                )


@dataclass(frozen=True)
class Estimate:
    """An estimate from a sample of how many texts of a store can be read.

    `exact` of `sample` texts were read; of all `population` texts, `least` to `most`
    can be.
    """

    exact: int
    sample: int
    population: int
    least: int
    most: int

    def __post_init__(self) -> None:
        ordered = 0 <= self.exact <= self.least <= self.most <= self.population
        if not (
            ordered and self.exact <= self.sample <= self.population and self.sample
        ):
            raise InputError(
                f"no sample gives this estimate: {self.exact} of {self.sample} texts read, "
                f"{self.least} to {self.most} of {self.population}"
            )

    @classmethod
    def of(
        cls,
        exact: int,
        sample: int,
        population: int,
    ) -> Self:
        return cls(exact, sample, population, *hits_in_all(exact, sample, population))

    @property
    def share(self) -> str:
        """The interval as 84–93%, or as one figure if both ends are rounded to the same."""
        low, high = (
            percent(count / self.population) for count in (self.least, self.most)
        )
        if low == high:
            return low
        return f"{low.removesuffix('%')}–{high}"

    def __str__(self) -> str:
        if self.sample == self.population:
            return f"of {self.population:,} texts, {self.exact:,} can be read exactly: all tried"
        return (
            f"of {self.population:,} texts, {self.share} can be read exactly "
            f"({self.exact} of {self.sample} tried were; {percent(CONFIDENCE)} confidence)"
        )


@dataclass(frozen=True)
class Piece:
    """One token of a recovered text: how certain it is, and whether it is right."""

    text: str
    mark: str
    """`verified`, `likely` or `unknown`."""
    right: bool | None
    """None if nobody knows the original; then a verified token counts as right."""

    @property
    def counts(self) -> bool:
        if self.right is None:
            return self.mark == "verified"
        return self.right


@dataclass(frozen=True)
class Reading:
    """A text and what was recovered of it.

    For stored embeddings, three figures say how near an inexact text is: `tokens`,
    `overlap` and `similarity`.
    """

    original: str
    """Empty if the store no longer has it."""
    pieces: tuple[Piece, ...]
    exact: bool
    """Every character was recovered, up to what the tokenizer's normaliser changes."""
    verified: bool
    note: str = ""
    """What could not be recovered: characters without a token, an end that was cut off."""
    tokens: int | None = None
    """The length without special tokens, of the original if that is known."""
    overlap: float | None = None
    """The F1 of the original's tokens, in any order, if that is known."""
    similarity: float | None = None
    """The cosine of the stored vector and the vector of the recovered text."""

    @property
    def known(self) -> float:
        """The share of the tokens that are right."""
        return _share_right(self.pieces)


@dataclass(frozen=True)
class Readings:
    """The texts read from one exposure in one precision: a cell of the exposure matrix."""

    kind: str
    layer: int
    precision: str
    readings: tuple[Reading, ...]
    chance: float | None = None
    """The share of tokens that guesses without the leak would have right, if measured."""

    @property
    def known(self) -> float:
        """The share of all tokens that are right."""
        return _share_right(
            [piece for reading in self.readings for piece in reading.pieces]
        )

    @property
    def exact(self) -> int:
        """The number of texts that were recovered exactly and verified."""
        return sum(reading.exact and reading.verified for reading in self.readings)


def _share_right(pieces: Sequence[Piece]) -> float:
    return sum(piece.counts for piece in pieces) / max(1, len(pieces))


# A confidence interval for the number K of hits in a population of N, of which n are
# drawn without replacement and k are hits. It holds every K for which P(k or fewer
# hits) and P(k or more hits) both exceed (1 − c)/2. This is the interval of Clopper and
# Pearson (1934) with the hypergeometric distribution in place of the binomial, its
# limit for large N. If all are drawn it is k alone.

CONFIDENCE = 0.95
# relative: a probability at the limit may be computed a little above it
_ROUNDING = 1e-9


def hits_in_all(
    hits: int,
    drawn: int,
    population: int,
    confidence: float = CONFIDENCE,
) -> tuple[int, int]:
    """Return the least and the most hits that the whole population may have."""
    tail = (1 - confidence) / 2 * (1 + _ROUNDING)
    least = _least(hits, drawn, population, tail)
    return least, population - _least(drawn - hits, drawn, population, tail)


def _least(
    hits: int,
    drawn: int,
    population: int,
    tail: float,
) -> int:
    """Return the smallest K for which P(`hits` or more) exceeds `tail`.

    That probability grows with K, so a bisection finds it.
    """
    # Not installed without models; then no store is sampled.
    from scipy.stats import hypergeom

    def is_likely(K: int) -> bool:
        return bool(hypergeom.sf(hits - 1, population, K, drawn) > tail)

    possible = range(hits, population - (drawn - hits) + 1)
    return possible[bisect_left(possible, True, key=is_likely)]


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


# The folders of every path in a target's name, and whole addresses, which are kept.
_FOLDERS = re.compile(r"(\b\w+://[^\s,;()]*)|[^\s,:;()]*/(?=\S)")


@dataclass(frozen=True, repr=False)
class Audit(Result):
    """Findings about a target and checks that were not made, with where and when that was."""

    target: str
    """What was audited, in words; may hold a path."""
    identity: str
    """What the target is known by: hashes of weights, names of models."""
    findings: tuple[Finding, ...]
    skips: tuple[Skip, ...] = ()
    seed: int = 0
    seconds: float = 0.0
    created: str = field(default_factory=_now)
    environment: dict[str, str] = field(default_factory=environment)
    """Versions and machine; any keys."""
    name: str = ""
    """What somebody called the target; baselines are matched by it, or by the identity."""
    returns: tuple[str, ...] = ()
    """What the target's service returns (core/exposure.py: RETURNS), if somebody said so."""

    kind: ClassVar[str] = "audit"

    def __post_init__(self) -> None:
        expect_returns(self.returns, "returns")

    def is_of(self, other: Audit) -> bool:
        """Return whether both audits are of one target.

        They are if weights, vectors or address are the same, or the names are. A file
        that was moved to another folder keeps its name.
        """
        if self.identity and self.identity == other.identity:
            return True
        return bool(self._plain_name) and self._plain_name == other._plain_name

    @property
    def _plain_name(self) -> str:
        return self.name or _FOLDERS.sub(r"\1", self.target.rstrip("/"))

    def counts(self, finding: Finding) -> bool:
        """Return whether the service gives this out: whatever was observed, it does."""
        return finding.observed or is_returned(finding.exposure, self.returns)

    @property
    def attacks(self) -> tuple[Finding, ...]:
        """The findings that count: not controls, and nothing that the service does not return."""
        return tuple(
            each for each in self.findings if not each.control and self.counts(each)
        )

    @property
    def unchecked_skips(self) -> tuple[Skip, ...]:
        """Checks of what the service returns that could not be made."""
        return tuple(
            skip
            for skip in self.skips
            if skip.unchecked and is_returned(skip.exposure, self.returns)
        )

    @property
    def exposed(self) -> int:
        return sum(finding.exposed for finding in self.attacks)

    @property
    def unchecked(self) -> int:
        """The number of attacks that apply and had no result."""
        findings = sum(finding.outcome is Outcome.UNCHECKED for finding in self.attacks)
        return findings + len(self.unchecked_skips)

    @property
    def exit_code(self) -> int:
        """0 nothing was given away, 1 something was, 3 something could not be checked."""
        outcomes = [finding.outcome for finding in self.attacks]
        if self.unchecked_skips:
            outcomes.append(Outcome.UNCHECKED)
        return exit_code(outcomes)

    def summary(self) -> str:
        return (
            f"{self.target}: {self.exposed} of {len(self.attacks)} exposures gave something, "
            f"{self.unchecked} could not be checked, {len(self.skips)} were skipped; "
            f"{self.seconds:.1f} s, {self.created}"
        )


@dataclass(frozen=True, repr=False)
class Fleet(Result):
    """The audits of many targets by their names; `seconds` is for all of them."""

    audits: dict[str, Audit]
    seconds: float = 0.0
    environment: dict[str, str] = field(default_factory=environment)

    kind: ClassVar[str] = "fleet"

    @property
    def exit_code(self) -> int:
        """1 something was given away, 3 something could not be checked, otherwise 0."""
        return joint_exit_code(audit.exit_code for audit in self.audits.values())

    def summary(self) -> str:
        counts = Counter(audit.exit_code for audit in self.audits.values())
        lines = [
            f"{len(self.audits)} targets: {counts[1]} give something away, {counts[3]} could not "
            f"be checked, {counts[0]} give nothing away; {self.seconds:.1f} s"
        ]
        for name, audit in self.audits.items():
            lines.append(f"  {name}: {audit.exposed} of {len(audit.attacks)} exposures")
        return "\n".join(lines)
