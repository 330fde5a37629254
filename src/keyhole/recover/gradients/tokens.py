"""Which tokens are in a batch, and which of them may stand where: the test of the first span.

A token v at position p is in the batch only if x(v, p) lies in the span of the first attention's
gradient. All tokens are tried at all positions, along a few random directions of the span's
complement first, and along all of them where those leave it open. Embeddings of positions are added
to those of tokens, so the span of several texts holds other pairs as well: from x(a, p), x(a, q)
and x(b, p), nearly, x(b, q). places.py tells those apart.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from keyhole.recover.gradients.inputs import FirstInputs
from keyhole.recover.gradients.span import Span

_DIRECTIONS = 16  # random ones that nearly all tokens are told apart by
_SOME = 1000  # tokens whose inputs say how long one is; after a norm all are nearly as long
_WIDE = 4.0  # times the tolerance that those may err by


def tokens_in(inputs: FirstInputs, span: Span, allowed: Tensor | None = None) -> list[Tensor]:
    """The tokens (c,) whose input at each position lies in the span.

    Positions end where no token does; a model without embeddings of positions has only one.
    `allowed` (v,) says which tokens may be in the batch at all, where that is known.
    """
    directions = span.some_directions(_DIRECTIONS)
    words = inputs.words @ directions
    every = torch.arange(len(words), device=words.device)
    length = inputs.at(every[:_SOME], 0).norm(dim=-1).mean()
    tokens: list[Tensor] = []
    for place in range(inputs.positions):
        rows = words if inputs.places is None else words + inputs.places[place] @ directions
        scales = inputs.scales(every, place)[:, None]
        far = (rows / scales + inputs.offset @ directions).norm(dim=-1)
        near = far <= _WIDE * span.tolerance * length
        near = near if allowed is None else near & allowed
        here = near.nonzero()[:, 0]
        here = here[span.distance(inputs.at(here, place)) <= span.tolerance]
        if not len(here):
            break
        tokens.append(here)
    return tokens


def used_rows(gradient: Tensor) -> Tensor:
    """Which tokens (v,) have a row in the gradient of their table that is not zero."""
    return (gradient != 0).any(-1)


def all_tokens(tokens: Sequence[Tensor]) -> Tensor:
    """Those that may stand anywhere, each once, in order."""
    return torch.cat(list(tokens)).unique()
