"""Defences, compared with plain training at radius zero, with autograd and with loops."""

from __future__ import annotations

import itertools

import pytest
import torch
import transformers
from torch.nn.functional import cross_entropy

import tiny_classifiers as small
from keyhole.core.errors import InputError
from keyhole.harden import (
    ASA,
    R3F,
    SMART,
    AttackMasks,
    Augmented,
    CreAT,
    FreeLB,
    Plain,
    SAttend,
)
from keyhole.harden.defences import asa as asa_module
from keyhole.harden.defences.defence import (
    divergence,
    dropout_from,
    perturbed,
    symmetric,
)

KINDS = ("classes", "choices")
NOTHING = {
    "freelb": FreeLB(radius=0.0),
    "smart": SMART(radius=0.0),
    "r3f": R3F(radius=0.0),
    "asa": ASA(radius=0.0),
    "creat": CreAT(radius=0.0),
    "masks": AttackMasks(share=0.0),
    "sattend": SAttend(rate=0.0),
}
SOMETHING = {
    "freelb": FreeLB(),
    "smart": SMART(radius=0.1, rate=0.1, start=0.05),
    "r3f": R3F(radius=0.1),
    "asa": ASA(),
    "creat": CreAT(),
    "augmented": Augmented(share=0.3),
    "masks": AttackMasks(share=0.05),
    "rounds": AttackMasks(share=0.05, label="predicted", rounds=2),
    "sattend": SAttend(),
}


def naive_kl(scores, others):
    """Return the mean of Σ p log(p/q) over texts, in a loop."""
    p, q = (part.detach().double().softmax(-1) for part in (scores, others))
    texts = [
        sum(
            float(a) * (float(a.log()) - float(b.log()))
            for a, b in zip(*row, strict=True)
        )
        for row in zip(p, q, strict=True)
    ]
    return sum(texts) / len(texts)


def answer(model, batch, embeddings=None):
    """Return the logits for given embeddings, without the library's hook."""
    inputs = {
        k: v for k, v in batch.items() if k not in ("special_tokens_mask", "input_ids")
    }
    if embeddings is None:
        return model(input_ids=batch["input_ids"], **inputs).logits
    return model(inputs_embeds=embeddings, **inputs).logits


def embed(model, batch):
    return model.get_input_embeddings()(batch["input_ids"]).detach()


def deltas_of(defence, model, batch, labels):
    """Return what the defence added to the embeddings in each pass."""
    found = []
    handle = model.bert.embeddings.LayerNorm.register_forward_pre_hook(
        lambda _module, args: found.append(args[0].detach().clone())
    )
    loss, gradient = small.total(defence, model, batch, labels)
    small.total(Plain(), model, batch, labels)
    handle.remove()
    return loss, gradient, [pass_ - found[-1] for pass_ in found[:-1]]


def encoder_decoder(kind):
    """Return an encoder-decoder classifier whose texts end with token 3, and a batch for it."""
    ends = {"pad_token_id": 0, "eos_token_id": 3, "decoder_start_token_id": 3}
    if kind == "t5":
        config = transformers.T5Config(
            vocab_size=60,
            d_model=16,
            d_kv=4,
            d_ff=32,
            num_layers=1,
            num_heads=4,
            num_labels=3,
            dropout_rate=0.0,
            **ends,
        )
        make = transformers.T5ForSequenceClassification
    else:
        sizes = {"layers": 1, "attention_heads": 4, "ffn_dim": 32}
        sides = {
            f"{side}_{name}": size
            for side in ("encoder", "decoder")
            for name, size in sizes.items()
        }
        config = transformers.BartConfig(
            vocab_size=60,
            d_model=16,
            max_position_embeddings=20,
            num_labels=3,
            dropout=0.0,
            init_std=0.3,
            **sides,
            **ends,
        )
        make = transformers.BartForSequenceClassification
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = make(config).train()
    ids = torch.randint(5, 60, (4, 8), generator=torch.Generator().manual_seed(1))
    ids[:, -1] = 3
    return model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@pytest.mark.parametrize("kind", ["bart", "t5"])
def test_an_encoder_decoder_is_perturbed_at_the_encoder(kind):
    model, batch = encoder_decoder(kind)
    encoder = model.get_encoder().get_input_embeddings()
    decoder = model.get_decoder().get_input_embeddings()
    delta = torch.randn(4, 8, 16, generator=torch.Generator().manual_seed(2))
    looked_up = {"encoder": [], "decoder": []}  # before the hook of `perturbed`
    for name, side in (("encoder", encoder), ("decoder", decoder)):
        side.register_forward_hook(
            lambda _module, _args, output, name=name: looked_up[name].append(
                output.detach()
            )
        )
    model(**batch)
    with perturbed(model, delta):
        # A later hook sees the output of earlier ones.
        seen = []
        handle = encoder.register_forward_hook(
            lambda _m, _a, output: seen.append(output.detach())
        )
        model(**batch)
        handle.remove()
    torch.testing.assert_close(seen[0] - looked_up["encoder"][0], delta)
    assert torch.equal(*looked_up["decoder"])
    losses = list(itertools.islice(stepped(FreeLB(), model, batch), 3))
    assert losses[0] < losses[1] < losses[2]  # the ascent raises the loss


def stepped(defence, model, batch):
    """Differentiate each loss before the next one, without changing the weights."""
    labels = torch.tensor([0, 1, 2, 0])
    for loss in defence.losses(model, batch, labels, torch.Generator().manual_seed(0)):
        loss.backward()
        yield float(loss.detach())


def test_divergences_against_a_loop():
    stream = torch.Generator().manual_seed(0)
    first, second = (
        torch.randn(5, 4, generator=stream, dtype=torch.float64) * 3 for _ in range(2)
    )
    assert float(divergence(first, second)) == pytest.approx(
        naive_kl(first, second), rel=1e-12
    )
    both = naive_kl(first, second) + naive_kl(second, first)
    assert float(symmetric(first, second)) == pytest.approx(both, rel=1e-12)
    assert float(divergence(first, first)) == pytest.approx(0, abs=1e-12)


def test_plain_is_the_models_own_loss():
    model = small.model(dropout=0.0)
    (batch, labels) = small.batch()
    inputs = {k: v for k, v in batch.items() if k != "special_tokens_mask"}
    expected = model(**inputs, labels=labels).loss
    assert small.total(Plain(), model, batch, labels)[0] == pytest.approx(
        float(expected.detach())
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NOTHING)
def test_without_a_perturbation_every_defence_is_plain_training(name, kind):
    """Dropout is on, so all passes of a batch must use the same dropout."""
    model = small.model(kind)
    (batch, labels) = small.batch(kind)
    loss, gradient = small.total(NOTHING[name], model, batch, labels)
    expected, reference = small.total(Plain(), model, batch, labels)
    assert loss == pytest.approx(expected, rel=1e-5)
    assert torch.allclose(gradient, reference, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SOMETHING)
def test_with_a_perturbation_losses_differ_and_the_model_is_restored(name, kind):
    model = small.model(kind)
    (batch, labels) = small.batch(kind)
    before = torch.get_rng_state()
    loss, gradient = small.total(SOMETHING[name], model, batch, labels)
    again, _ = small.total(SOMETHING[name], model, batch, labels)
    assert loss == again
    assert loss != pytest.approx(
        small.total(Plain(), model, batch, labels)[0], rel=1e-4
    )
    assert gradient.isfinite().all()
    assert torch.equal(torch.get_rng_state(), before)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("name", SOMETHING)
def test_gradient_checkpointing_changes_nothing(name):
    found = []
    for checkpointing in (False, True):
        model = small.model()
        (batch, labels) = small.batch()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        found.append(small.total(SOMETHING[name], model, batch, labels))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-5)
    assert torch.allclose(found[0][1], found[1][1], rtol=1e-3, atol=1e-6)


def test_freelb_steps_along_the_gradient_and_averages():
    model = small.model(dropout=0.0)
    (batch, labels) = small.batch()
    defence = FreeLB(steps=3, rate=0.2, radius=0.3, start=0.1)
    loss, gradient, deltas = deltas_of(defence, model, batch, labels)
    assert len(deltas) == 3
    words = embed(model, batch)
    padding = batch["attention_mask"] == 0
    losses = []
    for number, delta in enumerate(deltas):
        assert delta[padding].abs().max() < 1e-6
        moved = delta.clone().requires_grad_(True)
        own_loss = cross_entropy(answer(model, batch, words + moved), labels)
        (g,) = torch.autograd.grad(own_loss, moved)
        losses.append(float(own_loss.detach()))
        if number + 1 < len(deltas):
            step = delta + 0.2 * g / g.flatten(1).norm(dim=1)[:, None, None]
            size = step.flatten(1).norm(dim=1)[:, None, None]
            expected = step * (0.3 / size).clamp(max=1)
            assert torch.allclose(deltas[number + 1], expected, atol=2e-5)
    assert loss == pytest.approx(sum(losses) / 3, rel=1e-4)
    # The weights' gradient is that of the mean of the three losses.
    model.zero_grad()
    table = model.get_input_embeddings()
    for delta in deltas:
        (
            cross_entropy(
                answer(model, batch, table(batch["input_ids"]) + delta), labels
            )
            / 3
        ).backward()
    weights = table.weight.grad
    assert torch.allclose(gradient, weights, rtol=1e-3, atol=1e-5)
    first = deltas[0].flatten(1).norm(dim=1)
    assert (first <= 0.1).all()
    assert (first > 0.02).all()


def test_freelb_needs_each_loss_to_be_differentiated():
    model = small.model()
    (batch, labels) = small.batch()
    losses = FreeLB().losses(model, batch, labels, torch.Generator())
    next(losses)
    with pytest.raises(InputError, match="differentiated before the next"):
        next(losses)


def test_smart_takes_the_gradient_step_and_adds_the_symmetric_divergence():
    model = small.model(dropout=0.0)
    (batch, labels) = small.batch()
    defence = SMART(weight=2.0, radius=0.08, steps=1, rate=0.1, start=0.03)
    loss, gradient, deltas = deltas_of(defence, model, batch, labels)
    clean, start, end = deltas
    assert clean.abs().max() == 0
    assert 0.02 < start[0].std() < 0.04
    words = embed(model, batch)
    reference = answer(model, batch)
    moved = start.clone().requires_grad_(True)
    rough = symmetric(answer(model, batch, words + moved), reference.detach())
    (g,) = torch.autograd.grad(rough, moved)
    step = start + 0.1 * g / g.abs().flatten(1).amax(1)[:, None, None]
    assert torch.allclose(end, step.clamp(-0.08, 0.08), atol=1e-4)
    other = answer(model, batch, words + end)
    both = naive_kl(other, reference) + naive_kl(reference, other)
    expected = float(cross_entropy(reference.detach(), labels)) + 2 * both
    assert loss == pytest.approx(expected, rel=1e-3)
    model.zero_grad()
    table = model.get_input_embeddings()
    (
        cross_entropy(answer(model, batch), labels)
        + 2
        * symmetric(
            answer(model, batch, table(batch["input_ids"]) + end), answer(model, batch)
        )
    ).backward()
    assert torch.allclose(gradient, table.weight.grad, rtol=1e-2, atol=1e-4)


def test_creat_ascends_the_loss_and_turns_the_first_state():
    model = small.model(dropout=0.0)
    (batch, labels) = small.batch()
    defence = CreAT(rate=0.3, radius=10.0, turn=2.0, start=0.05)
    loss, _, (clean, before, still, after) = deltas_of(defence, model, batch, labels)
    assert not clean.any()
    assert not still.any()
    inputs = {
        k: v for k, v in batch.items() if k not in ("special_tokens_mask", "input_ids")
    }
    table = embed(model, batch)

    def given(delta):
        return model(inputs_embeds=table + delta, **inputs, output_hidden_states=True)

    moved = before.clone().requires_grad_(True)
    states = [
        given(each).hidden_states[-1][:, 0]
        for each in (moved, torch.zeros_like(before))
    ]
    near = torch.cosine_similarity(states[0], states[1].detach()).mean()
    aim = cross_entropy(given(moved).logits, labels) - 2.0 * near
    (gradient,) = torch.autograd.grad(aim, moved)
    for text, step in enumerate(gradient):
        expected = before[text] + 0.3 * step / step.norm()
        torch.testing.assert_close(after[text], expected, rtol=1e-4, atol=1e-6)
    halves = [cross_entropy(given(each).logits, labels) for each in (clean, after)]
    assert loss == pytest.approx(float(sum(halves).detach()) / 2, rel=1e-5)


def test_augmentation_replaces_the_tokens_that_raise_the_loss_most():
    model = small.model(dropout=0.0)
    (batch, labels) = small.batch()
    ids = batch["input_ids"]
    seen = []
    handle = model.get_input_embeddings().register_forward_pre_hook(
        lambda _module, args: seen.append(args[0].clone())
    )
    small.total(Augmented(share=0.3, nearest=3), model, batch, labels)
    handle.remove()
    table = model.get_input_embeddings().weight.detach()
    words = embed(model, batch).requires_grad_(True)
    cross_entropy(answer(model, batch, words), labels).backward()
    for text, row in enumerate(ids.tolist()):
        gains = {}
        for place, token in enumerate(row):
            if batch["special_tokens_mask"][text, place]:
                continue
            alike = torch.cosine_similarity(table, table[token][None], dim=1)
            alike[token] = -1.0
            near = alike.topk(3).indices.tolist()
            gain = {
                v: float((table[v] - table[token]) @ words.grad[text, place])
                for v in near
            }
            best = max(gain, key=gain.get)
            gains[place] = gain[best], best
        count = int(-(-int(batch["attention_mask"][text].sum()) * 0.3 // 1))
        chosen = sorted(gains, key=lambda place: -gains[place][0])[:count]
        expected = list(row)
        for place in chosen:
            if gains[place][0] > 0:
                expected[place] = gains[place][1]
        assert seen[-1][text].tolist() == expected


def test_r3f_is_noise_and_the_symmetric_divergence():
    model = small.model(dropout=0.0)
    (batch, labels) = small.batch()
    loss, _, deltas = deltas_of(R3F(weight=0.5, radius=0.05), model, batch, labels)
    noise = deltas[1][batch["attention_mask"] == 1]
    expected = 0.05 / 3**0.5
    assert float(noise.std()) == pytest.approx(expected, rel=0.1)
    assert float(noise.abs().max()) <= 0.0501
    reference = answer(model, batch)
    other = answer(model, batch, embed(model, batch) + deltas[1])
    both = naive_kl(other, reference) + naive_kl(reference, other)
    expected = float(cross_entropy(reference.detach(), labels)) + 0.5 * both
    assert loss == pytest.approx(expected, rel=1e-3)


def test_asa_ascends_inside_its_bound(monkeypatch):
    model = small.model(dropout=0.0)
    (batch, labels) = small.batch()
    given = []

    class Recorded(asa_module.Gates):
        def gate(self, site, shape):
            if self.masks and site.index == 0:
                given.append([mask.detach().clone() for mask in self.masks])
            return super().gate(site, shape)

    monkeypatch.setattr(asa_module, "Gates", Recorded)
    defence = ASA(weight=1.5, radius=0.4, steps=2, rate=0.3, start=0.1)
    loss, _ = small.total(defence, model, batch, labels)
    assert len(given) == 3
    inputs = {k: v for k, v in batch.items() if k != "special_tokens_mask"}

    def gated(masks):
        gates = Recorded()
        gates.masks = masks
        with asa_module.rewriting(model, gates):
            return model(**inputs).logits

    reference = model(**inputs).logits.detach()
    stages = [list(masks) for masks in given[:3]]
    assert all(float(m.min()) >= 0 and float(m.max()) <= 0.1 for m in stages[0])
    for now, after in itertools.pairwise(stages):
        leaves = [mask.clone().requires_grad_(True) for mask in now]
        apart = divergence(reference.detach(), gated(leaves))
        for mask, g, moved in zip(
            now, torch.autograd.grad(apart, leaves), after, strict=True
        ):
            size = g.abs().flatten(2).amax(2)[:, :, None, None]
            assert torch.allclose(
                moved, (mask + 0.3 * g / size).clamp(0, 0.4), atol=1e-3
            )
    expected = cross_entropy(reference, labels) + 1.5 * divergence(
        reference, gated(stages[-1])
    )
    assert loss == pytest.approx(float(expected.detach()), rel=1e-4)
    before, after = (
        float(divergence(reference, gated(m)).detach()) for m in (stages[0], stages[-1])
    )
    assert after > 2 * before


def test_dropout_is_drawn_from_the_seed_and_the_state_is_restored():
    model = small.model(dropout=0.5)
    (batch, _) = small.batch()
    inputs = {k: v for k, v in batch.items() if k != "special_tokens_mask"}
    torch.manual_seed(5)
    outputs = []
    for seed in (1, 1, 2):
        with dropout_from(seed, model):
            outputs.append(model(**inputs).logits)
    after = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(after, torch.rand(3))
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FreeLB(steps=0), "steps must be 1 or more"),
        (lambda: FreeLB(rate=-1), "rate must be 0 or more"),
        (lambda: SMART(weight=float("nan")), "weight must be 0 or more"),
        (lambda: ASA(radius=2.0), "radius must be at most 1"),
        (lambda: AttackMasks(share=1.0), "share must be"),
        (lambda: AttackMasks(label="true"), "label must be one of random, predicted"),
        (lambda: AttackMasks(rounds=0), "rounds must be"),
    ],
)
def test_wrong_settings(make, message):
    with pytest.raises(InputError, match=message):
        make()


def test_perturbations_need_input_ids():
    with pytest.raises(InputError, match="the batch must hold input_ids"):
        next(FreeLB().losses(small.model(), {}, torch.tensor([0]), torch.Generator()))
