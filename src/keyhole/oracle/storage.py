"""Random targets of known weights, and their files (.safetensors).

`plant` makes a target, `save` writes it and `load` opens it as an oracle, so that an
extraction can be compared with the truth. An extraction's own model is saved in the
same form.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import MISSING, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from keyhole.core.errors import (
    InputError,
    expect_among,
    expect_count,
    expect_number,
    expect_seed,
)
from keyhole.core.files import read_tensors, write_tensors
from keyhole.core.float64 import normal, random_stream
from keyhole.core.machine import expect_memory
from keyhole.defence import ANSWERS, Defence
from keyhole.oracle.block import Block, Blocks
from keyhole.oracle.defences import defended
from keyhole.oracle.links import Link, Linked
from keyhole.oracle.planted import (
    Attention,
    AttentionLayers,
    BiasedHeads,
    Head,
    MultiHead,
    OneLayer,
    OutputMatrix,
    Parametric,
    ReluFfn,
)
from keyhole.oracle.protocol import Oracle
from keyhole.oracle.sub_layer import SubLayer

Planted = Parametric
KINDS = (
    "head",
    "multi-head",
    "one-layer",
    "relu",
    "attention",
    "attention-layers",
    "orthogonal-heads",
)
_STORED = (
    Head,
    MultiHead,
    BiasedHeads,
    OneLayer,
    ReluFfn,
    Attention,
    AttentionLayers,
    OutputMatrix,
    SubLayer,
    Block,
    Blocks,
)
# The classes by the kind that a file names; orthogonal heads are stored as any other
# heads.
_CLASSES: dict[str, type[Any]] = {stored.kind: stored for stored in _STORED}


def plant(
    kind: str = "head",
    *,
    dim: int = 64,
    rank: int | None = None,
    heads: int = 1,
    layers: int = 2,
    width: int = 32,
    outputs: int | None = None,
    scale: float = 1.0,
    every_token: bool = False,
    causal: bool = False,
    seed: int = 0,
) -> Planted:
    """Return a random target; every `W` has spectral norm about `2 · scale`.

    Only attention-layers have several `layers`, of `heads` heads each.
    `plant_orthogonal` also returns the bases of orthogonal heads.
    """
    expect_among("kind", kind, KINDS)
    counts = {"dim": dim, "heads": heads, "layers": layers, "width": width}
    for name, size in counts.items():
        expect_count(name, size)
    if rank is not None and not 1 <= rank <= dim:
        raise InputError(f"rank must be from 1 to dim = {dim}, not {rank}")
    expect_number("scale", scale, least=0)
    sizes = {
        "relu": width * dim,
        "one-layer": (dim + width) * dim,
        "attention": heads * (dim + (outputs or dim)) * dim,
        "attention-layers": layers * heads * 2 * dim * dim,
    }
    expect_memory(16 * sizes.get(kind, heads * dim * dim), f"{kind} of d = {dim:,}")
    if kind == "orthogonal-heads":
        if rank is not None:
            raise InputError("orthogonal-heads takes no rank: its subspaces set it")
        return plant_orthogonal(dim, heads, scale=scale, seed=seed)[0]
    draw = _normals(seed)

    def weights() -> Tensor:
        if rank is None:
            return scale / math.sqrt(dim) * draw(dim, dim)
        # The singular values of a product of two such factors are about dim.
        return 2 * scale / dim * draw(dim, rank) @ draw(rank, dim)

    if kind == "head":
        return Head(weights(), draw(dim))
    if kind == "multi-head":
        return MultiHead(
            [weights() for _ in range(heads)], [draw(dim) for _ in range(heads)]
        )
    if kind == "one-layer":
        return OneLayer(weights(), draw(width, dim) / math.sqrt(dim), draw(width))
    if kind == "relu":
        return ReluFfn(draw(width, dim) / math.sqrt(dim), draw(width))
    if kind == "attention":
        W = torch.stack([weights() for _ in range(heads)])
        V = draw(heads, dim, outputs or dim) / math.sqrt(dim)
        return Attention(W, V, every_token=every_token, causal=causal)
    W = torch.stack([weights() for _ in range(layers * heads)])
    V = draw(layers * heads, dim, dim) / math.sqrt(dim)
    numbers = torch.arange(layers).double().repeat_interleave(heads)
    return AttentionLayers(W, V, numbers, every_token=every_token, causal=causal)


def _normals(seed: int) -> Callable[..., Tensor]:
    """Return a function that draws normal numbers of any shape in float64 from one stream."""
    expect_seed(seed)
    return partial(normal, random_stream(seed))


def plant_orthogonal(
    dim: int,
    heads: int,
    *,
    scale: float = 1.0,
    seed: int = 0,
) -> tuple[MultiHead, list[Tensor]]:
    """Return heads in random orthogonal subspaces of nearly equal size, and their bases (d, k).

    *Provably Learning Attention with Queries* (arXiv 2601.16873), Appendix C,
    Assumption C.1: `W_h = P_h W_h P_h` and `v_h = P_h v_h` with orthogonal projectors
    P_h.
    """
    expect_count("dim", dim)
    expect_count("heads", heads)
    if heads > dim:
        raise InputError(f"heads must not exceed dim = {dim}: there are {heads} heads")
    expect_number("scale", scale, least=0)
    draw = _normals(seed)
    Q = torch.linalg.qr(draw(dim, dim)).Q
    bases = [part.contiguous() for part in Q.tensor_split(heads, dim=1)]
    W: list[Tensor] = []
    v: list[Tensor] = []
    for basis in bases:
        k = basis.shape[1]
        W.append(basis @ (scale / math.sqrt(k) * draw(k, k)) @ basis.mT)
        v.append(basis @ draw(k))
    return MultiHead(W, v), bases


def save(
    target: Planted | Linked,
    path: str | Path,
    defence: Defence | None = None,
) -> None:
    """Write a target; the one that `load` returns has the same answers, bit for bit.

    With a `defence`, `load` returns the target behind it.
    """
    flags: dict[str, str] = {}
    if defence is not None and defence.parameters:
        given = {**defence.parameters, "seed": defence.seed}
        flags = {name: str(value) for name, value in given.items()}
    write_tensors(path, target.tensors(), {**metadata_of(target), **flags})


def metadata_of(target: Planted | Linked) -> dict[str, str]:
    """Return the metadata of a target's file, which `from_tensors` reads."""
    return {"keyhole": "1", "kind": target.kind, **target.flags()}


def load(path: str | Path) -> Oracle:
    """Return a target that `save` (or `keyhole lab plant`) wrote, behind its defence."""
    target, defence = load_plain(path)
    return defended(target, defence)


def load_plain(path: str | Path) -> tuple[Planted | Linked, Defence]:
    """Return the target of `load` without its defence, and that."""
    metadata, tensors = read_tensors(path)
    if metadata.get("keyhole") != "1" or metadata.get("kind") not in {*_CLASSES} - {
        "output-layer"
    }:
        raise InputError(
            f"{path} is not a target written by `keyhole lab plant`: it holds "
            f"{', '.join(sorted(tensors)) or 'no tensors'}"
        )
    target = from_tensors(metadata, tensors, path)
    if target.dim < 1:
        raise InputError(f"the tokens of {path} must have one dimension or more")
    try:
        stated = [name for name in ("seed", *ANSWERS) if name in metadata]
        words = [f"{name}={metadata[name]}" for name in stated]
        return target, Defence.of_answers(words)
    except InputError as error:
        raise InputError(f"{error} in {path}") from error


def from_tensors(
    metadata: dict[str, str],
    tensors: dict[str, Tensor],
    origin: str | Path,
) -> Planted | Linked:
    """Return the target of the kind that `metadata` names, made of `tensors` and the settings.

    The fields of a class that have no default are its tensors, the others its settings.
    """
    if "link" in metadata and "offset" in tensors:
        plain = {name: value for name, value in metadata.items() if name != "link"}
        offset = tensors["offset"]
        rest = {n: t for n, t in tensors.items() if n != "offset"}
        return Linked(from_tensors(plain, rest, origin), Link(metadata["link"], offset))
    cls = _CLASSES[metadata["kind"]]
    given: dict[str, Any] = {}
    try:
        for field in fields(cls):
            if field.default_factory is not MISSING and field.name not in tensors:
                continue  # files of older versions lack the tensor
            if field.default is MISSING:
                tensor = tensors[field.name]
                given[field.name] = _each_head(tensor) if cls is MultiHead else tensor
            elif field.name in metadata:
                text = metadata[field.name]
                is_text = isinstance(field.default, str)
                given[field.name] = text if is_text else _setting(field.name, text)
        return cls(**given)
    except KeyError as missing:
        got = ", ".join(sorted(tensors)) or "nothing"
        raise InputError(f"{origin} has no tensor {missing}, only {got}") from missing
    except InputError as error:
        raise InputError(f"{error} in {origin}") from error


def _setting(name: str, text: str) -> bool | int | float:
    if text in ("True", "False"):
        return text == "True"
    try:
        return int(text) if text.isdecimal() else float(text)
    except ValueError:
        raise InputError(f"expected {name} as a number, got {text:.40}") from None


def _each_head(tensor: Tensor) -> list[Tensor]:
    if tensor.ndim == 0:
        raise InputError("expected a W and a v of each head, got a number")
    return list(tensor)
