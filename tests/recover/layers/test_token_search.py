"""The search for exposures without a closed form: attention outputs, pooled embeddings."""

from __future__ import annotations

import pytest
import torch

import tiny_models as tiny
from keyhole.core import Status
from keyhole.models import Exposure, capture
from keyhole.recover import (
    EncoderStates,
    SubLayerOutput,
    TokenSearch,
    recover_text,
)
from keyhole.recover.attack import Target
from keyhole.recover.layers.token_search import Prior, Vocabulary
from keyhole.recover.layers.trials import Comparison, substitute
from keyhole.recover.leaks import AttentionOutput

TOKENIZER = tiny.tokenizer()
QUICK = TokenSearch(rounds=2, passes=30, candidates=8)
BRIEF = TokenSearch(rounds=1, passes=12, candidates=8)
STATES = EncoderStates(rounds=4, opening=4, most=0)


@pytest.fixture(scope="module")
def bert():
    return tiny.shared("bert")


def output_of(model, ids, layer=1):
    return capture(model, Exposure("attention", layer), ids=ids)["values"][0]


def test_the_vocabularys_coordinates_are_round(bert):
    words = Vocabulary.of(Target.of(bert, TOKENIZER))
    weights = words.log_frequency.exp()
    assert float(weights.sum()) == pytest.approx(1.0, rel=1e-4)
    assert float(weights[:5].max()) < 1e-20  # no text holds special tokens
    round_ = (words.table - words.mean) @ words.whiten
    moment = (weights[:, None] * round_).T @ round_
    assert torch.allclose(moment, torch.eye(len(moment)), atol=1e-3)
    assert torch.allclose(
        words.factor @ words.whiten, torch.eye(len(moment)), atol=1e-4
    )


def test_a_narrowed_prior_is_the_candidates_mean(bert):
    words = Vocabulary.of(Target.of(bert, TOKENIZER))
    agreement = torch.full((2, len(words.table)), -1e4)
    agreement[0, 17] = 0.0
    agreement[1, 20] = 0.0
    agreement[1, 30] = 0.0
    prior = Prior.among(words, agreement)
    assert torch.allclose(prior.means[0], words.table[17], atol=1e-5)
    assert torch.allclose(prior.means[1], words.table[[20, 30]].mean(0), atol=1e-5)
    at = torch.zeros(2, prior.factors.shape[1])
    assert torch.equal(prior.embed(at), prior.means)


def test_trials_repair_a_text(bert):
    target = Target.of(bert, TOKENIZER)
    ids = tiny.ids(1, 9)[0]
    comparison = Comparison.of(target, AttentionOutput(output_of(bert, ids[None]), 1))
    broken = ids.clone()
    broken[[2, 5]] = 50
    candidates = torch.stack([torch.full_like(ids, 60), ids, torch.full_like(ids, 70)])
    tried = substitute(comparison, broken, candidates, target.framed(9), sweeps=3)
    assert torch.equal(tried.ids, ids)
    assert tried.loss <= comparison.tolerance
    assert tried.forwards >= 3 * 7
    untouched = substitute(comparison, broken, candidates, ids, sweeps=3)
    assert torch.equal(untouched.ids, broken)


@pytest.mark.parametrize("family", tiny.ENCODERS)
def test_sub_layer_output(family):
    model = tiny.shared(family)
    ids = tiny.ids(1, 8, seed=1)
    leak = AttentionOutput(output_of(model, ids), 1)
    result = recover_text(model, TOKENIZER, leak, method=SubLayerOutput(QUICK, STATES))
    assert result.ids == ids[0].tolist()
    assert result.verified


def test_sub_layer_output_rounded_and_with_gaps(bert):
    ids = tiny.ids(1, 8, seed=2)
    leak = AttentionOutput(output_of(bert, ids).bfloat16(), 1)
    result = recover_text(bert, TOKENIZER, leak, method=SubLayerOutput(QUICK, STATES))
    assert result.ids == ids[0].tolist()
    values = output_of(bert, ids)
    values[3] = torch.nan
    result = recover_text(
        bert,
        TOKENIZER,
        AttentionOutput(values, 1),
        method=SubLayerOutput(BRIEF, STATES),
    )
    assert len(result.ids) == 8
    assert not result.verified or result.ids == ids[0].tolist()


def test_another_models_output_is_never_verified(bert):
    ids = tiny.ids(1, 7, seed=3)
    leak = AttentionOutput(output_of(tiny.shared("bert", seed=1), ids), 1)
    result = recover_text(bert, TOKENIZER, leak, method=SubLayerOutput(BRIEF, STATES))
    assert not result.verified
    assert result.status is not Status.RECOVERED
