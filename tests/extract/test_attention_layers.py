"""Stacked layers of attention: the theorem, and weights against what was planted."""

from __future__ import annotations

import pytest
import torch

import reference
from keyhole import extract
from keyhole.core import Status
from keyhole.core.errors import InputError
from keyhole.oracle import AttentionLayers, load, plant, save
from planted_truth import plant_block


def planted(sizes, d, seed=0, **flags) -> AttentionLayers:
    stream = torch.Generator().manual_seed(seed)
    W, V = (
        torch.randn(2, sum(sizes), d, d, generator=stream, dtype=torch.float64) / d**0.5
    )
    layers = [float(depth) for depth, heads in enumerate(sizes) for _ in range(heads)]
    return AttentionLayers(W, V, torch.tensor(layers).double(), **flags)


def seen_from_afar(target: AttentionLayers) -> tuple[torch.Tensor, torch.Tensor]:
    """W̃ and Ṽ of all heads."""
    one = torch.eye(target.dim, dtype=torch.float64)
    W = []
    V = []
    front = one
    for forms, values in zip(
        target.W.split(target.sizes), target.V.split(target.sizes), strict=True
    ):
        W = [*W, *(front @ forms)]
        V = [v @ (one + values.sum(0)) for v in V] + list(values)
        front = front @ (one + values.sum(0))
    return torch.stack(W), torch.stack(V)


def normal(*shape) -> torch.Tensor:
    return torch.randn(
        *shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64
    )


@pytest.mark.parametrize("causal", [False, True])
def test_layers_answer_as_written(causal):
    target = planted([1, 2], 3, every_token=True, causal=causal)
    (X,) = normal(1, 4, 3)
    rows = X.numpy()
    for heads in ([0], [1, 2]):
        parts = [
            reference.attention(rows, target.W[h].numpy(), target.V[h].numpy(), causal)
            for h in heads
        ]
        rows = rows + sum(parts)
    assert torch.allclose(target(X[None])[0], torch.from_numpy(rows), rtol=1e-12)
    last = planted([1, 2], 3, causal=causal)
    assert torch.allclose(last(X[None])[0], torch.from_numpy(rows[-1]), rtol=1e-12)


def test_layers_are_stored_and_refused_out_of_order(tmp_path):
    target = plant("attention-layers", dim=3, heads=2, layers=3, causal=True)
    save(target, tmp_path / "layers.safetensors")
    again = load(tmp_path / "layers.safetensors")
    assert torch.equal(target(normal(1, 3, 3)), again(normal(1, 3, 3)))
    with pytest.raises(InputError, match="in order"):
        AttentionLayers(target.W, target.V, target.layers.flip(0))


def test_from_afar_layers_are_one_with_the_heads_of_all():
    target = planted([2, 1, 1], 4)
    W, V = seen_from_afar(target)
    x = normal(4)
    deltas = normal(5, 4)
    P = target(torch.eye(4, dtype=torch.float64)[:, None])
    off = []
    for far in (64.0, 256.0):
        answer = target((far * x + deltas / far)[None])[0]
        rest = far * (answer - far * x @ P) - deltas[-1]
        scores = torch.einsum("d,hde,ne->hn", x, W, deltas)
        wanted = torch.einsum("hn,nd,hdm->m", scores.softmax(-1), deltas, V)
        off.append(float((rest - wanted).norm()))
    assert off[1] < 1e-2
    assert off[0] / off[1] == pytest.approx(16, rel=0.05)  # O(ε²)


def test_small_tokens_tell_layers_apart_that_look_alike_from_afar():
    first = planted([1, 1], 3)
    W, V = seen_from_afar(first)
    one = torch.eye(3, dtype=torch.float64)
    # The same heads with the layers exchanged.
    A = V[1] @ torch.linalg.inv(one + V[0])
    other = AttentionLayers(
        torch.stack([W[1], torch.linalg.inv(one + A) @ W[0]]),
        torch.stack([A, V[0]]),
        first.layers,
    )
    for mine, theirs in zip((W, V), seen_from_afar(other), strict=True):
        assert torch.allclose(mine, theirs.flip(0), rtol=1e-9)
    # Tokens that add up to 0: the term of order 3 is Σ_h Σ_j (u_n W_h u_j)·u_j V_h / n.
    u = normal(4, 3)
    u -= u.mean(0)
    terms = []
    for target in (first, other):
        wanted = torch.einsum(
            "d,hde,je,jf,hfm->m", u[-1], target.W, u, u, target.V
        ) / len(u)
        answer = target(1e-3 * u[None])[0]
        assert torch.allclose(
            (answer - 1e-3 * u[-1]) / 1e-9, wanted, rtol=1e-3, atol=1e-4
        )
        terms.append(wanted)
    assert float((terms[0] - terms[1]).norm()) > 0.1


@pytest.mark.parametrize(
    ("sizes", "d", "flags"),
    [
        ([1, 1], 4, {}),
        ([1, 2], 4, {"every_token": True}),
        ([1, 1], 3, {"causal": True}),
        ([1, 1, 1], 4, {}),
        ([2], 3, {"causal": True, "every_token": True}),
    ],
    ids=str,
)
def test_every_number_comes_back(sizes, d, flags):
    target = planted(sizes, d, **flags)
    result = extract.AttentionLayers()(target)
    assert result.status is Status.RECOVERED, result.reason
    found = result.model
    assert found.sizes == sizes
    assert found.causal is target.causal
    assert extract.judge(target, found, 7).worst < 1e-11
    # Heads of a layer in any order.
    mine, theirs = (
        torch.cat([100 * each.layers[:, None], each.W.flatten(1), each.V.flatten(1)], 1)
        for each in (target, found)
    )
    assert float(torch.cdist(mine, theirs).amin(1).max()) < 1e-8


class _Float32:
    def __init__(self, inner):
        self.inner = inner
        self.dim = inner.dim

    def __call__(self, sequences):
        return self.inner(sequences.float().double()).float().double()


def test_float32_is_read_to_its_own_precision():
    target = planted([1, 1], 4)
    result = extract.AttentionLayers()(_Float32(target))
    assert result.status is Status.RECOVERED, result.reason
    assert extract.judge(target, result.model, 7).worst < 1e-4


def test_what_is_not_read_is_refused():
    for target, why in {
        plant("head", dim=4): "are not vectors of 4 numbers",
        plant_block(4, heads=2, width=4): "not linear",
        planted([2, 2], 4): "4 heads or more",
    }.items():
        result = extract.AttentionLayers()(target)
        assert result.status is Status.NOT_APPLICABLE
        assert why in result.reason


def test_layers_are_told_from_one_without_a_word():
    deep = extract.run(planted([1, 1], 3))
    assert deep.status is Status.RECOVERED
    assert "AttentionLayers, since" in deep.reason
    assert "FullOutput, since" in extract.run(plant("attention", dim=3, heads=2)).reason


def test_a_budget_ends_it():
    result = extract.run(planted([1, 1], 4), "attention-layers", budget=50)
    assert result.status is Status.BUDGET
