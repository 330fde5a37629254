"""Planting targets, and carrying them from one machine to another as .safetensors."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor

from keyhole.core.errors import InputError, expect_count, expect_number, expect_seed
from keyhole.core.files import read_tensors, write_tensors
from keyhole.core.machine import expect_room
from keyhole.oracle.defences import Degradation
from keyhole.oracle.links import Link, Linked
from keyhole.oracle.planted import Attention, Head, MultiHead, OneLayer, OutputMatrix, ReluFfn
from keyhole.oracle.protocol import Oracle
from keyhole.oracle.sub_layer import SubLayer

Planted = Head | MultiHead | OneLayer | ReluFfn | Attention | OutputMatrix | SubLayer
KINDS = ("head", "multi-head", "one-layer", "relu", "attention", "orthogonal-heads")
# Orthogonal heads are stored as heads like any other; sub-layers come from checkpoints.
_STORED = (*KINDS[:-1], "sub-layer")


def plant(
    kind: str = "head",
    *,
    dim: int = 64,
    rank: int | None = None,
    heads: int = 1,
    width: int = 32,
    outputs: int | None = None,
    scale: float = 1.0,
    every_token: bool = False,
    causal: bool = False,
    seed: int = 0,
) -> Planted:
    """A random target of known weights; every `W` has spectral norm about `2 · scale`.

    `plant_orthogonal` (subspaces.py) gives the bases of orthogonal heads as well.
    """
    if kind not in KINDS:
        raise InputError(f"expected a kind among {', '.join(KINDS)}, got {kind}")
    for name, size in {"dim": dim, "heads": heads, "width": width}.items():
        expect_count(name, size)
    if rank is not None and not 1 <= rank <= dim:
        raise InputError(f"expected a rank from 1 to dim = {dim}, got {rank}")
    expect_number("scale", scale, least=0)
    expect_seed(seed)
    expect_room(16 * _numbers(kind, dim, heads, width, outputs or dim), f"{kind} of d = {dim:,}")
    if kind == "orthogonal-heads":
        if rank is not None:
            raise InputError("expected no rank for orthogonal-heads, whose subspaces set it")
        return plant_orthogonal(dim, heads, scale=scale, seed=seed)[0]
    stream = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=stream, dtype=torch.float64)

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
        several = () if heads == 1 else (heads,)
        W = torch.stack([weights() for _ in range(heads)]).reshape(*several, dim, dim)
        return OneLayer(W, normal(*several, width, dim) / math.sqrt(dim), normal(width))
    if kind == "relu":
        return ReluFfn(normal(width, dim) / math.sqrt(dim), normal(width))
    W = torch.stack([weights() for _ in range(heads)])
    V = normal(heads, dim, outputs or dim) / math.sqrt(dim)
    return Attention(W, V, every_token=every_token, causal=causal)


def _numbers(kind: str, dim: int, heads: int, width: int, outputs: int) -> int:
    """The parameters of a target, all together."""
    match kind:
        case "head":
            return dim * dim + dim
        case "multi-head" | "orthogonal-heads":
            return heads * (dim * dim + dim)
        case "one-layer":
            return heads * (dim * dim + width * dim) + width
        case "relu":
            return width * dim + width
        case _:
            return heads * (dim * dim + dim * outputs)


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
    if metadata.get("keyhole") != "1" or metadata.get("kind") not in _STORED:
        raise InputError(
            f"expected a target written by `keyhole lab plant`, got {path} with "
            f"{', '.join(sorted(tensors)) or 'no tensors'}"
        )
    target = from_tensors(metadata, tensors, path)
    if target.dim < 1:
        raise InputError(f"expected tokens of one dimension or more in {path}, got none")
    try:
        return target, Degradation.of(metadata)
    except InputError as error:
        raise InputError(f"{error} in {path}") from error


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InputError(f"expected epsilon as a number, got {text:.40}") from None


def _each(tensor: Tensor) -> list[Tensor]:
    """Of each head, one."""
    if tensor.ndim == 0:
        raise InputError("expected a W and a v of each head, got a number")
    return list(tensor)


def from_tensors(
    metadata: dict[str, str], tensors: dict[str, Tensor], origin: str | Path
) -> Planted | Linked:
    """The target that `metadata` names, made of `tensors`."""
    if "link" in metadata and "offset" in tensors:
        inside = {name: value for name, value in metadata.items() if name != "link"}
        offset, rest = tensors["offset"], {n: t for n, t in tensors.items() if n != "offset"}
        return Linked(from_tensors(inside, rest, origin), Link(metadata["link"], offset))

    def flag(name: str) -> bool:
        return metadata.get(name) == "True"

    try:
        match metadata["kind"]:
            case "head":
                return Head(tensors["W"], tensors["v"])
            case "multi-head":
                return MultiHead(_each(tensors["W"]), _each(tensors["v"]))
            case "one-layer":
                return OneLayer(tensors["W"], tensors["A"], tensors["w"])
            case "relu":
                return ReluFfn(tensors["A"], tensors["w"])
            case "output-layer":
                blocks = int(metadata.get("blocks", "0"))
                return OutputMatrix(tensors["W"], tensors["tokens"], flag("constant"), blocks)
            case "sub-layer":
                epsilon = _number(metadata["epsilon"]) if "epsilon" in metadata else None
                return SubLayer(
                    *(tensors[name] for name in SubLayer.NAMES), epsilon=epsilon,
                    residual=flag("residual"), every_token=flag("every_token"),
                    causal=flag("causal"),
                )  # fmt: skip
            case _:
                return Attention(tensors["W"], tensors["V"], flag("every_token"), flag("causal"))
    except KeyError as missing:
        got = ", ".join(sorted(tensors)) or "nothing"
        raise InputError(f"expected the tensor {missing} in {origin}, got {got}") from missing
    except InputError as error:
        raise InputError(f"{error} in {origin}") from error


# Heads in orthogonal subspaces (Assumption C.1), planted together with the bases of these.
#
# *Provably Learning Attention with Queries* (arXiv 2601.16873), Appendix C: `W_h = P_h W_h P_h` and
# `v_h = P_h v_h` with orthogonal projectors P_h.


def plant_orthogonal(
    dim: int, heads: int, *, scale: float = 1.0, seed: int = 0
) -> tuple[MultiHead, list[Tensor]]:
    """Heads in random orthogonal subspaces, as even as can be, and their bases (d, k)."""
    expect_count("dim", dim)
    expect_count("heads", heads)
    if heads > dim:
        raise InputError(f"expected at most one head a dimension, {dim}, got {heads} heads")
    expect_number("scale", scale, least=0)
    expect_seed(seed)
    stream = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=stream, dtype=torch.float64)

    Q = torch.linalg.qr(normal(dim, dim)).Q
    bases = [part.contiguous() for part in Q.tensor_split(heads, dim=1)]
    W: list[Tensor] = []
    v: list[Tensor] = []
    for basis in bases:
        k = basis.shape[1]
        W.append(basis @ (scale / math.sqrt(k) * normal(k, k)) @ basis.mT)
        v.append(basis @ normal(k))
    return MultiHead(W, v), bases
