"""Exposures by their words, so that tests are easy to read."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from functools import cache

from keyhole.core import Finding, Skip
from keyhole.core.exposure import NOT_CHECKED, Exposure
from keyhole.core.finding import Reading
from keyhole.report import words

_BY_WORDS = {
    template.format(of_layer="", name="").strip(): Exposure(
        key[0], key[1], defences=key[2:]
    )
    for key, template in words.EXPOSURES.items()
    if key[0] != NOT_CHECKED
}
_SHARE = re.compile(r"^(\d+%) ")
_LAYER = re.compile(r" of layer (\d+)")


@cache
def called(name: str, part: str = "", rule: str = "KH-WEIGHTS-OTHER") -> Exposure:
    """Return the exposure with these words; unknown words are another exposure of weights."""
    share = _SHARE.match(name)
    layer = _LAYER.search(name)
    plain = _SHARE.sub("", _LAYER.sub("", name))
    found = _BY_WORDS.get(plain) or Exposure(rule, name)
    made = replace(
        found,
        layer=int(layer[1]) if layer else None,
        name=share[1] if share else "",
        part=part,
    )
    assert found.rule == rule or words.exposure(made) == name
    return made


def names(given: Iterable[Finding | Skip]) -> list[str]:
    """Return the words for the exposures of findings or skips."""
    return [
        words.skip(row) if isinstance(row, Skip) else words.exposure(row.exposure)
        for row in given
    ]


def written(reading: Reading) -> str:
    """Return the text that was read back."""
    return "".join(piece.text for piece in reading.pieces).strip()


def by_name(findings: Iterable[Finding]) -> dict[str, Finding]:
    return {words.exposure(finding.exposure): finding for finding in findings}
