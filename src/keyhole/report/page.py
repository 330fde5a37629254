"""An audit as one HTML page, which needs no network and can be read without its script.

`render` takes an audit, or an assessment of one, and returns the page. What it draws is
computed here; templates/page.html puts it together.
"""

from __future__ import annotations

import base64
import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from importlib import resources
from itertools import groupby
from typing import Any

import jinja2
from markupsafe import Markup

from keyhole.assess import Assessment, Card, Family, Item, assessed
from keyhole.assess.assessment import measured
from keyhole.assess.severity import cost
from keyhole.core import Audit, Readings
from keyhole.core.finding import Cut
from keyhole.core.text import legible, percent
from keyhole.report import readings, words

_UNFOLDED = 3  # findings with texts that are shown without a click


def render(audit: Audit | Assessment) -> str:
    """Return the page of an audit, in which everything from a target is escaped.

    An assessment is given if a policy or a baseline was applied to the audit.
    """
    made = assessed(audit)
    return fill(
        "page.html",
        audit=made.audit,
        assessment=made,
        sections=sections(made),
        controls=groups(made.controls),
        parts=parts(made),
        measured=partial(measured, items=made.items),
        unfolded=[item.id for item in made.exposed if item.finding.texts][:_UNFOLDED],
        cost=cost,
        whole=WHOLE,
        percent=percent,
        picture=picture,
        unseen=unseen,
        readings=readings,
        words=words,
    )


# Every page has one stylesheet, one short script, and a Content-Security-Policy that
# names both by their hashes. A browser runs and loads nothing else, whatever a target
# has managed to write into the page. This also rules out `style` attributes: drawings
# take their colours from classes, and their sizes from SVG.


def _finalize(value: Any) -> Any:
    """Make strings safe to look at, except markup, whose parts were made safe already."""
    if isinstance(value, str) and not hasattr(value, "__html__"):
        return legible(value)
    return value


_environment = jinja2.Environment(
    loader=jinja2.PackageLoader("keyhole.report"),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    finalize=_finalize,
    trim_blocks=True,
    lstrip_blocks=True,
)


def fill(template: str, **values: Any) -> str:
    """Render a template that extends base.html; all strings in the values are escaped."""
    style = _inlined("style.css")
    script = _inlined("script.js")
    page = _environment.get_template(template)
    return page.render(
        style=style, script=script, policy=policy(style, script), **values
    )


def policy(style: str, script: str) -> str:
    """Return the Content-Security-Policy, which allows what is inlined and nothing else."""
    return "; ".join(
        [
            "default-src 'none'",
            f"style-src {_digest(style)}",
            f"script-src {_digest(script)}",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
        ]
    )


@cache
def _inlined(name: str) -> Markup:
    text = (resources.files("keyhole.report") / "templates" / name).read_text("utf-8")
    return Markup(text)  # noqa: S704 - a file of this package


def _digest(text: str) -> str:
    return (
        f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
    )


@dataclass(frozen=True)
class Group:
    """The findings of one family about one part of the target, the worst first."""

    family: Family
    part: str
    items: tuple[Item, ...]

    @property
    def title(self) -> str:
        if self.part:
            return f"{self.family} of {self.part}"
        return self.family.value


def groups(items: Iterable[Item]) -> list[Group]:
    """Group findings by family and part; in a family, the part with the worst finding is first."""
    gathered: dict[tuple[Family, str], list[Item]] = {}
    for item in items:
        gathered.setdefault((item.family, item.finding.part), []).append(item)
    made = [
        Group(family, part, tuple(mine)) for (family, part), mine in gathered.items()
    ]
    return [group for family in Family for group in made if group.family is family]


def sections(assessment: Assessment) -> list[tuple[Card, list[Group]]]:
    """Return the families that were tried, each with its card and its groups."""
    made = groups(assessment.items)
    return [
        (card, [group for group in made if group.family is card.family])
        for card in assessment.families
        if card.checked
    ]


# A picture of a cut: layers go down and heads across, and each head is a grid with a
# row for each query and a column for each key. Layers without a cut are left out.

_WIDEST = 700  # pixels for all heads of a layer
_SMALLEST = 1.0
_LARGEST = 3.0
_GAP = 6.0
_MARGIN = 26.0
_NAMED = 5  # pairs that a head's title names


@dataclass(frozen=True)
class Head:
    """A head: its position and size, what was cut in words, and the same as an SVG path.

    The path is in units of a cell, with a line of width 1 through the cells of a row
    that were cut.
    """

    x: float
    y: float
    size: float
    title: str
    path: str


@dataclass(frozen=True)
class Picture:
    """A picture of a cut, with sizes in pixels; `cell` is the size of a unit."""

    width: float
    height: float
    cell: float
    heads: tuple[Head, ...]
    across: tuple[tuple[float, int], ...]  # the position of each head's number
    down: tuple[tuple[float, int], ...]  # the position of each layer's number


def picture(cut: Cut) -> Picture:
    """Draw every head of the layers that were cut."""
    cell = (_WIDEST / max(1, cut.heads) - _GAP) / max(1, len(cut.tokens))
    cell = min(_LARGEST, max(_SMALLEST, cell))
    side = cell * len(cut.tokens)
    step = side + _GAP
    units: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for layer, head, query, key in cut.units:
        units.setdefault((layer, head), []).append((query, key))
    layers = sorted({layer for layer, _ in units})
    rows = {layer: _MARGIN + row * step for row, layer in enumerate(layers)}
    columns = {head: _MARGIN + head * step for head in range(cut.heads)}
    heads = tuple(
        Head(x, y, side, *_drawn(cut, layer, head, units.get((layer, head), [])))
        for layer, y in rows.items()
        for head, x in columns.items()
    )
    return Picture(
        _MARGIN + len(columns) * step,
        _MARGIN + len(rows) * step,
        cell,
        heads,
        across=tuple((x + side / 2, head + 1) for head, x in columns.items()),
        down=tuple((y + side / 2, layer + 1) for layer, y in rows.items()),
    )


def _drawn(
    cut: Cut,
    layer: int,
    head: int,
    pairs: Sequence[tuple[int, int]],
) -> tuple[str, str]:
    """Return what was cut of a head, in words and as a path."""
    title = f"layer {layer + 1}, head {head + 1}"
    named = [f"{cut.tokens[query]} → {cut.tokens[key]}" for query, key in pairs]
    if len(pairs) > _NAMED:
        named[_NAMED:] = [f"{len(pairs) - _NAMED} more"]
    if pairs:
        title += f": {', '.join(named)}"
    return title, _path(pairs)


def _path(pairs: Sequence[tuple[int, int]]) -> str:
    """Return a path with one line for each run of adjacent cells."""
    parts: list[str] = []
    for query, row in groupby(sorted(set(pairs)), lambda pair: pair[0]):
        keys = [key for _, key in row]
        for _, run in groupby(enumerate(keys), lambda place: place[1] - place[0]):
            run_of = [key for _, key in run]
            parts.append(f"M{run_of[0]} {query}.5h{len(run_of)}")
    return "".join(parts)


def unseen(cut: Cut) -> Iterator[tuple[str, int, int]]:
    """Yield each token, the number of units in which it was cut off, and its shade."""
    counts = Counter(key for _, _, _, key in cut.units)
    most = max(counts.values(), default=1)
    for place, token in enumerate(cut.tokens):
        yield token, counts[place], shade(counts[place] / most)


# The exposure matrix: a row for each exposure and precision, a column for each layer. A
# cell is the share of tokens that were recovered. Findings without texts become chips.
# All are links.

WHOLE = "model"  # the column of exposures that come from no single layer
_SHADES = 5


@dataclass(frozen=True)
class Cell:
    """The texts read from one exposure in one precision."""

    item: Item
    readings: Readings

    @property
    def words(self) -> str:
        readings = self.readings
        if readings.readings and readings.exact == len(readings.readings):
            return "exact"
        return percent(readings.known)

    @property
    def shade(self) -> int:
        return shade(self.readings.known)


@dataclass
class Part:
    """A part of the target, with its matrix and its chips."""

    name: str
    columns: list[str] = field(default_factory=list[str])
    kinds: dict[str, dict[str, dict[str, Cell]]] = field(  # kind, precision, column
        default_factory=dict[str, dict[str, dict[str, Cell]]]
    )
    chips: list[Item] = field(default_factory=list[Item])


def shade(share: float) -> int:
    """Return the number of the shade for a share in the stylesheet, which is 0 for nothing."""
    if share <= 0:
        return 0
    return min(_SHADES, 1 + int(share * _SHADES))


def parts(assessment: Assessment) -> list[Part]:
    """Return the parts of the target, the one with the worst finding first."""
    made: dict[str, Part] = {}
    for item in assessment.items:
        part = made.setdefault(item.finding.part, Part(item.finding.part))
        if item.finding.texts:
            _place(part, item, item.finding.texts)
        else:
            part.chips.append(item)
    for part in made.values():  # layers by number, and what comes from none of them
        part.columns.sort(key=lambda name: (name == WHOLE, len(name), name))
    return list(made.values())


def _place(
    part: Part,
    item: Item,
    texts: Sequence[Readings],
) -> None:
    exposure = item.finding.exposure
    column = str(exposure.layer) if exposure.layer is not None else WHOLE
    kind = words.exposure(replace(exposure, layer=None))
    if column not in part.columns:
        part.columns.append(column)
    rows = part.kinds.setdefault(kind, {})
    for read in texts:
        row = rows.setdefault(read.precision, {})
        best = row.get(column)  # of several attacks on one leak, the best counts
        if best is None or best.readings.known < read.known:
            row[column] = Cell(item, read)
