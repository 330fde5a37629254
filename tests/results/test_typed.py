from __future__ import annotations

from dataclasses import dataclass
from datetime import date
from typing import ClassVar

import pytest

from keyhole.core import Status
from keyhole.core.errors import InputError
from keyhole.core.result import Result, typed


@dataclass(frozen=True)
class Part:
    name: str


@dataclass(frozen=True)
class Whole:
    status: Status
    count: int
    share: float
    pairs: tuple[tuple[int, float], ...]
    parts: tuple[Part, ...] = ()
    limit: float | None = None


GOOD = {
    "status": "recovered",
    "count": 2,
    "share": 1,
    "pairs": [[1, 0.5]],
    "parts": [{"name": "a"}],
}


def test_lists_become_tuples_and_words_members():
    made = typed(Whole, GOOD)
    assert made == Whole(Status.RECOVERED, 2, 1.0, ((1, 0.5),), (Part("a"),))
    assert isinstance(made.share, float)


WRONG = {
    "expected count as a valid integer, got 1.5": {"count": 1.5},
    "expected count as a valid integer, got True": {"count": True},
    "expected share as a finite number, got nan": {"share": float("nan")},
    "expected share as a finite number, got 1000": {"share": 10**400},
    "expected status as 'recovered', .*, got 'splendid'": {"status": "splendid"},
    r"pairs\[0\]\[1\] is missing": {"pairs": [[1]]},
    r"pairs\[0\]: Tuple should have at most 2 items": {"pairs": [[1, 2, 3]]},
    r"expected parts\[0\]\.name as a valid string, got None": {
        "parts": [{"name": None}]
    },
    r"expected parts\[0\] as an object, got 'x'": {"parts": ["x"]},
    "expected limit as a valid number, got 'x'": {"limit": "x"},
    "expected limit as a valid number, got '2031-05-01'": {"limit": date(2031, 5, 1)},
    "colour is unknown": {"colour": "red"},
    r"parts\[0\]\.colour is unknown": {"parts": [{"name": "a", "colour": "red"}]},
}


@pytest.mark.parametrize(("words", "change"), WRONG.items(), ids=WRONG)
def test_what_is_of_another_kind_is_refused(words, change):
    with pytest.raises(InputError, match=words):
        typed(Whole, {**GOOD, **change})
    with pytest.raises(InputError, match="count is missing"):
        typed(Whole, {key: value for key, value in GOOD.items() if key != "count"})


@dataclass(frozen=True)
class Sum(Result):
    """A result of two parts, and a figure that is no field."""

    parts: tuple[Part, ...]

    kind: ClassVar[str] = "sum"

    def contents(self):
        return {**super().contents(), "count": len(self.parts)}

    def summary(self):
        return f"{len(self.parts)} parts"


@dataclass(frozen=True)
class Around:
    sum: Sum


def test_results_skip_figures_at_any_depth_and_their_parts_do_not():
    result = Sum((Part("a"), Part("b")))
    assert Sum.from_dict(result.to_dict()) == result
    assert typed(Around, {"sum": result.to_dict()}) == Around(result)
    parts = [{"name": "a", "count": 1}]
    with pytest.raises(InputError, match=r"^parts\[0\]\.count is unknown in a saved"):
        Sum.from_dict({**result.to_dict(), "parts": parts})


def test_halves_of_surrogate_pairs_stay_apart():
    odd = {chr(0xDCFE): "a\ud800", chr(0xDCFF): "\U0001f600"}
    assert typed(dict[str, str], odd) == {"\ue4fe": "a\ue000", "\ue4ff": "\U0001f600"}


@dataclass(frozen=True)
class Even:
    number: int

    def __post_init__(self):
        if self.number % 2:
            raise InputError(f"{self.number} is odd")


def test_what_a_type_itself_checks_is_said_in_its_words():
    with pytest.raises(InputError, match=r"^3 is odd$"):
        typed(tuple[Even, ...], [{"number": 2}, {"number": 3}])
