"""Checks made by other processes give what this one gives, bit for bit."""

from __future__ import annotations

import json
import pickle
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import tiny_classifiers
import tiny_models as tiny
from keyhole import oracle
from keyhole.audit import AuditOptions, NamedTarget, audit, run
from keyhole.audit.check import joined
from keyhole.audit.target import open_target
from keyhole.core.errors import InputError
from keyhole.core.machine import device_of
from keyhole.core.progress import untracked
from keyhole.models.loading import close_kept, kept_open
from kill_points import lasting

TEXT = "w3 w14"
# A search for each kind of exposure is not what this is about.
ONLY = ("KH-TEXT-HIDDEN-STATES", "KH-TEXT-KEYS-AND-VALUES", "predictions")


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


def targets(place):
    options = AuditOptions(
        data=f"{place}/texts.tsv", texts=1, flips=2, layers=(1,), only=ONLY
    )
    return {
        "classifier": NamedTarget(f"{place}/classifier", options),
        "head": NamedTarget(f"{place}/head.safetensors"),
    }


@pytest.fixture(autouse=True)
def _nothing_stays_open():
    yield
    close_kept()


def facts(audit):
    """All that must be the same in every run, to the last bit."""
    return lasting(json.loads(json.dumps(audit.to_dict())))


@pytest.mark.parametrize("name", ["classifier", "head"])
def test_a_worker_that_is_sent_names_finds_the_same(name, place):
    """Sent as processes send it; every check alone, the last one first."""
    named = targets(place)[name]
    sent = []
    opened = named.open()
    checks = run.numbered(run.checks_of(opened, named.options))
    for key in reversed(checks):
        sent.append(pickle.dumps((named, opened.identity, key)))
        assert len(sent[-1]) < 2_000
    made = joined(run.run_in_worker(*pickle.loads(each)) for each in reversed(sent))
    here = joined(check.run(untracked) for check in checks.values())
    assert [replace(each, seconds=0) for each in made.findings] == [
        replace(each, seconds=0) for each in here.findings
    ]
    assert made.skips == here.skips


@pytest.mark.release
def test_two_processes_give_what_this_one_gives(place, monkeypatch):
    """All checks of a model by its relative name, in the order of the findings."""
    monkeypatch.chdir(place)
    options = {"data": "texts.tsv", "texts": 1, "flips": 2, "layers": [1]}
    alone = audit("classifier", **options)
    assert {finding.sought for finding in alone.findings} == {"text", "prediction"}
    shared = audit("classifier", **options, processes=2)
    assert facts(shared) == facts(alone)


def test_a_target_is_named_as_it_was_given_wherever_a_worker_runs(place, monkeypatch):
    monkeypatch.chdir(place.parent)
    for name in ("head.safetensors", "encoder"):
        given = NamedTarget(f"{place.name}/{name}")
        whole = given.open()
        sent = given.anywhere()
        monkeypatch.chdir("/")
        assert sent.place == f"{place}/{name}"
        opened = sent.open()
        assert (opened.name, opened.identity) == (whole.name, whole.identity)
        assert [part.name for part in opened.parts] == [
            part.name for part in whole.parts
        ]
        assert given.name in opened.name
        monkeypatch.chdir(place.parent)


def test_another_target_at_the_same_place_is_refused(place):
    with pytest.raises(InputError, match="head:old where the audit began: it must"):
        run.run_in_worker(targets(place)["head"], "head:old", "1. any")


def test_one_target_is_open_at_a_time():
    opened = []
    closed = []

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


def test_what_asks_a_server_or_keeps_a_ledger_stays_on_this_machine():
    assert NamedTarget("http://127.0.0.1:1/v2/models/m").local_only
    assert NamedTarget("postgresql://u:secret@h/db").local_only
    assert NamedTarget("head.safetensors", AuditOptions(ledger="run.db")).local_only
    assert not NamedTarget("head.safetensors").local_only
    assert "secret" not in repr(NamedTarget("postgresql://u:secret@h/db"))


def test_of_several_gpus_each_worker_takes_one():
    assert [device_of("cuda", worker, gpus=3) for worker in range(5)] == [
        "cuda:0",
        "cuda:1",
        "cuda:2",
        "cuda:0",
        "cuda:1",
    ]
    assert device_of("cuda", 4, gpus=1) == "cuda"
    assert device_of("cuda:1", 0, gpus=4) == "cuda:1"
    assert device_of("cpu", 3, gpus=4) == "cpu"


def test_a_model_without_data_is_tried_with_as_many_texts_as_asked_for(place):
    for count, tried in ((None, 3), (1, 1), (2, 2), (9, 3)):
        opened = open_target(f"{place}/encoder", texts=count)
        assert [len(model.texts) for model in opened.models.values()] == [tried]


def test_touched_files_are_another_target(place, tmp_path):
    named = NamedTarget(str(tmp_path / "copy.safetensors"))
    (tmp_path / "copy.safetensors").write_bytes(
        (place / "head.safetensors").read_bytes()
    )
    before = named.fingerprint()
    assert named.fingerprint() == before
    assert replace(named, options=AuditOptions(seed=1)).fingerprint() != before
    Path(named.name).write_bytes(b"other")
    assert named.fingerprint() != before


def test_pickled_weights_are_opened_when_allowed(place, tmp_path):
    shutil.copytree(
        place / "encoder", tmp_path / "pickled", ignore=lambda *_: ["model.safetensors"]
    )
    torch.save(
        load_file(place / "encoder" / "model.safetensors"),
        tmp_path / "pickled/pytorch_model.bin",
    )
    name = str(tmp_path / "pickled")
    options = {"data": f"{place}/texts.tsv", "texts": 1}
    with pytest.raises(InputError, match="only pickled ones: --allow-pickle"):
        open_target(name, **options)
    assert open_target(name, **options, allow_pickle=True).parts


def test_as_many_answers_of_the_demo_are_tried_as_flips_says():
    (model,) = open_target("demo", flips=2).models.values()
    assert len(model.examples) == 2
