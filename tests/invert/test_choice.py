"""Auto: the structure decides, what was chosen is said, several solutions are all named."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from keyhole import invert
from keyhole.errors import InputError
from keyhole.invert.judge import residual_of
from keyhole.invert.registry import NAMES, named
from keyhole.results import Status

CHOICES = {
    "residual connection": {"residual": True, "value_scale": 0.2},
    "mask is causal": {"causal": True},
    "mean field": {"symmetric": True},
}


@pytest.mark.parametrize(("word", "options"), CHOICES.items(), ids=CHOICES)
def test_the_structure_decides_and_is_named(word, options):
    problem, X = invert.plant(5, 4, seed=4, **options)
    found = invert.Auto(starts=16, seed=1)(problem)
    assert found.status is Status.RECOVERED, found.reason
    assert word in found.reason or "starts" in found.reason
    assert min(float((one - X).abs().max()) for one in found.solutions) < 1e-6
    assert found.method.startswith("Auto(")


def test_leaked_maps_leave_one_input():
    problem, X = invert.plant(6, 6, seed=2)
    found = invert.Auto()(replace(problem, maps=problem.maps_of(X)))
    assert found.status is Status.RECOVERED
    assert "closed form" in found.reason
    assert float((found.X - X).abs().max()) < 1e-9


def test_several_inputs_with_one_output_are_all_named():
    problem, X = invert.plant(4, 8, seed=1)
    found = invert.Auto(starts=96)(problem)
    assert len(found.solutions) >= 2
    assert f"{len(found.solutions)} different inputs have this output" in found.reason
    for one in found.solutions:
        assert residual_of(problem, one) < 1e-12
    assert min(float((one - X).abs().max()) for one in found.solutions) < 1e-6


def test_the_curve_helps_where_starts_do_not():
    from keyhole.invert.solvers import auto

    problem, _ = invert.plant(8, 4, seed=3)
    # Without steps no start succeeds; the curve does.
    found = auto.Auto(starts=4, steps=1, solutions=1)(replace(problem, tolerance=0.0))
    assert found.status is Status.RECOVERED


def test_a_broken_problem_is_a_status():
    problem, _ = invert.plant(3, 3)
    for change in ({}, {"causal": True}, {"residual": True}):
        broken = replace(problem, B=problem.B * torch.nan, **change)
        found = invert.Auto(starts=2)(broken)
        assert found.status is Status.NOT_APPLICABLE
        assert found.reason == "expected finite numbers in B, got 9 NaN or infinite"


def test_ctrl_c_between_two_searches(monkeypatch):
    from keyhole.invert.solvers import auto

    def impatient(*args, **options):
        raise KeyboardInterrupt

    problem, _ = invert.plant(4, 3, causal=True)
    monkeypatch.setattr(auto.TokenByToken, "__call__", impatient)
    found = invert.Auto()(problem)
    assert found.status is Status.INTERRUPTED
    assert found.reason == "stopped before a start"


def test_time_runs_out():
    problem, _ = invert.plant(10, 10, seed=1)
    found = invert.Auto(starts=10**4, solutions=10**6, seconds=1.0)(problem)
    assert found.seconds < 30


@pytest.mark.parametrize("name", NAMES)
def test_every_name_is_a_method(name):
    problem, X = invert.plant(3, 2, symmetric=True, seed=1)
    if name == "closed-form":
        problem = replace(problem, maps=problem.maps_of(X))
    method = named(name, starts=2, solutions=1, seconds=1.0)
    found = method(problem, watch=lambda done, total, best: None)
    assert found.X is not None
    if name != "regularized-newton":  # which goes to another place, and says so
        assert found.residual < 1e-2


def test_names_that_are_none():
    with pytest.raises(InputError, match="expected a method among auto, "):
        named("newton")
    with pytest.raises(InputError, match="expected attention maps"):
        named("closed-form")(invert.plant(3, 2)[0])
    with pytest.raises(InputError, match="expected at least one start"):
        named("auto", starts=0)
    with pytest.raises(InputError, match="expected more than 0 seconds"):
        named("auto", seconds=-1.0)
    with pytest.raises(InputError, match="expected a device of this machine"):
        named("auto", device="abacus")
