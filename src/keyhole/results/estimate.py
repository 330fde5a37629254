"""What a sample says of a whole store: how many of its texts can be read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from keyhole.errors import InputError
from keyhole.percent import percent
from keyhole.share import CONFIDENCE, hits_in_all


@dataclass(frozen=True)
class Estimate:
    """`exact` of `sample` texts were read; of all `population`, from `least` to `most` can be."""

    exact: int
    sample: int
    population: int
    least: int
    most: int

    def __post_init__(self) -> None:  # a file may say anything
        ordered = 0 <= self.exact <= self.least <= self.most <= self.population
        if not (ordered and self.exact <= self.sample <= self.population and self.sample):
            raise InputError(
                f"expected an estimate of texts that can be read, got {self.exact} of {self.sample}"
                f" and {self.least} to {self.most} of {self.population}"
            )

    @classmethod
    def of(cls, exact: int, sample: int, population: int) -> Self:
        return cls(exact, sample, population, *hits_in_all(exact, sample, population))

    @property
    def share(self) -> str:
        """84–93%, or one figure where both ends are written alike."""
        low, high = (percent(count / self.population) for count in (self.least, self.most))
        return low if low == high else f"{low.removesuffix('%')}–{high}"

    def __str__(self) -> str:
        tried = f"{self.exact} of {self.sample} tried were"
        if self.sample == self.population:
            return f"of {self.population:,} texts, {self.exact:,} can be read exactly: all tried"
        return (
            f"of {self.population:,} texts, {self.share} can be read exactly "
            f"({tried}; {percent(float(CONFIDENCE))} confidence)"
        )
