"""Many heads: the planted truth in canonical form, related heads, and every way it can fail."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import reference
from any_function import Failing
from keyhole import extract, oracle
from keyhole.core.errors import InputError
from keyhole.extract import Status, canonical, same_function
from planted_truth import relative


def plant(
    d: int, heads: int, rank: int | None = None, seed: int = 0, scale: float = 1.0
):
    return oracle.plant(
        "multi-head", dim=d, heads=heads, rank=rank, seed=seed, scale=scale
    )


def values(d: int, seed: int = 99) -> torch.Tensor:
    return torch.randn(
        d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


def worst(found: oracle.MultiHead, truth: oracle.MultiHead) -> float:
    """The largest error of any W or v relative to its own size; heads are matched by W."""
    W = torch.stack(list(found.W))
    V = torch.stack(list(found.v))
    assert len(W) == len(truth.W)
    errors = []
    for head, v in zip(truth.W, truth.v, strict=True):
        k = int((W - head).abs().amax((1, 2)).argmin())
        errors.append(relative(W[k], head) if head.any() else float(W[k].abs().max()))
        errors.append(relative(V[k], v))
    return max(errors)


@pytest.mark.parametrize(
    ("d", "heads", "rank"),
    [
        (2, 1, None),
        (3, 2, None),
        (6, 1, None),
        (8, 3, None),
        (16, 4, None),
        (16, 4, 4),
        (12, 5, 1),
    ],
)
def test_random_heads_to_rounding(d, heads, rank):
    for seed in range(2 if d < 12 else 1):
        target = plant(d, heads, rank, seed)
        result = extract.MultiHead(seed=seed)(target)
        assert result.status is Status.RECOVERED, result.reason
        assert f"{heads} head" in result.reason
        assert worst(result.model, target) <= 1e-9
        assert same_function(result.model, target, 1e-7)


def test_queries_beside_the_unknowns():
    full = extract.MultiHead()(plant(24, 3))
    assert full.lower_bound == 3 * (24 * 24 + 24)
    assert full.queries <= 1.3 * full.lower_bound
    low = extract.MultiHead()(plant(32, 4, 4))
    assert low.lower_bound == 4 * (2 * 4 * 32 - 16 + 32)
    assert low.queries <= 1.9 * low.lower_bound
    assert low.known == full.known == 1.0


@pytest.mark.parametrize(
    ("d", "heads", "rank"), [(2, 1, None), (5, 2, 1), (8, 3, None), (16, 2, 4)]
)
def test_no_draw_is_above_the_proved_bound(d, heads, rank):
    for seed in range(3):
        asked = extract.MultiHead(seed=seed)(plant(d, heads, rank, seed=seed)).queries
        assert asked <= extract.MultiHead(heads=heads).most_queries(d, attempts=1)
    assert extract.MultiHead().most_queries(d) is None


@pytest.mark.parametrize("heads", [8, 12])
def test_more_heads_than_dimensions(heads):
    target = plant(6, heads, seed=3)
    result = extract.MultiHead()(target)
    assert result.status is Status.RECOVERED
    assert worst(result.model, target) <= 1e-6


def test_the_naive_witness_agrees_with_what_was_found():
    target = plant(6, 3, seed=4)
    found = extract.MultiHead()(target).model
    stream = np.random.default_rng(1)
    for n in (1, 2, 3, 6):
        X = stream.normal(size=(n, 6))
        stolen = reference.multi_head(
            X, [w.numpy() for w in found.W], [v.numpy() for v in found.v]
        )
        assert stolen == pytest.approx(
            float(target(torch.from_numpy(X)[None])[0]), abs=1e-9
        )


RELATED = {
    "equal": (lambda W, v, u: [(W, u)], 1),
    "opposite": (lambda W, v, u: [(-W, u)], 2),
    "opposite with equal v": (lambda W, v, u: [(-W, v)], 2),
    "opposite with another factor": (lambda W, v, u: [(-1.7 * W, u)], 2),
    "opposite with another factor, equal v": (lambda W, v, u: [(-0.6 * W, v)], 2),
    "proportional": (lambda W, v, u: [(2.3 * W, u)], 2),
    "proportional, close": (lambda W, v, u: [(1.02 * W, u)], 2),
    "proportional, parallel v": (lambda W, v, u: [(0.5 * W, 0.7 * v)], 2),
    "proportional, antiparallel v": (lambda W, v, u: [(2.0 * W, -0.7 * v)], 2),
    "three on one ray and one opposite": (
        lambda W, v, u: [(2.5 * W, u), (0.3 * W, u.flip(0)), (-0.5 * W, 2 * v)],
        4,
    ),
    "W, 2W, 3W and 4W": (
        lambda W, v, u: [(2 * W, u), (3 * W, u.flip(0)), (4 * W, v.flip(0))],
        4,
    ),
    "W = 0": (lambda W, v, u: [(0 * W, u)], 2),
    "invisible": (lambda W, v, u: [(W.mT.contiguous(), 0 * v)], 1),
    "values that add up to zero": (lambda W, v, u: [(W.mT.contiguous(), -v)], 2),
    "parallel values": (lambda W, v, u: [(W.mT.contiguous(), 3 * v)], 2),
}


@pytest.mark.parametrize("kind", RELATED)
@pytest.mark.parametrize("others", [0, pytest.param(2, marks=pytest.mark.release)])
def test_related_heads_come_out_in_canonical_form(kind, others):
    add, count = RELATED[kind]
    d = 12 if others else 6  # more dimensions than heads, and about as many
    target = plant(d, 1 + others, seed=others)
    more = add(target.W[0], target.v[0], values(d))
    W = [*target.W, *(a for a, _ in more)]
    v = [*target.v, *(b for _, b in more)]
    target = oracle.MultiHead(W, v)
    result = extract.MultiHead(seed=others)(target)
    assert result.status is Status.RECOVERED, result.reason
    assert len(result.model.W) == count + others
    assert worst(result.model, canonical(target)) <= 1e-6
    assert canonical(result.model).W[0].equal(result.model.W[0])


def test_values_that_add_up_to_rounding():
    target = plant(10, 4, seed=3)
    v = [*target.v[:3], -(target.v[0] + target.v[1] + target.v[2])]
    target = oracle.MultiHead(target.W, v)
    result = extract.MultiHead()(target)
    assert result.status is Status.RECOVERED, result.reason
    assert worst(result.model, target) <= 1e-9


def test_the_reason_tells_what_the_oracle_can_tell():
    target = plant(8, 2, seed=1)
    W = [*target.W, -target.W[0], 0 * target.W[0]]
    v = [*target.v, values(8), values(8, 1)]
    reason = extract.MultiHead()(oracle.MultiHead(W, v)).reason
    assert "4 heads, 1 opposite pair, one with W = 0" in reason
    low = extract.MultiHead()(plant(12, 2, 3)).reason
    assert "2 heads, of rank 3" in low


def test_only_heads_with_w_zero():
    target = oracle.MultiHead([torch.zeros(5, 5, dtype=torch.float64)], [values(5)])
    result = extract.MultiHead()(target)
    assert result.status is Status.RECOVERED
    assert "1 head, with W = 0" in result.reason
    assert worst(result.model, target) <= 1e-12


def test_nothing_visible_is_not_identifiable():
    target = plant(5, 2)
    blind = oracle.MultiHead(target.W, [0 * v for v in target.v])
    result = extract.MultiHead()(blind)
    assert result.status is Status.NOT_IDENTIFIABLE
    assert "no head is visible" in result.reason


def test_a_single_head_is_a_case_of_many():
    target = oracle.plant(dim=9, seed=2)
    result = extract.MultiHead()(target)
    assert result.status is Status.RECOVERED
    assert relative(result.model.W[0], target.W) <= 1e-12
    assert relative(result.model.v[0], target.v) <= 1e-13


@pytest.mark.parametrize("scale", [1e-6, 1e-2, 30.0, 1e4])
def test_any_scale_of_w_and_v(scale):
    target = plant(10, 3, seed=2, scale=scale)
    target = oracle.MultiHead(target.W, [v / scale for v in target.v])
    result = extract.MultiHead()(target)
    assert result.status is Status.RECOVERED
    assert worst(result.model, target) <= 1e-10


def test_heads_of_different_size_and_rank():
    big = plant(12, 2, seed=1, scale=3.0)
    small = plant(12, 2, rank=2, seed=2, scale=0.3)
    target = oracle.MultiHead([*big.W, *small.W], [*big.v, *(0.1 * v for v in small.v)])
    result = extract.MultiHead()(target)
    assert result.status is Status.RECOVERED
    assert worst(result.model, target) <= 1e-6


def test_a_number_of_heads_is_checked_not_needed():
    target = plant(6, 3, seed=1)
    assert extract.MultiHead(heads=3)(target).status is Status.RECOVERED
    W = [*target.W, target.W[0]]
    v = [*target.v, values(6)]
    result = extract.MultiHead(heads=4)(oracle.MultiHead(W, v))
    assert result.status is Status.MISMATCH
    assert "3 heads answer, not 4: equal heads act as one" in result.reason
    assert len(result.model.W) == 3  # what was found is kept


@pytest.mark.parametrize("share", [0.0, 0.2, 0.8, 0.99])
def test_a_budget_that_runs_out_leaves_what_is_known(share):
    target = plant(8, 3, seed=1)
    needed = extract.MultiHead()(target)
    budget = int(share * needed.queries)
    result = extract.MultiHead()(oracle.Counted(target, budget=budget))
    assert result.status is Status.BUDGET
    assert result.queries == budget
    assert result.known < 1
    if share >= 0.8:
        assert worst_value(result.model, target) <= 1e-12  # v and part of W
        assert result.known > 0.1


def worst_value(found: oracle.MultiHead, truth: oracle.MultiHead) -> float:
    V = torch.stack(list(found.v))
    return max(float((V - v).abs().amax(1).min()) for v in truth.v)


def test_a_budget_without_room_for_the_check_is_unverified():
    target = plant(6, 2)
    queries = extract.MultiHead()(target).queries
    result = extract.MultiHead()(oracle.Counted(target, budget=queries))
    assert result.status is Status.UNVERIFIED


def test_the_trace_falls_and_ends_where_the_result_is():
    result = extract.MultiHead()(plant(16, 3, seed=1))
    queries, errors = zip(*result.trace, strict=True)
    assert 3 <= len(queries) <= 8
    assert list(queries) == sorted(queries)
    assert errors[-1] == result.check.worst
    assert min(errors[:-1]) > 1e-3


@pytest.mark.parametrize("heads", [0, -1])
def test_bad_arguments(heads):
    with pytest.raises(InputError, match="heads must be 1 or more"):
        extract.MultiHead(heads=heads)


@pytest.mark.parametrize(
    ("w", "v"),
    [
        ([1.3], [0.7]),
        ([1.0, -1.0], [0.5, 0.5]),
        ([5.0, -0.2, 7.0], [1.0, 1.0, 1.0]),
        ([1.0, 2.0, 3.0, 4.0], [1.0, 0.4, -0.7, 0.3]),
        ([1.0, -1.0, 3.0, -4.0, 0.0], [1.0, 0.4, -0.7, 0.3, 0.9]),
    ],
)
def test_one_dimension_has_one_line_for_all_heads(w, v):
    W = torch.tensor(w, dtype=torch.float64).view(-1, 1, 1)
    target = oracle.MultiHead([*W], [*torch.tensor(v, dtype=torch.float64).view(-1, 1)])
    result = extract.MultiHead()(target)
    assert result.status is Status.RECOVERED, result.reason
    assert worst(result.model, canonical(target)) <= 1e-6


@pytest.mark.parametrize("heads", [2, 3, 4])
def test_two_dimensions_leave_no_direction_beside_v_and_g(heads):
    for seed in range(2):
        target = plant(2, heads, seed=seed)
        result = extract.MultiHead(seed=seed)(target)
        assert result.status is Status.RECOVERED, result.reason
        assert worst(result.model, target) <= 1e-6


@pytest.mark.parametrize(
    "kind",
    [
        "proportional",
        "proportional, parallel v",
        "three on one ray and one opposite",
        "W = 0",
    ],
)
@pytest.mark.parametrize("d", [2, pytest.param(3, marks=pytest.mark.release)])
def test_values_on_one_ray_that_fill_the_space(kind, d):
    add, count = RELATED[kind]
    target = plant(d, 2, seed=1)
    more = add(target.W[0], target.v[0], values(d))
    target = oracle.MultiHead(
        [*target.W, *(W for W, _ in more)], [*target.v, *(v for _, v in more)]
    )
    result = extract.MultiHead(seed=1)(target)
    assert result.status is Status.RECOVERED, result.reason
    assert len(result.model.W) == count + 1
    assert worst(result.model, canonical(target)) <= 1e-6


def test_expected_queries():
    assert extract.MultiHead().expected_queries(10) is None
    target = plant(24, 3)
    spent = extract.MultiHead()(target).queries
    assert abs(extract.MultiHead(heads=3).expected_queries(24) - spent) <= 0.1 * spent


class Odd:
    """Somebody else's endpoint: `answer` is any function of the sequences."""

    def __init__(self, answer, dim: int) -> None:
        self._answer = answer
        self.dim = dim

    def __call__(self, sequences: torch.Tensor) -> torch.Tensor:
        return self._answer(sequences)


def noise(X: torch.Tensor) -> torch.Tensor:
    return torch.randn(len(X), dtype=torch.float64)


def odd_answers(target: oracle.MultiHead, seed: int):
    """Answers that are not many heads', some of them only for longer sequences."""
    u = values(target.dim, seed)
    W = target.W[0]
    v = target.v[0]

    def scores(X):
        return torch.einsum("bnd,de,be->bn", X, W, X[:, -1])

    def longer(answer):
        return lambda X: target(X) if X.shape[1] == 1 else answer(X)

    return {
        "constant": lambda X: torch.full((len(X),), 3.7, dtype=torch.float64),
        "constant from length two": longer(lambda X: 3.7 + 0 * X[:, 0, 0]),
        "NaN": lambda X: torch.full((len(X),), torch.nan, dtype=torch.float64),
        "NaN at random": lambda X: torch.where(
            torch.rand(len(X)) < 0.05, torch.nan, target(X)
        ),
        "overflow": lambda X: torch.where(
            X.abs().amax((1, 2)) > 1e6, torch.inf, target(X)
        ),
        "noise": noise,
        "noise from length two": longer(noise),
        "a little noise": lambda X: target(X) + 1e-6 * noise(X),
        "a little noise from length two": longer(
            lambda X: target(X) * (1 + 1e-7 * noise(X))
        ),
        "step": longer(lambda X: torch.sign((X @ u).sum(1))),
        "hash": longer(lambda X: torch.sin(1e9 * X.sum((1, 2)))),
        "hard attention": lambda X: (X @ v).gather(
            1, scores(X).argmax(1, keepdim=True)
        )[:, 0],
        "cubed scores": lambda X: (torch.softmax(scores(X) ** 3, 1) * (X @ v)).sum(1),
        "first token": lambda X: X[:, 0] @ u,
        "last token": lambda X: X[:, -1] @ u,
        "largest token": lambda X: (X @ u).amax(1),
        "bias": lambda X: target(X) + 1,
        "other from length four": lambda X: (
            target(X) if X.shape[1] < 4 else target(X[:, 1:])
        ),
        "wrong shape": lambda X: torch.zeros(len(X), 1, dtype=torch.float64),
        "a shorter batch": lambda X: target(X)[:-1],
        "an exception": lambda X: 1 / 0,
    }


@pytest.mark.parametrize("kind", odd_answers(plant(4, 2), 0))
def test_odd_oracles_end_in_a_status(kind):
    torch.manual_seed(0)
    result = extract.MultiHead()(Odd(odd_answers(plant(4, 2), 0)[kind], 4))
    unknown = [Status.UNVERIFIED] if "noise" in kind or kind in ("hash", "step") else []
    assert result.status in (
        Status.MISMATCH,
        Status.ORACLE_FAILED,
        Status.NOT_APPLICABLE,
        *unknown,
    )
    assert result.queries < 30_000


@pytest.mark.parametrize("lie", [4, 9])
def test_an_oracle_that_lies_about_its_dimension(lie):
    target = plant(6, 2)
    assert extract.MultiHead()(Odd(target, lie)).status is Status.ORACLE_FAILED


@pytest.mark.parametrize("kind", ["one-layer", "attention"])
def test_another_kind_of_model_is_never_called_recovered(kind):
    result = extract.MultiHead()(oracle.plant(kind, dim=6, seed=1))
    assert result.status in (Status.MISMATCH, Status.NOT_APPLICABLE)


DEGRADED = {
    "rounded to 4": lambda target: oracle.Rounded(target, 4),
    "rounded to 8": lambda target: oracle.Rounded(target, 8),
    "noise of 1e-4": lambda target: oracle.Noisy(target, 1e-4),
    "noise of 1e-9": lambda target: oracle.Noisy(target, 1e-9),
    "clipped at 3": lambda target: oracle.Clipped(target, 3.0),
    "clipped at 1e6": lambda target: oracle.Clipped(target, 1e6),
    "signs": oracle.SignOnly,
    "down after 100": lambda target: Failing(target, 100),
}


@pytest.mark.parametrize("kind", DEGRADED)
def test_degraded_answers_end_in_a_status(kind):
    result = extract.MultiHead()(DEGRADED[kind](plant(4, 2)))
    changed = Status.MISMATCH if kind.startswith("clipped") else Status.UNVERIFIED
    assert result.status in (changed, Status.INEXACT, Status.ORACLE_FAILED)


def test_answers_to_thirteen_digits_are_enough():
    target = plant(8, 3, seed=1)
    result = extract.MultiHead()(oracle.Rounded(target, 13))
    assert result.status is Status.RECOVERED
    assert worst(result.model, target) <= 1e-8


def test_what_no_answer_shows_is_not_claimed():
    """(W, v) and (2W, −v): no jump in the far field, and the values add up."""
    target = plant(8, 1, seed=1)
    W = target.W[0]
    v = target.v[0]
    result = extract.MultiHead()(oracle.MultiHead([W, 2 * W], [v, -v]))
    assert result.status is Status.MISMATCH


@pytest.mark.release
def test_more_slopes_on_a_ray_than_can_be_told_apart():
    target = plant(3, 1, seed=1)
    W = [(1 + 0.3 * k) * target.W[0] for k in range(8)]
    result = extract.MultiHead()(oracle.MultiHead(W, [values(3, k) for k in range(8)]))
    assert result.status is Status.NOT_APPLICABLE
    assert "share a direction" in result.reason or "proportional W" in result.reason


def test_heads_too_close_to_tell_apart_are_not_called_recovered_unless_they_are():
    target = plant(8, 2, seed=1)
    for step in (1e-3, 1e-7):
        W = [target.W[0], target.W[0] + step * target.W[1]]
        near = oracle.MultiHead(W, target.v)
        result = extract.MultiHead()(near)
        if result.status is Status.RECOVERED:
            difference = result.model(torch.eye(8, dtype=torch.float64)[None])
            assert difference == pytest.approx(
                near(torch.eye(8, dtype=torch.float64)[None])
            )
