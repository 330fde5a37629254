"""The span of a layer's inputs, from the gradient of its weights (DAGER, arXiv 2405.15586).

`span_of` takes the gradient of a layer's weights and returns the span of what went into
the layer; `tokens_in` returns the tokens whose inputs lie in it, for each position.
text_search.py makes texts of them.

For Y = X Wᵀ the gradient of W is (∂L/∂Y)ᵀ X = Σ_i δ_i x_iᵀ: its rows are linear
combinations of the inputs x_i. If there are fewer inputs than the layer is wide, and
the δ_i are linearly independent, the row space is the span of the inputs: inputs lie in
it, and other vectors almost surely do not. Departure: the gradients of the query, key
and value maps, which all receive the same x_i, are stacked, because the query of a
first token gets no gradient.

Numbers are rounded, so the span is that of the singular vectors above a threshold: the
largest singular value of the errors alone. For independent errors of sizes σ_ij that is
nearly the length of the largest row of σ plus that of the largest column (Bandeira and
van Handel, 2016).

The first attention's input for token v at position p is a norm of the sum of two
embeddings,

    x(v, p) = (ŵ_v + û_p) / s(v, p) + b,     s(v, p)² = |w̃_v + ũ_p|² / e + ε,

with w̃ and ũ the embeddings of token and position (less their means, for a LayerNorm),
ŵ and û the same after the norm's weights (and ALBERT's map), and b its bias. So the
inputs of all tokens at all positions follow from two small tables, without running the
model on each. Rotary models have no û.

Token v is at position p of the batch only if x(v, p) lies in the span of the first
attention's gradient. All tokens are tested at all positions, first along a few random
directions of the span's complement, then, if they pass, along all of them. Because x(v,
p) is nearly a sum, the span of several texts also admits other pairs: with x(a, p),
x(a, q) and x(b, p) in it, x(b, q) nearly is too. `Places` in text_search.py excludes
those.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from keyhole.core import not_applicable
from keyhole.core.float64 import normal
from keyhole.core.tensors import row_numbers, seeded, squared_norms
from keyhole.models.anatomy import Anatomy, gain_and_bias
from keyhole.models.capture import Exposure, capture

_FLOAT32 = 3e-7  # of the largest singular value: the error of sums in float32
_ABOVE = 1.1  # of the errors' largest singular value: the threshold
_LEFT = 3  # least dimension of the complement for a useful test
_BLURRED = 0.4  # a tolerance that many other inputs meet as well
_SHARP = 1e-3  # a tolerance that no other input meets by chance
_TIGHT = 1e-4  # of a row's length: its largest distance from the span in float32
_DIRECTIONS = 16  # random directions, along which nearly all wrong tokens fail
# tokens whose inputs give the usual length; after a norm all are nearly as long
_SOME = 1000
_SOME_PLACES = 8  # positions at which the tables are compared with the model
_WIDE = 4.0  # the tolerance along random directions, in units of the real one


@dataclass(frozen=True, eq=False)
class Span:
    """The rank of the inputs' span, and directions `rest` (d, k) orthogonal to it.

    `tolerance` is how far from the span an input may seem to be, relative to its
    length, and `left` is the number of dimensions by which the span is smaller than it
    could be. `weighted` (d, k) are all directions, each scaled by the share of errors
    in what the gradient has along it: an input of the batch is short along these,
    whatever the noise (Capon, 1969).
    """

    rank: int
    rest: Tensor
    tolerance: float
    left: int
    weighted: Tensor

    @property
    def soft(self) -> Span:
        """The span with distances along weighted directions, if errors blur it."""
        if self.blurred and self.complete:
            return replace(self, rest=self.weighted)
        return self

    @property
    def complete(self) -> bool:
        """Whether all inputs lie in it: unknown if it is as wide as the layer or the gradient."""
        return self.left >= _LEFT

    @property
    def excludes(self) -> bool:
        """Whether anything at all lies outside the span."""
        return self.rest.shape[1] >= _LEFT

    @property
    def blurred(self) -> bool:
        """Whether errors hide which inputs lie in the span."""
        return self.rank == 0 or self.tolerance >= _BLURRED

    @property
    def sharp(self) -> bool:
        """Whether an input in the span is as good as proven, despite rounding and noise."""
        return self.complete and self.tolerance <= _SHARP

    def distance(self, rows: Tensor) -> Tensor:
        """Return how far rows (…, d) are from the span, relative to their lengths."""
        rows = rows.to(self.rest)
        return (rows @ self.rest).norm(dim=-1) / rows.norm(dim=-1)

    def some_directions(self, count: int) -> Tensor:
        """Return random directions (d, k) of the complement that keep distances on average."""
        stream = seeded(0)
        count = min(count, self.rest.shape[1])
        mixed = normal(stream, self.rest.shape[1], count)
        return self.rest @ mixed.to(self.rest) / count**0.5


def span_of(rows: Tensor, variance: Tensor) -> Span:
    """Return the span of a gradient's rows (m, d), whose errors have a `variance` (m, d)."""
    _, values, directions = torch.linalg.svd(
        rows, full_matrices=rows.shape[0] < rows.shape[1]
    )
    noise = float(variance.sum(0).max().sqrt() + variance.sum(1).max().sqrt())
    largest = float(values[0])
    least = max(_ABOVE * noise, _FLOAT32 * largest)
    rank = int((values > least).sum())
    last = float(values[rank - 1]) if rank else largest
    # Wedin (1972): such errors rotate the span by their ratio to its smallest singular
    # value.
    tolerance = max(_TIGHT, min(0.5, noise / max(last, 1e-30)))
    left = min(rows.shape) - rank
    alone = torch.ones(len(directions)).to(values)
    alone[: len(values)] = (variance.mean() * len(rows)).sqrt() / values.clamp(
        min=1e-30
    )
    return Span(rank, directions[rank:].mT, tolerance, left, directions.mT * alone)


def joined(spans: Sequence[tuple[Span, Tensor]]) -> Span:
    """Combine the spans of several gradients, each seen through a map A (r, d) of the inputs.

    Spans of lower rank do not see all inputs, as a first token's query gets no
    gradient.
    """
    rank = max(each.rank for each, _ in spans)
    spans = [(each, through) for each, through in spans if each.rank == rank]
    rest = torch.cat(
        [each.rest.mT @ through.to(each.rest) for each, through in spans]
    ).mT
    left = min(each.left for each, _ in spans)
    if rest.shape[1]:
        directions, values, _ = torch.linalg.svd(rest, full_matrices=False)
        rest = directions[:, values > _SHARP * values[0]]
    return Span(rank, rest, max(each.tolerance for each, _ in spans), left, rest)


class FirstInputs(NamedTuple):
    """Tables of x(v, p) in float64: `words` (v, d), `places` (n, d) or None, `offset` (d,).

    `word_lengths` (v,) and `place_lengths` (n,) are |w̃|² and |ũ|², and `products` (v,
    n) are w̃·ũ, all divided by the size e of an embedding.
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
        """Return s(v, p) of tokens (c,) at one position."""
        square = self.word_lengths[tokens] + self.place_lengths[place]
        return (square + 2 * self.products[tokens, place] + self.epsilon).sqrt()

    def at(self, tokens: Tensor, place: int) -> Tensor:
        """Return x(v, p) (c, d) of tokens (c,) at one position."""
        rows = self.words[tokens]
        if self.places is not None:
            rows = rows + self.places[place]
        return rows / self.scales(tokens, place)[:, None] + self.offset


def first_inputs(parts: Anatomy, positions: int) -> FirstInputs:
    """Make the tables of a model, for texts of up to `positions` tokens."""
    other = not_applicable(
        f"the first attention of {parts.family} takes something else than a norm of embeddings"
    )
    norm = parts.opening_norm(1) or parts.closing_norm(0)
    places = _positions(parts, positions)
    if norm is None:  # ALBERT's
        norm = getattr(getattr(parts.base, "embeddings", None), "LayerNorm", None)
    if norm is None or parts.table.shape[1] != places.shape[1]:
        raise other
    words = parts.table.double()
    centred = isinstance(norm, nn.LayerNorm)
    if centred:
        words = words - words.mean(-1, keepdim=True)
        places = places - places.mean(-1, keepdim=True)
    size = words.shape[1]
    weight, bias = gain_and_bias(norm)
    offset = torch.zeros_like(weight) if bias is None else bias
    made = words * weight
    put = places * weight
    base = cast("Any", parts.base)
    onward = getattr(
        getattr(base, "encoder", None), "embedding_hidden_mapping_in", None
    )
    onward = onward or getattr(base, "embeddings_project", None)
    if onward is not None:  # ALBERT and ELECTRA widen their embeddings after their norm
        wider = onward.weight.detach().double().mT
        made = made @ wider
        put = put @ wider
        offset = offset @ wider + onward.bias.detach().double()
    epsilon = getattr(norm, "eps", None) or getattr(norm, "variance_epsilon", 0.0)
    found = FirstInputs(
        made,
        None if parts.positions is None else put,
        offset,
        squared_norms(words) / size,
        squared_norms(places) / size,
        words @ places.mT / size,
        float(epsilon),
    )
    if not _are_its_own(parts, found):
        raise other
    return found


def attention_inputs(
    parts: Anatomy,
    number: int,
    states: Tensor,
) -> Tensor:
    """Return the inputs of the attention of block `number` (from 1), from the states before it."""
    norm = parts.opening_norm(number)
    return states if norm is None else norm(states)


def _positions(parts: Anatomy, count: int) -> Tensor:
    """Return what is added to a token's embedding at each position (n, e)."""
    if parts.positions is None:
        return torch.zeros(
            1, parts.table.shape[1], dtype=torch.float64, device=parts.device
        )
    table, first = parts.positions
    count = min(count, parts.max_length)
    places = table.weight.detach()[first : first + count].double()
    inside = getattr(cast("Any", parts.base), "embeddings", None)
    types = getattr(inside, "token_type_embeddings", None)
    return places if types is None else places + types.weight.detach()[0].double()


@torch.no_grad()
def _are_its_own(parts: Anatomy, inputs: FirstInputs) -> bool:
    """Return whether the tables give what the first attention receives, for a few tokens."""
    if inputs.places is None:
        count = _SOME_PLACES
    else:
        count = min(_SOME_PLACES, inputs.positions)
    ids = row_numbers(parts.table)[-count:]
    given = capture(parts.base, Exposure("hidden", 0), ids=ids[None])["values"][0]
    given = attention_inputs(parts, 1, given)
    places = range(count) if inputs.places is not None else [0] * count
    rows = [
        inputs.at(token[None], place) for place, token in zip(places, ids, strict=True)
    ]
    made = torch.cat(rows)
    if made.shape != given.shape:
        return False
    return float((made - given).norm()) <= _TIGHT * float(given.norm())


def tokens_in(
    inputs: FirstInputs,
    span: Span,
    allowed: Tensor | None = None,
) -> list[Tensor]:
    """Return the tokens (c,) whose input lies in the span, for each position.

    The positions end before one without tokens; a model without position embeddings has
    only one. `allowed` (v,) restricts the tokens to those known to be in the batch.
    """
    directions = span.some_directions(_DIRECTIONS)
    some = torch.arange(min(_SOME, len(inputs.words)), device=directions.device)
    length = inputs.at(some, 0).norm(dim=-1).mean()
    tokens: list[Tensor] = []
    for place, far in enumerate(_along(inputs, directions)):
        near = far <= _WIDE * span.tolerance * length
        near = near if allowed is None else near & allowed
        found = near.nonzero()[:, 0]
        found = found[span.distance(inputs.at(found, place)) <= span.tolerance]
        if not len(found):
            break
        tokens.append(found)
    return tokens


def nearest_in(
    inputs: FirstInputs,
    span: Span,
    count: int,
    allowed: Tensor | None = None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield for each position the `count` tokens nearest to the span, and every nearness (v,).

    Nearness is in standard deviations of the distances of all tokens.
    """
    for far in _along(inputs, span.rest.float()):  # after a norm all are nearly as long
        near = (far.mean() - far) / far.std().clamp(min=1e-12)
        near = near if allowed is None else near.masked_fill(~allowed, -torch.inf)
        best = near.topk(min(count, len(near))).indices
        yield best[near[best] > -torch.inf], near


def _along(inputs: FirstInputs, directions: Tensor) -> Iterator[Tensor]:
    """Yield for each position the length of every token's input (v,) along directions (d, k)."""
    words, offset = (
        each.to(directions) @ directions for each in (inputs.words, inputs.offset)
    )
    every = row_numbers(words)
    for place in range(inputs.positions):
        rows = words
        if inputs.places is not None:
            rows = words + inputs.places[place].to(directions) @ directions
        yield (rows / inputs.scales(every, place)[:, None].to(words) + offset).norm(
            dim=-1
        )
