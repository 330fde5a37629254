"""Progress: silent by default, and the state that reports add up to."""

from __future__ import annotations

import pytest

from keyhole.core.progress import (
    Progress,
    ProgressState,
    Track,
    duration,
    silent,
    untracked,
)
from keyhole.oracle import Counted, plant


def test_by_default_nobody_looks():
    progress: Progress = silent
    track: Track = untracked
    progress(1)
    progress(1, 2, "half")
    assert track("search", 10) is silent


def test_work_says_what_is_done_and_of_how_much():
    calls = []
    oracle = Counted(
        plant(dim=2), progress=lambda *given, **named: calls.append((given, named))
    )
    oracle(plant(dim=2).W.expand(3, 2, 2))
    assert calls
    assert calls[-1][0][0] == 3


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_it_never_goes_back_and_its_end_is_all_of_it():
    state = ProgressState("search", 10, "starts")
    shares = []
    for done, total in ((3, None), (2, None), (4, 40), (50, None)):
        state.report(done, total)
        shares.append(state.share)
    assert shares == [0.3, 0.3, 0.3, 1.0]
    assert state.count == "50 of 50 starts"  # more than was expected
    early = ProgressState("search", 10)
    early.report(4)
    assert not early.complete
    early.end()
    assert (early.share, early.count, early.complete) == (1.0, "4 of 4", True)
    untold = ProgressState("closed form")
    assert (untold.share, untold.count, untold.words()) == (None, "", "closed form")
    untold.end()
    assert (untold.share, untold.count) == (1.0, "done")


def test_time_left_is_that_of_the_parts_done_in_this_run():
    clock = Clock()
    state = ProgressState("audit", 18, "checks", clock)
    state.report(6)  # a run that was stopped had them
    assert state.words() == "audit: 6 of 18 checks"
    clock.now += 12
    state.report(7, note="hidden states of layer 3")
    assert state.time == "about 2 minutes left"  # 11 of 12 seconds each
    assert state.words("now logits: 1 of 2") == (
        "audit: 7 of 18 checks, hidden states of layer 3, now logits: 1 of 2, about 2 minutes left"
    )
    clock.now += 60  # a slow one: the estimate follows without another word
    assert state.time == "about 13 minutes left"
    state.end()
    assert state.time == "in 1 minute"


def test_a_count_without_a_unit_takes_it_from_the_note():
    state = ProgressState("invert")
    state.report(12, 256, "starts, best 1.0e-03")
    assert state.words() == "invert: 12 of 256 starts, best 1.0e-03"


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.2, "1 second"),
        (8.6, "9 seconds"),
        (43, "45 seconds"),
        (60, "1 minute"),
        (150, "3 minutes"),
        (5399, "90 minutes"),
        (7200, "2 hours"),
    ],
)
def test_durations_as_people_say_them(seconds, words):
    assert duration(seconds) == words
