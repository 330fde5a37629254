"""Texts from a file: one a line (.txt), or a column of a table (.tsv, .csv, .jsonl)."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, cast

from keyhole.errors import InputError

COLUMNS = ("sentence", "text")  # looked for in this order where no column is named


def read_texts(path: str | Path, column: str | None = None, limit: int | None = None) -> list[str]:
    """The first `limit` texts of a file."""
    path = Path(path)
    try:
        content = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"expected a file with texts, got {path}: {error}") from error
    if path.suffix in (".tsv", ".csv"):
        rows: Iterator[Any] = iter(_table(content, path))
    elif path.suffix == ".jsonl":
        rows = _objects(content, path)
    else:
        rows = iter(content.splitlines())
    found = (row if isinstance(row, str) else _text(row, column, path) for row in rows)
    texts = list(islice((text.strip() for text in found if text.strip()), limit))
    if not texts:
        raise InputError(f"expected texts in {path}, got none")
    return texts


def _table(content: str, path: Path) -> csv.DictReader[str]:
    if path.suffix == ".tsv":  # a quotation mark there is part of the text
        return csv.DictReader(content.split("\n"), delimiter="\t", quoting=csv.QUOTE_NONE)
    return csv.DictReader(content.splitlines(keepends=True))


def _objects(content: str, path: Path) -> Iterator[Any]:
    for number, line in enumerate(content.splitlines(), 1):
        if line.strip():
            try:
                yield json.loads(line)
            except ValueError as error:
                raise InputError(f"expected JSON in {path.name}:{number}, got {error}") from error


def _text(row: Any, column: str | None, path: Path) -> str:
    fields = cast("dict[str, Any]", row) if isinstance(row, dict) else {}
    names = (column,) if column is not None else COLUMNS
    for name in names:
        if isinstance(fields.get(name), str):
            return fields[name]
    held = ", ".join(str(name) for name in fields) or "no named columns"
    raise InputError(f"expected a column {' or '.join(names)} in {path.name}, got {held}")
