"""Whatever people type: one line, an exit code that says whose fault it is, and nothing half made.

A sample runs here; all of them with KEYHOLE_FULL=1. Each runs in a process of its own, forked from
one that has torch already, with a bound on its memory and its time.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
from safetensors.torch import load

import bad_files
from command_line import keyhole
from invocations import Case, everything, sample
from trial import MEMORY, Trials, trials

FULL = bool(os.environ.get("KEYHOLE_FULL"))
CASES = everything() if FULL else sample()
pytestmark = pytest.mark.slow  # it forks a process for each case


@pytest.fixture(scope="session")
def world(tmp_path_factory) -> Path:
    """Where bad files are."""
    return tmp_path_factory.mktemp("fuzz") / "world"


@pytest.fixture(scope="session")
def worker() -> Iterator[Trials]:
    with trials() as started:
        yield started


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_it_ends_in_one_line_and_leaves_nothing_half_made(case, world, worker, record_property):
    folder = _folder(case, world)
    before = {name: _content(folder / name) for name in case.copies}
    done = worker.run(case.words, folder)
    for name, value in asdict(done).items():
        record_property(name, str(value)[:500].encode("unicode_escape").decode())
    assert "Traceback" not in done.stderr
    assert done.code in case.codes, done.stderr
    assert done.memory < MEMORY
    if done.code == 2:
        assert done.stdout == ""
        expect_one_line(done.stderr)
        assert {name: _content(folder / name) for name in before} == before
    expect_whole_files(folder)


def expect_one_line(words: str) -> None:
    """The error, in one line; Typer's own errors stand below a line or two on usage."""
    lines = words.splitlines()
    if words.startswith("Usage:") and "\nOptions:" in words:
        return  # a command alone shows its help
    if words.startswith(("Usage:", "Error: ")):
        assert lines[-1].startswith("Error: "), words
        assert len(lines) <= 6, words
    else:
        assert len(lines) == 1, words
        assert words.startswith("keyhole: expected "), words
        assert len(words) < 1100, len(words)


def expect_whole_files(folder: Path) -> None:
    """Outputs are whole or not there."""
    for path in folder.rglob("*"):
        assert "partial" not in path.name, path.name
        given = path.relative_to(folder).parts[0] in bad_files.MAKERS
        if given or path.is_symlink() or not path.is_file():
            continue
        match path.suffix:
            case ".json":
                json.loads(path.read_text())
            case ".jsonl":
                [json.loads(line) for line in path.read_text().splitlines()]
            case ".safetensors":
                assert load(path.read_bytes())
            case ".html":
                assert path.read_text().rstrip().endswith("</html>")
            case _:
                pass


def _folder(case: Case, world: Path) -> Path:
    world.mkdir(exist_ok=True)
    for stray in world.iterdir():  # what an earlier case wrote beside a bad file
        if stray.name not in bad_files.MAKERS and stray.is_file():
            stray.unlink()
    for name in case.needs:
        _as_it_was(bad_files.make(world, name))
    folder = world.parent / f"case-{CASES.index(case)}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name in case.copies:
        made = bad_files.make(world, name)
        subprocess.run(["cp", "-a", made, folder], check=True)  # links and pipes as they are
    return folder


_MADE: dict[Path, object] = {}  # what bad files looked like when they were made


def _as_it_was(path: Path) -> None:
    """An earlier case may have written there, as it was told to: then it is made anew."""
    if path in _MADE and _MADE[path] != _looks(path):
        if path.is_symlink():
            (path.parent / path.readlink()).unlink(missing_ok=True)  # what was written behind it
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        bad_files.make(path.parent, path.name)
    _MADE[path] = _looks(path)


def _looks(path: Path) -> object:
    """Links, files and all that is inside folders: kinds, sizes and times."""
    if not os.path.lexists(path):
        return None
    inner = sorted(path.rglob("*")) if path.is_dir() and not path.is_symlink() else []
    behind = path.exists() if path.is_symlink() else None
    stats = [os.lstat(place) for place in (path, *inner)]
    return [(stat.st_mode, stat.st_size, stat.st_mtime_ns) for stat in stats], behind


def _content(path: Path) -> object:
    if path.is_dir():
        return {inner.name: _content(inner) for inner in sorted(path.iterdir())}
    return path.read_bytes() if path.is_file() else None


REAL = [case for case in sample(40, 7) if all("\0" not in word for word in case.words)]
REAL = REAL[: 12 if FULL else 3]  # each loads torch


@pytest.mark.parametrize("case", REAL, ids=[case.name for case in REAL])
def test_it_is_the_same_through_the_executable(case, world):
    folder = _folder(case, world) if case in CASES else world.parent
    world.mkdir(exist_ok=True)
    for name in case.needs:
        bad_files.make(world, name)
    done = keyhole(*case.words, cwd=folder)
    assert done.returncode in case.codes, done.stderr
    if done.returncode == 2:
        expect_one_line(done.stderr)
