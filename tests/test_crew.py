"""Tasks on several workers: all of them once, whoever dies; each worker stays with what it has."""

from __future__ import annotations

import os
import time
from collections import Counter
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import partial

import pytest

from keyhole.core.errors import InputError, KeyholeError
from keyhole.core.tasks import Crew, Task

FULL = pytest.mark.skipif(not os.environ.get("KEYHOLE_FULL"), reason="KEYHOLE_FULL=1 runs it")


def number_of(value, worker):
    return value, worker


def dying(path, value, worker):
    """Ends its process the first time, as a kernel short of memory does."""
    if not path.exists():
        path.touch()
        os._exit(9)
    return value, worker


def ending(worker):
    os._exit(9)


def noted(folder, value, worker):
    """Leaves a mark of every run."""
    (folder / f"{value}-{time.monotonic_ns()}").touch()
    return value, worker


def failing(worker):
    raise InputError("expected something else")


def tasks(count, groups=1):
    return [
        Task(f"{number}", partial(number_of, number), group=f"group {number % groups}")
        for number in range(count)
    ]


def test_every_task_is_done_and_what_one_raises_is_its_own_affair():
    with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second:
        crew = Crew([first, second])
        with crew:
            crew.add(*tasks(20), Task("wrong", failing))
            done = {each.task.key: each for each in crew.run()}
    assert str(done.pop("wrong").error) == "expected something else"
    assert {key: each.value[0] for key, each in done.items()} == {f"{n}": n for n in range(20)}
    assert {each.value[1] for each in done.values()} <= {0, 1}
    assert all(each.seconds >= 0 for each in done.values())


def test_without_workers_it_is_done_here_and_more_may_be_added_on_the_way():
    with Crew(0) as crew:
        crew.add(Task("first", partial(number_of, os.getpid()), stays=True))
        seen = []
        for done in crew.run():
            seen.append(done.value)
            if len(seen) < 3:
                crew.add(Task(f"more {len(seen)}", partial(number_of, os.getpid())))
    assert seen == [(os.getpid(), 0)] * 3


class Slow(Executor):
    """Takes tasks and finishes them when it is told to."""

    def __init__(self):
        self.given = []

    def submit(self, fn, /, *args, **kwargs):
        future = Future()
        self.given.append((future, partial(fn, *args, **kwargs)))
        return future

    def finish(self):
        future, call = self.given.pop()
        future.set_result(call())


def test_a_worker_stays_with_what_it_has_opened_and_the_costliest_is_first():
    """Two workers, groups of 4, 3 and 1 tasks: the small one does not wait for the end of all."""
    first, second = Slow(), Slow()
    at = {first: [], second: []}
    with Crew([first, second]) as crew:
        for name, count in (("small", 1), ("middle", 3), ("large", 4)):
            crew.add(*(Task(f"{name} {n}", partial(number_of, name), name) for n in range(count)))
        running = crew.run()
        crew._hand_out()
        while first.given or second.given:
            for worker in (first, second):
                if worker.given:
                    worker.finish()
                    at[worker].append(next(running).value[0])
                    crew._hand_out()
    assert at[first] == ["large"] * 4
    assert at[second] == ["middle"] * 3 + ["small"]


@pytest.mark.slow
def test_a_killed_process_loses_nothing_and_only_its_own_task_runs_again(tmp_path):
    died = tmp_path / "died"
    runs = tmp_path / "runs"
    runs.mkdir()
    with Crew(2) as crew:
        crew.add(*(Task(f"{n}", partial(noted, runs, n)) for n in range(6)))
        crew.add(Task("deadly", partial(dying, died, 6)))
        done = {each.task.key: each.value[0] for each in crew.run()}
    assert died.exists()
    assert sorted(done.values()) == list(range(7))
    counts = Counter(path.name.partition("-")[0] for path in runs.iterdir())
    assert counts == dict.fromkeys(map(str, range(6)), 1)


@FULL
@pytest.mark.slow
def test_a_task_that_always_kills_its_worker_is_given_up():
    with Crew(1) as crew:
        crew.add(Task("always", ending), *tasks(2))
        done = {each.task.key: each for each in crew.run()}
    assert isinstance(done["always"].error, KeyholeError)
    assert "expected workers that stay" in str(done["always"].error)
    assert [done[key].value for key in "01"] == [(0, 0), (1, 0)]


@FULL
@pytest.mark.slow
def test_what_stays_has_a_process_of_its_own():
    with Crew(1) as crew:
        crew.add(*(Task(f"far {n}", process, "there") for n in range(2)))
        crew.add(*(Task(f"near {n}", process, "near", stays=True) for n in range(2)))
        done = {each.task.key: each.value for each in crew.run()}
    assert done["far 0"] == done["far 1"] != done["near 0"] == done["near 1"]
    assert os.getpid() not in done.values()


def process(worker):
    return os.getpid()
