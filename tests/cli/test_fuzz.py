"""Broken and hostile files end with one line and an exit code, and leave no half-written file.

Some of them are tested in every run, all of them before a release.
"""

from __future__ import annotations

import random

import pytest

import bad_files
import tampered

COMMANDS = {  # the command that reads such files
    "extract {} --out out.json": {**bad_files.ANY, **bad_files.TARGETS},
    "invert {} -o starts=1 --out out.json": bad_files.PROBLEMS,
    "recover classifier {} --out out.jsonl": bad_files.LEAKS,
    "disrupt classifier --data {} --examples 1": bad_files.DATA,
    "disrupt {} --data good.tsv": bad_files.MODELS,
    "extract target.safetensors --ledger {}": bad_files.LEDGERS,
    "report {} --output html=out.html": tampered.AUDITS,
}
CASES = [
    pytest.param(words, name, id=f"{words.split()[0]} {name}")
    for words, names in COMMANDS.items()
    for name in names
]
SAMPLE = random.Random(6).sample(CASES, 40)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    for name in ("classifier", "target.safetensors"):
        bad_files.make(folder, name)
    (folder / "good.tsv").write_text("sentence\tlabel\nw1 w2 w3\t0\n")
    return folder


def ends_in_one_line(words, name, world, keyhole):
    bad_files.make(world, name)
    done = keyhole(words.format(name), cwd=world)
    for made in ("out.json", "out.jsonl", "out.html", "out.safetensors"):
        (world / made).unlink(missing_ok=True)
    assert "Traceback" not in done.stderr
    assert "internal error" not in done.stderr
    assert done.returncode in (0, 1, 2, 3), done.stderr
    assert not list(world.rglob("*partial*"))
    if done.returncode == 2:
        (line,) = done.stderr.splitlines()
        assert line.startswith("keyhole: ")
        assert len(line) < 1100
        assert done.stdout == ""


@pytest.mark.parametrize(("words", "name"), SAMPLE)
def test_a_sample_ends_in_one_line(words, name, world, keyhole):
    ends_in_one_line(words, name, world, keyhole)


@pytest.mark.release
@pytest.mark.parametrize(("words", "name"), CASES)
def test_every_bad_file_ends_in_one_line(words, name, world, keyhole):
    ends_in_one_line(words, name, world, keyhole)


@pytest.mark.parametrize(
    "words",
    [
        "audit --frobnicate",
        "extract",
        "audit demo --seed -1",
        "audit \x1b[31m",
        f"extract {'x' * 5000}",
        "lab plant x -o dim",
        "lab plant x -o dim=x",
        "lab plant x -o dim=-1",
        f"lab plant x -o dim={'9' * 31}",
        "lab plant x --kind nothing",
        "audit demo --endpoint frobs=1",
        "lab methods nothing",
        "extract demo --header s3cret",
        "harden demo --data x",
    ],
)
def test_whatever_is_typed_wrong_ends_with_2(words, tmp_path, keyhole):
    done = keyhole(words)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert "s3cret" not in done.stderr
    assert "\x1b[31m" not in done.stderr
    assert done.stdout == ""
    assert not list(tmp_path.iterdir())
