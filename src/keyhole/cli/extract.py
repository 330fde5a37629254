"""`keyhole extract`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from keyhole.cli import options as opt
from keyhole.cli.app import command, interruptible
from keyhole.cli.bars import bars
from keyhole.cli.outputs import answer, expect_new, say, with_tensor_file
from keyhole.core import exit_code
from keyhole.core.endpoint import EndpointOptions
from keyhole.core.options import CHECKS, ENDPOINT, option


@command(
    "keyhole lab plant target.safetensors -o dim=32 -o rank=4",
    "keyhole extract target.safetensors --method low-rank --ledger run.db --json",
    "keyhole lab plant rounded.safetensors -o dim=8 -o decimals=3 -o max_norm=10",
    "keyhole extract rounded.safetensors --method tolerant -o answer_error=5e-4 -o max_norm=10",
    "keyhole extract ./language-model --method output-layer --reference ./language-model",
)
def extract(
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="A .safetensors file, http://host:port/v2/models/NAME, MODEL:block.LAYER (one "
            "block, from 0) or MODEL:attention.LAYER (its attention; +residual adds the input), or "
            "demo; for the last layer of a language model http://host:port, a folder, a .gguf file "
            "or a hub name.",
        ),
    ],
    method: opt.Method = None,
    hyperparameters: opt.MethodOptions = None,
    reference: Path | None = option(
        None,
        "A .gguf file or a folder: compare the extracted last layer with its own.",
        CHECKS,
        metavar="MODEL",
    ),
    seed: opt.Seed = 0,
    device: opt.Device = "cpu",
    *,
    endpoint: EndpointOptions,
    authorized: opt.Authorized = False,
    budget: int | None = option(None, "Ask at most this many queries.", ENDPOINT),
    ledger: opt.Ledger = None,
    out: opt.Out = None,
    force: opt.Force = False,
    as_json: opt.Json = False,
) -> None:
    """Read the weights back from black-box answers.

    Without --method, the answers decide which method applies.
    """
    from keyhole.core.machine import expect_device
    from keyhole.extract.registry import METHODS
    from keyhole.extract.run import run

    expect_new(*with_tensor_file(out), force=force, inputs=(target, reference))
    expect_device(device)
    method = method or "auto"
    with interruptible(lambda: _kept(ledger)):
        options = opt.method_options(METHODS, method, hyperparameters)
        if device != "cpu":
            options["device"] = device
        with bars("extract", "queries, the judge's included", each=False) as track:
            result = run(
                target,
                method,
                reference=reference,
                budget=budget,
                ledger=ledger,
                seed=seed,
                track=track,
                endpoint=endpoint,
                authorized=authorized,
                notice=say,
                **options,
            )
        if out is not None:
            result.save(out)
    answer(result.to_dict(), result.summary(), as_json=as_json)
    raise typer.Exit(exit_code([result.status]))


def _kept(ledger: Path | None) -> str:
    """Return a sentence about the answers that a stopped run has paid for."""
    from keyhole.oracle.ledger import answers_in

    if ledger is None:
        return ""
    return f"{answers_in(ledger):,} answers are in {ledger}: the same command resumes"
