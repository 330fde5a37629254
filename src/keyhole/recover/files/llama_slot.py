"""A slot that llama.cpp's server saved (`POST /slots/0?action=save`): ids, then keys and values.

The file is little endian and begins with the magic `ggsq` and a version. What follows, as files of
real servers have it:

    count, then so many words: the token ids; of newer servers −1, 1, n, the n ids, and a count of
        what is no text (images)
    streams, cells, and for each cell: position, number of sequences, their numbers
    are values transposed?, layers, (eight bytes more, of newer servers)
    for each layer: type, bytes of a row as 64 bits, the keys: a row of all heads for each cell
    for each layer the values: the same; or transposed: type, bytes of a number, numbers of a row,
        and then a row of all cells for each number

Keys of the llama family are stored as GGUF orders them, the two numbers of a rotated plane side by
side; transformers has them half a head apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from keyhole.core.errors import InputError
from keyhole.core.files import trouble
from keyhole.core.machine import expect_room

MAGIC = b"qsgg"
_TYPES = {0: (torch.float32, 4), 1: (torch.float16, 2), 30: (torch.bfloat16, 2)}
_FRAMED = 0xFFFFFFFF  # where newer servers say that more than ids follows
_GAPS = (0, 8)  # bytes between the number of layers and the first of them


@dataclass(frozen=True, eq=False)
class Slot:
    """Token ids (n,), and keys and values (cells, numbers of all heads) of each layer."""

    ids: tuple[int, ...]
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]


def read_slot(path: str | Path) -> Slot:
    """The slot in a file, or one line on why it is none."""
    try:
        expect_room(2 * Path(path).stat().st_size, f"the file {path}")
        content = Path(path).read_bytes()
    except OSError as error:
        raise trouble("a saved slot of llama.cpp", path, error) from error
    try:
        return _slot(content)
    except InputError as error:
        raise InputError(f"{error} in {path}") from error


def arrays_of_slot(slot: Slot) -> dict[str, Tensor]:
    """Under the names of a cache of transformers, with the ids."""
    named = {"input_ids": torch.tensor(slot.ids)}
    for layer, (keys, values) in enumerate(zip(slot.keys, slot.values, strict=True)):
        named |= {f"gguf.{layer}.keys": keys, f"gguf.{layer}.values": values}
    return named


def _slot(content: bytes) -> Slot:
    reader = _Reader(content, 8)
    words = reader.words(reader.word())
    ids = words
    if words and words[0] == _FRAMED:
        count = words[2] if len(words) > 2 else 0
        ids = words[3 : 3 + count]
        if len(ids) < count:
            raise _broken(f"{count} token ids announced, {len(ids)} there")
    if reader.word() != 1:
        raise _broken("cells of several streams, where one was saved")
    cells = reader.word()
    positions: list[int] = []
    for _ in range(cells):
        positions.append(reader.word())
        reader.words(reader.word())
    if positions != list(range(cells)):
        raise _broken("positions that do not count from 0: the context was shifted")
    if len(ids) < cells:
        raise _broken(f"{len(ids)} token ids for {cells} cells")
    transposed, layers = bool(reader.word()), reader.word()
    refused = _broken("no layers")
    for gap in _GAPS:
        attempt = _Reader(content, reader.at + gap)
        try:
            keys = tuple(attempt.rows(cells) for _ in range(layers))
            read = attempt.columns if transposed else attempt.rows
            values = tuple(read(cells) for _ in range(layers))
        except InputError as error:
            refused = error if isinstance(error, _AnotherType) or gap == _GAPS[0] else refused
            continue
        if attempt.at == len(content):
            return Slot(tuple(ids[:cells]), keys, values)
        refused = _broken(f"{len(content) - attempt.at} bytes after the last layer")
    raise refused


def _broken(what: str) -> InputError:
    return InputError(f"cannot read the saved slot of llama.cpp: {what}")


class _AnotherType(InputError):
    """Numbers that are none of the types that are read."""


class _Reader:
    """Words and rows one after the other, never beyond the end of the file."""

    def __init__(self, content: bytes, at: int) -> None:
        self._content = content
        self.at = at

    def take(self, size: int) -> bytes:
        if size > len(self._content) - self.at:
            raise _broken("only its beginning")
        self.at += size
        return self._content[self.at - size : self.at]

    def word(self, size: int = 4) -> int:
        return int.from_bytes(self.take(size), "little")

    def words(self, count: int) -> list[int]:
        return np.frombuffer(self.take(4 * count), "<u4").tolist()

    def rows(self, cells: int) -> Tensor:
        """(cells, numbers)."""
        dtype, size = self._type()
        width = self.word(8) // size
        return self._tensor(cells * width, dtype, size).reshape(cells, width)

    def columns(self, cells: int) -> Tensor:
        """The same from rows of one number in all cells."""
        dtype, size = self._type()
        if self.word() != size:
            raise _broken("numbers of another size than their type's")
        width = self.word()
        return self._tensor(cells * width, dtype, size).reshape(width, cells).mT.contiguous()

    def _type(self) -> tuple[torch.dtype, int]:
        number = self.word()
        if number not in _TYPES:
            raise _AnotherType(
                "cannot read the saved slot of llama.cpp: keys and values must be f32, f16 or "
                f"bf16, not type {number}"
            )
        return _TYPES[number]

    def _tensor(self, count: int, dtype: torch.dtype, size: int) -> Tensor:
        return torch.frombuffer(bytearray(self.take(count * size)), dtype=dtype)
