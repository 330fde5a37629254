"""Text from leaked keys and values, of a decoder's KV cache or of an encoder.

Keys and values are `K = x W_K + b_K`, `V = x W_V + b_V`, with `x` the input of the layer's
attention (normalised first in a decoder). With as many numbers in a row as in `x`, the stacked
least squares

    x = argmin ‖x [W_K W_V] − ([K V] − [b_K b_V])‖

gives `x` back. What follows depends on the layer:

- The first layer is closed form: `x` depends on one token and its position, so it is looked up
  among all tokens at that position, the nearest few compared again as keys and values.
- With rotary positions and grouped queries a row holds fewer numbers than `x` (SmolLM2: 384 against
  576), so there is no `x` to solve for; but the rotation can be undone and what remains of the
  first layer does not depend on the position: one table of the vocabulary's keys and values.
- Deeper layers of an encoder: `x` is the hidden state of the layer below, but rounding and noise
  are even in keys and values and not in `x`; so the attack on hidden states reads them as they are.
- Deeper layers of a decoder: left to right, comparing keys and values themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from keyhole.core import Status, Unsuccessful
from keyhole.core.numerics import least_squares
from keyhole.models.capture import Exposure, capture
from keyhole.recover.attack import Attack, Proposal, Target
from keyhole.recover.layers.decoder import DecoderStates
from keyhole.recover.layers.encoder import EncoderStates
from keyhole.recover.leaks import KeyValues, Leak

_SHORTLIST = 8
_HELD = 2**25  # numbers of the table of tokens × positions that are held at once


@dataclass(frozen=True)
class CachedKeys:
    """Closed form at the first layer; `decoder` and `encoder` search the deeper ones."""

    decoder: Attack = field(default_factory=DecoderStates)
    encoder: Attack = field(default_factory=EncoderStates)

    def __call__(self, target: Target, leaks: Sequence[Leak]) -> Iterator[tuple[int, Proposal]]:
        texts = [leak for leak in leaks if isinstance(leak, KeyValues)]
        if len(texts) < len(leaks):
            raise Unsuccessful(Status.NOT_APPLICABLE, "this attack reads keys and values")
        parts = target.parts
        number = texts[0].exposure.block(parts)
        first = number == 1
        seen = parts.attentions[0] if parts.attentions else None
        closed = first and seen is not None and seen.projections is not None
        if parts.causal and (parts.rotary or not closed):
            yield from self.decoder(target, leaks)
            return
        if not closed:
            yield from self.encoder(target, leaks)
            return
        yield from _look_up(target, [attention_inputs(target, leak, number) for leak in texts])


def attention_inputs(target: Target, leak: KeyValues, number: int) -> Tensor:
    """`x` (n, d), what block `number`'s attention received; NaN where nothing leaked."""
    weight, bias = _stacked(target, number)
    rows = torch.cat([part.transpose(0, 1).flatten(1) for part in (leak.keys, leak.values)], -1)
    rows = rows.to(weight) - bias
    seen = rows.isfinite().all(-1)
    inputs = torch.full((len(rows), weight.shape[1]), torch.nan, dtype=weight.dtype)
    inputs = inputs.to(weight.device)
    inputs[seen] = least_squares(weight, rows[seen].mT).mT
    return inputs.float()


def _stacked(target: Target, number: int) -> tuple[Tensor, Tensor]:
    """`[W_K W_V]ᵀ` (2·heads·size, d) and `[b_K b_V]` in float64."""
    maps = target.parts.attention(number).apart[1:]
    weight = torch.cat([each.weight for each in maps]).double()
    biases = [each.weight.new_zeros(len(each.weight)) if each.bias is None else each.bias
              for each in maps]  # fmt: skip
    return weight, torch.cat(biases).double()


@torch.no_grad()
def _look_up(target: Target, inputs: Sequence[Tensor]) -> Iterator[tuple[int, Proposal]]:
    """The token at each position whose own input of the first attention is nearest."""
    max_length = max(len(x) for x in inputs)
    padded = nn.utils.rnn.pad_sequence(list(inputs), batch_first=True).nan_to_num(0.0)

    def misfit(tokens: Tensor) -> Tensor:
        table = _first_inputs(target, tokens[:, None].expand(-1, max_length))
        return -2 * torch.einsum("bnd,cnd->bnc", padded, table) + table.square().sum(-1).mT

    batch_size = max(1, _HELD // (max_length * padded.shape[-1]))
    best = _compare(target, padded, target.nearest_tokens(misfit, _SHORTLIST, batch_size))
    for number, x in enumerate(inputs):
        yield number, Proposal(best[number, : len(x)].tolist(), fitting=target.vocabulary)


def _first_inputs(target: Target, ids: Tensor) -> Tensor:
    """What the first attention receives for ids (c, n)."""
    given = capture(target.model, Exposure("hidden", 0), ids=ids)["values"]
    norm = target.parts.first_norm
    return given if norm is None else norm(given.to(target.parts.tokens.weight.dtype)).to(given)


def _compare(target: Target, inputs: Tensor, names: Tensor) -> Tensor:
    """The nearest of the shortlisted tokens as keys and values: noise is even there, not in x."""
    weight = _stacked(target, 1)[0].to(inputs)
    given = [
        _first_inputs(target, names[..., rank].contiguous()) for rank in range(names.shape[-1])
    ]
    off = torch.stack(given, -2) - inputs.unsqueeze(-2)
    closest = (off @ weight.mT).square().sum(-1).argmin(-1, keepdim=True)
    return names.gather(-1, closest)[..., 0]
