"""The sources of leaks: files and folders of files, leaks, arrays in memory.

A file that Keyhole wrote says what it is. Files of other programs are read as arrays (arrays.py),
and only with the model can it be found what they are (contents.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from keyhole.core import Status, Unsuccessful
from keyhole.core.errors import InputError
from keyhole.core.files import is_folder
from keyhole.recover.attack import Proposal, Target
from keyhole.recover.files.arrays import SUFFIXES, Dump, arrays_of, read_dump
from keyhole.recover.leaks import BaseLeak, Leak, own_leak

Source = Any  # a file, a folder of files, a leak, or arrays: of NumPy, torch, lists of them


@dataclass(frozen=True, eq=False)
class Opened:
    """A leak by the name of its file, with the token ids that the file holds, if any.

    `sealed` says how it is encrypted: then the leak has only its length, and nothing to attack.
    """

    name: str
    leak: Leak
    ids: Sequence[int] | None = None
    sealed: str = ""


@dataclass(frozen=True)
class WrittenIds:
    """Proposes the ids that stand in the file for the judge to check; nothing is attacked."""

    ids: Sequence[Sequence[int]]

    def __call__(self, target: Target, leaks: Sequence[Leak]) -> Iterator[tuple[int, Proposal]]:
        for number in range(len(leaks)):
            known = [token for token in self.ids[number] if 0 <= token < target.vocabulary]
            yield number, Proposal(known, note="the token ids stand in the file")


@dataclass(frozen=True)
class Sealed:
    """Reports how the file is encrypted and how long its text is; nothing can be attacked."""

    how: str

    def __call__(self, target: Target, leaks: Sequence[Leak]) -> Iterator[tuple[int, Proposal]]:  # noqa: ARG002
        reason = (
            f"{self.how}: not read without the key; its size is that of {leaks[0].length} tokens"
        )
        raise Unsuccessful(Status.NOT_APPLICABLE, reason)


def read_sources(leaks: Source | Sequence[Source]) -> list[Opened | Dump]:
    """Read files, and take leaks and arrays as they are.

    A list of arrays alone is one source. Beside files or leaks, each array is one by itself.
    """
    kinds = str | Path | BaseLeak | Opened | Dump
    several = isinstance(leaks, list | tuple) and (
        not leaks or any(isinstance(leak, kinds) for leak in leaks)
    )
    read: list[Opened | Dump] = []
    for source in leaks if several else [leaks]:
        if isinstance(source, str | Path):
            read += [_read(path) for path in leak_files([Path(source)])]
        elif isinstance(source, Opened | Dump):
            read.append(source)
        elif isinstance(source, BaseLeak):
            read.append(Opened(f"leak {len(read) + 1}", cast("Leak", source)))
        else:
            read.append(Dump("", arrays_of(source)))
    if not read:
        raise InputError("no leak was given")
    return read


def leak_files(sources: Sequence[Path]) -> list[Path]:
    """Return the files of leaks; those in folders are sorted by name."""
    files: list[Path] = []
    for source in sources:
        if not is_folder(source):
            files.append(source)
            continue
        inside = sorted(file for file in source.iterdir() if file.suffix in SUFFIXES)
        if not inside:
            raise InputError(f"{source} holds no leaks ({', '.join(SUFFIXES)})")
        files += inside
    return files


def _read(path: Path) -> Opened | Dump:
    metadata, dump = read_dump(path)
    if "keyhole" in metadata:
        return Opened(str(path), own_leak(metadata, dict(dump.arrays), path))
    return dump
