"""Files of arrays from any program, read as tensors by name.

`read_dump` takes a file's name and returns its arrays and metadata. Nothing in a file
is run.

The first bytes of a file show its format, whatever its name. Nested lists and
dictionaries are flattened: `hidden_states.3`, `past_key_values.layers.0.keys`, `0.1`.
"""

from __future__ import annotations

import importlib
import re
import zipfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from keyhole.core.errors import InputError
from keyhole.core.files import SLOT_MAGIC, expect_file, read_tensors, unreadable
from keyhole.core.machine import expect_memory
from keyhole.recover.leaks import BaseLeak

SUFFIXES = (".safetensors", ".npy", ".npz", ".pt", ".pth", ".bin", ".data")
_WHAT = "a leak file (.safetensors, .npy, .npz, .pt, a saved slot of llama.cpp or LMCache's file)"
_DEEPEST = 8  # levels of nested lists


@dataclass(frozen=True, eq=False)
class Dump:
    """Arrays by name that another program wrote; `name` is the file's.

    `served` says that they come from a server of quantised weights, whose arithmetic is
    coarser than ours. `error` is the rounding error of their storage, and `sealed` says
    how they are encrypted.
    """

    name: str
    arrays: Mapping[str, Tensor]
    served: bool = False
    error: float = 0.0
    sealed: str = ""


def read_dump(path: str | Path) -> tuple[dict[str, str], Dump]:
    """Return the metadata of a file, which only .safetensors files have, and its arrays."""
    expect_file(path, _WHAT)
    if named := _OF_LMCACHE.search(Path(path).name):
        return {}, _read_lmcache(path, named["dtype"], named["layer"])
    try:
        with Path(path).open("rb") as file:
            start = file.read(9)
    except OSError as error:
        raise unreadable(_WHAT, path, error) from error
    if start.startswith(b"\x93NUMPY"):
        return {}, Dump(str(path), arrays_of(_load_numpy(path)))
    if start.startswith(b"PK"):
        return {}, Dump(str(path), arrays_of(_unzipped(path)))
    if start.startswith(SLOT_MAGIC):
        slot = read_slot(path)
        return {}, Dump(str(path), arrays_of_slot(slot), served=True, error=slot.error)
    if start[:1] == b"\x80":  # a pickle, as torch.save wrote before version 1.6
        return {}, Dump(str(path), arrays_of(read_pickled(path)))
    if start[8:] != b"{":  # where the header of .safetensors begins
        raise InputError(f"{path} is not {_WHAT}")
    metadata, tensors = read_tensors(path, _WHAT)
    layer = _OF_VLLM.search(Path(path).name)
    if layer and set(tensors) == {"kv_cache"}:  # (2, tokens, heads · numbers)
        tensors = {f"chunk.{layer[1]}": tensors["kv_cache"].flatten()}
    return metadata, Dump(str(path), tensors)


def arrays_of(data: Any) -> dict[str, Tensor]:
    """Return tensors by name from arrays, tensors, and lists and dictionaries of them."""
    named = dict(_flattened(data, "", 0))
    if not named:
        raise InputError(f"no arrays or tensors in {type(data).__name__}")
    return named


def _flattened(
    data: Any,
    name: str,
    depth: int,
) -> Iterator[tuple[str, Tensor]]:
    if isinstance(data, Tensor):
        if data.ndim:
            yield name, data.detach().cpu()
        return
    if isinstance(data, np.ndarray):
        if data.ndim and data.dtype.kind in "fiub":
            # copied, since the array may be read-only, and in the order of this machine
            try:
                tensor = torch.from_numpy(data.astype(data.dtype.newbyteorder("=")))
            except (TypeError, ValueError) as error:
                what = f"{name or 'an array'} of {data.dtype}"
                raise InputError(f"cannot read {what}: save it as float32") from error
            yield name, tensor
        return
    inside: Iterator[tuple[Any, Any]] = iter(())
    if isinstance(data, Plain):
        inside = iter(vars(data).items())
    elif isinstance(data, Mapping):
        inside = iter(cast("Mapping[Any, Any]", data).items())
    elif isinstance(data, list | tuple):
        inside = iter(enumerate(cast("Sequence[Any]", data)))
    elif hasattr(data, "get_seq_length"):  # transformers' caches
        layers = [{"keys": layer.keys, "values": layer.values} for layer in data.layers]
        inside = iter({"layers": layers}.items())
    for key, value in inside:
        if depth == _DEEPEST:
            raise InputError(f"arrays are nested more than {_DEEPEST} lists deep")
        if isinstance(value, Path | BaseLeak | Dump):
            kind = type(value).__name__
            raise InputError(
                f"expected arrays only inside {type(data).__name__}, got {kind}"
            )
        yield from _flattened(value, f"{name}.{key}" if name else str(key), depth + 1)


def _load_numpy(path: str | Path) -> Any:
    """Load .npy or .npz, but no pickled objects: loading them would run any code in the file."""
    try:
        expect_memory(Path(path).stat().st_size, f"the file {path}")
        loaded = np.load(path, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            return loaded
        with loaded:
            return dict(loaded)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise _broken("arrays of numbers", path, error) from error


def _unzipped(path: str | Path) -> Any:
    """Load an archive of numpy.savez or torch.save."""
    try:
        with zipfile.ZipFile(path) as archive:
            inside = archive.infolist()
    except (OSError, zipfile.BadZipFile) as error:
        raise unreadable(_WHAT, path, error) from error
    expect_memory(sum(member.file_size for member in inside), f"the file {path}")
    pickled = any(member.filename.endswith("data.pkl") for member in inside)
    return read_pickled(path) if pickled else _load_numpy(path)


_CLASSES = re.compile(
    r"transformers\.(cache_utils\.\w*(Cache|Layer)|[\w.]*modeling_outputs\.\w+)"
)


class Plain:
    """An object with the attributes that the file gives it, and no methods."""


def plain_output(*_: Any) -> OrderedDict[str, Any]:
    """Replace an output of a model, whose fields are arguments first and then set one by one."""
    return OrderedDict()


def read_pickled(path: str | Path) -> Any:
    """Load what torch.save wrote, without running any code that a pickle names.

    torch's weights-only loading accepts tensors, lists and dictionaries. Caches and
    outputs of transformers are objects of its classes. They are read as plain objects
    with the same attributes, so no code of any library runs either.
    """
    what = "tensors saved with torch.save"
    try:
        asked: list[str] = []
        if zipfile.is_zipfile(
            path
        ):  # files of torch before version 1.6 are not archives
            asked = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except Exception as error:  # a broken pickle may raise anything
        raise _broken(what, path, error) from error
    refused = [name for name in asked if not _CLASSES.fullmatch(name)]
    if refused:
        raise InputError(
            f"{path} holds {refused[0]}, which would run code when loaded: save a "
            "dictionary of tensors instead (of a TransformerLens cache, cache.cache_dict)"
        )
    known: list[Any] = [
        (plain_output if "outputs" in name else Plain, name) for name in asked
    ]
    try:
        with torch.serialization.safe_globals(known):
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise _broken(what, path, error) from error


def _broken(
    what: str,
    path: str | Path,
    error: Exception,
) -> Exception:
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    return unreadable(
        what, path, error if isinstance(error, OSError) else ValueError(first)
    )


# A chunk of a cache that LMCache 0.5.6 wrote, according to its code. The file has no
# magic number and is recognised by its name: `model@world size@worker@hash@type`, with
# the layer's number where each layer has a file (.pt of its disk backend, .data of its
# file system connector), or `model@0xrank@group@hash`, perhaps with the tenant's salt
# (.data of its multiprocess server). Its bytes are
#
#     of the connector only: length, format, type, four sizes, as 32-bit words
#     keys and values (2, layers, tokens, heads · numbers), or of one layer (tokens, 2, …), (2, …)
#
# The server's may be 8-bit floats, or encrypted: version 1, a nonce of twelve bytes,
# AES-GCM's ciphertext and a tag of sixteen bytes. The file does not say which.

# vLLM's connector to a shared folder writes a file for each layer,
# `model.layers.0.self_attn.attn .safetensors`, according to its code; not tried on vLLM
# itself.

_OF_VLLM = re.compile(r"\.layers\.(\d+)\..*\.safetensors$")
_OF_LMCACHE = re.compile(
    r".@(?:\d+@\d+@-?[0-9a-f]+@(?P<dtype>half|bfloat16|float|fp8_e4m3fn|fp8_e5m2)"
    r"(?:@(?P<layer>\d+))?(?:@[^@%]+%[^@]*)*\.(?:pt|data)|0x[0-9a-f]{8}@[0-9a-f]+@[0-9a-f]+(?:@[^@]+)?\.data)$"
)
_WORDS = {
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "float": torch.float32,
    "fp8_e4m3fn": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
_NUMBERS = {
    1: "half",
    2: "half",
    3: "bfloat16",
    4: "float",
    7: "fp8_e4m3fn",
    8: "fp8_e5m2",
}
_FRAME = (13, 16)  # bytes before and after the ciphertext
# χ² of 255 degrees of freedom: six deviations above the mean for uniform bytes
_UNIFORM = 400.0
SEALED = "encrypted, AES-GCM as LMCache frames it"


def _content(path: str | Path, what: str) -> bytes:
    try:
        expect_memory(2 * Path(path).stat().st_size, f"the file {path}")
        return Path(path).read_bytes()
    except OSError as error:
        raise unreadable(what, path, error) from error


def _read_lmcache(
    path: str | Path,
    dtype: str | None,
    layer: str | None,
) -> Dump:
    content = _content(path, "a cache of LMCache")
    if not content:
        raise InputError(f"{path} is empty: LMCache wrote nothing there")
    sealed = ""
    words = np.frombuffer(content[:28].ljust(28, b"\0"), "<i4").tolist()
    if words[0] == len(content) - 28 and words[2] in _NUMBERS:
        dtype = _NUMBERS[words[2]]
        content = content[28:]
    elif dtype is None and content[0] == 1 and _is_uniform(content[_FRAME[0] :]):
        sealed = SEALED
        content = content[_FRAME[0] : -_FRAME[1]]
    array = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    if dtype is not None:
        if len(array) % _WORDS[dtype].itemsize:
            raise InputError(
                f"{path} is cut off: {len(array)} bytes are no numbers of {dtype}"
            )
        array = array.view(_WORDS[dtype])
    name = "sealed" if sealed else layer
    return Dump(str(path), {f"chunk.{name}" if name else "chunk": array}, sealed=sealed)


def _is_uniform(content: bytes) -> bool:
    """Return whether all bytes are equally frequent; those of floating-point numbers are not."""
    counts = np.bincount(np.frombuffer(content, np.uint8), minlength=256)
    mean = len(content) / 256
    return mean >= 1 and float(np.square(counts - mean).sum() / mean) < _UNIFORM


# A slot that llama.cpp's server saved (`POST /slots/0?action=save`): ids, then keys and
# values.
#
# The file is little endian and begins with the magic `ggsq` and a version. The rest is,
# in files of real servers:
#
#     a count, then so many words: the token ids; in newer versions −1, 1, n, the n ids, and a count
#         of items that are not text (images)
#     streams, cells, and for each cell: position, number of sequences, their numbers
#     are values transposed?, layers, (eight bytes more in newer versions)
#     for each layer: type, bytes of a row as 64 bits, the keys: a row of all heads for each cell
#     for each layer the values: the same; or transposed: type, bytes of a number, numbers of a row,
#         and then a row of all cells for each number
#     for a model with sliding windows, after its other layers: the same again, from the streams on,
#         for the layers with a window
#
# Quantised numbers are dequantised; `error` is the error that their rounding left.
#
# Keys of the llama family are stored in the order of GGUF, with the two numbers of a
# rotated plane side by side; in transformers they are half a head apart.

_TYPES = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}
_STEPS = {
    "Q8_0": 254,
    "Q5_1": 31,
    "Q5_0": 31,
    "Q4_1": 15,
    "Q4_0": 15,
}  # from end to end of a block
_FRAMED = 0xFFFFFFFF  # the first word in newer versions, before more than ids
_GAPS = (0, 8)  # bytes between the number of layers and the first layer


@dataclass(frozen=True, eq=False)
class Cache:
    """Keys and values (cells, numbers of all heads) of each layer, and their rounding `error`."""

    positions: tuple[int, ...]
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    error: float

    @property
    def whole(self) -> bool:
        return self.positions == tuple(range(len(self.positions)))


@dataclass(frozen=True, eq=False)
class Slot:
    """Token ids (n,) and their cache; `sliding` is that of the layers with a window."""

    ids: tuple[int, ...]
    cache: Cache
    sliding: Cache | None = None

    @property
    def error(self) -> float:
        return max(
            self.cache.error, 0.0 if self.sliding is None else self.sliding.error
        )


def read_slot(path: str | Path) -> Slot:
    """Read a saved slot, or raise InputError with the reason why the file is none."""
    content = _content(path, "a saved slot of llama.cpp")
    try:
        return _parsed_slot(content)
    except InputError as error:
        raise InputError(f"{error} in {path}") from error


def arrays_of_slot(slot: Slot) -> dict[str, Tensor]:
    """Return the ids, and keys and values under names that readings.py knows."""
    named = {"input_ids": torch.tensor(slot.ids)}
    caches = {"": slot.cache}
    if slot.sliding is not None:
        caches = {".full_attention": slot.cache, ".sliding_attention": slot.sliding}
    for kind, cache in caches.items():
        if cache.whole:  # else the text is longer than the window
            for layer, (keys, values) in enumerate(
                zip(cache.keys, cache.values, strict=True)
            ):
                named |= {
                    f"gguf.{layer}.keys{kind}": keys,
                    f"gguf.{layer}.values{kind}": values,
                }
    return named


def _parsed_slot(content: bytes) -> Slot:
    reader = _Reader(content, 8)
    words = reader.words(reader.word())
    ids = words
    if words and words[0] == _FRAMED:
        count = words[2] if len(words) > 2 else 0
        ids = words[3 : 3 + count]
        if len(ids) < count:
            raise _bad_slot(f"{count} token ids announced, {len(ids)} there")
    refused = _bad_slot("no layers")
    for gap in _GAPS:
        attempt = _Reader(content, reader.at)
        try:
            cache = attempt.cache(gap)
        except InputError as error:
            if isinstance(error, _AnotherType) or gap == _GAPS[0]:
                refused = error
            else:
                refused = refused
            continue
        sliding = None
        end = attempt.at
        if end < len(content):
            with suppress(InputError):
                sliding = attempt.cache(gap)
        if not cache.whole:
            raise _bad_slot(
                "positions that do not count from 0: the context was shifted"
            )
        if len(ids) < len(cache.positions):
            raise _bad_slot(f"{len(ids)} token ids for {len(cache.positions)} cells")
        if attempt.at == len(content) and (sliding is not None or end == len(content)):
            return Slot(tuple(ids[: len(cache.positions)]), cache, sliding)
        refused = _bad_slot(f"{len(content) - end} bytes after the last layer")
    raise refused


def _bad_slot(what: str) -> InputError:
    return InputError(f"cannot read the saved slot of llama.cpp: {what}")


class _AnotherType(InputError):
    """The numbers are of a type that cannot be read."""

    def __init__(self, number: int) -> None:
        super().__init__(
            "cannot read the saved slot of llama.cpp: keys and values must be f32, f16, bf16 or in "
            f"blocks of {', '.join(_STEPS)}, not of type {number}"
        )


class _Reader:
    """Reads words and rows one after the other, never beyond the end of the file."""

    def __init__(self, content: bytes, at: int) -> None:
        self._content = content
        self.at = at

    def take(self, size: int) -> bytes:
        if size > len(self._content) - self.at:
            raise _bad_slot("only its beginning")
        self.at += size
        return self._content[self.at - size : self.at]

    def word(self, size: int = 4) -> int:
        return int.from_bytes(self.take(size), "little")

    def words(self, count: int) -> list[int]:
        return np.frombuffer(self.take(4 * count), "<u4").tolist()

    def cache(self, gap: int) -> Cache:
        """Read the cells, and keys and values of layers, `gap` bytes after the number of layers."""
        if self.word() != 1:
            raise _bad_slot("cells of several streams, where one was saved")
        positions: list[int] = []
        for _ in range(self.word()):
            positions.append(self.word())
            self.words(self.word())
        cells = len(positions)
        transposed = bool(self.word())
        layers = self.word()
        self.take(gap)
        keys = [self.rows(cells) for _ in range(layers)]
        read = self.columns if transposed else self.rows
        values = [read(cells) for _ in range(layers)]
        error = max((error for _, error in keys + values), default=0.0)
        made = (tuple(rows for rows, _ in part) for part in (keys, values))
        return Cache(tuple(positions), next(made), next(made), error)

    def rows(self, cells: int) -> tuple[Tensor, float]:
        """Read rows (cells, numbers), and return the error of their rounding if quantised."""
        kind = self.word()
        size = self.word(8)
        content = self.take(cells * size)
        if kind in _TYPES and content:
            numbers = torch.frombuffer(bytearray(content), dtype=_TYPES[kind])
            return numbers.reshape(cells, -1), 0.0
        quants = importlib.import_module("gguf")
        known = {int(quants.GGMLQuantizationType[name]): name for name in _STEPS}
        if kind not in known or not content:
            raise _AnotherType(kind)
        blocks = np.frombuffer(content, np.uint8).reshape(cells, size)
        rows = torch.from_numpy(
            quants.quants.dequantize(blocks, quants.GGMLQuantizationType(kind))
        )
        each = rows.unflatten(-1, (-1, 32))
        reach = each.amax(-1) - each.amin(-1)
        if known[kind].endswith("_0"):  # zero is in the middle
            reach = 2 * each.abs().amax(-1)
        step = reach / _STEPS[known[kind]]
        return rows, float((step.square() / 12).mean(-1).max().sqrt())

    def columns(self, cells: int) -> tuple[Tensor, float]:
        """Read the same from one row for each number, of all cells."""
        kind = self.word()
        size = self.word()
        width = self.word()
        content = self.take(cells * width * size)
        if kind not in _TYPES or not content:
            raise _AnotherType(kind)
        numbers = torch.frombuffer(bytearray(content), dtype=_TYPES[kind])
        if numbers.numel() != cells * width:
            raise _bad_slot("numbers of another size than their type's")
        return numbers.reshape(width, cells).mT.contiguous(), 0.0
