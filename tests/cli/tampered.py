"""Saved audits in which somebody has changed one value.

`AUDITS` holds each by its file's name.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
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


def _replaced(path: tuple[Any, ...], other: Any) -> str:
    data = document()
    inner: Any = data
    for key in path[:-1]:
        inner = inner[key]
    if other == "GONE":
        del inner[path[-1]]
    else:
        inner[path[-1]] = other
    return json.dumps(data)


def _whole() -> dict[str, str]:
    """Files that are damaged as a whole."""
    good = document()
    text = json.dumps(good)
    numbers = f"[{'0, ' * 10**6}0]"
    many = {**good, "findings": good["findings"] * 100}
    odd = {
        "format-2": {"format": 2},
        "format-word": {"format": "1"},
        "format-none": {"format": None},
        "format-true": {"format": True},
        "other-kind": {"kind": "extraction"},
        "odd-kind": {"kind": ["audit"]},
        "odd-tensors": {"tensors": "../../etc/passwd"},
        "many-findings": many,
    }
    reasons = {
        "long-string": "x" * 10_000_000,
        "nul": "be\0cause",
        "surrogate": "\\ud800",
        "markup": "[bold]</script>[/nothing]",
        "control": "\\u001b[31m\\u0007\\r\\n",
    }
    return {
        **{name: json.dumps({**good, **changes}) for name, changes in odd.items()},
        **{name: text.replace("because", word) for name, word in reasons.items()},
        "deep": "[" * 100_000,
        "deep-inside": '{"format": 1, "kind": "audit", "findings": ' + "[" * 100_000,
        "deep-closed": "[" * 50_000 + "]" * 50_000,
        "digits": '{"format": ' + "9" * 10_000 + "}",
        "twice": text[:-1] + ', "format": 1}',
        "nothing-but-null": "null",
        "number": "5",
        "cut-off": text[:-30],
        "two-documents": text * 2,
        "million-numbers": json.dumps({**good, "findings": 0}).replace(
            '"findings": 0', f'"findings": {numbers}'
        ),
        "good": text,
    }


def _sampled() -> dict[str, str]:
    pairs = [(path, other) for path in _places(document()) for other in _OTHERS]
    chosen = random.Random(2601).sample(pairs, _COUNT)
    return {f"{n:03d}": _replaced(*pair) for n, pair in enumerate(chosen)}


AUDITS = {
    f"audit-{name}.json": text for name, text in {**_whole(), **_sampled()}.items()
}
