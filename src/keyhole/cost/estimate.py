"""Questions that an attack asks, and what those come to at a rate and a price."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from keyhole.core.errors import expect_number

_HOUR, _MILLION = 3600.0, 1e6


@dataclass(frozen=True)
class Estimate:
    """What is asked for one secret; `low` and `high` bound the queries where a run decides them.

    `floor` is the number of unknowns over the numbers in an answer: no attack can do with fewer.
    `tokens` are those that are sent, `bytes` what goes both ways, as binary numbers of 64 bits
    where questions are vectors.
    """

    what: str
    method: str
    queries: int
    floor: int
    tokens: int | None = None
    bytes: int | None = None
    low: int | None = None
    high: int | None = None
    source: str = ""

    @property
    def exact(self) -> bool:
        return self.low is None and self.high is None

    def to_dict(self) -> dict[str, Any]:
        return {
            "what": self.what, "method": self.method, "queries": self.queries,
            "queries_low": self.queries if self.low is None else self.low,
            "queries_high": self.queries if self.high is None else self.high,
            "exact": self.exact, "floor": self.floor, "tokens": self.tokens, "bytes": self.bytes,
            "source": self.source,
        }  # fmt: skip


@dataclass(frozen=True)
class Prices:
    """`rate` queries a second; `price` of a query, `token_price` of a million tokens; `daily` is a
    budget of queries for a client and day."""

    rate: float = 10.0
    price: float = 0.0
    token_price: float = 0.0
    daily: float = 1000.0

    def __post_init__(self) -> None:
        expect_number("a rate", self.rate, above=0)
        expect_number("a price", self.price, least=0)
        expect_number("a price of tokens", self.token_price, least=0)
        expect_number("a daily budget", self.daily, above=0)

    def of(self, estimate: Estimate) -> Cost:
        return Cost(estimate, self)


@dataclass(frozen=True)
class Cost:
    """An estimate at prices."""

    estimate: Estimate
    prices: Prices

    @property
    def hours(self) -> float:
        return self.estimate.queries / self.prices.rate / _HOUR

    @property
    def money(self) -> float:
        tokens = (self.estimate.tokens or 0) / _MILLION
        return self.estimate.queries * self.prices.price + tokens * self.prices.token_price

    @property
    def days(self) -> float:
        """How long the daily budget holds against this attack."""
        return self.estimate.queries / self.prices.daily

    @property
    def least_days(self) -> float:
        """… and against any other."""
        return self.estimate.floor / self.prices.daily

    def to_dict(self) -> dict[str, Any]:
        return {
            "format": 1, "kind": "cost", **self.estimate.to_dict(), "hours": self.hours,
            "money": self.money, "daily_budget": self.prices.daily, "days": self.days,
            "least_days": self.least_days, "rate": self.prices.rate, "price": self.prices.price,
            "token_price": self.prices.token_price,
        }  # fmt: skip

    def summary(self) -> str:
        asked = self.estimate
        queries = f"{asked.queries:,}, exactly"
        if asked.low is not None and asked.high is not None:
            queries = f"about {asked.queries:,} ({asked.low:,} to {asked.high:,})"
        rows = [
            ("queries", f"{queries}; no attack takes fewer than {asked.floor:,}"),
            ("tokens", "not counted" if asked.tokens is None else f"{asked.tokens:,}"),
            ("bytes", "not counted" if asked.bytes is None else f"{asked.bytes:,}"),
            ("hours", f"{self.hours:.3g} at {self.prices.rate:g} queries a second"),
            ("money", f"{self.money:,.2f}"),
            (
                "budget",
                f"{self.prices.daily:,.0f} queries a day hold it for {self.days:,.1f} days, and "
                f"for {self.least_days:,.1f} against any attack",
            ),
            ("method", asked.method),
            ("source", asked.source),
        ]
        return "\n".join([asked.what, *(f"  {name:8} {words}" for name, words in rows if words)])
