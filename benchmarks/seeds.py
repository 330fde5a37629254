"""The table over seeds of benchmarks/harden.py: its runs joined, and the verdicts.

A run is what one method and one seed gave: `method`, `seed`, `settings`, `training` (what it cost),
`evaluation` (keyhole.harden.Evaluation as JSON), `time` and `memory` against plain training. Every
figure is a mean with its range; what a run did not measure is left out of it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

from show import Row

DONOR = "plain, another seed"  # whose masks are transferred


def tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def keep_runs(file: Path | None, runs: list[dict[str, Any]]) -> None:
    """What is known so far, whole or not at all: a run that is stopped has kept it."""
    if file:
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_suffix(f".{os.getpid()}.partial")
        unfinished.write_text(json.dumps({"rows": [], "runs": runs}), "utf-8")
        unfinished.rename(file)


def add_runs(file: Path | None, runs: list[dict[str, Any]]) -> None:
    """The runs beside the rows that show.main wrote, for --join."""
    if file:
        data = json.loads(file.read_text("utf-8"))
        data["runs"] = runs
        file.write_text(json.dumps(data), "utf-8")


def read_runs(files: list[Path], needed: str = "evaluation") -> list[dict[str, Any]]:
    """Runs of all files; one that never came to what is needed of it is told and left out."""
    runs: list[dict[str, Any]] = []
    for file in files:
        try:
            found = json.loads(file.read_text("utf-8")).get("runs", [])
        except (OSError, ValueError) as error:
            tell(f"{file}: not read: {error}")
            continue
        runs += [run for run in found if needed in run]
        for run in found:
            if needed not in run:
                tell(f"{file}: {run['method']}, seed {run['seed']} ended before its {needed}")
    return runs


FIGURES: dict[str, Callable[[dict[str, Any]], float | None]] = {
    "clean": lambda run: run["evaluation"]["accuracy"],
    "stronger": lambda run: rate(run, "attacks", "stronger"),
    "as released": lambda run: rate(run, "attacks", "as released"),
    "random": lambda run: rate(run, "attacks", "random"),
    "transferred": lambda run: rate(run, "transferred", DONOR),
    "wrong label lowered": lambda run: rate(run, "wrong_label", "lowered"),
    "wrong label raised": lambda run: rate(run, "wrong_label", "raised"),
}


def rate(run: dict[str, Any], kind: str, name: str) -> float | None:
    measured = run["evaluation"][kind].get(name)
    return None if measured is None else measured["flips"] / max(1, measured["examples"])


def values(runs: list[dict[str, Any]], name: str, figure: str) -> list[float]:
    found = [FIGURES[figure](run) for run in runs if run["method"] == name]
    return [value for value in found if value is not None]


def spread(found: list[float]) -> str:
    if not found:
        return "not measured"
    low, high = min(found), max(found)
    return f"{mean(found):.1%}" + (f" ({low:.1%}–{high:.1%})" if low < high else "")


def table(runs: list[dict[str, Any]]) -> list[Row]:
    names = list(dict.fromkeys(run["method"] for run in runs))
    names.sort(key=lambda name: name != "plain")
    rows: list[Row] = []
    for name in names:
        own = [run for run in runs if run["method"] == name]
        shown = [f"{figure} {spread(values(runs, name, figure))}" for figure in FIGURES]
        shown.append(paid(own))
        shown.append("seeds " + ", ".join(str(run["seed"]) for run in own))
        shown += settings(own)
        measured = f"stronger {spread(values(runs, name, 'stronger'))}"
        rows.append(Row(name, measured, details="; ".join(shown)))
    return rows + verdicts(runs, names)


def settings(runs: list[dict[str, Any]]) -> list[str]:
    """How the runs were made; a mean over runs that were made in several ways says so."""
    known = (run.get("settings", {}) for run in runs)
    lines = [", ".join(f"{name} {value}" for name, value in given.items()) for given in known]
    ways = [line for line in dict.fromkeys(lines) if line]
    return ways if len(ways) < 2 else ["settings differ: " + " | ".join(ways)]


def paid(runs: list[dict[str, Any]]) -> str:
    times = [run["time"] for run in runs if run.get("time")]
    sizes = [run["memory"] for run in runs if run.get("memory")]
    seconds = mean(run["training"]["seconds"] for run in runs)
    peak = max(run["training"]["peak"] for run in runs) / 2**20
    ratios = f"time ×{mean(times):.2f}" if times else "time ×1"
    ratios += f", memory ×{mean(sizes):.2f}" if sizes else ""
    return f"{ratios} of plain; trained in {seconds:.0f} s, peak {peak:.0f} MiB"


def verdicts(runs: list[dict[str, Any]], names: list[str]) -> list[Row]:
    """The best defence that keeps clean accuracy (or, where none does, the best) against plain."""
    average = {
        name: {figure: mean(values(runs, name, figure) or [float("nan")]) for figure in FIGURES}
        for name in names
    }
    plain = average.get("plain")
    hardened = [name for name in names if name != "plain" and values(runs, name, "stronger")]
    if plain is None or not hardened:
        return [Row("hardened against plain", "not measured", met=False)]
    holding = [name for name in hardened if average[name]["clean"] >= plain["clean"] - 0.01]
    best = min(holding or hardened, key=lambda name: average[name]["stronger"])
    half, own = plain["stronger"] / 2, average[best]
    lost = plain["clean"] - own["clean"]
    rows = [
        Row(f"{best}: stronger attack", f"{plain['stronger']:.1%} → {own['stronger']:.1%}",
            "cut at least by half", own["stronger"] <= half),
        Row(f"{best}: clean accuracy", f"{plain['clean']:.1%} → {own['clean']:.1%}",
            "within 1 point", lost <= 0.01),
    ]  # fmt: skip
    for figure in ("transferred", "wrong label lowered", "wrong label raised"):
        known = all(values(runs, name, figure) for name in ("plain", best))
        shown = f"{plain[figure]:.1%} → {own[figure]:.1%}" if known else "not measured"
        goal = f"at most half of plain's stronger: {half:.1%}"
        rows.append(Row(f"{best}: {figure}", shown, goal, own[figure] <= half))
    seeds = min(len(values(runs, name, "stronger")) for name in ("plain", best))
    rows.append(Row(f"{best}: seeds", str(seeds), "3", seeds >= 3))
    return rows
