"""Defences, each attacked by somebody who knows it: what they get, what honest clients have left.

Weights of one head behind a server's defences, for d = 16 and 64 and three seeds: errors are on an
honest client's questions, relative, of the attacker's copy and of the answers that clients get;
medians over seeds, the worst in the details. Then texts behind what may be done to a leak, on
all-MiniLM-L6-v2 and SmolLM2-135M (`--encoder`, `--model`, `--data`): `--texts` of SST-2 on
the first, `--few` on the second. `--parts weights,minilm,smollm2` and `--dims` take some.
`--quick`: small heads, models of random weights.

The picture is docs/defences.png.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import NamedTuple

import plotly.graph_objects as go

import show
import subjects
from keyhole import oracle
from keyhole.extract.defences import HonestClient, Trial, Tried, trials, try_defence
from keyhole.extract.ordinary_questions import usual_norm_of
from keyhole.models import Loaded
from keyhole.oracle import Degradation
from keyhole.recover.defences import DEFENCES, read_behind
from keyhole.recover.secrets import FORMS
from show import Row

PARTS = ["weights", "minilm", "smollm2"]
SEEDS = 3
EXACT = (
    "no defence", "rounding", "norms clipped", "short sequences refused", "unusual inputs refused",
    "short and unusual inputs refused", "one query a second",
)  # fmt: skip
_SMALLEST = 1e-6  # where smaller errors are drawn
_LOGARITHMIC = {"type": "log", "dtick": 1, "exponentformat": "power"}
_NOISE = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
_PARTS = (1.2, 1.0, 0.5, 0.1)


def graded(dim: int, seed: int = 0) -> list[Trial]:
    """The defences that come in degrees, from little to much."""
    norm = usual_norm_of(dim)
    none = Degradation(seed=seed)
    bounded = replace(none, max_norm=2 * norm)  # so long that honest tokens are left as they are
    usual = replace(none, usual_norm=norm, min_tokens=3)
    return [
        *(Trial("rounding", replace(bounded, decimals=k)) for k in (4, 3, 2, 1, 0)),
        *(Trial("noise, the same for a question", replace(bounded, noise=tau)) for tau in _NOISE),
        *(Trial("noise, anew each time", replace(bounded, fresh_noise=tau)) for tau in _NOISE),
        *(Trial("norms clipped", replace(none, max_norm=norm * part)) for part in _PARTS),
        *(
            Trial("short and unusual inputs refused, rounding", replace(usual, decimals=k))
            for k in (4, 3, 2, 1)
        ),
        *(Trial("a budget", none, budget=share) for share in (0.25, 0.5, 0.75, 0.95)),
    ]


class Point(NamedTuple):
    """A defence in one degree: medians over seeds."""

    name: str
    setting: str
    attacker: float
    honest: float


def run(
    quick: bool,
    data: Path = subjects.DATA,
    encoder: Path | None = None,
    device: str = subjects.DEVICE,
    model: Path | None = None,
    texts: int = 5,
    few: int = 2,
    dims: list[int] = [16, 64],  # noqa: B006 - read, never changed
    parts: list[str] = PARTS,
) -> Iterator[Row]:
    if quick:
        yield from weights(5, 1)
        words = [" ".join(f"w{(7 * n + 5) % 150}" for n in range(18))]
        yield from leaks(subjects.tiny("bert"), "tiny BERT", words, "kv:1", ("mixed",))
        yield from leaks(subjects.tiny("llama"), "tiny Llama", words, "kv:0")
        return
    for d in dims if "weights" in parts else ():
        yield from weights(d, SEEDS)
    if "minilm" in parts:
        loaded, some = subjects.minilm(encoder, device), subjects.sst2(data, texts)
        for exposure in ("hidden:3", "kv:1"):
            yield from leaks(loaded, "MiniLM", some, exposure)
    if "smollm2" in parts:
        loaded = subjects.smollm2(model, device)
        yield from leaks(loaded, "SmolLM2", subjects.sst2(data, few), "kv:0")


def tried(
    made: Callable[..., list[Trial]], d: int, seeds: int
) -> Iterator[tuple[str, list[Tried]]]:
    """Every defence in front of planted heads, by its name: what came of it with each seed."""
    for place, trial in enumerate(made(d)):
        runs: list[Tried] = []
        for seed in range(seeds):
            target = oracle.plant(dim=d, seed=seed)
            client = HonestClient.of(target, seed=seed)
            runs.append(try_defence(made(d, seed=seed)[place], target, client, seed))
        yield trial.name, runs


def weights(d: int, seeds: int) -> Iterator[Row]:
    for name, runs in tried(trials, d, seeds):
        errors = [run.attacker_error for run in runs if run.attacker_error is not None]
        attacker = f"{median(errors):.1e}" if errors else "nothing"
        honest = median(run.honest_error for run in runs)
        refused = median(run.refused for run in runs)
        waiting = median(run.waiting or 0.0 for run in runs)
        promised = name in EXACT
        row = Row(
            f"d={d}, {name}",
            f"attacker {attacker}, honest client {honest:.1e}"
            + (f", {refused:.0%} refused" if refused else ""),
            "attacker <= 1e-8" if promised else "",
            max(errors) <= 1e-8 if promised else None,
            f"{runs[0].attack}; {median(run.queries for run in runs):,.0f} queries"
            + (f" in {waiting / 3600:.1f} hours" if waiting else "")
            + (f"; worst {max(errors):.1e}" if errors else "")
            + f"; {median(run.seconds for run in runs):.1f} s; {runs[0].setting}",
        )
        yield show.itemised(row, [asdict(run) for run in runs])


def leaks(
    loaded: Loaded, name: str, some: list[str], exposure: str, without: tuple[str, ...] = ()
) -> Iterator[Row]:
    """Every defence in front of one exposure of a model."""
    for defence in DEFENCES:
        if defence in without or (defence == "permuted" and not exposure.startswith("hidden")):
            continue
        read = read_behind(loaded, some, exposure, defence)
        broken = defence in ("none", "permuted", *FORMS[:2])
        own = f"; {read.own} own texts" if read.own else ""
        row = Row(
            f"{name}, {exposure}, {defence}",
            f"{read.exact} of {read.texts} texts exact, {read.tokens:.0%} of tokens",
            "all" if broken else "",
            read.exact == read.texts if broken else None,
            f"{read.attack}{own}; {read.seconds:.0f} s; {read.reason[:100]}",
        )
        yield show.itemised(row, [asdict(read)])


def table(quick: bool) -> list[Point]:
    """The defences that come in degrees, for the picture."""
    points: list[Point] = []
    for name, runs in tried(graded, *((5, 1) if quick else (16, SEEDS))):
        attacker = median(1.0 if run.attacker_error is None else run.attacker_error for run in runs)
        honest = median(run.honest_error for run in runs)
        points.append(Point(name, runs[0].setting, attacker, honest))
    return points


def figure(points: list[Point]) -> go.Figure:
    """The attacker's error against the honest client's, both on logarithmic axes."""
    picture = go.Figure()
    for name in dict.fromkeys(point.name for point in points):
        curve = [point for point in points if point.name == name]
        picture.add_scatter(
            x=[max(point.honest, _SMALLEST) for point in curve],
            y=[max(point.attacker, _SMALLEST) for point in curve],
            text=[point.setting for point in curve], name=name, mode="lines+markers",
        )  # fmt: skip
    ends = [_SMALLEST, 1.0]
    picture.add_scatter(
        x=ends, y=ends, mode="lines", name="as good as what clients get",
        line={"dash": "dot", "color": "grey"},
    )  # fmt: skip
    picture.update_layout(
        template="plotly_white", width=1100, height=520, legend={"x": 1.02, "y": 1},
        title="One head, d = 16: below the dotted line the attacker's copy is more exact "
        "than the server",
        xaxis={**_LOGARITHMIC, "title": "honest client's error (smaller ones are drawn at 1e-6)"},
        yaxis={**_LOGARITHMIC, "title": "error of the attacker's copy (likewise)"},
    )  # fmt: skip
    return picture


if __name__ == "__main__":
    show.main(run)
