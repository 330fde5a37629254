"""A leak made on purpose: what a model would give away for a text, in the state it leaks in.

Leaks in practice are not float32: caches are kept in bfloat16 or in 8 bits with a scale for each
token and head, an endpoint adds noise. `leak_of` runs the model and takes one exposure of a text;
`degrade` rounds it, and adds noise, as they would.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from keyhole.data import opening
from keyhole.errors import InputError
from keyhole.models.anatomy import anatomy
from keyhole.models.capture import Exposure, capture
from keyhole.models.loading import identity
from keyhole.recover.leaks import PRECISIONS, TYPES, Leak

LONGEST = 512  # tokens of a text that a leak is made of


def leak_of(
    model: nn.Module,
    tokenizer: Any,
    text: str | Sequence[int],
    exposure: Exposure | str,
    *,
    most: int = LONGEST,
) -> Leak:
    """One exposure of one text (or of its token ids), in float32, with the model's identity in it.

    A text is cut off after `most` tokens; ids are taken as they are.
    """
    exposure = Exposure.parse(exposure) if isinstance(exposure, str) else exposure
    parts = anatomy(model)
    exposure.block(parts)
    ids = text
    if isinstance(text, str):
        most = min(most, parts.longest)
        ids = tokenizer(opening(text, most), truncation=True, max_length=most)["input_ids"]
        if ids == tokenizer("")["input_ids"]:  # nothing, or the tokenizer's frame around nothing
            raise InputError(f"expected a text with a token in it, got {text[:40]!r}")
    if not ids:
        raise InputError("expected one token or more, got none")
    with torch.no_grad():
        given = capture(model, exposure, ids=torch.tensor([ids], device=parts.device))
    tensors = {name: tensor[0].cpu() for name, tensor in given.items()}
    about: dict[str, Any] = {"model": identity(model)}
    if exposure.kind == "pooled":
        about |= {"pooling": exposure.pooling, "normalised": exposure.normalised}
        about["tokens"] = len(ids)
    else:
        about["layer"] = exposure.layer
    return TYPES[exposure.kind](**tensors, **about)


def degrade(
    leak: Leak,
    precision: str = "float32",
    noise: float = 0.0,
    seed: int | torch.Generator = 0,
) -> Leak:
    """The leak with noise of `noise` times its standard deviation, then rounded.

    The precision is written into the leak, as a file's dtype would tell; the noise is not.
    """
    if precision not in PRECISIONS:
        raise InputError(f"expected a precision among {', '.join(PRECISIONS)}, got {precision}")
    if not 0.0 <= noise < float("inf"):
        raise InputError(f"expected noise of 0 or more, got {noise}")
    stream = seed if isinstance(seed, torch.Generator) else torch.Generator().manual_seed(seed)
    changed: dict[str, Tensor] = {}
    for name, tensor in leak.tensors.items():
        if noise:
            spread = tensor[tensor.isfinite()].std()
            tensor = tensor + noise * spread * torch.randn(tensor.shape, generator=stream)
        changed[name] = _ROUNDINGS[precision](tensor)
    return replace(leak, **changed, precision=precision)


def _as(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor.to(dtype).float()


def _steps(most: int) -> Callable[[Tensor], Tensor]:
    """A whole number of steps from −most to most, with one step for each row."""

    def rounded(tensor: Tensor) -> Tensor:
        step = tensor.abs().amax(-1, keepdim=True).clamp(min=1e-30) / most
        return (tensor / step).round() * step

    return rounded


_ROUNDINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "float32": _as(torch.float32),
    "bfloat16": _as(torch.bfloat16),
    "float16": _as(torch.float16),
    "int8": _steps(127),
    "int4": _steps(7),
}
