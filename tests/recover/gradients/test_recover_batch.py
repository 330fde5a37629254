"""Batches are recovered from their gradients and verified, and nothing else is verified."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import tiny_models as tiny
from keyhole.core import Status
from keyhole.core.errors import InputError
from keyhole.recover.attack import Target
from keyhole.recover.gradients import (
    Batch,
    BatchRecovery,
    Protocol,
    recover_batch,
    update_of,
)
from keyhole.recover.gradients.update import judge

CLASSES = "AutoModelForSequenceClassification"
NEXT = "AutoModelForCausalLM"
CASES = [
    ("bert", CLASSES),
    ("roberta", CLASSES),
    ("distilbert", CLASSES),
    ("gpt2", NEXT),
    ("llama", NEXT),
    ("qwen3", NEXT),
    ("llama", CLASSES),
]


def case(family, head, texts=3, length=7, seed=0):
    model = tiny.model(family, head=head)
    causal = family in tiny.DECODERS
    ids = tiny.ids(texts, length, seed, causal=causal).tolist()
    if texts > 1:
        ids[0] = [*ids[0][:4], ids[0][-1]]
    labels = tuple(number % 2 for number in range(texts)) if head == CLASSES else ()
    return model, tiny.tokenizer(causal), Batch(tuple(map(tuple, ids)), labels)


def expect_all(recovery, batch):
    assert recovery.status is Status.RECOVERED, recovery.reason
    read = {tuple(text.ids): number for number, text in enumerate(recovery.texts)}
    assert set(read) == set(batch.texts)
    assert all(text.verified for text in recovery.texts)
    for text, label in zip(batch.texts, batch.labels, strict=bool(batch.labels)):
        assert recovery.labels[read[text]] == label


@pytest.mark.parametrize(("family", "head"), CASES)
def test_a_batch_comes_back_without_the_gradient_of_embeddings(family, head):
    model, words, batch = case(family, head)
    expect_all(
        recover_batch(model, words, update_of(model, batch, hide=["embeddings"])), batch
    )


@pytest.mark.parametrize(("family", "head"), [("bert", CLASSES), ("llama", NEXT)])
def test_a_batch_comes_back(family, head):
    model, words, batch = case(family, head)
    expect_all(recover_batch(model, words, update_of(model, batch)), batch)


@pytest.mark.parametrize(("family", "head"), [("bert", CLASSES), ("llama", NEXT)])
@pytest.mark.parametrize(
    "protocol", [Protocol(clip=0.01), Protocol(steps=3, rate=1e-3)]
)
def test_clipping_and_several_steps(family, head, protocol):
    model, words, batch = case(family, head, texts=2)
    recovery = recover_batch(model, words, update_of(model, batch, protocol))
    if protocol.clip:
        expect_all(recovery, batch)
    for text in recovery.texts:  # several steps: as much as there is, none of it wrong
        assert not text.verified or tuple(text.ids) in batch.texts


@pytest.mark.parametrize(("family", "head"), [("bert", CLASSES), ("llama", NEXT)])
@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_rounded_gradients(family, head, precision):
    model, words, batch = case(family, head, texts=1)
    recovery = recover_batch(model, words, update_of(model, batch, precision=precision))
    assert [tuple(text.ids) for text in recovery.texts] == list(batch.texts)


@pytest.mark.parametrize(
    ("family", "head"), [("bert", CLASSES), ("llama", NEXT), ("gpt2", NEXT)]
)
@pytest.mark.parametrize("rules", [Protocol(lora=12), Protocol(lora=14, trained=False)])
def test_adapters_alone(family, head, rules):
    model, words, batch = case(family, head, texts=1)
    recovery = recover_batch(model, words, update_of(model, batch, rules))
    if rules.trained or family != "bert":
        expect_all(recovery, batch)
    assert not recovery.verified or tuple(recovery.texts[0].ids) in batch.texts


def test_more_tokens_than_an_adapter_s_rank():
    model, words, batch = case("llama", NEXT, texts=3)
    for trained in (True, False):
        update = update_of(model, batch, Protocol(lora=2, trained=trained))
        assert not recover_batch(model, words, update).verified


@pytest.mark.parametrize(("family", "head"), [("bert", CLASSES), ("llama", NEXT)])
def test_noise_that_tokens_stand_out_from(family, head):
    model, words, batch = case(family, head, texts=1)
    update = update_of(model, batch, Protocol(clip=0.1, noise=1e-4))
    expect_all(recover_batch(model, words, update), batch)
    target = Target.of(model, words)
    text = batch.texts[0]
    for place in (1, 3):  # wrong texts are not verified, however strong the noise
        wrong = batch.changed(0, place, 5 + (text[place] + 1) % 190)
        for noise in (1e-4, 1.0):
            update = update_of(model, batch, Protocol(clip=0.1, noise=noise))
            assert not any(each.verified for each in judge(target, update, wrong))


@pytest.mark.parametrize("epsilon", [1.0, 8.0])
def test_privacy_prevents_recovery(epsilon):
    model, words, batch = case("bert", CLASSES, texts=1)
    update = update_of(model, batch, Protocol(clip=0.1, epsilon=epsilon))
    assert not recover_batch(model, words, update).verified


@pytest.mark.parametrize("noise", [0.1, 1.0])
def test_nothing_is_verified_with_noise(noise):
    model, words, batch = case("bert", CLASSES, texts=2)
    update = update_of(model, batch, Protocol(clip=0.1, noise=noise))
    recovery = recover_batch(model, words, update)
    assert not recovery.verified
    assert recovery.status is not Status.RECOVERED


def test_more_tokens_than_the_model_is_wide():
    model, words, batch = case("bert", CLASSES, texts=6, length=9)
    recovery = recover_batch(model, words, update_of(model, batch))
    assert "says nothing" in recovery.reason
    assert not recovery.texts
    assert set(recovery.tokens) == {id_ for text in batch.texts for id_ in text}
    hidden = recover_batch(model, words, update_of(model, batch, hide=["embeddings"]))
    assert hidden.status is Status.NOT_IDENTIFIABLE or not hidden.texts
    assert not hidden.verified


@pytest.mark.parametrize(("family", "head"), [("bert", CLASSES), ("llama", NEXT)])
def test_the_judge_finds_one_wrong_token_and_one_wrong_class(family, head):
    model, words, batch = case(family, head)
    target = Target.of(model, words)
    for precision in ("float32", "bfloat16"):
        update = update_of(model, batch, precision=precision)
        assert all(each.verified for each in judge(target, update, batch))
        for place in (1, 3):
            text = list(batch.texts[1])
            text[place] = 5 + (text[place] + 1) % 190
            wrong = replace(batch, texts=(batch.texts[0], tuple(text), batch.texts[2]))
            assert not any(each.verified for each in judge(target, update, wrong))
        if batch.labels:
            wrong = replace(batch, labels=(1 - batch.labels[0], *batch.labels[1:]))
            assert not any(each.verified for each in judge(target, update, wrong))
        fewer = Batch(batch.texts[:2], batch.labels[:2])
        assert not any(each.verified for each in judge(target, update, fewer))


@pytest.mark.parametrize(("family", "head"), [("bert", CLASSES), ("gpt2", NEXT)])
def test_a_token_with_the_embedding_of_another_is_not_verified(family, head):
    model, words, batch = case(family, head, texts=2)
    table = model.get_input_embeddings().weight
    table[60] = table[50]
    right = batch.changed(1, 2, 60)
    wrong = batch.changed(1, 2, 50)
    target = Target.of(model, words)
    hidden = update_of(model, right, hide=["embeddings"])
    for told in (right, wrong):
        other, own = judge(target, hidden, told)
        assert other.verified
        assert not own.verified
    assert recover_batch(model, words, hidden).status is not Status.RECOVERED
    shown = update_of(
        model, right
    )  # the gradient of the table has a row for each token
    assert [verdict.verified for verdict in judge(target, shown, right)] == [True, True]
    assert not any(verdict.verified for verdict in judge(target, shown, wrong))


def test_a_head_of_its_own_tells_equal_embeddings_apart():
    model, words, batch = case("llama", NEXT, texts=1)
    table = model.get_input_embeddings().weight
    table[60] = table[50]
    target = Target.of(model, words)
    for place, verified in (
        (2, True),
        (0, False),
    ):  # the first token is never predicted
        right = batch.changed(0, place, 60)
        (verdict,) = judge(target, update_of(model, right, hide=["embeddings"]), right)
        assert verdict.verified == verified


def test_a_spliced_update_is_not_verified():
    model, words, batch = case("bert", CLASSES, texts=2)
    update = update_of(model, batch)
    other = update_of(model, case("bert", CLASSES, texts=2, seed=9)[2])
    half = {
        n: other.values[n] if ".layer.2" in n else each
        for n, each in update.values.items()
    }
    assert not recover_batch(model, words, replace(update, values=half)).verified


def test_gradients_of_another_model_are_refused():
    model, words, batch = case("bert", CLASSES)
    update = update_of(model, batch)
    other = tiny.model("bert", seed=1, head=CLASSES)
    with pytest.raises(InputError, match="the gradients are of the model"):
        recover_batch(other, words, update)
    assert not recover_batch(other, words, replace(update, model=None)).verified


def test_it_is_saved_and_loaded(tmp_path):
    model, words, batch = case("bert", CLASSES, texts=1)
    recovery = recover_batch(model, words, update_of(model, batch))
    recovery.save(tmp_path / "batch.json")
    again = BatchRecovery.load(tmp_path / "batch.json")
    assert again == recovery
    assert "recovered" in repr(again)
    assert torch.is_grad_enabled()
