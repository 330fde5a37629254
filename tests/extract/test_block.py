"""Whole Transformer blocks, read from the last token's vectors."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import normalize

import reference
from keyhole import extract
from keyhole.core import Status, Unsuccessful
from keyhole.core.errors import InputError
from keyhole.extract.blocks import post_norm, pre_norm
from keyhole.extract.blocks.all_heads import Sequences, fitted_heads
from keyhole.extract.blocks.between_norms import Layer, fitted
from keyhole.extract.blocks.kinks import find_relu_units_on_sphere, straight_on_sphere
from keyhole.extract.blocks.position_bias import COPIES, Apart, told_apart
from keyhole.extract.blocks.rank_ones import rank_ones, symmetric
from keyhole.extract.blocks.units import Units, subset_sum
from keyhole.extract.blocks.view import View
from keyhole.extract.blocks.wide_curvature import Sphere, find_units
from keyhole.extract.canonical import canonical_block, compared, difference_of_blocks
from keyhole.extract.sub_layer import read_attention
from keyhole.oracle import load, plant, save
from planted_truth import plant_block

RELU = {
    "dim": 6,
    "heads": 4,
    "head_dim": 1,
    "width": 6,
    "activation": "relu",
    "norm": "none",
}
SMALL = {"dim": 10, "heads": 2, "head_dim": 2, "width": 8}
BENT = {**SMALL, "activation": "gelu", "norm": "layer"}
BEHIND = {**SMALL, "activation": "gelu", "norm": "behind", "epsilon": 1e-12}
PLACES = {**SMALL, "heads": 3, "head_dim": 3, "norm": "behind", "places": 4}
LLAMA = {
    **SMALL,
    "head_dim": 4,
    "width": 5,
    "activation": "silu",
    "gated": True,
    "rotary": True,
    "groups": 1,
    "biases": False,
}


SCORES = {"dim": 6, "heads": 2, "head_dim": 2, "width": 4, "score": True}
GATED = {
    "dim": 7,
    "heads": 1,
    "head_dim": 2,
    "width": 2,
    "activation": "silu",
    "gated": True,
    "norm": "layer",
    "score": True,
}


@pytest.mark.parametrize(
    "kind",
    [
        RELU,
        BENT,
        BEHIND,
        {**PLACES, "places": 2},
        {**LLAMA, "rotary": False, "biases": True},
        SCORES,
        GATED,
    ],
)
def test_a_block_answers_as_written(kind):
    target = plant_block(**kind, seed=3)
    X = torch.randn(
        2, 3, target.dim, generator=torch.Generator().manual_seed(0)
    ).double()
    parts = {name: tensor.numpy() for name, tensor in target.tensors().items()}
    settings = target.activation, target.norm, target.epsilon, target.epsilon_behind
    for tokens, answer in zip(X, target(X), strict=True):
        wanted = torch.from_numpy(reference.block(tokens.numpy(), parts, *settings))
        assert torch.allclose(answer, wanted, rtol=1e-12, atol=1e-12)


def test_a_block_is_stored(tmp_path):
    target = plant_block(**LLAMA)
    save(target, tmp_path / "block.safetensors")
    again = load(tmp_path / "block.safetensors")
    X = torch.ones(1, 2, target.dim, dtype=torch.float64)
    assert torch.equal(target(X), again(X))


NOT_UNIQUE = {**RELU, "width": 12, "seed": 6}  # of the states h that give an answer
CROWDED = {**SMALL, "width": 8, "activation": "silu", "gated": True, "norm": "layer"}
KINKED = {**SMALL, "activation": "relu", "norm": "layer"}
BETWEEN = {
    **RELU,
    "heads": 2,
    "head_dim": 2,
    "width": 4,
    "norm": "behind",
    "epsilon": 1e-5,
}
PLACED = {**SMALL, "head_dim": 4, "norm": "none", "rotary": True, "biases": False}


@pytest.mark.parametrize(
    "kind",
    [
        RELU,
        {**RELU, "seed": 7},
        NOT_UNIQUE,
        BENT,
        LLAMA,
        CROWDED,
        PLACED,
        KINKED,
        BETWEEN,
        SCORES,
    ],
)
def test_every_number_comes_back(kind):
    _expect_back(plant_block(**kind))


def test_a_unit_that_is_nearly_always_open_comes_back():
    target = plant_block(**RELU)
    a = target.a.clone()
    a[2] = 4 * target.A[2].norm()
    _expect_back(replace(target, a=a))


def _expect_back(target):
    result = extract.TransformerBlock()(target)
    assert result.status is Status.RECOVERED, result.reason
    found = result.model
    assert (found.activation, found.norm) == (target.activation, target.norm)
    assert extract.judge(target, found, 7).worst < 1e-11
    if target.scores:
        assert not difference_of_blocks(target, found, 1e-9)
    # A unit's row, its bias and its column of C, of which it is free to be multiplied.
    A = target.A
    a = target.a
    if target.norm == "none":
        a = a + A @ target.b
    if target.norm in ("layer", "behind"):
        A = A - A.mean(1, keepdim=True)
    units = torch.cat([A, a[:, None]], 1)
    others = torch.cat([found.A, found.a[:, None]], 1)
    if target.activation == "relu":
        units = units / A.norm(dim=1, keepdim=True)
    assert len(units) == len(others)
    assert float(torch.cdist(units, others).amin(1).max()) < 1e-6
    if target.norm != "none":
        assert found.epsilon == pytest.approx(target.epsilon, rel=1e-3)
        second, wanted = (
            canonical_block(each).epsilon_behind for each in (found, target)
        )
        assert second == pytest.approx(wanted, rel=1e-3)


def test_what_is_not_read_is_refused():
    scores = extract.TransformerBlock()(plant("head", dim=6))
    assert scores.status is Status.NOT_APPLICABLE
    bare = extract.TransformerBlock()(plant_block(**SCORES, norm="none"))
    assert bare.status is Status.NOT_APPLICABLE
    assert "norm" in bare.reason


def test_what_adds_up_is_subset_sum():
    stream = torch.Generator().manual_seed(0)
    vectors = torch.randn(20, 6, generator=stream, dtype=torch.float64)
    wanted = torch.randint(0, 2, (20,), generator=stream).double()
    assert torch.equal(subset_sum(vectors, wanted @ vectors + 1e-6), wanted)


def test_auto_reads_a_block():
    result = extract.run(plant_block(**RELU))
    assert result.status is Status.RECOVERED
    assert "TransformerBlock" in result.reason


def test_blocks_are_compared_in_what_answers_show():
    for kind in (RELU, BENT, LLAMA, BEHIND):
        target = plant_block(**kind, seed=1)
        order = torch.arange(len(target.A)).flip(0)
        heads = torch.arange(len(target.Q)).flip(0)
        parts = {"A": target.A[order], "a": target.a[order], "C": target.C[:, order]}
        if len(target.G):
            parts |= {
                "G": 2 * target.G[order],
                "g": 2 * target.g[order],
                "C": parts["C"] / 2,
            }
        else:
            parts |= {
                name: getattr(target, name)[heads] for name in ("Q", "q", "K", "V", "O")
            }
        if target.norm == "behind":
            parts |= {"D": 3 * target.D, "C": 3 * parts["C"], "c": 3 * target.c + 1}
        moved = replace(
            target, **{name: part.contiguous() for name, part in parts.items()}
        )
        assert not difference_of_blocks(target, moved, 1e-12)
        assert "differs" in difference_of_blocks(
            target, replace(target, A=target.A * 1.001), 1e-6
        )
    assert "norm" in difference_of_blocks(plant_block(**BENT), plant_block(**BEHIND))


SMALLEST = {"dim": 4, "heads": 2, "head_dim": 2, "width": 3}


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ({"norm": "rms"}, {"epsilon": 0.5}),
        ({"norm": "rms"}, {"epsilon_behind": 0.5}),
        ({"norm": "behind"}, {"epsilon_behind": 0.5}),
        ({"every_token": True}, {"causal": True}),
        ({}, {"every_token": True}),
        ({}, {"frequencies": torch.ones(2, 1, dtype=torch.float64)}),
        ({"rotary": True}, {"frequencies": torch.ones(2, 1, dtype=torch.float64) / 2}),
        (
            {"places": 300},
            {"places": torch.arange(600.0).reshape(2, 300).double() / 300},
        ),
    ],
)
def test_what_answers_show_is_compared(kind, change):
    first = plant_block(**{**SMALLEST, **kind})
    if "places" in change:  # a difference at the largest distance
        first = replace(first, places=change["places"])
        further = first.places.clone()
        further[0, -1] += 1
        change = {"places": further}
    second = replace(first, **change)
    X = torch.randn(2, 301, 4, generator=torch.Generator().manual_seed(0)).double()
    ones = first(X)
    others = second(X)
    assert ones.shape != others.shape or not torch.allclose(ones, others, atol=1e-6)
    assert "differ" in difference_of_blocks(first, second)


def test_a_mask_does_not_show_in_answers_of_the_last_token():
    block = plant_block(**SMALLEST)
    assert not difference_of_blocks(block, replace(block, causal=True))


def test_queries_without_a_matrix_turn_too():
    block = plant_block(**SMALLEST, rotary=True)
    block = replace(block, Q=0 * block.Q)
    faster = replace(block, frequencies=2 * block.frequencies)
    assert "qK differs" in difference_of_blocks(block, faster)


def _with(block, name, row, value):
    part = getattr(block, name).clone()
    part[row] = value if isinstance(value, float) else part[value]
    return replace(block, **{name: part})


@pytest.mark.parametrize(
    ("kind", "zeros", "equal"),
    [
        ({}, ["Q"], []),
        ({}, ["O"], []),
        ({}, ["Q", "q", "V"], []),
        ({"activation": "relu"}, ["A"], []),
        ({"activation": "relu", "norm": "none"}, ["A", "a", "C"], []),
        ({"activation": "relu"}, [], ["A", "a"]),
        ({"gated": True}, [], ["A", "a"]),
        ({"gated": True}, ["G"], []),
        ({"gated": True}, ["G", "g"], []),
        ({}, [], ["Q", "K", "q"]),
        ({"norm": "behind"}, ["D"], []),
    ],
)
def test_a_block_is_the_same_as_itself(kind, zeros, equal):
    block = plant_block(**{**SMALLEST, **kind})
    for name in zeros:
        block = replace(block, **{name: 0 * getattr(block, name)})
    for name in equal:
        block = _with(block, name, 1, 0)
    assert not difference_of_blocks(block, block)
    order = torch.arange(len(block.A)).flip(0)
    parts = {name: getattr(block, name)[order] for name in ("A", "a")}
    if len(block.G):
        parts |= {name: getattr(block, name)[order] for name in ("G", "g")}
    parts |= {name: getattr(block, name).flip(0) for name in ("Q", "q", "K", "V", "O")}
    other = replace(block, **parts, C=block.C[:, order].contiguous())
    assert not difference_of_blocks(block, other, 1e-12)
    assert difference_of_blocks(
        block, replace(block, b=block.b + torch.eye(4).double()[0])
    )


def test_a_relu_unit_without_a_row_is_a_constant():
    for norm in (
        "rms",
        "layer",
    ):  # before LayerNorm, a row of equal numbers is one of zeros
        block = plant_block(**SMALLEST, activation="relu", norm=norm)
        block = _with(
            _with(block, "A", 0, 0.3 if norm == "layer" else 0.0), "a", 0, 2.0
        )
        other = replace(_with(block, "a", 0, 0.0), c=block.c + 2 * block.C[:, 0])
        X = torch.ones(1, 2, 4).double()
        assert torch.allclose(block(X), other(X))
        assert not difference_of_blocks(block, other)


def test_a_relu_unit_with_a_gate_has_two_free_factors():
    block = plant_block(**SMALLEST, activation="relu", gated=True)
    other = replace(
        block, A=2 * block.A, a=2 * block.a, G=-block.G, g=-block.g, C=-block.C / 2
    )
    X = torch.randn(5, 2, 4, generator=torch.Generator().manual_seed(0)).double()
    assert torch.allclose(block(X), other(X))
    assert not difference_of_blocks(block, other, 1e-12)
    assert block.unknowns == plant_block(**SMALLEST, gated=True).unknowns - len(block.A)


@pytest.mark.parametrize("tolerance", [-1.0, 1.0, math.nan])
def test_a_tolerance_of_blocks_must_be_one(tolerance):
    block = plant_block(**SMALLEST)
    with pytest.raises(InputError, match="tolerance must be"):
        difference_of_blocks(block, block, tolerance)


def test_norms_behind_the_sums_show_what_stands_around_them():
    target = plant_block(**{**BEHIND, "dim": 8})
    stream = torch.Generator().manual_seed(0)
    second = post_norm.SecondNorm.read(
        target(torch.randn(40, 1, 8, generator=stream).double())
    )
    assert torch.allclose(second.E, target.E, rtol=0, atol=1e-9)
    assert torch.allclose(second.e, target.e, rtol=0, atol=1e-9)
    first = post_norm.FirstSum.read(
        lambda asked: second.undone(target(asked)), 8, stream
    )
    total = torch.einsum("hdk,hkm->dm", target.V, target.O)
    assert torch.allclose(
        first.total, total - total.mean(1, keepdim=True), rtol=0, atol=1e-6
    )
    assert torch.allclose(first.b, target.b - target.b.mean(), rtol=0, atol=1e-6)


def test_matrices_of_rank_one_are_found_in_their_span():
    stream = torch.Generator().manual_seed(0)
    a = normalize(torch.randn(20, 8, generator=stream, dtype=torch.float64), dim=1)
    outside = torch.linalg.qr(symmetric(a, a).mT, mode="complete")[0][
        :, 20:
    ].mT.contiguous()
    found, _ = rank_ones(outside, 8, 20, stream, 64)
    assert len(found) == 20
    assert float((a @ found.mT).abs().amax(1).min()) > 1 - 1e-10


@pytest.mark.parametrize("seed", [1, 3])
def test_units_are_found_where_they_nearly_fill_the_matrices(seed):
    stream = torch.Generator().manual_seed(seed)
    a = normalize(torch.randn(8, 5, generator=stream, dtype=torch.float64), dim=1)
    one = torch.eye(5, dtype=torch.float64)
    span = torch.cat([symmetric(a, a), symmetric(one, one).sum(0, keepdim=True)])
    outside = torch.linalg.qr(span.mT, mode="complete")[0][:, 9:].mT.contiguous()
    found, partners = rank_ones(outside, 5, 8, stream)
    assert partners is None
    assert float((a @ found.mT).abs().amax(1).min()) > 1 - 1e-9


def test_products_with_partners_are_found_in_their_span():
    stream = torch.Generator().manual_seed(0)
    a, w = torch.randn(2, 8, 10, generator=stream, dtype=torch.float64)
    span = torch.cat([symmetric(a, a), symmetric(a, w)])
    outside = torch.linalg.qr(span.mT, mode="complete")[0][:, 16:].mT.contiguous()
    found, partners = rank_ones(outside, 10, 16, stream, 64)
    assert partners is not None
    a = normalize(a, dim=1)
    near = (a @ found.mT).abs().argmax(1)
    assert len(near.unique()) == 8
    assert torch.allclose(
        (a * found[near]).sum(1).abs(), torch.ones(8).double(), atol=1e-10
    )
    # A partner is known up to the unit itself.
    w = normalize(w - a * (a * w).sum(1, keepdim=True), dim=1)
    assert torch.allclose(
        (w * partners[near]).sum(1).abs(), torch.ones(8).double(), atol=1e-10
    )


@pytest.mark.parametrize("gated", [False, True])
def test_units_of_a_wide_layer_show_where_tokens_do_not_touch_answers(gated):
    activation = "silu" if gated else "gelu"
    target = plant_block(
        24, heads=1, head_dim=2, width=6, activation=activation, gated=gated
    )
    stream = torch.Generator().manual_seed(0)

    def value(u):
        # A long token is added to the first 24 numbers: those that it is not 0 in lose
        # all digits.
        lost = (u != 0) * torch.rand(u.shape, generator=stream, dtype=torch.float64)
        return torch.cat([1e3 * lost, target.feed_forward(u)], 1)

    def touched(rows):
        return torch.cat([(rows != 0).any(0), torch.zeros(24, dtype=torch.bool)])

    sphere = Sphere(value, 24, math.sqrt(24), touched)
    units, *_ = find_units(sphere, torch.eye(24).double(), torch.device("cpu"), stream)
    assert (units.activation, len(units.G)) == (activation, 6 * gated)
    off = torch.stack(
        [torch.cdist(target.A, sign * units.A) for sign in (1, 1 if gated else -1)]
    )
    assert float(off.amin((0, 2)).max()) < 1e-5


@pytest.mark.parametrize(
    "head_dim", [3, 4]
)  # with 4, values have a dimension more than answers
def test_equal_tokens_tell_heads_of_different_biases_apart(head_dim):
    target = plant_block(**{**PLACES, "dim": 12, "head_dim": head_dim, "places": 20})
    M = (target.V @ target.O) @ torch.linalg.qr(torch.ones(12, 1), "complete")[0][
        :, 1:
    ].double()
    weights = [
        target.places[:, :tokens].softmax(1)[:, place] for tokens, place in COPIES
    ]
    slopes = torch.einsum("ch,hdm->cdm", torch.stack(weights), M)
    found = told_apart(slopes, torch.Generator().manual_seed(0))
    assert torch.allclose(found.total, M.sum(0), rtol=0, atol=1e-9)
    near = torch.cdist((found.V @ found.W).flatten(1), M.flatten(1)).argmin(1)
    places = (target.places - target.places[:, :1])[near, :4]
    assert torch.allclose(found.places, places, rtol=0, atol=1e-9)


def test_equal_tokens_of_heads_with_one_bias_are_refused():
    target = plant_block(**{**PLACES, "dim": 12, "places": 20})
    weights = [
        target.places[:, :tokens].softmax(1)[:, place] for tokens, place in COPIES
    ]
    weights = torch.stack(weights)[:, [0, 0, 1]]
    slopes = torch.einsum("ch,hdm->cdm", weights, target.V @ target.O)
    with pytest.raises(Unsuccessful, match="differs from head to head"):
        told_apart(slopes, torch.Generator().manual_seed(0))


def test_units_show_where_answers_have_an_origin_that_is_not_known():
    target = plant_block(12, heads=1, head_dim=2, width=6, norm="behind", epsilon=1e-2)
    axes = torch.linalg.qr(
        torch.cat([torch.ones(12, 1), torch.eye(12)[:, 1:]], 1).double()
    )[0]
    origin = torch.linspace(-1, 1, 11, dtype=torch.float64)

    def value(n):
        u = n @ axes[:, 1:].mT
        y = target.normed(target.D * u + target.feed_forward(u), target.epsilon_behind)
        return y @ axes[:, 1:] + origin

    stream = torch.Generator().manual_seed(0)
    sphere = Sphere(value, 11, math.sqrt(12), centred=False)
    units, centre, _ = find_units(
        sphere, torch.eye(11).double(), torch.device("cpu"), stream
    )
    assert torch.allclose(centre, origin, rtol=0, atol=1e-4)
    rows = target.A @ axes[:, 1:]
    off = torch.stack([torch.cdist(rows, sign * units.A) for sign in (1, -1)])
    assert float(off.amin((0, 2)).max()) < 1e-2


@pytest.mark.parametrize("rare", [False, True])
def test_a_layer_between_norms_is_fitted_from_units_of_wrong_lengths(rare):
    """One in doubt; with `rare`, another one is off nearly everywhere."""
    target = plant_block(
        16, heads=1, head_dim=2, width=8, norm="behind", epsilon=0.0, seed=1
    )
    axes = torch.linalg.qr(
        torch.cat([torch.ones(16, 1), torch.eye(16)[:, 1:]], 1).double()
    )[0]
    lift = axes[:, 1:]
    radius = 4.0
    A = target.A @ lift
    a = target.a.clone()
    C = lift.mT @ target.C
    if rare:
        a[1] = -2.8 * A[1].norm()
    none = torch.zeros(0, dtype=torch.float64)
    true = Units(A, a, none.reshape(0, 15), none, C, "gelu")
    layer = Layer(true, lift.mT @ torch.diag(target.D) @ lift, target.c @ lift)
    scale = torch.where(torch.arange(8) == 0, 2.4, 1.0).to(a)
    start = replace(true, A=A * scale[:, None], a=a + scale - 1, C=C / scale**2)

    def value(n):
        return radius * normalize(layer(n), dim=1)

    stream = torch.Generator().manual_seed(0)
    cpu = torch.device("cpu")
    doubtful = torch.tensor([0])
    found = fitted(value, start, doubtful, radius, cpu, stream, exact=True).layer.units
    off = torch.stack([(A[:, None] - sign * found.A).norm(dim=2) for sign in (1, -1)])
    assert float(off.amin((0, 2)).max()) < 1e-10


@pytest.mark.parametrize("lost", [False, True])
def test_relu_units_show_on_great_circles(lost):
    """Also where answers have lost the length of their sum, and an origin that is not known."""
    target = plant_block(8, heads=1, width=12, activation="relu", norm="none", seed=2)
    origin = 1e-5 * torch.ones(8, dtype=torch.float64)

    def value(n):
        sums = n + target.feed_forward(n)
        lengths = (sums.square().sum(1, keepdim=True) + 1e-5).sqrt()
        return sums / lengths + origin if lost else sums

    stream = torch.Generator().manual_seed(0)
    assert straight_on_sphere(value, 8, math.sqrt(8), stream, lost)
    units, centre = find_relu_units_on_sphere(value, 8, math.sqrt(8), stream, lost)
    assert torch.allclose(centre, lost * origin, rtol=0, atol=1e-9)
    rows = torch.cat([target.A, target.a[:, None]], 1) / target.A.norm(
        dim=1, keepdim=True
    )
    found = torch.cat([units.A, units.a[:, None]], 1)
    off = torch.stack([torch.cdist(rows, sign * found) for sign in (1, -1)])
    assert len(found) == 12
    assert float(off.amin((0, 2)).max()) < 1e-4


def _around(target):
    """All of a block but its attention, as if it had been read."""
    d = target.dim
    axes = torch.linalg.qr(
        torch.cat([torch.ones(d, 1), torch.eye(d)[:, 1:]], 1).double()
    )[0][:, 1:]
    B = torch.einsum("hdk,hkm->dm", target.V, target.O) + torch.eye(d)
    sums = post_norm.FirstSum(
        -target.b @ torch.linalg.inv(B),
        torch.linalg.inv(B),
        B - B.mean(1, keepdim=True),
    )
    true = canonical_block(target)
    none = torch.zeros(0, dtype=torch.float64)
    units = Units(
        true.A @ axes, true.a, none.reshape(0, d - 1), none, axes.mT @ true.C, "gelu"
    )
    layer = post_norm.Layer(
        units,
        axes.mT @ (true.D[:, None] * axes),
        true.c @ axes,
        true.epsilon,
        true.epsilon_behind,
    )
    return post_norm.PeeledPostNorm(
        target,
        axes,
        post_norm.SecondNorm(target.E, target.e),
        sums,
        layer,
        true.D,
        torch.device("cpu"),
    )


# With long columns of C, as trained layers have them, an answer does not show its sum.
@pytest.mark.parametrize("longer", [1.0, 8.0])
def test_attention_is_read_through_norms_behind_the_sums(longer):
    target = plant_block(**{**BEHIND, "dim": 8, "head_dim": 3, "width": 6})
    target = replace(target, C=longer * target.C)
    around = _around(target)
    stream = torch.Generator().manual_seed(0)
    pairs = torch.randn(40, 2, 8, generator=stream, dtype=torch.float64)
    pairs[:, 0] = pairs[:, 1] + 0.3 * pairs[:, 0]
    wanted = target.sub_layer(pairs) @ around.axes
    assert torch.allclose(around(pairs), wanted, rtol=0, atol=1e-9)
    heads = read_attention(around.surroundings(), stream, around.total, 8.0)
    assert not difference_of_blocks(target, around.block(heads), 1e-4)


def test_heads_with_a_bias_of_positions_are_read_through_norms_behind_the_sums():
    target = plant_block(**PLACES)
    around = _around(target)
    stream = torch.Generator().manual_seed(0)
    near = (target.places - target.places[:, :1])[:, torch.arange(4).clamp(max=3)]
    true = canonical_block(target)
    heads = Apart(true.V, true.O, near)
    around = replace(around, first=replace(around.first, heads=heads))
    found = around.attention(stream, 8.0)
    assert found.places.shape == (3, 4)  # further distances share the last number
    assert not difference_of_blocks(target, around.block(found), 1e-7)
    bare = around.block(replace(found, places=found.places[:0]))
    assert "differ in bias of positions: True and False" in difference_of_blocks(
        target, bare
    )


@pytest.mark.slow
def test_a_block_with_a_bias_of_positions_comes_back():
    target = plant_block(**{**PLACES, "heads": 2, "width": 5, "epsilon": 1e-12})
    result = extract.TransformerBlock()(target)
    assert result.status is Status.RECOVERED, result.reason
    assert "a bias of positions" in result.reason
    assert not difference_of_blocks(target, result.model, 1e-9)


def test_all_heads_behind_norms_are_fitted_at_once():
    # So few heads that an answer shows less of them than it has numbers.
    target = plant_block(**{**BEHIND, "dim": 24, "heads": 1, "head_dim": 2, "width": 4})
    around = _around(target)
    stream = torch.Generator().manual_seed(0)
    true = canonical_block(target).sub_layer
    true = replace(true, O=true.O @ around.axes, b=true.b @ around.axes)
    rough = replace(
        true,
        **{
            name: part * (1 + 1e-4 * torch.randn(part.shape, generator=stream))
            for name, part in true.tensors().items()
        },
    )
    assert difference_of_blocks(target, around.block(rough), 1e-5)
    assert not difference_of_blocks(
        target, around.block(around.polished(rough, stream)), 1e-10
    )


def test_heads_that_turn_and_share_keys_are_fitted_at_once():
    target = plant_block(**{**LLAMA, "dim": 8, "heads": 4, "head_dim": 2, "groups": 2})
    stream = torch.Generator().manual_seed(0)
    true = target.sub_layer
    rough = replace(
        true,
        **{
            name: part * (1 + 1e-5 * torch.randn(part.shape, generator=stream))
            for name, part in true.tensors().items()
        },
    )
    sequences = Sequences.drawn(rough, stream, math.sqrt(8))
    sums = true(sequences.tokens)
    fitted = fitted_heads(rough, sequences, sums, lambda added: added, "cpu", stream)
    blocks = (replace(target, **each.tensors()) for each in (rough, fitted))
    before, after = (compared(target, each) for each in blocks)
    assert max(before.values()) > 1e-6
    assert max(after.values()) < 1e-10


def test_what_a_fit_leaves_is_not_taken_for_a_head():
    target = plant_block(**LLAMA)
    stream = torch.Generator().manual_seed(0)
    undone = pre_norm.read(View.open(target, stream), torch.device("cpu"), stream)
    C = undone.units.C + 1e-10 * torch.randn(
        10, 5, generator=stream, dtype=torch.float64
    )
    units = replace(undone.units, C=C)
    off = replace(undone, network=replace(undone.network, units=units))
    heads = read_attention(off.surroundings(), stream, off.total)
    assert not difference_of_blocks(target, off.block(heads), 1e-5)


@pytest.mark.parametrize(
    "rounded",
    [
        lambda y: y.float().double(),
        lambda y: y.bfloat16().double(),
        lambda y: y.round(decimals=3),
    ],
)
def test_coarse_answers_could_not_be_checked(rounded):
    block = plant_block(dim=6, heads=2, width=4, norm="layer")

    class Coarse:
        dim = block.dim

        def __call__(self, sequences):
            return rounded(block(sequences))

    result = extract.TransformerBlock()(Coarse())
    assert result.status is Status.UNVERIFIED
    assert "float64 would do" in result.reason


def test_a_budget_ends_it():
    result = extract.run(plant_block(**BENT), "transformer-block", budget=50)
    assert result.status is Status.BUDGET
