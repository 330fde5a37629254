"""Where leaks come from: files and folders of files, leaks, arrays in memory.

A file of Keyhole's own says what it is. What other programs wrote is read as arrays (arrays.py),
and what those hold, only the model can tell (contents.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

from keyhole.core.errors import InputError
from keyhole.core.files import is_folder
from keyhole.models.capture import Exposure
from keyhole.models.demo import open_model
from keyhole.models.loading import Loaded
from keyhole.recover.attack import Proposal, Target
from keyhole.recover.files.arrays import SUFFIXES, Dump, arrays_of, read_dump
from keyhole.recover.files.contents import contents_of
from keyhole.recover.leaks import BaseLeak, Leak, own_leak

Source = Any  # a file, a folder of files, a leak, or arrays: of NumPy, torch, lists of them


@dataclass(frozen=True, eq=False)
class Opened:
    """A leak by the name of its file, with the token ids that the file holds too, if any."""

    name: str
    leak: Leak
    ids: Sequence[int] | None = None


@dataclass(frozen=True)
class WrittenIds:
    """Nothing to attack: proposes the ids that stand in the file, for the judge to check."""

    ids: Sequence[Sequence[int]]

    def __call__(self, target: Target, leaks: Sequence[Leak]) -> Iterator[tuple[int, Proposal]]:
        for number in range(len(leaks)):
            known = [token for token in self.ids[number] if 0 <= token < target.vocabulary]
            yield number, Proposal(known, note="the token ids stand in the file")


def read_sources(leaks: Source | Sequence[Source]) -> list[Opened | Dump]:
    """Files read, and arrays taken, as they are."""
    kinds = str | Path | BaseLeak | Opened | Dump
    several = isinstance(leaks, list | tuple) and all(isinstance(leak, kinds) for leak in leaks)
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


def task_for(sources: Sequence[Opened | Dump], expose: Exposure | None) -> str:
    """The head that a model needs to give such leaks: that of the next token, or none."""
    first = sources[0]
    if expose is not None:
        logits = expose.kind == "logits"
    else:
        logits = set(first.arrays) == {"logits"} if isinstance(first, Dump) else False
        logits = logits or (isinstance(first, Opened) and first.leak.kind == "logits")
    return "causal" if logits else "base"


def open_sources(
    model: str | Loaded,
    leaks: Source | Sequence[Source],
    expose: Exposure | None,
    verifies: Callable[[Target, Leak], bool],
    *,
    device: str = "cpu",
    allow_pickle: bool = False,
) -> tuple[Loaded, list[Opened]]:
    """The model, with the head that such leaks come from, and the leaks that the sources hold.

    What another program wrote may hold several; a reading of it counts if it `verifies`.
    """
    sources = read_sources(leaks)
    if isinstance(model, str):
        task = task_for(sources, expose)
        model = open_model(model, task=task, device=device, allow_pickle=allow_pickle)
    target = Target.of(model.model, model.tokenizer)
    return model, opened_by(target, sources, expose, verifies)


def opened_by(
    target: Target,
    sources: Sequence[Opened | Dump],
    expose: Exposure | None,
    verifies: Callable[[Target, Leak], bool],
) -> list[Opened]:
    """The leaks of all sources, by name."""
    opened: list[Opened] = []
    for source in sources:
        if isinstance(source, Opened):
            opened.append(source)
            continue
        contents = contents_of(source, target, expose, partial(verifies, target))
        name = source.name or f"leak {len(opened) + 1}"
        for number, leak in enumerate(contents.leaks):
            ids = None if contents.ids is None else contents.ids[number]
            each = name if len(contents.leaks) == 1 else f"{name} [{number}]"
            opened.append(Opened(each, leak, ids))
    return opened


def leak_files(sources: Sequence[Path]) -> list[Path]:
    """The files of leaks, those in folders in the order of their names."""
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
