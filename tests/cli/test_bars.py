"""Progress bars on a pseudo-terminal, and lines without one: full at the end, never decreasing."""

from __future__ import annotations

import io
import os
import pty
import re
import threading
import time
from contextlib import contextmanager
from itertools import pairwise

import pytest
from rich.console import Console

import tiny_classifiers
from keyhole import invert, oracle
from keyhole.cli import bars as module
from keyhole.cli import outputs
from keyhole.cli.bars import bars

# A name, a bar, what is done and of how much: a part that has not reported yet has no
# row.
ROW = re.compile(r"^(\S.*?) +[━╸╺]+ +(done|([\d,]+)(?: of ([\d,]+))?)(?: |$)")
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Screen:
    """Everything that was written to a terminal."""

    def __init__(self, master: int) -> None:
        self.text = ""
        self._reader = threading.Thread(target=self._read, args=(master,))
        self._reader.start()

    def _read(self, master: int) -> None:
        parts = []
        while True:
            try:
                part = os.read(master, 65536)
            except OSError:  # how a pseudo-terminal without a writer ends
                break
            if not part:
                break
            parts.append(part)
        self.text = b"".join(parts).decode()

    def close(self) -> None:
        self._reader.join()

    def rows(self) -> dict[str, list[tuple[int, int | None]]]:
        """Return the counts that each bar showed, by its name; -1 stands for `done`."""
        shown: dict[str, list[tuple[int, int | None]]] = {}
        for line in re.split(r"[\r\n]+", ESCAPES.sub("", self.text)):
            row = ROW.match(line)
            if row:
                done, total = (
                    int(number.replace(",", "")) if number else None
                    for number in row.groups()[2:]
                )
                shown.setdefault(row[1], []).append(
                    (-1, -1) if done is None else (done, total)
                )
        return shown


@contextmanager
def terminal(monkeypatch):
    """Make stderr a pseudo-terminal of 160 columns."""
    monkeypatch.delenv("KEYHOLE_NO_PROGRESS", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    master, slave = pty.openpty()
    screen = Screen(master)
    try:
        with os.fdopen(slave, "w", encoding="utf-8") as file:
            assert file.isatty()
            monkeypatch.setattr(outputs, "people", Console(file=file, width=160))
            yield screen
    finally:
        screen.close()
        os.close(master)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Tiny inputs for every command."""
    folder = tmp_path_factory.mktemp("place")
    tiny_classifiers.classifier(folder, 6)
    oracle.save(oracle.plant(dim=4, seed=1), folder / "t.safetensors")
    problem, _ = invert.plant(3, 4, scale=0.3)
    problem.save(folder / "p.safetensors")
    (folder / "texts.txt").write_text("a good film .\nnot bad at all .\n")
    return folder


LONG = {
    "audit": "audit t.safetensors",
    "extract": "extract t.safetensors --method single-head",
    "extract, of unknown length": "extract t.safetensors",
    "invert": "invert p.safetensors -o starts=8 -o solutions=3",
    "recover": "recover demo leaks",
    "disrupt": f"disrupt my-classifier --data dev.tsv --examples 5 {tiny_classifiers.LIGHTLY}",
    "harden": "harden my-classifier --data train.tsv --dev dev.tsv --flips 2 --method plain "
    "--epochs 2 --out hardened",
}


@pytest.mark.parametrize("name", LONG)
def test_every_bar_ends_whole_and_none_goes_back(name, place, monkeypatch, keyhole):
    tiny_classifiers.attack_lightly(monkeypatch)
    if name == "recover":
        capture = "lab capture demo --data texts.txt --expose hidden:1 --out leaks"
        keyhole(capture, cwd=place)
    with terminal(monkeypatch) as screen:
        done = keyhole(LONG[name], cwd=place)
    assert done.returncode in (0, 1), screen.text
    shown = screen.rows()
    assert shown, screen.text
    for bar, counts in shown.items():
        assert counts[-1][0] == counts[-1][1], (bar, counts[-1])
        for before, after in pairwise(counts):
            # Two parts may have one name: the second begins when the first is whole.
            assert before[0] <= after[0] or before[0] == before[1], (bar, before, after)
    overall = shown.get(name.partition(",")[0], [])
    assert [count for count, _ in overall] == sorted(count for count, _ in overall)
    if name != "audit":
        assert overall
        assert overall[-1][0] > 0


def test_parts_go_when_they_are_done_and_the_overall_bar_stays(monkeypatch):
    with terminal(monkeypatch) as screen, bars("audit", "checks") as track:
        overall = track("audit", 2)
        overall(0)
        track("hidden states", 256)(12)  # found before the budget was spent
        overall(1, note="weights")
        track("logits", 5)(5)
        overall(2, note="texts")
    shown = screen.rows()
    assert shown["hidden states"][-1] == (12, 12)
    assert shown["logits"][-1] == (5, 5)
    assert shown["audit"][-1] == (2, 2)
    last = ESCAPES.sub("", screen.text).rstrip().splitlines()[-1]
    assert re.match(
        r"audit +━+ +2 of 2 checks +in 1 second +texts", last.split("\r")[-1]
    )


def test_an_answer_is_shown_above_the_bars(monkeypatch, capsys):
    with terminal(monkeypatch) as screen, bars("recover", "texts") as track:
        overall = track("recover", 2)
        overall(1)
        with track.paused():
            outputs.show("the first text")
        overall(2)
    assert (
        capsys.readouterr().out == "the first text\n"
    )  # on stdout, whatever stderr is
    assert screen.rows()["recover"][-1] == (2, 2)


def test_what_fails_leaves_no_full_bar(monkeypatch):
    def fail() -> None:
        with bars("audit", "checks") as track:
            track("audit", 5)(2)
            track("a part", 7)(3)
            raise KeyboardInterrupt

    with terminal(monkeypatch) as screen, pytest.raises(KeyboardInterrupt):
        fail()
    shown = screen.rows()
    assert (shown["audit"][-1], shown["a part"][-1]) == ((2, 5), (3, 7))


@pytest.fixture
def log(monkeypatch):
    """Make stderr a file."""
    monkeypatch.delenv("KEYHOLE_NO_PROGRESS", raising=False)
    monkeypatch.setattr(outputs, "people", Console(file=io.StringIO()))
    return outputs.people.file


def test_a_log_has_a_line_for_every_part(log):
    with bars("audit", "checks") as track:
        overall = track("audit", 3)
        for number, note in enumerate(("weights", "texts", "flips"), 1):
            track("a part", 2)(1)
            overall(number, note=note)
    lines = log.getvalue().splitlines()
    assert lines[0] == "audit: 1 of 3 checks, weights"
    assert re.fullmatch("audit: 2 of 3 checks, texts, about 1 second left", lines[1])
    assert re.fullmatch("audit: 3 of 3 checks, flips, in 1 second", lines[2])
    assert len(lines) == 3


def test_a_log_has_a_line_now_and_then(log, monkeypatch):
    monkeypatch.setattr(module, "EVERY", 0.05)
    with bars("extract", "queries", each=False) as track:
        overall = track("extract", 1000)
        for queries in range(1, 101):
            overall(queries)
        steering = track("steering", 9)
        for step in range(1, 5):
            time.sleep(0.06)
            steering(step)
    first, *_, last = log.getvalue().splitlines()
    assert re.match(
        "extract: 100 of 1,000 queries, now steering: 1 of 9, about ", first
    )
    assert re.match("extract: 100 of 100 queries, in ", last)
    assert 2 <= log.getvalue().count("\n") <= 6


def test_a_wish_for_silence(log, monkeypatch):
    monkeypatch.setenv("KEYHOLE_NO_PROGRESS", "1")
    with bars("audit", "checks") as track:
        track("audit", 3)(1)
    with terminal(monkeypatch) as screen:
        monkeypatch.setenv("KEYHOLE_NO_PROGRESS", "1")
        with bars("audit", "checks") as track:
            track("audit", 3)(1)
    assert log.getvalue() + screen.text == ""


def test_colours_by_wish_make_no_terminal_of_a_file(log, monkeypatch):
    monkeypatch.setattr(outputs, "people", Console(file=log, force_terminal=True))
    with bars("audit", "checks") as track:
        track("audit", 3)(1)
    assert "\x1b[?25l" not in log.getvalue()  # no cursor is hidden
