"""The result of reading a text: a mark for each token, the judge's verdict, the recovery.

An attack proposes; its judge runs the model on the proposal and compares with what leaked. There is
a judge for rows of positions (layers/judge.py), one for a mixed cache (layers/mixed.py), one for a
vector of a whole text (embeddings/judge.py) and one for gradients (gradients/update.py). All give a
Verdict, and every recovery is one type, judged token by token and saved like all results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar

from keyhole.core import Status, environment
from keyhole.core.result import Result

ODDS = 10.0  # their logarithm against an alternative: e¹⁰ : 1 for a likely token


class Mark(StrEnum):
    """How certain one token is.

    Verified: running the model on the text reproduces the whole leak, and would not with another
    token there, within the leak's precision. Likely: every other token tried there fits worse, by
    odds of e¹⁰ : 1 or more, but the text is not right as a whole, or the noise was not stated.
    Unknown: others would do as well, or nothing leaked there.
    """

    VERIFIED = "verified"
    LIKELY = "likely"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Verdict:
    """What a proposed text is worth; `forwards` is what the judge itself ran.

    `similarity` is the cosine of a text's own vector with the leaked one, where one vector leaked.
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
    def without_fit(cls, status: Status, reason: str, tokens: int) -> Verdict:
        """Where `tokens` proposed ids cannot be compared with the leak at all."""
        return cls(status, reason, False, None, None, (Mark.UNKNOWN,) * tokens)


# Runs the model of a target on proposed ids and compares with the leak.
Judge = Callable[[Any, Any, list[int]], Verdict]


class Recovery(Result):
    """What the recovery of one text and that of a batch share: what it took, what to do about it.

    `ADVICE` says the latter, where the status does not say it well enough.
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
        """The last line of the summary."""
        return f"{self.passes:,} passes, {self.seconds:.2f} s. {self.advice}"

    def contents(self) -> dict[str, Any]:
        return {**super().contents(), "advice": self.advice}


@dataclass(frozen=True, repr=False)
class TextRecovery(Recovery):
    """A text that explains a leak, or how far the search came.

    `verified` is the judge's: running the model on `ids` verified every token. A text is recovered
    if its characters came back as well: one with unknown tokens, or of the model's maximum length,
    may be part of a longer one, and is inexact. `residual` is the root mean square of the
    difference relative to the leak's standard deviation, `precision` the size of the leak's own
    error in the same unit, as stated or estimated, and `similarity` the cosine of a text's own
    vector with the leaked one, where one vector leaked. `passes` counts forward–backward passes
    plus `forwards`, those without a backward one, of this text; `judging` of them are the judge's.
    `fitting` counts the forward passes that were spent once for the model and layer, on no text in
    particular, `tested` the tokens that a left-to-right search tried. `seconds` is the time since
    the previous text was read, or since the start. `pieces` are the tokens as they are written: one
    for each mark, joined they are the text.
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
        """How many tokens have which mark, in words."""
        counts = [f"{self.marks.count(mark)} {mark}" for mark in Mark if mark in self.marks]
        return f"{', '.join(counts)} of {len(self.marks)} tokens" if counts else "no tokens"
