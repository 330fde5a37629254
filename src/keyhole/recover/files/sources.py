"""Where leaks come from: files and folders of files, leaks, arrays in memory.

A file of Keyhole's own says what it is. What other programs wrote is read as arrays (foreign/), and
what those are, only the model can tell.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from safetensors import SafetensorError, safe_open

from keyhole.core.errors import InputError
from keyhole.core.files import is_file, is_folder
from keyhole.models.capture import Exposure
from keyhole.models.loading import Loaded
from keyhole.recover.attack import Proposal, Target
from keyhole.recover.files.arrays import SUFFIXES, Dump, arrays_of, read_dump
from keyhole.recover.files.llama_slot import MAGIC
from keyhole.recover.leaks import BaseLeak, Leak, own_leak
from keyhole.recover.run import foreign_contents


@dataclass(frozen=True, eq=False)
class Opened:
    """A leak by the name of its file, with the token ids that stand beside it, if any do."""

    name: str
    leak: Leak
    ids: Sequence[int] | None = None


Source = Any  # a file, a folder of files, a leak, or arrays: of NumPy, torch, lists of them


def head_for(kind: str) -> str:
    """The head that a kind of leak comes out of: that of the next token, or none."""
    return "causal" if kind == "logits" else "base"


def task_for(sources: Sequence[Leak | Opened | Dump], expose: str | Exposure | None = None) -> str:
    """The head that a model needs to give such leaks: that of the next token, or none."""
    asked = _exposure(expose)
    first = sources[0].leak if isinstance(sources[0], Opened) else sources[0]
    kind = asked.kind if asked is not None else getattr(first, "kind", "")
    if isinstance(first, Dump) and asked is None and set(first.arrays) == {"logits"}:
        kind = "logits"
    return head_for(kind)


def read_sources(leaks: Source | Sequence[Source]) -> list[Opened | Dump]:
    """Files read, and arrays taken, as they are: what they hold, only a model can tell."""
    several = isinstance(leaks, list | tuple) and all(_is_leak(source) for source in leaks)
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
        raise InputError("expected one leak or more, got none")
    return read


def open_leaks(
    loaded: Loaded, leaks: Source | Sequence[Source], expose: str | Exposure | None = None
) -> list[Opened]:
    """Each leak with its name: that of its file, with a number where a file holds several texts."""
    opened: list[Opened] = []
    for source in read_sources(leaks):
        if isinstance(source, Opened):
            opened.append(source)
            continue
        contents = foreign_contents(loaded.model, loaded.tokenizer, source, _exposure(expose))
        for number, leak in enumerate(contents.leaks):
            name = source.name or f"leak {len(opened) + 1}"
            name = name if len(contents.leaks) == 1 else f"{name} [{number}]"
            ids = None if contents.ids is None else contents.ids[number]
            opened.append(Opened(name, leak, ids))
    return opened


def _read(path: Path) -> Opened | Dump:
    """A leak of Keyhole's own, which says what it is, or arrays that another program wrote."""
    metadata, dump = read_dump(path)
    if "keyhole" in metadata:
        return Opened(str(path), own_leak(metadata, dict(dump.arrays), path))
    return dump


def _is_leak(source: Any) -> bool:
    return isinstance(source, str | Path | BaseLeak | Opened | Dump)


def _exposure(expose: str | Exposure | None) -> Exposure | None:
    return Exposure.parse(expose) if isinstance(expose, str) else expose


def leak_files(sources: Sequence[Path]) -> list[Path]:
    """The files of leaks, those in folders in the order of their names."""
    return [file for source in sources for file in _files(source)]


def _files(path: Path) -> list[Path]:
    if not is_folder(path):
        return [path]
    inside = sorted(file for file in path.iterdir() if file.suffix in SUFFIXES)
    if not inside:
        raise InputError(f"expected leaks ({', '.join(SUFFIXES)}) in {path}, got none")
    return inside


def names_leak(name: str) -> bool:
    """Is this the file of a leak: a saved slot of llama.cpp, or one of Keyhole's own?"""
    if not is_file(name):
        return False
    with suppress(OSError, SafetensorError):
        with Path(name).open("rb") as file:
            start = file.read(len(MAGIC))
        if start == MAGIC:
            return True
        if name.endswith(".safetensors"):
            with safe_open(name, framework="pt") as tensors:
                return "leak" in (tensors.metadata() or {})
    return False


def names_dump(name: str) -> bool:
    """Is this a file of another program's: of torch.save, or tensors that Keyhole never wrote?"""
    if not is_file(name):
        return False
    if name.endswith((".pt", ".pth")):
        return True
    with suppress(OSError, SafetensorError):
        if name.endswith(".safetensors"):
            with safe_open(name, framework="pt") as tensors:
                return "keyhole" not in (tensors.metadata() or {})
    return False


# Token ids that stand in the file beside the numbers: nothing to attack, and all to check.

_NOTE = "the token ids stand in the file"


@dataclass(frozen=True)
class WrittenIds:
    """Proposes the ids that were written down; the judge compares them with what leaked."""

    ids: Sequence[Sequence[int]]

    def __call__(self, target: Target, leaks: Sequence[Leak]) -> Iterator[tuple[int, Proposal]]:
        for number in range(len(leaks)):
            known = [token for token in self.ids[number] if 0 <= token < target.vocabulary]
            yield number, Proposal(known, note=_NOTE)
