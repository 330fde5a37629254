"""Every benchmark runs in its quick mode, so that none rots; speed is not judged here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "benchmarks"
SHARED = {"show", "texts", "methods", "mismatches", "seeds"}
BENCHMARKS = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem not in SHARED)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_quick(name, tmp_path):
    command = [sys.executable, "-W", "error", f"{name}.py", "--quick", "--json"]
    done = subprocess.run(
        [*command, str(tmp_path / "rows.json")],
        cwd=FOLDER, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert rows
    assert all(row["what"] in done.stdout for row in rows)


def measured(flips):
    return {"examples": 100, "flips": flips, "queries": 1.0, "seconds": 0.0, "share": 0.0}


def one_run(method, seed, accuracy, stronger, transferred=None, **settings):
    given = {} if transferred is None else {"plain, another seed": measured(transferred)}
    found = {"attacks": {"stronger": measured(stronger)}, "transferred": given, "wrong_label": {}}
    training = {"seconds": 1.0, "peak": 2**20}
    return {"method": method, "seed": seed, "training": training, "settings": settings,
            "evaluation": {"accuracy": accuracy, **found}}  # fmt: skip


def test_harden_joins_what_many_processes_wrote(tmp_path):
    runs = [one_run("plain", seed, 0.9, 40 + seed, 4, rate=0.1) for seed in range(3)]
    runs += [one_run("r3f", seed, 0.895, 20, 30 * seed, rate=0.1) for seed in range(3)]
    runs += [one_run("asa", seed, 0.8, 0, rate=seed) for seed in range(2)]
    files = [tmp_path / f"{number}.json" for number in range(len(runs))]
    for file, run in zip(files, runs, strict=True):
        file.write_text(json.dumps({"runs": [run]}))
    (tmp_path / "early.json").write_text('{"runs": [{"method": "smart", "seed": 7}]}')
    command = [sys.executable, "harden.py", "--json", str(tmp_path / "rows.json"), "--join"]
    done = subprocess.run(
        [*command, *files, tmp_path / "early.json"],
        cwd=FOLDER, capture_output=True, text=True, timeout=240, check=True,
    )  # fmt: skip
    assert "smart, seed 7 ended before its evaluation" in done.stderr
    rows = {row["what"]: row for row in json.loads((tmp_path / "rows.json").read_text())["rows"]}
    assert list(rows)[:3] == ["plain", "r3f", "asa"]
    assert rows["plain"]["measured"] == "stronger 41.0% (40.0%–42.0%)"
    assert rows["plain"]["details"].endswith("; seeds 0, 1, 2; rate 0.1")
    assert "random not measured" in rows["plain"]["details"]
    assert rows["asa"]["details"].endswith("settings differ: rate 0 | rate 1")
    shown = {what: (row["measured"], row["met"]) for what, row in list(rows.items())[3:]}
    assert shown == {  # asa flips less, but loses ten points
        "r3f: stronger attack": ("41.0% → 20.0%", True),
        "r3f: clean accuracy": ("90.0% → 89.5%", True),
        "r3f: transferred": ("4.0% → 30.0%", False),
        "r3f: wrong label lowered": ("not measured", False),
        "r3f: wrong label raised": ("not measured", False),
        "r3f: seeds": ("3", True),
    }
