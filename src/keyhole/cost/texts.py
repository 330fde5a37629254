"""Passes and seconds for texts, from rows that were measured; between and beyond them, nothing.

How long a search takes does not follow from a formula, so lengths that no row covers are refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from keyhole.core.errors import InputError, expect_count, expect_number
from keyhole.cost.measured import Figure, figures

EXPOSURES = tuple(dict.fromkeys(str(figure["exposure"]) for figure in figures("text")))
PROCESSORS = ("gpu", "cpu")


@dataclass(frozen=True)
class TextEstimate:
    """One text: passes of the model, seconds where they were measured, and how many came back."""

    figure: Figure
    tokens: int

    @property
    def passes(self) -> int:
        return int(self.figure["passes"])

    @property
    def seconds(self) -> float | None:
        return self.figure["seconds"]

    @property
    def exact(self) -> float:
        """The share of texts that came back exactly."""
        came_back, tried = self.figure["exact"]
        return came_back / tried

    def cost(self, texts: int = 1, price: float = 0.0, seconds: float | None = None) -> TextCost:
        """So many texts, on a machine at `price` an hour that takes `seconds` for a thousand
        passes, if those are not the measured ones."""
        return TextCost(self, texts, price, seconds)


@dataclass(frozen=True)
class TextCost:
    estimate: TextEstimate
    texts: int
    price: float
    per_thousand: float | None

    def __post_init__(self) -> None:
        expect_count("texts", self.texts, most=10**12)
        expect_number("a price", self.price, least=0)
        expect_number("seconds for a thousand passes", self.per_thousand, above=0)

    @property
    def hours(self) -> float | None:
        one = self.estimate.seconds
        if self.per_thousand is not None:
            one = self.estimate.passes / 1000 * self.per_thousand
        return None if one is None else self.texts * one / 3600

    @property
    def money(self) -> float | None:
        return None if self.hours is None else self.hours * self.price

    def to_dict(self) -> dict[str, Any]:
        figure, one = self.estimate.figure, self.estimate
        return {
            "format": 1, "kind": "text cost", "exposure": figure["exposure"],
            "model": figure["model"], "tokens": one.tokens, "texts": self.texts,
            "passes": one.passes * self.texts, "hours": self.hours, "money": self.money,
            "exact": one.exact, "exact_measured": figure["exact"], "source": figure.source,
        }  # fmt: skip

    def summary(self) -> str:
        figure, one = self.estimate.figure, self.estimate
        low, high = figure["tokens"]
        came_back, tried = figure["exact"]
        hours = "not measured: give --seconds for a thousand passes on your machine"
        if self.hours is not None and self.money is not None:
            hours = f"{self.hours:.3g}, money {self.money:,.2f}"
        rows = [
            ("texts", f"{self.texts:,} of {one.tokens} tokens (measured at {low} to {high})"),
            ("passes", f"{one.passes * self.texts:,}, {one.passes:,} for a text"),
            ("hours", hours),
            (
                "exact",
                f"{round(one.exact * self.texts):,} expected: {came_back} of {tried} came back",
            ),
            ("source", figure.source),
        ]
        title = f"texts from {figure['exposure']} of {figure['model']}"
        return "\n".join([title, *(f"  {name:8} {words}" for name, words in rows)])


def text(tokens: int, *, exposure: str = "embedding", processor: str = "gpu") -> TextEstimate:
    """A text of so many tokens, read back from `exposure`."""
    expect_count("tokens", tokens)
    if exposure not in EXPOSURES:
        raise InputError(f"expected an exposure among {', '.join(EXPOSURES)}, got {exposure[:80]}")
    if processor not in PROCESSORS:
        raise InputError(f"expected a processor gpu or cpu, got {processor[:80]}")
    rows = [
        figure
        for figure in figures("text")
        if (figure["exposure"], figure["processor"]) == (exposure, processor)
    ]
    for figure in rows:
        low, high = figure["tokens"]
        if low <= tokens <= high:
            return TextEstimate(figure, tokens)
    measured = ", ".join(f"{low}–{high}" for low, high in (figure["tokens"] for figure in rows))
    raise InputError(
        f"expected a length that was measured ({measured or 'none on this processor'}), "
        f"got {tokens} tokens"
    )
