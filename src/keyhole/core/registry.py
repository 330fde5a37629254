"""One list of methods per package, from which the commands, the audit and the documents derive.

Adding a method is one file that holds it and one entry in its package's `registry.py`:

    Entry("low-rank", LowRank, rows=(Row(Exposure("KH-WEIGHTS-SCORES", "low-rank"), …),)),

`make` is the method's class (or a function that gives one), and its parameters are the options that
people may set: an option that a method does not have is refused, not ignored. `rows` are what the
audit tries it on; what a row holds is the package's affair.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
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
    method: type[Method] | None = None  # where `make` is a function: the class that it gives
    note: str = ""  # what it is, where its module holds several methods

    @property
    def about(self) -> str:
        """What it is, in one line: the first of its module's docstring, or the note."""
        if self.note:
            return self.note
        first = (inspect.getdoc(sys.modules[self.source]) or "").split("\n\n")[0]
        return " ".join(first.split())

    @property
    def source(self) -> str:
        """The module that it stands in."""
        return (self.method or self.make).__module__

    @property
    def options(self) -> frozenset[str]:
        """The names of the parameters that it takes."""
        return frozenset(inspect.signature(self.make).parameters)


class Registry(Mapping[str, Entry[Method, Row]]):
    """Methods by name, in the order in which help and documents show them."""

    def __init__(self, what: str, *entries: Entry[Method, Row]) -> None:
        self.what = what
        self._entries = {entry.name: entry for entry in entries}

    def __getitem__(self, name: str) -> Entry[Method, Row]:
        if name not in self._entries:
            known = ", ".join(self._entries)
            raise InputError(f"there is no {self.what} {name[:40]!r}: choose among {known}")
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def add(self, entry: Entry[Method, Row]) -> None:
        """One more method, from another package or a test; names are not taken twice."""
        if entry.name in self._entries:
            raise InputError(f"there is already a {self.what} {entry.name}: choose another name")
        self._entries[entry.name] = entry

    def remove(self, name: str) -> None:
        del self._entries[name]

    def make(self, name: str, **options: Any) -> Method:
        """The method called `name`; options that are None are left at its defaults."""
        entry = self[name]
        if options.get("seed") is not None:
            expect_seed(options["seed"])
        given = {option: value for option, value in options.items() if value is not None}
        for option in given:
            if option not in entry.options:
                takers = [other.name for other in self.values() if option in other.options]
                others = f": it is of {', '.join(takers)}" if takers else ""
                raise InputError(f"{name} has no option {option}{others}")
        for option, parameter in inspect.signature(entry.make).parameters.items():
            if parameter.default is parameter.empty and option not in given:
                raise InputError(f"{name} needs its {option}: give -o {option}=VALUE")
        return entry.make(**given)

    def rows(self) -> Iterator[tuple[Entry[Method, Row], Row]]:
        """What the audit tries, with the method that it is tried with."""
        for entry in self.values():
            for row in entry.rows:
                yield entry, row
