"""AttentionSubLayer: planted sub-layers and tiny checkpoints as witness, also over the network."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

import pytest
import torch
from planted_layers import layer
from planted_sub_layers import BERT, LLAMA, planted

import served_target
import tiny_architectures as tiny
from keyhole import extract, oracle
from keyhole.core.errors import InputError
from keyhole.extract import AttentionSubLayer, Status
from keyhole.models.block import sub_layer
from keyhole.oracle import OpenInference, SubLayer

KINDS = {
    "attention alone": BERT,
    "attention and residual": {**BERT, "residual": True},
    "behind a norm": LLAMA,
    "behind a norm, no residual": {**LLAMA, "residual": False},
}


def forms(target: SubLayer, places: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What all parameters of one function agree on: scores of keys so many places in
    front, and values, both (H, …, d), heads in the order of their largest value.
    """
    each = len(target.Q) // len(target.K)
    K = target.K
    if target.rotary:
        angles = -places * target.frequencies.unsqueeze(1)
        x, y = K.chunk(2, -1)
        cos = angles.cos()
        sin = angles.sin()
        K = torch.cat([x * cos - y * sin, x * sin + y * cos], -1)
    Q = torch.cat([target.q.unsqueeze(1), target.Q], 1)
    W = Q @ K.repeat_interleave(each, 0).mT
    M = target.V.repeat_interleave(each, 0) @ target.O
    order = M.flatten(1).amax(1).argsort()
    return W[order], M[order]


def apart(found: torch.Tensor, truth: torch.Tensor) -> float:
    return float((found - truth).abs().max() / truth.abs().max())


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_scores_and_values_come_back(kind):
    truth = planted(**kind, seed=1)
    result = AttentionSubLayer(seed=1)(truth)
    assert result.status is Status.RECOVERED
    found = result.model
    assert isinstance(found, SubLayer)
    assert (found.residual, found.rotary) == (truth.residual, truth.rotary)
    assert found.Q.shape == truth.Q.shape
    assert found.K.shape == truth.K.shape
    if truth.epsilon is not None:
        assert found.epsilon == pytest.approx(truth.epsilon, rel=1e-10)
    for places in (0, 1, 40):
        for one_of, other in zip(
            forms(found, places), forms(truth, places), strict=True
        ):
            assert apart(one_of, other) < 1e-6
    assert (
        apart(found.b, truth.b) < 1e-12
        if bool(truth.b.any())
        else not bool(found.b.any())
    )
    assert result.lower_bound == -(-truth.unknowns // truth.outputs)


def test_every_tokens_answers_come_back_too():
    truth = planted(**{**LLAMA, "every_token": True}, seed=2)
    result = AttentionSubLayer(seed=2)(truth)
    assert result.status is Status.RECOVERED
    assert isinstance(result.model, SubLayer)
    assert (result.model.every_token, result.model.causal) == (True, True)


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_a_tiny_checkpoint(family):
    model = tiny.model(family, seed=3)
    target = sub_layer(model, 1, residual=True)
    result = AttentionSubLayer()(target)
    assert result.status is Status.RECOVERED
    assert result.check is not None
    assert result.check.worst <= 1e-8
    assert "4 heads of width 8" in result.reason
    assert ("2 share keys and values each" in result.reason) == (family == "llama")


def test_auto_turns_to_it_where_a_bare_layer_does_not_fit():
    result = extract.Auto()(planted(residual=True))
    assert result.status is Status.RECOVERED
    assert "AttentionSubLayer" in result.reason


def test_a_bare_layer_is_a_sub_layer_too():
    truth = layer(d=12, heads=2, m=12, every=False, seed=4)
    low = replace(
        truth,
        W=truth.W[:, :, :4] @ truth.W[:, :4],
        V=truth.V[:, :, :4] @ truth.V[:, :4],
    )
    assert AttentionSubLayer()(low).status is Status.RECOVERED


class NormBehind:
    """A LayerNorm behind: the mean and the length of every answer are gone."""

    def __init__(self, inner: SubLayer) -> None:
        self.inner = inner
        self.dim = inner.dim

    def __call__(self, sequences: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.layer_norm(self.inner(sequences), (self.dim,))


@pytest.mark.parametrize(
    ("target", "status", "reason"),
    [
        (NormBehind(planted(residual=True)), Status.NOT_APPLICABLE, "a norm behind"),
        (oracle.plant(dim=6), Status.NOT_APPLICABLE, "expected vectors"),
        (oracle.Rounded(planted(), 6), Status.NOT_APPLICABLE, ""),
        (planted(heads=4, groups=4), Status.NOT_APPLICABLE, "independent"),
    ],
    ids=["norm behind", "scores", "rounded", "more than the outputs hold"],
)
def test_what_cannot_be_told_is_a_status(target, status, reason):
    result = AttentionSubLayer()(target)
    assert result.status in (status, Status.MISMATCH)
    assert reason in result.reason


def test_a_budget_ends_it():
    result = extract.run(planted(), AttentionSubLayer(), budget=40)
    assert result.status is Status.BUDGET
    assert result.queries == 40


def test_a_block_of_a_model_is_a_target():
    result = extract.run("demo:attention.0", "attention-sub-layer", budget=3)
    assert result.status is Status.BUDGET
    for wrong in ("demo:attention.x", "demo:attention.0+norm"):
        with pytest.raises(InputError, match=r"must end in :attention\.LAYER"):
            extract.run(wrong)


@pytest.mark.slow  # a server
@pytest.mark.release
def test_over_the_network(tmp_path):
    target = planted(**LLAMA, seed=5)
    with (
        served_target.served(target, tmp_path) as url,
        closing(OpenInference(url, "target")) as remote,
    ):
        result = AttentionSubLayer(seed=5)(remote)
    assert result.status is Status.RECOVERED
    assert apart(forms(result.model, 1)[0], forms(target, 1)[0]) < 1e-6
