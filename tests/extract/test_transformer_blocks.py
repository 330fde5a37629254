"""Stacked blocks: the theorems, and weights against what was planted."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import reference
from keyhole import extract
from keyhole.core import Status
from keyhole.core.errors import InputError
from keyhole.extract.canonical import compared, difference_of_blocks
from keyhole.oracle import Block, Blocks, Rounded, load, save
from planted_truth import plant_block

GELU = {
    "dim": 6,
    "heads": 1,
    "head_dim": 2,
    "width": 2,
    "activation": "gelu",
    "norm": "rms",
}
GATED = {**GELU, "width": 1, "activation": "silu", "gated": True}
CENTRED = {**GELU, "dim": 7, "norm": "layer"}


def planted(kind, count=2) -> Blocks:
    return Blocks.of([plant_block(**kind, seed=seed) for seed in range(count)])


def normal(*shape, seed=9) -> torch.Tensor:
    return torch.randn(
        *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", [{**GELU, "heads": 2}, {**GATED, "norm": "layer"}])
def test_blocks_answer_as_written(kind, causal):
    target = planted({**kind, "every_token": True, "causal": causal}, 3)
    (X,) = normal(1, 4, 6)
    rows = X.numpy()
    for block in target.blocks:
        parts = {name: tensor.numpy() for name, tensor in block.tensors().items()}
        settings = block.activation, block.norm, block.epsilon, block.epsilon_behind
        # Without positions a token that asks may as well be the last.
        seen = [[*range(i), *([] if causal else range(i + 1, 4)), i] for i in range(4)]
        rows = np.stack([reference.block(rows[i], parts, *settings) for i in seen])
    assert torch.allclose(target(X[None])[0], torch.from_numpy(rows), rtol=1e-12)
    last = replace(target, every_token=False)
    assert torch.allclose(last(X[None]), target(X[None])[:, -1], rtol=1e-12)


def test_blocks_are_stored_and_refused_out_of_order(tmp_path):
    target = planted({**GATED, "every_token": True, "causal": True})
    save(target, tmp_path / "blocks.safetensors")
    again = load(tmp_path / "blocks.safetensors")
    assert torch.equal(target(normal(1, 3, 6)), again(normal(1, 3, 6)))
    with pytest.raises(InputError, match="in order"):
        replace(target, units=target.units.flip(0))
    with pytest.raises(InputError, match="the same norm"):
        Blocks.of([plant_block(**GELU), plant_block(**{**GELU, "norm": "layer"})])
    with pytest.raises(InputError, match="positions"):
        Blocks.of([plant_block(**GELU, rotary=True)])


@pytest.mark.parametrize("kind", [GELU, GATED, CENTRED])
def test_from_afar_blocks_are_one_with_the_heads_and_units_of_all(kind):
    target = planted(kind, 3)
    parts = {name: getattr(target, name) for name in target.NUMBERS[:10]}
    one = Block(
        **parts,
        b=target.b.sum(0),
        c=target.c.sum(0),
        activation=target.activation,
        norm=target.norm,
        frequencies=torch.zeros(len(target.Q), 0, dtype=torch.float64),
    )
    u = normal(5, 3, target.dim)
    off = [float((target(far * u) - one(far * u)).norm()) for far in (2.0**10, 2.0**14)]
    assert off[1] < 1e-2
    assert off[0] / off[1] == pytest.approx(16, rel=0.05)  # O(1/Λ)


def term(target: Blocks, u: torch.Tensor) -> torch.Tensor:
    """What single tokens Λu answer at 1/Λ, by the formula of the theorem."""
    P = torch.eye(target.dim, dtype=torch.float64) - torch.outer(u, u) / target.dim
    moved = torch.zeros_like(u)
    found = torch.zeros_like(u)
    for block in target.blocks:
        M = torch.einsum("hdk,hkm->dm", block.V, block.O)
        found = found + moved @ P @ M
        moved = moved + u @ M + block.b
        slopes = torch.func.jacrev(block.feed_forward)(u)
        found = found + slopes @ (P @ moved)
        moved = moved + block.feed_forward(u)
    return found


def test_the_next_term_tells_blocks_apart_that_look_alike_from_afar():
    first = planted({**GELU, "width": 3, "epsilon": 0.0})
    other = replace(
        first, units=torch.tensor([0.0, 0, 0, 0, 1, 1]).double()
    )  # one moved down
    u = normal(first.dim)
    u = u * (first.dim**0.5 / u.norm())
    terms = []
    for target in (first, other):
        far = 2.0**14
        one, two = (scale * u for scale in (far, 2 * far))
        measured = (
            2 * far * (target(one[None, None]) - one - target(two[None, None]) + two)[0]
        )
        assert torch.allclose(measured, term(target, u), rtol=1e-3, atol=1e-3)
        terms.append(measured)
    assert float((terms[0] - terms[1]).norm()) > 0.1


@pytest.mark.parametrize(
    ("kind", "count"),
    [
        ({**GELU, "causal": True, "every_token": True}, 2),
        ({**GATED, "dim": 7, "norm": "layer"}, 2),
        (GELU, 1),
    ],
)
def test_every_number_comes_back(kind, count):
    target = planted(kind, count)
    result = extract.TransformerBlocks()(target)
    assert result.status is Status.RECOVERED, result.reason
    found = result.model
    assert (found.causal, found.every_token) == (target.causal, target.every_token)
    assert max(compared(target, found).values()) < 1e-11
    assert torch.allclose(found.epsilon, target.epsilon, rtol=1e-4, atol=0)


def test_blocks_are_compared_in_what_answers_show():
    target = planted(CENTRED)
    c = target.c + torch.tensor([[1.0], [-1.0]])
    order = [1, 0, 2, 3]
    units = {"A": target.A[order], "a": target.a[order], "C": target.C[:, order]}
    same = replace(target, c=c, **units)
    assert torch.allclose(same(normal(2, 3, 7)), target(normal(2, 3, 7)))
    assert not difference_of_blocks(target, same, 1e-12)
    assert "differs" in difference_of_blocks(
        target, replace(target, c=2 * target.c), 1e-6
    )
    assert "2 blocks in one, and 3" in difference_of_blocks(target, planted(CENTRED, 3))


def test_rounded_answers_are_not_called_another_kind():
    result = extract.TransformerBlocks()(Rounded(planted(GELU), 5))
    assert result.status is Status.UNVERIFIED
    assert "float64 would do" in result.reason


def test_what_is_not_read_is_refused():
    for target, why in {
        plant_block(**{**GELU, "norm": "none"}): "no norms in front",
        plant_block(**{**GELU, "norm": "behind"}): "no norms in front",
        planted({**GELU, "width": 8}): "too many",
        planted({**GELU, "heads": 3}): "6 heads or more",
    }.items():
        result = extract.TransformerBlocks()(target)
        assert result.status is Status.NOT_APPLICABLE
        assert why in result.reason
