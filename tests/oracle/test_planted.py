"""Planted targets answer by their formulas, also after they were saved and loaded."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import reference
from keyhole import oracle
from keyhole.core.errors import InputError

X = torch.randn(
    3, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
)

CASES = {
    "head": {"kind": "head"},
    "low rank": {"kind": "head", "rank": 2},
    "multi-head": {"kind": "multi-head", "heads": 3},
    "one-layer": {"kind": "one-layer", "width": 7},
    "one-layer, narrow": {"kind": "one-layer", "width": 1},
    "last token": {"kind": "attention", "heads": 2, "outputs": 3},
    "every token": {"kind": "attention", "every_token": True},
    "causal": {"kind": "attention", "every_token": True, "causal": True, "heads": 2},
}


def expected(target: oracle.Planted, tokens: np.ndarray) -> np.ndarray | float:
    match target:
        case oracle.Head():
            return reference.head(tokens, target.W.numpy(), target.v.numpy())
        case oracle.MultiHead():
            W = target.tensors()["W"].numpy()
            v = target.tensors()["v"].numpy()
            return reference.multi_head(tokens, W, v)
        case oracle.OneLayer():
            witness = reference.one_layer
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


def test_attention_must_fit_its_network():
    W = torch.zeros(5, 5, dtype=torch.float64)
    A = torch.zeros(3, 5, dtype=torch.float64)
    w = torch.zeros(3, dtype=torch.float64)
    for bad_W, bad_A in ((W[None], A), (W, A[None]), (W[:4], A), (W, A[:2])):
        with pytest.raises(InputError, match=r"expected [AW] of shape"):
            oracle.OneLayer(bad_W, bad_A, w)
    # A network without neurons answers zero.
    assert not oracle.OneLayer(W, A[:0], w[:0])(X).any()


def test_identity_tells_targets_apart():
    targets = [oracle.plant(dim=5, seed=seed) for seed in range(3)]
    targets += [
        oracle.plant("attention", dim=5, every_token=flag) for flag in (True, False)
    ]
    assert len({target.identity for target in targets}) == len(targets)


def test_planted_weights_have_the_requested_rank():
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
        (X / 0, "the sequences hold NaN or infinity"),
        (X * torch.nan, "the sequences hold NaN or infinity"),
    ],
)
def test_invalid_questions_are_one_line_errors(sequences, message):
    with pytest.raises(InputError, match=message) as caught:
        oracle.plant(dim=5)(sequences)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "tail"}, "kind must be one of"),
        ({"dim": 0}, "dim must be 1 or more"),
        ({"rank": 9, "dim": 4}, "rank must be from 1 to dim = 4, not 9"),
        ({"scale": float("nan")}, "scale must be 0 or more"),
    ],
)
def test_invalid_arguments_of_plant_are_refused(arguments, message):
    with pytest.raises(InputError, match=message):
        oracle.plant(**arguments)


def eye(n: int) -> torch.Tensor:
    return torch.eye(n, dtype=torch.float64)


@pytest.mark.parametrize(
    ("tensors", "metadata", "message"),
    [
        ({"W": eye(2)}, {"keyhole": "1", "kind": "head"}, "has no tensor 'v'"),
        (
            {"W": eye(2), "v": eye(3)[0]},
            {"keyhole": "1", "kind": "head"},
            "expected W of shape",
        ),
        (
            {"W": eye(2) / 0, "v": eye(2)[0]},
            {"keyhole": "1", "kind": "head"},
            "W holds NaN or infinity",
        ),
        (
            {"W": eye(2).float(), "v": eye(2)[0]},
            {"keyhole": "1", "kind": "head"},
            "W in float64",
        ),
        ({"W": eye(2)}, None, "is not a target written by `keyhole lab plant`"),
        ({"W": eye(2)}, {"keyhole": "1", "kind": "tail"}, "is not a target written by"),
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
    with pytest.raises(InputError, match=r"as a \.safetensors file"):
        oracle.load(path)


def test_defences_are_stored_with_the_target(tmp_path):
    target = oracle.plant(dim=5, seed=3)
    change = oracle.Defence(max_norm=1.5, noise=0.1, decimals=2, seed=4)
    oracle.save(target, tmp_path / "t.safetensors", change)
    again = oracle.load(tmp_path / "t.safetensors")
    by_hand = oracle.Rounded(oracle.Noisy(oracle.Clipped(target, 1.5), 0.1, seed=4), 2)
    assert torch.equal(again(X), by_hand(X))
    assert again.identity == by_hand.identity
    assert oracle.load_plain(tmp_path / "t.safetensors")[1] == change
    # as files of before state all of them
    stated = {"max_norm": "1.5", "noise": "0.1", "decimals": "2", "sign_only": "False"}
    metadata = {"keyhole": "1", "kind": "head", **stated, "seed": "4"}
    save_file(target.tensors(), tmp_path / "old.safetensors", metadata=metadata)
    assert oracle.load_plain(tmp_path / "old.safetensors")[1] == change
    oracle.save(target, tmp_path / "s.safetensors", oracle.Defence(sign_only=True))
    assert torch.equal(
        oracle.load(tmp_path / "s.safetensors")(X), (target(X) > 0).double()
    )
    assert not oracle.Defence(seed=3).parameters
    assert str(change) == (
        "tokens of norm 1.5 at most, answers within ±0.1, answers rounded to 2 decimals"
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"decimals": "two"}, "expected decimals as a whole number, got 'two' in"),
        ({"decimals": "99"}, "decimals must be at most 15, not 99 in"),
        ({"noise": "nan"}, "noise must be 0 or more, not nan in"),
        ({"max_norm": "0"}, "max_norm must be above 0, not 0.0 in"),
    ],
)
def test_a_file_with_invalid_defences_is_refused(flags, message, tmp_path):
    tensors = oracle.plant(dim=3).tensors()
    path = tmp_path / "t.safetensors"
    save_file(tensors, path, metadata={"keyhole": "1", "kind": "head", **flags})
    with pytest.raises(InputError, match=message):
        oracle.load(path)


def test_orthogonal_heads_live_in_their_subspaces():
    target, bases = oracle.plant_orthogonal(7, 3, seed=2)
    assert [basis.shape[1] for basis in bases] == [3, 2, 2]
    every = torch.cat(bases, 1)
    assert torch.allclose(
        every.mT @ every, torch.eye(7, dtype=torch.float64), atol=1e-14
    )
    for W, v, basis in zip(target.W, target.v, bases, strict=True):
        inside = basis @ basis.mT
        assert torch.allclose(inside @ W @ inside, W, atol=1e-14)
        assert torch.allclose(inside @ v, v, atol=1e-14)
    same = oracle.plant("orthogonal-heads", dim=7, heads=3, seed=2)
    assert torch.equal(
        same(torch.ones(1, 2, 7).double()), target(torch.ones(1, 2, 7).double())
    )
    with pytest.raises(
        InputError, match="heads must not exceed dim = 2: there are 3 heads"
    ):
        oracle.plant_orthogonal(2, 3)
