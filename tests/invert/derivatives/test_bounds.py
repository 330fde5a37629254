"""The paper's bounds compared with measured values."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from layers import Kind, draw, normal, plain_loss, planted, second
from torch import Tensor

from keyhole import invert
from keyhole.core.errors import InputError
from keyhole.invert.derivatives.bounds import paper_gamma


def test_the_radius_and_the_bounds_are_those_of_the_paper():
    problem, X = planted(4, 3)
    result = invert.bounds(problem, X)
    norms = [np.linalg.norm(matrix.numpy(), 2) for matrix in (problem.W, problem.V, X)]
    lengths = [
        np.linalg.norm(matrix.numpy(), "fro") for matrix in (problem.W, problem.V)
    ]
    largest = np.abs(problem.B.numpy()).max()
    without = max(1.0, *lengths, largest)
    R = max(1.0, *norms, largest)
    assert without != pytest.approx(max(1.0, *norms[:2], largest))
    assert pytest.approx(R) == result.R
    assert result.R_without_input == pytest.approx(without)
    assert list(result.norms.values())[-1] == pytest.approx(norms[2])
    assert result.lipschitz_bound == pytest.approx(4**3 * 3**3 * R**10)
    assert result.lowest_bound == pytest.approx(-4 * 3 * R**8)
    assert result.lowest_bound_without_input == pytest.approx(-4 * 3 * without**8)
    assert result.lowest_proved == pytest.approx(-28 * math.sqrt(4 * 3) * R**8)
    proved = (84 * math.sqrt(4) + 152 * math.sqrt(4 * 3)) * R**10
    assert result.lipschitz_proved == pytest.approx(proved)
    assert result.gamma == pytest.approx(paper_gamma(problem, R))


def test_the_radius_is_never_below_one():
    problem, X = planted(3, 2)
    small = replace(problem, W=problem.W / 100, V=problem.V / 100, B=problem.B / 100)
    assert invert.bounds(small, X / 100).R == 1.0


def drawn(number: int) -> tuple[invert.Problem, Tensor]:
    """Return a random problem whose weights, output and input have random sizes."""
    stream = torch.Generator().manual_seed(number)
    heads, options = (
        (None, ()),
        (None, ()),
        *((h, o) for h in (None, 2) for o in EXTRAS),
    )[number % (2 + 2 * len(EXTRAS))]
    n, d, m = (int(torch.randint(1, 5, (), generator=stream)) for _ in range(3))
    problem, X = draw(Kind(n, d, m, heads, frozenset(options)), seed=number)
    sizes = torch.tensor([0.1, 0.5, 1.0, 2.0], dtype=torch.float64)
    a, b, c, x = (sizes[int(torch.randint(4, (), generator=stream))] for _ in range(4))
    return replace(problem, W=a * problem.W, V=b * problem.V, B=c * problem.B), x * X


EXTRAS = (("causal",), ("residual",), ("key_bias",), ("output_bias",))


def test_the_proved_bound_and_its_gamma_hold_for_every_draw():
    for number in range(60):
        problem, X = drawn(number)
        result = invert.bounds(problem, X, neighbours=2)
        values = torch.linalg.eigvalsh(invert.hessian(problem, X))
        assert result.proved
        assert result.lipschitz <= result.lipschitz_proved
        assert result.lowest_proved <= float(values[0])
        definite = replace(problem, gamma=paper_gamma(problem, result.R))
        assert float(torch.linalg.eigvalsh(invert.hessian(definite, X))[0]) > 0


def test_the_proved_bound_holds_at_the_end_of_a_search_for_a_violation():
    """Search for the most negative eigenvalue at R = 1, where the constant matters most."""
    stream = torch.Generator().manual_seed(0)
    for n, d in ((2, 1), (2, 2)):
        matrices = None
        worst = 0.0
        for number in range(200):
            fresh = [
                normal(stream, *shape) for shape in ((d, d), (d, d), (n, d), (n, d))
            ]
            if matrices is not None and number > 20:
                fresh = [
                    old + 0.1 * new for old, new in zip(matrices, fresh, strict=True)
                ]
            W, V, X = (
                matrix / np.linalg.norm(matrix.numpy(), 2) for matrix in fresh[:3]
            )
            problem = invert.Problem(W=W, V=V, B=fresh[3].sign())
            lowest = float(torch.linalg.eigvalsh(invert.hessian(problem, X))[0])
            if lowest < worst:
                matrices = fresh
                worst = lowest
        assert -28 * math.sqrt(n * d) <= worst < -n * d  # a constant of 1 fails


def test_lemma_4_5_fails_with_a_constant_of_one_inside_the_radius():
    unit = torch.ones(1, 1, dtype=torch.float64)
    X = torch.full((2, 1), math.sqrt(0.5), dtype=torch.float64)
    result = invert.bounds(invert.Problem(W=-unit, V=-unit, B=torch.ones(2, 1)), X)
    assert pytest.approx(1) == result.R
    assert result.lowest == pytest.approx(-2 - 2 * math.sqrt(2))
    assert result.lowest_proved < result.lowest < result.lowest_bound
    assert "Lemma 4.5, -n d R^8 = -2: VIOLATED" in result.summary()


def test_lemma_4_4_fails_with_a_constant_of_one():
    unit = torch.ones(1, 1, dtype=torch.float64)
    angle = math.radians(100)
    X = torch.tensor([[math.cos(angle)], [math.sin(angle)]], dtype=torch.float64)
    problem = invert.Problem(W=-unit, V=unit, B=-torch.ones(2, 1))
    result = invert.bounds(problem, X)
    assert pytest.approx(1) == result.R
    assert result.lipschitz_bound == pytest.approx(8)
    assert 17 < result.lipschitz < result.lipschitz_proved
    assert "Lemma 4.4, n^3 d^3 R^10 = 8: VIOLATED" in result.summary()


@pytest.mark.parametrize(("n", "d", "R"), [(2, 1, 1.0), (3, 2, 1.0)])
def test_the_proved_lipschitz_constant_holds_at_the_end_of_such_a_search(n, d, R):
    """Search at the boundary ‖W‖ = ‖V‖ = ‖X‖ = |b_ij| = R by random steps."""
    stream = torch.Generator().manual_seed(n)
    shapes = ((d, d), (d, d), (n, d), (n, d), (n, d))
    worst = 0.0
    kept = [normal(stream, *shape) for shape in shapes]
    for number in range(80):
        size = 3.0 if number < 20 else 0.2
        tried = [old + size * normal(stream, *old.shape) for old in kept]
        W, V, X = (
            R * matrix / np.linalg.norm(matrix.numpy(), 2) for matrix in tried[:3]
        )
        problem = invert.Problem(W=W, V=V, B=R * tried[3].sign())
        E = tried[4] / tried[4].norm()
        ahead, behind = (
            invert.hessian(problem, X + step * E) for step in (1e-4, -1e-4)
        )
        steep = float(torch.linalg.matrix_norm(ahead - behind, 2)) / 2e-4
        if steep > worst:
            worst = steep
            kept = tried
    result = invert.bounds(problem, X, R=R, neighbours=1)
    assert 0.01 * result.lipschitz_proved < worst <= result.lipschitz_proved


def test_the_lemma_fails_if_the_radius_does_not_cover_x():
    broken = {"without": 0, "with": 0}
    for seed in range(120):
        stream = torch.Generator().manual_seed(seed)
        W, V, X, B = (normal(stream, 3, 3) for _ in range(4))
        problem = invert.Problem(
            W=W / np.linalg.norm(W, 2), V=V / np.linalg.norm(V, 2), B=B / 4
        )
        result = invert.bounds(problem, 3 * X, neighbours=1)
        broken["without"] += result.lowest < result.lowest_bound_without_input
        broken["with"] += result.lowest < result.lowest_bound
    assert broken["with"] == 0 < broken["without"]


def test_a_radius_that_is_too_small_violates_an_assumption():
    problem, X = planted(4, 3)
    assert all(invert.bounds(problem, X).assumptions.values())
    result = invert.bounds(problem, X, R=1.0)
    assert not result.proved
    assert not result.assumptions["‖X‖ ≤ R"]
    assert result.assumptions["‖W‖ ≤ R"]
    assert "does not hold: ‖X‖ ≤ R" in result.summary()
    assert "not proved: R is too small" in result.summary()


def test_additions_to_the_papers_layer_are_listed():
    problem, X = draw(Kind(heads=2, options=frozenset({"causal", "key_bias"})))
    result = invert.bounds(problem, X)
    assert result.beyond == ("2 heads", "a key bias", "a causal mask")
    assert (
        "residual connection (2 heads, a key bias, a causal mask)" in result.summary()
    )
    assert result.proved


def test_bounds_are_saved_and_loaded(tmp_path):
    problem, X = planted(3, 3)
    result = invert.bounds(problem, X)
    result.save(tmp_path / "bounds.json")
    assert invert.Bounds.load(tmp_path / "bounds.json") == result


def test_eigenvalues_are_those_of_the_hessian_that_autodiff_finds():
    problem, X = draw(Kind(n=3, d=2, m=2))
    expected = second(lambda x: plain_loss(problem, x))(X).reshape(6, 6).numpy()
    result = invert.bounds(problem, X)
    values = np.linalg.eigvalsh(expected)
    assert result.lowest == pytest.approx(values[0])
    assert result.highest == pytest.approx(values[-1])


def test_measured_values_lie_within_the_bounds():
    for seed in range(5):
        problem, X = planted(4, 4, seed=seed)
        result = invert.bounds(problem, X, seed=seed)
        assert result.lowest_bound <= result.lowest
        assert 0 < result.lipschitz <= result.lipschitz_bound


def test_the_measured_lipschitz_constant_is_that_of_a_neighbour():
    problem, X = planted(3, 3)
    result = invert.bounds(problem, X, neighbours=1, seed=5)
    away = torch.randn(
        3, 3, generator=torch.Generator().manual_seed(5), dtype=torch.float64
    )
    step = away * (1e-3 * X.norm() / away.norm())
    Y = next(Y for Y in (X + step, X - step) if np.linalg.norm(Y, 2) <= result.R)
    change = invert.hessian(problem, Y) - invert.hessian(problem, X)
    assert result.lipschitz == pytest.approx(
        np.linalg.norm(change.numpy(), 2) / (Y - X).norm()
    )
    assert result == invert.bounds(problem, X, neighbours=1, seed=5)
    assert result.lipschitz <= invert.bounds(problem, X, neighbours=9, seed=5).lipschitz


def test_gamma_does_not_change_the_bounds():
    problem, X = planted(3, 3)
    assert invert.bounds(replace(problem, gamma=5.0), X) == invert.bounds(problem, X)


def test_a_known_input_has_no_lipschitz_constant():
    problem, X = planted(3, 3)
    result = invert.bounds(replace(problem, known=X), X)
    assert result.lowest == result.highest == result.lipschitz == 0.0


def test_wrong_arguments_are_refused():
    problem, X = planted(3, 3)
    with pytest.raises(InputError, match="expected X of shape n×d"):
        invert.bounds(problem, X.unsqueeze(0))
    with pytest.raises(InputError, match="neighbours"):
        invert.bounds(problem, X, neighbours=0)
