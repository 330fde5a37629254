"""The sentences and numbers that every form of the report shares."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from markupsafe import Markup

from keyhole.percent import percent
from keyhole.results import Audit, Finding, Outcome, Readings, Status
from keyhole.results.readings import Reading

_OPTION = re.compile(r"(?<!\S)(--[a-z][a-z-]*)")


def verdict(audit: Audit) -> str:
    """The one sentence that a reader takes away."""
    total = len(audit.attacks)
    if total == 0:
        return "Nothing was checked: no attack applies to this target."
    unchecked = f"{audit.unchecked} could not be checked" if audit.unchecked else ""
    exposed = [
        f"the {sought} can be {_DONE.get(sought, 'read back')} through "
        f"{sum(finding.exposed for finding in group)} of {len(group)}"
        for sought, group in audit.by_sought().items()
        if any(finding.exposed for finding in group)
    ]
    if exposed:
        sentence = ", ".join(exposed)
        tail = f"; {unchecked}" if unchecked else " checked"
        return f"{sentence[0].upper()}{sentence[1:]} exposures{tail}."
    if audit.unchecked >= total:
        return "Could not check: no attack came to a result that says anything of this target."
    if unchecked:
        kept = "none of the others gave anything away, which does not make the target clean"
        return f"Of {total} exposures {unchecked}; {kept}."
    return f"None of the {total} exposures checked gave anything away."


_DONE = {"prediction": "flipped"}  # what an attacker does with it, if not read it back


def outcome(finding: Finding) -> str:
    """What became of the secret, in a word or two."""
    if finding.outcome is Outcome.UNCHECKED:
        return "could not check"
    if finding.sought == "prediction":
        return f"{percent(finding.known)} flipped"
    if finding.estimate is not None:
        return f"{finding.estimate.share} of texts"
    if finding.status is Status.RECOVERED:
        return "recovered"
    if finding.status is Status.WITHIN:
        return "recovered within a domain"
    if finding.sought == "text":
        cell = finding.texts[0] if finding.texts else None
        if cell is not None and cell.kind == "pooled" and cell.exact:  # one vector: all or nothing
            return f"{cell.exact} of {len(cell.readings)} texts"
        return f"{percent(finding.known)} of tokens"
    if finding.status is Status.INEXACT:
        return "nearly recovered"
    if finding.known and finding.sought == "weights":
        return f"{percent(finding.known)} known"
    return "not recovered"


def error(finding: Finding) -> str:
    return "–" if finding.error is None else f"{finding.error:.1e}"


def floor(finding: Finding) -> str:
    return "–" if finding.floor is None else f"{finding.floor:,}"


def colour(finding: Finding) -> str:
    """bad: given away; part: some of it, or nobody knows; good: kept."""
    if finding.exposed:
        return "bad"
    if finding.control:
        return "good"
    if finding.outcome is Outcome.UNCHECKED or finding.sought == "text":
        return "part"  # a search that was cut short proves nothing
    return "part" if finding.known and finding.sought == "weights" else "good"


def headline(audit: Audit) -> str:
    """The colour of the verdict, by the same table as the exit code."""
    return {0: "good", 1: "bad", 3: "part"}[audit.exit_code]


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


def marks(reading: Reading) -> str:
    """How many tokens have which mark, in words: colours alone are not for everybody."""
    counts = Counter(piece.mark for piece in reading.pieces)
    return ", ".join(f"{count} {mark}" for mark, count in counts.most_common())


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
