"""What a vector store is to an audit: so many vectors, by row, and perhaps their texts.

A kind of store is a function that takes a `Place` and gives a `Store` for the length of a `with`
block. It opens what is there to be read: files and databases stay as they are, byte for byte.
"""

from __future__ import annotations

import hashlib
import importlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from keyhole.core.errors import InputError, MissingExtra
from keyhole.data import TEXT_COLUMNS

TEXT_NAMES = (*TEXT_COLUMNS, "document", "content", "page_content", "chunk", "body")
_BATCH = 2**16  # rows that are read at once where all are wanted
_PIECE = 2**12  # rows that a kind of store is asked for at once: some hold them as lists of numbers
_PRINTED = 64  # vectors, evenly spread, that a store is known again by


@dataclass(frozen=True, eq=False)
class Store:
    """`count` vectors of `dim` numbers; `texts` is None where the store has none.

    `vectors(rows)` gives a tensor (rows, dim) and `texts(rows)` a list, None for a row without a
    text; rows are numbers from 0 in ascending order. `note` says what a reader must know of how
    they were read. `steps` (dim,) between `ends` (2, dim), or a `codebook` (blocks, codes,
    numbers), are there where the store keeps codes: they say which vectors share one. `packed` is
    the same store where each of its numbers may also be eight signs.
    """

    name: str
    count: int
    dim: int
    vectors: Callable[[Sequence[int]], Tensor]
    texts: Callable[[Sequence[int]], list[str | None]] | None = None
    note: str = ""
    steps: Tensor | None = None
    ends: Tensor | None = None
    codebook: Tensor | None = None
    packed: Store | None = None

    def __post_init__(self) -> None:
        if self.count < 1 or self.dim < 2:
            raise InputError(f"{self.name} holds no vectors of two numbers or more")

    @property
    def rounding(self) -> dict[str, Tensor]:
        """What it says of how numbers were rounded."""
        rounding = {"steps": self.steps, "ends": self.ends, "codebook": self.codebook}
        return {name: tensor for name, tensor in rounding.items() if tensor is not None}

    def read(self, rows: Sequence[int]) -> Tensor:
        """The vectors of these rows: floating-point numbers, all of them finite."""
        starts = range(0, len(rows), _PIECE)
        return torch.cat([self._piece(rows[start : start + _PIECE]) for start in starts])

    def _piece(self, rows: Sequence[int]) -> Tensor:
        vectors = self.vectors(rows)
        if tuple(vectors.shape) != (len(rows), self.dim) or not vectors.is_floating_point():
            raise InputError(f"every vector in {self.name} must have {self.dim} numbers")
        bad = (~vectors.isfinite()).any(-1).nonzero().flatten().tolist()
        if bad:
            raise InputError(f"row {rows[bad[0]]} of {self.name} holds NaN or infinity")
        return vectors

    def batches(self) -> Iterator[tuple[range, Tensor]]:
        """Every vector of the store, in pieces that fit into memory."""
        for start in range(0, self.count, _BATCH):
            rows = range(start, min(start + _BATCH, self.count))
            yield rows, self.read(rows)

    @cached_property
    def identity(self) -> str:
        """Told from the vectors themselves: a store that was moved or copied is still the same."""
        rows = sorted({number * self.count // _PRINTED for number in range(_PRINTED)})
        sum_ = hashlib.sha256(f"{self.count} {self.dim}".encode())
        sum_.update(self.read(rows).to(torch.float64).contiguous().numpy().tobytes())
        return f"{self.count:,} vectors of {self.dim} numbers, {sum_.hexdigest()[:16]}"


@dataclass(frozen=True)
class Place:
    """Where a store is, and which part of it: `path?option=name&…`.

    `known` are texts whose vectors a server is asked for; other stores hold vectors already.
    """

    path: str
    options: Mapping[str, str] = field(default_factory=dict[str, str])
    known: tuple[str, ...] = ()

    def choice(self, option: str, names: Sequence[str], what: str) -> str:
        """The name that was asked for, or the only one there is."""
        wanted = self.options.get(option)
        if wanted is None and len(names) == 1:
            return names[0]
        if wanted is not None and wanted in names:
            return wanted
        if not names:
            raise InputError(f"{self.path} has no {what}")
        there = ", ".join(names[:10])
        if wanted is None:
            raise InputError(
                f"{self.path} has more than one {what} ({there}): add ?{option}=NAME to the target"
            )
        raise InputError(f"{self.path} has no {what} {wanted}: choose among {there}")

    def text_column(self, names: Sequence[str]) -> str | None:
        """Where the texts are, if they are still there: a column of a usual name, or as asked."""
        if "text" in self.options:
            return self.choice("text", names, "column of texts")
        return next((name for name in TEXT_NAMES if name in names), None)


@dataclass(frozen=True)
class Kind:
    """A kind of store: how people write it, what opens it, and the options it takes after `?`."""

    name: str
    form: str
    open: Callable[[Place], AbstractContextManager[Store]]
    options: tuple[str, ...] = ()


def library(module: str, package: str = "") -> Any:
    """A package that reads one kind of store, or the line that says how to get it."""
    try:
        with warnings.catch_warnings():  # what others have to say of their own code is not for us
            warnings.simplefilter("ignore", DeprecationWarning)
            return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtra(f"{package or module} is not installed", "stores") from error


def column_store(
    name: str,
    count: int,
    read: Callable[[str, Sequence[int]], Sequence[Any]],
    column: str,
    text: str | None,
    dtype: Any = np.float64,
    note: str = "",
) -> Store:
    """A store with columns: `read(column, rows)` gives a list of numbers, or a text, for each row.

    `text` is the column of texts, where there is one.
    """

    def vectors(rows: Sequence[int]) -> Tensor:
        try:
            return torch.from_numpy(np.array(read(column, rows), dtype=dtype))
        except (TypeError, ValueError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(f"every {column} in {name} must have {dim} numbers") from error

    def texts(rows: Sequence[int]) -> list[str | None]:
        given = read(str(text), rows)
        return [words if isinstance(words, str) else None for words in given]

    dim = len(read(column, [0])[0]) if count else 0
    return Store(name, count, dim, vectors, None if text is None else texts, note)
