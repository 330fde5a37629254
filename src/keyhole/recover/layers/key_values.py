"""Text from leaked keys and values, of a decoder's KV cache or of an encoder.

Keys and values are rows of their positions, as hidden states are, and rounding and noise are even
in them: so they are read as they are. A decoder's are read left to right, their rotation undone
(decoder.py), an encoder's from a linear map back to its embeddings (encoder.py).

The hidden states below follow too, where they are wanted (secrets.py). `K = x W_K + b_K` and
`V = x W_V + b_V`, with `x` the input of the layer's attention (normalised first in a decoder), so
with as many numbers in a row as in `x` the stacked least squares give it back:

    x = argmin ‖x [W_K W_V] − ([K V] − [b_K b_V])‖
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from keyhole.core import Status, Unsuccessful
from keyhole.core.numerics import least_squares
from keyhole.recover.attack import Attack, Proposal, Target
from keyhole.recover.layers.decoder import DecoderStates
from keyhole.recover.layers.encoder import EncoderStates
from keyhole.recover.leaks import KeyValues, Leak


@dataclass(frozen=True)
class CachedKeys:
    """Keys and values as the rows that they are: by `decoder` left to right, or by `encoder`."""

    decoder: Attack = field(default_factory=DecoderStates)
    encoder: Attack = field(default_factory=EncoderStates)

    def __call__(self, target: Target, leaks: Sequence[Leak]) -> Iterator[tuple[int, Proposal]]:
        if not all(isinstance(leak, KeyValues) for leak in leaks):
            raise Unsuccessful(Status.NOT_APPLICABLE, "this attack reads keys and values")
        yield from (self.decoder if target.parts.causal else self.encoder)(target, leaks)


def attention_inputs(target: Target, leak: KeyValues, number: int) -> Tensor:
    """`x` (n, d), what block `number`'s attention received; NaN where nothing leaked."""
    maps = target.parts.attention(number).apart[1:]
    weight = torch.cat([each.weight for each in maps]).double()  # [W_K W_V]ᵀ
    biases = [each.weight.new_zeros(len(each.weight)) if each.bias is None else each.bias
              for each in maps]  # fmt: skip
    bias = torch.cat(biases).double()
    rows = torch.cat([part.transpose(0, 1).flatten(1) for part in (leak.keys, leak.values)], -1)
    rows = rows.to(weight) - bias
    seen = rows.isfinite().all(-1)
    inputs = torch.full((len(rows), weight.shape[1]), torch.nan, dtype=weight.dtype)
    inputs = inputs.to(weight.device)
    inputs[seen] = least_squares(weight, rows[seen].mT).mT
    return inputs.float()
