"""Planted targets answer as the formulas say, and survive a trip through a file."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import reference
from keyhole import oracle
from keyhole.errors import InputError

X = torch.randn(3, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

CASES = {
    "head": {"kind": "head"},
    "low rank": {"kind": "head", "rank": 2},
    "multi-head": {"kind": "multi-head", "heads": 3},
    "one-layer": {"kind": "one-layer", "width": 7},
    "one-layer, heads": {"kind": "one-layer", "width": 7, "heads": 3},
    "one-layer, heads, narrow": {"kind": "one-layer", "width": 1, "heads": 2},
    "last token": {"kind": "attention", "heads": 2, "outputs": 3},
    "every token": {"kind": "attention", "every_token": True},
    "causal": {"kind": "attention", "every_token": True, "causal": True, "heads": 2},
}


def expected(target: oracle.Planted, tokens: np.ndarray) -> np.ndarray | float:
    match target:
        case oracle.Head():
            return reference.head(tokens, target.W.numpy(), target.v.numpy())
        case oracle.MultiHead():
            W, v = target.tensors()["W"].numpy(), target.tensors()["v"].numpy()
            return reference.multi_head(tokens, W, v)
        case oracle.OneLayer():
            witness = reference.one_layer if target.W.ndim == 2 else reference.one_layer_heads
            return witness(tokens, target.W.numpy(), target.A.numpy(), target.w.numpy())
        case oracle.Attention():
            out = sum(
                reference.attention(tokens, W.numpy(), V.numpy(), target.causal)
                for W, V in zip(target.W, target.V, strict=True)
            )
            return out if target.every_token else out[-1]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_answers_follow_the_formula(case):
    target = oracle.plant(dim=5, seed=3, **case)
    for tokens, answer in zip(X, target(X), strict=True):
        np.testing.assert_allclose(answer, expected(target, tokens.numpy()), atol=1e-13)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_stored_target_answers_the_same_bit_for_bit(case, tmp_path):
    target = oracle.plant(dim=5, seed=3, **case)
    oracle.save(target, tmp_path / "t.safetensors")
    again = oracle.load(tmp_path / "t.safetensors")
    assert again.identity == target.identity
    assert torch.equal(again(X), target(X))


def test_heads_of_one_layer_must_fit_its_network():
    W, A = torch.zeros(2, 5, 5, dtype=torch.float64), torch.zeros(2, 3, 5, dtype=torch.float64)
    w = torch.zeros(3, dtype=torch.float64)
    assert len(oracle.OneLayer(W, A, w).W) == 2
    for bad_W, bad_A in ((W[0], A), (W, A[0]), (W[:1], A), (W, A[:, :2]), (W, A[None])):
        with pytest.raises(InputError, match=r"expected [AW] of shape"):
            oracle.OneLayer(bad_W, bad_A, w)
    # A network without neurons answers zero, with one head as with two.
    assert not oracle.OneLayer(W, A[:, :0], w[:0])(X).any()


def test_identity_tells_targets_apart():
    targets = [oracle.plant(dim=5, seed=seed) for seed in range(3)]
    targets += [oracle.plant("attention", dim=5, every_token=flag) for flag in (True, False)]
    assert len({target.identity for target in targets}) == len(targets)


def test_rank_is_what_was_asked_for():
    W = oracle.plant(dim=12, rank=3).tensors()["W"]
    assert int(torch.linalg.matrix_rank(W)) == 3


@pytest.mark.parametrize(
    ("sequences", "message"),
    [
        ([[1.0]], "expected a torch tensor"),
        (X[0], r"expected sequences of shape \(batch, n, 5\), got \(4, 5\)"),
        (X[:, :, :4], "expected sequences of shape"),
        (X[:, :0], "expected sequences of shape"),
        (X.float(), "expected float64 sequences, got torch.float32"),
        (X / 0, "expected finite sequences"),
        (X * torch.nan, "expected finite sequences"),
    ],
)
def test_bad_questions_are_refused_in_one_line(sequences, message):
    with pytest.raises(InputError, match=message) as caught:
        oracle.plant(dim=5)(sequences)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "tail"}, "expected a kind among"),
        ({"dim": 0}, "expected dim of 1 or more"),
        ({"rank": 9, "dim": 4}, "expected a rank from 1 to dim = 4, got 9"),
        ({"scale": float("nan")}, "expected scale of 0 or more"),
    ],
)
def test_bad_plans_are_refused(arguments, message):
    with pytest.raises(InputError, match=message):
        oracle.plant(**arguments)


def eye(n: int) -> torch.Tensor:
    return torch.eye(n, dtype=torch.float64)


@pytest.mark.parametrize(
    ("tensors", "metadata", "message"),
    [
        ({"W": eye(2)}, {"keyhole": "1", "kind": "head"}, "expected the tensor 'v'"),
        ({"W": eye(2), "v": eye(3)[0]}, {"keyhole": "1", "kind": "head"}, "expected W of shape"),
        (
            {"W": eye(2) / 0, "v": eye(2)[0]},
            {"keyhole": "1", "kind": "head"},
            "finite entries in W",
        ),
        ({"W": eye(2).float(), "v": eye(2)[0]}, {"keyhole": "1", "kind": "head"}, "W in float64"),
        ({"W": eye(2)}, None, "expected a target written by `keyhole plant`"),
        ({"W": eye(2)}, {"keyhole": "1", "kind": "tail"}, "expected a target written by"),
    ],
)
def test_bad_files_are_refused(tensors, metadata, message, tmp_path):
    path = tmp_path / "t.safetensors"
    save_file(tensors, path, metadata=metadata)
    with pytest.raises(InputError, match=message):
        oracle.load(path)


def test_a_truncated_file_is_refused(tmp_path):
    path = tmp_path / "t.safetensors"
    oracle.save(oracle.plant(dim=8), path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(InputError, match=r"expected a \.safetensors file"):
        oracle.load(path)
