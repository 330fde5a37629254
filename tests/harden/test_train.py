"""The training loop: it learns, it goes on where it stopped, it says what it cost."""

from __future__ import annotations

import pytest
import torch

import tiny_classifiers as small
import tiny_models as tiny
from keyhole.errors import InputError
from keyhole.harden import ASA, R3F, SMART, AttackMasks, FreeLB, Plain, SAttend, Together, train
from keyhole.harden.train import _schedule

ALL = [Plain(), SAttend(0.2), SAttend(0.2, "token"), FreeLB(), SMART(), R3F(), ASA(), AttackMasks(),
       Together.strongest()]  # fmt: skip


def weights(model):
    return torch.cat([weight.detach().flatten() for weight in model.parameters()])


def run(defence, model, examples, **changes):
    settings = {"epochs": 2, "rate": 1e-3, "batch": 8, "longest": 32}
    return train(model, tiny.tokenizer(), examples, defence, **{**settings, **changes})


class Stop(Exception):
    pass


def stop_in_epoch(epoch):
    def watch(progress):
        if progress.epoch == epoch:
            raise Stop

    return watch


@pytest.mark.parametrize("defence", ALL, ids=lambda defence: type(defence).__name__)
def test_every_defence_trains_and_goes_on_bit_for_bit(defence, tmp_path):
    examples = small.examples(16)
    whole = small.model(labels=2)
    done = run(defence, whole, examples)
    assert (done.steps, len(done.losses), done.resumed, done.reason) == (4, 2, 0, "")
    assert done.seconds > 0
    assert done.peak > 2**20
    assert not whole.training

    stopped = small.model(labels=2)
    with pytest.raises(Stop):
        run(defence, stopped, examples, checkpoint=tmp_path, watch=stop_in_epoch(1))
    torch.manual_seed(99)  # whatever the process drew in between
    fresh = small.model(labels=2, seed=5)
    again = run(defence, fresh, examples, checkpoint=tmp_path)
    assert again.resumed == 1
    assert again.losses == done.losses
    assert torch.equal(weights(fresh), weights(whole))


@pytest.mark.parametrize("choices", [False, True])
def test_it_learns(choices):
    model = small.model("choices" if choices else "classes", labels=2, dropout=0.0)
    losses = []
    watch = lambda progress: losses.append(progress.loss)  # noqa: E731
    done = run(
        Plain(), model, small.examples(64, choices=choices), epochs=6, rate=3e-3, watch=watch
    )
    assert done.losses[-1] < 0.5 * done.losses[0]
    assert len(losses) == done.steps == 48
    assert done.losses[0] == pytest.approx(sum(losses[:8]) / 8)


def test_seeds_and_data_order():
    examples = small.examples(16)
    ends = []
    for seed in (0, 0, 1):
        model = small.model(labels=2)
        torch.manual_seed(len(ends))
        run(Plain(), model, examples, seed=seed)
        ends.append(weights(model))
    assert torch.equal(ends[0], ends[1])
    assert not torch.equal(ends[0], ends[2])


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    examples = small.examples(8)
    run(Plain(), small.model(labels=2), examples, checkpoint=tmp_path)
    with pytest.raises(InputError, match="got one of another run"):
        run(Plain(), small.model(labels=2), examples, checkpoint=tmp_path, rate=1e-4)
    done = run(Plain(), small.model(labels=2), examples, checkpoint=tmp_path)
    assert done.resumed == 2
    assert done.steps == 2


def test_half_a_checkpoint_is_not_one(tmp_path):
    examples, model = small.examples(8), small.model(labels=2)
    partial = tmp_path / "epoch-2.partial"
    partial.mkdir()
    (partial / "run.json").write_text("{")
    done = run(Plain(), model, examples, checkpoint=tmp_path)
    assert done.resumed == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["epoch-2"]
    names = {path.name for path in (tmp_path / "epoch-2").iterdir()}
    assert names == {"optimizer.pt", "run.json", "weights.safetensors"}


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="expected a folder to write"):
        run(Plain(), small.model(labels=2), small.examples(8), checkpoint=tmp_path / "file")


def test_a_loss_that_is_not_a_number_ends_the_run():
    model = small.model(labels=2)
    with torch.no_grad():
        model.classifier.weight.fill_(torch.nan)
    done = run(Plain(), model, small.examples(8))
    assert done.reason == "the loss is nan at step 1: try a smaller rate"
    assert done.losses == ()


@pytest.mark.parametrize("changes", [{"epochs": 0}, {"batch": 0}, {"rate": 0.0}])
def test_wrong_settings(changes):
    with pytest.raises(InputError, match="expected"):
        run(Plain(), small.model(), small.examples(8), **changes)
    with pytest.raises(InputError, match="expected examples of 1 or more, got 0"):
        run(Plain(), small.model(), [])


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # CPUs without bfloat16
@pytest.mark.parametrize("defence", ALL, ids=lambda defence: type(defence).__name__)
def test_mixed_precision_is_close(defence):
    examples = small.examples(8)
    losses = [
        run(defence, small.model(labels=2), examples, amp=amp, epochs=1).losses[0]
        for amp in (False, True)
    ]
    assert losses[0] != losses[1]
    assert losses[1] == pytest.approx(losses[0], rel=0.1)


def test_the_rate_rises_and_falls_in_lines():
    rates = [_schedule(step, 10, 0.2) for step in range(10)]
    assert rates == pytest.approx([0.5, 1, 1, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8])
