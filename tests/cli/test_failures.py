"""Errors and Ctrl-C end with one line and an exit code."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

import tampered
from command_line import KEYHOLE, finished, interrupted, started
from keyhole.cli.app import report_failure
from keyhole.core.errors import InputError, KeyholeError

LINES = [
    (InputError("expected a, got b"), 2, "keyhole: expected a, got b"),
    (KeyholeError("expected a server, got none"), 3, "got none"),
    (OSError(errno.ENOSPC, "No space left on device", "f"), 3, "could not write (f)"),
    (
        PermissionError(errno.EACCES, "Permission denied", "f"),
        3,
        "(f): Permission denied",
    ),
    (MemoryError(), 3, "out of memory"),
    (RuntimeError("[enforce fail] can't allocate memory: 8 bytes"), 3, "out of memory"),
    (RecursionError("maximum recursion depth exceeded"), 3, "run again with --debug"),
    (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "no"), 3, "run again with --debug"),
    (
        RuntimeError("one\ntwo\x1b[31m"),
        3,
        "internal error: RuntimeError: one two�[31m; run again",
    ),
    (KeyboardInterrupt(), 130, "keyhole: stopped"),
]


@pytest.mark.parametrize(("error", "code", "words"), LINES)
def test_every_failure_is_one_line(error, code, words, capsys):
    assert report_failure(error) == code
    out, line = capsys.readouterr()
    assert out == ""
    assert words in line
    assert line.startswith("keyhole: ")
    assert line.count("\n") == 1


def test_what_nobody_reads_is_not_complained_about(capsys):
    assert report_failure(BrokenPipeError()) == 141
    assert capsys.readouterr() == ("", "")


def test_ctrl_c_that_a_library_calls_something_else(capsys):
    failure = ImportError("it did not load")
    failure.__context__ = KeyboardInterrupt()
    assert report_failure(failure) == 130
    assert capsys.readouterr().err == "keyhole: stopped\n"


@pytest.mark.parametrize("asked", ["option", "environment", "not at all"])
def test_the_traceback_is_for_those_who_ask(asked, keyhole, monkeypatch):
    def broken(*_):
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr("keyhole.core.Audit.load", broken)
    option = "--debug" if asked == "option" else ""
    if asked == "environment":
        monkeypatch.setenv("KEYHOLE_DEBUG", "1")
    done = keyhole(option, "report x.json")
    assert done.returncode == 3
    assert "RuntimeError: a fault of ours" in done.stderr.splitlines()[-1]
    assert ("Traceback" in done.stderr) == (asked != "not at all")
    assert ("run again with --debug" in done.stderr) == (asked == "not at all")


@pytest.fixture
def audit(tmp_path) -> Path:
    path = tmp_path / "audit.json"
    path.write_text(tampered.AUDITS["audit-good.json"])
    return path


@pytest.mark.slow
@pytest.mark.parametrize("words", ["report audit.json --json", "--version", "--help"])
def test_a_full_disk_behind_stdout_is_one_line(audit, words):
    with Path("/dev/full").open("w") as full:
        done = finished([*KEYHOLE, *words.split()], cwd=audit.parent, stdout=full)
    assert done.returncode == 3
    assert "No space left on device" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert "ignored" not in done.stderr


@pytest.mark.slow
def test_a_closed_pipe_ends_quietly(audit):
    reader, writer = os.pipe()
    os.close(reader)
    command = [*KEYHOLE, "report", audit, "--json"]
    with started(command, cwd=audit.parent, stdout=writer) as process:
        os.close(writer)
        _, words = process.communicate(timeout=120)
    assert process.returncode == 141
    assert "roken" not in words
    assert "Traceback" not in words


@pytest.mark.slow
def test_ctrl_c_while_torch_loads(tmp_path):
    def loading(process) -> bool:
        return "libtorch" in Path(f"/proc/{process.pid}/maps").read_text()

    done = interrupted("lab plant x.safetensors", tmp_path, loading)
    assert (done.returncode, done.stderr) == (130, "keyhole: stopped\n")
    assert list(tmp_path.iterdir()) == []
