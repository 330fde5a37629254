"""Planting targets, and carrying them from one machine to another as .safetensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import MISSING, fields
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
from keyhole.core.machine import expect_memory
from keyhole.oracle.block import Block, Blocks
from keyhole.oracle.defences import Degradation
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
    "head", "multi-head", "one-layer", "relu", "attention", "attention-layers", "orthogonal-heads",
)  # fmt: skip
# What a file may hold, by kind; orthogonal heads are stored as heads like any other.
_CLASSES: dict[str, type[Any]] = {
    planted.kind: planted
    for planted in (
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
}


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
    """A random target of known weights; every `W` has spectral norm about `2 · scale`.

    `layers` is how many attention-layers there are, each with so many heads.
    `plant_orthogonal` gives the bases of orthogonal heads as well.
    """
    expect_among("kind", kind, KINDS)
    for name, size in {"dim": dim, "heads": heads, "layers": layers, "width": width}.items():
        expect_count(name, size)
    if rank is not None and not 1 <= rank <= dim:
        raise InputError(f"rank must be from 1 to dim = {dim}, not {rank}")
    expect_number("scale", scale, least=0)
    numbers = {
        "relu": width * dim,
        "one-layer": (dim + width) * dim,
        "attention": heads * (dim + (outputs or dim)) * dim,
        "attention-layers": layers * heads * 2 * dim * dim,
    }.get(kind, heads * dim * dim)
    expect_memory(16 * numbers, f"{kind} of d = {dim:,}")
    if kind == "orthogonal-heads":
        if rank is not None:
            raise InputError("orthogonal-heads takes no rank: its subspaces set it")
        return plant_orthogonal(dim, heads, scale=scale, seed=seed)[0]
    normal = _normals(seed)

    def weights() -> Tensor:
        if rank is None:
            return scale / math.sqrt(dim) * normal(dim, dim)
        # Singular values of a product of two such factors lie around dim.
        return 2 * scale / dim * normal(dim, rank) @ normal(rank, dim)

    if kind == "head":
        return Head(weights(), normal(dim))
    if kind == "multi-head":
        return MultiHead([weights() for _ in range(heads)], [normal(dim) for _ in range(heads)])
    if kind == "one-layer":
        return OneLayer(weights(), normal(width, dim) / math.sqrt(dim), normal(width))
    if kind == "relu":
        return ReluFfn(normal(width, dim) / math.sqrt(dim), normal(width))
    if kind == "attention-layers":
        W = torch.stack([weights() for _ in range(layers * heads)])
        V = normal(layers * heads, dim, dim) / math.sqrt(dim)
        places = torch.arange(layers, dtype=torch.float64).repeat_interleave(heads)
        return AttentionLayers(W, V, places, every_token=every_token, causal=causal)
    W = torch.stack([weights() for _ in range(heads)])
    V = normal(heads, dim, outputs or dim) / math.sqrt(dim)
    return Attention(W, V, every_token=every_token, causal=causal)


def _normals(seed: int) -> Callable[..., Tensor]:
    """Normal numbers in float64 of any shape, drawn one after the other from one stream."""
    expect_seed(seed)
    stream = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=stream, dtype=torch.float64)


def plant_orthogonal(
    dim: int, heads: int, *, scale: float = 1.0, seed: int = 0
) -> tuple[MultiHead, list[Tensor]]:
    """Heads in random orthogonal subspaces, as even as can be, and their bases (d, k).

    *Provably Learning Attention with Queries* (arXiv 2601.16873), Appendix C, Assumption C.1:
    `W_h = P_h W_h P_h` and `v_h = P_h v_h` with orthogonal projectors P_h.
    """
    expect_count("dim", dim)
    expect_count("heads", heads)
    if heads > dim:
        raise InputError(f"there can be at most one head a dimension, {dim}, got {heads} heads")
    expect_number("scale", scale, least=0)
    normal = _normals(seed)
    Q = torch.linalg.qr(normal(dim, dim)).Q
    bases = [part.contiguous() for part in Q.tensor_split(heads, dim=1)]
    W: list[Tensor] = []
    v: list[Tensor] = []
    for basis in bases:
        k = basis.shape[1]
        W.append(basis @ (scale / math.sqrt(k) * normal(k, k)) @ basis.mT)
        v.append(basis @ normal(k))
    return MultiHead(W, v), bases


def save(
    target: Planted | Linked, path: str | Path, degradation: Degradation | None = None
) -> None:
    """Write a target; `load` gives back one that answers the same bit for bit.

    With a `degradation`, one that answers as a server would that does this to its answers.
    """
    flags = {} if degradation is None else degradation.flags()
    write_tensors(path, target.tensors(), {**metadata_of(target), **flags})


def metadata_of(target: Planted | Linked) -> dict[str, str]:
    """What the file of a target says about itself; `from_tensors` reads it."""
    return {"keyhole": "1", "kind": target.kind, **target.flags()}


def load(path: str | Path) -> Oracle:
    """Read a target that `save` (or `keyhole lab plant`) wrote, and what its answers go through."""
    target, degradation = load_plain(path)
    return degradation.applied(target)


def load_plain(path: str | Path) -> tuple[Planted | Linked, Degradation]:
    """The target of `load` as it is, and what is done to its answers."""
    metadata, tensors = read_tensors(path)
    if metadata.get("keyhole") != "1" or metadata.get("kind") not in {*_CLASSES} - {"output-layer"}:
        raise InputError(
            f"{path} is not a target written by `keyhole lab plant`: it holds "
            f"{', '.join(sorted(tensors)) or 'no tensors'}"
        )
    target = from_tensors(metadata, tensors, path)
    if target.dim < 1:
        raise InputError(f"the tokens of {path} must have one dimension or more")
    try:
        return target, Degradation.of(metadata)
    except InputError as error:
        raise InputError(f"{error} in {path}") from error


def from_tensors(
    metadata: dict[str, str], tensors: dict[str, Tensor], origin: str | Path
) -> Planted | Linked:
    """The target that `metadata` names, made of `tensors`: what a class has no default for."""
    if "link" in metadata and "offset" in tensors:
        inside = {name: value for name, value in metadata.items() if name != "link"}
        offset, rest = tensors["offset"], {n: t for n, t in tensors.items() if n != "offset"}
        return Linked(from_tensors(inside, rest, origin), Link(metadata["link"], offset))
    made = _CLASSES[metadata["kind"]]
    given: dict[str, Any] = {}
    try:
        for field in fields(made):
            if field.default_factory is not MISSING and field.name not in tensors:
                continue  # a file from before there was such a tensor
            if field.default is MISSING:
                tensor = tensors[field.name]
                given[field.name] = _each_head(tensor) if made is MultiHead else tensor
            elif field.name in metadata:
                text = metadata[field.name]
                named = isinstance(field.default, str)
                given[field.name] = text if named else _setting(field.name, text)
        return made(**given)
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
