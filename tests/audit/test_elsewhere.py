"""Checks made by other processes give what this one gives, bit for bit."""

from __future__ import annotations

import json
import os
import pickle
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

import tiny_classifiers
import tiny_models as tiny
from keyhole import oracle
from keyhole.audit import audit, elsewhere
from keyhole.audit.opening import Opening
from keyhole.core.errors import InputError
from keyhole.core.machine import device_of
from keyhole.models.loading import close_kept, kept_open
from kill_points import lasting

TEXT = "w3 w14 w15 w92 w65"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A classifier, an encoder without a head, and a planted endpoint."""
    folder = tmp_path_factory.mktemp("targets")
    model = tiny_classifiers.model(seed=2, labels=2)
    model.save_pretrained(folder / "classifier")
    tiny.tokenizer().save_pretrained(folder / "classifier")
    tiny.save("bert", folder / "encoder")
    oracle.save(oracle.plant(dim=3, seed=1), folder / "head.safetensors")
    (folder / "texts.tsv").write_text(f"sentence\tlabel\n{TEXT}\t0\nw5 w6 w7\t1\n")
    return folder


def openings(place):
    return {
        "classifier": Opening(
            f"{place}/classifier", data=f"{place}/texts.tsv", texts=1, flips=2, layers=(1,)
        ),
        "head": Opening(f"{place}/head.safetensors"),
    }


@pytest.fixture(autouse=True)
def _nothing_stays_open():
    yield
    close_kept()


def facts(audit):
    """All that must be the same in every run, to the last bit."""
    return lasting(json.loads(json.dumps(audit.to_dict())))


def here(opening):
    return audit(
        opening.target, data=opening.data, texts=opening.texts, flips=opening.flips,
        layers=opening.layers, seed=opening.seed,
    )  # fmt: skip


@pytest.mark.parametrize("name", ["classifier", "head"])
def test_a_worker_that_is_sent_names_finds_the_same(name, place):
    """Sent as processes send it; every check alone, the last one first."""
    opening = openings(place)[name]
    plan = pickle.loads(pickle.dumps(elsewhere.plan_of(opening)))
    close_kept()
    made = {}
    for key in reversed(plan.checks):
        sent = pickle.dumps((opening, plan.identity, key))
        assert len(sent) < 2_000
        made[key] = elsewhere.make(*pickle.loads(sent))
    checked = elsewhere.Checked(
        tuple(finding for key in plan.checks for finding in made[key].findings),
        tuple(skip for key in plan.checks for skip in made[key].skips),
    )
    there = plan.audit(checked, 0.0)
    assert facts(there) == facts(here(opening))
    assert plan == type(plan).from_dict(plan.to_dict())


@pytest.mark.skipif(not os.environ.get("KEYHOLE_FULL"), reason="KEYHOLE_FULL=1 runs it")
def test_two_processes_give_what_this_one_gives(place, monkeypatch):
    """All checks of a model by its relative name, in the order of the findings."""
    monkeypatch.chdir(place)
    options = {"data": "texts.tsv", "texts": 1, "flips": 2, "layers": [1]}
    alone = audit("classifier", **options)
    assert {finding.part for finding in alone.findings} == {"classifier"}
    shared = audit("classifier", **options, processes=2)
    assert facts(shared) == facts(alone)


def test_a_target_is_named_as_it_was_given_wherever_a_worker_runs(place, monkeypatch):
    monkeypatch.chdir(place.parent)
    given = replace(openings(place)["head"], target=f"{place.name}/head.safetensors")
    sent = given.anywhere()
    monkeypatch.chdir("/")
    plan = elsewhere.plan_of(sent)
    assert plan.name.endswith(f"({given.target})")
    assert sent.place == f"{place}/head.safetensors"


def test_another_target_at_the_same_place_is_refused(place):
    opening = openings(place)["head"]
    with pytest.raises(InputError, match=r"expected the target head:old at .*, got head:"):
        elsewhere.make(opening, "head:old", "1. any")


def test_one_target_is_open_at_a_time():
    opened, closed = [], []

    def make(name, resources):
        opened.append(name)
        resources.callback(closed.append, name)
        return name

    for name in ("first", "first", "second"):
        with kept_open(name, partial(make, name)) as value:
            assert value == name
    assert (opened, closed) == (["first", "second"], ["first"])
    close_kept()
    assert closed == opened


def test_what_asks_a_server_or_keeps_a_ledger_stays():
    assert Opening("http://127.0.0.1:1/v2/models/m").stays
    assert Opening("postgresql://u:secret@h/db").stays
    assert Opening("head.safetensors", ledger="run.db").stays
    assert not Opening("head.safetensors").stays
    assert "secret" not in repr(Opening("postgresql://u:secret@h/db"))


def test_of_several_gpus_each_worker_takes_one():
    assert [device_of("cuda", worker, gpus=3) for worker in range(5)] == [
        "cuda:0", "cuda:1", "cuda:2", "cuda:0", "cuda:1",
    ]  # fmt: skip
    assert device_of("cuda", 4, gpus=1) == "cuda"
    assert device_of("cuda:1", 0, gpus=4) == "cuda:1"
    assert device_of("cpu", 3, gpus=4) == "cpu"


def test_touched_files_are_another_target(place, tmp_path):
    opening = Opening(str(tmp_path / "copy.safetensors"))
    (tmp_path / "copy.safetensors").write_bytes((place / "head.safetensors").read_bytes())
    before = opening.fingerprint()
    assert opening.fingerprint() == before
    assert replace(opening, seed=1).fingerprint() != before
    Path(opening.target).write_bytes(b"other")
    assert opening.fingerprint() != before
    assert opening.size == 5
