"""The sentences and numbers that every form of the report shares."""

from __future__ import annotations

import re
from dataclasses import dataclass

from markupsafe import Markup

from keyhole.percent import percent
from keyhole.results import Audit, Finding, Readings, Status

_OPTION = re.compile(r"(?<!\S)(--[a-z][a-z-]*)")


def verdict(audit: Audit) -> str:
    """The one sentence that a reader takes away."""
    total = len(audit.findings)
    if total == 0:
        return "Nothing was checked: no attack applies to this target."
    if audit.failed:
        return "Could not check: the target did not answer as it must."
    exposed = [
        f"the {sought} can be {_DONE.get(sought, 'read back')} through "
        f"{sum(finding.exposed for finding in group)} of {len(group)}"
        for sought, group in audit.by_sought().items()
        if any(finding.exposed for finding in group)
    ]
    if exposed:
        sentence = ", ".join(exposed)
        return f"{sentence[0].upper()}{sentence[1:]} exposures checked."
    return f"None of the {total} exposures checked gave anything away."


_DONE = {"prediction": "flipped"}  # what an attacker does with it, if not read it back


def outcome(finding: Finding) -> str:
    """What became of the secret, in a word or two."""
    if finding.sought == "prediction":
        none = finding.status is Status.NOT_APPLICABLE
        return "nothing to flip" if none else f"{percent(finding.known)} flipped"
    if finding.status is Status.RECOVERED:
        return "recovered"
    if finding.sought == "text":
        return f"{percent(finding.known)} of tokens"
    if finding.status is Status.INEXACT:
        return "nearly recovered"
    if finding.status is Status.BUDGET:
        return f"{percent(finding.known)} known"
    if finding.status is Status.ORACLE_FAILED:
        return "could not check"
    return "not recovered"


def error(finding: Finding) -> str:
    return "–" if finding.error is None else f"{finding.error:.1e}"


def floor(finding: Finding) -> str:
    return "–" if finding.floor is None else f"{finding.floor:,}"


def colour(finding: Finding) -> str:
    """bad: given away; part: some of it, or nobody knows; good: kept."""
    if finding.exposed:
        return "bad"
    unclear = (Status.BUDGET, Status.UNVERIFIED, Status.ORACLE_FAILED)
    if finding.sought == "text":  # a search that was cut short proves nothing
        return "part"
    if finding.sought == "prediction":
        return "part" if finding.status is Status.NOT_APPLICABLE else "good"
    return "part" if finding.status in unclear else "good"


@dataclass(frozen=True)
class Matrix:
    """The exposure matrix of one model: kind of exposure × layer, a cell for each precision."""

    layers: list[int]
    rows: dict[str, dict[int, tuple[Readings, ...]]]


def matrices(audit: Audit) -> dict[str, Matrix]:
    """One matrix for each model from which text was sought."""
    tables: dict[str, Matrix] = {}
    for finding in audit.findings:
        if not finding.texts:
            continue
        layer = finding.texts[0].layer
        matrix = tables.setdefault(finding.surface, Matrix([], {}))
        if layer not in matrix.layers:
            matrix.layers.append(layer)
            matrix.layers.sort()
        kind = finding.exposure.removesuffix(f" of layer {layer}")
        matrix.rows.setdefault(kind, {})[layer] = finding.texts
    return tables


def originals(finding: Finding) -> list[str]:
    return [reading.original for reading in finding.texts[0].readings]


def unbroken(text: str) -> Markup:
    """Escaped, with every option in one piece: a browser may end a line after its hyphens."""
    parts = _OPTION.split(text)  # an option at every second place
    return Markup().join(
        Markup('<span class="option">{}</span>').format(part) if number % 2 else part
        for number, part in enumerate(parts)
    )


def heat(known: float) -> str:
    """From nearly white to red: how much came back."""
    return f"hsl(0 80% {96 - 14 * known:.0f}%)"
