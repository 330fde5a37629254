"""`keyhole lab stacks`: a planted stack comes back, and what is no stack is refused."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch

from command_line import inside
from keyhole import invert
from keyhole.core.files import write_tensors
from keyhole.lab import stacks

PLANT = (
    "lab",
    "plant",
    "s.safetensors",
    "--kind",
    "inversion",
    "-o",
    "layers=2",
    "-o",
    "dim=4",
    "-o",
    "tokens=5",
)


@pytest.fixture
def keyhole(tmp_path, monkeypatch, capsys):
    return partial(inside, cwd=tmp_path, monkeypatch=monkeypatch, capsys=capsys)


def test_a_planted_stack_comes_back(tmp_path, keyhole):
    assert keyhole(*PLANT, "-o", "residual=true", "-o", "scale=0.3").returncode == 0
    done = keyhole(
        "lab", "stacks", "s.safetensors", "-o", "starts=8", "--json", "--out", "f.json",
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert json.loads(done.stdout)["status"] == "recovered"
    _, secret = stacks.plant(2, 5, 4, scale=0.3, residual=True)
    result = stacks.StackInversion.load(tmp_path / "f.json")
    assert min(float((X - secret).abs().max()) for X in result.solutions) < 1e-8
    words = keyhole("lab", "stacks", "s.safetensors", "-o", "starts=8").stdout
    assert "errors in the output grow" in words


def test_a_stack_comes_back_from_its_file(tmp_path):
    stack, X = stacks.plant(3, 4, 3, causal=True, residual=True, seed=5)
    bias = torch.ones(3, dtype=torch.float64)
    layers = (*stack.layers[:2], stacks.Layer(stack.layers[2].W, stack.layers[2].V, bias, bias))
    stack = stacks.Stack(layers, stack.B, 1e-3)
    stack.save(tmp_path / "s.safetensors")
    again = stacks.Stack.load(tmp_path / "s.safetensors")
    assert torch.equal(again.output(X), stack.output(X))
    assert torch.equal(again.B, stack.B)
    assert again.tolerance == 1e-3
    assert [layer.causal for layer in again.layers] == [True, True, False]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("s.safetensors -o steps=2", "stacks has no option 'steps'"),
        ("s.safetensors -o starts=0", "starts must be 1 or more, not 0"),
        (
            "p.safetensors",
            "p.safetensors must hold tensors 1.W, 1.V, 2.W, … and B: it holds B, V, W",
        ),
        ("gap.safetensors", "gap.safetensors must hold tensors 1.W, 1.V, 2.W, … and B: it holds "),
        ("wide.safetensors", "layer 2 must take the 4 outputs of layer 1"),
        ("nan.safetensors", "layer 2: W holds 16 NaN"),
    ],
)
def test_what_is_no_stack_is_refused_in_one_line(tmp_path, keyhole, words, error):
    stack, _ = stacks.plant(2, 5, 4)
    stack.save(tmp_path / "s.safetensors")
    invert.plant(3, 3)[0].save(tmp_path / "p.safetensors")
    first, two = stack.layers
    plain = {"1.W": first.W, "1.V": first.V, "B": stack.B}
    write_tensors(tmp_path / "gap.safetensors", {**plain, "3.W": two.W, "3.V": two.V})
    narrow = {"2.W": two.W[:3, :3], "2.V": two.V[:3]}
    write_tensors(tmp_path / "wide.safetensors", {**plain, **narrow})
    broken = {"2.W": two.W * torch.nan, "2.V": two.V}
    write_tensors(tmp_path / "nan.safetensors", {**plain, **broken})
    done = keyhole("lab", "stacks", *words.split())
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"keyhole: {error}")
    assert done.stderr.count("\n") == 1


def test_layers_are_planted_for_inversion_alone(keyhole):
    assert (
        "head has no option 'layers'"
        in keyhole("lab", "plant", "t.safetensors", "-o", "layers=2").stderr
    )
    assert "takes neither maps nor heads" in keyhole(*PLANT, "-o", "maps=true").stderr
