"""Certificates hold for the planted input, and false solutions get none."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from decimal import Decimal

import pytest
import reference_certify as reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd.functional import jacobian

from keyhole.core.errors import InputError
from keyhole.invert import krawczyk as balls
from keyhole.invert.derivatives.equations import Equations
from keyhole.invert.krawczyk import Certificate, certify
from keyhole.invert.problem import Problem

# name: the arguments of `plant` that differ from the plain layer
VARIANTS = {
    "plain": {},
    "three heads": {"heads": 3},
    "causal": {"causal": True},
    "residual": {"residual": True},
    "biases": {"biases": True},
    "known token": {"known": "token"},
    "everything": {"heads": 2, "causal": True, "biases": True, "known": "column"},
}


def plant(n=4, d=4, seed=0, *, scale=0.3, heads=0, biases=False, known="", **flags):
    """A problem with as many equations as unknowns, and its input.

    With n = d, one token (or one entry of each) known and one output less, the numbers
    agree again.
    """
    stream = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=stream, dtype=torch.float64)

    m = d - 1 if known else d
    several = (heads,) if heads else ()
    X = draw(n, d)
    there = torch.zeros(n, d, dtype=torch.bool)
    there[
        1 if known == "token" else slice(None), slice(None) if known == "token" else 1
    ] = True
    problem = Problem(
        W=draw(*several, d, d) * scale / d**0.5,
        V=draw(*several, d, m),
        B=torch.zeros(n, m),
        key_bias=draw(*several, d) if biases else None,
        output_bias=draw(m) if biases else None,
        known=X.where(there, torch.nan) if known else None,
        **flags,
    )
    return replace(problem, B=problem.output(X)), X


def decimals(tensor):
    if tensor is None:
        return None
    if tensor.ndim == 0:
        return Decimal(float(tensor))
    return [decimals(part) for part in tensor]


def true_solution(problem, X):
    """Return the distance from X to the exact solution for B, in 60 digits."""
    W, V = (t if t.ndim == 3 else t[None] for t in (problem.W, problem.V))
    u = None if problem.key_bias is None else problem.key_bias.reshape(len(W), -1)
    unknown = [tuple(index) for index in problem.unknown.nonzero().tolist()]
    solution = reference.solve(
        decimals(X),
        decimals(problem.B),
        unknown,
        W=decimals(W),
        V=decimals(V),
        key_bias=decimals(u),
        output_bias=decimals(problem.output_bias),
        causal=problem.causal,
        residual=problem.residual,
    )
    pairs = zip(solution, decimals(X), strict=True)
    return max(
        abs(s - x)
        for result, given in pairs
        for s, x in zip(result, given, strict=True)
    )


@pytest.mark.parametrize("name", VARIANTS)
def test_exact_solution_inside_the_radius(name):
    problem, X = plant(3, 3, seed=2, **VARIANTS[name])
    certificate = certify(problem, X)
    assert certificate.proved
    assert certificate.reason == ""
    assert certificate.radius < 1e-12
    distance = true_solution(problem, X)
    assert distance <= Decimal(certificate.radius)
    # the bound is tight
    assert Decimal(certificate.radius) <= 2 * distance + Decimal("1e-30")


@pytest.mark.parametrize("off", [1e-12, 1e-9, 1e-6])
def test_radius_covers_the_distance_from_the_input_given(off):
    problem, X = plant(3, 3, seed=2)
    given = X + off * torch.tensor([[1.0, -1.0, 0.5]] * 3, dtype=torch.float64)
    certificate = certify(problem, given)
    assert true_solution(problem, given) <= Decimal(certificate.radius)
    assert certificate.radius < 1.1 * off


def test_a_linear_layer_has_the_radius_of_its_algebra():
    """A single token attends to itself: 2x = 3."""
    problem = Problem(
        W=torch.zeros(1, 1),
        V=torch.full((1, 1), 2.0),
        B=torch.full((1, 1), 3.0),
        tolerance=0.25,
    )
    certificate = certify(problem, torch.full((1, 1), 1.625))
    assert certificate.radius == pytest.approx(0.125, rel=1e-12)
    assert certificate.radius >= 0.125
    assert certificate.radius_within == pytest.approx(0.25, rel=1e-12)
    assert certificate.radius_within >= 0.25
    assert certificate.condition == 1


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("tau", [1e-12, 1e-9])
def test_solutions_for_outputs_within_the_tolerance_are_inside(name, tau):
    problem, X = plant(4, 4, seed=1, **VARIANTS[name])
    certificate = certify(replace(problem, tolerance=tau), X)
    assert certificate.tolerance == tau
    assert certificate.radius < certificate.radius_within
    free = problem.unknown
    J = Equations.of(problem).jacobian(X[None])[0][:, free.flatten()]
    inverse = torch.linalg.inv(J)
    stream = torch.Generator().manual_seed(0)
    signs = torch.randn(40, len(J), generator=stream, dtype=torch.float64).sign()
    worst = inverse.sign()[inverse.abs().sum(1).argmax()]
    moved = X.repeat(41, 1, 1)
    moved[:, free] += 0.9 * tau * torch.cat([signs, worst[None]]) @ inverse.T
    assert (problem.output(moved) - problem.B).abs().max() <= tau
    distances = (moved - X).abs().amax((1, 2))
    assert (distances <= certificate.radius_within).all()
    assert (
        distances[-1] > 0.7 * certificate.radius_within
    )  # some sign pattern reaches it


def test_the_tolerance_argument_overrides_the_problem():
    problem, X = plant(seed=3, tolerance=1e-3)
    assert (
        certify(problem, X, tolerance=0).radius_within
        == certify(problem, X, tolerance=0).radius
    )
    certificate = certify(problem, X, tolerance=0.1)
    assert certificate.tolerance == 0.1
    assert certificate.proved
    assert certificate.radius_within is None
    assert certificate.reason.startswith("proved for B as given, not for B ± 1.0e-01")


@given(st.integers(0, 10**6), st.floats(-3, 0))
@settings(max_examples=15, deadline=None, derandomize=True)
def test_false_solutions_are_refused(seed, exponent):
    problem, X = plant(seed=seed)
    size = 10**exponent
    stream = torch.Generator().manual_seed(seed + 1)
    noise = torch.randn(X.shape, generator=stream, dtype=torch.float64)
    false = X + size * noise / noise.abs().max()
    certificate = certify(problem, false)
    # If X is close enough for a proof, the box must contain the planted input.
    assert certificate.radius is None or certificate.radius >= size * (1 - 1e-9)
    if certificate.radius is None:
        assert (
            "not close enough" in certificate.reason or "singular" in certificate.reason
        )


def test_a_random_input_is_refused_with_a_reason():
    problem, X = plant(seed=1)
    certificate = certify(problem, X.flip(0))
    assert not certificate.proved
    assert certificate.radius_within is None
    assert certificate.reason.startswith("not proved: X is not close enough")
    assert certificate.condition > 1


def singular_value():
    problem, X = plant()
    V = problem.V.clone()
    V[:, 0] = V[:, 1]
    problem = replace(problem, V=V)
    return replace(problem, B=problem.output(X)), X


def duplicate_tokens():
    problem, X = plant()
    X = X[torch.tensor([0, 0, 1, 2])]
    return replace(problem, B=problem.output(X)), X


def zero_values():
    problem, X = plant()
    return replace(problem, V=0 * problem.V, B=0 * problem.B), X


@pytest.mark.parametrize("case", [singular_value, duplicate_tokens, zero_values])
def test_singular_systems(case):
    problem, X = case()
    certificate = certify(problem, X)
    assert not certificate.proved
    assert certificate.reason.startswith(
        "does not apply: at this X the equations are singular"
    )
    assert certificate.condition > 1e14
    json.dumps(certificate.to_dict(), allow_nan=False)


def narrow():
    problem, X = plant()
    return replace(problem, V=problem.V[:, :3], B=problem.B[:, :3]), X


def one_known_entry():
    problem, X = plant()
    known = torch.full_like(X, torch.nan)
    known[0, 0] = X[0, 0]
    return replace(problem, known=known), X


def broken_output():
    problem, X = plant()
    B = problem.B.clone()
    B[0, 0] = torch.nan
    return replace(problem, B=B), X


def broken_input():
    problem, X = plant()
    X[0, :2] = torch.inf
    return problem, X


def contradiction():
    problem, X = plant(known="token")
    return problem, X + 0.5


def regularised():
    problem, X = plant()
    return replace(problem, gamma=0.1), X


def overflowing():
    problem, X = plant()
    return problem, 1e200 * X


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (narrow, "12 equations for 16 unknowns"),
        (one_known_entry, "16 equations for 15 unknowns"),
        (broken_output, "B holds 1 NaN"),
        (broken_input, "X holds 2 NaN"),
        (contradiction, "X contradicts the known entries, by up to 5.0e-01"),
        (regularised, "with γ > 0"),
        (overflowing, "the layer overflows float64"),
    ],
)
def test_the_reason_when_the_test_does_not_apply(case, words):
    certificate = certify(*case())
    assert certificate.reason.startswith("does not apply: ")
    assert words in certificate.reason
    assert certificate.radius is None
    assert certificate.radius_within is None


def test_wrong_arguments():
    problem, X = plant()
    for wrong in (X[:3], X[0], X.to(torch.complex128), X.numpy()):
        with pytest.raises(InputError, match="expected X"):
            certify(problem, wrong)
    for tolerance in (-1.0, torch.nan):
        with pytest.raises(InputError, match="tolerance must be 0 or more"):
            certify(problem, X, tolerance=tolerance)
    with pytest.raises(InputError, match="tolerance must be finite"):
        certify(problem, X, tolerance=torch.inf)
    with pytest.raises(InputError, match="bits must be 64 or more"):
        certify(problem, X, bits=53)


def test_without_flint(monkeypatch):
    problem, X = plant()
    monkeypatch.setitem(sys.modules, "flint", None)
    with pytest.raises(InputError, match=r"need python-flint, .*keyhole\[proofs\]"):
        certify(problem, X)


def test_json():
    problem, X = plant()
    certificate = certify(problem, X)
    data = json.loads(json.dumps(certificate.to_dict(), allow_nan=False))
    assert (data["proved"], data["format"]) == (True, 1)
    assert Certificate.from_dict(data) == certificate
    assert (certificate.bits, certificate.unknowns) == (128, 16)
    assert certificate.seconds > 0


def test_the_callers_precision_is_restored():
    before = balls.flint().ctx.prec
    certify(*plant())
    assert balls.flint().ctx.prec == before


@pytest.mark.parametrize("name", VARIANTS)
def test_ball_residuals_are_those_of_the_layer(name):
    problem, X = plant(5, 3 if name != "known token" else 5, seed=4, **VARIANTS[name])
    stream = torch.Generator().manual_seed(9)
    other = torch.randn(X.shape, generator=stream, dtype=torch.float64)
    M = torch.randn(
        problem.outputs, problem.outputs, generator=stream, dtype=torch.float64
    )
    M = torch.eye(problem.outputs) if name == "plain" else M
    with balls.flint().ctx.workprec(128):
        column = balls.Balls.of(problem, M).residuals(balls.exact(other))
    result = torch.tensor(
        [float(entry) for entry in column.entries()], dtype=torch.float64
    )
    naive = (reference_output(problem, other) - problem.B) @ M.double()
    torch.testing.assert_close(result.reshape(naive.shape), naive, rtol=0, atol=1e-13)
    assert max(float(entry.rad()) for entry in column.entries()) < 1e-33


def reference_output(problem, X):
    W, V = (t if t.ndim == 3 else t[None] for t in (problem.W, problem.V))
    u = None if problem.key_bias is None else problem.key_bias.reshape(len(W), -1)
    out = reference.attention(
        decimals(X),
        decimals(W),
        decimals(V),
        decimals(u),
        decimals(problem.output_bias),
        problem.causal,
        problem.residual,
    )
    return torch.tensor([[float(o) for o in row] for row in out], dtype=torch.float64)


@given(st.sampled_from(sorted(VARIANTS)), st.integers(0, 10**6), st.floats(-8, -0.5))
@settings(max_examples=15, deadline=None, derandomize=True)
def test_enclosure_contains_the_jacobian_at_points_of_the_box(name, seed, exponent):
    radius = 10**exponent
    problem, X = plant(3, 3, seed=seed, scale=1.0, **VARIANTS[name])
    free = problem.unknown
    stream = torch.Generator().manual_seed(seed)
    M = torch.randn(
        problem.outputs, problem.outputs, generator=stream, dtype=torch.float64
    )
    with balls.flint().ctx.workprec(128):
        enclosure = balls.Balls.of(problem, M).jacobian(balls.exact(X), radius)
    low, high = (
        torch.tensor(
            [float(getattr(e, end)()) for e in enclosure.entries()], dtype=torch.float64
        )
        for end in ("lower", "upper")
    )
    for corner in (False, True, True):
        shift = 2 * torch.rand(X.shape, generator=stream, dtype=torch.float64) - 1
        shift = shift.sign() if corner else shift
        inside = torch.where(free, X + radius * shift, X)
        J = (
            jacobian(lambda Z: problem.output(Z) @ M, inside)
            .flatten(0, 1)
            .flatten(1)[:, free.flatten()]
        )
        J = J.flatten()
        assert (low - J).max() <= 1e-13
        assert (J - high).max() <= 1e-13


def test_norms():
    matrix = torch.tensor([[1.0, -2.0, 3.0], [-4.0, 5.0, -0.5]])
    sums = balls.row_sums(balls.exact(matrix))
    assert [float(entry) for entry in sums.entries()] == [6, 9.5]
    tenth = balls.flint().arb("0.1")
    assert balls.upward(tenth) > 0.1 > balls.upward(-tenth)
    assert balls.upward(balls.flint().arb("nan")) == float("inf")


def test_the_enclosure_is_not_much_wider_than_the_derivatives():
    """Compared with the change of the derivatives over a small box, by second derivatives."""
    problem, X = plant(3, 3, seed=5)
    radius = 1e-6
    with balls.flint().ctx.workprec(128):
        enclosure = balls.Balls.of(problem).jacobian(balls.exact(X), radius)
    widths = torch.tensor(
        [float(e.rad()) for e in enclosure.entries()], dtype=torch.float64
    )
    second = jacobian(lambda Z: jacobian(problem.output, Z, create_graph=True), X)
    reached = radius * second.abs().sum((-2, -1)).flatten()
    assert (widths >= 0.99 * reached).all()
    assert widths.sum() < 5 * reached.sum()
