"""The units of a model on one batch: which exist, which may be cut, and how they are counted.

A unit is one entry (site, head, query, key) of an attention map. A site is one
attention call of a forward pass, which is a layer for most models. One vector holds all
units of an example, site after site, so a mask is a row of booleans and a budget is a
sum over it.

- A unit **exists** if the model itself attends there: query and key are real tokens (no padding)
  and the probability is not zero. Above the diagonal of a causal model no unit exists.
  Shares are relative to the existing units: `layers·heads·n²` for an encoder and n
  tokens, with special tokens.
- A unit is **free** (may be cut) if it exists and neither query nor key is special. Weaker options
  spare special keys only (no words are hidden from [CLS], but it may be kept from
  looking at some), the first token as query and as key (as in the released code, which
  cuts [SEP] like a word), or nothing but padding.
- The paper counts a head's units as `(n−1)²`, without the row and the column of the first token.
  Causal and cross attention are counted in the same way, `n(n−1)/2` and `(m−1)(n−1)`.
  The count is smaller than that of all units, so a share of it is at most the same
  share of all.

In multiple choice an example has several sequences, and each is its own matrix. Windows
(Swin) are sequences in that sense too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from keyhole.core.errors import InputError
from keyhole.disrupt.tasks import Question
from keyhole.models.discovery import special_tokens
from keyhole.models.loading import named_task
from keyhole.models.masking import Site, Untouched, rewriting

NEVER = torch.iinfo(torch.int32).max  # the step of a unit that is not cut


@dataclass(frozen=True)
class Place:
    """The slice of the vector that holds a site's units (rows, heads, queries, keys)."""

    site: Site
    shape: tuple[int, int, int, int]
    start: int

    @property
    def stop(self) -> int:
        rows, heads, queries, keys = self.shape
        return self.start + rows * heads * queries * keys


class Unit(NamedTuple):
    """One unit; `sequence` is the number of its choice or window, 0 for most models."""

    layer: int
    head: int
    query: int
    key: int
    sequence: int = 0


@dataclass(frozen=True, eq=False)
class Units:
    """The layout of the vector, and for each example which units exist and which are free."""

    places: tuple[Place, ...]
    exists: Tensor  # (b, units)
    free: Tensor  # (b, units)
    head_units: Tensor  # of each head as the paper counts them, (b, heads of all sites)

    @property
    def total(self) -> int:
        return self.places[-1].stop

    def at(self, values: Tensor, place: Place) -> Tensor:
        """Return the values of one site: (…, units) -> (…, rows, heads, queries, keys)."""
        return values[..., place.start : place.stop].unflatten(-1, place.shape)

    def part(self, indices: Tensor) -> Units:
        tensors = (self.exists, self.free, self.head_units)
        return Units(self.places, *(tensor[indices] for tensor in tensors))

    @cached_property
    def head_of(self) -> Tensor:
        """The index of each unit's matrix, over all sites and sequences."""
        return self._numbered(2)

    @cached_property
    def row_of(self) -> Tensor:
        """The index of each unit's row of the softmax."""
        return self._numbered(3)

    def _numbered(self, axes: int) -> Tensor:
        parts: list[Tensor] = []
        seen = 0
        for place in self.places:
            groups = torch.Size(place.shape[:axes]).numel()
            each = torch.Size(place.shape[axes:]).numel()
            numbers = torch.arange(seen, seen + groups, device=self.exists.device)
            parts.append(numbers.repeat_interleave(each))
            seen += groups
        return torch.cat(parts)

    def per_head(self, mask: Tensor) -> Tensor:
        """Count the units of a mask (b, units) in each head, (b, heads of all sites)."""
        return self.each(partial(torch.sum, dim=(-1, -2)), mask)

    def per_row(self, mask: Tensor) -> Tensor:
        return self.each(partial(torch.sum, dim=-1), mask)

    def each(self, function: Callable[..., Tensor], *values: Tensor) -> Tensor:
        """Apply a function of one site's values (b, rows, heads, queries, keys) to all sites."""
        parts = [
            function(*(self.at(value, place) for value in values)).flatten(1)
            for place in self.places
        ]
        return torch.cat(parts, 1)

    def named(self, mask: Tensor) -> tuple[Unit, ...]:
        """List the units of one example's mask (units,)."""
        return tuple(
            Unit(place.site.index, head, query, key, row)
            for place in self.places
            for row, head, query, key in self.at(mask, place).nonzero().tolist()
        )


@dataclass(eq=False)
class FixedCuts(Untouched):
    """Cuts a fixed mask of units (b, units)."""

    units: Units
    mask: Tensor

    def cut(self, site: Site, shape: torch.Size) -> Tensor:
        return self.units.at(self.mask, self.units.places[site.index]).reshape(shape)


class Look(Untouched):
    """Records the attention maps of a forward pass, and which keys the model's mask permits."""

    def __init__(self) -> None:
        self.maps: list[tuple[Site, Tensor]] = []
        self.open: list[Tensor] = []

    def masked(self, site: Site, mask: Tensor | None) -> None:
        del site
        if mask is None:
            mask = torch.zeros(1)
        # Half of the least number: a mask may hold a bias, too, which closes nothing.
        self.open.append(mask > torch.finfo(mask.dtype).min / 2)

    def seen(self, site: Site, probabilities: Tensor) -> None:
        self.maps.append((site, probabilities.detach()))


def survey(
    model: Any,
    question: Question,
    *,
    spare: str = "special",
    underflowing: bool = False,
) -> Units:
    """Run one clean pass, and return the units of every site: which exist and which are free.

    With `underflowing`, every unit exists that the model's mask permits. Its
    probability may be too small for a float now, and be large once other units of its
    row are cut.
    """
    look = Look()
    with torch.no_grad(), rewriting(model, look):
        question.logits(model)
    sides = _sides(model, question)
    places: list[Place] = []
    exists: list[Tensor] = []
    free: list[Tensor] = []
    counts: list[Tensor] = []
    start = 0
    for (site, probabilities), opened in zip(look.maps, look.open, strict=True):
        each = _rows(probabilities, question.size, site)
        places.append(Place(site, cast("Any", tuple(each.shape[1:])), start))
        start = places[-1].stop
        query, key = _ends(site, sides, each)
        permitted = each > 0
        if underflowing:
            permitted |= _rows(opened.expand_as(probabilities), question.size, site)
        present = permitted & query.real & key.real
        first = query.first | key.first
        spared = torch.zeros_like(present)
        if spare in ("special", "special keys"):
            spared |= key.special
        if spare == "special":
            spared |= query.special
        if spare == "first token":
            spared |= first
        exists.append(present.flatten(1))
        free.append((present & ~spared).flatten(1))
        counts.append((present & ~first).sum((-1, -2)).flatten(1))
    found = (torch.cat(each, 1) for each in (exists, free, counts))
    return Units(tuple(places), *found)


def _rows(
    probabilities: Tensor,
    size: int,
    site: Site,
) -> Tensor:
    if len(probabilities) % size:
        raise InputError(
            f"{site.name} has {len(probabilities)} rows, which is no multiple of {size} examples"
        )
    return probabilities.unflatten(0, (size, -1))


@dataclass(frozen=True, eq=False)
class _Side:
    """The tokens of the encoder or the decoder, (b, rows, n): real ones, special ones, the first.

    `along` gives them another shape, to compare them with (b, rows, heads, queries, keys).
    """

    real: Tensor
    special: Tensor
    first: Tensor

    @classmethod
    def of(cls, real: Tensor, special: Tensor) -> _Side:
        return cls(real, special, real & (real.cumsum(-1) == 1))

    def along(self, axis: int) -> _Side:
        shape = [*self.real.shape[:2], 1, 1, 1]
        shape[axis] = -1
        return _Side(*(each.view(shape) for each in vars(self).values()))


def _ends(
    site: Site,
    sides: dict[str, _Side],
    maps: Tensor,
) -> list[_Side]:
    """Return the sides that the queries and the keys of a site's maps come from."""
    decoder = "decoder" in sides and "encoder" not in site.name.split(".")
    query = sides.get("decoder" if decoder else "encoder")
    key = query if site.kind == "self" else sides.get("encoder")
    ends: list[_Side] = []
    for side, axis in ((query, 3), (key, 4)):
        shape = (*maps.shape[:2], maps.shape[axis])
        if side is None or side.real.shape != shape:
            # Patches and windows: every position is real and none is special.
            ones = torch.ones(shape, dtype=torch.bool, device=maps.device)
            side = _Side.of(ones, ~ones)
        ends.append(side.along(axis))
    return ends


def _sides(model: Any, question: Question) -> dict[str, _Side]:
    sides: dict[str, _Side] = {}
    for name, prefix in (("encoder", ""), ("decoder", "decoder_")):
        ids = question.inputs.get(f"{prefix}input_ids")
        if ids is None:
            continue
        mask = question.inputs.get(f"{prefix}attention_mask", torch.ones_like(ids))
        ids = _with_rows(ids)
        real = _with_rows(mask) != 0
        if name == "encoder" and question.special is not None:
            special = _with_rows(question.special) != 0
        else:
            special = _guessed_special(model, ids, real)
        if name == "decoder":
            special[..., 0] = True  # the start token
        sides[name] = _Side.of(real, special)
    return sides


def _with_rows(values: Tensor) -> Tensor:
    return values if values.ndim == 3 else values.unsqueeze(1)


def _guessed_special(
    model: Any,
    ids: Tensor,
    real: Tensor,
) -> Tensor:
    """Guess the special tokens from the configuration, and for an encoder from the text's ends.

    BERT's configuration does not name [CLS] and [SEP]. Its texts begin with [CLS] and
    end with [SEP], so the first token and every token equal to the last one count as
    special.
    """
    config = model.config
    marked = torch.isin(ids, ids.new_tensor(special_tokens(config)))
    decodes = getattr(config, "is_decoder", False) or config.is_encoder_decoder
    if not decodes and named_task(type(model).__name__) != "causal":
        positions = torch.arange(ids.shape[-1], device=ids.device)
        first = real.int().argmax(-1, keepdim=True)
        last = (positions * real).amax(-1, keepdim=True)
        marked = marked | (positions == first) | (ids == ids.gather(-1, last))
    return marked
