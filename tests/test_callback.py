"""The callback of transformers' Trainer, in trainings of a tiny classifier."""

from __future__ import annotations

import json
import logging
import os

import pytest
import torch
import transformers

import keyhole
import tiny_classifiers
import tiny_models as tiny
from exposures import names
from keyhole import AuditCallback
from keyhole.callback import GaveAway
from keyhole.core import Audit
from keyhole.core.errors import InputError

WORDS = tiny.tokenizer()
TEXTS = ["w1 w2 w3 w4"]


def rows(count=8):
    """A tokenized dataset."""
    return [
        {**WORDS(each.text, padding="max_length", max_length=12), "labels": each.label}
        for each in tiny_classifiers.examples(count)
    ]


class Tracker(transformers.TrainerCallback):
    """A tracker, which accepts what is logged until its run is closed."""

    def __init__(self):
        self.logged = []
        self.closed = False

    def on_log(self, args, state, control, logs=None, **given):
        assert not self.closed
        self.logged.append(dict(logs))

    def on_train_end(self, args, state, control, **given):
        self.closed = True


def trainer(folder, *callbacks, epochs=2, **more):
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=epochs,
        per_device_train_batch_size=4,
        seed=1,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        logging_steps=1000,
    )
    return transformers.Trainer(
        tiny_classifiers.model(labels=2),
        arguments,
        train_dataset=rows(),
        processing_class=WORDS,
        callbacks=list(callbacks),
        **more,
    )


def test_the_end_of_training_has_a_report_and_figures(tmp_path):
    tracker = Tracker()
    made = trainer(tmp_path, tracker)
    callback = AuditCallback(TEXTS, exposures=["hidden:1", "kv:2"]).attach_to(made)
    made.train()
    audit = Audit.load(tmp_path / "keyhole-report.json")
    assert names(audit.findings) == [
        "hidden states of layer 1",
        "keys and values of layer 2",
    ]
    assert audit.exposed == 2
    assert audit == callback.audit
    page = (tmp_path / "keyhole-report.html").read_text("utf-8")
    assert "hidden states of layer 1" in page
    (figures,) = [logs for logs in tracker.logged if "keyhole/exposed" in logs]
    assert (figures["keyhole/exposed"], figures["keyhole/text"]) == (2.0, 1.0)
    assert figures["keyhole/unchecked"] == 0.0
    assert figures["keyhole/worst_score"] == 10.0
    assert any("keyhole/text" in logs for logs in made.state.log_history)
    assert "keyhole/weights" not in figures  # nobody looked


@pytest.mark.skipif(not os.environ.get("KEYHOLE_FULL"), reason="KEYHOLE_FULL=1 runs it")
def test_without_exposures_every_attack_that_applies_is_tried(tmp_path):
    callback = AuditCallback(TEXTS)
    made = trainer(tmp_path, epochs=1)
    callback.attach_to(made)
    made.train()
    assert {finding.sought for finding in callback.audit.findings} == {
        "text",
        "prediction",
    }
    assert made.state.log_history[-1]["keyhole/text"] == 1.0


def test_among_the_callbacks_its_figures_are_in_the_history(tmp_path):
    made = trainer(tmp_path, AuditCallback(TEXTS, exposures=["hidden:1"]), epochs=1)
    made.train()
    (figures,) = [logs for logs in made.state.log_history if "keyhole/exposed" in logs]
    assert figures["keyhole/text"] == 1.0
    assert json.dumps(figures)  # as trainer_state.json holds it


@pytest.mark.release
def test_training_is_the_same_with_audits_between_epochs(tmp_path):
    """It is the same bit for bit: audits restore modes, gradients and random state."""
    plain = trainer(tmp_path / "plain", epochs=3)
    plain.train()
    callback = AuditCallback(TEXTS, exposures=["hidden:1", "gradient"], every=1)
    audited = trainer(tmp_path / "audited", callback, epochs=3)
    audited.train()
    counted = [logs for logs in audited.state.log_history if "keyhole/exposed" in logs]
    assert [logs["epoch"] for logs in counted] == [1.0, 2.0, 3.0]
    for before, after in zip(
        plain.model.parameters(), audited.model.parameters(), strict=True
    ):
        assert torch.equal(before, after)
        assert after.requires_grad


def test_a_model_that_gives_away_too_much_fails_at_the_end(tmp_path):
    callback = AuditCallback(TEXTS, exposures=["hidden:1"], fail_on="high")
    with pytest.raises(GaveAway, match="critical: hidden states of layer 1"):
        trainer(tmp_path, callback, epochs=1).train()
    assert (tmp_path / "keyhole-report.html").exists()
    (example,) = tiny_classifiers.examples(1)
    allowed = AuditCallback(
        TEXTS, examples=[example], exposures=["flips"], fail_on="critical"
    )
    trainer(tmp_path / "allowed", allowed, epochs=1).train()


BROKEN = {"exposures": ["hidden:99"]}


def test_an_audit_that_fails_does_not_end_the_training(tmp_path, caplog):
    callback = AuditCallback(TEXTS, **BROKEN)
    made = trainer(tmp_path, callback, epochs=1)
    with caplog.at_level(logging.WARNING, "keyhole"):
        made.train()
    assert (
        "could not check the model: the layer of hidden:99 must be from 0 to 2"
        in caplog.text
    )
    audit = Audit.load(tmp_path / "keyhole-report.json")
    assert audit.exit_code == 3
    assert "must be from 0 to 2" in (tmp_path / "keyhole-report.html").read_text(
        "utf-8"
    )
    (figures,) = [logs for logs in made.state.log_history if "keyhole/exposed" in logs]
    assert figures["keyhole/unchecked"] == 1.0


@pytest.mark.parametrize(
    ("options", "error"),
    [({"strict": True}, InputError), ({"fail_on": "unknown"}, GaveAway)],
)
def test_unless_it_was_asked_for(tmp_path, options, error):
    with pytest.raises(error, match="must be from 0 to 2"):
        trainer(tmp_path, AuditCallback(TEXTS, **BROKEN, **options), epochs=1).train()


def test_a_folder_that_cannot_be_written_does_not_end_the_training(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    callback = AuditCallback(
        TEXTS, exposures=["hidden:1"], folder=tmp_path / "file" / "inside"
    )
    trainer(tmp_path, callback, epochs=1).train()
    assert "keyhole could not write its report" in caplog.text


def test_other_processes_do_nothing(tmp_path):
    callback = AuditCallback(TEXTS, exposures=["hidden:1"])
    made = trainer(tmp_path, callback, epochs=1)
    made.state.is_world_process_zero = False
    callback.on_train_end(made.args, made.state, made.control, model=made.model)
    assert callback.audit is None
    assert not (tmp_path / "keyhole-report.json").exists()


def test_wrong_input():
    with pytest.raises(InputError, match="fail_on must be one of none, unknown, low"):
        AuditCallback(TEXTS, fail_on="bad")
    with pytest.raises(InputError, match="every must be 1 or more"):
        AuditCallback(TEXTS, every=0)
    with pytest.raises(InputError, match="there are no texts"):
        AuditCallback([])
    assert keyhole.AuditCallback is AuditCallback
