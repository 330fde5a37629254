"""`keyhole.recover.run` and `capture`: leaks are written, read, resumed and saved as results."""

from __future__ import annotations

import json

import pytest

import tiny_models as tiny
from keyhole import recover
from keyhole.core import Status
from keyhole.core.errors import InputError
from keyhole.models import Loaded, identity
from keyhole.recover import TextRecovery

WORDS = ("w1 w20 w3 w4", "w9 w8 w77 w66 w3")


def loaded(family="bert", **options):
    model = tiny.model(family, num_hidden_layers=2, **options)
    return Loaded(
        model, tiny.tokenizer(family in tiny.DECODERS), identity(model), family
    )


def test_what_is_captured_is_recovered(tmp_path):
    subject = loaded()
    paths = recover.capture(
        subject, WORDS, "hidden:2", out=tmp_path / "leaks", precision="int8"
    )
    assert [path.name for path in paths] == [
        "leak-0000.safetensors",
        "leak-0001.safetensors",
    ]
    results = recover.run(subject, tmp_path / "leaks")
    assert [result.text for result in results] == list(WORDS)
    opened = [recover.load_leak(path) for path in paths]
    again = recover.run(subject, opened, method="encoder-states")
    assert [result.ids for result in again] == [result.ids for result in results]


def test_a_run_goes_on_where_it_stopped(tmp_path):
    subject = loaded()
    out = tmp_path / "texts.jsonl"
    leaks = [
        recover.leak_of(subject.model, subject.tokenizer, text, "kv:1")
        for text in WORDS
    ]
    assert len(recover.run(subject, leaks[0], out=out)) == 1
    read = []
    recover.run(subject, leaks, out=out, truth=WORDS, notify=read.append)
    assert [(text.number, text.before) for text in read] == [(0, True), (1, False)]
    assert [(text.exact, text.shared.f1) for text in read] == [(True, 1.0)] * 2
    assert read[0].digest == leaks[0].digest != leaks[1].digest
    header, *lines = map(json.loads, out.read_text().splitlines())
    assert header == {"run": "text recovery", "model": subject.identity, "method": None}
    assert [line["digest"] for line in lines] == [leak.digest for leak in leaks]
    assert list(lines[0])[1:5] == ["leak", "digest", "format", "kind"]
    assert [result.text for result in recover.run(subject, leaks, out=out)] == list(
        WORDS
    )
    anonymous = [
        recover.KeyValues(leak.keys, leak.values, leak.layer) for leak in leaks
    ]
    with pytest.raises(InputError, match="this run has model"):
        recover.run(loaded(hidden_act="relu"), anonymous, out=out)


def test_leaks_files_and_arrays_in_one_list(tmp_path):
    subject = loaded()
    leaks = [
        recover.leak_of(subject.model, subject.tokenizer, text, "hidden:1")
        for text in WORDS
    ]
    leaks[0].save(tmp_path / "leak.safetensors")
    for first in (leaks[0], tmp_path / "leak.safetensors"):
        results = recover.run(
            subject, [first, leaks[1].values.numpy()], expose="hidden:1"
        )
        assert [result.text for result in results] == list(WORDS)
    with pytest.raises(InputError, match=r"none\.npy"):
        recover.run(
            subject, [leaks[1].values, str(tmp_path / "none.npy")], expose="hidden:1"
        )
    for inside in (leaks[0], tmp_path / "leak.safetensors"):
        with pytest.raises(InputError, match="expected arrays only inside"):
            recover.run(subject, {"a": leaks[1].values, "b": inside}, expose="hidden:1")


def test_progress_counts_tokens():
    subject = loaded()
    seen = []

    def track(name, total=None):
        seen.append((name, total))
        return lambda done, total=None, note="": seen.append((done, total))

    leaks = [
        recover.leak_of(subject.model, subject.tokenizer, text, "hidden:1")
        for text in WORDS
    ]
    recover.run(subject, leaks, track=track)
    assert seen[:3] == [("recover", 2), (0, None), ("tokens from hidden:1", 13)]
    assert (13, 13) in seen
    assert seen[-1] == (2, None)


def test_wrong_calls(tmp_path):
    subject = loaded()
    leak = recover.leak_of(subject.model, subject.tokenizer, WORDS[0], "hidden:1")
    with pytest.raises(InputError, match="no leak was given"):
        recover.run(subject, [])
    with pytest.raises(
        InputError, match="cached-keys does not read hidden:1 of an encoder"
    ):
        recover.run(subject, leak, method="cached-keys", out=tmp_path / "none.jsonl")
    assert not (tmp_path / "none.jsonl").exists()
    with pytest.raises(InputError, match="no text was given"):
        recover.capture(subject, [], "hidden:1")
    with pytest.raises(InputError, match="2 leaks need a folder"):
        recover.capture(subject, WORDS, "hidden:1", out=tmp_path / "leak.safetensors")


def test_a_recovery_is_saved_and_loaded(tmp_path):
    subject = loaded()
    leak = recover.leak_of(subject.model, subject.tokenizer, WORDS[0], "hidden:1")
    result = recover.recover_text(subject.model, subject.tokenizer, leak)
    result.save(tmp_path / "text.json")
    again = TextRecovery.load(tmp_path / "text.json")
    assert again == result
    assert again.status is Status.RECOVERED
    assert again.marks == result.marks
    lines = repr(again).splitlines()
    assert lines[0].startswith("TextRecovery: recovered (residual")
    assert lines[1].strip() == WORDS[0]
    assert lines[2].strip() == "6 verified of 6 tokens"
    assert lines[3].endswith("Treat this exposure as the text itself.")
