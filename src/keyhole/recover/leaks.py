"""The leaks of one text: seven frozen types, and the files that hold them.

A leak holds the leaked numbers as float32, and what is known about them: the layer, the
model, the precision, the noise, and which positions are padding. It has no field for
the text. A position that did not leak is a row of NaN.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar, get_args

import torch
from torch import Tensor

from keyhole.core.errors import InputError, expect_among, expect_count, expect_number
from keyhole.core.files import parse, read_tensors, write_tensors
from keyhole.models.capture import Exposure

PRECISIONS = ("float32", "bfloat16", "float16", "int8", "int4", "binary")
FORMAT = "1"
# by which rounding may change the length of a row of unit length
_UNIT_TOLERANCE = 0.01
_COARSE_UNIT_TOLERANCE = 0.1  # the same for a vector that is rounded to 4 bits
_LEVELS_OF_4_BITS = 16


def rows_of(tensors: Mapping[str, Tensor]) -> Tensor:
    """Return rows (…, positions, numbers); those of keys and values hold all heads side by side."""
    if "keys" not in tensors:
        return tensors["values"]
    both = torch.cat([tensors["keys"], tensors["values"]], -1)
    return both.transpose(-3, -2).flatten(-2)


# The types of the fields that callers and files may set. None: a tensor or nothing.
_FIELD_TYPES: dict[str, Any] = {
    "model": str | None,
    "precision": str | None,
    "noise": float | int | None,
    "layer": int,
    "pooling": str,
    "normalised": bool | None,
    "permuted": bool,
    "width": int | None,
    "tokens": int | None,
    "log_probabilities": bool,
    "steps": None,
    "ends": None,
    "codebook": None,
    "unit": bool | None,
    "block": int | None,
}
AnyLeak = TypeVar("AnyLeak", bound="BaseLeak")


@dataclass(frozen=True, eq=False, kw_only=True)
class BaseLeak:
    """The fields, checks and files that the seven types share.

    All fields of this class are optional. `model` is the identity of the model that
    leaked. `precision` is how the numbers were rounded: one of PRECISIONS ("binary" for
    pooled embeddings only), or None to infer it. `noise` is the standard deviation of
    added noise, None if unknown. `mask` (n,) is 1 on text and 0 on padding. `encoder`
    (m, e) are the states of an encoder: the leak and the text are then those of the
    decoder that attends to them.

    `tensor_names` are the leaked tensors, and `known_tensors` those that a file stores
    with them.
    """

    model: str | None = None
    precision: str | None = None
    noise: float | None = None
    mask: Tensor | None = None
    encoder: Tensor | None = None
    kind: ClassVar[str]
    tensor_names: ClassVar[tuple[str, ...]] = ("values",)
    known_tensors: ClassVar[tuple[str, ...]] = ("mask", "encoder")
    rank: ClassVar[int] = 2

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            kind = _FIELD_TYPES.get(field.name, object)
            if not isinstance(value, Tensor | kind):
                kind = getattr(kind, "__name__", kind)
                raise InputError(f"expected {field.name} as {kind}, got {value!r:.40}")
        expect_number("noise", self.noise, least=0)
        known = PRECISIONS if self.kind == "pooled" else PRECISIONS[:-1]
        if self.precision is not None:
            expect_among("precision", self.precision, known)
        for name in self.tensor_names:
            self._take_tensor(name)
        if self.length is not None and self.length < 1:
            raise InputError(f"a leak must have at least one token: got {self.length}")
        if self.mask is not None:
            if self.mask.is_complex() or not self.mask.isfinite().all():
                raise InputError("the mask must hold only 0 and 1")
            mask = self.mask.reshape(-1).to(torch.long)
            if self.length is not None and len(mask) != self.length:
                raise InputError(
                    f"the mask must have {self.length} positions, not {len(mask)}"
                )
            object.__setattr__(self, "mask", mask)
        states = self.encoder
        if states is not None and not (states.ndim == 2 and states.isfinite().all()):
            raise InputError(
                f"expected encoder states (m, e), got shape {tuple(states.shape)}"
            )

    def _take_tensor(self, name: str) -> None:
        """Check one leaked tensor, and keep it as float32 without a batch axis."""
        tensor = getattr(self, name)
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            raise InputError(
                f"expected {name} as a floating-point tensor, got another kind"
            )
        # torch has few operations for 8-bit floats, not even isinf
        if tensor.dtype.itemsize == 1:
            tensor = tensor.to(torch.float32)
        if tensor.ndim == self.rank + 1 and tensor.shape[0] == 1:
            tensor = tensor[0]
        if tensor.ndim != self.rank or 0 in tensor.shape:
            raise InputError(
                f"expected {name} of one text with {self.rank} axes, got {tuple(tensor.shape)}"
            )
        if tensor.isinf().any():
            raise InputError(f"{name} must be finite, or NaN where nothing leaked")
        if tensor.isnan().all():
            raise InputError(f"{name} must hold numbers, not only NaN")
        if self.precision is None and tensor.dtype in (torch.bfloat16, torch.float16):
            object.__setattr__(
                self, "precision", str(tensor.dtype).removeprefix("torch.")
            )
        object.__setattr__(self, name, tensor.detach().to(torch.float32))

    @property
    def exposure(self) -> Exposure:
        return Exposure(self.kind, int(getattr(self, "layer", 0)))

    @property
    def in_no_order(self) -> bool:
        """Whether the rows are in a random order."""
        return bool(getattr(self, "permuted", False))

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in self.tensor_names}

    @property
    def length(self) -> int | None:
        """The number of positions, padding included; None if it did not leak."""
        return getattr(self, self.tensor_names[0]).shape[-2]

    def rows(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return the tensors as rows (…, positions, numbers) of what leaked at each position."""
        return rows_of(tensors)

    def with_noise(self: AnyLeak, noise: float) -> AnyLeak:
        """Return the leak with a stated noise of `noise` times its standard deviation."""
        expect_number("noise", noise, least=0)
        numbers = torch.cat([tensor.flatten() for tensor in self.tensors.values()])
        clean_std = float(numbers[numbers.isfinite()].std()) / (1 + noise**2) ** 0.5
        return replace(self, noise=noise * clean_std)

    def cut(self: AnyLeak, length: int) -> AnyLeak:
        """Return the leak of the first `length` positions."""
        if self.length is None or length == self.length:
            return self
        short = {name: tensor[..., :length, :] for name, tensor in self.tensors.items()}
        if self.kind == "maps":  # each position has a row and a column
            short = {name: tensor[..., :length] for name, tensor in short.items()}
        return replace(
            self, **short, mask=None if self.mask is None else self.mask[:length]
        )

    @property
    def facts(self) -> dict[str, Any]:
        """All that is known about the leak except tensors."""
        tensors = {*self.tensor_names, *self.known_tensors}
        names = [field.name for field in fields(self) if field.name not in tensors]
        return {name: getattr(self, name) for name in names}

    @property
    def stored(self) -> dict[str, Tensor]:
        """All tensors of the leak's file."""
        known = {name: getattr(self, name) for name in self.known_tensors}
        return {
            **self.tensors,
            **{name: each for name, each in known.items() if each is not None},
        }

    @property
    def digest(self) -> str:
        """Sixteen hexadecimal digits of the contents; the name of the file does not matter."""
        hashed = hashlib.sha256(
            json.dumps([self.kind, self.facts], sort_keys=True).encode()
        )
        for name, tensor in self.stored.items():
            hashed.update(f"{name} {tuple(tensor.shape)}".encode())
            hashed.update(tensor.cpu().contiguous().numpy().tobytes())
        return hashed.hexdigest()[:16]

    def save(self, path: str | Path) -> None:
        """Write the leak as .safetensors, atomically."""
        about = {"keyhole": FORMAT, "leak": self.kind, "about": json.dumps(self.facts)}
        write_tensors(path, self.stored, about)


@dataclass(frozen=True, eq=False)
class HiddenStates(BaseLeak):
    """Hidden states (n, d) after block `layer`; layer 0 is the embeddings.

    `width` says that only the first `width` numbers of each row leaked. `normalised`
    says that each row was then divided by its length (None: inferred from the lengths).
    `permuted` says that the rows are in a random order. A row of NaN did not leak; of
    permuted rows, it only adds to the number of tokens.
    """

    values: Tensor
    layer: int
    normalised: bool | None = None
    permuted: bool = False
    width: int | None = None
    kind: ClassVar[str] = "hidden"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.width not in (None, self.values.shape[1]):
            raise InputError(
                f"width is {self.width}, but the rows have {self.values.shape[1]} numbers"
            )
        if self.permuted and self.mask is not None and not self.mask.all():
            raise InputError(
                "permuted rows take no mask: leave out the rows of padding"
            )
        if self.normalised is None:
            lengths = self.values[self.values.isfinite().all(-1)].norm(dim=-1)
            unit = len(lengths) > 0 and bool(
                ((lengths - 1).abs() <= _UNIT_TOLERANCE).all()
            )
            object.__setattr__(self, "normalised", unit)

    @property
    def exposure(self) -> Exposure:
        return Exposure(
            self.kind, self.layer, width=self.width, unit=bool(self.normalised)
        )

    def ordered(self, order: Tensor) -> HiddenStates:
        """Return the leak with row `order[p]` at position p, as rows whose order is known."""
        return replace(self, values=self.values[order.cpu()], permuted=False)


@dataclass(frozen=True, eq=False)
class KeyValues(BaseLeak):
    """Keys and values (heads, n, k) of one layer, as a KV cache holds them.

    The layers of a causal model count from 0, as in its cache; those of an encoder
    count from 1, as its attention maps do.
    """

    keys: Tensor
    values: Tensor
    layer: int
    kind: ClassVar[str] = "kv"
    tensor_names: ClassVar[tuple[str, ...]] = ("keys", "values")
    rank: ClassVar[int] = 3


@dataclass(frozen=True, eq=False)
class MixedCache(BaseLeak):
    """Keys and values (heads, n, k) of a causal model's layer (from 1), mixed by a secret.

    Within each `block` of positions the rows are mixed with each other (None: the size
    is inferred). `known` are the first token ids of the text, where they are known.
    Rows may be added to fill the last block, so the length of the text does not leak.
    """

    keys: Tensor
    values: Tensor
    layer: int = 1
    block: int | None = None
    known: Sequence[int] | None = None
    kind: ClassVar[str] = "mixed"
    tensor_names: ClassVar[tuple[str, ...]] = ("keys", "values")
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
    """The vectors (n, d) that the attention of `layer` (from 1) adds to the residual stream."""

    values: Tensor
    layer: int
    kind: ClassVar[str] = "attention"


@dataclass(frozen=True, eq=False)
class Pooled(BaseLeak):
    """A sentence embedding (d,); `tokens` is the length of the text, if it is known.

    `width` says that only the first `width` numbers were kept, and `unit` that they
    were then divided by their length again (None: inferred from the length). Scalar
    quantisation rounds to a multiple of `steps` (d,), one for each number, between the
    `ends` (2, d) of a range. In product quantisation `values` has, in each block, one
    centroid of `codebook` (blocks, codes, numbers).
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
    known_tensors: ClassVar[tuple[str, ...]] = (
        "mask",
        "encoder",
        "steps",
        "ends",
        "codebook",
    )
    rank: ClassVar[int] = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.normalised, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InputError("normalised must be true or false")
        if not self.values.isfinite().all():
            raise InputError("a pooled vector must be finite: it holds NaN or infinity")
        self._check_quantisation()

    def _check_quantisation(self) -> None:
        """Refuse a width, steps, ends or a codebook that do not fit the vector."""
        count = len(self.values)
        steps = self.steps
        ends = self.ends
        codebook = self.codebook
        if self.width not in (None, count):
            raise InputError(
                f"width is {self.width}, but the vector has {count} numbers"
            )
        if steps is not None and codebook is not None:
            raise InputError("give steps or a codebook, not both")
        for name, tensor in (("steps", steps), ("ends", ends), ("codebook", codebook)):
            if tensor is not None and not tensor.isfinite().all():
                raise InputError(f"{name} must be finite")
        if steps is not None and steps.shape != (count,):
            raise InputError(
                f"{count} numbers need {count} steps, not {tuple(steps.shape)}"
            )
        if steps is not None and (steps < 0).any():
            raise InputError("steps must not be negative")
        if ends is not None and (steps is None or ends.shape != (2, count)):
            raise InputError(
                f"ends need steps and shape (2, {count}), got {tuple(ends.shape)}"
            )
        if codebook is not None and (
            codebook.ndim != 3 or codebook.shape[0] * codebook.shape[2] != count
        ):
            raise InputError(
                "a codebook must have shape (blocks, codes, numbers), blocks × numbers being "
                f"{count}, not {tuple(codebook.shape)}"
            )

    @property
    def exposure(self) -> Exposure:
        unit = self.unit
        if unit is None:
            length = float(self.values.norm())
            coarse = (
                self.codebook is not None
                or len(self.values.unique()) <= _LEVELS_OF_4_BITS
            )
            tolerance = _COARSE_UNIT_TOLERANCE if coarse else _UNIT_TOLERANCE
            unit = self.width is not None and abs(length - 1) <= tolerance
        return Exposure(
            self.kind, 0, self.pooling, self.normalised, self.width, unit=unit
        )

    @property
    def length(self) -> int | None:
        return self.tokens

    def rows(self, tensors: Mapping[str, Tensor]) -> Tensor:
        return tensors["values"].unsqueeze(-2)


@dataclass(frozen=True, eq=False)
class Logits(BaseLeak):
    """Logits (v,) of the token that follows a text; NaN for tokens whose logit did not leak.

    With `log_probabilities` they are log p, the logits less a constant. `tokens` is the
    length of the text, if it is known.
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
        """A mask (v,) of the tokens whose logit leaked."""
        return self.values.isfinite().all(0)

    def rows(self, tensors: Mapping[str, Tensor]) -> Tensor:
        return tensors["values"][..., self.leaked.to(tensors["values"].device)]


Leak = (
    HiddenStates
    | KeyValues
    | MixedCache
    | AttentionMaps
    | AttentionOutput
    | Pooled
    | Logits
)
TYPES: dict[str, type[Leak]] = {kind.kind: kind for kind in get_args(Leak)}


def load_leak(path: str | Path) -> Leak:
    """Read a leak that `save` wrote; raise InputError for any other file."""
    metadata, tensors = read_tensors(path, "a leak file")
    return own_leak(metadata, tensors, path)


def own_leak(
    metadata: dict[str, str],
    tensors: dict[str, Tensor],
    path: str | Path,
) -> Leak:
    """Return the leak in a file of Keyhole's own format, by its metadata and its tensors."""
    if metadata.get("keyhole") != FORMAT or metadata.get("leak") not in TYPES:
        raise InputError(f"not a leak file written by Keyhole: {path}")
    try:
        known: dict[str, Any] = parse(metadata["about"])
        return TYPES[metadata["leak"]](**tensors, **known)
    except InputError as error:
        raise InputError(f"{error} in {path}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"not a leak file written by Keyhole: {path}: {error}"
        ) from error
