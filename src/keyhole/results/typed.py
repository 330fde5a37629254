"""Dataclasses from JSON that may be anybody's: every field is there and of the type it is declared.

JSON has one kind of list and no enumerations, so lists become the tuples, and words the members,
that a field's type asks for. A whole number will do for a float, never the other way round.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from keyhole.errors import InputError

T = TypeVar("T")


def restored(kind: type[T], data: object, where: str = "", *, more: bool = False) -> T:
    """The dataclass that `data` describes; `more` lets keys pass that are none of its fields."""
    if not isinstance(data, Mapping):
        raise _unlike(where or kind.__name__, "an object", data)
    given = cast("Mapping[str, Any]", data)
    known = {field.name: field for field in fields(cast("Any", kind)) if field.init}
    unknown = [] if more else [key for key in given if key not in known]
    if unknown:
        raise InputError(
            f"expected {', '.join(known)} in {where or kind.__name__}, got {unknown[0]}"
        )
    hints, values = get_type_hints(kind), dict[str, Any]()
    for name, field in known.items():
        place = f"{where}.{name}" if where else name
        if name in given:
            values[name] = typed(hints[name], given[name], place)
        elif field.default is MISSING and field.default_factory is MISSING:
            raise InputError(f"expected {place}, got none")
    return kind(**values)


def typed(kind: Any, value: Any, where: str) -> Any:
    """`value` as a field of type `kind` holds it, or one line that says what stands there."""
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin in (Union, UnionType):
        if value is None and NoneType in inner:
            return None
        (only,) = [part for part in inner if part is not NoneType]
        return typed(only, value, where)
    if origin is tuple:
        return _tuple(inner, value, where)
    if origin in (list, dict):
        return _collection(origin, inner, value, where)
    if is_dataclass(kind):
        return restored(cast("type[Any]", kind), value, where)
    if isinstance(kind, type) and issubclass(kind, Enum):
        words = [str(member.value) for member in kind]
        if value not in words:
            raise _unlike(where, f"one of {', '.join(words)}", value)
        return kind(value)
    return _plain(kind, value, where)


def _tuple(inner: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise _unlike(where, "a list", value)
    items = cast("list[Any]", value)
    if len(inner) == 2 and inner[1] is ...:
        return tuple(typed(inner[0], item, f"{where}[{n}]") for n, item in enumerate(items))
    if len(items) != len(inner):
        raise _unlike(where, f"a list of {len(inner)}", value)
    pairs = zip(inner, items, strict=True)
    return tuple(typed(part, item, f"{where}[{n}]") for n, (part, item) in enumerate(pairs))


def _collection(origin: Any, inner: tuple[Any, ...], value: Any, where: str) -> Any:
    if origin is list:
        return list(_tuple((inner[0], ...), value, where))
    if not isinstance(value, dict):
        raise _unlike(where, "an object", value)
    items = cast("dict[str, Any]", value)
    return {key: typed(inner[1], part, f"{where}.{key}") for key, part in items.items()}


def _plain(kind: Any, value: Any, where: str) -> Any:
    names = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if math.isfinite(number):
            return number
    elif type(value) is kind:
        return value
    raise _unlike(where, names.get(kind, str(kind)), value)


def _unlike(where: str, wanted: str, value: object) -> InputError:
    shown = (
        repr(value[:40] if isinstance(value, str) else value)
        if not isinstance(value, dict | list)
        else ("an object" if isinstance(value, dict) else "a list")
    )
    return InputError(f"expected {where} as {wanted}, got {shown[:60]}")
