"""Finished searches of a stack are not made again, and what they found is the same bit for bit."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import dataclass, replace

import pytest
import torch

from keyhole import invert
from keyhole.core.errors import InputError
from keyhole.core.journal import AnotherRun, records_in
from keyhole.lab import stacks

ONE = invert.LevenbergMarquardt(starts=8, steps=100, solutions=2)
METHODS = {
    "peel": stacks.Peel(ONE, branches=2),
    "end to end": stacks.EndToEnd(replace(ONE, starts=20)),
}


@pytest.fixture(scope="module")
def stack():
    return stacks.plant(3, 4, 3, residual=True, scale=0.5, seed=2)[0]


class Stopped(Exception):
    pass


def stop_after(count):
    """A progress that ends the run once so much is done."""

    def progress(done, total=None, note=""):
        if done >= count:
            raise Stopped

    return lambda name, total=None: progress


def same(first, other):
    assert first.status is other.status
    assert first.reason == other.reason
    assert len(first.solutions) == len(other.solutions) > 0
    assert all(torch.equal(X, Y) for X, Y in zip(first.solutions, other.solutions, strict=True))


@pytest.mark.parametrize("name", METHODS)
def test_stopped_it_goes_on_and_finds_the_same(stack, name, tmp_path):
    method, journal = METHODS[name], tmp_path / "journal"
    whole = method(stack)
    with pytest.raises(Stopped):
        stacks.run(stack, method, journal=journal, track=stop_after(2 if name == "peel" else 8))
    kept = journal.read_text()
    assert records_in(journal) > 0
    resumed = []
    result = stacks.run(stack, method, journal=journal, resuming=resumed.append)
    assert resumed == [kept.count("\n") - 1]
    assert journal.read_text().startswith(kept)  # nothing is searched twice
    same(result, whole)
    after = journal.read_text()
    again = stacks.run(stack, method, journal=journal)
    assert journal.read_text() == after
    assert again.seconds == pytest.approx(result.seconds)  # of searches, whoever made them
    same(again, whole)


@dataclass(frozen=True)
class CtrlC:
    """A method that is interrupted after some of its inputs, and hands those over."""

    def __call__(self, problem):
        found = ONE(problem)
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except KeyboardInterrupt:
            return replace(found, solutions=found.solutions[:1])
        raise AssertionError


def test_what_half_a_search_found_is_not_kept(stack, tmp_path):
    journal = tmp_path / "journal"
    with pytest.raises(KeyboardInterrupt):
        stacks.run(stack, stacks.Peel(CtrlC()), journal=journal)
    assert not journal.exists()


def test_another_stack_or_method_is_refused(stack, tmp_path):
    journal = tmp_path / "journal"
    stacks.run(stack, METHODS["peel"], journal=journal)
    other = replace(stack, B=stack.B + 1e-9)
    with pytest.raises(AnotherRun, match=r"has stack .* give --force to begin anew"):
        stacks.run(other, METHODS["peel"], journal=journal)
    with pytest.raises(AnotherRun, match="has method EndToEnd"):
        stacks.run(stack, METHODS["end to end"], journal=journal)
    stacks.run(stack, METHODS["end to end"], journal=journal, force=True)
    assert '"method": "EndToEnd' in journal.read_text().splitlines()[0]


@pytest.mark.parametrize(
    "spoiled", [{"inputs": "x"}, {"inputs": [[1.0, [2.0]]]}, {"end": 1}, {"seconds": None}]
)
def test_a_record_that_is_none_is_told_in_one_line(stack, tmp_path, spoiled):
    journal = tmp_path / "journal"
    stacks.run(stack, METHODS["peel"], journal=journal)
    first, *others = journal.read_text().splitlines()
    lines = [first, *(json.dumps(json.loads(line) | spoiled) for line in others)]
    journal.write_text("".join(f"{line}\n" for line in lines))
    with pytest.raises(InputError, match=r"journal does not hold .*--force to begin anew"):
        stacks.run(stack, METHODS["peel"], journal=journal)
