"""Options, each declared once: a field of a frozen dataclass, with its help and its group.

    flips: int = option(12, "How many of a classifier's answers to try to flip.", DATA)

The command line, fleet files, Python and the journal derive from such a class. The hyperparameters
of a method are the fields of its own dataclass; `settings` reads them from words `name=value`, each
by the type of its field.
"""

from __future__ import annotations

import dataclasses
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from keyhole.core.errors import InputError

TARGET, DATA, CHECKS = "Target", "Data", "What to check"
OUTPUT, ENDPOINT, SCALE = "Output and gate", "Endpoint", "Scale"

T = TypeVar("T")


@dataclass(frozen=True)
class Option:
    """What help shows about a field.

    `file` says that it names a file, which a fleet file means relative to its own folder; `parse`
    makes the value of a word where the field's type does not say how.
    """

    help: str
    group: str
    metavar: str | None = None
    file: bool = False
    parse: Callable[[str], Any] | None = None


def option(
    default: T,
    help: str,  # noqa: A002 - as everybody calls it
    group: str,
    *,
    metavar: str | None = None,
    file: bool = False,
    parse: Callable[[str], Any] | None = None,
) -> T:
    """A field of a dataclass that people may set."""
    about = Option(help, group, "FILE" if file and metavar is None else metavar, file, parse)
    return dataclasses.field(default=default, metadata={"option": about})


@dataclass(frozen=True)
class Declared:
    """A field that people may set: its type and default, and its help."""

    name: str
    type: Any
    default: Any
    about: Option


def options_of(options: type[Any]) -> dict[str, Declared]:
    """The options that a dataclass declares, by their names."""
    hints = get_type_hints(options)
    return {
        field.name: Declared(
            field.name, hints[field.name], field.default, field.metadata["option"]
        )
        for field in dataclasses.fields(options)
        if "option" in field.metadata
    }  # fmt: skip


def settings(words: Sequence[str], types_: Mapping[str, Any], owner: str) -> dict[str, Any]:
    """`name=value`, one or more, each by the type of its name; `owner` has these options."""
    values: dict[str, Any] = {}
    for word in words:
        name, mark, value = word.partition("=")
        name = name.strip().replace("-", "_")
        if not mark:
            raise InputError(f"options are given as NAME=VALUE; {word[:80]!r} has no value")
        if name not in types_:
            known = f"it has {', '.join(types_)}" if types_ else "it has none"
            raise InputError(f"{owner} has no option {name[:40]!r}: {known}")
        if name in values:
            raise InputError(f"the option {name} was given twice")
        values[name] = _value(value, types_[name], name)
    return values


def types_of(takes: Callable[..., Any], hidden: Sequence[str] = ()) -> dict[str, Any]:
    """The parameters that a word can set, with their types."""
    hints = hints_of(takes)
    return {
        name: hints[name]
        for name in inspect.signature(takes).parameters
        if name not in hidden and _simple(hints.get(name))
    }


def hints_of(takes: Callable[..., Any]) -> Mapping[str, Any]:
    """The types of parameters: of a class, those of its fields."""
    inner: Any = getattr(takes, "func", takes)  # of a partial, what it calls
    return get_type_hints(inner)


def _kinds(type_: Any) -> list[Any]:
    """The alternatives of a union, None left out."""
    union = get_origin(type_) in (Union, types.UnionType)
    return [kind for kind in (get_args(type_) if union else (type_,)) if kind is not type(None)]


def _simple(type_: Any) -> bool:
    return any(
        kind in (bool, int, float, str, Path)
        or get_origin(kind) is Literal
        or (get_origin(kind) is tuple and get_args(kind)[0] in (int, float, str))
        for kind in _kinds(type_)
    )


_NAMES = {int: "a whole number", float: "a number", bool: "true or false"}


def _value(word: str, type_: Any, name: str) -> Any:
    """What a word means for a field of this type: the first alternative that it fits."""
    expected: list[str] = []
    for kind in _kinds(type_):
        if get_origin(kind) is Literal:
            known = {str(value): value for value in get_args(kind)}
            if word in known:
                return known[word]
            expected.append(" or ".join(known))
        elif get_origin(kind) is tuple:
            return tuple(_value(part, get_args(kind)[0], name) for part in word.split(","))
        elif kind is bool:
            if word.lower() in ("true", "false"):
                return word.lower() == "true"
            expected.append(_NAMES[bool])
        elif kind in (int, float):
            try:
                return kind(word)
            except ValueError:
                expected.append(_NAMES[kind])
        elif kind in (str, Path):
            return kind(word)
    raise InputError(f"expected {name} as {' or '.join(expected)}, got {word[:40]!r}")
