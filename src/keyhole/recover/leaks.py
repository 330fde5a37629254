"""What leaked, of one text: seven frozen types, and the files they travel in.

A leak holds the leaked numbers as float32 and says what is known about them: the layer, the model,
how they were rounded, what noise they carry, which positions are padding. It has no field for the
text. A position that did not leak is a row of NaN.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from keyhole.core.errors import InputError, expect_among, expect_count, expect_number
from keyhole.core.files import parse, read_tensors, write_tensors
from keyhole.models.capture import Exposure

PRECISIONS = ("float32", "bfloat16", "float16", "int8", "int4", "binary")
FORMAT = "1"
_UNIT = 0.01  # how far from 1 rounding may put the length of a normalised row
_CUT = 0.1  # … and that of what was cut off and normalised, in 4 bits


def rows_of(tensors: Mapping[str, Tensor]) -> Tensor:
    """Rows (…, positions, numbers): of keys and values all heads side by side."""
    if "keys" not in tensors:
        return tensors["values"]
    both = torch.cat([tensors["keys"], tensors["values"]], -1)
    return both.transpose(-3, -2).flatten(-2)


# The types of the fields that callers and files may set; None: a tensor or nothing.
_KINDS: dict[str, Any] = {
    "model": str | None, "precision": str | None, "noise": float | int | None, "layer": int,
    "pooling": str, "normalised": bool | None, "permuted": bool, "width": int | None,
    "tokens": int | None, "log_probabilities": bool, "steps": None, "ends": None,
    "codebook": None, "unit": bool | None, "block": int | None,
}  # fmt: skip
AnyLeak = TypeVar("AnyLeak", bound="BaseLeak")


@dataclass(frozen=True, eq=False, kw_only=True)
class BaseLeak:
    """What the seven types share: what is known about a leak, checks, names and shapes.

    Of what is known, every field may be left out.

    `precision` is how the numbers were rounded (one of PRECISIONS; "binary" for pooled embeddings
    alone; None: found out from the numbers). `noise` is the standard deviation of noise that was
    added, None where that is unknown. `mask` (n,) is 1 on text and 0 on padding. `model` is the
    identity of the model that leaked. `encoder` (m, e) are the states that an encoder gave: then
    the leak is of the decoder behind it, and the text is the decoder's.
    """

    model: str | None = None
    precision: str | None = None
    noise: float | None = None
    mask: Tensor | None = None
    encoder: Tensor | None = None
    kind: ClassVar[str]
    names: ClassVar[tuple[str, ...]] = ("values",)
    more: ClassVar[tuple[str, ...]] = ("mask", "encoder")
    usual: ClassVar[dict[str, Any]] = {}  # values that files leave out: older ones lack the fields
    rank: ClassVar[int] = 2

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            kind = _KINDS.get(field.name, object)
            if not isinstance(value, Tensor | kind):
                kind = getattr(kind, "__name__", kind)
                raise InputError(f"expected {field.name} as {kind}, got {value!r:.40}")
        expect_number("noise", self.noise, least=0)
        known = PRECISIONS if self.kind == "pooled" else PRECISIONS[:-1]  # signs of one vector
        if self.precision is not None:
            expect_among("precision", self.precision, known)
        for name in self.names:
            self._take_tensor(name)
        if self.length is not None and self.length < 1:
            raise InputError(f"a leak must have at least one token: got {self.length}")
        if self.mask is not None:
            if self.mask.is_complex() or not bool(self.mask.isfinite().all()):
                raise InputError("the mask must hold only 0 and 1")
            mask = self.mask.reshape(-1).to(torch.long)
            if self.length is not None and len(mask) != self.length:
                raise InputError(f"the mask must have {self.length} positions, not {len(mask)}")
            object.__setattr__(self, "mask", mask)
        states = self.encoder
        if states is not None and not (states.ndim == 2 and bool(states.isfinite().all())):
            raise InputError(f"expected encoder states (m, e), got shape {tuple(states.shape)}")

    def _take_tensor(self, name: str) -> None:
        """Check the tensor of that name, and keep it as float32 of one text."""
        tensor = getattr(self, name)
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            raise InputError(f"expected {name} as a floating-point tensor, got another kind")
        if tensor.dtype.itemsize == 1:  # few operations are there for them, not even isinf
            tensor = tensor.to(torch.float32)
        if tensor.ndim == self.rank + 1 and tensor.shape[0] == 1:
            tensor = tensor[0]
        if tensor.ndim != self.rank or 0 in tensor.shape:
            raise InputError(
                f"expected {name} of one text with {self.rank} axes, got {tuple(tensor.shape)}"
            )
        if bool(tensor.isinf().any()):
            raise InputError(f"{name} must be finite, or NaN where nothing leaked")
        if bool(tensor.isnan().all()):
            raise InputError(f"{name} must hold numbers, not only NaN")
        if self.precision is None and tensor.dtype in (torch.bfloat16, torch.float16):
            object.__setattr__(self, "precision", str(tensor.dtype).removeprefix("torch."))
        object.__setattr__(self, name, tensor.detach().to(torch.float32))

    @property
    def exposure(self) -> Exposure:
        return Exposure(self.kind, int(getattr(self, "layer", 0)))

    @property
    def in_no_order(self) -> bool:
        """Are the rows in a random order?"""
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
        return rows_of(tensors)

    def with_noise(self: AnyLeak, noise: float) -> AnyLeak:
        """The leak, with noise of `noise` times its standard deviation stated to be in it."""
        expect_number("noise", noise, least=0)
        numbers = torch.cat([tensor.flatten() for tensor in self.tensors.values()])
        spread = float(numbers[numbers.isfinite()].std()) / (1 + noise**2) ** 0.5  # without it
        return replace(self, noise=noise * spread)

    def cut(self: AnyLeak, length: int) -> AnyLeak:
        """The leak of the first `length` positions."""
        if self.length is None or length == self.length:
            return self
        short = {name: tensor[..., :length, :] for name, tensor in self.tensors.items()}
        if self.kind == "maps":  # a row and a column for each position
            short = {name: tensor[..., :length] for name, tensor in short.items()}
        return replace(self, **short, mask=None if self.mask is None else self.mask[:length])

    @property
    def facts(self) -> dict[str, Any]:
        """What is known about the leak except its tensors, and except what is usual."""
        names = [field.name for field in fields(self)]
        tensors = {*self.names, *self.more}
        facts = {name: getattr(self, name) for name in names if name not in tensors}
        usual = self.usual.items()
        return {name: value for name, value in facts.items() if (name, value) not in usual}

    @property
    def stored(self) -> dict[str, Tensor]:
        """All tensors of the leak's file: what leaked, and what is known with it."""
        more = {name: getattr(self, name) for name in self.more}
        return {**self.tensors, **{name: each for name, each in more.items() if each is not None}}

    @property
    def digest(self) -> str:
        """Sixteen hexadecimal digits of what is in the leak, whatever its file is called."""
        sum_ = hashlib.sha256(json.dumps([self.kind, self.facts], sort_keys=True).encode())
        for name, tensor in self.stored.items():
            sum_.update(f"{name} {tuple(tensor.shape)}".encode())
            sum_.update(tensor.cpu().contiguous().numpy().tobytes())
        return sum_.hexdigest()[:16]

    def save(self, path: str | Path) -> None:
        """Write the leak as .safetensors: a whole file or none."""
        about = {"keyhole": FORMAT, "leak": self.kind, "about": json.dumps(self.facts)}
        write_tensors(path, self.stored, about)


@dataclass(frozen=True, eq=False)
class HiddenStates(BaseLeak):
    """Hidden states (n, d) after block `layer`; 0 is the embeddings.

    `width` says that only the first so many numbers of each row leaked, `normalised` that each row
    was divided by its length after that (None: found out from the lengths), `permuted` that the
    rows came in an order which says nothing. A row of NaN did not leak; where rows are permuted, it
    only counts.
    """

    values: Tensor
    layer: int
    normalised: bool | None = None
    permuted: bool = False
    width: int | None = None
    kind: ClassVar[str] = "hidden"
    usual: ClassVar[dict[str, Any]] = {"normalised": False, "permuted": False, "width": None}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.width not in (None, self.values.shape[1]):
            raise InputError(
                f"width is {self.width}, but the rows have {self.values.shape[1]} numbers"
            )
        if self.permuted and self.mask is not None and not bool(self.mask.all()):
            raise InputError("permuted rows take no mask: leave out the rows of padding")
        if self.normalised is None:
            lengths = self.values[self.values.isfinite().all(-1)].norm(dim=-1)
            unit = len(lengths) > 0 and bool(((lengths - 1).abs() <= _UNIT).all())
            object.__setattr__(self, "normalised", unit)

    @property
    def exposure(self) -> Exposure:
        return Exposure(self.kind, self.layer, width=self.width, unit=bool(self.normalised))

    def ordered(self, order: Tensor) -> HiddenStates:
        """The leak with row `order[p]` at position p, as rows whose order is known."""
        return replace(self, values=self.values[order.cpu()], permuted=False)


@dataclass(frozen=True, eq=False)
class KeyValues(BaseLeak):
    """Keys and values (heads, n, k) of one layer, as they stand in a KV cache.

    A causal model's layers count from 0, as its cache does; an encoder's from 1, as its maps do.
    """

    keys: Tensor
    values: Tensor
    layer: int
    kind: ClassVar[str] = "kv"
    names: ClassVar[tuple[str, ...]] = ("keys", "values")
    rank: ClassVar[int] = 3


@dataclass(frozen=True, eq=False)
class MixedCache(BaseLeak):
    """Keys and values (heads, n, k) of a causal model's layer, counted from 1, behind a secret mix.

    `block` is how many positions are mixed with each other (None: found out), `known` are the first
    token ids of the text, where they are known. Blocks may be filled up: how long the text is, does
    not leak by itself.
    """

    keys: Tensor
    values: Tensor
    layer: int = 1
    block: int | None = None
    known: Sequence[int] | None = None
    kind: ClassVar[str] = "mixed"
    names: ClassVar[tuple[str, ...]] = ("keys", "values")
    rank: ClassVar[int] = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        expect_count("block", self.block)
        if self.known is not None:
            object.__setattr__(self, "known", [int(token) for token in self.known])

    @property
    def exposure(self) -> Exposure:
        return Exposure("kv", self.layer - 1)

    @property
    def length(self) -> int | None:
        return None


@dataclass(frozen=True, eq=False)
class AttentionMaps(BaseLeak):
    """Attention probabilities (heads, n, n) of one layer, counted from 1."""

    values: Tensor
    layer: int
    kind: ClassVar[str] = "maps"
    rank: ClassVar[int] = 3

    def rows(self, tensors: Mapping[str, Tensor]) -> Tensor:
        return tensors["values"].transpose(-3, -2).flatten(-2)


@dataclass(frozen=True, eq=False)
class AttentionOutput(BaseLeak):
    """What layer `layer`'s attention (from 1) adds to the residual stream, (n, d)."""

    values: Tensor
    layer: int
    kind: ClassVar[str] = "attention"


@dataclass(frozen=True, eq=False)
class Pooled(BaseLeak):
    """A sentence embedding (d,); `length` is the number of tokens where it is known.

    `width`: only its first so many numbers were kept, and divided by their length again if `unit`
    says so (None: found out from the length). `steps` (d,) are those that each number was rounded
    to, where each has its own, between the `ends` (2, d) of a range; `codebook` (blocks, codes,
    numbers) are the centroids of product quantisation, of which `values` are one in each block.
    """

    values: Tensor
    pooling: str = "mean"
    normalised: bool = True
    tokens: int | None = None
    width: int | None = None
    steps: Tensor | None = None
    ends: Tensor | None = None
    codebook: Tensor | None = None
    unit: bool | None = None
    kind: ClassVar[str] = "pooled"
    more: ClassVar[tuple[str, ...]] = ("mask", "encoder", "steps", "ends", "codebook")
    usual: ClassVar[dict[str, Any]] = {"width": None, "unit": None}
    rank: ClassVar[int] = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.normalised, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InputError("normalised must be true or false")
        self._check_rounding()

    def _check_rounding(self) -> None:
        """Refuse a description of how the numbers were rounded that does not fit them."""
        count, steps, ends, codebook = len(self.values), self.steps, self.ends, self.codebook
        if self.width not in (None, count):
            raise InputError(f"width is {self.width}, but the vector has {count} numbers")
        if steps is not None and codebook is not None:
            raise InputError("give steps or a codebook, not both")
        for name, tensor in (("steps", steps), ("ends", ends), ("codebook", codebook)):
            if tensor is not None and not bool(tensor.isfinite().all()):
                raise InputError(f"{name} must be finite")
        if steps is not None and steps.shape != (count,):
            raise InputError(f"{count} numbers need {count} steps, not {tuple(steps.shape)}")
        if steps is not None and bool((steps < 0).any()):
            raise InputError("steps must not be negative")
        if ends is not None and (steps is None or ends.shape != (2, count)):
            raise InputError(f"ends need steps and shape (2, {count}), got {tuple(ends.shape)}")
        if codebook is not None and (
            codebook.ndim != 3 or codebook.shape[0] * codebook.shape[2] != count
        ):
            raise InputError(
                "a codebook must have shape (blocks, codes, numbers), blocks × numbers being "
                f"{count}, not {tuple(codebook.shape)}"
            )

    @property
    def exposure(self) -> Exposure:
        again = self.unit
        if again is None:
            again = self.width is not None and abs(float(self.values.norm()) - 1) <= _CUT
        return Exposure(self.kind, 0, self.pooling, self.normalised, self.width, unit=again)

    @property
    def length(self) -> int | None:
        return self.tokens

    def rows(self, tensors: Mapping[str, Tensor]) -> Tensor:
        return tensors["values"].unsqueeze(-2)


@dataclass(frozen=True, eq=False)
class Logits(BaseLeak):
    """Logits (v,) of the token after a text.

    With `log_probabilities` they are log p, which is the logits less one number. A token whose
    logit did not leak is NaN. `length` is the number of tokens of the text where it is known.
    """

    values: Tensor
    log_probabilities: bool = False
    tokens: int | None = None
    kind: ClassVar[str] = "logits"

    def __post_init__(self) -> None:
        if isinstance(self.values, Tensor) and self.values.ndim == 1:  # pyright: ignore[reportUnnecessaryIsInstance]
            object.__setattr__(self, "values", self.values[None])
        super().__post_init__()

    @property
    def exposure(self) -> Exposure:
        return Exposure(self.kind, log_probabilities=self.log_probabilities)

    @property
    def length(self) -> int | None:
        return self.tokens

    @property
    def leaked(self) -> Tensor:
        """Which tokens (v,) have a logit."""
        return self.values.isfinite().all(0)

    def rows(self, tensors: Mapping[str, Tensor]) -> Tensor:
        return tensors["values"][..., self.leaked.to(tensors["values"].device)]


Leak = HiddenStates | KeyValues | MixedCache | AttentionMaps | AttentionOutput | Pooled | Logits
TYPES: dict[str, type[Leak]] = {
    kind.kind: kind
    for kind in (
        HiddenStates, KeyValues, MixedCache, AttentionMaps, AttentionOutput, Pooled, Logits,
    )
}  # fmt: skip


def load_leak(path: str | Path) -> Leak:
    """Read a leak that `save` wrote, or say in one line why it is none."""
    metadata, tensors = read_tensors(path, "a leak file")
    return own_leak(metadata, tensors, path)


def own_leak(metadata: dict[str, str], tensors: dict[str, Tensor], path: str | Path) -> Leak:
    """The leak that a file of Keyhole's own says it is."""
    if metadata.get("keyhole") != FORMAT or metadata.get("leak") not in TYPES:
        raise InputError(f"not a leak file written by Keyhole: {path}")
    try:
        known: dict[str, Any] = parse(metadata["about"])
        return TYPES[metadata["leak"]](**tensors, **known)
    except InputError as error:
        raise InputError(f"{error} in {path}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"not a leak file written by Keyhole: {path}: {error}") from error
