"""Levenberg–Marquardt, the search and the judge: planted inputs and statuses."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from keyhole import invert
from keyhole.core import Status
from keyhole.core.errors import InputError
from keyhole.invert.judge import judge, residual_of


def error(result, X):
    """Return the distance of the planted input to the nearest solution."""
    return min(float((solution - X).abs().max()) for solution in result.solutions)


VARIANTS = {
    "bare": {},
    "several heads": {"heads": 3, "value_scale": 0.4},
    "residual": {"residual": True, "value_scale": 0.3},
    "causal": {"causal": True},
    "biases": {"biases": True},
    "everything": {
        "heads": 2,
        "residual": True,
        "causal": True,
        "biases": True,
        "value_scale": 0.3,
    },
    "symmetric": {"symmetric": True},
}


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize(("n", "d"), [(4, 6), (6, 4)])
def test_near_the_input_it_finds_the_input(options, n, d):
    problem, X = invert.plant(n, d, seed=7, **options)
    start = (
        X
        + 0.01
        * torch.randn(X.shape, generator=torch.Generator().manual_seed(1)).double()
    )
    result = invert.LevenbergMarquardt()(problem, start=start)
    assert result.status is Status.RECOVERED, result.reason
    assert error(result, X) < 1e-9
    assert result.residual < 1e-14
    assert residual_of(problem, result.X) == result.residual


@pytest.mark.parametrize("seed", [0, 2])
def test_digits_double_near_the_solution(seed):
    problem, X = invert.plant(6, 4, symmetric=True, seed=seed)
    result = invert.LevenbergMarquardt()(problem, start=X + 1e-2)
    sizes = [size for _, size in result.trace]
    assert len(sizes) <= 5
    assert sizes[-1] < 1e-13
    for before, after in itertools.pairwise(sizes):
        assert after <= max(10 * before**2, 1e-14)


@pytest.mark.parametrize(("n", "d"), [(3, 6), (6, 3), (4, 4)])
def test_without_a_prior(n, d):
    problem, X = invert.plant(n, d, seed=n % 2)
    result = invert.LevenbergMarquardt(starts=32, solutions=20)(problem)
    assert result.status is Status.RECOVERED
    for solution in result.solutions:
        assert residual_of(problem, solution) < 1e-12
    assert error(result, X) < 1e-6  # the planted input is among the solutions
    norms = [float(solution.norm()) for solution in result.solutions]
    assert norms == sorted(norms)
    assert torch.equal(result.X, result.solutions[0])


def test_problems_of_the_same_shape():
    pairs = [invert.plant(5, 4, seed=seed) for seed in range(6)]
    method = invert.LevenbergMarquardt(starts=12, seed=3)
    for problem, _ in pairs:
        result = method(problem)
        assert result.status is Status.RECOVERED
        assert residual_of(problem, result.X) < 1e-12


def test_problems_of_several_shapes_and_an_invalid_one():
    good, _ = invert.plant(4, 3, seed=0)
    wide, _ = invert.plant(3, 5, seed=1)
    broken = replace(good, B=good.B * torch.nan)
    results = [
        invert.LevenbergMarquardt(starts=24)(problem)
        for problem in (good, broken, wide)
    ]
    statuses = [Status.RECOVERED, Status.NOT_APPLICABLE, Status.RECOVERED]
    assert [result.status for result in results] == statuses
    assert results[2].X.shape == (3, 5)


def test_the_same_seed_gives_the_same_digits():
    problem, _ = invert.plant(5, 5, seed=3)
    first, other = (
        invert.LevenbergMarquardt(starts=16, seed=9)(problem) for _ in range(2)
    )
    assert torch.equal(first.X, other.X)


def test_known_tokens_are_kept_and_leave_a_single_solution():
    problem, X = invert.plant(6, 4, seed=1)
    known = torch.full_like(X, torch.nan)
    known[:3] = X[:3]
    result = invert.LevenbergMarquardt(starts=64, solutions=9)(
        replace(problem, known=known)
    )
    assert result.status is Status.RECOVERED
    assert torch.equal(result.X[:3], X[:3])
    assert error(result, X) < 1e-9
    everything = invert.LevenbergMarquardt(starts=4)(replace(problem, known=X))
    assert everything.status is Status.RECOVERED


def test_a_singular_v_leaves_a_family():
    problem, X = invert.plant(5, 4, seed=2)
    V = problem.V.clone()
    V[:, 3] = V[:, 2]
    problem = replace(problem, V=V)
    problem = replace(problem, B=problem.output(X))
    result = invert.LevenbergMarquardt(starts=8)(problem)
    assert result.status is Status.NOT_IDENTIFIABLE
    assert "X is one of a family" in result.reason
    assert result.residual < 1e-12


def test_an_unreachable_output_is_a_mismatch():
    problem, _ = invert.plant(5, 3, seed=2)
    V = torch.cat(
        [problem.V, problem.V[:, :1]], 1
    )  # the fourth output repeats the first
    wide = invert.Problem(problem.W, V, torch.cat([problem.B, problem.B[:, :1]], 1))
    assert invert.LevenbergMarquardt(starts=32)(wide).status is Status.RECOVERED
    off = replace(wide, B=wide.B + torch.tensor([0.0, 0, 0, 1.0]))
    result = invert.LevenbergMarquardt(starts=4)(off)
    assert result.status is Status.MISMATCH
    assert "no input has this output" in result.reason


def test_an_unreached_output_is_unsolved_with_the_best_input():
    # With W = 0 attention is uniform, so all outputs are equal.
    problem, _ = invert.plant(4, 3, scale=0.0)
    unreachable = replace(problem, B=torch.arange(12.0).reshape(4, 3))
    result = invert.LevenbergMarquardt(starts=2, steps=30)(unreachable)
    assert result.status is Status.UNSOLVED
    assert result.X is not None
    assert "after 2 starts of at most 30 steps" in result.reason
    assert result.advice


def test_duplicate_tokens_are_found():
    problem, X = invert.plant(8, 4, symmetric=True, seed=3)
    X[1] = X[0]
    problem = replace(problem, B=problem.output(X))
    result = invert.LevenbergMarquardt(starts=32)(problem)
    assert result.status is Status.RECOVERED
    assert torch.allclose(result.X[0], result.X[1], rtol=0, atol=1e-8)


def test_one_token_is_a_linear_solve():
    problem, X = invert.plant(1, 5, seed=3)
    result = invert.LevenbergMarquardt(starts=1)(problem)
    assert torch.allclose(result.X, X, rtol=0, atol=1e-10)


def test_a_noisy_output_has_an_exact_input_too():
    problem, X = invert.plant(6, 4, symmetric=True, seed=5)
    noisy = replace(problem, B=problem.B.round(decimals=3), tolerance=5e-4)
    result = invert.LevenbergMarquardt(starts=32)(noisy)
    assert result.status is Status.RECOVERED
    assert error(result, X) < 5e-4 * result.condition


def test_a_tolerance_accepts_rounded_outputs():
    problem, X = invert.plant(4, 3, seed=5)
    verdict = judge(replace(problem, tolerance=0.1), X + 1e-4)
    assert verdict.status is Status.RECOVERED
    assert "within the tolerance" in verdict.reason
    assert judge(problem, X + 1e-5).status is Status.INEXACT
    assert judge(problem, 2 * X + 1).status is Status.UNSOLVED
    assert residual_of(problem, X * torch.nan) == torch.inf


def test_ctrl_c_returns_the_best_so_far():
    problem, _ = invert.plant(8, 8, seed=1)

    def impatient(done, total, note):
        raise KeyboardInterrupt

    result = invert.LevenbergMarquardt(starts=4)(
        problem, start=torch.ones(2, 8, 8).double(), progress=impatient
    )
    assert result.status is Status.INTERRUPTED
    assert result.X is not None
    assert result.reason.startswith("stopped; best residual")


def test_a_time_limit_ends_the_search():
    problem, _ = invert.plant(8, 8, seed=1)
    method = invert.LevenbergMarquardt(starts=4096, seconds=0.2, solutions=10**6)
    assert method(problem).seconds < 10


def test_progress_counts_starts():
    problem, _ = invert.plant(4, 4, seed=0)
    seen = []
    invert.LevenbergMarquardt(starts=10, solutions=99)(
        problem, progress=lambda *a: seen.append(a)
    )
    done, total, note = seen[-1]
    assert (done, total) == (10, 10)
    assert float(note.removeprefix("starts, best ")) < 1e-10


def test_a_start_of_the_wrong_shape_is_refused():
    problem, _ = invert.plant(4, 3)
    with pytest.raises(
        InputError, match=r"expected starts of shape n×d = 4×3, got 3×4"
    ):
        invert.LevenbergMarquardt()(problem, start=torch.ones(3, 4))


@pytest.mark.parametrize("size", [1e-3, 1e-5])
def test_with_a_label_in_place_of_the_output_the_minimum_moves_by_the_pseudo_inverse(
    size,
):
    """If a label is inverted instead of the output, the training input is no minimum."""
    problem, X = invert.plant(4, 4, seed=3, symmetric=True)
    r = size * torch.randn(X.shape, generator=torch.Generator().manual_seed(0)).double()
    labelled = replace(problem, B=problem.B - r)
    found = invert.LevenbergMarquardt(steps=200)(labelled, start=X).X
    J = invert.jacobian(problem, X)
    shift = -torch.linalg.lstsq(J, r.flatten()[:, None]).solution.reshape(X.shape)
    assert float((found - X - shift).norm()) < 30 * float(shift.norm()) ** 2
    assert float(shift.norm()) > size
