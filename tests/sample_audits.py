"""Audits with every kind of finding, made by hand, on which formats and schemas are tested."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from datetime import date
from typing import Any

from exposures import called
from keyhole.assess import Assessment, Ignore, Policy, assess, compared, decided
from keyhole.assess.policy import condition
from keyhole.core import (
    Audit,
    Cut,
    Estimate,
    Finding,
    Piece,
    Reading,
    Readings,
    Skip,
    Status,
)
from keyhole.core.exposure import NOT_CHECKED, Exposure

ENVIRONMENT = {"keyhole": "0.1.0", "python": "3.11.7", "platform": "Linux"}
CREATED = "2026-11-16T08:44:47+00:00"


def finding(
    exposure: str, sought: str, status: Status, part: str = "a model", **more: Any
) -> Finding:
    made = Finding(
        called(exposure, part),
        "Attack",
        status,
        "a reason",
        "a remedy",
        1e-9,
        100,
        1.5,
        64,
        sought=sought,
    )
    return replace(made, **more)


def read(kind: str, layer: int, exact: bool) -> Readings:
    pieces = (
        Piece("a", "verified", True),
        Piece(" text", "likely", exact),
        Piece("?", "x", None),
    )
    readings = Reading("a text", pieces, exact, exact, "a note", 2, 0.5, 0.99)
    return Readings(kind, layer, "float32", (readings,))


CUT = Cut(
    ("[CLS]", "good"), "yes", "no", 0.9, 0.6, 0.01, 2, 2, ((0, 1, 0, 1), (1, 0, 1, 0))
)
FINDINGS = (
    finding("full scores", "weights", Status.RECOVERED, trace=((10, 0.5), (100, 1e-9))),
    finding("signs", "weights", Status.BUDGET, error=None, lower_bound=None),
    finding("a layer's output", "input", Status.WITHIN, part=""),
    finding(
        "hidden states of layer 3",
        "text",
        Status.RECOVERED,
        texts=(read("hidden", 3, True),),
    ),
    finding(
        "keys and values of layer 1",
        "text",
        Status.INEXACT,
        known=0.6,
        texts=(read("kv", 1, False),),
    ),
    finding(
        "stored embedding",
        "text",
        Status.INEXACT,
        known=0.4,
        part="a store",
        texts=(read("pooled", 4, True),),
        estimate=Estimate(4, 10, 1000, 130, 730),
    ),
    finding(
        "1% of all attention cut", "prediction", Status.INEXACT, known=0.3, cuts=(CUT,)
    ),
    finding(
        "1% of all attention cut at random", "prediction", Status.UNSOLVED, control=True
    ),
    finding("attention maps of layer 2", "text", Status.UNSOLVED, queries=2_000_000),
)
SKIPS = (
    Skip(called("gradient of a batch of texts"), "none", "the model has no loss"),
    Skip(Exposure(NOT_CHECKED, "something else"), "probe", "no answer", unchecked=True),
)


def whole() -> Audit:
    """An audit with every outcome, a control, and both kinds of skip."""
    return Audit(
        "a target",
        "its identity",
        FINDINGS,
        SKIPS,
        seed=3,
        seconds=12.5,
        created=CREATED,
        environment=ENVIRONMENT,
    )


def clean() -> Audit:
    kept = finding("full scores", "weights", Status.UNSOLVED)
    return replace(whole(), findings=(kept,), skips=SKIPS[:1])


def empty() -> Audit:
    return replace(whole(), findings=(), skips=())


def judged(audit: Audit) -> Assessment:
    """Apply a policy that ignores something, and a baseline that differs."""
    old = replace(
        audit,
        findings=(
            *(replace(f, status=Status.UNSOLVED) for f in audit.findings[:1]),
            *audit.findings[2:],
            finding("the last token's vector", "weights", Status.RECOVERED),
        ),
    )
    ignore = Ignore(
        "KH-TEXT-KEYS-AND-VALUES", "it never leaves the cluster", date(2999, 1, 1)
    )
    policy = Policy("keyhole.toml", fail_on=(condition("high"),), ignores=(ignore,))
    looked = Skip(
        called("the last token's vector", "a model"), "none", "no vectors", absent=True
    )
    seen = compared(assess(replace(audit, skips=(*audit.skips, looked))), assess(old))
    return decided(replace(seen, audit=audit), policy, today=date(2026, 11, 16))


ASSESSMENTS: dict[str, Callable[[], Assessment]] = {
    "whole": lambda: assess(whole()),
    "judged": lambda: judged(whole()),
    "clean": lambda: assess(clean()),
    "empty": lambda: assess(empty()),
}


_MEANT = {"sought", "kind", "rule"}  # words that decide what a finding is


def spoiled(thing: Any, text: str, name: str = "") -> Any:
    """Replace every string, except those that decide what kind of object it is."""
    if is_dataclass(thing) and not isinstance(thing, type):
        values = {field.name: getattr(thing, field.name) for field in fields(thing)}
        return replace(
            thing, **{key: spoiled(value, text, key) for key, value in values.items()}
        )
    if isinstance(thing, tuple):
        return tuple(spoiled(part, text, name) for part in thing)
    if isinstance(thing, dict):
        return {key: spoiled(part, text, name) for key, part in thing.items()}
    plain = type(thing) is str and name not in _MEANT
    return text if plain else thing
