"""A client's update: the library's own gradient, clipped, with noise, or after several steps."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.func import functional_call

import tiny_models as tiny
from keyhole.core.errors import InputError
from keyhole.recover.gradients import Batch, Protocol, Update, load_update, update_of
from keyhole.recover.gradients.update import DELTA, adapters_of, epsilon_of, noise_for

HEADS = {
    "classification": "AutoModelForSequenceClassification",
    "causal": "AutoModelForCausalLM",
}


def case(family, task, texts=3):
    model = tiny.model(family, head=HEADS[task])
    causal = family in tiny.DECODERS
    ids = tiny.ids(texts, 7, causal=causal).tolist()
    ids[0] = ids[0][:5]  # one is shorter: there is padding
    if task == "classification":
        labels = tuple(number % 2 for number in range(texts))
    else:
        labels = ()
    return model, Batch(tuple(map(tuple, ids)), labels)


@pytest.mark.parametrize(
    ("family", "task"), [("bert", "classification"), ("llama", "causal")]
)
def test_it_is_the_gradient_of_the_library_s_own_loss(family, task):
    model, batch = case(family, task)
    update = update_of(model, batch)
    ids, mask = batch.padded(0, torch.device("cpu"))
    if batch.labels:
        labels = torch.tensor(batch.labels)
    else:
        labels = ids.masked_fill(mask == 0, -100)
    model.requires_grad_(True)
    model(input_ids=ids, attention_mask=mask, labels=labels).loss.backward()
    for name, weight in model.named_parameters():
        if weight.grad is not None:
            assert torch.allclose(update.values[name], weight.grad, atol=1e-6), name


def test_each_text_is_clipped_and_noise_has_its_strength():
    model, batch = case("bert", "classification")
    clipped = update_of(model, batch, Protocol(clip=1e-3))
    length = torch.stack([each.norm() for each in clipped.values.values()]).norm()
    assert 0 < float(length) <= 1e-3
    noisy = update_of(model, batch, Protocol(clip=1e-3, noise=2.0), seed=3)
    off = torch.cat(
        [(noisy.values[n] - clipped.values[n]).flatten() for n in clipped.values]
    )
    assert float(off.std()) == pytest.approx(2.0 * 1e-3 / 3, rel=0.02)


@pytest.mark.parametrize("epsilon", [1.0, 4.0, 8.0])
def test_noise_gives_its_privacy(epsilon):
    noise = noise_for(epsilon)
    at, step = np.linspace(-40, 40, 400_001, retstep=True)
    there, absent = (
        np.exp(-((at - mean) ** 2) / (2 * noise**2)) for mean in (1.0, 0.0)
    )
    more = np.maximum(there - np.exp(epsilon) * absent, 0).sum() * step
    assert more / (noise * np.sqrt(2 * np.pi)) == pytest.approx(DELTA, rel=1e-3)
    assert epsilon_of(noise) == pytest.approx(epsilon)
    assert Protocol(clip=0.5, epsilon=epsilon).noise_in(2) == pytest.approx(
        noise * 0.5 / 2
    )


@pytest.mark.parametrize("noise", [1e-6, 1e-3, 0.1])
def test_little_noise_gives_little_privacy(noise):
    assert 0.5 / noise**2 < epsilon_of(noise) < 0.5 / noise**2 + 9 / noise
    assert epsilon_of(1e6) == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_adapters_get_their_own_gradients(family):
    """Against autograd through W + B·A, with A and B as leaves."""
    model, batch = case(family, "classification")
    model.config.pad_token_id = 0
    rules = Protocol(lora=3)
    update = update_of(model, batch, rules)
    adapters = adapters_of(model, rules)
    leaves = {name: each.requires_grad_() for name, each in adapters.items()}
    weights = dict(model.named_parameters())
    for name in {each.rsplit("lora_", 1)[0] for each in leaves}:
        change = leaves[f"{name}lora_B.weight"] @ leaves[f"{name}lora_A.weight"]
        change = change.mT if family == "gpt2" else change
        weights[f"{name}weight"] = weights[f"{name}weight"] - change.detach() + change
    ids, mask = batch.padded(0, torch.device("cpu"))
    given = {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": torch.tensor(batch.labels),
    }
    functional_call(model, weights, kwargs=given).loss.backward()
    assert set(leaves) < set(update.values)
    for name, leaf in leaves.items():
        assert torch.allclose(update.values[name], leaf.grad, atol=1e-6), name
    assert not any("embed" in name or "wte" in name for name in update.values)
    first = update_of(model, batch, Protocol(lora=3, trained=False))
    assert not any("lora_A" in name for name in first.values)


def test_several_steps_give_the_difference_of_weights():
    model, batch = case("bert", "classification")
    update = update_of(model, batch, Protocol(steps=3, rate=0.1))
    copy = case("bert", "classification")[0].requires_grad_(True)
    ids, mask = batch.padded(0, torch.device("cpu"))
    steps = torch.optim.SGD(copy.parameters(), lr=0.1)
    for _ in range(3):
        steps.zero_grad()
        copy(
            input_ids=ids, attention_mask=mask, labels=torch.tensor(batch.labels)
        ).loss.backward()
        steps.step()
    before = dict(model.named_parameters())
    for name, weight in copy.named_parameters():
        if name in update.values:
            assert torch.allclose(
                update.values[name], weight - before[name], atol=1e-6
            ), name


def test_embeddings_can_be_left_out():
    model, batch = case("bert", "classification")
    names = set(update_of(model, batch).values) - set(
        update_of(model, batch, hide=["embeddings"]).values
    )
    assert names == {
        f"bert.embeddings.{each}_embeddings.weight"
        for each in ("word", "position", "token_type")
    }


def test_an_update_is_saved_and_loaded(tmp_path):
    model, batch = case("bert", "classification")
    update = update_of(model, batch, Protocol(clip=1.0), precision="bfloat16")
    update.save(tmp_path / "g.safetensors")
    again = load_update(tmp_path / "g.safetensors")
    assert again.values.keys() == update.values.keys()
    assert all(
        torch.equal(again.values[name], each) for name, each in update.values.items()
    )
    assert (again.protocol, again.precision, again.texts) == (
        Protocol(clip=1.0),
        "bfloat16",
        3,
    )
    update = update_of(model, batch, Protocol(lora=2))
    update.save(tmp_path / "adapters.safetensors")
    again = load_update(tmp_path / "adapters.safetensors")
    assert again.values.keys() == update.values.keys()
    assert all(
        torch.equal(again.adapters[name], each)
        for name, each in update.adapters.items()
    )


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"noise": 1.0}, "need clip"),
        ({"clip": 0.0}, "--clip must be above 0"),
        ({"steps": 0}, "--local-steps must be 1 or more"),
        ({"rate": -1.0}, "--rate must be above 0"),
        ({"epsilon": 8.0}, "need clip"),
        ({"epsilon": 8.0, "noise": 1.0, "clip": 1.0}, "noise or epsilon"),
        ({"lora": 0}, "lora must be 1 or more"),
        ({"lora": 8, "steps": 2}, "one step"),
    ],
)
def test_wrong_rules_are_refused(wrong, words):
    with pytest.raises(InputError, match=words):
        Protocol(**wrong)


def test_wrong_updates_are_refused():
    with pytest.raises(InputError, match="must be finite"):
        Update({"w": torch.tensor([float("nan")])}, "causal", 1)
    with pytest.raises(InputError, match="task must be"):
        Update({"w": torch.ones(1)}, "images", 1)
    with pytest.raises(InputError, match="at least one parameter"):
        Update({}, "causal", 1)
