"""Auto: the structure determines the method, and all solutions are reported."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from keyhole import invert
from keyhole.core import Status
from keyhole.invert.judge import residual_of

CHOICES = {
    "residual connection": {"residual": True, "value_scale": 0.2},
    "mask is causal": {"causal": True},
    "mean field": {"symmetric": True},
}


@pytest.mark.parametrize(("word", "options"), CHOICES.items(), ids=CHOICES)
def test_the_structure_determines_the_method(word, options):
    problem, X = invert.plant(5, 4, seed=4, **options)
    result = invert.Auto(starts=16, seed=1)(problem)
    assert result.status is Status.RECOVERED, result.reason
    assert word in result.reason or "starts" in result.reason
    assert (
        min(float((solution - X).abs().max()) for solution in result.solutions) < 1e-6
    )
    assert result.method.startswith("Auto(")


def test_leaked_maps_determine_the_input():
    problem, X = invert.plant(6, 6, seed=2)
    result = invert.Auto()(replace(problem, maps=problem.maps_of(X)))
    assert result.status is Status.RECOVERED
    assert "closed form" in result.reason
    assert float((result.X - X).abs().max()) < 1e-9


def test_all_inputs_with_the_same_output_are_reported():
    problem, X = invert.plant(4, 8, seed=1)
    result = invert.Auto(starts=32)(problem)
    assert len(result.solutions) >= 2
    assert f"{len(result.solutions)} different inputs have this output" in result.reason
    for solution in result.solutions:
        assert residual_of(problem, solution) < 1e-12
    assert (
        min(float((solution - X).abs().max()) for solution in result.solutions) < 1e-6
    )


def test_the_curve_succeeds_where_starts_fail():
    from keyhole.invert.solvers import auto

    problem, _ = invert.plant(8, 4, seed=3)
    # Without steps no start succeeds, but the curve does.
    result = auto.Auto(starts=4, steps=1, solutions=1)(replace(problem, tolerance=0.0))
    assert result.status is Status.RECOVERED


def test_a_broken_problem_is_a_status():
    problem, _ = invert.plant(3, 3)
    for change in ({}, {"causal": True}, {"residual": True}):
        broken = replace(problem, B=problem.B * torch.nan, **change)
        result = invert.Auto(starts=2)(broken)
        assert result.status is Status.NOT_APPLICABLE
        assert result.reason == "B holds 9 NaN or infinite numbers"


def test_ctrl_c_between_two_searches(monkeypatch):
    from keyhole.invert.solvers import auto

    def impatient(*args, **options):
        raise KeyboardInterrupt

    problem, _ = invert.plant(4, 3, causal=True)
    monkeypatch.setattr(auto.TokenByToken, "__call__", impatient)
    result = invert.Auto()(problem)
    assert result.status is Status.INTERRUPTED
    assert result.reason == "stopped before a start"


def test_a_time_limit_is_respected():
    problem, _ = invert.plant(10, 10, seed=1)
    result = invert.Auto(starts=10**4, solutions=10**6, seconds=0.2)(problem)
    assert result.seconds < 30
