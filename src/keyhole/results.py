"""What every attack returns: a Status with advice, an Extraction, a Finding; and their JSON.

Failure is a value. Numbers come from the judge, never from the attack that is being judged.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, cast

import torch

from keyhole.cuts import Cut
from keyhole.errors import InputError
from keyhole.files import read_tensors, write_text
from keyhole.oracle.storage import Planted, from_tensors, save
from keyhole.readings import Readings

FORMAT = 1


class Status(StrEnum):
    """How an attack ended; `advice` says what to try next."""

    RECOVERED = "recovered"
    INEXACT = "inexact"
    UNVERIFIED = "unverified"
    MISMATCH = "mismatch"
    NOT_IDENTIFIABLE = "not identifiable"
    NOT_APPLICABLE = "not applicable"
    SATURATED = "saturated"
    BUDGET = "budget exhausted"
    ORACLE_FAILED = "oracle failed"
    UNSOLVED = "unsolved"
    INTERRUPTED = "interrupted"

    @property
    def advice(self) -> str:
        return _ADVICE[self]


_ADVICE = {
    Status.RECOVERED: "Do not return this value to people who may not have the weights.",
    Status.INEXACT: "The weights are known approximately; exact answers would give all of them.",
    Status.UNVERIFIED: "Allow a few more queries than the attack needs, for the check.",
    Status.MISMATCH: "The answers do not come from this kind of model: try another method.",
    Status.NOT_IDENTIFIABLE: "No number of these queries can settle it.",
    Status.NOT_APPLICABLE: "This attack reads another kind of answer: try another method.",
    Status.SATURATED: "Attention stays at 0 or 1 at every scale tried: try smaller inputs.",
    Status.BUDGET: "Resume with the same ledger and a larger budget: nothing is asked twice.",
    Status.ORACLE_FAILED: "Mend the oracle and resume: the ledger kept what it answered.",
    Status.UNSOLVED: "Try more starts or another method.",
    Status.INTERRUPTED: "Run again with more time.",
}


class Unsuccessful(Exception):
    """Raised inside an attack to end it with a status; never leaves the library."""

    def __init__(self, status: Status, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


@dataclass(frozen=True)
class Check:
    """The judge's measurement on fresh queries, relative to the largest answer of their kind."""

    worst: float
    mean: float
    queries: int


@dataclass(frozen=True)
class Extraction:
    """What an extraction brought: a model to call like the oracle, and what it cost.

    `queries` counts what the attack asked, `remembered` how many of those a ledger answered for
    free; the judge's fresh queries are in `check.queries`. `floor` is the number of unknowns over
    the numbers in an answer: no attack can do with fewer. `trace` holds (queries, worst fresh-query
    error) along the way.
    `guarantee` bounds the error of every entry of W, `guarantee_v` of v, where the answers prove
    one under the method's assumptions; None means that nothing is promised.
    """

    status: Status
    reason: str
    method: str
    model: Planted | None
    queries: int
    seconds: float
    check: Check | None = None
    remembered: int = 0
    floor: int | None = None
    known: float = 0.0
    trace: tuple[tuple[int, float], ...] = ()
    guarantee: float | None = None
    guarantee_v: float | None = None
    environment: dict[str, str] = field(default_factory=lambda: environment())

    def to_dict(self) -> dict[str, Any]:
        """Everything but the weights."""
        data = asdict(replace(self, model=None))
        del data["model"]
        return {"format": FORMAT, **data, "advice": self.status.advice}

    def save(self, path: str | Path) -> None:
        """Write `path` (JSON) and, where a model was found, the weights beside it."""
        path = Path(path)
        data = self.to_dict()
        if self.model is not None:
            weights = path.with_suffix(".safetensors")
            save(self.model, weights)
            data["weights"] = weights.name
        write_text(path, dump(data))

    @classmethod
    def load(cls, path: str | Path) -> Extraction:
        data = read(path)
        try:
            weights = data.get("weights")
            return cls(
                status=Status(data["status"]),
                check=None if data["check"] is None else Check(**data["check"]),
                trace=_points(data["trace"]),
                model=None if weights is None else _model(Path(path).parent / str(weights)),
                **{name: data[name] for name in _PLAIN},
            )
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"expected an extraction, got {path}: {error!r}") from error


_PLAIN = (
    "reason", "method", "queries", "seconds", "remembered", "floor", "known", "guarantee",
    "guarantee_v", "environment",
)  # fmt: skip


@dataclass(frozen=True)
class Finding:
    """One exposure of a target, and what one attack made of it.

    `surface` names the endpoint where a target has several, `sought` is what the attacker is after;
    `texts`, where that is text, shows it as it was and as it came back, in each precision; `cuts`,
    where it is a prediction, where attention was cut for it.
    """

    exposure: str
    attack: str
    status: Status
    reason: str
    remedy: str
    error: float | None
    queries: int
    seconds: float
    floor: int | None = None
    known: float = 0.0
    trace: tuple[tuple[int, float], ...] = ()
    surface: str = ""
    sought: str = "weights"
    texts: tuple[Readings, ...] = ()
    cuts: tuple[Cut, ...] = ()

    @property
    def exposed(self) -> bool:
        """Did the attacker come away with the secret, exactly or nearly?"""
        return self.status in (Status.RECOVERED, Status.INEXACT)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Finding:
        finding = cls(**data)
        return replace(
            finding,
            status=Status(finding.status),
            trace=_points(data["trace"]),
            texts=tuple(Readings.from_dict(one) for one in data["texts"]),
            cuts=tuple(Cut.from_dict(one) for one in data.get("cuts", ())),
        )


@dataclass(frozen=True)
class Skip:
    """An attack that was not run, and why: silence is not a clean bill of health."""

    exposure: str
    attack: str
    reason: str


def _points(trace: list[list[Any]]) -> tuple[tuple[int, float], ...]:
    return tuple((int(queries), float(error)) for queries, error in trace)


def _model(path: Path) -> Planted:
    return from_tensors(*read_tensors(path, "the weights beside the JSON"), path)


def environment() -> dict[str, str]:
    """What a stranger needs to know to make the same figures."""
    try:
        version = importlib.metadata.version("keyhole")
    except importlib.metadata.PackageNotFoundError:  # run from a checkout that nobody installed
        version = "not installed"
    return {
        "keyhole": version,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "cpus": str(os.cpu_count()),
        "threads": str(torch.get_num_threads()),
    }


def dump(data: dict[str, Any]) -> str:
    return json.dumps(data, indent=2, allow_nan=False)


def read(path: str | Path) -> dict[str, Any]:
    """A JSON object written by `dump`, or one clear line."""
    try:
        data = json.loads(Path(path).read_text("utf-8"))
    except OSError as error:
        raise InputError(f"expected a JSON file, got {path}: {error.strerror}") from error
    except ValueError as error:
        raise InputError(f"expected a JSON file, got {path}: {error}") from error
    if not isinstance(data, dict):
        raise InputError(f"expected a Keyhole JSON file, got {path}")
    data = cast("dict[str, Any]", data)
    if data.get("format") != FORMAT:
        raise InputError(f"expected format {FORMAT} in {path}, got {data.get('format')}")
    return data
