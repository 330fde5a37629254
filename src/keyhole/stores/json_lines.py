"""Vectors in a file of JSON lines: an object for each text, with a list of numbers in it.

A line may also be the list itself. The file is read once to find where its lines begin; rows are
then read where they stand.
"""

from __future__ import annotations

from array import array
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor

from keyhole.core.errors import InputError
from keyhole.core.files import expect_file, parse
from keyhole.stores.store import Place, Store

_ALONE = "the line itself"


@contextmanager
def open_json_lines(place: Place) -> Generator[Store]:
    expect_file(place.path, "a .jsonl file of vectors")
    with Path(place.path).open("rb") as file:
        starts = _starts(file)
        first = _row(file, starts, 0, place.path) if starts else {}
        names = [name for name, value in first.items() if _is_vector(value)]
        column = place.choice("column", names, "field that holds a vector")
        text = place.text_column([name for name, value in first.items() if isinstance(value, str)])

        def vectors(rows: Sequence[int]) -> Tensor:
            given: list[Any] = [_row(file, starts, row, place.path).get(column) for row in rows]
            width = len(first[column])
            for row, vector in zip(rows, given, strict=True):
                if not _is_vector(vector) or len(vector) != width:
                    raise InputError(
                        f"expected {width} numbers in {column} in {place.path}, line {row + 1}"
                        f", got {str(vector)[:40]}"
                    )
            return torch.tensor(given, dtype=torch.float64)

        def texts(rows: Sequence[int]) -> list[str | None]:
            given = [_row(file, starts, row, place.path).get(str(text)) for row in rows]
            return [words if isinstance(words, str) else None for words in given]

        yield Store(
            place.path, len(starts), len(first[column]), vectors, None if text is None else texts
        )


def _starts(file: IO[bytes]) -> array[int]:
    """Where the lines begin that are not blank."""
    starts, place = array("q"), 0
    for line in file:
        if line.strip():
            starts.append(place)
        place += len(line)
    return starts


def _row(file: IO[bytes], starts: array[int], row: int, path: str) -> dict[str, Any]:
    file.seek(starts[row])
    line = file.readline()
    try:
        value: object = parse(line.decode("utf-8"))
    except ValueError as error:
        raise InputError(f"expected JSON in {path}, line {row + 1}, got {error}") from error
    if isinstance(value, list):
        return {_ALONE: value}
    if isinstance(value, dict):
        return cast("dict[str, Any]", value)
    raise InputError(f"expected an object or a list in {path}, line {row + 1}, got {line[:40]!r}")


def _is_vector(value: object) -> bool:
    if not isinstance(value, list):
        return False
    numbers = cast("list[object]", value)
    return len(numbers) > 1 and all(
        isinstance(number, int | float) and not isinstance(number, bool) for number in numbers
    )
