"""The training loop learns, resumes and reports its cost."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

import tiny_classifiers as small
import tiny_models as tiny
from keyhole.core.errors import InputError
from keyhole.harden import (
    ASA,
    DEFENCES,
    R3F,
    SMART,
    AttackMasks,
    Augmented,
    Combined,
    CreAT,
    FreeLB,
    Plain,
    PlainFirst,
    SAttend,
    Training,
    train,
)
from keyhole.harden.defences.combined import current

ALL = [
    Plain(),
    SAttend(0.2),
    SAttend(0.2, "token"),
    FreeLB(),
    SMART(),
    R3F(),
    ASA(),
    CreAT(),
    Augmented(),
    AttackMasks(),
    Combined.strongest(),
    PlainFirst(0.5, AttackMasks()),
]


def weights(model):
    return torch.cat([weight.detach().flatten() for weight in model.parameters()])


def train_small(defence, model, examples, **changes):
    settings = {"epochs": 2, "rate": 1e-3, "batch": 8, "max_length": 32}
    return train(model, tiny.tokenizer(), examples, defence, **{**settings, **changes})


class Stop(Exception):
    pass


def stop_in_epoch(number):
    def progress(done, total, note):
        if note.startswith(f"epoch {number}, "):
            raise Stop

    return progress


@pytest.mark.parametrize("defence", ALL, ids=lambda defence: type(defence).__name__)
def test_every_defence_trains_and_resumes_bit_for_bit(defence, tmp_path):
    examples = small.examples(8)
    run = partial(train_small, batch=4)
    whole = small.model(labels=2)
    done = run(defence, whole, examples)
    assert (done.steps, len(done.losses), done.resumed, done.reason) == (4, 2, 0, "")
    assert done.seconds > 0
    assert done.peak > 2**20
    assert not whole.training

    stopped = small.model(labels=2)
    with pytest.raises(Stop):
        run(defence, stopped, examples, checkpoint=tmp_path, progress=stop_in_epoch(2))
    torch.manual_seed(99)  # other draws in between
    fresh = small.model(labels=2)
    again = run(defence, fresh, examples, checkpoint=tmp_path)
    assert again.resumed == 1
    assert again.losses == done.losses
    assert torch.equal(weights(fresh), weights(whole))


@pytest.mark.parametrize("choices", [False, True])
def test_it_learns(choices):
    model = small.model("choices" if choices else "classes", labels=2, dropout=0.0)
    steps = []
    done = train_small(
        Plain(),
        model,
        small.examples(64, choices=choices),
        epochs=6,
        rate=3e-3,
        progress=lambda *step: steps.append(step),
    )
    assert done.losses[-1] < 0.5 * done.losses[0]
    assert [step[:2] for step in steps] == [(number, 48) for number in range(1, 49)]
    losses = [float(note.removeprefix("epoch 1, loss ")) for _, _, note in steps[:8]]
    assert done.losses[0] == pytest.approx(sum(losses) / 8, abs=1e-3)


def test_seeds_and_data_order():
    examples = small.examples(16)
    ends = []
    for seed in (0, 0, 1):
        model = small.model(labels=2)
        torch.manual_seed(len(ends))
        train_small(Plain(), model, examples, seed=seed)
        ends.append(weights(model))
    assert torch.equal(ends[0], ends[1])
    assert not torch.equal(ends[0], ends[2])


def test_a_checkpoint_of_another_run_is_refused_with_the_difference(tmp_path):
    """Another option, other data, and other models."""
    examples = small.examples(8)
    train_small(Plain(), small.model(labels=2), examples, checkpoint=tmp_path)
    rates = "this run has rate 0.0001, that of .* has rate 0.001: choose another file"
    with pytest.raises(InputError, match=rates):
        train_small(
            Plain(), small.model(labels=2), examples, checkpoint=tmp_path, rate=1e-4
        )
    with pytest.raises(
        InputError, match=r"this run has data [0-9a-f]{16}, that of .* has data"
    ):
        train_small(
            Plain(),
            small.model(labels=2),
            small.examples(8, seed=1),
            checkpoint=tmp_path,
        )
    with pytest.raises(
        InputError, match=r"this run has model [0-9a-f]{16}, that of .* has model"
    ):
        train_small(
            Plain(), small.model(labels=2, seed=1), examples, checkpoint=tmp_path
        )
    other = small.model(labels=2)
    with torch.no_grad():
        other.classifier.bias.add_(1)
    with pytest.raises(
        InputError, match=r"this run has model [0-9a-f]{16}, that of .* has model"
    ):
        train_small(Plain(), other, examples, checkpoint=tmp_path)
    done = train_small(Plain(), small.model(labels=2), examples, checkpoint=tmp_path)
    assert done.resumed == 2
    assert done.steps == 2


def test_the_cost_of_a_run_is_saved_and_has_a_summary(tmp_path):
    done = train_small(Plain(), small.model(labels=2), small.examples(8))
    done.save(tmp_path / "training.json")
    assert Training.load(tmp_path / "training.json") == done
    assert (
        repr(done)
        == f"Training: 2 steps in {done.seconds:.1f} s; loss {done.losses[-1]:.3f}"
    )


def test_every_defence_has_a_name_and_its_own_options():
    made = {type(DEFENCES.make(name)) for name in DEFENCES}
    assert made | {PlainFirst} == {
        type(defence) for defence in ALL
    }  # made by --plain-first
    assert DEFENCES.make("sattend", rate=0.5, mode="token") == SAttend(0.5, "token")
    assert DEFENCES.make("strongest", weight=0.5) == Combined.strongest(weight=0.5)
    with pytest.raises(
        InputError, match="plain has no option mode: it belongs to sattend"
    ):
        DEFENCES.make("plain", mode="token")


def test_an_incomplete_checkpoint_is_ignored(tmp_path):
    examples = small.examples(8)
    model = small.model(labels=2)
    partial = tmp_path / "epoch-2.partial"
    partial.mkdir()
    (partial / "run.json").write_text("{")
    done = train_small(Plain(), model, examples, checkpoint=tmp_path)
    assert done.resumed == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["epoch-2"]
    names = {path.name for path in (tmp_path / "epoch-2").iterdir()}
    assert names == {"optimizer.pt", "run.json", "weights.safetensors"}


def test_a_folder_that_is_not_writable_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"cannot write .*file"):
        train_small(
            Plain(),
            small.model(labels=2),
            small.examples(8),
            checkpoint=tmp_path / "file",
        )


def test_a_loss_that_is_not_finite_ends_the_training():
    model = small.model(labels=2)
    with torch.no_grad():
        model.classifier.weight.fill_(torch.nan)
    done = train_small(Plain(), model, small.examples(8))
    assert done.reason == "the loss is nan at step 1: try a smaller rate"
    assert done.losses == ()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"epochs": 0}, "epochs must be 1 or more, not 0"),
        ({"batch": 0}, "batch must be 1 or more, not 0"),
        ({"rate": 0.0}, "rate must be above 0, not 0"),
    ],
)
def test_wrong_settings(changes, words):
    with pytest.raises(InputError, match=words):
        train_small(Plain(), small.model(), small.examples(8), **changes)
    with pytest.raises(InputError, match="examples must be 1 or more, not 0"):
        train_small(Plain(), small.model(), [])


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # CPUs without bfloat16
@pytest.mark.parametrize(
    "defence",
    [Plain(), FreeLB(), ASA(), AttackMasks()],
    ids=lambda defence: type(defence).__name__,
)
def test_mixed_precision_is_close(defence):
    examples = small.examples(8)
    losses = [
        train_small(defence, small.model(labels=2), examples, amp=amp, epochs=1).losses[
            0
        ]
        for amp in (False, True)
    ]
    assert losses[0] != losses[1]
    assert losses[1] == pytest.approx(losses[0], rel=0.1)


def test_the_rate_rises_and_falls_linearly():
    rates = []

    def look(optimizer, given, named):
        rates.append({group["lr"] for group in optimizer.param_groups})

    handle = register_optimizer_step_pre_hook(look)
    try:
        train_small(
            Plain(), small.model(labels=2), small.examples(20), batch=4, warmup=0.2
        )
    finally:
        handle.remove()
    factors = [0.5, 1, 1, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8]
    assert all(len(rate) == 1 for rate in rates)
    assert [rate.pop() for rate in rates] == pytest.approx(
        [1e-3 * factor for factor in factors]
    )


def test_a_defence_follows_plain_training():
    staged = PlainFirst(0.3, AttackMasks())
    made = [current(staged, share) for share in (0.0, 0.29, 0.3, 0.99)]
    assert made == [Plain(), Plain(), AttackMasks(), AttackMasks()]
    for share in (0.0, 1.0):
        with pytest.raises(InputError, match="plain_first must be"):
            PlainFirst(share, AttackMasks())


def test_plain_first_begins_with_plain_training():
    examples = small.examples(16)
    plain = small.model(labels=2)
    staged = small.model(labels=2)
    train_small(Plain(), plain, examples)
    train_small(PlainFirst(0.5, AttackMasks()), staged, examples)
    assert not torch.equal(weights(plain), weights(staged))
    halves = small.model(labels=2), small.model(labels=2)
    train_small(Plain(), halves[0], examples, epochs=1, warmup=0.0)
    train_small(
        PlainFirst(0.9, AttackMasks()), halves[1], examples, epochs=1, warmup=0.0
    )
    assert torch.equal(weights(halves[0]), weights(halves[1]))


def test_unknown_words_are_spared_as_in_the_released_code():
    class Seen(Plain):
        def losses(self, model, batch, labels, stream):
            unknown = batch["input_ids"] == tiny.tokenizer().unk_token_id
            seen.append(
                (int(unknown.sum()), bool(batch["special_tokens_mask"][unknown].all()))
            )
            return super().losses(model, batch, labels, stream)

    seen = []
    example = replace(small.examples(1)[0], text="zzzunknownzzz and so on")
    train_small(Seen(), small.model(labels=2), [example], epochs=1)
    ((count, spared),) = seen
    assert count >= 1
    assert spared
