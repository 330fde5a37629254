"""The leaks in files and folders of files: Keyhole's own, and one for each text in those of others.

`read_sources` takes files, folders, leaks or arrays; `opened_by` takes the model as
well, and returns a leak for each text (`Opened`), which attacks can read.

A file that Keyhole wrote says what it is. Files of other programs are read as arrays
(arrays.py), and only with the model can it be found what they are (readings.py). Of
several exposures in one file, the lowest layer is taken, which is nearest to the text.
Where the layer or the order of axes is not known, every likely reading is tried on the
shortest text, and only one that gives a verified text is accepted: rows of another
layer are refused, not misread.

Padding before a text may or may not count in its positions: transformers' generate()
leaves it out, and a plain call of the model does not. Both are tried, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from keyhole.core import not_applicable
from keyhole.core.errors import InputError
from keyhole.core.files import is_folder
from keyhole.core.tensors import indices_of
from keyhole.models import demo
from keyhole.models.anatomy import Anatomy
from keyhole.models.branches import Branches
from keyhole.models.capture import ARITHMETICS, EIGHT_BITS, Exposure, capture
from keyhole.recover.attack import Proposal, Target
from keyhole.recover.files.arrays import SUFFIXES, Dump, arrays_of, read_dump
from keyhole.recover.files.readings import (
    IDS,
    MASKS,
    Reading,
    Section,
    readings_of,
    turned,
)
from keyhole.recover.layers.precision import rounding_error
from keyhole.recover.leaks import TYPES, BaseLeak, Leak, own_leak, rows_of

_TRIED = 4  # likely layers that are tried
# tokens of a causal model's text that show whether a layer is the right one
_BEGINNING = 4
_UNIT_TOLERANCE = 1e-3  # by which rounding may change the length of a normalised vector
_PREFERRED = (
    "hidden",
    "kv",
    "attention",
    "maps",
    "pooled",
    "logits",
)  # at the same layer
_PER_TEXT = ("pooled", "logits")  # these have no positions
_MIN_SPREAD = 1e-6  # of the largest: a number that hardly varies must not decide alone
_TEXTS = (
    *demo.TEXTS,
    *(example.text for example in demo.EXAMPLES[::2]),
)  # ordinary ones
# times the largest error of a position of ordinary texts; chosen, not fitted
_MARGIN = 1.5
# a file, a folder of files, a leak, or arrays: of NumPy, torch, lists of them
Source = Any


@dataclass(frozen=True, eq=False)
class Opened:
    """A leak by the name of its file, with the token ids that the file holds, if any.

    `sealed` says how it is encrypted: then the leak has only its length, and nothing to
    attack.
    """

    name: str
    leak: Leak
    ids: Sequence[int] | None = None
    sealed: str = ""


@dataclass(frozen=True)
class WrittenIds:
    """Proposes the ids that stand in the file for the judge to check; nothing is attacked."""

    ids: Sequence[Sequence[int]]

    def __call__(
        self, target: Target, leaks: Sequence[Leak]
    ) -> Iterator[tuple[int, Proposal]]:
        for number in range(len(leaks)):
            known = [
                token for token in self.ids[number] if 0 <= token < target.vocabulary
            ]
            yield number, Proposal(known, note="the token ids stand in the file")


@dataclass(frozen=True)
class Sealed:
    """Reports how the file is encrypted and how long its text is; nothing can be attacked."""

    how: str

    def __call__(
        self,
        target: Target,  # noqa: ARG002
        leaks: Sequence[Leak],
    ) -> Iterator[tuple[int, Proposal]]:
        reason = (
            f"{self.how}: not read without the key; its size is that of {leaks[0].length} "
            "tokens"
        )
        raise not_applicable(reason)


def read_sources(leaks: Source | Sequence[Source]) -> list[Opened | Dump]:
    """Read files, and take leaks and arrays as they are.

    A list of arrays alone is one source. Beside files or leaks, each array is one by
    itself.
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


def task_for(sources: Sequence[Opened | Dump], expose: Exposure | None) -> str:
    """Return the head that a model needs to give such leaks: that of the next token, or none."""
    first = sources[0]
    if expose is not None:
        kind = expose.kind
    elif isinstance(first, Opened):
        kind = first.leak.kind
    else:
        kind = "logits" if set(first.arrays) == {"logits"} else ""
    return "causal" if kind == "logits" else "base"


def opened_by(
    target: Target,
    sources: Sequence[Opened | Dump],
    expose: Exposure | None,
    verifies: Callable[[Target, Leak], bool],
) -> list[Opened]:
    """Return the leaks of all sources; `verifies` tells whether a text explains a leak."""
    opened: list[Opened] = []
    for source in sources:
        if isinstance(source, Opened):
            opened.append(source)
            continue
        try:
            texts = _verified(source, target, expose, verifies)
        except InputError as error:
            raise InputError(
                f"{error} ({source.name})" if source.name else str(error)
            ) from error
        leaks = _as_stored(target, source, [text.leak for text in texts])
        name = source.name or f"leak {len(opened) + 1}"
        for number, (text, leak) in enumerate(zip(texts, leaks, strict=True)):
            own = name if len(texts) == 1 else f"{name} [{number}]"
            opened.append(replace(text, name=own, leak=leak, sealed=source.sealed))
    return opened


def _verified(
    dump: Dump,
    target: Target,
    expose: Exposure | None,
    verifies: Callable[[Target, Leak], bool],
) -> list[Opened]:
    """Return the leaks in a file: by the only reading, or by the first that gives right texts."""
    mask = _saved_with(dump, MASKS)
    ids = _saved_with(dump, IDS)
    readings, lengths = readings_of(dump.arrays, target.parts, expose)
    if dump.error:  # the numbers were quantised, perhaps after a Hadamard transform
        readings = [*(turned(reading) for reading in readings), *readings]
    mask = lengths if mask is None else mask
    if not readings:
        raise _no_exposure(dump, target.parts)
    chosen = [
        (section, reading)
        for reading in readings
        for section in _chosen(reading, target, expose)
    ]
    # Whether padding before a text counts in its positions is not known.
    if mask is not None and (mask[:, :1] == 0).any():
        ways = (False, True)
    else:
        ways = (False,)
    made = [
        (_texts(section, mask, ids, counted), reading, counted)
        for section, reading in chosen
        for counted in (ways if section.kind not in _PER_TEXT else (False,))
    ]
    if len(made) == 1:
        return made[0][0]
    for texts, reading, counted in made:
        samples = _samples(texts, reading, mask, target.parts, counted=counted)
        if all(verifies(target, *_as_stored(target, dump, [leak])) for leak in samples):
            return texts
    if len(chosen) == 1:
        return made[0][0]
    tried = ", ".join(dict.fromkeys(str(texts[0].leak.exposure) for texts, *_ in made))
    if expose is not None:
        fix = ""
    else:
        fix = ": say what it is with --expose, such as --expose hidden:3"
    raise InputError(f"no text explains these numbers at {tried} of this model{fix}")


def _as_stored(
    target: Target,
    dump: Dump,
    leaks: Sequence[Leak],
) -> list[Leak]:
    """Return leaks of one exposure with the noise of a server's file stated."""
    if not dump.served:
        return list(leaks)
    noise = math.hypot(served_noise(target, leaks[0], EIGHT_BITS), dump.error)
    return [replace(leak, noise=noise) for leak in leaks]


def _saved_with(dump: Dump, names: Sequence[str]) -> Tensor | None:
    """Return a mask or token ids (texts, positions), if they were saved with the arrays."""
    for name, tensor in dump.arrays.items():
        if name.rpartition(".")[2] in names and tensor.ndim <= 2:
            return tensor.reshape(1, -1) if tensor.ndim == 1 else tensor
    return None


def _chosen(
    reading: Sequence[Section],
    target: Target,
    expose: Exposure | None,
) -> list[Section]:
    """Return the section that `expose` names, or else the one nearest to the text."""
    if expose is not None:
        asked = [
            replace(section, layer=expose.layer) if section.layer is None else section
            for section in reading
            if section.kind == expose.kind and section.layer in (None, expose.layer)
        ]
        if not asked:
            got = ", ".join(str(section.exposure) for section in reading)
            raise InputError(
                f"the file holds {got}, not {expose}: leave --expose out, or name one of them"
            )
        return asked
    known = [section for section in reading if section.layer is not None]
    if known:
        return [min(known, key=lambda section: _depth(section, target.parts))]
    return [
        replace(section, layer=layer)
        for section in reading
        for layer in _likely_layers(target, section)[:_TRIED]
    ]


def _depth(section: Section, parts: Anatomy) -> tuple[int, int]:
    """Return what sections are sorted by: the layer, counted from 1, and the preferred kind."""
    from_0 = section.kind == "kv" and parts.causal  # so layers of a cache are counted
    return (section.layer or 0) + from_0, _PREFERRED.index(section.kind)


def _texts(
    section: Section,
    mask: Tensor | None,
    ids: Tensor | None,
    counted: bool = False,
) -> list[Opened]:
    """Return an unnamed leak for each text of a section, without the padding around it.

    If the padding before a text is `counted` in its positions, it stays, with its mask.
    """
    texts: list[Opened] = []
    if section.kind in _PER_TEXT:
        length = None
    else:
        length = next(iter(section.tensors.values())).shape[-2]
    for what, given in (("mask", mask), ("token ids", ids)):
        if given is not None and given.shape != (
            section.texts,
            length or given.shape[1],
        ):
            raise InputError(
                f"expected {what} of shape {(section.texts, length)}, got {tuple(given.shape)}"
            )
    for number in range(section.texts):
        inside = slice(None)
        kept = None
        if mask is not None:
            text = indices_of(mask[number])
            if not len(text):
                raise InputError(f"the mask of text {number} is only padding")
            inside = slice(0 if counted else int(text[0]), int(text[-1]) + 1)
            kept = mask[number, inside] if counted and int(text[0]) else None
        tensors = {name: tensor[number] for name, tensor in section.tensors.items()}
        known = None if ids is None else [int(token) for token in ids[number, inside]]
        texts.append(Opened("", _leak(section, tensors, inside, kept), known))
    return texts


def _leak(
    section: Section,
    tensors: dict[str, Tensor],
    inside: slice,
    mask: Tensor | None,
) -> Leak:
    make: Any = TYPES[section.kind]
    if section.kind == "logits":
        return make(values=tensors["values"][inside][-1:])
    if section.kind == "pooled":
        length = float(tensors["values"].float().norm())
        return make(
            values=tensors["values"], normalised=abs(length - 1) <= _UNIT_TOLERANCE
        )
    cut = {name: tensor[..., inside, :] for name, tensor in tensors.items()}
    if section.kind == "maps":
        cut = {name: tensor[..., inside] for name, tensor in cut.items()}
    return make(**cut, layer=section.layer, noise=section.noise, mask=mask)


def _samples(
    texts: Sequence[Opened],
    reading: Reading,
    mask: Tensor | None,
    parts: Anatomy,
    *,
    counted: bool,
) -> Iterator[Leak]:
    """Yield leaks that are verified if the reading is right: the shortest text, and more.

    These are another text, and another layer of the first. One leak alone does not
    distinguish a text at all layers from as many texts at one layer. Texts after
    padding come first.
    """
    # Sorted twice: by length, and then with those first that padding comes before.
    order = sorted(range(len(texts)), key=lambda number: _tokens(texts[number].leak))
    if mask is not None:
        order.sort(key=lambda number: bool(mask[number, 0]))
    leaks = [texts[number].leak for number in order]
    layer = leaks[0].exposure.layer
    others = [section for section in reading if section.layer not in (None, layer)]
    more = [_texts(section, mask, None, counted)[0].leak for section in others[:1]]
    for leak in [*leaks[:2], *more]:
        causal = parts.causal and leak.kind in ("hidden", "kv", "attention")
        # The beginning of a causal model's text is a text as well.
        yield (
            leak.cut(min(_start(leak) + _BEGINNING, leak.length or 1))
            if causal
            else leak
        )


def _tokens(leak: Leak) -> int:
    return (leak.length or 0) - _start(leak)


def _start(leak: Leak) -> int:
    """Return where the text begins, after padding that stayed."""
    return 0 if leak.mask is None else int(leak.mask.nonzero().min())


def _no_exposure(dump: Dump, parts: Anatomy) -> InputError:
    shapes = ", ".join(
        f"{name or 'an array'} {tuple(tensor.shape)} of {str(tensor.dtype).removeprefix('torch.')}"
        for name, tensor in list(dump.arrays.items())[:3]
    )
    return InputError(
        f"expected hidden states (n, {parts.width}), keys and values (2, {parts.key_heads}, n, "
        f"{parts.head_dim}) or maps ({parts.heads}, n, n) of this model, got {shapes}: is it "
        "another model's?"
    )


@torch.no_grad()
def _likely_layers(target: Target, section: Section) -> list[int]:
    """Return all layers that such a section may be of, the likeliest first.

    Every layer has its own means and spreads. If the numbers of a row have the means μ
    and standard deviations σ over ordinary texts at a layer, the log-likelihood of a
    row x is −Σ log σ − Σ (x − μ)²/2σ².
    """
    parts = target.parts
    if section.kind == "hidden" or (section.kind == "kv" and parts.causal):
        first = 0
    else:
        first = 1
    layers = list(range(first, first + parts.layers + (section.kind == "hidden")))
    if section.kind == "maps" or (section.kind == "kv" and not parts.causal):
        # maps are as wide as the text is long, and encoders have no cache to compare
        return layers
    seen = _without_first(
        rows_of({k: tensor.float() for k, tensor in section.tensors.items()})
    )
    # a first position is compared with first positions
    if seen.shape[1] == 1:
        most = 1
    else:
        most = None
    texts = [target.tokenizer(text)["input_ids"][: parts.max_length] for text in _TEXTS]
    ordinary = [_at_layers(target, section.kind == "kv", ids) for ids in texts]
    likelihoods = [
        _likelihood(
            seen, torch.cat([_without_first(rows[:, :most])[0] for rows in at_layer])
        )
        for at_layer in zip(*ordinary, strict=True)
    ]
    return [
        layers[at] for at in torch.tensor(likelihoods).argsort(descending=True).tolist()
    ]


def _without_first(rows: Tensor) -> Tensor:
    """Leave out the first position, which is unlike all others, if there are others."""
    return rows[:, 1:] if rows.shape[1] > 1 else rows


def _at_layers(
    target: Target,
    cached: bool,
    ids: Sequence[int],
) -> list[Tensor]:
    """Return the rows (1, n, numbers) of a text's cache or states at every layer, in one pass."""
    text = torch.tensor([ids], device=target.parts.device)
    base = cast("Any", target.parts.base)
    if not cached:
        return list(base(input_ids=text, output_hidden_states=True).hidden_states)
    cache = base(input_ids=text, use_cache=True).past_key_values
    return [
        rows_of({"keys": layer.keys, "values": layer.values}) for layer in cache.layers
    ]


def _likelihood(seen: Tensor, ordinary: Tensor) -> float:
    """Return the median log-likelihood of the rows seen, for each number of a row."""
    ordinary = ordinary.double().cpu()[:, : seen.shape[-1]]
    rows = seen.double().flatten(0, 1)
    rows = rows[rows.isfinite().all(-1)]
    spread = ordinary.std(0)
    spread = spread.clamp(min=_MIN_SPREAD * max(float(spread.max()), 1e-30))
    unlikely = ((rows - ordinary.mean(0)) / spread).square() / 2 + spread.log()
    return -float(unlikely.mean(-1).median())


@contextmanager
def as_served(target: Target, exposure: Exposure) -> Generator[None]:
    """Compute with the arithmetic of llama.cpp's server, in a context.

    The model's numbers are then not the server's, but nearer to them than those of
    float32: at the first position, where a wrong token may be as near in float32 as the
    right one, by a factor of two to four for SmolLM2 in Q4_1.
    """
    # What is measured on the model itself, and remembered, has to be measured before.
    Branches(target.model, torch.zeros(1, dtype=torch.long, device=target.parts.device))
    rounding_error(target, exposure)
    with ARITHMETICS[EIGHT_BITS](target.model):
        yield


@torch.no_grad()
def served_noise(
    target: Target,
    leak: Leak,
    arithmetic: str,
) -> float:
    """Return the error that a server's arithmetic leaves in such a leak.

    The weights are ours, dequantised, but the server rounds activations too. How far
    that moves an exposure is measured on ordinary texts, without the leak: the largest
    error of a position, as a root mean square over its numbers, times a margin. The
    judge uses it like any stated noise.
    """
    largest = 0.0
    for text in demo.TEXTS:
        ids = torch.tensor(
            [target.tokenizer(text)["input_ids"]], device=target.parts.device
        )
        exact = leak.rows(capture(target.model, leak.exposure, ids=ids))
        with ARITHMETICS[arithmetic](target.model):
            rounded = leak.rows(capture(target.model, leak.exposure, ids=ids))
        largest = max(largest, float((rounded - exact).square().mean(-1).sqrt().max()))
    return _MARGIN * largest
