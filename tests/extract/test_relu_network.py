"""ReLU networks from length-one queries: the function is exact, whatever the neurons."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_relu import relu_network as reference
from torch import Tensor

from any_function import Failing
from keyhole.core.errors import InputError
from keyhole.extract import Extraction, ReluNetwork, Status, judge
from keyhole.oracle import Clipped, Counted, ReluFfn, Rounded, load, plant, save


class Function:
    """An oracle that is any function of the last token."""

    def __init__(self, f: Callable[[Tensor], Tensor], dim: int = 6) -> None:
        self.f = f
        self.dim = dim

    def __call__(self, sequences: Tensor) -> Tensor:
        return self.f(sequences[:, -1])


def normal(seed: int, *shape: int) -> Tensor:
    stream = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=stream, dtype=torch.float64)


def fresh_error(target: ReluFfn, model: object, seed: int = 99) -> float:
    """The worst error on 200 fresh tokens, relative to the largest answer."""
    x = normal(seed, 200, 1, target.dim)
    answers = target(x)
    scale = float(answers.abs().max()) or 1.0
    return float((model(x) - answers).abs().max()) / scale


def assert_recovered(
    result: Extraction, target: ReluFfn, tolerance: float = 1e-9
) -> None:
    assert result.status is Status.RECOVERED, result.reason
    assert fresh_error(target, result.model) <= tolerance


@pytest.mark.parametrize(
    ("d", "m"), [(1, 4), (2, 7), (3, 5), (5, 40), (8, 8), (16, 32), (16, 64)]
)
def test_random_networks(d: int, m: int) -> None:
    for seed in range(3):
        target = plant("relu", dim=d, width=m, seed=seed)
        assert isinstance(target, ReluFfn)
        result = ReluNetwork(seed=seed)(target)
        assert_recovered(result, target)
        assert isinstance(result.model, ReluFfn)
        assert len(result.model.w) <= m + 2
        assert result.queries <= 40 + 2 * d + m * (1.6 * d + 12)
        assert result.known == 1.0


def test_planted_and_recovered_networks_agree_with_a_naive_loop() -> None:
    target = plant("relu", dim=4, width=6, seed=3)
    assert isinstance(target, ReluFfn)
    model = ReluNetwork()(target).model
    assert isinstance(model, ReluFfn)
    for x in normal(5, 10, 4):
        expected = reference(target.A.numpy(), target.w.numpy(), x.numpy())
        assert float(target(x.reshape(1, 1, 4))) == pytest.approx(expected, abs=1e-12)
        again = reference(model.A.numpy(), model.w.numpy(), x.numpy())
        assert again == pytest.approx(expected, abs=1e-9)


def test_independent_neurons_come_back_one_by_one() -> None:
    target = plant("relu", dim=12, width=9, seed=0)
    assert isinstance(target, ReluFfn)
    model = ReluNetwork()(target).model
    assert isinstance(model, ReluFfn)
    planted = (target.A * target.w.abs().unsqueeze(1)).numpy()
    found = (model.A * model.w.abs().unsqueeze(1)).numpy()
    assert found.shape == planted.shape
    gaps = np.linalg.norm(planted[:, None] - found[None], axis=2)
    match = gaps.argmin(1)
    assert sorted(match) == list(range(9))
    assert gaps.min(1).max() < 1e-9
    assert (model.w.sign().numpy()[match] == target.w.sign().numpy()).all()


def odd_networks(seed: int, d: int = 6) -> dict[str, tuple[ReluFfn, int]]:
    """Networks whose neurons cannot be told one by one, with the hyperplanes they show."""
    A = normal(seed, 8, d)
    w = normal(seed + 1000, 8)
    more = normal(seed + 2000, 4)
    half = torch.arange(8) % 2
    skew = normal(seed + 3000, 2, d)
    return {
        "parallel": (ReluFfn(torch.cat([A, 2 * A[:4]]), torch.cat([w, more])), 8),
        "antiparallel": (
            ReluFfn(torch.cat([A, -1.5 * A[:4]]), torch.cat([w, more])),
            8,
        ),
        "even": (ReluFfn(torch.cat([A, -A]), torch.cat([w, w])), 8),
        "linear": (ReluFfn(torch.cat([A, -A]), torch.cat([w, -w])), 0),
        "w = 0": (ReluFfn(A, w * half), 4),
        "a = 0": (ReluFfn(A * half.unsqueeze(1), w), 4),
        "one direction": (ReluFfn(torch.outer(w, A[0]), w), 1),
        "two directions": (ReluFfn(normal(seed, 8, 2) @ A[:2], w), 8),
        "axes": (ReluFfn(torch.eye(d, dtype=torch.float64), w[:d]), d),
        "more than 2d": (
            ReluFfn(normal(seed, 3 * d, d), normal(seed + 1, 3 * d)),
            3 * d,
        ),
        "nearly parallel": (
            ReluFfn(torch.cat([A, A[:2] + 1e-5 * skew]), torch.cat([w, more[:2]])),
            10,
        ),
        "tiny": (ReluFfn(1e-200 * A, w), 8),
        "huge": (ReluFfn(1e200 * A, w), 8),
    }


@pytest.mark.parametrize("name", odd_networks(0))
def test_odd_networks_are_exact_as_functions(name: str) -> None:
    for seed in range(2):
        target, planes = odd_networks(seed)[name]
        result = ReluNetwork(seed=seed)(target)
        assert_recovered(result, target)
        assert isinstance(result.model, ReluFfn)
        assert len(result.model.w) <= planes + 2, f"seed {seed}"


@given(
    seed=st.integers(0, 2**31 - 1),
    d=st.integers(1, 6),
    m=st.integers(0, 12),
    grain=st.sampled_from([0.0, 1.0]),
)
@settings(max_examples=12, deadline=None)
def test_any_small_network(seed: int, d: int, m: int, grain: float) -> None:
    A = normal(seed, m, d)
    w = normal(seed ^ 1, m)
    if grain:  # integers: many equal, opposite and zero neurons
        A = A.round()
        w = w.round()
    target = ReluFfn(A, w)
    assert_recovered(ReluNetwork(seed=seed % 7)(target), target, 1e-8)


def test_the_zero_network_is_recovered_with_no_neurons() -> None:
    target = ReluFfn(normal(0, 5, 4), torch.zeros(5, dtype=torch.float64))
    result = ReluNetwork()(target)
    assert result.status is Status.RECOVERED
    assert isinstance(result.model, ReluFfn)
    assert len(result.model.w) == 0


def test_only_sequences_of_length_one_are_asked_of_a_transformer() -> None:
    target = plant("one-layer", dim=5, width=6, seed=2)
    lengths: set[int] = set()

    class Watched:
        dim = 5

        def __call__(self, sequences: Tensor) -> Tensor:
            lengths.add(sequences.shape[1])
            return target(sequences)

    assert ReluNetwork()(Watched()).status is Status.RECOVERED
    assert lengths == {1}


def test_the_model_is_saved_and_loaded(tmp_path: Path) -> None:
    result = ReluNetwork()(plant("relu", dim=4, width=3, seed=1))
    result.save(tmp_path / "result.json")
    again = Extraction.load(tmp_path / "result.json").model
    assert isinstance(again, ReluFfn)
    assert isinstance(result.model, ReluFfn)
    assert torch.equal(again.A, result.model.A)
    target = plant("relu", dim=4, width=3, seed=1)
    save(target, tmp_path / "target.safetensors")
    assert load(tmp_path / "target.safetensors").identity == target.identity


def test_the_same_seed_asks_the_same_questions() -> None:
    asked: list[list[Tensor]] = [[], []]
    target = plant("relu", dim=5, width=9, seed=4)
    for record in asked:

        def answer(x: Tensor, record: list[Tensor] = record) -> Tensor:
            record.append(x.clone())
            return target(x.unsqueeze(1))

        ReluNetwork(seed=3)(Function(answer, 5))
    assert all(torch.equal(a, b) for a, b in zip(*asked, strict=True))


def test_every_budget_ends_with_what_is_known_so_far() -> None:
    target = plant("relu", dim=6, width=10, seed=0)
    full = ReluNetwork()(target)
    known = -1.0
    for budget in [
        0,
        5,
        12,
        30,
        full.queries // 2,
        full.queries - 20,
        full.queries - 1,
    ]:
        result = ReluNetwork()(Counted(target, budget))
        assert result.status is Status.BUDGET
        assert result.queries == budget
        assert result.known >= known - 0.6  # the width becomes known on the way
        known = result.known
    assert ReluNetwork()(Counted(target, full.queries)).status is Status.UNVERIFIED
    assert ReluNetwork()(Counted(target, 10_000)).status is Status.RECOVERED


def test_partial_knowledge_is_exact_where_it_reaches() -> None:
    target = plant("relu", dim=6, width=10, seed=0)
    queries = ReluNetwork()(target).queries
    model = ReluNetwork()(Counted(target, queries - 10)).model
    assert model is not None
    stream = torch.Generator().manual_seed(0)
    Q, R = torch.linalg.qr(torch.randn(6, 6, generator=stream, dtype=torch.float64))
    frame = Q * R.diagonal().sign()
    inside = normal(1, 20, 2) @ frame[:2]  # the plane of the half circle
    x = inside.unsqueeze(1)
    torch.testing.assert_close(model(x), target(x), atol=1e-9, rtol=1e-9)


def test_a_wrong_width_is_refused_or_noticed() -> None:
    target = plant("relu", dim=6, width=10, seed=0)
    assert ReluNetwork(width=10)(target).status is Status.RECOVERED
    assert ReluNetwork(width=50)(target).status is Status.RECOVERED
    narrow = ReluNetwork(width=9)(target)
    assert narrow.status is Status.MISMATCH
    with pytest.raises(InputError):
        ReluNetwork(width=-1)
    with pytest.raises(InputError):
        ReluNetwork(resolution=0.0)


def test_the_expected_number_of_queries_is_about_right() -> None:
    target = plant("relu", dim=16, width=40, seed=0)
    expected = ReluNetwork(width=40).expected_queries(16)
    assert expected is not None
    assert 0.8 < ReluNetwork()(target).queries / expected < 1.25
    assert ReluNetwork().expected_queries(16) is None


RELU = plant("relu", dim=6, width=8, seed=1)
V = normal(0, 6)
MISFITS: dict[str, Callable[[Tensor], Tensor]] = {
    "constant": lambda x: torch.ones(len(x), dtype=torch.float64),
    "sign": lambda x: (x @ V).sign(),
    "steps": lambda x: torch.floor(5 * x @ V),
    "random": lambda x: torch.randn(len(x), dtype=torch.float64),
    "noise": lambda x: (
        RELU(x.unsqueeze(1)) + 1e-3 * torch.randn(len(x), dtype=torch.float64)
    ),
    "quadratic": lambda x: (x * x).sum(1),
    "norm": lambda x: torch.linalg.vector_norm(x, dim=1),
    "wave": lambda x: torch.sin(10 * x @ V),
    "jump": lambda x: RELU(x.unsqueeze(1)) + (x[:, 0] > 0),
    "biased": lambda x: torch.relu(x @ V + 0.3),
    "maximum": lambda x: x.amax(1),  # kinks, but on parts of hyperplanes
    "median": lambda x: x.sort(1).values[:, 3],
}


@pytest.mark.parametrize("name", MISFITS)
@pytest.mark.parametrize("resolution", [1e-12, 1e-3])
def test_other_functions_are_never_recovered(name: str, resolution: float) -> None:
    result = ReluNetwork(resolution=resolution)(Function(MISFITS[name]))
    assert result.status is Status.MISMATCH
    assert result.queries < 20_000


@pytest.mark.parametrize("name", ["nan", "raises", "shape", "integers", "text"])
def test_a_broken_oracle_is_a_status(name: str) -> None:
    stream = torch.Generator().manual_seed(0)

    def nan(x: Tensor) -> Tensor:
        hit = torch.rand(len(x), generator=stream) < 0.02
        return torch.where(hit, math.nan, RELU(x.unsqueeze(1)))

    broken: dict[str, Callable[[Tensor], Tensor]] = {
        "nan": nan,
        "raises": lambda x: x @ V[:3],
        "shape": lambda x: x[:-1, 0],
        "integers": lambda x: x[:, 0].long(),
        "text": lambda x: "no",
    }
    assert ReluNetwork()(Function(broken[name])).status is Status.ORACLE_FAILED


def test_outages_vectors_and_lies_about_the_size() -> None:
    down = ReluNetwork()(Failing(RELU, after=60))
    assert down.status is Status.ORACLE_FAILED
    assert ReluNetwork()(Function(lambda x: x)).status is Status.NOT_APPLICABLE
    lying = Function(lambda x: RELU(x.unsqueeze(1)), dim=7)
    assert ReluNetwork()(lying).status is Status.ORACLE_FAILED
    assert ReluNetwork()(Clipped(RELU, 0.5)).status is Status.MISMATCH


def test_rounded_answers_give_an_approximation_when_asked_for() -> None:
    result = ReluNetwork(resolution=1e-6)(Rounded(RELU, 9))
    assert result.status is Status.INEXACT
    assert result.check is not None
    assert result.check.worst < 1e-4


def test_the_judge_sees_a_wrong_model() -> None:
    assert isinstance(RELU, ReluFfn)
    wrong = ReluFfn(RELU.A + 1e-3, RELU.w)
    assert judge(RELU, wrong).worst > 1e-4
