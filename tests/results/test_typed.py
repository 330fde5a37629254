from __future__ import annotations

from dataclasses import dataclass

import pytest

from keyhole.core import Status
from keyhole.core.errors import InputError
from keyhole.core.result import restored


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
    made = restored(Whole, GOOD)
    assert made == Whole(Status.RECOVERED, 2, 1.0, ((1, 0.5),), (Part("a"),))
    assert isinstance(made.share, float)


WRONG = {
    "expected count as a whole number, got 1.5": {"count": 1.5},
    "expected count as a whole number, got True": {"count": True},
    "expected share as a number, got nan": {"share": float("nan")},
    "expected share as a number, got 1000": {"share": 10**400},
    "expected status as one of recovered, .*, got 'splendid'": {"status": "splendid"},
    r"expected pairs\[0\] as a list of 2, got a list": {"pairs": [[1]]},
    r"expected parts\[0\]\.name as text, got None": {"parts": [{"name": None}]},
    "expected limit as a number, got 'x'": {"limit": "x"},
    "Whole has no field colour": {"colour": "red"},
}


@pytest.mark.parametrize(("words", "change"), WRONG.items(), ids=WRONG)
def test_what_is_of_another_kind_is_refused(words, change):
    with pytest.raises(InputError, match=words):
        restored(Whole, {**GOOD, **change})
    with pytest.raises(InputError, match="count is missing"):
        restored(Whole, {key: value for key, value in GOOD.items() if key != "count"})
