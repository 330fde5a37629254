"""S-Attend: what is dropped, how often and when, also in other training scripts."""

from __future__ import annotations

import math
import types

import pytest
import torch
import transformers

import keyhole
import tiny_architectures as zoo
import tiny_classifiers as small
import tiny_models as tiny
from keyhole.core.errors import InputError
from keyhole.harden import Plain, SAttend
from keyhole.harden.defences.sattend import Drops
from keyhole.models.masking import NAME


class Recorder:
    """Records the cuts of each pass."""

    def __init__(self, monkeypatch):
        self.passes = []
        begin = Drops.begin
        cut = Drops.cut

        def recorded_begin(drops, inputs):
            wanted = begin(drops, inputs)
            self.passes.append([])
            return wanted

        def recorded_cut(drops, site, shape):
            made = cut(drops, site, shape)
            self.passes[-1].append(None if made is None else made.expand(shape).clone())
            return made

        monkeypatch.setattr(Drops, "begin", recorded_begin)
        monkeypatch.setattr(Drops, "cut", recorded_cut)


@pytest.fixture
def recorder(monkeypatch):
    return Recorder(monkeypatch)


def given(kind="classes"):
    batch, labels = small.batch(kind)
    return {
        name: value for name, value in batch.items() if name != "special_tokens_mask"
    }, labels


def within_chance(hits, trials, rate):
    """Whether the hits are within six standard deviations of the binomial."""
    return abs(hits - rate * trials) <= 6 * math.sqrt(trials * rate * (1 - rate))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("mode", ["unit", "token"])
def test_evaluation_is_identical(mode, attention):
    model = small.model(attention=attention).eval()
    inputs, _ = given()
    before = model(**inputs).logits
    with SAttend(0.5, mode).apply(model, tiny.tokenizer()):
        assert torch.equal(model(**inputs).logits, before)
        model.train()
        model(**inputs)
        model.eval()
        assert torch.equal(model(**inputs).logits, before)
    assert torch.equal(model(**inputs).logits, before)
    assert model.config._attn_implementation == attention


@pytest.mark.parametrize("rate", [0.1, 0.2, 0.5])
def test_units_are_dropped_at_the_rate_and_independently(rate, recorder):
    model = small.model()
    (inputs, _) = given()
    with SAttend(rate).apply(model):
        for _ in range(4):
            model(**inputs)
    cuts = [cut for made in recorder.passes for cut in made]
    assert len(cuts) == 8
    stacked = torch.stack(cuts)
    assert within_chance(int(stacked.sum()), stacked.numel(), rate)
    for first in range(8):
        for second in range(first):
            both = stacked[first] & stacked[second]
            assert within_chance(int(both.sum()), both.numel(), rate**2), (
                "passes, layers"
            )
    shifted = stacked[:, :, 1:] & stacked[:, :, :-1]
    assert within_chance(int(shifted.sum()), shifted.numel(), rate**2), "heads"
    shifted = stacked[..., 1:, :] & stacked[..., :-1, :]
    assert within_chance(int(shifted.sum()), shifted.numel(), rate**2), "queries"


@pytest.mark.parametrize("kind", ["classes", "choices"])
def test_tokens_are_dropped_in_all_layers_and_special_tokens_are_spared(kind, recorder):
    model = small.model(kind)
    (inputs, _) = given(kind)
    special = (inputs["input_ids"] < len(tiny.SPECIAL)).flatten(0, -2)
    hits = trials = 0
    with SAttend(0.3, "token").apply(model, tiny.tokenizer()):
        for _ in range(60):
            model(**inputs)
    seen = set()
    for made in recorder.passes:
        assert torch.equal(made[0], made[1])
        keys = made[0][:, 0, 0]
        assert torch.equal(made[0], keys[:, None, None, :].expand_as(made[0]))
        assert not (keys & special).any()
        hits = hits + int(keys.sum())
        trials = trials + int((~special).sum())
        seen.add(tuple(keys.flatten().tolist()))
    assert within_chance(hits, trials, 0.3)
    assert len(seen) == 60


def test_unknown_words_are_spared_as_in_the_released_code(recorder):
    """A tokenizer's `special_tokens_mask` does not mark [UNK]."""
    model = small.model()
    tokenizer = tiny.tokenizer()
    (batch, _) = small.batch()
    batch["input_ids"][:, 2] = tokenizer.unk_token_id
    assert not batch["special_tokens_mask"][:, 2].any()
    with SAttend(0.9, "token").apply(model, tokenizer):
        for _ in range(10):
            model(**batch)
    assert not any(made[0][:, 0, 0, 2].any() for made in recorder.passes)


def test_special_tokens_from_the_mask_among_the_inputs(recorder):
    model = small.model()
    (batch, _) = small.batch()
    with SAttend(0.9, "token").apply(model):
        model(**batch)
    assert not (
        recorder.passes[0][0][:, 0, 0] & batch["special_tokens_mask"].bool()
    ).any()
    inputs, _ = given()
    with (
        SAttend(0.5, "token").apply(model),
        pytest.raises(InputError, match="token mode needs a tokenizer"),
    ):
        model(**inputs)
    embeddings = torch.zeros(1, 3, 32)
    with (
        SAttend(0.5, "token").apply(model, tiny.tokenizer()),
        pytest.raises(InputError, match="token mode needs input_ids"),
    ):
        model(inputs_embeds=embeddings)


def test_tokens_of_encoder_and_decoder_are_dropped(recorder):
    model = zoo.model("t5").train()
    inputs = zoo.inputs("t5")
    with SAttend(0.5, "token").apply(model, tiny.tokenizer()):
        model(**inputs)
    first, second, own, cross, again, crossing = recorder.passes[0]
    assert torch.equal(first, second)
    assert torch.equal(first[:, 0, 0], cross[:, 0, 0])
    assert torch.equal(own, again)
    assert torch.equal(cross, crossing)
    assert own.shape[-1] == 6


@pytest.mark.parametrize("family", zoo.SIXTEEN)
def test_every_architecture_trains(family):
    model = zoo.model(family).train()
    inputs = zoo.inputs(family)
    model.requires_grad_(True)
    with SAttend(0.5).apply(model):
        model(**inputs).last_hidden_state.square().mean().backward()
    assert any(weight.grad is not None for weight in model.parameters())
    assert all(w.grad is None or w.grad.isfinite().all() for w in model.parameters())


def test_the_seed_determines_the_draws_and_global_generators_are_unchanged():
    model = small.model(dropout=0.0)
    (inputs, _) = given()
    before = torch.get_rng_state()
    outputs = []
    for seed in (1, 1, 2):
        with SAttend(0.3, seed=seed).apply(model):
            outputs.append(model(**inputs).logits)
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])
    assert torch.equal(torch.get_rng_state(), before)


def test_a_rate_of_zero_is_plain_training():
    model = small.model()
    (batch, labels) = small.batch()
    loss, gradient = small.total(SAttend(0.0), model, batch, labels)
    expected, reference = small.total(Plain(), model, batch, labels)
    assert loss == expected
    assert torch.equal(gradient, reference)


@pytest.mark.parametrize("mode", ["unit", "token"])
def test_as_a_defence_its_gradients_are_those_of_the_cut_model(mode, recorder):
    model = small.model(dropout=0.0)
    (batch, labels) = small.batch()
    loss, _ = small.total(SAttend(0.4, mode), model, batch, labels)
    assert sum(int(cut.sum()) for cut in recorder.passes[0]) > 0
    again, _ = small.total(SAttend(0.4, mode), model, batch, labels)
    other, _ = small.total(SAttend(0.4, mode), model, batch, labels, seed=1)
    assert loss == again != other
    assert other != small.total(Plain(), model, batch, labels)[0]


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # CPUs without bfloat16
def test_mixed_precision():
    model = small.model()
    (batch, labels) = small.batch()
    with torch.autocast("cpu", torch.bfloat16):
        loss, gradient = small.total(SAttend(0.3), model, batch, labels)
    exact, reference = small.total(SAttend(0.3), model, batch, labels)
    assert abs(loss - exact) < 0.1 * abs(exact)
    assert (gradient - reference).norm() < 0.2 * reference.norm()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rate": 1.0}, "rate must be at least 0 and below 1"),
        ({"rate": -0.1}, "rate must be"),
        ({"mode": "word"}, "mode must be one of unit, token"),
    ],
)
def test_wrong_settings(fields, message):
    with pytest.raises(InputError, match=message):
        SAttend(**fields)


def trainer(folder, callbacks, seed=0, **settings):
    tokenizer = tiny.tokenizer()
    made = small.model(labels=2, attention="sdpa")
    texts = small.examples(16)
    rows = [{**tokenizer(example.text), "labels": example.label} for example in texts]
    for row in rows:
        row.pop("token_type_ids", None)
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=8,
        num_train_epochs=2,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        seed=seed,
        logging_strategy="no",
        dataloader_pin_memory=False,
        learning_rate=1e-3,
        **settings,
    )
    return transformers.Trainer(
        model=made,
        args=arguments,
        train_dataset=rows,
        eval_dataset=rows,
        processing_class=tokenizer,
        callbacks=callbacks,
    )


@pytest.mark.parametrize("mode", ["unit", "token"])
def test_the_callback_in_a_trainer(mode, tmp_path, recorder):
    run = trainer(tmp_path, [SAttend(0.4, mode).callback()], eval_strategy="epoch")
    run.train()
    cut = [made for made in recorder.passes if made]
    # Two epochs of two steps drop; the evaluations between them do not.
    assert len(cut) == 4
    assert len(recorder.passes) > 4
    assert all(int(c.sum()) > 0 for made in cut for c in made)
    assert run.model.config._attn_implementation == "sdpa"
    assert not any(module._forward_hooks for module in run.model.modules())


def test_a_trainer_with_rate_zero_gives_the_plain_weights(tmp_path):
    ends = []
    for callbacks in ([], [SAttend(0.0).callback()], [SAttend(0.3).callback()]):
        run = trainer(tmp_path, callbacks)
        run.train()
        ends.append(run.model.classifier.weight.detach().clone())
    assert torch.equal(ends[0], ends[1])
    assert not torch.equal(ends[0], ends[2])


def test_after_a_failure_the_context_is_left_at_the_next_training(tmp_path):
    callback = SAttend(0.4).callback()

    class Fails(transformers.TrainerCallback):
        def on_step_end(self, *_, **__):
            raise ZeroDivisionError

    run = trainer(tmp_path, [callback, Fails()])
    with pytest.raises(ZeroDivisionError):
        run.train()
    assert run.model.config._attn_implementation == NAME
    run.remove_callback(Fails)
    run.train()
    assert run.model.config._attn_implementation == "sdpa"


def test_a_model_saved_during_training_is_an_ordinary_model(tmp_path):
    model = small.model(attention="sdpa")
    with SAttend(0.2).apply(model):
        model.save_pretrained(tmp_path)
    assert NAME not in (tmp_path / "config.json").read_text()


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # CPUs without bfloat16
def test_accelerate_with_mixed_precision(monkeypatch):
    accelerate = pytest.importorskip("accelerate")
    monkeypatch.setattr(accelerate.state.AcceleratorState, "_shared_state", {})
    monkeypatch.setattr(accelerate.state.PartialState, "_shared_state", {})
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    model = small.model()
    (inputs, labels) = given()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    with SAttend(0.4).apply(model):
        first = model(**inputs, labels=labels).loss
        second = model(**inputs, labels=labels).loss
        accelerator.backward(first)
        optimizer.step()
    assert first.isfinite()
    assert float(first.detach()) != float(second.detach())


def test_draws_depend_only_on_the_step_and_the_rank():
    model = small.model(dropout=0.0)
    (inputs, _) = given()

    def output(step, passes=1):
        with SAttend(0.4).apply(model) as drops:
            model(**inputs)
            drops.at_step(step)
            for _ in range(passes):
                found = model(**inputs).logits
        return found

    assert torch.equal(output(7), output(7)), (
        "a run that is resumed draws what it would have"
    )
    assert not torch.equal(output(7), output(8))
    assert not torch.equal(output(7), output(7, passes=2))
    first = output(7)
    others = []
    for rank in (0, 1):  # torch's fake process group
        torch.distributed.init_process_group("fake", rank=rank, world_size=2)
        try:
            others.append(output(7))
        finally:
            torch.distributed.destroy_process_group()
    assert torch.equal(others[0], first)
    assert not torch.equal(others[1], first)


def test_several_gpus_in_one_process_are_refused():
    arguments = types.SimpleNamespace(n_gpu=2)
    with pytest.raises(InputError, match="start one process for each"):
        SAttend(0.2).callback().on_train_begin(
            arguments, None, None, model=small.model()
        )


def test_the_registry_makes_it():
    assert keyhole.harden.SAttend is SAttend
