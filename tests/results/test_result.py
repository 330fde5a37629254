"""All results have a kind, a short repr, a dictionary, and files that can be loaded."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from keyhole.core import FORMAT, Result
from keyhole.core.errors import InputError


@dataclass(frozen=True, repr=False)
class Weighed(Result):
    """A result with a number and, optionally, weights."""

    kind: ClassVar[str] = "weighing"
    tensors_key: ClassVar[str] = "weights"

    error: float
    W: torch.Tensor | None = None

    def contents(self):
        return {"error": self.error}

    def tensors(self):
        return {} if self.W is None else {"W": self.W}

    def metadata(self):
        return {"unit": "grams"}

    def summary(self):
        return f"error {self.error:g}"

    @classmethod
    def restore(cls, data, tensors):
        if data["error"] < 0:
            raise InputError(f"an error must be 0 or more, not {data['error']}")
        return cls(float(data["error"]), tensors.get("W"))


def test_it_shows_itself_in_a_line():
    assert repr(Weighed(0.5, torch.zeros(1000, 1000))) == "Weighed: error 0.5"


def test_a_dictionary_comes_back():
    data = Weighed(0.5).to_dict()
    assert data == {"format": FORMAT, "kind": "weighing", "error": 0.5}
    assert Weighed.from_dict(json.loads(json.dumps(data))) == Weighed(0.5)


def test_a_file_comes_back_without_tensors(tmp_path):
    Weighed(0.5).save(tmp_path / "r.json")
    assert Weighed.load(tmp_path / "r.json") == Weighed(0.5)
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]


def test_tensors_lie_next_to_it_and_move_with_it(tmp_path):
    W = torch.arange(6.0, dtype=torch.float64).view(2, 3)
    (tmp_path / "here").mkdir()
    Weighed(0.5, W).save(tmp_path / "here" / "r.json")
    assert (
        json.loads((tmp_path / "here" / "r.json").read_text())["weights"]
        == "r.safetensors"
    )
    (tmp_path / "here").rename(tmp_path / "there")
    assert torch.equal(Weighed.load(tmp_path / "there" / "r.json").W, W)
    (tmp_path / "there" / "r.safetensors").unlink()
    with pytest.raises(
        InputError,
        match=r"^cannot read .* as the weights next to .*: there is no such file$",
    ):
        Weighed.load(tmp_path / "there" / "r.json")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({}, "this Keyhole reads format 1, not None"),
        (
            {"format": 99, "kind": "weighing", "error": 1},
            "this Keyhole reads format 1, not 99",
        ),
        ({"format": 1, "error": 1}, "expected a saved weighing, got None"),
        (
            {"format": 1, "kind": "audit", "error": 1},
            "expected a saved weighing, got audit",
        ),
        (
            {"format": 1, "kind": "weighing"},
            r"the saved weighing is damaged: KeyError\('error'\)",
        ),
        (
            {"format": 1, "kind": "weighing", "error": "x"},
            "the saved weighing is damaged: TypeErr",
        ),
        (
            {"format": 1, "kind": "weighing", "error": -1},
            "an error must be 0 or more, not -1",
        ),
    ],
)
def test_anything_else_is_one_line(tmp_path, data, words):
    with pytest.raises(InputError, match=f"^{words}"):
        Weighed.from_dict(data)
    (tmp_path / "r.json").write_text(json.dumps(data))
    with pytest.raises(InputError, match=r" in .*r\.json") as caught:
        Weighed.load(tmp_path / "r.json")
    assert "\n" not in str(caught.value)


def test_it_must_say_what_it_is():
    with pytest.raises(TypeError, match="abstract"):
        Result()
