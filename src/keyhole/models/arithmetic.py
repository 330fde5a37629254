"""Arithmetic that is coarser than float32: how far it moves what a model exposes.

Servers of quantised weights round what goes into a matrix as well: llama.cpp (ggml) takes blocks of
32 numbers x, stores d = max |x| / 127 in float16 and x/d as whole numbers of eight bits, and
multiplies those. The weights are the same, dequantised, so the difference is rounding alone, which
adds up from layer to layer. On other texts it says how exact such a server's answers can be.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from keyhole.models.capture import hooks

_BLOCK = 32
_MOST = 127


def in_blocks(numbers: Tensor) -> Tensor:
    """Numbers (…, n) as 8-bit blocks hold them; what is no whole number of blocks stays."""
    if numbers.shape[-1] % _BLOCK:
        return numbers
    blocks = numbers.unflatten(-1, (-1, _BLOCK))
    step = blocks.abs().amax(-1, keepdim=True) / _MOST
    whole = (blocks / step.clamp(min=torch.finfo(step.dtype).tiny)).round()
    return (whole * step.half().to(step)).flatten(-2)


@contextmanager
def eight_bit_activations(model: nn.Module) -> Generator[None]:
    """Every linear map of the model takes its input in 8-bit blocks, for the length of a block."""

    def rounded(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return (in_blocks(inputs[0]), *inputs[1:])

    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    with hooks(*((module.register_forward_pre_hook, rounded) for module in linear)):
        yield
