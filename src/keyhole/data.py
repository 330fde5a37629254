"""Examples and texts from files: SST-2, HellaSwag, DREAM, ReClor, and any table with named columns.

A file is recognised by what is in it, not by its name:

| kind | file | one example |
|---|---|---|
| table | CSV, TSV (with a header) or JSONL | the text column(s) and the label column; SST-2 is `sentence`, `label` |
| texts | .txt, or JSONL of strings | a line, without a label |
| hellaswag | JSONL | `ctx`, `endings`, `label` |
| dream | JSON | `[[turns], [{question, choice, answer}], id]`, one example a question |
| reclor | JSON | `{context, question, answers, label}` |

Names of datasets on the hub go through the package `datasets`, where it is installed.
A wrong file is one line: what is wrong, and in which line or entry.
"""  # noqa: E501

from __future__ import annotations

import csv
import importlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from keyhole.core.errors import InputError, MissingExtra, expect_count, first_line
from keyhole.core.files import exists, parse, read_text

TEXT_COLUMNS = ("sentence", "text")  # looked for in this order where no column is named
NO_LABEL = -1  # of an example that came without one
_LETTERS = 1000  # of one token, at most: the longest word of a vocabulary has far fewer
_CLASSES = 1_000_000  # more than any classifier has
Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Example:
    """A text (or a pair of texts) with its class, or a context with choices and the right one."""

    id: str
    label: int
    text: str
    second: str = ""
    choices: tuple[str, ...] = ()


def read_examples(
    source: str | Path,
    *,
    text: str | Sequence[str] = (),
    label: str = "label",
    names: Sequence[str] = (),
    limit: int | None = None,
    labelled: bool = True,
) -> list[Example]:
    """Examples of a file, or of a dataset on the hub.

    `text` names one or two columns of a table, `label` another; `names` are the classes' names in
    order, where a table may hold names instead of numbers. Where `labelled` is
    False, examples may come without a label (NO_LABEL). Of a dataset, the split validation is read.
    """
    expect_count("the number of texts", limit)
    given = tuple(name for name in ((text,) if isinstance(text, str) else text) if name)
    columns, path = _Columns(given, label, tuple(names), labelled), Path(source)
    if exists(path, links=True) or path.suffix in (".tsv", ".csv", ".json", ".jsonl", ".txt"):
        rows = _from_file(path, columns)
    else:
        rows = _from_hub(str(source), columns)
    examples = list(islice((row for row in rows if row.text.strip()), limit))
    if not examples:
        raise InputError(f"there are no texts in {source}")
    return examples


def read_texts(path: str | Path, column: str | None = None, limit: int | None = None) -> list[str]:
    """The first `limit` texts of a file, whatever labels they may have."""
    examples = read_examples(path, text=column or (), label="", limit=limit, labelled=False)
    return [example.text.strip() for example in examples]


@dataclass(frozen=True)
class _Columns:
    """Which columns of a table are read, and how classes are named there."""

    text: tuple[str, ...] = ()
    label: str = "label"
    names: tuple[str, ...] = ()
    labelled: bool = True

    def example(self, row: dict[str, Any], where: str) -> Example:
        named = (name for name in TEXT_COLUMNS if isinstance(row.get(name), str))
        text = self.text or tuple(named)[:1]
        if not text or len(text) > 2:
            wanted = " or ".join(TEXT_COLUMNS)
            raise InputError(f"{where} has no text in a column {wanted}, only {', '.join(row)}")
        texts = [_field(row, name, str, where) for name in text]
        number = NO_LABEL
        if self.labelled or self.label in row:
            number = self._class(_field(row, self.label, object, where), where)
        return Example(where, number, texts[0], texts[1] if len(texts) > 1 else "")

    def plain(self, text: str, where: str) -> Example:
        """A line that is a text and nothing else."""
        if self.labelled:
            raise InputError(f"expected an object with a label in {where}, got {text[:40]!r}")
        return Example(where, NO_LABEL, text)

    def _class(self, value: Any, where: str) -> int:
        if str(value) in self.names:
            return self.names.index(str(value))
        if self.names and not str(value).lstrip("-").isdecimal():
            known = ", ".join(self.names)
            raise InputError(f"{where} has an unknown class {value!r:.40}: known are {known[:200]}")
        return _number(value, where)


def _number(value: Any, where: str, below: int | None = None) -> int:
    shown, most = str(value)[:40], _CLASSES if below is None else below
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        raise InputError(f"expected a class as a number in {where}, got {shown!r}") from None
    if not 0 <= number < most or isinstance(value, float):
        raise InputError(f"the class in {where} must be from 0 to {most - 1:,}, not {shown}")
    return number


def _field(row: Any, name: str, kind: type, where: str) -> Any:
    if not isinstance(row, dict) or name not in row or not isinstance(row[name], kind):
        held = ", ".join(map(str, cast("dict[str, Any]", row))) if isinstance(row, dict) else row
        raise InputError(
            f"there is no field {name!r} in {where}, only {str(held)[:80] or 'nothing'}"
        )
    return cast("dict[str, Any]", row)[name]


def _texts(row: Any, name: str, where: str) -> list[str]:
    values = cast("list[Any]", _field(row, name, list, where))
    if len(values) < 2 or not all(isinstance(value, str) for value in values):
        raise InputError(f"{name!r} in {where} must hold two or more texts, not {values!r:.80}")
    return values


def _from_file(path: Path, columns: _Columns) -> Iterator[Example]:
    text = read_text(path, "a file with texts")
    if path.suffix in (".csv", ".tsv"):
        return _table(text, path, columns)
    if path.suffix not in (".json", ".jsonl"):
        lines = enumerate(text.split("\n"), 1)
        return (columns.plain(line, f"{path.name}:{n}") for n, line in lines if line.strip())
    if text.lstrip().startswith("["):
        return _entries(text, path)
    return _lines(text, path, columns)


def _table(text: str, path: Path, columns: _Columns) -> Iterator[Example]:
    """CSV with quotes; in a TSV a quotation mark is part of the text."""
    if path.suffix == ".tsv":
        # Not `splitlines`: a text may hold other characters that count as ends of lines there.
        reader = csv.reader(text.split("\n"), delimiter="\t", quoting=csv.QUOTE_NONE)
    else:
        reader = csv.reader(text.splitlines(keepends=True))
    try:
        header = next(reader, [])
        twice = [name for name in header if header.count(name) > 1]
        if twice:
            raise InputError(f"{path.name} has two columns {twice[0]!r}: rename one")
        for row in reader:
            if not row:
                continue
            where = f"{path.name}:{reader.line_num}"
            if len(row) != len(header):
                raise InputError(f"{where} has {len(row)} columns, and the header {len(header)}")
            yield columns.example(dict(zip(header, row, strict=True)), where)
    except csv.Error as error:
        where = f"{path.name}:{reader.line_num + 1}"
        raise InputError(f"{where} is not a row of a table: {error}") from error


def _json(text: str, where: str) -> Any:
    try:
        return parse(text)
    except ValueError as error:
        raise InputError(f"expected JSON in {where}, got {text[:40]!r}: {error}") from error


def _lines(text: str, path: Path, columns: _Columns) -> Iterator[Example]:
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        where = f"{path.name}:{number}"
        row = _json(line, where)
        if isinstance(row, dict):
            yield _example(cast("dict[str, Any]", row), where, columns)
        elif isinstance(row, str):
            yield columns.plain(row, where)
        else:
            raise InputError(f"expected an object in {where}, got {line[:40]!r}")


def _entries(text: str, path: Path) -> Iterator[Example]:
    entries = cast("list[Any]", _json(text, path.name))
    for number, entry in enumerate(entries, 1):
        where = f"{path.name}[{number}]"
        if isinstance(entry, list):
            yield from _dream(cast("list[Any]", entry), where)
        else:
            yield _reclor(entry, where)


def _hellaswag(row: Any, where: str) -> Example:
    endings = _texts(row, "endings", where)
    number = _number(_field(row, "label", object, where), where, len(endings))
    return Example(where, number, _field(row, "ctx", str, where), choices=tuple(endings))


def _reclor(row: Any, where: str) -> Example:
    answers = _texts(row, "answers", where)
    question = _field(row, "question", str, where)
    number = _number(_field(row, "label", object, where), where, len(answers))
    choices = tuple(f"{question} {answer}" for answer in answers)
    return Example(
        str(row.get("id_string", where)), number, _field(row, "context", str, where), "", choices
    )


def _dream(entry: list[Any], where: str) -> Iterator[Example]:
    if len(entry) != 3 or not (isinstance(entry[0], list) and isinstance(entry[1], list)):
        raise InputError(f"expected [[turns], [questions], id] in {where}, got {str(entry)[:60]}")
    turns, questions = cast("list[Any]", entry[0]), cast("list[Any]", entry[1])
    if not all(isinstance(turn, str) for turn in turns):
        raise InputError(f"expected turns as texts in {where}, got {turns!r:.80}")
    for number, row in enumerate(questions):
        choices = _texts(row, "choice", where)
        answer, question = _field(row, "answer", str, where), _field(row, "question", str, where)
        if answer not in choices:
            raise InputError(f"the answer {answer!r} is none of the choices in {where}")
        yield Example(
            f"{entry[2]}#{number}", choices.index(answer), "\n".join(turns),
            choices=tuple(f"{question} {choice}" for choice in choices),
        )  # fmt: skip


def _from_hub(name: str, columns: _Columns) -> Iterator[Example]:
    try:
        library = importlib.import_module("datasets")
    except ImportError as error:
        raise MissingExtra(
            f"there is no file {name}, and names on the hub need the package datasets",
            "hub",
        ) from error
    parts = name.split(":")  # "glue:sst2" is the configuration sst2 of glue
    try:
        rows = library.load_dataset(*parts, split="validation")
    except Exception as error:
        # No network, no such name, a script that is not run: whatever it is, one line.
        raise InputError(
            f"there is no file {name}, and no such dataset on the hub: {first_line(error)}"
        ) from error
    return from_rows(rows, name, columns)


def from_rows(
    rows: Iterable[Any], name: str, columns: _Columns = _Columns()  # noqa: B008 - it is frozen
) -> Iterator[Example]:  # fmt: skip
    """Examples from rows that are dictionaries: what `datasets` gives."""
    return (_example(row, f"{name}[{number}]", columns) for number, row in enumerate(rows, 1))


def _example(row: dict[str, Any], where: str, columns: _Columns) -> Example:
    """One row, recognised by its fields."""
    if "endings" in row:
        return _hellaswag(row, where)
    if "answers" in row and "context" in row:
        return _reclor(row, where)
    return columns.example(row, where)


def opening(text: str, tokens: int | None) -> str:
    """As much of a text as its first `tokens` can come from: a tokenizer reads all it is given."""
    return text if tokens is None else text[: _LETTERS * tokens]


def encode(
    tokenizer: Any, examples: Sequence[Example], *, max_length: int | None = None
) -> tuple[Batch, Tensor]:
    """Padded tensors for a model with a head, and the labels; (b, choices, n) where there are any.

    `special_tokens_mask` stays in the batch: it says which positions an attack must spare.
    """
    widths = {len(example.choices) for example in examples}
    if len(widths) != 1:
        raise InputError(f"every example must have as many choices as the others: {sorted(widths)}")
    options: dict[str, Any] = {
        "padding": True, "truncation": max_length is not None, "max_length": max_length,
        "return_special_tokens_mask": True, "return_tensors": "pt",
        "padding_side": "right",  # so that a unit's number is its token's, whatever its neighbours
    }  # fmt: skip
    width = widths.pop()
    if width:
        firsts = [
            opening(example.text, max_length) for example in examples for _ in example.choices
        ]
        seconds = [choice for example in examples for choice in example.choices]
        if max_length is not None:
            options["truncation"] = "longest_first"
        encoded = tokenizer(firsts, seconds, **options)
        batch = {name: value.unflatten(0, (-1, width)) for name, value in encoded.items()}
    else:
        seconds = [opening(example.second, max_length) for example in examples]
        pairs = [seconds] if any(seconds) else []
        firsts = [opening(example.text, max_length) for example in examples]
        batch = dict(tokenizer(firsts, *pairs, **options))
    return batch, torch.tensor([example.label for example in examples])
