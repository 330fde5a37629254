"""Small work uses one thread and large work all cores, unless somebody chose a number."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import keyhole
import tiny_models
from keyhole.audit.target import target_of
from keyhole.core.machine import LARGE, largest_matrix, threads_for
from keyhole.models import demo, load_model

CORES = 3


@pytest.fixture(autouse=True)
def _unchosen(monkeypatch):
    """A machine with three cores, on which nobody has chosen a number of threads."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch, "get_num_interop_threads", lambda: CORES)
    monkeypatch.setattr(
        "os.sched_getaffinity", lambda _: set(range(CORES)), raising=False
    )
    torch.set_num_threads(CORES)  # conftest.py sets back what there was


@pytest.mark.parametrize(("size", "threads"), [(0, 1), (LARGE - 1, 1), (LARGE, CORES)])
def test_by_size(size, threads):
    with threads_for(size):
        assert torch.get_num_threads() == threads
    assert torch.get_num_threads() == CORES


def test_set_back_where_the_work_fails():
    with pytest.raises(ZeroDivisionError), threads_for(0):
        raise ZeroDivisionError
    assert torch.get_num_threads() == CORES


def test_a_callers_number_stands():
    torch.set_num_threads(2)
    with threads_for(0):
        assert torch.get_num_threads() == 2
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "MKL_NUM_THREADS"])
def test_the_environments_number_stands(monkeypatch, name):
    monkeypatch.setenv(name, str(CORES))
    with threads_for(0):
        assert torch.get_num_threads() == CORES


def test_part_of_the_cores(monkeypatch):
    """A process that may use two of the cores starts with two threads, which nobody chose."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1}, raising=False)
    torch.set_num_threads(2)
    with threads_for(0):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2


def test_inside_small_work_all_is_small():
    with threads_for(0), threads_for(LARGE):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == CORES


def test_the_largest_matrix_is_none_that_is_looked_up():
    table = nn.Embedding(1000, 8)
    layer = nn.Linear(8, 32)
    assert largest_matrix(nn.Sequential(table, layer, nn.LayerNorm(32))) == 8 * 32
    assert largest_matrix(nn.LayerNorm(32)) == 0


def test_the_classifier_that_ships_is_small():
    assert largest_matrix(demo.load_demo("classification").model) < LARGE


def threads_during(work) -> set[int]:
    """The numbers of threads that a command had when it reported progress."""
    seen: set[int] = set()

    def track(name, total=None):
        return lambda done, total=None, note="": seen.add(torch.get_num_threads())

    work(track)
    assert torch.get_num_threads() == CORES
    return seen


def test_an_audit_of_a_small_target_takes_one():
    def work(track):
        assert (
            keyhole.audit(keyhole.oracle.plant(dim=3), track=track).environment[
                "threads"
            ]
            == "1"
        )

    assert threads_during(work) == {1}


def test_so_do_texts_that_are_read_back(tmp_path):
    tiny_models.save("bert", tmp_path / "model")
    loaded = load_model(tmp_path / "model")
    leaks = keyhole.recover.capture(
        loaded, "w1 w2", "hidden:1", out=tmp_path / "leak.safetensors"
    )
    assert threads_during(
        lambda track: keyhole.recover.run(loaded, leaks, track=track)
    ) == {1}


def test_so_do_predictions_that_are_flipped():
    seen: list[int] = []

    class Watched(keyhole.disrupt.HackAttend):
        def __call__(self, *arguments, **options):
            seen.append(torch.get_num_threads())
            return super().__call__(*arguments, **options)

    keyhole.disrupt.run("demo", method=Watched(), examples=1)
    assert seen == [1]
    assert torch.get_num_threads() == CORES


def test_an_endpoint_of_long_vectors_is_large():
    def target(dim):
        return target_of(keyhole.oracle.plant(dim=dim))

    assert target(3).size < LARGE <= target(512).size
