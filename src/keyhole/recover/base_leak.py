"""What every leak of one text has: checks on the way in; names, shapes and a digest after that."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from keyhole.core.errors import InputError
from keyhole.core.files import write_tensors
from keyhole.models.capture import Exposure

PRECISIONS = ("float32", "bfloat16", "float16", "int8", "int4", "binary")
FORMAT = "1"


@dataclass(frozen=True, eq=False, kw_only=True)
class About:
    """What is known about a leak besides its numbers; every field may be left out.

    `precision` is how the numbers were rounded (one of PRECISIONS; "binary" for pooled embeddings
    alone; None: found out from the numbers). `noise` is the standard deviation of noise that was
    added, None where that is unknown. `mask` (n,) is 1 on text and 0 on padding. `model` is the
    identity of the model that leaked.
    """

    model: str | None = None
    precision: str | None = None
    noise: float | None = None
    mask: Tensor | None = None


# What callers and files may say of a leak, by field.
_KINDS: dict[str, Any] = {
    "model": str | None, "precision": str | None, "noise": float | int | None, "layer": int,
    "pooling": str, "normalised": bool | None, "permuted": bool, "width": int | None,
    "tokens": int | None, "log_probabilities": bool, "steps": None, "ends": None,
    "codebook": None, "unit": bool | None,
}  # fmt: skip
AnyLeak = TypeVar("AnyLeak", bound="BaseLeak")


class BaseLeak(About):
    """What the six types share: checks on the way in, names and shapes on the way out."""

    kind: ClassVar[str]
    names: ClassVar[tuple[str, ...]] = ("values",)
    beside: ClassVar[tuple[str, ...]] = ("mask",)
    usual: ClassVar[dict[str, Any]] = {}  # what files said nothing of before it could be otherwise
    rank: ClassVar[int] = 2

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, Tensor | _KINDS.get(field.name, object)):
                raise InputError(f"expected {field.name} of another kind, got {value!r:.40}")
        if self.noise is not None and not 0 <= self.noise < math.inf:
            raise InputError(f"expected noise of 0 or more, got {self.noise}")
        known = PRECISIONS if self.kind == "pooled" else PRECISIONS[:-1]  # signs of one vector
        if self.precision is not None and self.precision not in known:
            raise InputError(f"expected a precision among {', '.join(known)}, got {self.precision}")
        for name in self.names:
            tensor = getattr(self, name)
            if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
                raise InputError(f"expected {name} to be a floating-point tensor, got another kind")
            if tensor.dtype.itemsize == 1:  # few operations are there for them, not even isinf
                tensor = tensor.to(torch.float32)
            if tensor.ndim == self.rank + 1 and tensor.shape[0] == 1:
                tensor = tensor[0]
            if tensor.ndim != self.rank or 0 in tensor.shape:
                raise InputError(
                    f"expected {name} of one text with {self.rank} axes, got {tuple(tensor.shape)}"
                )
            if bool(tensor.isinf().any()):
                raise InputError(f"expected finite {name} (NaN where nothing leaked), got infinity")
            if bool(tensor.isnan().all()):
                raise InputError(f"expected {name} to hold numbers, got only NaN")
            if self.precision is None and tensor.dtype in (torch.bfloat16, torch.float16):
                object.__setattr__(self, "precision", str(tensor.dtype).removeprefix("torch."))
            object.__setattr__(self, name, tensor.detach().to(torch.float32))
        if self.length is not None and self.length < 1:
            raise InputError(f"expected one token or more, got {self.length}")
        if self.mask is not None:
            if self.mask.is_complex() or not bool(self.mask.isfinite().all()):
                raise InputError("expected a mask of 0 and 1, got other numbers")
            mask = self.mask.reshape(-1).to(torch.long)
            if self.length is not None and len(mask) != self.length:
                raise InputError(f"expected a mask of {self.length} positions, got {len(mask)}")
            object.__setattr__(self, "mask", mask)

    @property
    def exposure(self) -> Exposure:
        return Exposure(self.kind, int(getattr(self, "layer", 0)))

    @property
    def in_no_order(self) -> bool:
        """Do the rows stand in an order that says nothing?"""
        return bool(getattr(self, "permuted", False))

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in self.names}

    @property
    def length(self) -> int | None:
        """How many positions the text has, padding included; None where that did not leak."""
        return getattr(self, self.names[0]).shape[-2]

    def rows(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The tensors as (…, positions, numbers): what leaked at each position, side by side."""
        return tensors["values"]

    def cut(self: AnyLeak, length: int) -> AnyLeak:
        """The leak of the first `length` positions."""
        if self.length is None or length == self.length:
            return self
        ends = self.names if self.kind != "maps" else ()
        short = {name: getattr(self, name)[..., :length, :] for name in ends}
        if self.kind == "maps":
            short = {"values": self.tensors["values"][:, :length, :length]}
        return replace(self, **short, mask=None if self.mask is None else self.mask[:length])

    @property
    def known(self) -> dict[str, Any]:
        """What is known about the leak besides its tensors; what is usual is not remarked on."""
        names = [field.name for field in fields(self)]
        tensors = {*self.names, *self.beside}
        known = {name: getattr(self, name) for name in names if name not in tensors}
        usual = self.usual.items()
        return {name: value for name, value in known.items() if (name, value) not in usual}

    @property
    def stored(self) -> dict[str, Tensor]:
        """All tensors of the leak's file: what leaked, and what is known beside it."""
        beside = {name: getattr(self, name) for name in self.beside}
        return {**self.tensors, **{name: each for name, each in beside.items() if each is not None}}

    @property
    def digest(self) -> str:
        """Sixteen hexadecimal digits of what is in the leak, whatever its file is called."""
        sum_ = hashlib.sha256(json.dumps([self.kind, self.known], sort_keys=True).encode())
        for name, tensor in self.stored.items():
            sum_.update(f"{name} {tuple(tensor.shape)}".encode())
            sum_.update(tensor.cpu().contiguous().numpy().tobytes())
        return sum_.hexdigest()[:16]

    def save(self, path: str | Path) -> None:
        """Write the leak as .safetensors: a whole file or none."""
        about = {"keyhole": FORMAT, "leak": self.kind, "about": json.dumps(self.known)}
        write_tensors(path, self.stored, about)
