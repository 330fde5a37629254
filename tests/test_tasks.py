"""Tasks on several workers are all done once, even if workers die."""

from __future__ import annotations

import os
import time
from collections import Counter
from concurrent.futures import BrokenExecutor, Executor, Future, ThreadPoolExecutor
from functools import partial

import pytest

from keyhole.core.errors import InputError, KeyholeError
from keyhole.core.tasks import InProcess, Runner, Task, Worker, WorkersLost


def number_of(value, worker):
    return value, worker


def dying(path, value, worker):
    """End the process the first time, as the kernel does when memory runs out."""
    if not path.exists():
        path.touch()
        os._exit(9)
    return value, worker


def noted(folder, value, worker):
    """Leave a file for every run."""
    (folder / f"{value}-{time.monotonic_ns()}").touch()
    return value, worker


def process(worker):
    return os.getpid()


def failing(worker):
    raise InputError("something is wrong")


def tasks(count):
    return [Task(number, partial(number_of, number)) for number in range(count)]


def test_every_task_is_done_and_an_error_belongs_to_its_task():
    with ThreadPoolExecutor(2) as executor, Runner(executor) as runner:
        runner.add(*tasks(20), Task("wrong", failing))
        done = {each.task.key: each for each in runner.run()}
    assert str(done.pop("wrong").error) == "something is wrong"
    assert {key: each.value[0] for key, each in done.items()} == {
        n: n for n in range(20)
    }
    assert all(each.seconds >= 0 for each in done.values())


def test_in_process_and_more_may_be_added_on_the_way():
    with Runner(0) as runner:
        runner.add(Task("first", partial(number_of, os.getpid())))
        seen = []
        for done in runner.run():
            seen.append(done.value)
            if len(seen) < 3:
                runner.add(Task(f"more {len(seen)}", partial(number_of, os.getpid())))
    assert seen == [(os.getpid(), 0)] * 3
    with pytest.raises(ZeroDivisionError):
        InProcess().submit(divmod, 7, 0).result()


def expect_only_the_killed_task_to_run_again(workers, tmp_path):
    runs = tmp_path / "runs"
    runs.mkdir()
    with Runner(workers) as runner:
        runner.add(Task("deadly", partial(dying, tmp_path / "died", 6)))
        runner.add(*(Task(n, partial(noted, runs, n)) for n in range(6)))
        done = {each.task.key: each.value for each in runner.run()}
    assert (tmp_path / "died").exists()
    assert sorted(value for value, _ in done.values()) == list(range(7))
    counts = Counter(path.name.partition("-")[0] for path in runs.iterdir())
    assert counts == dict.fromkeys(map(str, range(6)), 1)


@pytest.mark.slow
def test_a_killed_process_loses_nothing_and_only_its_own_task_runs_again(tmp_path):
    expect_only_the_killed_task_to_run_again(1, tmp_path)


@pytest.mark.release
def test_a_killed_worker_of_a_cluster_loses_nothing(tmp_path):
    """A real scheduler with a worker process that dies; Dask starts another."""
    distributed = pytest.importorskip("distributed")
    options = {"n_workers": 1, "threads_per_worker": 1, "dashboard_address": ":0"}
    with distributed.LocalCluster(processes=True, **options) as cluster:
        expect_only_the_killed_task_to_run_again(cluster.scheduler_address, tmp_path)


class Broken(Executor):
    def submit(self, fn, /, *args, **kwargs):
        future = Future()
        future.set_exception(BrokenExecutor("no more"))
        return future


def test_a_task_that_always_kills_its_worker_is_given_up(monkeypatch):
    monkeypatch.setattr(Worker, "restart", lambda _: True)
    with Runner(Broken()) as runner:
        runner.add(Task("always", process, attempts=2))
        (done,) = runner.run()
    assert isinstance(done.error, WorkersLost)
    assert "finished work is kept: run the same command again" in str(done.error)


def test_an_executor_of_the_callers_is_not_replaced():
    with Runner(Broken()) as runner:
        runner.add(*tasks(1))
        with pytest.raises(WorkersLost, match="no more"):
            list(runner.run())


@pytest.mark.parametrize("address", ["nowhere", "tcp://", " "])
def test_what_is_no_address_is_one_line(address):
    with pytest.raises((InputError, KeyholeError)) as error, Runner(address):
        pytest.fail("nobody is there")
    assert "\n" not in str(error.value)
