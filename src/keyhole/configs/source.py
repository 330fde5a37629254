"""A file that may be anybody's, read within bounds: only plain files, only so much of them.

A file is looked through for words of its kind first. One that has none of them is done with,
however large or broken it is; one that has them must be small enough to be taken apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

LARGEST = 2**20  # bytes of a text that is taken apart: configurations are written by hand
FURTHEST = 16 * 2**20  # bytes that are looked through for words
_CHUNK = 2**20


class Unreadable(Exception):
    """Why a file of a known kind cannot be looked at."""


@dataclass(frozen=True)
class Source:
    """A text with its lines counted."""

    path: Path
    text: str

    def line_at(self, offset: int) -> int:
        return self.text.count("\n", 0, offset) + 1


def read(path: Path, words: Sequence[str]) -> Source | None:
    """The text, if any of `words` is in it; None if there is nothing to take apart."""
    sought = [word.encode() for word in words]
    longest = max(len(word) for word in sought)
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST + 1)
            if len(data) <= LARGEST:
                return Source(path, _decoded(data)) if _has(data, sought) else None
            read_so_far, tail = len(data), data
            while not _has(tail, sought):
                more = file.read(_CHUNK)
                if not more:
                    return None
                read_so_far += len(more)
                if read_so_far > FURTHEST:
                    break
                tail = tail[-longest:] + more
    except OSError as error:
        raise Unreadable(error.strerror or str(error)) from error
    raise Unreadable(f"expected at most {LARGEST:,} bytes of configuration, got more")


def _has(data: bytes, words: Sequence[bytes]) -> bool:
    small = data.lower()
    return any(word in small for word in words)


def _decoded(data: bytes) -> str:
    if b"\0" in data:
        raise Unreadable("expected text, got a NUL byte")
    return data.decode("utf-8-sig", "replace").replace("\r\n", "\n")
