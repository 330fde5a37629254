"""What the first two attentions receive: rows that a gradient may or may not be made of.

The first one's input for token v at position p is a norm of the sum of two embeddings,

    x(v, p) = (ŵ_v + û_p) / s(v, p) + b,     s(v, p)² = |w̃_v + ũ_p|² / e + ε,

with w̃ and ũ the embeddings of token and position (less their means, for a LayerNorm), ŵ and û the
same after the norm's weights (and ALBERT's map), and b its bias. So the inputs of all tokens at all
positions follow from two small tables, without running the model. Rotary models have no û.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from keyhole.core.errors import InputError
from keyhole.models.anatomy import Anatomy
from keyhole.models.capture import Exposure, capture
from keyhole.recover.attack import Target


@dataclass(frozen=True, eq=False)
class FirstInputs:
    """Tables in float64: `words` (v, d), `places` (n, d) or None, `offset` (d,).

    `word_lengths` (v,) and `place_lengths` (n,) are |w̃|² and |ũ|², `products` (v, n) are w̃·ũ, all
    divided by the size e of an embedding.
    """

    words: Tensor
    places: Tensor | None
    offset: Tensor
    word_lengths: Tensor
    place_lengths: Tensor
    products: Tensor
    epsilon: float

    @property
    def positions(self) -> int:
        return self.products.shape[1]

    def scales(self, tokens: Tensor, place: int) -> Tensor:
        """s(v, p) of some tokens at one position."""
        square = self.word_lengths[tokens] + self.place_lengths[place]
        return (square + 2 * self.products[tokens, place] + self.epsilon).sqrt()

    def at(self, tokens: Tensor, place: int) -> Tensor:
        """x(v, p) (c, d) of some tokens at one position."""
        rows = self.words[tokens]
        if self.places is not None:
            rows = rows + self.places[place]
        return rows / self.scales(tokens, place)[:, None] + self.offset


def first_inputs(parts: Anatomy, positions: int) -> FirstInputs:
    """The tables of a model, for texts of up to so many tokens."""
    norm, places = _first_norm(parts), _positions(parts, positions)
    words = parts.table.double()
    centred = isinstance(norm, nn.LayerNorm)
    if centred:
        words = words - words.mean(-1, keepdim=True)
        places = places - places.mean(-1, keepdim=True)
    size = words.shape[1]
    weight = cast("Any", norm).weight.detach().double()
    bias = getattr(norm, "bias", None)
    offset = torch.zeros_like(weight) if bias is None else bias.detach().double()
    made, put = words * weight, places * weight
    onward = getattr(cast("Any", parts.base), "encoder", None)
    onward = getattr(onward, "embedding_hidden_mapping_in", None)
    if onward is not None:  # ALBERT widens its embeddings after their norm
        wider = onward.weight.detach().double().mT
        made, put = made @ wider, put @ wider
        offset = offset @ wider + onward.bias.detach().double()
    epsilon = getattr(norm, "eps", None) or getattr(norm, "variance_epsilon", 0.0)
    return FirstInputs(
        made, put if _absolute(parts) else None, offset, words.square().sum(-1) / size,
        places.square().sum(-1) / size, words @ places.mT / size, float(epsilon),
    )  # fmt: skip


def second_inputs(target: Target, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    """What the second attention receives for texts (b, n)."""
    with torch.no_grad():
        states = capture(target.model, Exposure("hidden", 1), ids=ids, mask=mask)["values"]
        return normed(target.parts, states)


def normed(parts: Anatomy, states: Tensor) -> Tensor:
    """States after the first block as the second attention takes them."""
    norm = parts.opening_norm(2)
    return states if norm is None else norm(states)


def _first_norm(parts: Anatomy) -> nn.Module:
    if parts.first_norm is not None:
        return parts.first_norm
    try:
        return parts.base.get_submodule("embeddings.LayerNorm")
    except AttributeError as error:
        raise InputError(
            f"expected a model whose embeddings end in a LayerNorm, got {parts.family}"
        ) from error


def _absolute(parts: Anatomy) -> bool:
    """Does the model add an embedding of the position?"""
    return not parts.rotary


def position_table(parts: Anatomy) -> tuple[nn.Embedding, int] | None:
    """The embeddings of positions and the number of the first one; None where there are none."""
    base = cast("Any", parts.base)
    if not _absolute(parts):
        return None
    if parts.family == "gpt2":
        return base.wpe, 0
    table = base.embeddings.position_embeddings
    # RoBERTa counts from behind the token that pads.
    return table, int(base.embeddings.padding_idx) + 1 if parts.family == "roberta" else 0


def _positions(parts: Anatomy, count: int) -> Tensor:
    """What is added to the embedding of a token at each position, (n, e)."""
    known = position_table(parts)
    if known is None:
        return torch.zeros(1, parts.table.shape[1], dtype=torch.float64, device=parts.device)
    table, first = known
    count = min(count, parts.longest)
    places = table.weight.detach()[first : first + count].double()
    inside = getattr(cast("Any", parts.base), "embeddings", None)
    types = getattr(inside, "token_type_embeddings", None)
    return places if types is None else places + types.weight.detach()[0].double()
