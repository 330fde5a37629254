"""A file of arrays, whoever wrote it, as tensors by name.

Which format it is, its first bytes say, whatever the file is called. Lists and dictionaries inside
one another are flattened: `hidden_states.3`, `past_key_values.layers.0.keys`, `0.1`.
"""

from __future__ import annotations

import re
import zipfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from keyhole.core.errors import InputError
from keyhole.core.files import expect_file, read_tensors, trouble
from keyhole.core.machine import expect_room
from keyhole.recover.files.llama_slot import MAGIC, arrays_of_slot, read_slot

SUFFIXES = (".safetensors", ".npy", ".npz", ".pt", ".pth", ".bin")
_WHAT = "a leak file (.safetensors, .npy, .npz, .pt or a saved slot of llama.cpp)"
_DEEPEST = 8  # lists in lists


@dataclass(frozen=True, eq=False)
class Dump:
    """Arrays by name that another program wrote; `name` is the file's.

    `served`: they come from a server of quantised weights, whose arithmetic is coarser than ours.
    """

    name: str
    arrays: Mapping[str, Tensor]
    served: bool = False


def read_dump(path: str | Path) -> tuple[dict[str, str], Dump]:
    """The arrays of a file, and the metadata that only .safetensors files have."""
    expect_file(path, _WHAT)
    try:
        with Path(path).open("rb") as file:
            start = file.read(9)
    except OSError as error:
        raise trouble(_WHAT, path, error) from error
    if start.startswith(b"\x93NUMPY"):
        return {}, Dump(str(path), arrays_of(_load_numpy(path)))
    if start.startswith(b"PK"):
        return {}, Dump(str(path), arrays_of(_unzipped(path)))
    if start.startswith(MAGIC):
        return {}, Dump(str(path), arrays_of_slot(read_slot(path)), served=True)
    if start[:1] == b"\x80":  # a pickle, as torch.save wrote before version 1.6
        return {}, Dump(str(path), arrays_of(read_pickled(path)))
    if start[8:] != b"{":  # where the header of .safetensors begins
        raise InputError(f"{path} is not {_WHAT}")
    metadata, tensors = read_tensors(path, _WHAT)
    return metadata, Dump(str(path), tensors)


def arrays_of(data: Any) -> dict[str, Tensor]:
    """Tensors by name from arrays, tensors, and lists and dictionaries of them."""
    named = dict(_flattened(data, "", 0))
    if not named:
        raise InputError(f"no arrays or tensors in {type(data).__name__}")
    return named


def _flattened(data: Any, name: str, depth: int) -> Iterator[tuple[str, Tensor]]:
    if isinstance(data, Tensor):
        if data.ndim:
            yield name, data.detach().cpu()
        return
    if isinstance(data, np.ndarray):
        if data.ndim and data.dtype.kind in "fiub":
            yield name, torch.from_numpy(np.array(data))  # copied: the array may be read-only
        return
    inside: Iterator[tuple[Any, Any]] = iter(())
    if isinstance(data, Plain):
        inside = iter(vars(data).items())
    elif isinstance(data, Mapping):
        inside = iter(cast("Mapping[Any, Any]", data).items())
    elif isinstance(data, list | tuple):
        inside = iter(enumerate(cast("Sequence[Any]", data)))
    elif hasattr(data, "get_seq_length"):  # transformers' caches
        inside = iter({"layers": [_layer(layer) for layer in data.layers]}.items())
    for key, value in inside:
        if depth == _DEEPEST:
            raise InputError(f"arrays are nested more than {_DEEPEST} lists deep")
        yield from _flattened(value, f"{name}.{key}" if name else str(key), depth + 1)


def _layer(layer: Any) -> dict[str, Any]:
    return {"keys": layer.keys, "values": layer.values}


def _load_numpy(path: str | Path) -> Any:
    """Pickled objects are refused: loading them would run whatever the file says."""
    try:
        expect_room(Path(path).stat().st_size, f"the file {path}")
        return np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise trouble("arrays of numbers", path, _first_line(error)) from error


def _unzipped(path: str | Path) -> Any:
    """What numpy.savez or torch.save wrote: both are archives."""
    try:
        with zipfile.ZipFile(path) as archive:
            inside = archive.infolist()
    except (OSError, zipfile.BadZipFile) as error:
        raise trouble(_WHAT, path, error) from error
    expect_room(sum(member.file_size for member in inside), f"the file {path}")
    if any(member.filename.endswith("data.pkl") for member in inside):
        return read_pickled(path)
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise trouble("arrays of numbers", path, _first_line(error)) from error


def _first_line(error: Exception) -> Exception:
    return error if isinstance(error, OSError) else ValueError(str(error).splitlines()[0])


_CLASSES = re.compile(r"transformers\.(cache_utils\.\w*(Cache|Layer)|[\w.]*modeling_outputs\.\w+)")


class Plain:
    """An object with the attributes that the file gives it, and no methods."""


def plain_output(*_: Any) -> OrderedDict[str, Any]:
    """In place of an output of a model: its fields are arguments, and then set one by one."""
    return OrderedDict()


def read_pickled(path: str | Path) -> Any:
    """What torch.save wrote, without running any of the code that a pickle may ask for.

    torch's weights-only loading knows tensors, lists and dictionaries. Caches and outputs of
    transformers are objects of its classes: they are read as plain objects that have their
    attributes and do nothing, so no code of any library runs either.
    """
    what = "tensors saved with torch.save"
    try:
        asked: list[str] = []
        if zipfile.is_zipfile(path):  # what torch wrote before version 1.6 is no archive
            asked = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except Exception as error:  # whatever a broken pickle provokes
        raise _broken(what, path, error) from error
    refused = [name for name in asked if not _CLASSES.fullmatch(name)]
    if refused:
        raise InputError(
            f"{path} holds {refused[0]}, which would run code when loaded: save a "
            "dictionary of tensors instead (of a TransformerLens cache, cache.cache_dict)"
        )
    known: list[Any] = [(plain_output if "outputs" in name else Plain, name) for name in asked]
    try:
        with torch.serialization.safe_globals(known):
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise _broken(what, path, error) from error


def _broken(what: str, path: str | Path, error: Exception) -> Exception:
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    return trouble(what, path, error if isinstance(error, OSError) else ValueError(first))
