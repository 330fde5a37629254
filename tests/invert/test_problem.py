"""The problem: real blocks, wrong shapes, files."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from invert.reference_layer import block
from keyhole import invert
from keyhole.core import Status
from keyhole.core.errors import InputError


def tensor(array):
    return torch.as_tensor(np.asarray(array), dtype=torch.float64)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("residual", [False, True])
def test_a_real_block_is_expressed_as_a_problem(causal, residual):
    stream = np.random.default_rng(3)
    heads = 3
    n = 5
    d = 6
    r = 2
    W_Q, W_K, W_V = (stream.normal(size=(heads, d, r)) for _ in range(3))
    W_O = stream.normal(size=(heads, r, d))
    b_Q, b_K, b_V = (stream.normal(size=(heads, r)) for _ in range(3))
    b_O = stream.normal(size=d)
    X = stream.normal(size=(n, d))
    truth = block(X, W_Q, W_K, W_V, W_O, b_Q, b_K, b_V, b_O, causal, residual)
    problem = invert.Problem(
        W=tensor(W_Q @ W_K.transpose(0, 2, 1)),
        V=tensor(W_V @ W_O),
        B=tensor(truth),
        key_bias=tensor([W_K[h] @ b_Q[h] for h in range(heads)]),
        output_bias=tensor(b_O + sum(b_V[h] @ W_O[h] for h in range(heads))),
        causal=causal,
        residual=residual,
    )
    assert np.allclose(problem.output(tensor(X)).numpy(), truth, rtol=0, atol=1e-13)
    assert problem.maps_of(tensor(X)).shape == (heads, n, n)


def test_a_problem_has_no_field_for_the_truth():
    assert {"X", "truth", "input"}.isdisjoint(invert.Problem.__dataclass_fields__)


GOOD = {"W": torch.eye(3), "V": torch.eye(3), "B": torch.ones(4, 3)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"W": torch.ones(3, 2)}, "W must be d×d, or H×d×d for H heads: it is 3×2"),
        ({"V": torch.ones(2, 3)}, "V must be 3×m, as W is 3×3: it is 2×3"),
        ({"B": torch.ones(4, 2)}, "B must be n×3, as V is 3×3: it is 4×2"),
        ({"B": torch.ones(0, 3)}, r"B is empty: its shape is 0×3"),
        ({"B": "text"}, r"expected B as a torch.Tensor, got str"),
        ({"B": torch.ones(4, 3) * 1j}, r"expected real numbers in B"),
        ({"key_bias": torch.ones(2)}, r"expected key_bias of shape 3, got 2"),
        ({"known": torch.ones(3, 3)}, r"expected known of shape 4×3, got 3×3"),
        ({"maps": torch.ones(3, 3)}, r"expected maps of shape 4×4, got 3×3"),
        ({"tolerance": -1.0}, r"tolerance must be 0 or more, not -1.0"),
        (
            {"V": torch.ones(3, 2), "B": torch.ones(4, 2), "residual": True},
            r"as many outputs as",
        ),
    ],
)
def test_wrong_shapes_are_refused_by_problem(change, message):
    with pytest.raises(InputError, match=message):
        invert.Problem(**{**GOOD, **change})


def test_a_problem_is_saved_and_loaded(tmp_path):
    problem, X = invert.plant(4, 3, biases=True, causal=True, seed=1)
    path = tmp_path / "problem.safetensors"
    replace(problem, maps=problem.maps_of(X)).save(path)
    again = invert.Problem.load(path)
    for name in ("W", "V", "B", "key_bias", "output_bias"):
        assert torch.equal(getattr(again, name), getattr(problem, name))
    assert again.causal
    assert not again.residual
    assert torch.equal(again.maps, problem.maps_of(X))


def test_a_file_that_is_not_a_problem_is_refused(tmp_path):
    with pytest.raises(InputError, match="there is no such file"):
        invert.Problem.load(tmp_path / "none.safetensors")
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(b"\x08\x00\x00")
    with pytest.raises(InputError, match=r"as a .safetensors file"):
        invert.Problem.load(broken)
    from safetensors.torch import save_file

    save_file({"W": torch.eye(2)}, tmp_path / "half.safetensors")
    with pytest.raises(InputError, match=r"must hold tensors W, V and B: it holds W"):
        invert.Problem.load(tmp_path / "half.safetensors")


@pytest.mark.parametrize("name", ["W", "V", "B"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_nan_and_infinity_are_a_status_with_advice(name, value):
    tensors = {key: torch.ones(3, 3, dtype=torch.float64) for key in "WVB"}
    tensors[name][1, 1] = value
    result = invert.LevenbergMarquardt(starts=2)(invert.Problem(**tensors))
    assert result.status is Status.NOT_APPLICABLE
    assert result.reason == f"{name} holds 1 NaN or infinite numbers"
    assert result.X is None
    assert result.advice
