"""The base of all results: a summary for people, and a JSON file that can be loaded again.

`Result.save` writes it and `load` reads it back. Files are not trusted: `typed`
makes dataclasses of what they hold, and pydantic checks the type of every field.
"""

from __future__ import annotations

import json
import os
import platform
import re
import reprlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict
from datetime import date
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar, cast

from keyhole.core.errors import InputError
from keyhole.core.files import parse, read_tensors, read_text, write_tensors, write_text
from keyhole.version import __version__

if TYPE_CHECKING:
    from pydantic import TypeAdapter
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
        return typed(cls, data)

    @abstractmethod
    def summary(self) -> str:
        """Return a few lines for people: how it ended, what it cost, what to do."""

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors, which do not fit into JSON."""
        return {}

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        """Let `typed` skip keys that are no fields: `contents` may have figures besides."""
        schema = handler(source)
        handler.resolve_ref_schema(schema)["schema"]["extra_behavior"] = "ignore"
        return schema

    def __repr__(self) -> str:
        return f"{type(self).__name__}: {self.summary()}"

    def to_dict(self) -> dict[str, Any]:
        return {"format": FORMAT, "kind": self.kind, **self.contents()}

    @classmethod
    def from_dict(
        cls, data: dict[str, Any], tensors: Mapping[str, Tensor] | None = None
    ) -> Self:
        """Read what `to_dict` wrote, or raise an InputError."""
        version = data.get("format")
        if type(version) is not int or version != FORMAT:
            raise InputError(
                f"this Keyhole reads format {FORMAT}, not {str(version)[:40]}"
            )
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
        path = Path(path)
        data = read(path)
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
    return json.dumps(data, indent=2, allow_nan=False, default=date.isoformat)


def read(path: str | Path) -> dict[str, Any]:
    """Read a JSON object written by `dump`, or raise an InputError."""
    text = read_text(path, "a JSON file")
    try:
        data: object = parse(text)
    except ValueError as error:
        raise InputError(f"{path} is not a JSON file: {error}") from error
    if not isinstance(data, dict):
        raise InputError(f"{path} is not a JSON file of Keyhole")
    return cast("dict[str, Any]", data)


T = TypeVar("T")
_HALF = re.compile("[\ud800-\udfff]")  # of a surrogate pair, which UTF-8 cannot encode


def _private_use(half: re.Match[str]) -> str:
    """Return a character for private use in its place, another for each."""
    return chr(ord(half[0]) + 0x800)


def typed(
    kind: type[T],
    data: object,
    where: str = "",
) -> T:
    """Make a value of type `kind` from untrusted plain data, or raise an InputError.

    Nothing is converted but what JSON cannot tell apart: lists become tuples, words
    members of enumerations, objects dataclasses, and whole numbers floats. A key that
    is no field is refused, except in a Result, and so is a number that is not finite.
    `where` is the name of the data in errors.
    """
    from pydantic import ValidationError  # on demand, because it takes 0.1 s to load

    text = json.dumps([data], ensure_ascii=False, default=str)  # dates are no JSON
    try:
        (made,) = _reader(list[kind]).validate_json(_HALF.sub(_private_use, text))
    except ValidationError as error:
        raise InputError(_sentence(error.errors()[0], where)) from error
    return made


@cache
def _reader(kind: Any) -> TypeAdapter[Any]:
    from pydantic import ConfigDict, TypeAdapter

    # A dataclass takes the settings of what is around it: `typed` reads a list.
    config = ConfigDict(
        strict=True,
        extra="forbid",
        allow_inf_nan=False,
        arbitrary_types_allowed=True,  # tensors, which are not in the data
    )
    return TypeAdapter(kind, config=config)


def _sentence(error: Mapping[str, Any], where: str) -> str:
    """Return a sentence that names the field and says what is wrong with it."""
    if error["type"] == "value_error":  # raised in a __post_init__ of ours
        return str(error["ctx"]["error"])
    for key in error["loc"][1:]:
        where += f"[{key}]" if isinstance(key, int) else f".{key}"
    where = where.removeprefix(".")[:200] or "the data"
    if error["type"] == "missing":
        return f"{where} is missing"
    if error["type"] == "unexpected_keyword_argument":
        return f"{where} is unknown"
    wanted = error["msg"].removeprefix("Input should be ")
    if wanted == error["msg"]:
        return f"{where}: {wanted}"
    return f"expected {where} as {wanted}, got {reprlib.repr(error['input'])}"
