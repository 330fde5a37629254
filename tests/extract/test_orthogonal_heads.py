"""OrthogonalHeads: known bases, unknown bases, and where the conjectured route ends."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from planted_heads import orthogonal_heads

from keyhole.core.errors import InputError
from keyhole.extract import OrthogonalHeads, Status
from keyhole.extract.bilinear import random_orthogonal
from keyhole.oracle import Counted
from keyhole.oracle.planted import Attention, MultiHead


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    stream = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=stream, dtype=torch.float64)


def worst(found, truth) -> float:
    assert isinstance(found, MultiHead)
    assert len(found.W) == len(truth.W)
    return max(
        min(
            max(
                float((A - W).abs().max() / W.abs().max().clamp(min=1e-3)),
                float((a - v).abs().max() / v.abs().max()),
            )
            for A, a in zip(found.W, found.v, strict=True)
        )
        for W, v in zip(truth.W, truth.v, strict=True)
    )


# Known bases


@pytest.mark.parametrize("sizes", [[4, 4], [1, 1, 1], [1, 2, 5], [8, 8, 8, 8]])
def test_known_bases_take_as_many_queries_as_there_are_unknowns(sizes):
    truth, bases = orthogonal_heads(sizes)
    method = OrthogonalHeads(bases)
    result = method(truth)
    assert result.status is Status.RECOVERED
    assert (
        result.queries
        == method.expected_queries(truth.dim)
        == sum(k * k + k for k in sizes)
    )
    assert worst(result.model, truth) <= 1e-12


def test_a_head_without_values_is_left_out():
    truth, bases = orthogonal_heads([3, 2])
    silent = MultiHead(
        [truth.W[0], truth.W[1]], [truth.v[0], torch.zeros_like(truth.v[1])]
    )
    result = OrthogonalHeads(bases)(silent)
    assert result.status is Status.RECOVERED
    assert len(result.model.W) == 1


def test_wrong_bases_are_caught():
    truth, _ = orthogonal_heads([3, 3])
    Q = random_orthogonal(6, torch.Generator().manual_seed(5))
    result = OrthogonalHeads([Q[:, :3].contiguous(), Q[:, 3:].contiguous()])(truth)
    assert result.status is not Status.RECOVERED


def test_bases_are_checked():
    _, (first, second) = orthogonal_heads([2, 2])
    with pytest.raises(InputError, match="at least one basis"):
        OrthogonalHeads([])
    for bad in ([first, first], [2 * first]):
        with pytest.raises(InputError, match="bases must be orthonormal"):
            OrthogonalHeads(bad)
    for bad in ([first[0]], [first, second[:3]], [first.float()]):
        with pytest.raises(
            InputError, match=r"expected float64 bases of shape \(d, k\), got"
        ):
            OrthogonalHeads(bad)
    with pytest.raises(InputError, match="rows"):
        OrthogonalHeads([first])(orthogonal_heads([3, 3])[0])
    for name, value, message in (
        ("points", 0, "points must be 1 or more, not 0"),
        ("levels", 0, "levels must be 1 or more, not 0"),
        ("precision", 0.0, r"precision must be above 0, not 0\.0"),
        ("precision", 2.0, r"precision must be below 1, not 2\.0"),
    ):
        with pytest.raises(InputError, match=message):
            OrthogonalHeads(**{name: value})


# Unknown bases


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    "sizes", [[8], [4, 4], [1, 1, 1, 1], [1, 2, 3, 4], [4, 4, 4, 4], [8, 8]]
)
def test_unknown_bases(sizes, seed):
    truth, _ = orthogonal_heads(sizes, seed)
    result = OrthogonalHeads(seed=seed)(truth)
    assert result.status is Status.RECOVERED, result.reason
    assert worst(result.model, truth) <= 1e-8


@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    size=st.floats(-4, 2),
    seed=st.integers(0, 500),
)
@settings(max_examples=12, deadline=None)
def test_never_a_wrong_model_called_right(sizes, size, seed):
    truth, _ = orthogonal_heads(sizes, seed, 10.0**size)
    result = OrthogonalHeads(seed=seed)(truth)
    if result.status is Status.RECOVERED:
        fresh = normal(20, 6, truth.dim, seed=seed)
        apart = (result.model(fresh) - truth(fresh)).abs().max() / truth(
            fresh
        ).abs().max()
        assert float(apart) <= 1e-7


@pytest.mark.parametrize("unused", [1, 3])
def test_dimensions_that_no_head_uses(unused):
    truth, _ = orthogonal_heads([3, 3], unused=unused)
    result = OrthogonalHeads()(truth)
    assert result.status is Status.RECOVERED
    assert worst(result.model, truth) <= 1e-8


def test_rows_that_lead_nowhere():
    """W_h = c_h·P_h: every row is where it started, so the subspaces cannot be grown."""
    _, bases = orthogonal_heads([5, 5])
    W = [c * basis @ basis.mT for c, basis in zip((1.0, -2.0), bases, strict=True)]
    truth = MultiHead(W, [basis @ normal(5, seed=i) for i, basis in enumerate(bases)])
    result = OrthogonalHeads()(truth)
    assert result.status is Status.RECOVERED, result.reason
    assert worst(result.model, truth) <= 1e-8


def test_equal_heads_of_one_dimension():
    """Same weights in every subspace: eigenvalues differ only through x, which is random."""
    _, bases = orthogonal_heads([1] * 6)
    truth = MultiHead([b @ b.mT for b in bases], [b[:, 0] for b in bases])
    result = OrthogonalHeads()(truth)
    assert result.status is Status.RECOVERED
    assert worst(result.model, truth) <= 1e-7


def test_a_head_without_scores():
    truth, _ = orthogonal_heads([3, 2, 3])
    flat = MultiHead([truth.W[0], 0 * truth.W[1], truth.W[2]], truth.v)
    result = OrthogonalHeads()(flat)
    assert result.status is Status.RECOVERED
    assert worst(result.model, flat) <= 1e-8


def test_no_scores_at_all():
    result = OrthogonalHeads()(
        MultiHead([torch.zeros(4, 4, dtype=torch.float64)], [normal(4)])
    )
    assert result.status is Status.RECOVERED
    assert not bool(result.model.W[0].any())


def test_heads_that_are_not_orthogonal_are_not_guessed():
    truth = MultiHead(list(normal(2, 6, 6) / 2), list(normal(2, 6, seed=1)))
    assert OrthogonalHeads()(truth).status is Status.MISMATCH


# Failure is a value


def test_no_values():
    zero = MultiHead([normal(4, 4)], [torch.zeros(4, dtype=torch.float64)])
    assert OrthogonalHeads()(zero).status is Status.NOT_IDENTIFIABLE
    _, bases = orthogonal_heads([2, 2])
    assert OrthogonalHeads(bases)(zero).status is Status.NOT_IDENTIFIABLE


def test_vectors_are_for_another_method():
    layer = Attention(normal(1, 4, 4), normal(1, 4, 3))
    assert OrthogonalHeads()(layer).status is Status.NOT_APPLICABLE


@pytest.mark.parametrize("known", [False, True])
def test_every_budget_ends_in_a_status(known):
    truth, bases = orthogonal_heads([2, 2])
    method = OrthogonalHeads(bases if known else None)
    needed = method(truth).queries
    for budget in range(needed):
        result = method(Counted(truth, budget))
        assert result.status is Status.BUDGET
        assert result.queries <= budget
    assert method(Counted(truth, needed)).status is Status.UNVERIFIED


class Adversary:
    def __init__(self, answer, dim=6):
        self.dim = dim
        self.answer = answer
        self.stream = torch.Generator().manual_seed(1)

    def __call__(self, sequences):
        return self.answer(self, sequences)

    def noise(self, count):
        return torch.randn(count, generator=self.stream, dtype=torch.float64)


def every_now_and_then_nan(self, x):
    answers = self.noise(len(x))
    return torch.where(answers > 1.5, math.nan, answers)


ADVERSARIES = {
    "constant": lambda _, x: torch.ones(len(x), dtype=torch.float64),
    "huge": lambda _, x: torch.full((len(x),), 1e308, dtype=torch.float64),
    "random": lambda self, x: self.noise(len(x)),
    "discontinuous": lambda _, x: x.sum((1, 2)).sign(),
    "cubic": lambda _, x: (x**3).sum((1, 2)),
    "nan at random": every_now_and_then_nan,
    "text": lambda _, x: "hello",
    "raises": lambda _, x: 1 / 0,
    "lies about its dimension": lambda _, x: x[:, -1] @ normal(7),
}


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("name", ADVERSARIES)
def test_adversaries_end_in_a_status(name, known):
    bases = orthogonal_heads([3, 3])[1] if known else None
    result = OrthogonalHeads(bases)(
        Counted(Adversary(ADVERSARIES[name]), budget=20_000)
    )
    assert result.status not in (Status.RECOVERED, Status.INEXACT)
