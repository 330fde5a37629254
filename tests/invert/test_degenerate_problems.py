"""Every method ends in a status if weights and outputs are zero, equal or near overflow."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch

from keyhole import invert
from keyhole.core import Status
from keyhole.core.errors import InputError
from keyhole.invert.registry import METHODS

N = 3
D = 4
FEW = {"starts": 2, "steps": 4}


def drawn(*shape, seed=0):
    stream = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=stream, dtype=torch.float64)


W = drawn(D, D)
V = drawn(D, D, seed=1)
B = drawn(N, D, seed=2)
PROBLEMS = {
    "one output for all tokens": {"B": B[:1].expand(N, D).clone()},
    "no values": {"V": 0 * V},
    "no scores": {"W": 0 * W},
    "nothing": {"W": 0 * W, "V": 0 * V, "B": 0 * B},
    "a huge output": {"B": 1e300 * B},
    "tiny values": {"V": 1e-200 * V},
    "values smaller than any": {"V": 1e-310 * V},
    "huge values added to the input": {"V": 1e300 * V, "residual": True},
    "huge scores": {"W": 1e300 * W},
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_every_method_ends_in_a_status_or_an_error(name):
    problem = invert.Problem(**{"W": W, "V": V, "B": B, **PROBLEMS[name]})
    for entry in METHODS:
        method = METHODS.make(entry)
        few = {each.name: FEW[each.name] for each in fields(method) if each.name in FEW}
        try:
            inversion = replace(method, **few)(problem)
        except InputError:  # maps are missing, or the regulariser is infinite
            continue
        assert isinstance(inversion.status, Status)
        if inversion.status is Status.RECOVERED:
            assert float((problem.output(inversion.X) - problem.B).abs().max()) <= 1e-8


@pytest.mark.parametrize("size", [1e250, 1e300])
def test_bounds_that_overflow_are_refused(size):
    problem = invert.Problem(W=size * W, V=size * V, B=size * B)
    with pytest.raises(InputError, match="second derivatives overflow float64: scale"):
        invert.bounds(problem, drawn(N, D, seed=3))
