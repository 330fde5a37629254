"""`keyhole cost head|layer|text`: parse, one library call, print."""

from __future__ import annotations

from typing import Annotated

import typer

from keyhole import cost
from keyhole.cli.answers import answer
from keyhole.cli.app import Json, app
from keyhole.cost.texts import EXPOSURES, PROCESSORS

group = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
app.add_typer(
    group, name="cost", help="Tell what an attack would cost: queries, tokens, hours and money."
)

Width = Annotated[int, typer.Option(help="The width of a token, d.")]
Rate = Annotated[float, typer.Option(help="Queries that the server answers in a second.")]
Price = Annotated[float, typer.Option(help="What one query costs.")]
TokenPrice = Annotated[float, typer.Option(help="What a million tokens cost.")]
Daily = Annotated[float, typer.Option(help="A budget of queries for one client and day.")]


def _among(names: tuple[str, ...], help: str) -> typer.models.OptionInfo:  # noqa: A002
    return typer.Option(metavar=f"[{'|'.join(names)}]", help=help)


@group.command(
    epilog="\b\nExample:\n  keyhole cost head --width 64 --rank 8 --exposure scores --rate 50 "
    "--price 0.01"
)
def head(
    width: Width,
    rank: Annotated[
        int | None, typer.Option(help="The rank of W, where it is below the width.")
    ] = None,
    exposure: Annotated[str, _among(cost.HEAD_EXPOSURES, "What the endpoint returns.")] = "scores",
    accuracy: Annotated[float, typer.Option(help="How exactly signs are to be read.")] = 1e-6,
    rate: Rate = 10.0,
    price: Price = 0.0,
    token_price: TokenPrice = 0.0,
    daily: Daily = 1000.0,
    as_json: Json = False,
) -> None:
    """One scoring head, from scores, rounded scores, signs or vectors."""
    estimate = cost.head(width, rank=rank, exposure=exposure, accuracy=accuracy)
    _show(estimate, rate, price, token_price, daily, as_json)


@group.command(
    epilog="\b\nExample:\n  keyhole cost layer --width 384 --heads 12\n"
    "  keyhole cost layer --width 576 --exposure log-probabilities --vocabulary 49152"
)
def layer(
    width: Width,
    exposure: Annotated[
        str, _among(cost.LAYER_EXPOSURES, "What the endpoint returns.")
    ] = "checkpoint",
    heads: Annotated[int, typer.Option(help="Heads of a checkpoint's attention layer.")] = 1,
    vocabulary: Annotated[
        int | None, typer.Option(help="Tokens of a language model's vocabulary.")
    ] = None,
    top: Annotated[
        int | None, typer.Option(help="How many log-probabilities come at a time, if not all.")
    ] = None,
    rate: Rate = 10.0,
    price: Price = 0.0,
    token_price: TokenPrice = 0.0,
    daily: Daily = 1000.0,
    as_json: Json = False,
) -> None:
    """A layer of attention from its vectors, or the last layer of a language model."""
    estimate = cost.layer(width, exposure=exposure, heads=heads, vocabulary=vocabulary, top=top)
    _show(estimate, rate, price, token_price, daily, as_json)


@group.command(epilog="\b\nExample:\n  keyhole cost text --tokens 12 --texts 100000 --price 2.5")
def text(
    tokens: Annotated[int, typer.Option(help="The length of a text, in tokens.")],
    exposure: Annotated[str, _among(EXPOSURES, "What leaked of the text.")] = "embedding",
    processor: Annotated[str, _among(PROCESSORS, "What the attack runs on.")] = "gpu",
    texts: Annotated[int, typer.Option(help="How many texts.")] = 1,
    price: Annotated[float, typer.Option(help="What an hour of the machine costs.")] = 0.0,
    seconds: Annotated[
        float | None,
        typer.Option(help="Seconds for a thousand passes, if not those that were measured."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Texts from what leaked of them, as it was measured."""
    estimate = cost.text(tokens, exposure=exposure, processor=processor)
    bill = estimate.cost(texts, price, seconds)
    answer(bill.to_dict(), bill.summary(), as_json=as_json)


def _show(
    estimate: cost.Estimate, rate: float, price: float, token_price: float, daily: float,
    as_json: bool,
) -> None:  # fmt: skip
    bill = cost.Prices(rate, price, token_price, daily).of(estimate)
    answer(bill.to_dict(), bill.summary(), as_json=as_json)
