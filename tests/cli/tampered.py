"""Saved audits in which somebody has changed one value.

`AUDITS` holds each by its file's name, with the exit codes that `keyhole report` may
end with. A value of another type is always refused. A value of the same type may be
accepted (another word) or refused (a negative count).
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from exposures import called
from keyhole.core import Audit, Cut, Estimate, Finding, Skip, Status
from keyhole.core.finding import Piece, Reading, Readings

_OTHERS: tuple[Any, ...] = (
    None,
    True,
    -1,
    1.5,
    10**30,
    math.nan,
    math.inf,
    "x",
    "",
    [],
    [[]],
    {},
    {"x": 1},
    "GONE",
)
_COUNT = 120
_MAY_BE_NULL = ("error", "lower_bound", "estimate", "right", "layer")
_DEFAULTS = (
    "lower_bound",
    "known",
    "trace",
    "sought",
    "extra",
    "layers",
    "variant",
    "layer",
    "defences",
    "name",
    "part",
    "texts",
    "cuts",
    "control",
    "unchecked",
    "note",
    "skips",
    "seed",
    "seconds",
    "created",
    "environment",
    "estimate",
)


@dataclass(frozen=True)
class Tampered:
    text: str
    codes: frozenset[int]
    about: str


def document() -> dict[str, Any]:
    """A saved audit with every kind of content."""
    return json.loads(_document())


@cache
def _document() -> str:
    reading = Reading("a text", (Piece("a", "verified", True),), True, True)
    cut = Cut(("[CLS]", "a"), "yes", "no", 0.9, 0.2, 0.01, 2, 2, ((0, 1, 0, 1),))
    common = {"reason": "because", "remedy": "do not", "queries": 12, "seconds": 0.5}
    findings = (
        Finding(
            called("full scores"),
            "SingleHead",
            Status.RECOVERED,
            error=1e-12,
            lower_bound=12,
            known=1.0,
            trace=((3, 0.5), (12, 1e-12)),
            **common,
        ),
        Finding(
            called("hidden states of layer 1"),
            "EncoderStates",
            Status.RECOVERED,
            error=None,
            sought="text",
            texts=(Readings("hidden", 1, "float32", (reading,)),),
            **common,
        ),
        Finding(
            called("stored embedding"),
            "CountedReader",
            Status.INEXACT,
            error=None,
            sought="text",
            texts=(Readings("pooled", 1, "as stored", (reading,)),),
            estimate=Estimate.of(1, 2, 10),
            **common,
        ),
        Finding(
            called("attention cut"),
            "HackAttend",
            Status.INEXACT,
            error=None,
            sought="prediction",
            cuts=(cut,),
            **common,
        ),
    )
    audit = Audit(
        "a target", "head:0", findings, (Skip(called("signs"), "SignOnly", "no signs"),)
    )
    return json.dumps(audit.to_dict())


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield every place in a document, at any depth."""
    if path:
        yield path
    if isinstance(value, dict | list):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _places(part, (*path, key))


def _kind(value: Any) -> type:
    """The value's type in JSON; integers are numbers, too."""
    if isinstance(value, int) and not isinstance(value, bool):
        return float
    return type(value)


def _replaced(path: tuple[Any, ...], other: Any) -> Tampered:
    data = document()
    inner: Any = data
    for key in path[:-1]:
        inner = inner[key]
    before = inner[path[-1]]
    last = path[-1]
    if other == "GONE":
        del inner[last]
        optional = isinstance(last, int) or last in _DEFAULTS or "environment" in path
        codes = {0, 2} if optional else {2}
    else:
        inner[last] = other
        same = _kind(before) is _kind(other) and not (
            isinstance(other, float)
            and (isinstance(before, int) or not math.isfinite(other))
        )
        codes = {0, 2} if same else {2}
        if last in _MAY_BE_NULL and (other is None or _kind(other) is float):
            codes = {0, 2}
    about = f"{'.'.join(map(str, path))} {other!r}"
    return Tampered(json.dumps(data), frozenset(codes), about)


def _whole() -> dict[str, Tampered]:
    """Files that are damaged as a whole."""
    two = frozenset({2})
    both = frozenset({0, 2})
    good = document()
    numbers = f"[{'0, ' * 10**6}0]"
    many = document()
    many["findings"] *= 100
    texts = {
        "deep": ("[" * 100_000, two),
        "deep-inside": (
            '{"format": 1, "kind": "audit", "findings": ' + "[" * 100_000,
            two,
        ),
        "deep-closed": ("[" * 50_000 + "]" * 50_000, two),
        "digits": ('{"format": ' + "9" * 10_000 + "}", two),
        "long-string": (json.dumps(good).replace("because", "x" * 10_000_000, 1), both),
        "many-findings": (json.dumps(many), both),
        "format-2": (json.dumps({**good, "format": 2}), two),
        "format-word": (json.dumps({**good, "format": "1"}), two),
        "format-none": (json.dumps({**good, "format": None}), two),
        "format-true": (json.dumps({**good, "format": True}), two),
        "other-kind": (json.dumps({**good, "kind": "extraction"}), two),
        "odd-kind": (json.dumps({**good, "kind": ["audit"]}), two),
        "odd-tensors": (json.dumps({**good, "tensors": "../../etc/passwd"}), two),
        "twice": (json.dumps(good)[:-1] + ', "format": 1}', both),
        "nothing-but-null": ("null", two),
        "number": ("5", two),
        "cut-off": (json.dumps(good)[:-30], two),
        "two-documents": (json.dumps(good) * 2, two),
        "million-numbers": (
            json.dumps({**good, "findings": "…"}).replace('"\\u2026"', numbers),
            two,
        ),
        "nul": (json.dumps(good).replace("because", "be\0cause"), two),
        "surrogate": (json.dumps(good).replace("because", "\\ud800"), both),
        "markup": (
            json.dumps(good).replace("because", "[bold]</script>[/nothing]"),
            both,
        ),
        "control": (
            json.dumps(good).replace("because", "\\u001b[31m\\u0007\\r\\n"),
            both,
        ),
        "good": (json.dumps(good), frozenset({0})),
    }
    return {
        f"audit-{name}.json": Tampered(text, codes, name)
        for name, (text, codes) in texts.items()
    }


def _sampled() -> dict[str, Tampered]:
    pairs = [(path, other) for path in _places(document()) for other in _OTHERS]
    chosen = random.Random(2601).sample(pairs, _COUNT)
    return {f"audit-{n:03d}.json": _replaced(*pair) for n, pair in enumerate(chosen)}


AUDITS = {**_whole(), **_sampled()}
