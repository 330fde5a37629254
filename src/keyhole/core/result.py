"""The base of all results: a summary for people, and a JSON file that can be loaded again.

`Result.save` writes it and `load` reads it back. Files are not trusted: `restored`
makes a dataclass of JSON data and checks the type of every field.
"""

from __future__ import annotations

import json
import math
import os
import platform
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields, is_dataclass
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Literal,
    Self,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from keyhole.core.errors import InputError
from keyhole.core.files import parse, read_tensors, read_text, write_tensors, write_text
from keyhole.version import __version__

if TYPE_CHECKING:
    from torch import Tensor


class Result(ABC):
    """The result of an attack, a training or an audit.

    A result is a frozen dataclass with a `summary`. One that holds tensors also
    overrides `contents`, `tensors` and `restore`.
    """

    kind: ClassVar[str]
    tensors_key: ClassVar[str] = (
        "tensors"  # the JSON key of the name of the file with the tensors
    )

    def contents(self) -> dict[str, Any]:
        """Return everything but tensors, as plain data for JSON."""
        return asdict(cast("Any", self))

    @classmethod
    def restore(cls, data: dict[str, Any], tensors: Mapping[str, Tensor]) -> Self:
        """Make the result from its `contents` and `tensors`; the data is not trusted."""
        del tensors
        return restored(cls, data, more=True)

    @abstractmethod
    def summary(self) -> str:
        """Return a few lines for people: how it ended, what it cost, what to do."""

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors, which do not fit into JSON."""
        return {}

    def __repr__(self) -> str:
        return f"{type(self).__name__}: {self.summary()}"

    def to_dict(self) -> dict[str, Any]:
        return {"format": FORMAT, "kind": self.kind, **self.contents()}

    @classmethod
    def from_dict(
        cls, data: dict[str, Any], tensors: Mapping[str, Tensor] | None = None
    ) -> Self:
        """Read what `to_dict` wrote, or raise an InputError."""
        expect_format(data.get("format"))
        if data.get("kind") != cls.kind:
            raise InputError(
                f"expected a saved {cls.kind}, got {str(data.get('kind'))[:40]}"
            )
        try:
            return cls.restore(data, tensors or {})
        except InputError as error:
            raise InputError(f"{error} in a saved {cls.kind}") from error
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise InputError(f"the saved {cls.kind} is damaged: {error!r}") from error

    def save(self, path: str | Path) -> None:
        """Write `path` (JSON) and, if there are tensors, a .safetensors file next to it."""
        path = Path(path)
        data = self.to_dict()
        tensors = self.tensors()
        if tensors:
            file = path.with_suffix(".safetensors")
            write_tensors(file, tensors, self.metadata())
            data[self.tensors_key] = file.name
        write_text(path, dump(data))

    def metadata(self) -> dict[str, str] | None:
        """Return the metadata of the file of tensors."""
        return None

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read what `save` wrote."""
        path, data = Path(path), read(path)
        tensors: dict[str, Tensor] = {}
        if isinstance(data.get(cls.tensors_key), str):
            about, tensors = read_tensors(
                path.parent / str(data[cls.tensors_key]),
                f"the {cls.tensors_key} next to {path}",
            )
            data["metadata"] = about
        try:
            return cls.from_dict(data, tensors)
        except InputError as error:
            raise InputError(f"{error} in {path}") from error


FORMAT = 1  # of the JSON files


def environment() -> dict[str, str]:
    """Return what somebody needs to know to reproduce the figures."""
    # on demand, because it takes seconds to load and loaded results do not need it
    import torch

    return {
        "keyhole": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "platform": platform.platform(),
        "cpus": str(os.cpu_count()),
        "threads": str(torch.get_num_threads()),
    }


def dump(data: dict[str, Any]) -> str:
    return json.dumps(data, indent=2, allow_nan=False)


def read(path: str | Path) -> dict[str, Any]:
    """Read a JSON object written by `dump`, or raise an InputError."""
    text = read_text(path, "a JSON file")
    try:
        data: object = parse(text)
    except ValueError as error:
        raise InputError(f"{path} is not a JSON file: {error}") from error
    if not isinstance(data, dict):
        raise InputError(f"{path} is not a JSON file of Keyhole")
    data = cast("dict[str, Any]", data)
    expect_format(data.get("format"), f" in {path}")
    return data


def expect_format(version: object, where: str = "") -> None:
    if version != FORMAT or isinstance(version, bool):
        raise InputError(
            f"this Keyhole reads format {FORMAT}, not {str(version)[:40]}{where}"
        )


T = TypeVar("T")


def restored(
    kind: type[T], data: object, where: str = "", *, more: bool = False, **made: object
) -> T:
    """Make a dataclass from untrusted JSON data, with a check of every field's type.

    Lists become tuples and strings become members of enumerations where a field's type
    asks for that. An integer is accepted as a float, but not the other way round.
    `more` allows keys that are no fields. `made` are values of fields that are used as
    they are.
    """
    if not isinstance(data, Mapping):
        raise _wrong_type(where or kind.__name__, "an object", data)
    given = cast("Mapping[str, Any]", data)
    known = {field.name: field for field in fields(cast("Any", kind)) if field.init}
    unknown = [] if more else [key for key in given if key not in known]
    if unknown:
        raise InputError(
            f"{where or kind.__name__} has no field {unknown[0]}: it has {', '.join(known)}"
        )
    hints = get_type_hints(kind)
    values = dict[str, Any](made)
    for name, field in known.items():
        place = f"{where}.{name}" if where else name
        if name in made:
            continue
        if name in given:
            values[name] = typed(hints[name], given[name], place)
        elif field.default is MISSING and field.default_factory is MISSING:
            raise InputError(f"{place} is missing")
    return kind(**values)


def typed(kind: Any, value: Any, where: str) -> Any:
    """Return `value` as a field of type `kind` holds it, or raise an InputError."""
    origin = get_origin(kind)
    inner = get_args(kind)
    if kind is Any:
        return value
    if origin in (Union, UnionType):
        if value is None and NoneType in inner:
            return None
        (only,) = [part for part in inner if part is not NoneType]
        return typed(only, value, where)
    if origin is tuple:
        return _tuple(inner, value, where)
    if origin is list:
        return list(_tuple((inner[0], ...), value, where))
    if origin is dict:
        if not isinstance(value, dict):
            raise _wrong_type(where, "an object", value)
        items = cast("dict[str, Any]", value)
        return {
            key: typed(inner[1], part, f"{where}.{key}") for key, part in items.items()
        }
    if is_dataclass(kind):
        inside = cast(
            "type[Any]", kind
        )  # a result also writes figures that are no fields
        return restored(inside, value, where, more=issubclass(inside, Result))
    if isinstance(kind, type) and issubclass(
        kind, tuple
    ):  # a NamedTuple, which is a list in JSON
        named = cast("Any", kind)
        return named(*_tuple(tuple(get_type_hints(named).values()), value, where))
    if origin is Literal:
        return _one_of(list(inner), value, where)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind(_one_of([str(member.value) for member in kind], value, where))
    return _plain(kind, value, where)


def _one_of(words: list[str], value: Any, where: str) -> Any:
    if value not in words:
        raise _wrong_type(where, f"one of {', '.join(words)}", value)
    return value


def _tuple(inner: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise _wrong_type(where, "a list", value)
    items = cast("list[Any]", value)
    if len(inner) == 2 and inner[1] is ...:
        return tuple(
            typed(inner[0], item, f"{where}[{n}]") for n, item in enumerate(items)
        )
    if len(items) != len(inner):
        raise _wrong_type(where, f"a list of {len(inner)}", value)
    pairs = zip(inner, items, strict=True)
    return tuple(
        typed(part, item, f"{where}[{n}]") for n, (part, item) in enumerate(pairs)
    )


def _plain(kind: Any, value: Any, where: str) -> Any:
    names = {
        int: "a whole number",
        float: "a number",
        str: "text",
        bool: "true or false",
    }
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if math.isfinite(number):
            return number
    elif type(value) is kind:
        return value
    raise _wrong_type(where, names.get(kind, str(kind)), value)


def _wrong_type(where: str, wanted: str, value: object) -> InputError:
    if isinstance(value, dict | list):
        shown = "an object" if isinstance(value, dict) else "a list"
    else:
        shown = repr(value[:40] if isinstance(value, str) else value)
    return InputError(f"expected {where} as {wanted}, got {shown[:60]}")
