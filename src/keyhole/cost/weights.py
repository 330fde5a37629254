"""Queries for weights: the methods' own counts where those are exact, measured ratios where not.

Tests run the methods on planted targets and compare.
"""

from __future__ import annotations

import math

from keyhole.core.errors import InputError, expect_count
from keyhole.cost.estimate import Estimate
from keyhole.cost.measured import figures
from keyhole.extract import FullOutput, LowRank, SignOnly, SingleHead, Tolerant
from keyhole.extract.low_rank import degrees_of_freedom
from keyhole.extract.output_layer import OutputLayer, answers_for

HEAD_EXPOSURES = ("scores", "rounded", "signs", "vectors")
LAYER_EXPOSURES = ("vectors", "checkpoint", "log-probabilities")
_NUMBER = 8  # bytes
WIDEST = 2**20
_DECIMALS = 3  # rounding does not change how many queries are asked


def head(
    width: int, *, rank: int | None = None, exposure: str = "scores", accuracy: float = 1e-6
) -> Estimate:
    """One scoring head of `width`: what is asked where an endpoint returns `exposure`.

    `rank` is that of W, `accuracy` how exact signs are to be read.
    """
    expect_count("a width", width, most=WIDEST)
    _expect(exposure, HEAD_EXPOSURES)
    signs = SignOnly(accuracy=accuracy)  # refuses an accuracy that nothing reaches, used or not
    if rank is not None and exposure != "scores":
        raise InputError(f"expected --rank with scores, got {exposure}: its attack does not use it")
    d, known = width, d_and_d_squared(width)
    what = f"one head of width {d}" + ("" if rank is None else f" and rank {rank}")
    if exposure == "scores":
        queries = SingleHead().expected(d) if rank is None else LowRank(rank=rank).expected(d) or 0
        floor = known if rank is None else degrees_of_freedom(d, rank)
        name = "single-head" if rank is None else "low-rank"
        extra = 0 if rank is None else 2 * d
        return Estimate(
            f"{what}, from scores", name, queries, floor, *_sent(d, d, queries - d),
            low=queries if extra else None, high=queries + extra if extra else None,
            source="at most 2d more where the rank is unknown" if extra else "",
        )  # fmt: skip
    if exposure == "rounded":
        queries = Tolerant(10.0**-_DECIMALS / 2).expected(d)
        return Estimate(
            f"{what}, from rounded scores", "tolerant", queries, known,
            *_sent(d, 2 * d, queries - 2 * d),
        )  # fmt: skip
    if exposure == "signs":
        return _signs(what, d, signs)
    return _last_token(what, d)


def _signs(what: str, d: int, method: SignOnly) -> Estimate:
    queries, accuracy = method.expected(d), method.accuracy
    floor = math.ceil((d_and_d_squared(d) - 1) * math.log2(1 / accuracy))
    (figure,) = figures("signs")
    return Estimate(
        f"{what}, from signs, to {accuracy:g}", "sign-only", queries, floor, *_sent(d, 0, queries),
        low=floor, high=math.ceil(figure["most"] * queries),
        source=figure.source,
    )  # fmt: skip


def _last_token(what: str, d: int) -> Estimate:
    queries = FullOutput().expected(d) or 0
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

    `vectors` is one head that answers its last token with as many numbers as it is wide;
    `checkpoint` an attention layer as models have it, of several heads, biases and norms;
    `log-probabilities` the output matrix of a language model, up to an invertible map, of whole
    answers or, with `top`, of the best so many that a bias chooses.
    """
    expect_count("a width", width, most=WIDEST)
    expect_count("heads", heads, most=width)
    expect_count("a vocabulary", vocabulary, most=2**31)
    expect_count("--top", top, least=2)
    _expect(exposure, LAYER_EXPOSURES)
    if exposure == "vectors":
        return _last_token(f"an attention layer of one head of width {width}", width)
    if exposure == "checkpoint":
        return _checkpoint(width, heads)
    if vocabulary is None or vocabulary <= width:
        raise InputError(f"expected a --vocabulary larger than the width, got {vocabulary}")
    return _output_layer(width, vocabulary, top)


def _checkpoint(d: int, heads: int) -> Estimate:
    """Unknowns: Q, K, V, O and biases, less a map between two of them for each head."""
    floor = math.ceil((4 * d * d - 2 * d * d / heads + 2 * d) / d)
    (figure,) = figures("checkpoint")
    low, high = (math.ceil(figure[name] * d) for name in ("least", "most"))
    return Estimate(
        f"an attention layer of width {d} and {heads} heads, from the last token's vector",
        "attention-sub-layer", (low + high) // 2, floor, low=low, high=high, source=figure.source,
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
    floor = math.ceil(d * d / (top - 1))
    queries = max(answers_for(d), math.ceil(ratio * floor))
    return Estimate(
        f"the width of a model of width {d}, from the best {top} log-probabilities and a bias",
        "output-layer", queries, floor, length * queries,
        round(queries * top * size["bytes_per_token"]), low=floor, high=queries,
        source=figure.source,
    )  # fmt: skip


def d_and_d_squared(d: int) -> int:
    """The unknowns of one head, W and v."""
    return d * d + d


def _sent(d: int, alone: int, pairs: int) -> tuple[int, int]:
    """Tokens and bytes of so many questions of one token, and of two, each answered by a number."""
    tokens = alone + 2 * pairs
    return tokens, _NUMBER * (d * tokens + alone + pairs)


def _expect(exposure: str, known: tuple[str, ...]) -> None:
    if exposure not in known:
        raise InputError(f"expected an exposure among {', '.join(known)}, got {exposure[:80]}")
