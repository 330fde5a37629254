"""The result of reading a text: a mark for each token, the judge's verdict, the recovery.

An attack proposes token ids. Its judge runs the model on them and compares with what
leaked. There are four judges: for leaks with a row for each position (layers/judge.py),
for a cache behind a secret mix (layers/mixed.py), for the vector of a whole text
(embeddings/judge.py) and for gradients (gradients/update.py). Each of them gives a
`Verdict`, with a mark for every token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar

from keyhole.core import Status, environment
from keyhole.core.result import Result

LOG_ODDS = 10.0  # against every alternative that make a token likely: odds of e¹⁰ : 1


def verifying_margin(vocabulary: int) -> float:
    """Return the margin that verifies a token.

    A margin is by how much squared errors, in units of the leak's error, grow with
    another token: twice the logarithm of the odds against it, if errors are normal. As
    there are V tokens, odds of V·e¹⁰ : 1 against each are odds of e¹⁰ : 1 against all
    of them together.
    """
    return 2 * (math.log(vocabulary) + LOG_ODDS)


class Mark(StrEnum):
    """How certain a token is.

    Verified: the model reproduces the whole leak from the text, within the leak's
    precision, and would not with another token in this place. Likely: every alternative
    that was tried fits worse, by odds of e¹⁰ : 1 or more, but the text as a whole does
    not fit, or its noise was not stated. Unknown: other tokens fit as well, or nothing
    leaked at this position.
    """

    VERIFIED = "verified"
    LIKELY = "likely"
    UNKNOWN = "unknown"


def marks_of(verified: Sequence[bool], likely: Sequence[bool]) -> tuple[Mark, ...]:
    """Return the mark of each token: verified, or at least likely, or unknown."""
    marks = [Mark.LIKELY if each else Mark.UNKNOWN for each in likely]
    pairs = zip(verified, marks, strict=True)
    return tuple(Mark.VERIFIED if each else mark for each, mark in pairs)


def counts_of(marks: Sequence[Mark]) -> str:
    """Return how many tokens have each mark of certainty, in words."""
    counts = [f"{marks.count(mark)} {mark}" for mark in (Mark.VERIFIED, Mark.LIKELY)]
    return f"of {len(marks)} tokens {', '.join(counts)}"


@dataclass(frozen=True)
class Verdict:
    """A judge's decision on a proposed text; `forwards` counts the judge's own forward passes.

    TextRecovery explains the other fields.
    """

    status: Status
    reason: str
    verified: bool
    residual: float | None
    precision: float | None
    marks: tuple[Mark, ...]
    forwards: int = 1
    similarity: float | None = None

    @classmethod
    def without_fit(
        cls,
        status: Status,
        reason: str,
        tokens: int,
    ) -> Verdict:
        """Return the verdict on `tokens` ids that cannot be compared with the leak."""
        return cls(status, reason, False, None, None, (Mark.UNKNOWN,) * tokens)


# Runs a target's model on proposed ids and compares with the leak: (target, leak, ids)
# → verdict.
Judge = Callable[[Any, Any, list[int]], Verdict]


class Recovery(Result):
    """What every kind of recovery states: a status, what to do about it, and the cost.

    `ADVICE` replaces a status's own advice. A pass runs the model forward, or also
    backward, once.
    """

    ADVICE: ClassVar[Mapping[Status, str]]
    status: Status
    passes: int
    seconds: float

    @property
    def advice(self) -> str:
        return self.ADVICE.get(self.status, self.status.advice)

    @property
    def cost(self) -> str:
        """The passes, the seconds and the advice, in words."""
        return f"{self.passes:,} passes, {self.seconds:.2f} s. {self.advice}"

    def contents(self) -> dict[str, Any]:
        return {**super().contents(), "advice": self.advice}


@dataclass(frozen=True, repr=False)
class TextRecovery(Recovery):
    """A text that explains a leak, or the best that was found.

    `verified` is about tokens: the judge verified all of `ids`. `status` is about the
    text: it is "recovered" only if its characters are complete too. A verified text
    with unknown tokens, or of the model's maximum length, may be part of a longer one
    and is inexact. `pieces` are the tokens as text, one for each mark; joined, they
    give the text.

    `residual` is the root mean square of the difference from the leak, and `precision`
    the leak's own error as stated or estimated, both relative to the leak's standard
    deviation. `similarity` is the cosine of the text's vector with the leaked one, if a
    single vector leaked.

    `passes` counts all passes for this text, `forwards` those without a backward pass,
    and `judging` those of the judge. `fitting` counts further forward passes, which
    were spent once for the model and layer. `tested` counts the tokens that a
    left-to-right search tried. `seconds` is the time since the previous text was read,
    or since the start.
    """

    status: Status
    reason: str
    method: str
    ids: list[int]
    text: str
    verified: bool
    passes: int
    seconds: float
    marks: tuple[Mark, ...] = ()
    residual: float | None = None
    precision: float | None = None
    forwards: int = 0
    fitting: int = 0
    tested: int = 0
    judging: int = 0
    similarity: float | None = None
    environment: dict[str, str] = field(default_factory=environment)
    pieces: tuple[str, ...] = ()

    kind: ClassVar[str] = "text recovery"
    ADVICE: ClassVar[Mapping[Status, str]] = {
        Status.RECOVERED: "Treat this exposure as the text itself.",
        Status.INEXACT: "Part of the text is known, as marks and reason say. "
        "Treat it as given away.",
        Status.UNSOLVED: "Not recovered this time: more passes may do it. "
        "It is no proof of safety.",
        Status.BUDGET: "Not recovered this time: a longer search, or texts to learn from, "
        "may do it.",
        Status.MISMATCH: "The leak is not this model's at this layer: check both.",
        Status.NOT_IDENTIFIABLE: "Several texts give this leak.",
        Status.NOT_APPLICABLE: "No attack in Keyhole reads this exposure of this kind of model.",
    }

    def summary(self) -> str:
        lines = [f"{self.status} ({self.reason})", f"  {self.text}", f"  {self.marked}"]
        return "\n".join([*lines, f"  {self.cost}"])

    @property
    def marked(self) -> str:
        """The number of tokens with each mark, in words."""
        counts = [
            f"{self.marks.count(mark)} {mark}" for mark in Mark if mark in self.marks
        ]
        if counts:
            return f"{', '.join(counts)} of {len(self.marks)} tokens"
        return "no tokens"
