"""A flipped prediction and where attention was cut for it: what a report shows of a disruption."""

from __future__ import annotations

from dataclasses import dataclass

from keyhole.errors import InputError

_MOST = 4096  # layers, and heads: no model has as many, and a picture has a square for each


@dataclass(frozen=True)
class Cut:
    """One input: its tokens, the answers before and after, and the units between.

    A unit is (layer, head, query, key), positions counted in `tokens`. `layers` and `heads` say how
    many the model has; `share` is over all its units on this input.
    """

    tokens: tuple[str, ...]
    before: str
    after: str
    sure_before: float
    sure_after: float
    share: float
    layers: int
    heads: int
    units: tuple[tuple[int, int, int, int], ...]

    def __post_init__(self) -> None:
        for name, count in (("layers", self.layers), ("heads", self.heads)):
            if not 0 <= count <= _MOST:
                raise InputError(f"expected 0 to {_MOST:,} {name} in a cut, got {count}")
        if self.layers * self.heads > _MOST:
            raise InputError(
                f"expected at most {_MOST:,} heads in all in a cut, got {self.layers * self.heads}"
            )
        sizes = (self.layers, self.heads, len(self.tokens), len(self.tokens))
        for unit in self.units:
            if not all(0 <= place < size for place, size in zip(unit, sizes, strict=True)):
                raise InputError(
                    f"expected units of {self.layers} layers, {self.heads} heads and "
                    f"{len(self.tokens)} tokens in a cut, got {unit}"
                )
