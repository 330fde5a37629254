"""An audit as one self-contained HTML page: no network, and readable without its script."""

from __future__ import annotations

import base64
import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from itertools import groupby
from typing import Any

import jinja2
from markupsafe import Markup, escape

from keyhole.assess import Assessment, Card, Family, Item, assess
from keyhole.assess.assessment import Measure, measured
from keyhole.assess.severity import cost
from keyhole.core import Audit, Finding, Readings, Result
from keyhole.core.finding import Cut
from keyhole.core.text import legible, percent
from keyhole.report import readings, words

_UNFOLDED = 3  # findings whose texts are seen without a click, the worst first


def render(audit: Audit | Assessment) -> str:
    """The page of an audit, or of what `assess` made of it where a policy or a baseline had a say;
    everything that came from a target is escaped.
    """
    made = audit if isinstance(audit, Assessment) else assess(audit)

    def measures(item: Item) -> list[Measure]:
        return measured(item, made.items)

    return fill(
        "page.html",
        audit=made.audit,
        assessment=made,
        sections=sections(made),
        controls=groups(made.controls),
        parts=parts(made),
        measured=measures,
        unfolded=[item.id for item in made.exposed if item.finding.texts][:_UNFOLDED],
        cost=cost,
        curve=curve,
        whole=WHOLE,
        percent=percent,
        picture=picture,
        unseen=unseen,
        readings=readings,
        words=words,
    )


def html(result: Result) -> str:
    """What a notebook shows: the page of an audit, in a frame of its own; of others the summary."""
    if isinstance(result, Audit):
        return f'<iframe width="100%" height="600" srcdoc="{escape(render(result))}"></iframe>'
    return f"<pre>{escape(legible(repr(result)))}</pre>"


# How every page is made: one stylesheet, one short script, and a policy that forbids all else.
#
# The policy (`default-src 'none'`) names style and script by their hashes: no browser runs or loads
# anything that is not in the page, whatever a target has managed to write into it. So there are no
# `style` attributes either: what is drawn takes its colours from classes, its sizes from SVG.


def _finalize(value: Any) -> Any:
    """Strings as they may be looked at; what is markup already was made so piece by piece."""
    return legible(value) if isinstance(value, str) and not hasattr(value, "__html__") else value


_environment = jinja2.Environment(
    loader=jinja2.PackageLoader("keyhole.report"),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    finalize=_finalize,
    trim_blocks=True,
    lstrip_blocks=True,
)


def fill(template: str, **values: Any) -> str:
    """A template that extends base.html, with the values given; all strings in them are escaped."""
    style, script = _inlined("style.css"), _inlined("script.js")
    page = _environment.get_template(template)
    return page.render(style=style, script=script, policy=policy(style, script), **values)


def policy(style: str, script: str) -> str:
    """What a browser may do on a page: what is inlined in it, and nothing else."""
    return "; ".join([
        "default-src 'none'",
        f"style-src {_digest(style)}",
        f"script-src {_digest(script)}",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
    ])  # fmt: skip


@cache
def _inlined(name: str) -> Markup:
    text = (resources.files("keyhole.report") / "templates" / name).read_text("utf-8")
    return Markup(text)  # noqa: S704 - a file of this package


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


# Findings as people read them: by what is lost, then by the part of the target that loses it.


@dataclass(frozen=True)
class Group:
    """What was tried on one part of the target to one end, the worst first."""

    family: Family
    part: str
    items: tuple[Item, ...]

    @property
    def title(self) -> str:
        """Of what, in words."""
        return f"{self.family} of {self.part}" if self.part else str(self.family)


def groups(items: Iterable[Item]) -> list[Group]:
    """By family, in the order of the cards; in a family, the part with the worst finding first."""
    gathered: dict[tuple[Family, str], list[Item]] = {}
    for item in items:
        gathered.setdefault((item.family, item.finding.part), []).append(item)
    made = [Group(family, part, tuple(mine)) for (family, part), mine in gathered.items()]
    order = list(Family)
    return sorted(made, key=lambda group: order.index(group.family))  # stable: the worst first


def sections(assessment: Assessment) -> list[tuple[Card, list[Group]]]:
    """The families of which anything was tried, each with its card and its groups."""
    made = groups(assessment.items)
    return [
        (card, [group for group in made if group.family is card.family])
        for card in assessment.families
        if card.checked
    ]


# A cut as a picture: layers down, heads across, in each a grid of query (row) and key (column).
#
# Layers of which nothing was cut are left out. The template draws it, and escapes the tokens.

_WIDEST = 700  # pixels for all heads of a layer
_SMALLEST, _LARGEST, _GAP, _MARGIN = 1.0, 3.0, 6.0, 26.0
_NAMED = 5  # pairs that a head's title names


@dataclass(frozen=True)
class Head:
    """One head: its place and size, what was cut of it, and that in words.

    `path` is drawn in cells: a line of width 1 through each row of the grid where it was cut.
    """

    x: float
    y: float
    size: float
    title: str
    path: str


@dataclass(frozen=True)
class Picture:
    """What a template needs to draw a cut; sizes in pixels, `cell` is one unit's."""

    width: float
    height: float
    cell: float
    heads: tuple[Head, ...]
    across: tuple[tuple[float, int], ...]  # where each head's number stands
    down: tuple[tuple[float, int], ...]  # where each layer's does


def picture(cut: Cut) -> Picture:
    """Every head of the layers that were cut as a grid, with the units of it that were."""
    cell = (_WIDEST / max(1, cut.heads) - _GAP) / max(1, len(cut.tokens))
    cell = min(_LARGEST, max(_SMALLEST, cell))
    side = cell * len(cut.tokens)
    step = side + _GAP
    units: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for layer, head, query, key in cut.units:
        units.setdefault((layer, head), []).append((query, key))
    layers = sorted({layer for layer, _ in units})
    heads = tuple(
        Head(
            _MARGIN + head * step, _MARGIN + row * step, side,
            *_drawn(cut, layer, head, units.get((layer, head), [])),
        )
        for row, layer in enumerate(layers)
        for head in range(cut.heads)
    )  # fmt: skip
    across = tuple((_MARGIN + head * step + side / 2, head + 1) for head in range(cut.heads))
    down = tuple((_MARGIN + row * step + side / 2, layer + 1) for row, layer in enumerate(layers))
    width, height = _MARGIN + cut.heads * step, _MARGIN + len(layers) * step
    return Picture(width, height, cell, heads, across, down)


def _drawn(cut: Cut, layer: int, head: int, pairs: Sequence[tuple[int, int]]) -> tuple[str, str]:
    """What was cut of a head, in words and as a path."""
    title = f"layer {layer + 1}, head {head + 1}"
    if pairs:
        named = [f"{cut.tokens[query]} → {cut.tokens[key]}" for query, key in pairs[:_NAMED]]
        more = [f"{len(pairs) - _NAMED} more"] if len(pairs) > _NAMED else []
        title += f": {', '.join([*named, *more])}"
    return title, _path(pairs)


def _path(pairs: Sequence[tuple[int, int]]) -> str:
    """Cells that stand side by side are one line."""
    parts: list[str] = []
    for query, row in groupby(sorted(set(pairs)), lambda pair: pair[0]):
        keys = [key for _, key in row]
        for _, run in groupby(enumerate(keys), lambda place: place[1] - place[0]):
            run_of = [key for _, key in run]
            parts.append(f"M{run_of[0]} {query}.5h{len(run_of)}")
    return "".join(parts)


def unseen(cut: Cut) -> Iterator[tuple[str, int, int]]:
    """Each token, in how many units it was no longer seen, and its shade among the others."""
    counts = Counter(key for _, _, _, key in cut.units)
    most = max(counts.values(), default=1)
    for place, token in enumerate(cut.tokens):
        yield token, counts[place], shade(counts[place] / most)


# Error against queries as a drawing: logarithmic axes, the lower bound marked. Numbers only.
#
# No attack can do with fewer queries than the lower bound, the number of unknowns over the numbers
# in an answer. The template draws what this places, in the colours of the page.

WIDTH, HEIGHT = 620, 270
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 18, 22, 44
_MOST_QUERIES = 10**18  # a file may say anything
_POINTS = 300  # points that are drawn: more cannot be told apart


@dataclass(frozen=True)
class Curve:
    """What a template needs to draw a trace; `bound` is where the lower bound's line stands."""

    across: Axis
    up: Axis
    points: tuple[tuple[float, float], ...]
    bound: float | None
    about: str

    width: int = WIDTH
    height: int = HEIGHT

    @property
    def path(self) -> str:
        return " ".join(f"{x:g},{y:g}" for x, y in self.points)


def curve(finding: Finding) -> Curve | None:
    """The drawing of a finding that was followed on its way; None for the others."""
    trace = [
        (min(max(1, queries), _MOST_QUERIES), max(error, SMALLEST))
        for queries, error in _thinned(finding.trace)
        if math.isfinite(error)
    ]
    if not trace:
        return None
    queries, errors = zip(*trace, strict=True)
    bound = finding.lower_bound
    bound = bound if bound and 0 < bound <= _MOST_QUERIES else None
    across = Axis.around([*queries, *([bound] if bound else [])], _LEFT, WIDTH - _RIGHT)
    up = Axis.around(errors, HEIGHT - _BOTTOM, _TOP)
    return Curve(
        across, up, tuple((across.place(x), up.place(y)) for x, y in trace),
        across.place(bound) if bound else None, _about(trace, bound),
    )  # fmt: skip


def _thinned(trace: Sequence[tuple[int, float]]) -> Sequence[tuple[int, float]]:
    step = max(1, math.ceil(len(trace) / _POINTS))
    return [*trace[:-1:step], *trace[-1:]]


def _about(trace: Sequence[tuple[int, float]], bound: int | None) -> str:
    """The drawing in words, for whoever does not see it."""
    (first, high), (last, low) = trace[0], trace[-1]
    words = (
        f"Error {low:.1e} after {last:,} queries"
        if len(trace) == 1
        else f"Error {high:.1e} after {first:,} queries, {low:.1e} after {last:,}"
    )
    return f"{words}; the lower bound is {bound:,}." if bound else f"{words}."


# An axis of a drawing: which number stands at which pixel, and where its ticks stand.

SMALLEST = 1e-17  # errors of exactly zero have to stand somewhere on a logarithmic axis
_TICKS = 7  # along an axis, at most about so many


@dataclass(frozen=True)
class Axis:
    """Powers of ten from `low` to `high`, from pixel `begin` to `end`."""

    low: int
    high: int
    begin: float
    end: float

    @classmethod
    def around(cls, values: Sequence[float], begin: float, end: float) -> Axis:
        """An axis that holds all of them, between whole powers of ten."""
        scaled = [_power(value) for value in values]
        low, high = math.floor(min(scaled)), math.ceil(max(scaled))
        return cls(low, max(high, low + 1), begin, end)

    def place(self, value: float) -> float:
        return self._at(_power(value))

    @property
    def ticks(self) -> list[tuple[float, int]]:
        """Where each stands, and the power of ten that it stands for."""
        step = max(1, math.ceil((self.high - self.low) / _TICKS))
        return [(self._at(power), power) for power in range(self.low, self.high + 1, step)]

    def _at(self, power: float) -> float:
        share = (power - self.low) / (self.high - self.low)
        return round(self.begin + share * (self.end - self.begin), 1)


def _power(value: float) -> float:
    return math.log10(max(value, SMALLEST))


# The exposure matrix: what leaks, down; in which layer, across; in each precision, a row.
#
# A model's cells are the shares of tokens that came back. What has no layers (endpoints, flips) is
# one chip for each finding. All of them are links.

WHOLE = "model"  # the column of what is made by no single layer
_SHADES = 5


@dataclass(frozen=True)
class Cell:
    """What one exposure gave away in one precision."""

    item: Item
    readings: Readings

    @property
    def words(self) -> str:
        readings = self.readings
        whole = readings.readings and readings.exact == len(readings.readings)
        return "exact" if whole else percent(readings.known)

    @property
    def shade(self) -> int:
        return shade(self.readings.known)


@dataclass
class Part:
    """One part of the target: its matrix, where text was read of it, and chips for the rest."""

    name: str
    columns: list[str] = field(default_factory=list[str])
    kinds: dict[str, dict[str, dict[str, Cell]]] = field(  # kind, precision, column
        default_factory=dict[str, dict[str, dict[str, Cell]]]
    )
    chips: list[Item] = field(default_factory=list[Item])


def shade(share: float) -> int:
    """Which of the shades of the stylesheet a share has: 0 for nothing, the last for all."""
    return 0 if share <= 0 else min(_SHADES, 1 + int(share * _SHADES))


def parts(assessment: Assessment) -> list[Part]:
    """One for each part of the target, the worst first."""
    made: dict[str, Part] = {}
    for item in assessment.items:
        part = made.setdefault(item.finding.part, Part(item.finding.part))
        if item.finding.texts:
            _place(part, item, item.finding.texts)
        else:
            part.chips.append(item)
    for part in made.values():
        part.columns.sort(key=lambda name: (name == WHOLE, int(name) if name != WHOLE else 0))
    return list(made.values())


def _place(part: Part, item: Item, texts: Sequence[Readings]) -> None:
    exposure = item.finding.exposure
    column = WHOLE if exposure.layer is None else str(exposure.layer)
    kind = words.exposure(replace(exposure, layer=None))
    if column not in part.columns:
        part.columns.append(column)
    rows = part.kinds.setdefault(kind, {})
    for read in texts:
        row = rows.setdefault(read.precision, {})
        best = row.get(column)  # of several attacks on one leak, the one that read most counts
        if best is None or best.readings.known < read.known:
            row[column] = Cell(item, read)
