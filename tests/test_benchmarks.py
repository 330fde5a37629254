"""Every benchmark runs in its quick mode, so that none rots, and keeps its promises."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import tiny_models as tiny
import warm_process

pytestmark = pytest.mark.release  # every benchmark, in minutes
FOLDER = Path(__file__).parent.parent / "benchmarks"
BENCHMARKS = sorted(
    path.stem
    for path in FOLDER.glob("*.py")
    if "\n    show.main(" in path.read_text("utf-8")
)
# More than five seconds even where it should be quick, of what other tests look at too.
LONG = {"text_recovery"}
FULL = bool(os.environ.get("KEYHOLE_FULL"))


@pytest.mark.parametrize(
    "name", [name for name in BENCHMARKS if FULL or name not in LONG]
)
def test_quick(name, tmp_path):
    file = tmp_path / "rows.json"
    done = warm_process.finished(
        warm_process.script, f"{name}.py", "--quick", "--json", str(file), cwd=FOLDER
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(file.read_text())["rows"]
    assert rows
    assert all(row["what"] in done.stdout for row in rows)
    missed = [row for row in rows if row["promise"] and row["met"] is False]
    assert not missed
    assert "promises not met" not in done.stdout


def test_a_promise_that_is_not_met_is_said(tmp_path):
    code = """
import show
from show import Row
rows = [
    Row("error", "1e-3", "<= 1e-9", False), Row("queries", "7", "7", True),
    Row("ratio", "0.9", "> 1", False, promise=False), Row("seconds", "3 s"),
]
show.main(lambda quick: rows, "A benchmark")
"""
    (tmp_path / "broken.py").write_text(
        f"import sys\nsys.path.insert(0, {str(FOLDER)!r})\n{code}"
    )
    done = warm_process.finished(warm_process.script, "broken.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "promises not met: error: 1e-3"
    assert done.stdout.count("NOT MET") == 2


def test_rouge_counts_runs_of_tokens(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import subjects

    assert subjects.rouge([1, 2, 3, 4], [1, 2, 3, 4], 2) == 1
    assert subjects.rouge([1, 2, 3, 4], [4, 3, 2, 1], 1) == 1
    assert subjects.rouge([1, 2, 3, 4], [4, 3, 2, 1], 2) == 0
    assert subjects.rouge([1, 2, 3, 4], [1, 2, 9], 1) == pytest.approx(2 * 2 / 7)
    assert subjects.rouge([1, 2, 3, 4], [1, 2, 9], 2) == pytest.approx(2 * 1 / 5)
    assert subjects.rouge([1, 1, 1], [1], 1) == pytest.approx(
        2 * 1 / 4
    )  # each as often as it is there
    assert subjects.rouge([1], [], 2) == 0


def test_scores_are_those_of_sacrebleu_and_rouge_score(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import subjects

    secret = "the cat sat on the mat ."
    assert subjects.scores(secret, secret) == {"bleu": 1, "rouge_l": 1, "word_f1": 1}
    assert subjects.scores("", secret) == {"bleu": 0, "rouge_l": 0, "word_f1": 0}
    # 6 of 6, 3 of 5, 1 of 4, none of 3 runs, so 1/2 of one; brief: 6 words for 7
    bleu = (1 * 3 / 5 * 1 / 4 * 1 / 6) ** 0.25 * 2.718281828459045 ** (1 - 7 / 6)
    scores = subjects.scores("the cat on the mat sat", secret)
    assert scores == pytest.approx(
        {"bleu": bleu, "rouge_l": 10 / 13, "word_f1": 12 / 13}
    )
    assert subjects.bleu("ab", "ab") == 1  # runs that it is too short for do not count


def test_no_sentences_are_left_out_of_a_benchmark(tmp_path):
    tiny.save("bert", tmp_path / "encoder")
    (tmp_path / "sst2").mkdir()
    (tmp_path / "sst2" / "dev.tsv").write_text("sentence\tlabel\nfine\t1\n")
    parts = "exact,precision"
    file = tmp_path / "rows.json"
    done = warm_process.finished(
        warm_process.script,
        "text_recovery.py",
        "--encoder",
        str(tmp_path / "encoder"),
        "--data",
        str(tmp_path),
        "--texts",
        "0",
        "--layers",
        "3,6",
        "--parts",
        parts,
        "--json",
        str(file),
        cwd=FOLDER,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(file.read_text())["rows"] == []


def one_run(method, seed, accuracy, flips, **settings):
    attacks = {"strongest": {"examples": 100, "flips": flips}}
    return {
        "what": "sst2",
        "method": method,
        "seed": seed,
        "curve": [0.5, accuracy],
        "settings": {"rate": 0.1, "epochs": 2, **settings},
        "attacks": attacks,
        "training": {"seconds": 1.0, "peak": 2**20},
    }


def test_a_table_joins_what_many_processes_wrote(tmp_path):
    runs = [one_run("plain", seed, 0.9, 40 + seed) for seed in range(3)]
    runs += [one_run("asa", seed, 0.8, 0, batch=seed) for seed in range(2)]
    files = [tmp_path / f"{number}.json" for number in range(len(runs))]
    for file, run in zip(files, runs, strict=True):
        file.write_text(json.dumps({"runs": [run]}))
    rows = tmp_path / "rows.json"
    done = warm_process.finished(
        warm_process.script,
        "tasks.py",
        "--json",
        str(rows),
        "--parts",
        "attacks",
        "--join",
        *map(str, files),
        cwd=FOLDER,
    )
    assert done.returncode == 0, done.stderr
    plain, asa = json.loads(rows.read_text())["rows"]
    assert plain["what"] == "sst2, plain, rate 0.1, 2 epochs"
    assert plain["measured"] == "clean 90.0%"
    assert plain["details"].startswith(
        "strongest 41.0% (40.0%–42.0%); 300 right answers; seeds 0"
    )
    assert "trained in 1 s, 1 MiB" in plain["details"]
    assert "settings differ: rate 0.1, epochs 2, batch 0 | rate 0.1" in asa["details"]
