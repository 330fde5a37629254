"""Reads examples and texts from files: tables with named columns, HellaSwag, DREAM, ReClor.

| kind | file | one example |
|---|---|---|
| table | .csv, .tsv (with a header), .jsonl | text and label columns; SST-2: `sentence`, `label` |
| texts | .txt, or .jsonl of strings | a line, without a label |
| HellaSwag | .jsonl | `ctx`, `endings`, `label` |
| DREAM | .json | a question in `[[turns], [{question, choice, answer}], id]` |
| ReClor | .json | `{context, question, answers, label}` |

JSON is recognised by its fields. Other names are datasets on the hub, read with the
package `datasets`. The error about a wrong file says in which line or entry it is
wrong.
"""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from keyhole.core.errors import InputError, expect_count, first_line, optional
from keyhole.core.files import exists, parse, read_text
from keyhole.core.result import typed

TEXT_COLUMNS = ("sentence", "text")  # tried in this order if no column is named
NO_LABEL = -1  # the label of an example without one
_MAX_LETTERS = 1000  # of one token: the longest word of a vocabulary has far fewer
_MAX_CLASSES = 1_000_000  # more than any classifier has
_SUFFIXES = (".tsv", ".csv", ".json", ".jsonl", ".txt")
Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Example:
    """A text (or two) with its class, or a context with choices and the number of the right one."""

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
    """Read the examples of a file, or of the validation split of a dataset on the hub.

    `text` names one or two columns of a table, and `label` the column of classes. These
    are numbers or, if `names` lists the names of all classes in order, names. Without
    `labelled`, examples may lack a label (NO_LABEL).
    """
    expect_count("the number of texts", limit)
    text_columns = tuple(filter(None, (text,) if isinstance(text, str) else text))
    columns = _Columns(text_columns, label, tuple(names), labelled)
    path = Path(source)
    if exists(path, links=True) or path.suffix in _SUFFIXES:
        found = _from_file(path, columns)
    else:
        found = _from_hub(str(source), columns)
    examples = list(islice((each for each in found if each.text.strip()), limit))
    if not examples:
        raise InputError(f"there are no texts in {source}")
    times = Counter[str]()
    for place, example in enumerate(examples):  # results are kept by an example's id
        times[example.id] += 1
        if times[example.id] > 1:
            examples[place] = replace(example, id=f"{example.id} ({times[example.id]})")
    return examples


def read_texts(
    path: str | Path,
    column: str | None = None,
    limit: int | None = None,
) -> list[str]:
    """Read the first `limit` texts of a file, and ignore labels."""
    examples = read_examples(
        path, text=column or (), label="", limit=limit, labelled=False
    )
    return [example.text.strip() for example in examples]


@dataclass(frozen=True)
class _Columns:
    """The columns of a table to read, and the names of its classes."""

    text: tuple[str, ...] = ()
    label: str = "label"
    names: tuple[str, ...] = ()
    labelled: bool = True

    def example(self, row: dict[str, Any], where: str) -> Example:
        present = (name for name in TEXT_COLUMNS if isinstance(row.get(name), str))
        text = self.text or tuple(present)[:1]
        if not text or len(text) > 2:
            wanted = " or ".join(TEXT_COLUMNS)
            raise InputError(
                f"{where} has no text in a column {wanted}, only {', '.join(row)}"
            )
        texts = [_field(row, name, str, where) for name in text]
        label = NO_LABEL
        if self.labelled or (self.label and self.label in row):
            label = self._class(_field(row, self.label, object, where), where)
        return Example(where, label, *texts)

    def plain(self, text: str, where: str) -> Example:
        """Return the example of a line that is nothing but a text."""
        if self.labelled:
            raise InputError(
                f"expected an object with a label in {where}, got {text[:40]!r}"
            )
        return Example(where, NO_LABEL, text)

    def _class(self, value: Any, where: str) -> int:
        if str(value) in self.names:
            return self.names.index(str(value))
        if self.names and not str(value).lstrip("-").isdecimal():
            known = ", ".join(self.names)
            raise InputError(
                f"{where} has an unknown class {value!r:.40}: known are {known[:200]}"
            )
        return _number(value, where)


def _number(
    value: Any,
    where: str,
    classes: int = _MAX_CLASSES,
) -> int:
    shown = str(value)[:40]
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        raise InputError(
            f"expected a class as a number in {where}, got {shown!r}"
        ) from None
    if not 0 <= number < classes or isinstance(value, float):
        raise InputError(
            f"the class in {where} must be from 0 to {classes - 1:,}, not {shown}"
        )
    return number


def _field(
    row: dict[str, Any],
    name: str,
    kind: type,
    where: str,
) -> Any:
    if name not in row or not isinstance(row[name], kind):
        shown = ", ".join(map(str, row))[:80] or "nothing"
        raise InputError(f"there is no field {name!r} in {where}, only {shown}")
    return row[name]


def _texts(
    row: dict[str, Any],
    name: str,
    where: str,
) -> list[str]:
    values = cast("list[Any]", _field(row, name, list, where))
    if len(values) < 2 or not all(isinstance(value, str) for value in values):
        raise InputError(
            f"{name!r} in {where} must hold two or more texts, not {values!r:.80}"
        )
    return values


def _from_file(path: Path, columns: _Columns) -> Iterator[Example]:
    text = read_text(path, "a file with texts")
    if path.suffix in (".csv", ".tsv"):
        return _table(text, path, columns)
    if path.suffix not in (".json", ".jsonl"):
        lines = enumerate(text.split("\n"), 1)
        return (
            columns.plain(line, f"{path.name}:{n}") for n, line in lines if line.strip()
        )
    if text.lstrip().startswith("["):
        return _entries(text, path)
    return _lines(text, path, columns)


def _table(
    text: str,
    path: Path,
    columns: _Columns,
) -> Iterator[Example]:
    """Read a table; a quotation mark has a meaning in CSV, and is part of the text in TSV."""
    if path.suffix == ".tsv":
        # `splitlines` would also split at other characters, as texts may hold.
        reader = csv.reader(text.split("\n"), delimiter="\t", quoting=csv.QUOTE_NONE)
    else:
        reader = csv.reader(io.StringIO(text, newline=""))
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
                raise InputError(
                    f"{where} has {len(row)} columns, and the header {len(header)}"
                )
            yield columns.example(dict(zip(header, row, strict=True)), where)
    except csv.Error as error:
        where = f"{path.name}:{reader.line_num + 1}"
        raise InputError(f"{where} is not a row of a table: {error}") from error


def _json(text: str, where: str) -> Any:
    try:
        return parse(text)
    except ValueError as error:
        raise InputError(
            f"expected JSON in {where}, got {text[:40]!r}: {error}"
        ) from error


def _lines(
    text: str,
    path: Path,
    columns: _Columns,
) -> Iterator[Example]:
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
            yield from _dream(entry, where)
        else:
            yield _reclor(typed(dict[str, Any], entry, where), where)


def _hellaswag(row: dict[str, Any], where: str) -> Example:
    endings = _texts(row, "endings", where)
    number = _number(_field(row, "label", object, where), where, len(endings))
    context = _field(row, "ctx", str, where)
    return Example(where, number, context, choices=tuple(endings))


def _reclor(row: dict[str, Any], where: str) -> Example:
    answers = _texts(row, "answers", where)
    question = _field(row, "question", str, where)
    number = _number(_field(row, "label", object, where), where, len(answers))
    context = _field(row, "context", str, where)
    choices = tuple(f"{question} {answer}" for answer in answers)
    return Example(str(row.get("id_string", where)), number, context, choices=choices)


def _dream(entry: Any, where: str) -> Iterator[Example]:
    """Yield the questions of an entry [[turns], [questions], id]."""
    kind = tuple[list[str], list[dict[str, Any]], Any]
    turns, questions, name = typed(kind, entry, where)
    for number, row in enumerate(questions):
        choices = _texts(row, "choice", where)
        answer = _field(row, "answer", str, where)
        question = _field(row, "question", str, where)
        if answer not in choices:
            raise InputError(f"the answer {answer!r} is none of the choices in {where}")
        yield Example(
            f"{name}#{number}",
            choices.index(answer),
            "\n".join(turns),
            choices=tuple(f"{question} {choice}" for choice in choices),
        )


def _from_hub(name: str, columns: _Columns) -> Iterator[Example]:
    reason = f"there is no file {name}, and names on the hub need the package datasets"
    library = optional("datasets", reason, "hub")
    parts = name.split(":")  # "glue:sst2" is the configuration sst2 of glue
    try:
        rows = library.load_dataset(*parts, split="validation")
    except Exception as error:  # no network, no such name, a script that is not run…
        raise InputError(
            f"there is no file {name}, and no such dataset on the hub: {first_line(error)}"
        ) from error
    return from_rows(rows, name, columns)


def from_rows(
    rows: Iterable[Any],
    name: str,
    columns: _Columns = _Columns(),  # noqa: B008 - it is frozen
) -> Iterator[Example]:
    """Yield the examples of rows that are dictionaries, as `datasets` returns them."""
    return (
        _example(row, f"{name}[{number}]", columns)
        for number, row in enumerate(rows, 1)
    )


def _example(
    row: dict[str, Any],
    where: str,
    columns: _Columns,
) -> Example:
    """Return the example of a row, whose kind follows from its fields."""
    if "endings" in row:
        return _hellaswag(row, where)
    if "answers" in row and "context" in row:
        return _reclor(row, where)
    return columns.example(row, where)


def opening(text: str, tokens: int | None) -> str:
    """Return the start of a text, which holds its first `tokens`: tokenizing all may take long."""
    return text if tokens is None else text[: _MAX_LETTERS * tokens]


def encode(
    tokenizer: Any,
    examples: Sequence[Example],
    *,
    max_length: int | None = None,
) -> tuple[Batch, Tensor]:
    """Return padded tensors (b, n) and the labels; the tensors are (b, choices, n) with choices.

    `special_tokens_mask` stays in the batch, because attacks must not cut those
    positions.
    """
    widths = {len(example.choices) for example in examples}
    if len(widths) != 1:
        raise InputError(
            f"every example must have as many choices as the others: {sorted(widths)}"
        )
    options: dict[str, Any] = {
        "padding": True,
        "truncation": max_length is not None,
        "max_length": max_length,
        "return_special_tokens_mask": True,
        "return_tensors": "pt",
        # so that positions do not depend on the rest of the batch
        "padding_side": "right",
    }
    width = widths.pop()
    texts = [opening(example.text, max_length) for example in examples]
    if width:
        contexts = [text for text in texts for _ in range(width)]
        choices = [choice for example in examples for choice in example.choices]
        if max_length is not None:
            options["truncation"] = "longest_first"
        encoded = tokenizer(contexts, choices, **options)
        batch = {
            name: value.unflatten(0, (-1, width)) for name, value in encoded.items()
        }
    else:
        seconds = [opening(example.second, max_length) for example in examples]
        pairs = [seconds] if any(seconds) else []
        batch = dict(tokenizer(texts, *pairs, **options))
    for example, mask in zip(examples, batch.get("attention_mask", ()), strict=False):
        if not mask.any():
            raise InputError(
                f"a text must have at least one token: {example.text[:40]!r}"
            )
    return batch, torch.tensor([example.label for example in examples])
