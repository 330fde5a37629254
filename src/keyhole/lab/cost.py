"""What an attack costs before it is run: queries, tokens, bytes, hours and money.

    cost.head(64, rank=8, exposure="scores")   -> Estimate: .queries .lower_bound .tokens .bytes
    cost.layer(576, exposure="log-probabilities", vocabulary=49_152)
    cost.text(12, exposure="embedding", processor="gpu")   -> TextEstimate: .passes .seconds .exact
    cost.Cost(estimate, cost.Prices(rate=50, price=0.01))  -> .hours .money .days

Counts are the methods' own (`expected_queries`), which tests compare with runs on planted targets.
What only a run can tell is in measured.json, each figure with its command, commit and machine. No
formula says how long a search for a text takes: lengths that no row covers are refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib import resources
from typing import Any

from keyhole.core.errors import InputError, expect_count, expect_number
from keyhole.core.options import settings, types_of
from keyhole.core.result import FORMAT
from keyhole.extract import FullOutput, LowRank, SignOnly, SingleHead, Tolerant
from keyhole.extract.low_rank import degrees_of_freedom
from keyhole.extract.output_layer import OutputLayer, answers_for

_HOUR, _MILLION = 3600.0, 1e6
HEAD_EXPOSURES = ("scores", "rounded", "signs", "vectors")
LAYER_EXPOSURES = ("vectors", "checkpoint", "log-probabilities")
PROCESSORS = ("gpu", "cpu")
_NUMBER = 8  # bytes
WIDEST = 2**20
_DECIMALS = 3  # rounding does not change how many queries are asked


@dataclass(frozen=True)
class Figure:
    """One measurement: its numbers by name, and how to make it again."""

    values: dict[str, Any]
    command: str
    commit: str
    machine: str

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    @property
    def source(self) -> str:
        return f"{self.command} ({self.machine}; commit {self.commit})"


@cache
def figures(name: str) -> tuple[Figure, ...]:
    """The measurements under a name, in the order of the file."""
    content = resources.files("keyhole.lab").joinpath("measured.json").read_text("utf-8")
    entries: list[dict[str, Any]] = json.loads(content)[name]
    about = ("command", "commit", "machine")
    return tuple(
        Figure(
            {key: value for key, value in entry.items() if key not in about},
            *(entry[key] for key in about),
        )
        for entry in entries
    )


@dataclass(frozen=True)
class Estimate:
    """What is asked for one secret; `low` and `high` bound the queries where a run decides them.

    `lower_bound` is the number of unknowns over the numbers in an answer: no attack can do with
    fewer. `tokens` are those that are sent, `bytes` what goes both ways, as binary numbers of 64
    bits where questions are vectors.
    """

    what: str
    method: str
    queries: int
    lower_bound: int
    tokens: int | None = None
    bytes: int | None = None
    low: int | None = None
    high: int | None = None
    source: str = ""

    def to_dict(self) -> dict[str, Any]:
        data = asdict(self)
        low, high = data.pop("low"), data.pop("high")
        return {
            **data, "exact": low is None, "queries_low": self.queries if low is None else low,
            "queries_high": self.queries if high is None else high,
        }  # fmt: skip


@dataclass(frozen=True)
class Prices:
    """`rate` queries a second; `price` of a query, `token_price` of a million tokens.

    `daily` is a budget of queries for a client and day.
    """

    rate: float = 10.0
    price: float = 0.0
    token_price: float = 0.0
    daily: float = 1000.0

    def __post_init__(self) -> None:
        expect_number("rate", self.rate, above=0)
        expect_number("price", self.price, least=0)
        expect_number("token_price", self.token_price, least=0)
        expect_number("daily", self.daily, above=0)


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
        return self.estimate.lower_bound / self.prices.daily

    def to_dict(self) -> dict[str, Any]:
        prices = asdict(self.prices)
        return {
            "format": FORMAT, "kind": "cost", **self.estimate.to_dict(),
            "hours": self.hours, "money": self.money, "days": self.days,
            "least_days": self.least_days, "daily_budget": prices.pop("daily"), **prices,
        }  # fmt: skip

    def summary(self) -> str:
        asked = self.estimate
        queries = f"{asked.queries:,}, exactly"
        if asked.low is not None and asked.high is not None:
            queries = f"about {asked.queries:,} ({asked.low:,} to {asked.high:,})"
        rows = [
            ("queries", f"{queries}; no attack takes fewer than {asked.lower_bound:,}"),
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
        return _table(asked.what, rows)


def _table(title: str, rows: Sequence[tuple[str, str]]) -> str:
    return "\n".join([title, *(f"  {name:8} {words}" for name, words in rows if words)])


def head(
    width: int, *, rank: int | None = None, exposure: str = "scores", accuracy: float = 1e-6
) -> Estimate:
    """One scoring head of `width`: what is asked where an endpoint returns `exposure`.

    `rank` is that of W, `accuracy` how exact signs are to be read.
    """
    expect_count("width", width, most=WIDEST)
    _expect(exposure, HEAD_EXPOSURES)
    signs = SignOnly(accuracy=accuracy)  # refuses an accuracy that nothing reaches, used or not
    if rank is not None and exposure != "scores":
        raise InputError(
            f"the rank is of use with scores alone; the attack on {exposure} does not take it"
        )
    d, known = width, unknowns_of(width)
    what = f"one head of width {d}" + ("" if rank is None else f" and rank {rank}")
    if exposure == "scores" and rank is None:
        queries = SingleHead().expected_queries(d)
        return Estimate(
            f"{what}, from scores", "single-head", queries, known, *_sent(d, d, queries - d)
        )
    if exposure == "scores" and rank is not None:
        queries = LowRank(rank=rank).expected_queries(d) or 0
        return Estimate(
            f"{what}, from scores", "low-rank", queries, degrees_of_freedom(d, rank),
            *_sent(d, d, queries - d), low=queries, high=queries + 2 * d,
            source="at most 2d more where the rank is unknown",
        )  # fmt: skip
    if exposure == "rounded":
        queries = Tolerant(10.0**-_DECIMALS / 2).expected_queries(d)
        return Estimate(
            f"{what}, from rounded scores", "tolerant", queries, known,
            *_sent(d, 2 * d, queries - 2 * d),
        )  # fmt: skip
    if exposure == "signs":
        return _signs(what, d, signs)
    return _last_token(what, d)


def _signs(what: str, d: int, method: SignOnly) -> Estimate:
    queries, accuracy = method.expected_queries(d), method.accuracy
    lower_bound = math.ceil((unknowns_of(d) - 1) * math.log2(1 / accuracy))
    (figure,) = figures("signs")
    return Estimate(
        f"{what}, from signs, to {accuracy:g}", "sign-only", queries, lower_bound,
        *_sent(d, 0, queries), low=lower_bound, high=math.ceil(figure["most"] * queries),
        source=figure.source,
    )  # fmt: skip


def _last_token(what: str, d: int) -> Estimate:
    queries = FullOutput().expected_queries(d) or 0
    # One sequence of 2d + 1 tokens, d − 1 of one, two that ask for the number of heads, d of 2d.
    tokens = 2 * d * d + 3 * d + 5
    return Estimate(
        f"{what}, from the last token's vector", "full-output", queries, 2 * d, tokens,
        _NUMBER * d * (tokens + queries),
    )  # fmt: skip


def layer(
    width: int,
    *,
    exposure: str = "checkpoint",
    heads: int = 1,
    vocabulary: int | None = None,
    top: int | None = None,
) -> Estimate:
    """A whole layer: of attention from its vectors, or the last of a language model.

    - `vectors`: one head that answers its last token with as many numbers as it is wide;
    - `checkpoint`: an attention layer as models have it, of several heads, biases and norms;
    - `log-probabilities`: the output matrix of a language model up to an invertible map, from whole
      answers or, with `top`, from the best `top` tokens, which a bias chooses.
    """
    expect_count("width", width, most=WIDEST)
    expect_count("heads", heads, most=width)
    expect_count("vocabulary", vocabulary, most=2**31)
    expect_count("top", top, least=2)
    _expect(exposure, LAYER_EXPOSURES)
    if exposure == "vectors":
        return _last_token(f"an attention layer of one head of width {width}", width)
    if exposure == "checkpoint":
        return _checkpoint(width, heads)
    if vocabulary is None or vocabulary <= width:
        raise InputError(
            f"the vocabulary must be larger than the width, {width}; it is {vocabulary}"
        )
    return _output_layer(width, vocabulary, top)


def _checkpoint(d: int, heads: int) -> Estimate:
    """Unknowns: Q, K, V, O and biases, less a map between two of them for each head."""
    lower_bound = math.ceil((4 * d * d - 2 * d * d / heads + 2 * d) / d)
    (figure,) = figures("checkpoint")
    low, high = (math.ceil(figure[name] * d) for name in ("least", "most"))
    return Estimate(
        f"an attention layer of width {d} and {heads} heads, from the last token's vector",
        "attention-sub-layer", (low + high) // 2, lower_bound, low=low, high=high,
        source=figure.source,
    )  # fmt: skip


def _output_layer(d: int, vocabulary: int, top: int | None) -> Estimate:
    what = f"the output matrix of width {d} and {vocabulary:,} tokens"
    length = OutputLayer().length
    (size,) = figures("answer bytes")
    if top is None:
        queries = answers_for(d)
        received = round(queries * vocabulary * size["bytes_per_token"])
        return Estimate(
            f"{what}, from log-probabilities of all tokens", "output-layer", queries, d,
            length * queries, received, source=f"bytes: {size.source}",
        )  # fmt: skip
    (figure,) = figures("best tokens")
    ratio = figure["queries"] * (figure["top"] - 1) / figure["width"] ** 2
    lower_bound = math.ceil(d * d / (top - 1))
    queries = max(answers_for(d), math.ceil(ratio * lower_bound))
    return Estimate(
        f"the width of a model of width {d}, from the best {top} log-probabilities and a bias",
        "output-layer", queries, lower_bound, length * queries,
        round(queries * top * size["bytes_per_token"]), low=lower_bound, high=queries,
        source=figure.source,
    )  # fmt: skip


def unknowns_of(d: int) -> int:
    """The unknowns of one head: W and v."""
    return d * d + d


def _sent(d: int, alone: int, pairs: int) -> tuple[int, int]:
    """Tokens and bytes of questions of one token and of two, each answered by a number."""
    tokens = alone + 2 * pairs
    return tokens, _NUMBER * (d * tokens + alone + pairs)


def _expect(word: str, known: tuple[str, ...]) -> None:
    if word not in known:
        raise InputError(f"choose among {', '.join(known)}; got {word[:80]!r}")


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


@dataclass(frozen=True)
class TextCost:
    """So many texts, on a machine at `price` an hour.

    `seconds` is what the machine takes for a thousand passes, if not as long as measured.
    """

    estimate: TextEstimate
    texts: int = 1
    price: float = 0.0
    seconds: float | None = None

    def __post_init__(self) -> None:
        expect_count("texts", self.texts, most=10**12)
        expect_number("price", self.price, least=0)
        expect_number("seconds for a thousand passes", self.seconds, above=0)

    @property
    def hours(self) -> float | None:
        each = self.estimate.seconds
        if self.seconds is not None:
            each = self.estimate.passes / 1000 * self.seconds
        return None if each is None else self.texts * each / _HOUR

    @property
    def money(self) -> float | None:
        return None if self.hours is None else self.hours * self.price

    def to_dict(self) -> dict[str, Any]:
        figure, each = self.estimate.figure, self.estimate
        return {
            "format": FORMAT, "kind": "text cost", "exposure": figure["exposure"],
            "model": figure["model"], "tokens": each.tokens, "texts": self.texts,
            "passes": each.passes * self.texts, "hours": self.hours, "money": self.money,
            "exact": each.exact, "exact_measured": figure["exact"], "source": figure.source,
        }  # fmt: skip

    def summary(self) -> str:
        figure, each = self.estimate.figure, self.estimate
        low, high = figure["tokens"]
        came_back, tried = figure["exact"]
        hours = "not measured: give -o seconds=… for a thousand passes on your machine"
        if self.hours is not None and self.money is not None:
            hours = f"{self.hours:.3g}, money {self.money:,.2f}"
        rows = [
            ("texts", f"{self.texts:,} of {each.tokens} tokens (measured at {low} to {high})"),
            ("passes", f"{each.passes * self.texts:,}, {each.passes:,} for a text"),
            ("hours", hours),
            (
                "exact",
                f"{round(each.exact * self.texts):,} expected: {came_back} of {tried} came back",
            ),
            ("source", figure.source),
        ]
        return _table(f"texts from {figure['exposure']} of {figure['model']}", rows)


def text(tokens: int, *, exposure: str = "embedding", processor: str = "gpu") -> TextEstimate:
    """A text of so many tokens, read back from `exposure`."""
    expect_count("tokens", tokens)
    _expect(exposure, tuple(dict.fromkeys(figure["exposure"] for figure in figures("text"))))
    _expect(processor, PROCESSORS)
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
        f"{tokens} tokens were not measured: choose a length among "
        f"{measured or 'none on this processor'}"
    )


def bill(what: str, words: Sequence[str]) -> Cost | TextCost:
    """What `keyhole lab cost` answers: `words` set parameters and prices."""
    _expect(what, ("head", "layer", "text"))
    estimated = {"head": head, "layer": layer, "text": text}[what]
    priced = TextCost if what == "text" else Prices
    asked, prices = types_of(estimated), types_of(priced)
    given = settings(words, {**prices, **asked}, f"cost {what}")
    needed = next(iter(asked))  # the width, or the tokens of a text
    if needed not in given:
        raise InputError(f"cost {what} needs -o {needed}=NUMBER")
    estimate: Any = estimated(**{name: given.pop(name) for name in asked if name in given})
    return TextCost(estimate, **given) if what == "text" else Cost(estimate, Prices(**given))
