"""A vector store as an audit reads it: vectors by row number, with their texts where it has them.

A kind of store (Chroma, FAISS, …) is a function that takes a `Place` and opens a `Store` for a
`with` block. Stores are opened for reading only: no byte of a file or database changes.
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
_BATCH = 2**16  # rows in one batch of `batches`
_REQUEST = 2**12  # rows in one call of `vectors`: some stores return them as Python lists
_SAMPLED = 64  # vectors, evenly spread, that go into the identity


@dataclass(frozen=True, eq=False)
class Store:
    """`count` vectors of `dim` numbers; `texts` is None where the store has none.

    `vectors(rows)` gives a tensor (rows, dim) and `texts(rows)` a list, None for a row without a
    text; rows are numbers from 0 in ascending order. `note` says what a reader must know of how
    they were read. A store that keeps quantised vectors gives its quantiser: the `steps` (dim,)
    between the `ends` (2, dim) of each number's range, or a `codebook` (blocks, codes, numbers).
    `packed` is the same store where each of its numbers may also be eight signs.
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
        """How its numbers are quantised, where it says so."""
        rounding = {"steps": self.steps, "ends": self.ends, "codebook": self.codebook}
        return {name: tensor for name, tensor in rounding.items() if tensor is not None}

    def read(self, rows: Sequence[int]) -> Tensor:
        """The vectors of these rows: floating-point numbers, all of them finite."""
        starts = range(0, len(rows), _REQUEST)
        return torch.cat([self._request(rows[start : start + _REQUEST]) for start in starts])

    def _request(self, rows: Sequence[int]) -> Tensor:
        vectors = self.vectors(rows)
        if tuple(vectors.shape) != (len(rows), self.dim) or not vectors.is_floating_point():
            raise InputError(f"every vector in {self.name} must have {self.dim} numbers")
        bad = (~vectors.isfinite()).any(-1).nonzero().flatten().tolist()
        if bad:
            raise InputError(f"row {rows[bad[0]]} of {self.name} holds NaN or infinity")
        return vectors

    def batches(self) -> Iterator[tuple[range, Tensor]]:
        """Every vector of the store, in batches that fit into memory."""
        for start in range(0, self.count, _BATCH):
            rows = range(start, min(start + _BATCH, self.count))
            yield rows, self.read(rows)

    @cached_property
    def identity(self) -> str:
        """A fingerprint of the vectors: a store that was moved or copied keeps it."""
        rows = sorted({number * self.count // _SAMPLED for number in range(_SAMPLED)})
        digest = hashlib.sha256(f"{self.count} {self.dim}".encode())
        digest.update(self.read(rows).to(torch.float64).contiguous().numpy().tobytes())
        return f"{self.count:,} vectors of {self.dim} numbers, {digest.hexdigest()[:16]}"


@dataclass(frozen=True)
class Place:
    """Where a store is, and which part of it: `path?option=name&…`.

    `known`: the texts that an embedding server is asked to embed; other stores hold vectors.
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
        known = ", ".join(names[:10])
        if wanted is None:
            raise InputError(
                f"{self.path} has more than one {what} ({known}): add ?{option}=NAME to the target"
            )
        raise InputError(f"{self.path} has no {what} {wanted}: choose among {known}")

    def text_column(self, names: Sequence[str]) -> str | None:
        """The column of texts: the one asked for, or one with a usual name; None without any."""
        if "text" in self.options:
            return self.choice("text", names, "column of texts")
        return next((name for name in TEXT_NAMES if name in names), None)


@dataclass(frozen=True)
class Kind:
    """A kind of store: its name, how its address is written, what opens it, options after `?`."""

    name: str
    form: str
    open: Callable[[Place], AbstractContextManager[Store]]
    options: tuple[str, ...] = ()


def library(module: str, package: str = "") -> Any:
    """A package that reads one kind of store; where missing, an error says how to install it."""
    try:
        with warnings.catch_warnings():  # of the package's own code
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
