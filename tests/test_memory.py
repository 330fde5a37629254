import pytest

import tiny_models as tiny
from keyhole import invert, oracle
from keyhole.core import machine
from keyhole.core.errors import InputError
from keyhole.core.machine import available, expect_memory
from keyhole.models.anatomy import anatomy
from keyhole.models.loading import load_model


def test_what_does_not_fit_is_refused_before_it_is_taken():
    assert 2**20 < available() < 2**60
    expect_memory(2**20, "a megabyte")
    with pytest.raises(InputError, match=r"too much needs 1.0 EB of memory"):
        expect_memory(10**18, "too much")


@pytest.mark.parametrize(
    "kind", ["head", "multi-head", "one-layer", "relu", "attention"]
)
def test_a_target_that_does_not_fit(kind):
    with pytest.raises(
        InputError, match=f"{kind} of d = 1,000,000,000,000 needs .* of memory"
    ):
        oracle.plant(kind, dim=10**12)


def test_a_problem_that_does_not_fit():
    with pytest.raises(
        InputError, match=r"1,000,000,000 tokens of d = 2 with 1 heads needs"
    ):
        invert.plant(10**9, 2)


def test_a_model_that_does_not_fit_is_refused_with_what_to_do(tmp_path, monkeypatch):
    model = tiny.language_model("llama")
    model.save_pretrained(tmp_path)
    load_model(tmp_path, tokenizer=False)
    size = sum(4 * weight.numel() for weight in model.parameters())
    monkeypatch.setattr(
        machine, "available", lambda device: size
    )  # and nothing to work with
    with pytest.raises(
        InputError, match=r"the model .* needs .* of memory, .*: choose a smaller"
    ):
        load_model(tmp_path, tokenizer=False)


def test_a_pass_takes_little_beside_the_weights_and_of_what_is_free(monkeypatch):
    parts = anatomy(tiny.language_model("llama"))
    monkeypatch.setattr(machine, "available", lambda device: 2**40)
    free = machine.memory_of_a_pass("cpu", 10**6)
    gigabyte = 10**9
    assert (
        free == machine.memory_of_a_pass("cpu", 0) < 2 * gigabyte
    )  # a small model: a pass worth its while
    assert machine.memory_of_a_pass("cpu", 100 * gigabyte) == 10 * gigabyte
    many = parts.at_once(16)
    assert many > parts.at_once(1024) > parts.at_once(1024, kept=10**6)
    assert parts.at_once(16, modest=False) > many
    monkeypatch.setattr(machine, "available", lambda device: free)
    assert many / 5 < parts.at_once(16) < many / 3
    monkeypatch.setattr(machine, "available", lambda device: 0)
    assert parts.at_once(16) == 1
