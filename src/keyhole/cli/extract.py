"""`keyhole extract`: parse, one library call, print."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from keyhole.cli import options as opt
from keyhole.cli.app import command, interruptible
from keyhole.cli.bars import bars
from keyhole.cli.outputs import and_tensors, answer, expect_new, say
from keyhole.core import Status, exit_code
from keyhole.core.endpoint import EndpointOptions
from keyhole.core.errors import InputError
from keyhole.core.options import CHECKS, ENDPOINT, settings

if TYPE_CHECKING:
    from keyhole.extract import Extraction
    from keyhole.extract.defences import DefencesTried


@command(
    "keyhole lab plant target.safetensors -o dim=32 -o rank=4",
    "keyhole extract target.safetensors --method low-rank --ledger run.db --json",
    "keyhole lab plant rounded.safetensors -o dim=8 -o decimals=3 -o max_norm=10",
    "keyhole extract rounded.safetensors --method tolerant -o answer_error=5e-4 -o max_norm=10",
    "keyhole lab plant small.safetensors -o dim=8",
    "keyhole extract small.safetensors --against-defences",
    "keyhole extract ./language-model --method output-layer --reference ./language-model",
)
def extract(
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="A .safetensors file, http://host:port/v2/models/NAME, MODEL:block.LAYER (one "
            "block, from 0) or MODEL:attention.LAYER (its "
            "attention; +residual adds the input), or demo; for the last layer of "
            "a language model http://host:port, a folder, a .gguf file or a hub name.",
        ),
    ],
    method: opt.Method = None,
    option: opt.MethodOptions = None,
    against_defences: Annotated[
        bool,
        opt.about(
            "Put every defence in front of the target, attack each by the method that suits it "
            "best, and compare the attacker's copy with what an honest client gets.",
            CHECKS,
            "--against-defences",
        ),
    ] = False,
    reference: Annotated[
        Path | None,
        opt.about(
            "A .gguf file or a folder: compare the extracted last layer with its own.",
            CHECKS,
            metavar="MODEL",
        ),
    ] = None,
    seed: opt.Seed = 0,
    *,
    endpoint: EndpointOptions,
    authorized: opt.Authorized = False,
    budget: Annotated[int | None, opt.about("Ask at most this many queries.", ENDPOINT)] = None,
    ledger: opt.Ledger = None,
    out: opt.Out = None,
    force: opt.Force = False,
    as_json: opt.Json = False,
) -> None:
    """Read the weights back from black-box answers.

    Without --method it is found out from the answers which one applies.
    """
    expect_new(*and_tensors(out), force=force)
    asked: dict[str, Any] = {
        "ledger": ledger, "seed": seed, "endpoint": endpoint, "authorized": authorized,
        "notice": say,
    }  # fmt: skip
    with interruptible(lambda: _kept(ledger)):
        if against_defences:
            if method or reference or budget is not None:
                given = "--method" if method else "--reference" if reference else "--budget"
                raise InputError(f"--against-defences chooses its methods: leave {given} out")
            result, statuses = _against_defences(target, option or [], asked)
        else:
            options = {"method": method or "auto", "reference": reference, "budget": budget}
            result, statuses = _extract(target, option or [], asked | options)
        if out is not None:
            result.save(out)
    answer(result.to_dict(), result.summary(), as_json=as_json)
    raise typer.Exit(exit_code(statuses))


def _extract(
    target: str, words: list[str], options: dict[str, Any]
) -> tuple[Extraction, list[Status]]:
    from keyhole.extract.registry import METHODS
    from keyhole.extract.run import run

    options |= opt.method_options(METHODS, options["method"], words)
    with bars("extract", "queries, the judge's included", each=False) as track:
        result = run(target, **options, track=track)
    return result, [result.status]


def _against_defences(
    target: str, words: list[str], options: dict[str, Any]
) -> tuple[DefencesTried, list[Status]]:
    from keyhole.extract.defences import against_defences

    options |= settings(words, {"usual_norm": float}, "--against-defences")
    with bars("extract", "defences") as track:
        result = against_defences(target, **options, track=track)
    return result, result.statuses


def _kept(ledger: Path | None) -> str:
    """What a stopped run has paid for already."""
    from keyhole.oracle.ledger import answers_in

    if ledger is None:
        return ""
    return f"{answers_in(ledger):,} answers are in {ledger}: the same command resumes"
