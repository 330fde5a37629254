"""What every text recovery returns: one type, judged, token by token."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from keyhole.results import FORMAT, Status, environment

_ADVICE = {
    Status.RECOVERED: "Treat this exposure as the text itself.",
    Status.INEXACT: "Part of the text is certain: see the marks; treat the rest as nearly known.",
    Status.UNSOLVED: "Not recovered this time: more passes may do it. It is no proof of safety.",
    Status.MISMATCH: "The leak is not this model's at this layer: check both.",
    Status.NOT_IDENTIFIABLE: "Several texts give this leak.",
    Status.NOT_APPLICABLE: "This exposure of this kind of model has no attack here.",
}


class Mark(StrEnum):
    """How far one token is to be believed.

    Verified: running the model on the text reproduces what leaked at this position, and no other
    token would within the leak's precision. Likely: the best found, but others would do or nothing
    leaked here. Unknown: the model's answer differs from the leak here.
    """

    VERIFIED = "verified"
    LIKELY = "likely"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class TextRecovery:
    """A text that explains a leak, or how far the search came.

    `verified` is the judge's: every token is, by running the model on `ids`. `residual` is the root
    mean square of the difference relative to the leak's standard deviation, `precision` the size of
    the leak's own error in the same unit, as stated or estimated. `passes` counts forward–backward
    passes plus `forwards`, those without a backward one, of this text; `judging` of them are the
    judge's. `fitting` counts the forward passes that were spent once for the model and layer, on no
    text in particular, `tested` the tokens that a left-to-right search tried.
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
    environment: dict[str, str] = field(default_factory=environment)

    @property
    def advice(self) -> str:
        return _ADVICE.get(self.status, self.status.advice)

    def to_dict(self) -> dict[str, Any]:
        return {"format": FORMAT, "kind": "text recovery", **asdict(self), "advice": self.advice}
