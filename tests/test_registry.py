"""Methods are looked up by name, and made with the options they have and no others."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from keyhole.core.errors import InputError
from keyhole.core.registry import Entry, Registry


@dataclass(frozen=True)
class Fast:
    seed: int = 0


@dataclass(frozen=True)
class Careful:
    max_norm: float
    seed: int = 0


def careful(bound: float) -> Careful:
    return Careful(bound, seed=7)


@pytest.fixture
def methods() -> Registry[object, str]:
    return Registry(
        Entry("fast", Fast, ("scores", "labels")),
        Entry("careful", Careful),
        Entry("bounded", careful, ("vectors",), Careful),
    )


def test_methods_are_found_by_name_in_their_order(methods):
    assert list(methods) == ["fast", "careful", "bounded"]
    assert len(methods) == 3
    assert "careful" in methods
    assert "magic" not in methods
    assert methods["fast"].name == "fast"
    with pytest.raises(
        InputError,
        match=r"^there is no method 'magic': choose among fast, careful, bounded$",
    ):
        methods["magic"]


def test_an_entry_says_what_it_is_and_takes(methods):
    assert methods["careful"].options == {"max_norm", "seed"}
    assert methods["bounded"].options == {"bound"}
    assert methods["bounded"].source == methods["careful"].source == __name__
    assert methods["fast"].about == __doc__


def test_a_method_is_made_with_the_options_it_has(methods):
    assert methods.make("fast", seed=3) == Fast(3)
    assert (
        methods.make("fast", seed=None, max_norm=None) == Fast()
    )  # None: left at its default
    assert methods.make("bounded", bound=2.0) == Careful(2.0, 7)
    assert methods.make("careful", max_norm=0.0, seed=0) == Careful(0.0)  # 0 is a value


def test_an_option_that_a_method_does_not_have_is_refused(methods):
    with pytest.raises(
        InputError, match=r"^fast has no option max_norm: it belongs to careful$"
    ):
        methods.make("fast", max_norm=1.0)
    with pytest.raises(
        InputError, match=r"^bounded has no option seed: it belongs to fast, careful$"
    ):
        methods.make("bounded", bound=1.0, seed=1)
    with pytest.raises(InputError, match=r"^fast has no option colour$"):
        methods.make("fast", colour="red")


def test_options_next_to_a_method_that_is_made_are_refused(methods):
    made = Careful(2.0)
    assert methods.resolve("careful", 3, max_norm=1.0) == Careful(1.0, 3)
    assert methods.resolve(made, 3, max_norm=None) is made
    with pytest.raises(InputError, match="max_norm must be set on the Careful given"):
        methods.resolve(made, max_norm=1.0)


def test_an_option_that_a_method_needs_is_asked_for(methods):
    with pytest.raises(
        InputError, match=r"^careful needs its max_norm: give -o max_norm=VALUE$"
    ):
        methods.make("careful")


def test_rows_come_with_their_methods(methods):
    rows = [(entry.name, row) for entry, row in methods.rows()]
    assert rows == [("fast", "scores"), ("fast", "labels"), ("bounded", "vectors")]


def test_one_more_method_and_one_less(methods):
    methods.add(Entry("new", Fast, ("sounds",)))
    assert list(methods)[-1] == "new"
    assert ("new", "sounds") in [(entry.name, row) for entry, row in methods.rows()]
    with pytest.raises(
        InputError, match=r"^there is already a method new: choose another name$"
    ):
        methods.add(Entry("new", Careful))
    del methods["new"]
    assert "new" not in methods
