"""Methods by name: their options, refused options, and new entries."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from command_line import inside
from keyhole import invert, oracle
from keyhole.audit import audit
from keyhole.core import Status
from keyhole.core.errors import InputError
from keyhole.core.exposure import Exposure
from keyhole.core.registry import Entry
from keyhole.invert.registry import METHODS, Row

PLANTS = {
    "closed-form": {"symmetric": True},
    "token-by-token": {"causal": True},
}


@pytest.mark.parametrize("name", METHODS)
def test_every_registered_method_runs(name):
    problem, X = invert.plant(3, 2, seed=1, **PLANTS.get(name, {"symmetric": True}))
    if name == "closed-form":
        problem = replace(problem, maps=problem.maps_of(X))
    options = {"starts": 2, "solutions": 1, "steps": 300}
    known = {option: options[option] for option in METHODS[name].options & set(options)}
    result = invert.run(problem, name, **known)
    assert result.X is not None
    if name != "regularized-newton":  # which finds another optimum
        assert result.residual < 1e-2


def test_the_defaults_of_registered_methods():
    assert METHODS.make("auto") == invert.Auto(starts=256, solutions=16)
    assert METHODS.make("newton-cg") == invert.NewtonCG(starts=256)
    assert METHODS.make("token-by-token") == invert.TokenByToken()
    assert METHODS.make("adam", seed=3, starts=8) == invert.Adam(starts=8, seed=3)
    assert METHODS["closed-form"].source == "keyhole.invert.solvers.closed_form"
    assert METHODS["lbfgs"].about.startswith("L-BFGS, a baseline")


def test_unknown_names_and_options_are_refused():
    problem, _ = invert.plant(3, 2)
    with pytest.raises(InputError, match=r"no method .newton.: choose among auto, "):
        invert.run(problem, "newton")
    with pytest.raises(InputError, match="needs the attention maps"):
        invert.run(problem, "closed-form")
    with pytest.raises(
        InputError, match=r"closed-form has no option starts: it belongs to auto"
    ):
        invert.run(problem, "closed-form", starts=4)
    with pytest.raises(InputError, match="starts must be 1 or more, not 0"):
        invert.run(problem, starts=0)
    with pytest.raises(InputError, match="solutions must be 1 or more, not 0"):
        invert.run(problem, solutions=0)
    with pytest.raises(InputError, match="seconds must be above 0"):
        invert.run(problem, seconds=-1.0)
    with pytest.raises(InputError, match="is not a device of this machine"):
        invert.run(problem, device="abacus")


@dataclass(frozen=True)
class Zero:
    """An attack that always answers with zeros."""

    seed: int = 0

    def __call__(self, problem, *, progress=None):
        X = torch.zeros(problem.length, problem.dim, dtype=torch.float64)
        return invert.Inversion(
            Status.UNSOLVED, "only zeros", repr(self), X, 1.0, 0, 0.0
        )


GUESSED = Exposure("KH-INPUTS-LAYER-OUTPUT", "guessed")


@pytest.fixture
def zero():
    METHODS.add(Entry("zero", Zero, (Row(GUESSED, "Do nothing."),)))
    yield
    del METHODS["zero"]


@pytest.mark.usefixtures("zero")
def test_one_entry_adds_a_method(tmp_path, monkeypatch, capsys):
    layer = oracle.plant("attention", dim=4, every_token=True, seed=1)
    found = audit(layer, only=[GUESSED.rule]).findings
    (finding,) = (each for each in found if each.exposure == GUESSED)
    assert (finding.attack, finding.status, finding.reason) == (
        "Zero",
        Status.UNSOLVED,
        "only zeros",
    )
    invert.plant(3, 2)[0].save(tmp_path / "p.safetensors")
    done = inside(
        "invert",
        "p.safetensors",
        "--method",
        "zero",
        cwd=tmp_path,
        monkeypatch=monkeypatch,
        capsys=capsys,
    )
    assert done.returncode == 0, done.stderr
    assert "only zeros" in done.stdout
