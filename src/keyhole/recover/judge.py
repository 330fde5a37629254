"""What a judge of texts says: whether running the model on a text gives the leak again."""

from __future__ import annotations

from dataclasses import dataclass

from keyhole.core import Status
from keyhole.recover.judge import Mark

ODDS = 10.0  # their logarithm against a rival: e¹⁰ : 1 for a likely token


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


class Mark(StrEnum):
    """How far one token is to be believed.

    Verified: running the model on the text reproduces the whole leak, and would not with another
    token here, within the leak's precision. Likely: every other token tried here fits worse, by
    odds of e¹⁰ : 1 or more, but the text is not right as a whole, or the noise was not stated.
    Unknown: others would do as well, or nothing leaked here.
    """

    VERIFIED = "verified"
    LIKELY = "likely"
    UNKNOWN = "unknown"
