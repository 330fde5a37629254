"""A recovery reports what the tokens lost, and the seconds of each leak."""

from __future__ import annotations

import time
from dataclasses import dataclass

import pytest

import tiny_models as tiny
from keyhole.core import Status, Unsuccessful
from keyhole.models.capture import Exposure
from keyhole.recover import (
    EncoderStates,
    leak_of,
    recover_text,
    recover_texts,
    recovering,
)
from keyhole.recover.attack import Proposal

WORDS = tiny.tokenizer()
TEXTS = (
    "w1 w2 w3 w4",
    "w9 w8 w7 w6 w5 w4 w3 w2 w1",
    "w11 w12 w13",
    "w20 w21 w22 w23 w24 w25",
)


def leaks(exposure, texts=TEXTS):
    model = tiny.model("bert")
    return model, [
        leak_of(model, WORDS, text, Exposure.parse(exposure)) for text in texts
    ]


def test_the_unknown_token_is_said():
    model, given = leaks("hidden:1", ["w1 nobody w3 somebody"])
    recovery = recover_text(model, WORDS, given[0])
    assert recovery.verified  # the tokens are right, but their characters are lost
    assert recovery.status is Status.INEXACT
    assert recovery.text == "w1 [UNK] w3 [UNK]"
    assert (
        "2 [UNK]: the text had characters that the tokenizer has no token for"
        in recovery.reason
    )


def test_a_leak_as_long_as_the_model_allows_was_probably_cut():
    model, given = leaks("hidden:1", ["w7 " * 100, "w7 " * 20])
    cut, whole = recover_texts(model, WORDS, given)
    assert "the model's limit of 80 tokens: probably cut off" in cut.reason
    assert "cut off" not in whole.reason
    assert (cut.status, whole.status) == (Status.INEXACT, Status.RECOVERED)
    assert cut.verified


@pytest.mark.parametrize("exposure", ["hidden:1", "hidden:2", "kv:1", "maps:1"])
def test_seconds_add_up_to_the_whole(exposure):
    model, given = leaks(exposure)
    started = time.perf_counter()
    recoveries = recover_texts(model, WORDS, given)
    whole = time.perf_counter() - started
    total = sum(recovery.seconds for recovery in recoveries)
    assert 0.8 * whole <= total <= whole
    assert all(recovery.seconds > 0 for recovery in recoveries)


@dataclass(frozen=True)
class Slow:
    """Sleeps 0.05 s per leak at first, then 0.1 s before each following leak."""

    fails: bool = False

    def __call__(self, _target, given):
        time.sleep(0.05 * len(given))
        if self.fails:
            raise Unsuccessful(Status.UNSOLVED, "nothing was found")
        for number, leak in enumerate(given):
            yield number, Proposal([2] * leak.length)
            time.sleep(0.1)


@pytest.fixture
def slept(monkeypatch):
    """A clock that only `sleep` advances."""
    passed = [0.0]

    def sleep(seconds):
        passed[0] += seconds

    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(time, "perf_counter", lambda: passed[0])


@pytest.mark.usefixtures("slept")
def test_each_leak_has_its_own_seconds():
    model, given = leaks("hidden:1", TEXTS[:3])
    judged = []
    for _, recovery in recovering(model, WORDS, given, method=Slow()):
        judged.append(recovery.seconds)
        time.sleep(0.2)  # the time of the consumer counts for no leak
    assert judged == pytest.approx([0.15, 0.1, 0.1])


@pytest.mark.usefixtures("slept")
def test_leaks_that_nobody_read_have_their_share():
    model, given = leaks("hidden:1", TEXTS[:3])
    recoveries = recover_texts(model, WORDS, given, method=Slow(fails=True))
    assert [recovery.seconds for recovery in recoveries] == pytest.approx([0.05] * 3)


def test_a_result_says_its_marks_in_words():
    model, given = leaks("hidden:1", TEXTS[:1])
    recovery = recover_text(model, WORDS, given[0], method=EncoderStates())
    assert recovery.marked == "6 verified of 6 tokens"
    assert recovery.marked in recovery.summary()
