"""HackAttend's ablations: rankings, orders, half scale, what is spared, and the share as a curve.

All rows are the released schedule with one thing changed, on SST-2's dev set: `--models` takes
several folders (seeds of one model), every figure is then a mean with its range; without it the
classifier in the box. `--texts` takes the first so many sentences, `--out` keeps what was measured,
`--join FILE…` makes the table of such files, so that seeds may run one by one. `--picture FILE`
draws the curve as a page. `--quick` takes two of the reviews in the box.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

import torch

import show
from keyhole.data import Example, read_examples
from keyhole.disrupt import HackAttend, Rerank
from keyhole.disrupt.batches import Batches
from keyhole.models import Loaded, load_model
from keyhole.models.demo import EXAMPLES, FOLDER
from show import Row

if TYPE_CHECKING:
    import plotly.graph_objects as go

ROOT = Path(__file__).resolve().parent.parent
SHARES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05)


def _shares(given: str) -> tuple[float, ...]:
    return tuple(float(share) for share in given.split(",") if share)


OPTIONS = argparse.ArgumentParser(add_help=False)
OPTIONS.add_argument("--models", nargs="+", default=[str(FOLDER)])
OPTIONS.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data")
OPTIONS.add_argument("--texts", type=int, help="the first so many sentences; all by default")
OPTIONS.add_argument("--share", type=float, default=0.01, help="of the rows; the curve has its own")
OPTIONS.add_argument("--shares", type=_shares, default=SHARES, help="of the curve, by commas")
OPTIONS.add_argument("--batch", type=int, default=64)
OPTIONS.add_argument("--together", type=int, default=16, help="examples in one call")
OPTIONS.add_argument("--only", default="", help="attacks to run, by a part of their names")
OPTIONS.add_argument("--out", type=Path, help="keep what was measured in this file")
OPTIONS.add_argument("--join", type=Path, nargs="+", default=[], help="files that --out wrote")
OPTIONS.add_argument("--picture", type=Path, help="the curve as an .html page")
OPTIONS.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
CHOSEN, REST = OPTIONS.parse_known_args()

RELEASED, MAGNITUDE = "as released (ranked by −gradient)", "ranked by gradient magnitude"
ABLATIONS: dict[str, dict[str, Any]] = {
    RELEASED: {},
    MAGNITUDE: {"ranking": "magnitude"},
    "ranked by gradient × attention": {"ranking": "gradient*attention"},
    "ranked by the effect of removal": {"ranking": "removal"},
    "ranked by attention score": {"ranking": "attention"},
    "random units": {"ranking": "random"},
    "random layer order": {"order": "random layer"},
    "random head order": {"order": "random head"},
    "random layers and heads": {"order": "random"},
    "random layers, heads and units": {"order": "random", "ranking": "random"},
    "half scale": {"scale": "half"},
    "special tokens spared": {"spare": "special"},
}
STRONGER = "stronger (ours, special tokens spared)"
CURVES = (RELEASED, MAGNITUDE, "random units", STRONGER)


@dataclass(frozen=True)
class Measured:
    """One attack on one model: how many of the right answers flipped, and what that took."""

    model: str
    attack: str
    share: float
    right: int
    flips: int
    cut: float  # of all units, mean of the flips
    worst_head: float
    queries: float
    seconds: float
    control: float  # the largest change of a logit by masks that cut nothing


def attack(name: str, share: float, batch: int) -> HackAttend:
    if name == STRONGER:
        return HackAttend.strongest(share, batch=batch)
    return HackAttend.as_released(share, **ABLATIONS[name], batch=batch)


def planned(share: float, shares: Sequence[float]) -> Iterator[tuple[str, float]]:
    """Every row at one share, then what the curve still lacks."""
    rows = [*ABLATIONS, STRONGER]
    yield from ((name, share) for name in rows)
    yield from ((name, other) for name in CURVES for other in shares if other != share)


def measure(
    loaded: Loaded, examples: Sequence[Example], name: str, share: float, method: HackAttend
) -> Measured:
    started = time.perf_counter()
    batches = Batches(loaded.model, loaded.tokenizer, examples, batch_size=CHOSEN.together)
    found = batches.attack(method)
    worst = max((outcome.worst_head for outcome in found.attacked), default=0.0)
    return Measured(
        Path(loaded.name).name, name, share, len(found.attacked), found.flips, found.share, worst,
        found.queries, time.perf_counter() - started, found.control.change,
    )  # fmt: skip


def read(files: Sequence[Path]) -> list[Measured]:
    return [Measured(**point) for file in files for point in json.loads(file.read_text("utf-8"))]


def keep(points: Sequence[Measured]) -> None:
    """After every attack: a run that is stopped has kept what it measured."""
    if CHOSEN.out:
        CHOSEN.out.write_text(json.dumps([asdict(point) for point in points], indent=1), "utf-8")


def measured(quick: bool) -> list[Measured]:
    if CHOSEN.join:
        joined = read(CHOSEN.join)
        keep(joined)
        return joined
    examples = EXAMPLES[:2] if quick else read_examples(
        CHOSEN.data / "sst2/dev.tsv", limit=CHOSEN.texts
    )  # fmt: skip
    points: list[Measured] = []
    for model in CHOSEN.models:
        loaded = load_model(model, task="classification", device=CHOSEN.device)
        for name, share in planned(CHOSEN.share, (0.05,) if quick else CHOSEN.shares):
            if CHOSEN.only not in name:
                continue
            method = attack(name, share, CHOSEN.batch)
            if quick and isinstance(method.schedule, Rerank):
                method = replace(method, schedule=Rerank(rounds=2, prefixes=2, refine=1))
            points.append(measure(loaded, examples, name, share, method))
            line = (
                f"{points[-1].model}: {name}, {share:.1%}: {points[-1].flips} of {points[-1].right}"
            )
            print(f"{line}, {points[-1].seconds:.0f} s", file=sys.stderr, flush=True)
            keep(points)
    return points


def rates(points: Sequence[Measured], name: str, share: float) -> list[float]:
    """The share of right answers that flipped, for each model."""
    chosen = [point for point in points if (point.attack, point.share) == (name, share)]
    return [point.flips / max(1, point.right) for point in chosen]


def over_models(values: Sequence[float]) -> str:
    if len(values) == 1:
        return f"{values[0]:.1%}"
    return f"{mean(values):.1%} ({min(values):.1%}–{max(values):.1%})"


def row(points: Sequence[Measured], name: str, share: float) -> Row:
    chosen = [point for point in points if (point.attack, point.share) == (name, share)]
    details = (
        f"{' + '.join(f'{point.flips} of {point.right}' for point in chosen)}; flips took "
        f"{mean(point.cut for point in chosen):.2%} of all units, most "
        f"{max(point.worst_head for point in chosen):.1%} of a head; "
        f"{mean(point.queries for point in chosen):.0f} queries; "
        f"{sum(point.seconds for point in chosen):.0f} s"
    )
    models = {point.model for point in points}
    if len(chosen) < len(models):
        details = f"{len(chosen)} of {len(models)} models; {details}"
    return Row(f"{name}, {share:.1%}", over_models(rates(points, name, share)), details=details)


def figure(points: Sequence[Measured]) -> go.Figure:
    """Flips against the share, both on the page as people say them: in percent."""
    import plotly.graph_objects as go

    models = len({point.model for point in points})
    picture = go.Figure()
    for name in CURVES:
        shares = sorted({point.share for point in points if point.attack == name})
        values = [rates(points, name, share) for share in shares]
        picture.add_scatter(
            name=name, mode="lines+markers", x=[100 * share for share in shares],
            y=[100 * mean(value) for value in values],
            error_y={
                "type": "data", "symmetric": False, "visible": models > 1,
                "array": [100 * (max(value) - mean(value)) for value in values],
                "arrayminus": [100 * (mean(value) - min(value)) for value in values],
            },
        )  # fmt: skip
    picture.update_layout(
        template="plotly_white", width=1100, height=460,
        margin={"l": 70, "r": 20, "t": 30, "b": 60}, legend={"x": 0.01, "y": 0.99},
        xaxis={"title": "share of each head's units that may be cut, %", "type": "log",
               "tickvals": [100 * share for share in SHARES]},
        yaxis={"title": "right answers flipped, %", "rangemode": "tozero"},
    )  # fmt: skip
    return picture


def run(quick: bool) -> list[Row]:
    points = measured(quick)
    kinds = dict.fromkeys((point.attack, point.share) for point in points)
    rows = [row(points, name, share) for name, share in kinds]
    change = max(point.control for point in points)
    models = len({point.model for point in points})
    rows.append(Row("largest change by masks that cut nothing", f"{change:g}", "0", change == 0))
    rows.append(Row("models", str(models)))
    if CHOSEN.picture:
        CHOSEN.picture.write_text(figure(points).to_html(include_plotlyjs=True), "utf-8")
    elif quick:
        figure(points)
    return rows


if __name__ == "__main__":
    sys.argv[1:] = REST
    show.main(run, __doc__)
