"""Defences, each attacked by a thief who knows it: what he has, what honest clients have left.

Weights of one head behind a server's defences, for d = 16 and 64 and three seeds: errors are on an
honest client's questions, relative, of the thief's copy and of the answers that clients get;
medians over seeds, the worst in the details. Then texts behind what may be done to a leak, on
all-MiniLM-L6-v2 and SmolLM2-135M (`--encoder`, `--model`, `--data`): `--texts` of SST-2 on
the first, `--few` on the second. `--parts weights,minilm,smollm2` and `--dims` take some.
`--quick`: small heads, models of random weights.

The picture is docs/defences.png.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

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
_FLOOR = 1e-6  # where smaller errors are drawn
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


@dataclass(frozen=True)
class Point:
    """A defence in one degree: medians over seeds."""

    name: str
    setting: str
    thief: float
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


def weights(d: int, seeds: int) -> Iterator[Row]:
    """Every defence in front of planted heads."""
    for place, trial in enumerate(trials(d)):
        runs = [_tried(trials(d, seed=seed)[place], d, seed) for seed in range(seeds)]
        errors = [tried.attacker_error for tried in runs if tried.attacker_error is not None]
        thief = f"{median(errors):.1e}" if errors else "nothing"
        honest = median(tried.honest_error for tried in runs)
        refused = median(tried.refused for tried in runs)
        words = f", {refused:.0%} refused" if refused else ""
        promised = trial.name in EXACT
        waiting = median(tried.waiting or 0.0 for tried in runs)
        yield Row(
            f"d={d}, {trial.name}",
            f"thief {thief}, honest client {honest:.1e}{words}",
            "thief <= 1e-8" if promised else "",
            max(errors) <= 1e-8 if promised else None,
            f"{runs[0].attack}; {median(tried.queries for tried in runs):,.0f} queries"
            + (f" in {waiting / 3600:.1f} hours" if waiting else "")
            + (f"; worst {max(errors):.1e}" if errors else "")
            + f"; {median(tried.seconds for tried in runs):.1f} s; {runs[0].setting}",
        )


def _tried(trial: Trial, d: int, seed: int) -> Tried:
    target = oracle.plant(dim=d, seed=seed)
    return try_defence(trial, target, HonestClient.of(target, seed=seed), seed)


def leaks(
    loaded: Loaded, name: str, some: list[str], exposure: str, without: tuple[str, ...] = ()
) -> Iterator[Row]:
    """Every defence in front of one exposure of a model."""
    for defence in DEFENCES:
        if defence in without or (defence == "permuted" and not exposure.startswith("hidden")):
            continue
        tried = read_behind(loaded, some, exposure, defence)
        broken = defence in ("none", "permuted", *FORMS[:2])
        own = f"; {tried.own} own texts" if tried.own else ""
        yield Row(
            f"{name}, {exposure}, {defence}",
            f"{tried.exact} of {tried.texts} texts exact, {tried.tokens:.0%} of tokens",
            "all" if broken else "",
            tried.exact == tried.texts if broken else None,
            f"{tried.attack}{own}; {tried.seconds:.0f} s; {tried.reason[:100]}",
        )


def table(quick: bool) -> list[Point]:
    """The defences that come in degrees, for the picture."""
    d, seeds = (5, 1) if quick else (16, SEEDS)
    points: list[Point] = []
    for place, trial in enumerate(graded(d)):
        runs = [_tried(graded(d, seed=seed)[place], d, seed) for seed in range(seeds)]
        thief = median(1.0 if t.attacker_error is None else t.attacker_error for t in runs)
        honest = median(tried.honest_error for tried in runs)
        points.append(Point(trial.name, runs[0].setting, thief, honest))
    return points


def figure(points: list[Point]) -> go.Figure:
    """The thief's error against the honest client's, both on logarithmic axes."""
    picture = go.Figure()
    for name in dict.fromkeys(point.name for point in points):
        curve = [point for point in points if point.name == name]
        picture.add_scatter(
            x=[max(point.honest, _FLOOR) for point in curve],
            y=[max(point.thief, _FLOOR) for point in curve],
            text=[point.setting for point in curve], name=name, mode="lines+markers",
        )  # fmt: skip
    ends = [_FLOOR, 1.0]
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
