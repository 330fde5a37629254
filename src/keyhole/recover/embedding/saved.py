"""A learnt reader in a file: learning takes minutes, reading it back does not.

The file is bound to all that the reader follows from (the encoder, the corpus, the settings, the
version), as journals are (resume.py): one of another run is refused with what differs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TypeVar

from torch import nn

from keyhole.errors import InputError
from keyhole.files import read_tensors, write_tensors
from keyhole.resume import Run, expect_same_run
from keyhole.strict_json import parse

_WHAT = "a learnt reader"
AnyReader = TypeVar("AnyReader", bound=nn.Module)


def save_reader(path: Path, reader: nn.Module, run: Run) -> None:
    """The whole file or none, which only its owner may read."""
    write_tensors(path, reader.state_dict(), {"reader": json.dumps(dict(run))})


def expect_reader(path: Path, run: Run, fix: str) -> None:
    """Refuse a file that is no reader, or one of another run; `fix` says what to do about it."""
    about, _ = read_tensors(path, _WHAT)
    try:
        theirs: object = parse(about.get("reader", ""))
    except ValueError as error:
        raise InputError(f"expected {_WHAT}, got {path}: {error}") from error
    expect_same_run(path, run, theirs, fix)


def load_reader(path: Path, blank: AnyReader, run: Run, fix: str) -> AnyReader:
    """`blank`, a reader of the same size that has learnt nothing, with what the file holds."""
    expect_reader(path, run, fix)
    _, tensors = read_tensors(path, _WHAT)
    try:
        blank.load_state_dict(tensors)
    except RuntimeError as error:
        first = " ".join(str(error).split())[:120]
        raise InputError(f"expected {_WHAT}, got {path}: {first}: {fix}") from error
    return blank.eval()
