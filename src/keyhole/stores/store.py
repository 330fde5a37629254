"""A vector store as an audit reads it: vectors by row number, and their texts if it has them.

A kind of store (Chroma, FAISS, …) is a function that takes a `Place` and opens a
`Store` for the length of a `with` block. Stores are opened for reading only: no file or
database changes.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from keyhole.core.errors import InputError, optional
from keyhole.data import TEXT_COLUMNS

TEXT_NAMES = (*TEXT_COLUMNS, "document", "content", "page_content", "chunk", "body")
_BATCH = 2**16  # rows in one batch of `batches`
_ROWS_PER_CALL = 2**12  # of `vectors`: some stores return them as Python lists
ROWS_FOR_NAMES = 300  # in which a field of texts is looked for
_SAMPLED = 64  # vectors, evenly spread, that the identity is made of


@dataclass(frozen=True, eq=False)
class Store:
    """`count` vectors of `dim` numbers; `texts` is None if the store has none.

    - `vectors(rows)` returns a tensor (rows, dim), and `texts(rows)` a list with None for a row
      without a text. Rows are numbers from 0 in ascending order.
    - `note` tells a reader of the audit how the vectors were read.
    - `rounding` is the quantiser of a store of quantised vectors: the `steps` (dim,) between the
      `ends` (2, dim) of each number's range, or a `codebook` (blocks, codes, numbers).
    - `packed` is the same store if each of its numbers may also be eight packed signs.
    """

    name: str
    count: int
    dim: int
    vectors: Callable[[Sequence[int]], Tensor]
    texts: Callable[[Sequence[int]], list[str | None]] | None = None
    note: str = ""
    rounding: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    packed: Store | None = None

    def __post_init__(self) -> None:
        if self.count < 1 or self.dim < 2:
            raise InputError(f"{self.name} holds no vectors of two numbers or more")

    def read(self, rows: Sequence[int]) -> Tensor:
        """Return the vectors of these rows, which must be finite floating-point numbers."""
        starts = range(0, len(rows), _ROWS_PER_CALL)
        return torch.cat(
            [self._checked(rows[start : start + _ROWS_PER_CALL]) for start in starts]
        )

    def _checked(self, rows: Sequence[int]) -> Tensor:
        vectors = self.vectors(rows)
        whole = tuple(vectors.shape) == (len(rows), self.dim)
        if not whole or not vectors.is_floating_point():
            raise InputError(
                f"every vector in {self.name} must have {self.dim} numbers"
            )
        bad = (~vectors.isfinite()).any(-1).nonzero().flatten().tolist()
        if bad:
            raise InputError(f"row {rows[bad[0]]} of {self.name} holds NaN or infinity")
        return vectors

    def batches(self) -> Iterator[tuple[range, Tensor]]:
        """Yield every vector of the store, in batches that fit into memory."""
        for start in range(0, self.count, _BATCH):
            rows = range(start, min(start + _BATCH, self.count))
            yield rows, self.read(rows)

    @cached_property
    def identity(self) -> str:
        """A fingerprint of the vectors, which a moved or copied store keeps."""
        rows = sorted({number * self.count // _SAMPLED for number in range(_SAMPLED)})
        digest = hashlib.sha256(f"{self.count} {self.dim}".encode())
        digest.update(self.read(rows).double().contiguous().numpy().tobytes())
        return (
            f"{self.count:,} vectors of {self.dim} numbers, {digest.hexdigest()[:16]}"
        )


@dataclass(frozen=True)
class Place:
    """The address of a store and the part of it to read: `path?option=name&…`.

    `known` holds the texts that an embedding server is asked to embed; other stores
    ignore them.
    """

    path: str
    options: Mapping[str, str] = field(default_factory=dict[str, str])
    known: tuple[str, ...] = ()

    def choice(
        self,
        option: str,
        names: Sequence[str],
        what: str,
    ) -> str:
        """Return the name that the option gives, or the only one."""
        if not names:
            raise InputError(f"{self.path} has no {what}")
        known = ", ".join(names[:10])
        wanted = self.options.get(option)
        if wanted is None and len(names) > 1:
            raise InputError(
                f"{self.path} has more than one {what} ({known}): add ?{option}=NAME to the target"
            )
        if wanted is None or wanted in names:
            return wanted or names[0]
        raise InputError(f"{self.path} has no {what} {wanted}: choose among {known}")

    def text_column(self, names: Sequence[str]) -> str | None:
        """Return the column of texts that the option gives, or one with a usual name."""
        if "text" in self.options:
            return self.choice("text", names, "column of texts")
        return next((name for name in TEXT_NAMES if name in names), None)

    def text_field(self, rows: Iterable[Mapping[str, Any]]) -> str | None:
        """Return the field of texts; the first rows may lack it."""
        names = dict[str, None]()
        wanted = {self.options.get("text")} - {None} or set(TEXT_NAMES)
        for fields in islice(rows, ROWS_FOR_NAMES):
            names |= {
                name: None for name, value in fields.items() if isinstance(value, str)
            }
            if not wanted.isdisjoint(names):
                break
        return self.text_column(list(names))


@dataclass(frozen=True)
class Kind:
    """A kind of store: its name, the form of its address, its opener, its options after `?`."""

    name: str
    form: str
    open: Callable[[Place], AbstractContextManager[Store]]
    options: tuple[str, ...] = ()


def library(module: str, package: str = "") -> Any:
    """Import the package that reads a kind of store, or raise an error that names the extra."""
    with warnings.catch_warnings():  # the package's own code may be outdated
        warnings.simplefilter("ignore", DeprecationWarning)
        return optional(module, f"{package or module} is not installed", "stores")


def column_store(
    name: str,
    count: int,
    read: Callable[[str, Sequence[int]], Sequence[Any]],
    column: str,
    text: str | None,
    dtype: Any = np.float64,
    note: str = "",
) -> Store:
    """Return a store with columns: `read(column, rows)` lists the values of these rows.

    `column` holds lists of numbers, and `text` (if there is such a column) texts.
    """

    def vectors(rows: Sequence[int]) -> Tensor:
        given = read(column, rows)
        try:
            return torch.from_numpy(np.array(given, dtype=dtype))
        except (TypeError, ValueError, OverflowError) as error:
            raise InputError(
                f"every {column} in {name} must have {dim} numbers"
            ) from error

    def texts(rows: Sequence[int]) -> list[str | None]:
        given = read(str(text), rows)
        return [words if isinstance(words, str) else None for words in given]

    dim = len(read(column, [0])[0]) if count else 0
    return Store(name, count, dim, vectors, None if text is None else texts, note)
