"""`keyhole.invert.run`: from a file or a problem to a certified and saved result."""

from __future__ import annotations

import json

import torch
from safetensors.torch import load_file

from keyhole import invert


def test_a_file_and_a_problem_give_the_same_result(tmp_path):
    problem, _ = invert.plant(3, 2)
    problem.save(tmp_path / "p.safetensors")
    notes = []

    def track(name, total=None):
        notes.append(name)
        return lambda done, total=None, note="": notes.append(note)

    result = invert.run(str(tmp_path / "p.safetensors"), starts=3, track=track)
    assert notes[0] == "invert"
    assert notes[-1].startswith("starts, best ")
    same = invert.run(problem, invert.Auto(starts=3))
    assert torch.equal(result.X, same.X)
    assert result.method == same.method
    assert result.certificate is None


def test_a_result_is_saved_and_loaded(tmp_path):
    problem, _ = invert.plant(4, 3)
    result = invert.run(problem, "levenberg-marquardt", starts=8, certify=True)
    result.save(tmp_path / "result.json")
    data = json.loads((tmp_path / "result.json").read_text())
    assert (data["kind"], data["status"]) == ("inversion", "recovered")
    assert data["residual"] == result.residual
    assert data["certificate"]["proved"] is True
    assert torch.equal(load_file(tmp_path / data["inputs"])["X"], result.X)
    again = invert.Inversion.load(tmp_path / "result.json")
    assert again.to_dict() == result.to_dict()
    assert again.certificate == result.certificate
    assert again.trace == result.trace
    assert torch.equal(again.X, result.X)
    assert all(map(torch.equal, again.solutions, result.solutions))


def test_a_result_without_an_input_is_saved_and_loaded(tmp_path):
    problem = invert.plant(3, 3)[0]
    broken = invert.Problem(problem.W, problem.V, problem.B * torch.nan)
    result = invert.LevenbergMarquardt(starts=2)(broken)
    result.save(tmp_path / "result.json")
    assert not (tmp_path / "result.safetensors").exists()
    again = invert.Inversion.load(tmp_path / "result.json")
    assert again.to_dict() == result.to_dict()
    assert again.X is None
    assert again.certificate is None


def test_the_summary_and_the_repr_are_a_few_lines():
    problem, _ = invert.plant(4, 3)
    result = invert.run(problem, starts=8, solutions=1, certify=True)
    lines = result.summary().splitlines()
    assert lines[0].startswith("recovered: residual")
    assert " starts, " in lines[1]
    assert lines[2].startswith("condition ")
    assert lines[3].startswith("proved: exactly one input with this output lies within")
    assert lines[4] == "Do not hand this output to people who may not see the input."
    assert repr(result) == f"Inversion: {result.summary()}"
