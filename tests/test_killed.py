"""Every command is killed and interrupted while it runs, and loses nothing that it had finished.

`make release` kills each once and interrupts five; with KEYHOLE_FULL=1 each is killed
at 20 points and interrupted at 5. tests/test_tasks.py kills the workers of the runner
that all of them share.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

import tiny_models
from keyhole import audit, invert, oracle, recover
from keyhole.models import load_model
from kill_points import (
    CTRL_C,
    KILL,
    Case,
    answers,
    epochs,
    expect_complete,
    expect_to_go_on,
    outcome,
    records,
    size,
    stopped,
    undisturbed,
)
from tiny_classifiers import classifier

pytestmark = [pytest.mark.slow, pytest.mark.release]  # processes
FULL = bool(os.environ.get("KEYHOLE_FULL"))


FLEET = """
[[target]]
name = "layer"
target = "layer.safetensors"
[[target]]
name = "classifier"
target = "my-classifier"
data = "dev.tsv"
texts = 1
flips = 2
layers = [1]
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """The inputs of the commands."""
    folder = tmp_path_factory.mktemp("given")
    oracle.save(
        oracle.plant("attention", dim=4, every_token=True), folder / "layer.safetensors"
    )
    oracle.save(oracle.plant(dim=128, seed=1), folder / "head.safetensors")
    invert.plant(5, 5, scale=1.5, seed=1)[0].save(folder / "problem.safetensors")
    classifier(folder, 32)
    tiny_models.save("bert", folder / "model")
    words = [
        " ".join(f"w{(7 * i + 3 * j) % 190}" for j in range(24)) for i in range(24)
    ]
    (folder / "texts.txt").write_text("\n".join(words))
    loaded = load_model(folder / "model")
    recover.capture(
        loaded, words[:12], "hidden:2", precision="int8", out=folder / "leaks"
    )
    audit(oracle.plant(dim=3)).save(folder / "audit.json")
    (folder / "fleet.toml").write_text(FLEET)
    return folder


def checks_done(folder, words):
    """Return how many finished checks a second audit says it resumes from."""
    return int(re.search(r"^resuming: (\d+) of \d+ checks are done$", words, re.M)[1])


def targets_done(folder, words):
    """Return how many finished targets a second run of a fleet says it resumes from."""
    found = re.search(r"^resuming: (\d+) of \d+ targets are done$", words, re.M)
    return int(found[1]) if found else 0


def answers_remembered(folder, words):
    result = json.loads((folder / "stolen.json").read_text())
    return result["remembered"] + result["check"]["remembered"]


def epochs_resumed(folder, words):
    return json.loads((folder / "new/hardening.json").read_text())["runs"][0][
        "training"
    ]["resumed"]


def cases(place):
    flip = (
        "disrupt",
        place / "my-classifier",
        "--data",
        place / "train.tsv",
        "--share",
        0.1,
        "--method",
        "as-released",
        "--resume",
        "run.jsonl",
        "--out",
        "flips.json",
    )
    report = ("audit.json", "audit.html")
    named = tuple(f"--output={file.rpartition('.')[2]}={file}" for file in report)
    journal = records("audit.json.*.journal")
    checks = (
        r"\d+ finished checks are in audit.json.\w{8}.journal: the same command resumes"
    )
    outcomes = {
        "grown": records("run.jsonl"),
        "journal": "run.jsonl",
        "kept": "what is finished is in run.jsonl: the same command resumes",
    }
    return {
        "audit of an endpoint": Case(
            ("audit", place / "layer.safetensors", *named),
            report,
            journal,
            checks,
            taken_over=checks_done,
        ),
        "audit of a model": Case(
            (
                "audit",
                place / "my-classifier",
                "--data",
                place / "dev.tsv",
                "--texts",
                1,
                "--flips",
                2,
                "--layers",
                1,
                *named,
            ),
            report,
            journal,
            checks,
            taken_over=checks_done,
        ),
        "audit of a fleet": Case(
            ("audit", "--targets", place / "fleet.toml", "--out", "out"),
            (
                "out/index.html",
                *(
                    f"out/{name}.{end}"
                    for name in ("layer", "classifier")
                    for end in ("json", "html")
                ),
            ),
            None,
            r"what is finished is in out/\*.journal: the same command resumes",
            records("out/fleet.journal"),
            targets_done,
        ),
        "extract": Case(
            (
                "extract",
                place / "head.safetensors",
                "--method",
                "single-head",
                "--ledger",
                "run.db",
                "--out",
                "stolen.json",
            ),
            ("stolen.json", "stolen.safetensors"),
            size("run.db-wal"),
            r"[\d,]+ answers are in run.db: the same command resumes",
            answers("run.db"),
            answers_remembered,
        ),
        "invert": Case(
            (
                "invert",
                place / "problem.safetensors",
                "-o",
                "starts=64",
                "--method",
                "levenberg-marquardt",
                "-o",
                "solutions=64",
                "--out",
                "input.json",
            ),
            ("input.json", "input.safetensors"),
        ),
        "invert text": Case(
            ("recover", place / "model", place / "leaks", "--out", "texts.jsonl"),
            ("texts.jsonl",),
            records("texts.jsonl"),
            r"\d+ texts are in texts.jsonl: the same command goes on",
            journal="texts.jsonl",
        ),
        "capture": Case(
            (
                "lab",
                "capture",
                place / "model",
                "--data",
                place / "texts.txt",
                "--expose",
                "hidden:1",
                "--out",
                "leaks",
            ),
            tuple(f"leaks/leak-{number:04d}.safetensors" for number in range(24)),
            records("leaks/capture.journal"),
            r"\d+ leaks are in leaks: the same command goes on",
        ),
        "disrupt": Case(flip, ("flips.json",), **outcomes),
        "disrupt with two processes": Case(
            (*flip, "--processes", 2),
            ("flips.json",),
            **outcomes,
            own_process=True,
        ),
        "harden": Case(
            (
                "harden",
                place / "my-classifier",
                "--data",
                place / "train.tsv",
                "--method",
                "asa",
                "--epochs",
                5,
                "-o",
                "batch=8",
                "--resume",
                "kept",
                "--out",
                "new",
            ),
            ("new/hardening.json", "new/model.safetensors"),
            epochs("kept"),
            "whole epochs are in kept: the same command resumes",
            taken_over=epochs_resumed,
        ),
        "plant": Case(
            ("lab", "plant", "target.safetensors", "-o", "dim=256"),
            ("target.safetensors",),
        ),
        "report": Case(("report", place / "audit.json"), ("audit.html",)),
    }


NAMES = tuple(cases(Path()))
INTERRUPTED = (
    NAMES
    if FULL
    else (
        "audit of a model",
        "extract",
        "invert layers",
        "disrupt",
        "harden",
    )
)


def points(case, count):
    """Return the points to stop at, measured by growth and by time in turn if both are possible."""
    for number in range(count):
        timed = case.grown is None or (number % 2 and not case.own_process)
        yield (number + 0.5) / count, "time" if timed else "growth"


@pytest.mark.timeout(3000)
@pytest.mark.parametrize("name", NAMES)
def test_stopped_at_any_point_it_leaves_nothing_half_and_goes_on(name, place, tmp_path):
    case = cases(place)[name]
    # the same work, in one process
    if case.own_process:
        alone = cases(place)["disrupt"]
    else:
        alone = case
    whole = undisturbed(alone, tmp_path / "whole")
    for number, (share, by) in enumerate(points(case, 20 if FULL else 1)):
        folder = tmp_path / f"killed-{number}"
        end = stopped(case, whole, folder, share, KILL, by)
        assert end.code in (-KILL, whole.code), end.words  # it may have been too late
        expect_complete(case, folder)
        expect_to_go_on(alone, whole, folder)
    for number, (share, by) in enumerate(
        points(case, 5 if FULL else int(name in INTERRUPTED))
    ):
        folder = tmp_path / f"interrupted-{number}"
        end = stopped(case, whole, folder, share, CTRL_C, by)
        assert end.code in (130, whole.code), end.words
        assert "Traceback" not in end.words
        complete = outcome(case, folder) == whole.outcome
        if end.code == 130 and by == "growth" and not complete:
            last = end.words.splitlines()[-1]
            assert re.fullmatch(f"keyhole: stopped; {case.kept}", last), end.words
        expect_complete(case, folder)
        expect_to_go_on(alone, whole, folder)
