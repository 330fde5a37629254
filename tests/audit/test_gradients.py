"""The audit's own batch: read back from its gradient, or a reason why that was not tried."""

from __future__ import annotations

import torch
import transformers

import tiny_architectures
import tiny_models as tiny
from keyhole.audit import gradients
from keyhole.audit.texts import TextTarget
from keyhole.core import Outcome, Status
from keyhole.core.progress import untracked
from keyhole.models.loading import Loaded, identity

TEXTS = ("w1 w2 w3 w4", "w9 w8 w7 w6 w5")


def target(family, head, **changes):
    model = tiny.model(family, head=head, **changes)
    words = tiny.tokenizer(family in tiny.DECODERS)
    return TextTarget(Loaded(model, words, identity(model), family), TEXTS)


def test_the_texts_come_back():
    for family, head in (
        ("bert", "AutoModelForSequenceClassification"),
        ("llama", "AutoModelForCausalLM"),
    ):
        (check,) = gradients.checks("", target(family, head), 0)
        (finding,) = check.run(untracked).findings
        assert finding.status is Status.RECOVERED, finding.reason
        assert finding.exposed
        assert finding.reason.startswith(
            "2 of 2 texts exact and verified; tokens right: float32 100%"
        )
        assert [cell.precision for cell in finding.texts] == ["float32", "bfloat16"]
        assert all(reading.exact for reading in finding.texts[0].readings)
        for (
            cell
        ) in finding.texts:  # whatever rounding leaves: nothing wrong is vouched for
            assert all(reading.exact for reading in cell.readings if reading.verified)


def test_tokens_are_given_away_where_texts_are_not():
    narrow = target(
        "bert", "AutoModelForSequenceClassification", hidden_size=8, intermediate_size=8
    )
    (check,) = gradients.checks("", narrow, 0)
    (finding,) = check.run(untracked).findings
    assert finding.status is Status.INEXACT
    assert finding.exposed
    assert finding.reason.startswith("0 of 2 texts")
    assert "100% of the batch's tokens known, in no order" in finding.reason


def of_another_kind(family):
    """A classifier of a kind that tests/tiny_architectures.py knows, with the words of TEXTS."""
    config = tiny_architectures.CONFIGS[family]()
    config.vocab_size = tiny.SHAPE["vocab_size"]
    config.initializer_range = 0.12
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForSequenceClassification.from_config(
            config
        ).eval()
    return TextTarget(tiny.loaded(model, name=family), TEXTS)


def test_embeddings_narrower_than_the_model_are_widened():
    (check,) = gradients.checks("", of_another_kind("electra"), 0)
    (finding,) = check.run(untracked).findings
    assert finding.status is Status.RECOVERED, finding.reason
    assert all(reading.verified for reading in finding.texts[0].readings)


def test_an_attack_that_does_not_apply_has_checked_nothing():
    (check,) = gradients.checks("", of_another_kind("modernbert"), 0)
    (finding,) = check.run(untracked).findings
    assert finding.status is Status.NOT_APPLICABLE
    assert finding.outcome is Outcome.UNCHECKED
    assert "gradients do not say where tokens are" in finding.reason


def test_what_has_no_loss_is_said():
    (check,) = gradients.checks("", target("bert", "AutoModel"), 0)
    (skip,) = check.run(untracked).skips
    assert "no head" in skip.reason


def test_one_block_is_said():
    one_layer = target(
        "bert", "AutoModelForSequenceClassification", num_hidden_layers=1
    )
    (check,) = gradients.checks("", one_layer, 0)
    (skip,) = check.run(untracked).skips
    assert "second block" in skip.reason


def test_half_precision_is_said():
    half = target("llama", "AutoModelForCausalLM")
    half.loaded.model.bfloat16()
    (check,) = gradients.checks("", half, 0)
    (skip,) = check.run(untracked).skips
    assert "half precision" in skip.reason
