"""What leaked, of one text: six frozen types, and the files they travel in.

A leak holds the leaked numbers as float32 and says what is known about them: the layer, the model,
how they were rounded, what noise they carry, which positions are padding. It has no field for the
text. A position that did not leak is a row of NaN.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from keyhole.core.errors import InputError
from keyhole.core.files import parse, read_tensors
from keyhole.models.capture import Exposure
from keyhole.recover.base_leak import FORMAT, BaseLeak
from keyhole.recover.cells import expect_cells

_UNIT = 0.01  # how far from 1 rounding may put the length of a normalised row
_CUT = 0.1  # … and that of what was cut off and normalised, in 4 bits


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
                f"expected rows of {self.width} numbers, the width that is stated, "
                f"got {self.values.shape[1]}"
            )
        if self.permuted and self.mask is not None and not bool(self.mask.all()):
            raise InputError(
                "expected permuted rows without padding, got a mask: leave out the rows of padding"
            )
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

    def rows(self, tensors: Mapping[str, Tensor]) -> Tensor:
        both = torch.cat([tensors["keys"], tensors["values"]], -1)
        return both.transpose(-3, -2).flatten(-2)


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
    beside: ClassVar[tuple[str, ...]] = ("mask", "steps", "ends", "codebook")
    usual: ClassVar[dict[str, Any]] = {"width": None, "unit": None}
    rank: ClassVar[int] = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.normalised, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InputError("expected normalised to be true or false, got another kind")
        expect_cells(self.values, self.width, self.steps, self.ends, self.codebook)

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
    """Logits (v,) of the token after a text, or (k, v): of the first k tokens after it.

    Each token after the text is the likeliest by the row before it. With `log_probabilities` each
    row is log p, which is the logits less one number. A token whose logit did not leak is NaN.
    `length` is the number of tokens of the text where it is known.
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
        steps, log_probabilities = len(self.values), self.log_probabilities
        return Exposure(self.kind, steps=steps, log_probabilities=log_probabilities)

    @property
    def length(self) -> int | None:
        return self.tokens

    @property
    def leaked(self) -> Tensor:
        """Which tokens (v,) have a logit in every row."""
        return self.values.isfinite().all(0)

    def rows(self, tensors: Mapping[str, Tensor]) -> Tensor:
        return tensors["values"][..., self.leaked.to(tensors["values"].device)]


Leak = HiddenStates | KeyValues | AttentionMaps | AttentionOutput | Pooled | Logits
TYPES: dict[str, type[Leak]] = {
    kind.kind: kind
    for kind in (HiddenStates, KeyValues, AttentionMaps, AttentionOutput, Pooled, Logits)
}


def save_leak(leak: Leak, path: str | Path) -> None:
    """Write a leak, to be handed from one machine to another."""
    leak.save(path)


def load_leak(path: str | Path) -> Leak:
    """Read a leak that `save` wrote, or say in one line why it is none."""
    metadata, tensors = read_tensors(path, "a leak file")
    return own_leak(metadata, tensors, path)


def own_leak(metadata: dict[str, str], tensors: dict[str, Tensor], path: str | Path) -> Leak:
    """The leak that a file of Keyhole's own says it is."""
    if metadata.get("keyhole") != FORMAT or metadata.get("leak") not in TYPES:
        raise InputError(f"expected a leak file written by Keyhole, got {path}")
    try:
        known: dict[str, Any] = parse(metadata["about"])
        return TYPES[metadata["leak"]](**tensors, **known)
    except InputError as error:
        raise InputError(f"{error} in {path}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"expected a leak file written by Keyhole, got {path}: {error}") from error
