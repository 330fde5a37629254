"""A list of methods for each package, from which commands, audit and documents derive.

To add a method, write one file that holds it and one entry in its package's
`registry.py`:

    Entry("low-rank", LowRank, rows=(Row(Exposure("KH-WEIGHTS-SCORES", "low-rank"),
    …),)),

`make` is the method's class, or a function that returns one. Its parameters are the
options that people may set; an unknown option is refused, not ignored. `rows` say what
the audit tries the method on, in a form that each package chooses.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from keyhole.core.errors import InputError, expect_seed

Method = TypeVar("Method")
Row = TypeVar("Row")


@dataclass(frozen=True)
class Entry(Generic[Method, Row]):
    """One method under the name that people type."""

    name: str
    make: Callable[..., Method]
    rows: tuple[Row, ...] = ()
    method: type[Method] | None = (
        None  # the class that `make` returns if it is a function
    )
    note: str = ""  # describes the method if its module holds several

    @property
    def about(self) -> str:
        """One line about the method: its note, or the first line of its module's docstring."""
        if self.note:
            return self.note
        first = (inspect.getdoc(sys.modules[self.source]) or "").split("\n\n")[0]
        return " ".join(first.split())

    @property
    def source(self) -> str:
        """The module that defines the method."""
        return (self.method or self.make).__module__

    @property
    def options(self) -> frozenset[str]:
        return frozenset(inspect.signature(self.make).parameters)


class Registry(dict[str, Entry[Method, Row]]):
    """Methods by name, in the order in which help and documents show them."""

    def __init__(self, *entries: Entry[Method, Row]) -> None:
        super().__init__({entry.name: entry for entry in entries})

    def __missing__(self, name: str) -> Entry[Method, Row]:
        raise InputError(
            f"there is no method {name[:40]!r}: choose among {', '.join(self)}"
        )

    def add(self, entry: Entry[Method, Row]) -> None:
        """Add a method, for example from another package."""
        if entry.name in self:
            raise InputError(
                f"there is already a method {entry.name}: choose another name"
            )
        self[entry.name] = entry

    def resolve(
        self, method: str | Method, seed: int | None = None, **options: Any
    ) -> Method:
        """Return the method of this name, or a method that is already made, without options."""
        if isinstance(method, str):
            return self.make(method, seed=seed, **options)
        for option, value in options.items():
            if value is not None:
                name = type(method).__name__
                raise InputError(
                    f"{option} must be set on the {name} given, not next to it"
                )
        return method

    def make(self, name: str, **options: Any) -> Method:
        """Return the method called `name`; options that are None keep their defaults."""
        entry = self[name]
        if options.get("seed") is not None:
            expect_seed(options["seed"])
        given = {
            option: value for option, value in options.items() if value is not None
        }
        for option in given:
            if option not in entry.options:
                takers = [
                    other.name for other in self.values() if option in other.options
                ]
                others = f": it belongs to {', '.join(takers)}" if takers else ""
                raise InputError(f"{name} has no option {option}{others}")
        for option, parameter in inspect.signature(entry.make).parameters.items():
            if parameter.default is parameter.empty and option not in given:
                raise InputError(f"{name} needs its {option}: give -o {option}=VALUE")
        return entry.make(**given)

    def rows(self) -> Iterator[tuple[Entry[Method, Row], Row]]:
        """Yield everything that the audit tries, with its method."""
        for entry in self.values():
            for row in entry.rows:
                yield entry, row
