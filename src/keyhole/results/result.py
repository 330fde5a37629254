"""What every result is: a kind, a few lines for people, and a file that comes back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from keyhole.errors import InputError
from keyhole.files import read_tensors, write_tensors, write_text
from keyhole.results.json import FORMAT, dump, expect_format, read
from keyhole.views import shown

if TYPE_CHECKING:  # torch takes seconds to load: reports are made without it
    from torch import Tensor


class Result(ABC):
    """The base of all results: attacks, trainings and audits are saved, loaded and shown alike.

    A result is a frozen dataclass that says what is in it (`contents`, and `tensors` where it
    holds any), how it is made again (`restore`), and what people should read of it (`summary`).
    """

    kind: ClassVar[str]
    beside: ClassVar[str] = "tensors"  # the key under which the file of tensors is named

    @abstractmethod
    def contents(self) -> dict[str, Any]:
        """Everything but tensors, as JSON takes it."""

    @classmethod
    @abstractmethod
    def restore(cls, data: dict[str, Any], tensors: Mapping[str, Tensor]) -> Self:
        """The result that `contents` and `tensors` describe; data may be anybody's."""

    @abstractmethod
    def summary(self) -> str:
        """A few lines for people: how it ended, what it cost, what to do."""

    def tensors(self) -> dict[str, Tensor]:
        """What does not fit into JSON."""
        return {}

    def __repr__(self) -> str:
        return f"{type(self).__name__}: {self.summary()}"

    def _repr_html_(self) -> str | None:
        """What a notebook shows (report/notebook)."""
        return shown(self)

    def to_dict(self) -> dict[str, Any]:
        return {"format": FORMAT, "kind": self.kind, **self.contents()}

    @classmethod
    def from_dict(cls, data: dict[str, Any], tensors: Mapping[str, Tensor] | None = None) -> Self:
        """Read what `to_dict` wrote, or say in one line why it is something else."""
        expect_format(data.get("format"))
        if data.get("kind") != cls.kind:
            raise InputError(f"expected a saved {cls.kind}, got {str(data.get('kind'))[:40]}")
        try:
            return cls.restore(data, tensors or {})
        except InputError as error:
            raise InputError(f"{error} in a saved {cls.kind}") from error
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise InputError(f"expected a saved {cls.kind}, got {error!r}") from error

    def save(self, path: str | Path) -> None:
        """Write `path` (JSON) and, where there are tensors, a .safetensors file beside it."""
        path, data, tensors = Path(path), self.to_dict(), self.tensors()
        if tensors:
            file = path.with_suffix(".safetensors")
            write_tensors(file, tensors, self.metadata())
            data[self.beside] = file.name
        write_text(path, dump(data))

    def metadata(self) -> dict[str, str] | None:
        """What the file of tensors says about itself."""
        return None

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read what `save` wrote."""
        path, data = Path(path), read(path)
        tensors: dict[str, Tensor] = {}
        if isinstance(data.get(cls.beside), str):
            about, tensors = read_tensors(
                path.parent / str(data[cls.beside]), f"the {cls.beside} beside {path}"
            )
            data["metadata"] = about
        try:
            return cls.from_dict(data, tensors)
        except InputError as error:
            raise InputError(f"{error} in {path}") from error
