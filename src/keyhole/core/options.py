"""Options, each declared once with its default, its help and its group in the help.

    flips: int = option(12, "How many of a classifier's answers to try to flip.", DATA)

Options are fields of a frozen dataclass, from which the command line, fleet files,
Python and the journal derive. The hyperparameters of a method are the fields of its own
dataclass; `settings` reads them from words of the form `name=value`, each by the type
of its field.
"""

from __future__ import annotations

import dataclasses
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from keyhole.core.errors import InputError

TARGET = "Target"
DATA = "Data"
CHECKS = "What to check"
OUTPUT = "Output and gate"
ENDPOINT = "Endpoint"
SCALE = "Scale"

T = TypeVar("T")


@dataclass(frozen=True)
class Option:
    """An option: its help, how it is read, and the name, type and default of its field.

    `file` marks the name of a file, which a fleet file gives relative to its own
    folder. `parse` reads the value where the field's type does not say how.
    """

    help: str
    group: str
    metavar: str | None = None
    file: bool = False
    parse: Callable[[str], Any] | None = None
    name: str = ""
    type: Any = None
    default: Any = None


def option(
    default: T,
    help: str,  # noqa: A002 - as everybody calls it
    group: str,
    *,
    metavar: str | None = None,
    file: bool = False,
    parse: Callable[[str], Any] | None = None,
) -> T:
    """Declare a field of a dataclass as an option."""
    if file and metavar is None:
        metavar = "FILE"
    about = Option(help, group, metavar, file, parse)
    return dataclasses.field(default=default, metadata={"option": about})


def declared(
    field: dataclasses.Field[Any],
    name: str,
    type_: Any,
) -> Option | None:
    """Return the option that a field, or the default of a parameter, declares, if it does."""
    about = field.metadata.get("option")
    return about and replace(about, name=name, type=type_, default=field.default)


def options_of(options: type[Any]) -> dict[str, Option]:
    """Return the options that a dataclass declares, by name."""
    hints = get_type_hints(options)
    found = (
        declared(field, field.name, hints[field.name]) for field in fields(options)
    )
    return {option.name: option for option in found if option}


def settings(
    words: Sequence[str] | None,
    types_: Mapping[str, Any],
    owner: str,
) -> dict[str, Any]:
    """Read words `name=value`; `types_` are the types by name, and `owner` is what has them."""
    values: dict[str, Any] = {}
    for word in words or ():
        name, mark, value = word.partition("=")
        name = name.strip().replace("-", "_")
        if not mark:
            raise InputError(
                f"options are given as NAME=VALUE; {word[:80]!r} has no value"
            )
        if name not in types_:
            known = f"it has {', '.join(types_)}" if types_ else "it has none"
            raise InputError(f"{owner} has no option {name[:40]!r}: {known}")
        if name in values:
            raise InputError(f"the option {name} was given twice")
        values[name] = _value(value, types_[name], name)
    return values


def types_of(takes: Callable[..., Any], hidden: Sequence[str] = ()) -> dict[str, Any]:
    """Return the parameters of a function or class that a word can set, with their types."""
    hints = get_type_hints(
        getattr(takes, "func", takes)
    )  # of a partial, those of its function
    return {
        name: hints[name]
        for name in inspect.signature(takes).parameters
        if name not in hidden and _simple(hints.get(name))
    }


def _alternatives(type_: Any) -> list[Any]:
    """Return the types in a union, except None; any other type is its own alternative."""
    if get_origin(type_) not in (Union, types.UnionType):
        return [type_]
    return [kind for kind in get_args(type_) if kind is not types.NoneType]


def _simple(type_: Any) -> bool:
    return any(
        kind in (bool, int, float, str, Path)
        or get_origin(kind) is Literal
        or (get_origin(kind) is tuple and get_args(kind)[0] in (int, float, str))
        for kind in _alternatives(type_)
    )


_NAMES = {int: "a whole number", float: "a number", bool: "true or false"}


def _value(
    word: str,
    type_: Any,
    name: str,
) -> Any:
    """Read a word as the first alternative of its field's type that it fits."""
    expected: list[str] = []
    for kind in _alternatives(type_):
        if get_origin(kind) is Literal:
            known = {str(value): value for value in get_args(kind)}
            if word in known:
                return known[word]
            expected.append(" or ".join(known))
        elif get_origin(kind) is tuple:
            return tuple(
                _value(part, get_args(kind)[0], name) for part in word.split(",")
            )
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
