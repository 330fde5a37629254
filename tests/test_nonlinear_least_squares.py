"""Levenberg–Marquardt against a naive loop, step for step, and against SciPy at the end."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import scipy.optimize
import torch

import reference
from any_function import normal
from keyhole.core.least_squares import (
    Options,
    Point,
    Search,
    cholesky,
    conjugate_gradients,
    mean,
    minimize,
    newton,
    qr,
)

TIMES = torch.linspace(0, 2, 12, dtype=torch.float64)
TRUTH = torch.tensor([1.5, 0.7, -0.8, 2.0], dtype=torch.float64)
STARTS = TRUTH + 0.4 * normal(3, 5, 4)


def model(x):
    """`x_0·exp(−x_1 t) + x_2·sin(x_3 t)` (b, times)."""
    a, b, c, d = x[:, :, None].unbind(1)
    return a * torch.exp(-b * TIMES) + c * torch.sin(d * TIMES)


def slopes(x):
    a, b, c, d = x[:, :, None].unbind(1)
    decay, angle = torch.exp(-b * TIMES), d * TIMES
    parts = [decay, -a * TIMES * decay, torch.sin(angle), c * TIMES * torch.cos(angle)]
    return torch.stack(parts, 2)


NOISE = 0.05 * normal(4, len(TIMES))
ANSWERS = model(TRUTH[None])[0]


def problem(x, rows, answers=ANSWERS):
    del rows
    return Point(x, model(x) - answers, partial(slopes, x))


noisy = partial(problem, answers=ANSWERS + NOISE)


def naive(x, answers=ANSWERS):
    return (model(torch.from_numpy(x)[None])[0] - answers).numpy()


def naive_slopes(x):
    return slopes(torch.from_numpy(x)[None])[0].numpy()


@pytest.mark.parametrize("solver", [cholesky, qr])
def test_each_step_is_that_of_the_naive_loop(solver):
    options = Options(solver=solver, damping=1e-2)
    search = Search.begin(problem, 3 * STARTS, options)
    paths = [
        reference.levenberg_marquardt(naive, naive_slopes, x, 12, damping=1e-2)
        for x in (3 * STARTS).numpy()
    ]
    for step in range(12):
        search = search.step()
        for row, path in enumerate(paths):
            x, damping = path[step]
            np.testing.assert_allclose(search.x[row], x, rtol=1e-6, atol=1e-9)
            assert float(search.damping[row]) == pytest.approx(damping)
    assert any(
        np.array_equal(path[0][0], path[1][0]) for path in paths
    )  # a step was refused


def test_the_end_is_that_of_scipy():
    x, loss = minimize(noisy, STARTS, Options(rtol=1e-12))
    for row, start in enumerate(STARTS.numpy()):
        wanted = scipy.optimize.least_squares(
            partial(naive, answers=ANSWERS + NOISE), start, jac=naive_slopes, xtol=1e-14
        )
        assert float(loss[row]) == pytest.approx(2 * wanted.cost, rel=1e-6)
        np.testing.assert_allclose(x[row], wanted.x, rtol=1e-4)


SOLVERS = {
    "cholesky": Options(),
    "mean": Options(solver=partial(cholesky, scale=mean)),
    "qr": Options(solver=qr),
    "newton": Options(solver=newton, damping=1.0, least=1.0, grow=2.0),
    "accelerated": Options(accelerate=True),
}


@pytest.mark.parametrize("options", SOLVERS.values(), ids=SOLVERS)
def test_each_solver_reaches_the_exact_solution(options):
    x, loss = minimize(problem, STARTS, replace(options, target=1e-26))
    assert float(loss.max()) <= 1e-26
    assert float((x - TRUTH).abs().max()) < 1e-10


def test_starts_do_not_depend_on_each_other():
    options = Options(target=1e-20, rtol=1e-3, patience=10)
    together = minimize(noisy, STARTS, options)
    for row in range(len(STARTS)):
        alone = minimize(noisy, STARTS[row : row + 1], options)
        for one, all_starts in zip(alone, together, strict=True):
            torch.testing.assert_close(one[0], all_starts[row], rtol=1e-9, atol=1e-12)


def test_each_start_has_its_own_problem():
    """Starts leave the batch one by one, and the others keep their own data."""
    answers = model(TRUTH + 0.1 * normal(5, 5, 4))

    def own(x, rows):
        return Point(x, model(x) - answers[rows], partial(slopes, x))

    x, loss = minimize(own, STARTS, Options(target=1e-26))
    assert float(loss.max()) <= 1e-26
    assert float((model(x) - answers).abs().max()) < 1e-12


def test_acceleration_adds_half_of_the_second_order_step():
    """For r = (x − 1, x² − 1) the bend is (0, 2p²), exactly."""

    def bent(x, rows):
        del rows
        return Point(
            x,
            torch.cat([x - 1, x**2 - 1], 1),
            lambda: torch.stack([0 * x + 1, 2 * x], 1),
        )

    start = torch.tensor([[1.3]], dtype=torch.float64)
    options = Options(accelerate=True, damping=0.5)
    point = bent(start, None)
    solve = cholesky(point)(torch.tensor([0.5], dtype=torch.float64))
    p = solve(point.residuals)
    a = solve(torch.cat([0 * p, 2 * p**2], 1))
    assert 2 * float(a.abs()) < 0.75 * float(p.abs())
    reached = Search.begin(bent, start, options).step().x
    torch.testing.assert_close(reached, start + p + a / 2)


def test_a_regulariser_is_further_residuals():
    weight = torch.tensor([0.0, 0.3, 2.0], dtype=torch.float64)  # one for each start

    def regularised(x, rows):
        own = weight[rows, None].sqrt()
        eye = torch.eye(4, dtype=torch.float64)
        return Point(
            x,
            torch.cat([model(x) - ANSWERS, own * x], 1),
            lambda: torch.cat([slopes(x), own[..., None] * eye], 1),
        )

    x, _ = minimize(regularised, STARTS[:3], Options(rtol=1e-14, max_steps=300))
    for row in range(3):
        own = x[row : row + 1]
        gradient = slopes(own)[0].mT @ (model(own) - ANSWERS)[0] + weight[row] * own[0]
        assert float(gradient.abs().max()) < 1e-5


def test_products_are_enough():
    class Products(Point):
        def forward(self, p):
            return (slopes(self.x) @ p[..., None])[..., 0]

        def backward(self, r):
            return (slopes(self.x).mT @ r[..., None])[..., 0]

    def matrix_free(x, rows):
        del rows
        return Products(x, model(x) - ANSWERS)

    def solver(point):
        return lambda damping: (
            lambda r: conjugate_gradients(
                point.forward,
                point.backward,
                r,
                rtol=1e-9,
                max_steps=50,
                weight=damping,
            )
        )

    x, loss = minimize(matrix_free, STARTS, Options(solver=solver, target=1e-24))
    assert float(loss.max()) <= 1e-24
    assert float((x - TRUTH).abs().max()) < 1e-9


def test_conjugate_gradients_solve_the_damped_equations():
    J, r = normal(0, 3, 9, 5), normal(1, 3, 9)
    weight = torch.tensor([0.0, 0.1, 3.0], dtype=torch.float64)
    eye = torch.eye(5, dtype=torch.float64)
    wanted = torch.linalg.solve(
        J.mT @ J + weight[:, None, None] * eye, -(J.mT @ r[..., None])
    )
    inverse = torch.linalg.inv(J[0].mT @ J[0] + eye)

    def forward(p):
        return (J @ p[..., None])[..., 0]

    def backward(r):
        return (J.mT @ r[..., None])[..., 0]

    for precondition in (torch.clone, lambda slope: slope @ inverse):
        found = conjugate_gradients(
            forward,
            backward,
            r,
            rtol=1e-12,
            max_steps=50,
            weight=weight,
            precondition=precondition,
        )
        torch.testing.assert_close(found, wanted[..., 0], rtol=1e-9, atol=1e-9)


def test_a_start_that_is_no_number_is_finished():
    starts = torch.cat([STARTS[:1], torch.full((1, 4), torch.nan, dtype=torch.float64)])
    x, loss = minimize(problem, starts, Options(target=1e-26))
    assert float(loss[0]) <= 1e-26
    assert bool(x[1].isnan().all())
    assert bool(loss[1].isnan())


def test_a_local_minimum_ends_the_search():
    """With patience or `rtol` a start ends long before the steps do."""
    steps = 0

    def counted(x, rows):
        nonlocal steps
        steps += 1
        return noisy(x, rows)

    for options in (Options(rtol=1e-3), Options(patience=5), Options(floor=1.0)):
        steps = 0
        minimize(counted, STARTS[:1], replace(options, max_steps=1000))
        assert steps < 20


def test_the_search_stops_when_one_start_is_enough():
    asked = []

    def stop(finished, loss):
        asked.append(float(loss.min()))
        return bool((loss < 1e-10).any())

    _, loss = minimize(problem, STARTS, Options(), stop)
    assert float(loss.min()) < 1e-10
    assert min(asked[:-1]) >= 1e-10
