"""Results go to stdout and messages to stderr, in any locale.

Stdout is no terminal unless a test makes it one.
"""

from __future__ import annotations

import io
import json
import os
import pty
import shutil
import sys
from functools import partial

import pytest

import tiny_classifiers
import tiny_models as tiny
from command_line import KEYHOLE, finished
from keyhole import invert, oracle
from keyhole.assess.severity import cost
from keyhole.audit import audit
from keyhole.cli import outputs
from keyhole.core import Audit
from keyhole.models import load_model
from keyhole.report import words

ESCAPE = "\x1b"


@pytest.fixture
def place(everything, tmp_path):
    """Tiny inputs for every command, and no files from earlier tests."""
    return shutil.copytree(everything, tmp_path / "place")


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    folder = tmp_path_factory.mktemp("place")
    tiny_classifiers.classifier(folder, 6)
    target = oracle.plant(dim=4, seed=1)
    oracle.save(target, folder / "t.safetensors")
    audit(target).save(folder / "audit.json")
    problem, _ = invert.plant(3, 4, scale=0.3)
    problem.save(folder / "p.safetensors")
    tiny.save("bert", folder / "model")
    demo = load_model(folder / "model")
    leak = invert.leak_of(demo.model, demo.tokenizer, "w1 w2 w3", "hidden:1")
    leak.save(folder / "leak.safetensors")
    return folder


@pytest.fixture
def keyhole(keyhole, place, monkeypatch):
    tiny_classifiers.attack_lightly(monkeypatch)
    return partial(keyhole, cwd=place)


# The command, how its answer begins, and a word of it that no line about progress has.
ANSWERS = {
    "audit t.safetensors": ("The weights can be copied", "severity  exposure"),
    "report audit.json": ("The weights can be copied", "severity  exposure"),
    "extract t.safetensors": ("recovered: ", "Do not return"),
    "invert p.safetensors -o starts=8": ("recovered: ", "condition"),
    "recover model leak.safetensors": ("leak.safetensors: recovered (", "w1 w2 w3"),
    f"disrupt my-classifier --data dev.tsv --examples 3 {tiny_classifiers.LIGHTLY}": (
        "my-classifier: ",
        "accuracy before",
    ),
    "harden my-classifier --data train.tsv --dev dev.tsv --flips 1 --method plain --epochs 1 "
    "--out new": ("1 step", "clean accuracy"),
    "lab capture model --text w1 --expose hidden:1 --out l.safetensors": (
        "l.safetensors: hidden:1 of 3 tokens, float32\n",
        "hidden:1",
    ),
    "lab plant q.safetensors -o dim=4": (
        "q.safetensors: head, d = 4, 20 unknowns\n",
        "unknowns",
    ),
}


@pytest.mark.parametrize("command", ANSWERS)
def test_the_answer_is_on_stdout_in_words(command, keyhole, monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")  # a file is not as narrow as some screen
    begins, words = ANSWERS[command]
    done = keyhole(command)
    assert done.returncode in (0, 1), done.stderr
    assert done.stdout.startswith(begins)
    assert words in done.stdout
    assert words not in done.stderr
    assert ESCAPE not in done.stdout + done.stderr
    assert "…" not in done.stdout


@pytest.mark.parametrize(
    "command", [name for name in ANSWERS if not name.startswith("lab ")]
)
def test_or_as_json_alone(command, keyhole):
    done = keyhole(command, "--json")
    assert done.returncode in (0, 1), done.stderr
    assert json.loads(done.stdout)
    assert ANSWERS[command][1] not in done.stderr


def test_rows_are_whole_in_a_file(keyhole, place):
    done = keyhole("report audit.json")
    lines = done.stdout.splitlines()
    for finding in Audit.load(place / "audit.json").findings:
        (row,) = (
            line for line in lines if f"  {words.exposure(finding.exposure)}  " in line
        )
        assert row.rstrip().endswith(cost(finding))
    assert done.stderr == "html: audit.html\n"


def ascii_stdout(monkeypatch):
    """Give stdout an encoding that has few signs, and return what is written to it."""
    inner = io.BytesIO()
    stdout = io.TextIOWrapper(inner, encoding="ascii", newline="\n")
    monkeypatch.setattr(sys, "stdout", stdout)
    return inner


@pytest.mark.parametrize(
    "command", [name for name in ANSWERS if not name.startswith("audit ")]
)
def test_no_locale_is_too_small(command, keyhole, monkeypatch):
    written = ascii_stdout(monkeypatch)
    done = keyhole(command)
    assert done.returncode in (0, 1), done.stderr
    sys.stdout.flush()
    assert written.getvalue().decode("ascii").startswith(ANSWERS[command][0])


@pytest.mark.slow
def test_a_process_in_an_ascii_locale(place):
    plain = {
        "LC_ALL": "C",
        "PYTHONCOERCECLOCALE": "0",
        "PYTHONUTF8": "0",
        "PYTHONIOENCODING": "ascii",
    }
    view = [*KEYHOLE, "report", "audit.json", "--output", "html=é.html"]
    done = finished(view, cwd=place, env=os.environ | plain)
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii()
    assert done.stderr.isascii()
    assert "skipped" in done.stdout


def test_signs_that_an_encoding_lacks_are_spelled(monkeypatch):
    written = ascii_stdout(monkeypatch)
    outputs.write_in_any_locale()
    outputs.show("d² → 日")
    sys.stdout.flush()
    assert written.getvalue() == b"d\\xb2 \\u2192 \\u65e5\n"


@pytest.mark.parametrize("wish", ["", "NO_COLOR"])
def test_a_terminal_has_colours_unless_nobody_wants_them(wish, keyhole, monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    if wish:
        monkeypatch.setenv(wish, "1")
    master, slave = pty.openpty()
    with os.fdopen(slave, "w", encoding="utf-8") as file:
        monkeypatch.setattr(sys, "stdout", file)
        assert keyhole("report audit.json").returncode in (0, 1)
        shown = b""
        while b"signs" not in shown:
            shown += os.read(master, 65536)
    os.close(master)
    assert (b"\x1b[31m" in shown) == (not wish)  # red: recovered


@pytest.mark.slow
def test_a_reader_who_has_enough_is_no_error(place):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as nobody:
        done = finished([*KEYHOLE, "report", "audit.json"], cwd=place, stdout=nobody)
    assert "Traceback" not in done.stderr


def test_recovered_text_does_not_steer_a_terminal():
    assert outputs.visible("a\x1b[2Jb\u202e\n") == "a\\x1b[2Jb\\u202e\n"
    assert outputs.visible("né 日😀") == "né 日😀"
