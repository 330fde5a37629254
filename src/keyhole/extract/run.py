"""`keyhole extract` as a function: open a target, choose a method, ask, judge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from keyhole.core.endpoint import EndpointOptions
from keyhole.core.errors import InputError, expect_count
from keyhole.core.progress import Track, untracked
from keyhole.extract.extraction import Extraction
from keyhole.extract.judge import Method
from keyhole.extract.orthogonal_heads import load_bases
from keyhole.extract.output_layer import OutputLayer
from keyhole.extract.registry import METHODS
from keyhole.extract.targets import named_method, opened
from keyhole.extract.token_answers import compared
from keyhole.oracle.ledger import Ledger, Notice, ignored, session
from keyhole.oracle.protocol import Counted, Oracle


def run(
    target: str | Oracle,
    method: str | Method = "auto",
    *,
    rank: int | None = None,
    answer_error: float | None = None,
    max_norm: float | None = None,
    accuracy: float | None = None,
    values: str | None = None,
    bound: float | None = None,
    margin: float | None = None,
    repeats: int | None = None,
    bases: str | Path | Sequence[Tensor] | None = None,
    oversampling: float | None = None,
    heads: int | None = None,
    usual_norm: float | None = None,
    min_tokens: int | None = None,
    top: int | None = None,
    tokens: int | None = None,
    reference: str | Path | None = None,
    budget: int | None = None,
    ledger: str | Path | None = None,
    seed: int = 0,
    track: Track = untracked,
    endpoint: EndpointOptions | None = None,
    authorized: bool = False,
    notice: Notice = ignored,
) -> Extraction:
    """Read the weights of a target back from its answers.

    `target` is what the command line takes (a .safetensors file, an address, `demo`,
    `MODEL:attention.LAYER`, `MODEL:attention.LAYER+residual`, for its last layer a language model
    or a server of one) or any oracle; `method` a name of the registry or a method with
    hyperparameters of your own. `rank` to `tokens` are for the named methods that have them; given
    with another they are refused. `bases` are matrices, or a .safetensors file that holds one for
    each head. `reference` is a model's file or folder, beside whose last layer the stolen one is
    held. `budget` is the most
    queries to ask; `ledger` the file that remembers every answer, from which a run that was
    stopped goes on. `endpoint` says how a server is asked, `authorized` that it may be though it is
    another machine; `notice` is told what a person should know at once.
    """
    expect_count("a budget", budget, 0)
    options = {
        "rank": rank, "answer_error": answer_error, "max_norm": max_norm, "accuracy": accuracy,
        "values": values, "bound": bound, "margin": margin, "repeats": repeats,
        "bases": load_bases(bases) if isinstance(bases, str | Path) else bases,
        "oversampling": oversampling, "heads": heads, "usual_norm": usual_norm,
        "min_tokens": min_tokens, "top": top, "tokens": tokens,
    }  # fmt: skip
    if method == "auto" and isinstance(target, str):
        method = named_method(target) or method
    if isinstance(method, str):
        name = method
        method = METHODS.make(name, **options, seed=seed)
    else:
        name = type(method).__name__
        given = [option for option, value in options.items() if value is not None]
        if given:
            raise InputError(f"expected {given[0]} as a field of the {name} given, got it apart")
    if reference is not None and not isinstance(method, OutputLayer):
        raise InputError(f"expected --reference with output-layer, got {name}")
    oracle = target
    if isinstance(oracle, str):
        language_model = isinstance(method, OutputLayer)
        oracle = opened(
            oracle, endpoint or EndpointOptions(), authorized=authorized,
            language_model=language_model,
        )  # fmt: skip
    notes = [getattr(oracle, "note", "")]

    def heard(line: str) -> None:
        notes.append(line)
        notice(line)

    with session(
        {"": oracle}, budget=budget, ledger=ledger, answer_error=answer_error, notice=heard
    ) as surfaces:
        ready = surfaces[""]
        progress = track("extract", method.expected(ready.dim))
        progress(0, note=name)
        result = method(Counted(ready, progress=progress))
        if isinstance(ready, Ledger) and ready.asked_again:
            notes.append(f"{ready.asked_again} remembered answers were asked for again, uncounted")
    result = replace(result, reason="; ".join([result.reason, *filter(None, notes)]))
    return result if reference is None else compared(result, reference)
