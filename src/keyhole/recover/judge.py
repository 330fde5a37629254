"""What a judge of recovered texts decides, and how it is called.

An attack proposes; its judge runs the model on the proposal and compares with what leaked. There is
a judge for rows of positions (layers/judge.py), one for a vector of a whole text
(embeddings/judge.py) and one for gradients (gradients/judge.py). All give a Verdict.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from keyhole.core import Status

ODDS = 10.0  # their logarithm against an alternative: e¹⁰ : 1 for a likely token


class Mark(StrEnum):
    """How far one token is to be believed.

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


class Judge(Protocol):
    """Runs the model of `target` on a proposal and compares with `leak`."""

    def __call__(self, target: Any, leak: Any, ids: list[int], /) -> Verdict: ...
