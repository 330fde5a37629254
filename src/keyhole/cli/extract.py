"""`keyhole extract`: parse, one library call, print."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from keyhole.cli.answers import answer
from keyhole.cli.app import (
    Force,
    Json,
    LedgerFile,
    Seed,
    and_tensors,
    app,
    expect_folder,
    expect_new,
    interruptible,
    name_in,
)
from keyhole.cli.bars import bars
from keyhole.cli.console import say
from keyhole.cli.endpoint import asks_endpoint
from keyhole.core import exit_code
from keyhole.core.endpoint import EndpointOptions
from keyhole.core.errors import InputError
from keyhole.extract.defences import against_defences as try_defences
from keyhole.extract.registry import METHODS
from keyhole.extract.run import run
from keyhole.oracle.ledger import answers_in

_UNIT = "queries, the judge's included"
_AUTO = "auto"


def _for(option: str, about: str, **more: Any) -> Any:
    """An option that some methods have; its help names them, and others refuse it."""
    takers = ", ".join(entry.name for entry in METHODS.values() if option in entry.options)
    return typer.Option(help=f"{about} ({takers}).", **more)


@app.command(
    epilog="\b\nExample:\n"
    "  keyhole plant target.safetensors --dim 32 --rank 4\n"
    "  keyhole extract target.safetensors --method low-rank --ledger run.db --json\n"
    "  keyhole plant rounded.safetensors --dim 8 --decimals 3 --max-norm 10\n"
    "  keyhole extract rounded.safetensors --method tolerant --answer-error 5e-4 --max-norm 10\n"
    "  keyhole plant small.safetensors --dim 8\n"
    "  keyhole extract small.safetensors --against-defences\n"
    "  keyhole extract ./language-model --method output-layer --reference ./language-model",
)
@asks_endpoint
def extract(
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="A .safetensors file, http://host:port/v2/models/NAME, MODEL:attention.LAYER (one "
            "block's attention, from 0; +residual adds the input), or demo; for the last layer of "
            "a language model http://host:port, a folder, a .gguf file or a hub name.",
        ),
    ],
    method: Annotated[
        str, name_in(METHODS, "The attack; auto finds out from the answers which one applies.")
    ] = _AUTO,
    rank: Annotated[int | None, _for("rank", "Rank of W, if known")] = None,
    heads: Annotated[int | None, _for("heads", "The number of heads, if known")] = None,
    bases: Annotated[
        Path | None,
        _for("bases", "A .safetensors file with a basis of each head's subspace", metavar="FILE"),
    ] = None,
    answer_error: Annotated[
        float | None, _for("answer_error", "How far an answer may be off")
    ] = None,
    max_norm: Annotated[
        float | None, _for("max_norm", "Norm of the longest token the target takes")
    ] = None,
    bound: Annotated[float | None, _for("bound", "An upper bound on the norm of W")] = None,
    margin: Annotated[
        float | None,
        _for("margin", "The least non-zero entry of v (for signs: of a v of length 1)"),
    ] = None,
    repeats: Annotated[
        int | None, _for("repeats", "Measure everything so many times, with other probes")
    ] = None,
    accuracy: Annotated[
        float | None,
        _for(
            "accuracy",
            "How exact the result must be; tolerant-as-published only tells how exact answers "
            "would have to be for that",
        ),
    ] = None,
    values: Annotated[
        str | None, _for("values", "How v is read: bisect, or average as in the paper")
    ] = None,
    oversampling: Annotated[
        float | None,
        _for(
            "oversampling", "About how many queries per unknown; for nuclear-norm, per rank times d"
        ),
    ] = None,
    usual_norm: Annotated[
        float | None,
        typer.Option(
            help="The norm of honest clients' tokens, d^(1/4) if not given (ordinary-questions, "
            "ordinary-labels; --against-defences)."
        ),
    ] = None,
    min_tokens: Annotated[
        int | None, _for("min_tokens", "The fewest tokens that the target takes")
    ] = None,
    against_defences: Annotated[
        bool,
        typer.Option(
            "--against-defences",
            help="Put every defence in front of the target, attack each by the method that suits "
            "it best, and compare the attacker's copy with what an honest client gets.",
        ),
    ] = False,
    top: Annotated[
        int | None, _for("top", "The most log-probabilities that the server returns in an answer")
    ] = None,
    tokens: Annotated[
        int | None, _for("tokens", "With --top: how many rows of the matrix to read")
    ] = None,
    reference: Annotated[
        Path | None,
        typer.Option(
            metavar="MODEL",
            help="A .gguf file or a folder: compare the extracted last layer with its own.",
        ),
    ] = None,
    *,
    endpoint: EndpointOptions,
    authorized: bool,
    budget: Annotated[int | None, typer.Option(help="Ask at most this many queries.")] = None,
    ledger: LedgerFile = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Save the result as JSON, the weights beside it."),
    ] = None,
    force: Force = False,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Read the weights back from black-box answers."""
    expect_folder(out)
    expect_new(*and_tensors(out), force=force)
    options: dict[str, Any] = {
        "rank": rank, "answer_error": answer_error, "max_norm": max_norm, "accuracy": accuracy,
        "values": values, "bound": bound, "margin": margin, "repeats": repeats, "bases": bases,
        "oversampling": oversampling, "heads": heads, "min_tokens": min_tokens, "top": top,
        "tokens": tokens, "budget": budget,
    }  # fmt: skip
    if against_defences:
        named = None if method == _AUTO else method
        _expect_none({"method": named, "reference": reference, **options})
        _against_defences(
            target, usual_norm, ledger, out, seed, endpoint, authorized=authorized, as_json=as_json
        )
    with interruptible(lambda: _kept(ledger)), bars("extract", _UNIT, each=False) as track:
        result = run(
            target, method, **options, usual_norm=usual_norm, reference=reference, ledger=ledger,
            seed=seed, track=track, endpoint=endpoint, authorized=authorized, notice=say,
        )  # fmt: skip
        if out is not None:
            result.save(out)
    answer(result.to_dict(), result.summary(), as_json=as_json)
    raise typer.Exit(exit_code([result.status]))


def _expect_none(options: dict[str, Any]) -> None:
    """The defences decide how they are attacked."""
    for name, value in options.items():
        if value is not None:
            flag = f"--{name.replace('_', '-')}"
            raise InputError(f"expected no {flag} with --against-defences, got {value}")


def _against_defences(
    target: str, usual_norm: float | None, ledger: Path | None, out: Path | None, seed: int,
    endpoint: EndpointOptions, *, authorized: bool, as_json: bool,
) -> None:  # fmt: skip
    with interruptible(lambda: _kept(ledger)), bars("extract", "defences") as track:
        result = try_defences(
            target, usual_norm=usual_norm, ledger=ledger, seed=seed, track=track,
            endpoint=endpoint, authorized=authorized, notice=say,
        )  # fmt: skip
        if out is not None:
            result.save(out)
    answer(result.to_dict(), result.summary(), as_json=as_json)
    raise typer.Exit(exit_code(result.statuses))


def _kept(ledger: Path | None) -> str:
    """What a stopped run has paid for already."""
    if ledger is None:
        return ""
    return f"{answers_in(ledger):,} answers are in {ledger}: the same command resumes"
