"""One shape of progress: silent by default, bars on a terminal, nothing where nobody looks."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from keyhole.cli import console
from keyhole.oracle import Counted, plant
from keyhole.progress import Progress, Track, silent, untracked


def test_by_default_nobody_looks():
    progress: Progress = silent
    track: Track = untracked
    progress(1)
    progress(1, 2, "half")
    assert track("search", 10) is silent


def test_work_says_what_is_done_and_of_how_much():
    calls = []
    oracle = Counted(plant(dim=2), progress=lambda *given, **named: calls.append((given, named)))
    oracle(plant(dim=2).W.expand(3, 2, 2))
    assert calls
    assert calls[-1][0][0] == 3


@pytest.fixture
def terminal(monkeypatch):
    """What a person at a terminal sees."""

    def look(is_terminal: bool) -> Console:
        people = Console(file=io.StringIO(), force_terminal=is_terminal, width=120)
        monkeypatch.setattr(console, "people", people)
        monkeypatch.delenv("KEYHOLE_NO_PROGRESS", raising=False)
        return people

    return look


def shown(people: Console) -> str:
    with console.bars("texts") as track:
        progress = track("search", 10)
        progress(3)
        progress(4, note="layer 2")
        track("proof")(1, 2)
    return people.file.getvalue()


def test_a_terminal_shows_bars(terminal):
    text = shown(terminal(is_terminal=True))
    assert "search layer 2" in text
    assert "4/10" in text
    assert "1/2" in text
    assert "texts" in text


def test_a_pipe_shows_nothing_and_so_does_a_wish(terminal, monkeypatch):
    assert shown(terminal(is_terminal=False)).strip() == ""
    people = terminal(is_terminal=True)
    monkeypatch.setenv("KEYHOLE_NO_PROGRESS", "1")
    assert "search" not in shown(people)
