"""Sweeps resume without repeated queries, and lose no example with a worker."""

from __future__ import annotations

import json
import os
import shutil
import signal
from concurrent.futures import BrokenExecutor, Executor, Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

import tiny_heads
import tiny_models
from keyhole.core.errors import InputError, KeyholeError
from keyhole.data import Example
from keyhole.disrupt import Disruption, HackAttend, ModelSource, Rerank, sweep

METHOD = HackAttend(share=0.3, schedule=Rerank(rounds=2, prefixes=3, refine=0))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    where = tmp_path_factory.mktemp("model")
    tiny_heads.model("bert", "classes", seed=1).save_pretrained(where)
    words = tiny_models.tokenizer()
    words.save_pretrained(where)
    return str(where)


def examples(count=6):
    return [
        Example(
            str(i),
            i % 2,
            " ".join(f"w{(7 * i + 3 * j) % 50}" for j in range(5 + i % 4)),
        )
        for i in range(count)
    ]


def facts(found):
    return [
        (outcome.id, outcome.right, outcome.flipped, outcome.after)
        for outcome in found.outcomes
    ]


def test_this_process_and_threads_give_the_same_outcomes_in_order(folder):
    in_process = sweep(METHOD, folder, examples(), workers=0, batch_size=3)
    assert [outcome.id for outcome in in_process.outcomes] == list("012345")
    assert in_process.attacked
    with ThreadPoolExecutor(1) as pool:
        assert facts(sweep(METHOD, folder, examples(), pool, batch_size=2)) == facts(
            in_process
        )


def test_a_finished_run_is_read_and_a_longer_one_continues_it(folder, tmp_path):
    path = tmp_path / "run.jsonl"
    seen = []
    options = {
        "workers": 0,
        "resume": path,
        "progress": lambda *step: seen.append(step),
    }
    first = sweep(METHOD, folder, examples(4), **options)
    assert seen[-1] == (4, 4)
    seen.clear()
    again = sweep(METHOD, folder, examples(4), **options)
    assert seen == [(4, 4)]
    seen.clear()
    assert again.outcomes == first.outcomes
    assert Disruption.from_dict(json.loads(json.dumps(again.to_dict()))) == again
    sweep(METHOD, folder, examples(6), **options)
    assert seen == [(4, 6), (6, 6)]


def test_a_torn_record_is_asked_again_and_other_files_are_refused(folder, tmp_path):
    path = tmp_path / "run.jsonl"
    whole = sweep(METHOD, folder, examples(3), workers=0, resume=path, batch_size=1)
    text = path.read_text()
    path.write_text(text[:-20])
    seen = []
    again = sweep(
        METHOD,
        folder,
        examples(3),
        workers=0,
        resume=path,
        batch_size=1,
        progress=lambda *a: seen.append(a),
    )
    assert seen == [(2, 3), (3, 3)]
    assert facts(again) == facts(whole)
    header = path.read_text().splitlines()[0]
    path.write_text(f"{header}\nno\n")
    with pytest.raises(InputError, match=r"expected JSON in .*run.jsonl:2, got 'no'"):
        sweep(METHOD, folder, examples(3), workers=0, resume=path)
    path.write_text(f'{header}\n{{"key": "a"}}\n')
    with pytest.raises(
        InputError, match=r"run.jsonl does not hold what a run wrote under a"
    ):
        sweep(METHOD, folder, examples(3), workers=0, resume=path)
    with pytest.raises(InputError, match="cannot write"):
        sweep(METHOD, folder, examples(3), workers=0, resume=tmp_path / "no" / "where")


def test_a_journal_of_another_run_is_refused_with_the_difference(folder, tmp_path):
    """Another option, another max_length, another model in the same folder."""
    place = tmp_path / "model"
    path = tmp_path / "run.jsonl"
    shutil.copytree(folder, place)
    options = {"workers": 0, "resume": path}
    first = sweep(METHOD, str(place), examples(2), **options)
    shares = r"this run has method share 0.2, that of .* has method share 0.3: choose another"
    with pytest.raises(InputError, match=shares):
        sweep(replace(METHOD, share=0.2), str(place), examples(2), **options)
    seeds = r"this run has method seed 1, that of .* has method seed 0: choose another"
    with pytest.raises(InputError, match=seeds):
        sweep(replace(METHOD, seed=1), str(place), examples(2), **options)
    with pytest.raises(
        InputError, match=r"has max_length 8, that of .* has max_length None"
    ):
        sweep(METHOD, ModelSource(str(place), max_length=8), examples(2), **options)
    (place / "README.md").write_text("a card changes nothing")
    assert sweep(METHOD, str(place), examples(2), **options).outcomes == first.outcomes
    tiny_heads.model("bert", "classes", seed=2).save_pretrained(place)
    with pytest.raises(
        InputError, match=f"has model .*, that of .* has model {first.identity}"
    ):
        sweep(METHOD, str(place), examples(2), **options)
    other = sweep(METHOD, str(place), examples(2), workers=0)
    assert other.identity != first.identity
    assert [outcome.confidence_before for outcome in other.outcomes] != [
        outcome.confidence_before for outcome in first.outcomes
    ]  # the process does not keep the earlier model


class Deadly(ModelSource):
    """A source whose first loading kills the worker, and writes the worker's number of threads."""

    def identity(self):
        return ModelSource(self.name.split("|")[0]).identity()

    def load(self):
        name, marker = self.name.split("|")
        if not Path(marker).exists():
            Path(marker).write_text(os.environ.get("OMP_NUM_THREADS", ""))
            os.kill(os.getpid(), signal.SIGKILL)
        return ModelSource(name).load()


# tests/test_tasks.py kills a worker of the same runner in every run
@pytest.mark.release
def test_workers_start_with_one_thread_and_a_killed_worker_loses_nothing(
    folder, tmp_path, monkeypatch
):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    source = Deadly(f"{folder}|{tmp_path / 'died'}")
    found = sweep(METHOD, source, examples(3), 1, batch_size=2)
    assert (tmp_path / "died").read_text() == "1"
    assert "OMP_NUM_THREADS" not in os.environ
    assert found.failed == ()
    assert facts(found) == facts(sweep(METHOD, folder, examples(3), 0))


class Breaking(Executor):
    """An executor whose first `breaks` futures fail; later ones run in this process."""

    def __init__(self, breaks, error=BrokenExecutor):
        self.breaks = breaks
        self.error = error
        self.asked = 0

    def submit(self, function, /, *arguments, **options):
        future = Future()
        self.asked += 1
        if self.asked <= self.breaks:
            future.set_exception(self.error("a worker died"))
        else:
            future.set_result(function(*arguments, **options))
        return future


def test_lost_batches_are_retried_by_example(folder):
    found = sweep(METHOD, folder, examples(4), Breaking(1, RuntimeError), batch_size=2)
    assert found.failed == ()
    assert facts(found) == facts(
        sweep(METHOD, folder, examples(4), workers=0, batch_size=2)
    )


def test_an_example_that_always_fails_is_reported_with_the_reason(folder):
    broken = Breaking(99, RuntimeError)
    found = sweep(METHOD, folder, examples(2), broken, batch_size=2, retries=1)
    assert found.outcomes == ()
    assert found.failed == (
        ("0", "RuntimeError: a worker died"),
        ("1", "RuntimeError: a worker died"),
    )
    assert broken.asked == 1 + 2 * 2
    # The caller's own broken executor is not retried forever.
    with pytest.raises(KeyholeError, match="workers were lost"):
        sweep(METHOD, folder, examples(2), Breaking(99), batch_size=2, retries=5)


def test_wrong_input_is_raised_at_once(folder):
    with pytest.raises(InputError, match="no such folder"):
        sweep(METHOD, "/no/such/folder", examples(1), workers=0)
    with pytest.raises(InputError, match="batch_size"):
        sweep(METHOD, folder, examples(1), batch_size=0)
