"""`keyhole extract` as a function: open a target, choose a method, run it, judge the result."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from keyhole.core.endpoint import EndpointOptions
from keyhole.core.errors import InputError, expect_count
from keyhole.core.progress import Track, untracked
from keyhole.endpoints import open_endpoint, open_language_model
from keyhole.extract.extraction import Extraction
from keyhole.extract.judge import Method
from keyhole.extract.orthogonal_heads import load_bases
from keyhole.extract.output_layer import OutputLayer, compared
from keyhole.extract.registry import METHODS
from keyhole.oracle.ledger import Ledger, Notice, ignored, session
from keyhole.oracle.protocol import Counted, Oracle
from keyhole.target import LANGUAGE_MODELS, TargetKind, kind_of


def run(
    target: str | Oracle,
    method: str | Method = "auto",
    *,
    reference: str | Path | None = None,
    budget: int | None = None,
    ledger: str | Path | None = None,
    seed: int = 0,
    track: Track = untracked,
    endpoint: EndpointOptions | None = None,
    authorized: bool = False,
    notice: Notice = ignored,
    **options: Any,
) -> Extraction:
    """Extract the weights of a target from its answers.

    `target` is any oracle, or what the command line takes: a .safetensors file, an
    address, `demo`, `MODEL:attention.LAYER`, `MODEL:attention.LAYER+residual`,
    `MODEL:block.LAYER`, or, for its last layer, a language model or a server of one.
    `method` is a name of the registry, or a method with hyperparameters of your own.
    `options` are the hyperparameters of a named method; unknown ones are refused. The
    `bases` of orthogonal heads may be a .safetensors file that holds one for each head.

    `reference` is a model's file or folder, whose last layer is compared with the
    extracted one. `budget` is the largest number of queries. `ledger` is the file that
    stores every answer, so that a stopped run can resume. `endpoint` has the options
    for a server; `authorized` confirms that another machine may be attacked. `notice`
    is called with what the user should know at once.
    """
    expect_count("budget", budget, 0)
    if isinstance(options.get("bases"), str | Path):
        options["bases"] = load_bases(options["bases"])
    if method == "auto" and isinstance(target, str):
        kind = kind_of(target)
        if kind is TargetKind.ATTENTION:
            method = "attention-sub-layer"
        elif kind is TargetKind.BLOCK:
            method = "transformer-block"
        elif kind in LANGUAGE_MODELS:
            method = "output-layer"
    name = method if isinstance(method, str) else type(method).__name__
    method = METHODS.resolve(method, seed, **options)
    if reference is not None and not isinstance(method, OutputLayer):
        raise InputError(f"a reference is for output-layer, not for {name}")
    oracle = target
    if isinstance(oracle, str):
        if isinstance(method, OutputLayer):
            opened = open_language_model
        else:
            opened = open_endpoint
        oracle = opened(
            oracle, options=endpoint or EndpointOptions(), authorized=authorized
        )
    notes = [getattr(oracle, "note", "")]

    def note(message: str) -> None:
        notes.append(message)
        notice(message)

    with session(
        {"": oracle},
        budget=budget,
        ledger=ledger,
        answer_error=options.get("answer_error") or 0.0,
        notice=note,
    ) as parts:
        ready = parts[""]
        progress = track("extract", method.expected_queries(ready.dim))
        progress(0, note=name)
        result = method(Counted(ready, progress=progress))
        if isinstance(ready, Ledger) and ready.asked_again:
            notes.append(
                f"{ready.asked_again} remembered answers were asked for again, uncounted"
            )
    result = replace(result, reason="; ".join([result.reason, *filter(None, notes)]))
    return result if reference is None else compared(result, reference)
