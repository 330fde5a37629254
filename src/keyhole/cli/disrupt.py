"""`keyhole disrupt`: parse, one library call, print."""

from __future__ import annotations

import importlib
from collections.abc import Generator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from keyhole.cli.app import (
    CLEAN,
    FAILURE,
    FINDINGS,
    INTERRUPTED,
    AllowPickle,
    Classes,
    Device,
    Json,
    Longest,
    ModelName,
    Seed,
    TextColumn,
    app,
    expect_folder,
    model_path,
)
from keyhole.cli.console import progress, say
from keyhole.errors import InputError, KeyholeError
from keyhole.percent import percent

if TYPE_CHECKING:  # torch takes seconds to load: --help should not wait for it
    from concurrent.futures import Executor

    from keyhole.data import Example
    from keyhole.disrupt import Disruption, HackAttend, ModelSource


class TaskName(StrEnum):
    CLASSIFICATION = "classification"
    CHOICE = "choice"
    CAUSAL = "causal"
    SEQ2SEQ = "seq2seq"


class RankingName(StrEnum):
    REMOVAL = "removal"
    GRADIENT = "gradient"
    MAGNITUDE = "magnitude"
    ATTENTION = "attention"
    GRADIENT_ATTENTION = "gradient*attention"
    RANDOM = "random"


class ScheduleName(StrEnum):
    RERANK = "rerank"
    GREEDY = "greedy"


class ScopeName(StrEnum):
    HEAD = "head"
    MODEL = "model"


class ScaleName(StrEnum):
    FULL = "full"
    HALF = "half"


class SpareName(StrEnum):
    SPECIAL = "special"
    SPECIAL_KEYS = "special keys"
    PADDING = "padding"


@app.command(
    epilog="\b\nExample:\n"
    "  keyhole disrupt demo --examples 2 --out flips.json --page flips.html\n"
    "  keyhole disrupt ./my-classifier --data dev.tsv --examples 4 --resume run.jsonl --json"
)
def disrupt(
    model: ModelName,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Examples: .tsv, .csv, .jsonl, .json (HellaSwag, DREAM, ReClor), .txt, or a "
            "dataset's name on the hub.",
        ),
    ] = None,
    text: TextColumn = None,
    label: Annotated[
        str,
        typer.Option(help="The column of the right classes; without it, the model's own answers."),
    ] = "label",
    classes: Classes = None,
    examples: Annotated[int | None, typer.Option(help="Only the first so many.")] = None,
    share: Annotated[float, typer.Option(help="The share of attention to cut, at most.")] = 0.01,
    scope: Annotated[
        ScopeName, typer.Option(help="The share of each head's units, or of the whole model's.")
    ] = ScopeName.HEAD,
    task: Annotated[
        TaskName | None, typer.Option(help="What the model's head does, if it cannot be told.")
    ] = None,
    ranking: Annotated[
        RankingName | None, typer.Option(help="Which units go first: removal, if not as released.")
    ] = None,
    schedule: Annotated[
        ScheduleName | None, typer.Option(help="Re-ranked after every step, or greedy by head.")
    ] = None,
    as_released: Annotated[
        bool, typer.Option("--as-released", help="The paper's own attack, and not the stronger.")
    ] = False,
    scale: Annotated[
        ScaleName, typer.Option(help="All heads, or the better half of each half (as released).")
    ] = ScaleName.FULL,
    spare: Annotated[
        SpareName,
        typer.Option(help="What is never cut: special tokens, these as keys only, or padding."),
    ] = SpareName.SPECIAL,
    target: Annotated[int | None, typer.Option(help="The class to flip to; any other.")] = None,
    continuation: Annotated[
        int, typer.Option(help="Tokens of a language model's answer; one that differs is a flip.")
    ] = 1,
    longest: Longest = 128,
    device: Device = "cpu",
    processes: Annotated[
        int, typer.Option(help="Work in so many processes; 0 is this one, as a GPU wants.")
    ] = 0,
    dask: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="A Dask cluster: tcp://host:8786.")
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Remember each outcome; the same command goes on."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Save every outcome as JSON.")
    ] = None,
    page: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A page that shows what was cut.")
    ] = None,
    allow_pickle: AllowPickle = False,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Flip predictions by cutting a small share of attention, the text left alone."""
    from keyhole.disrupt import sweep
    from keyhole.files import write_text
    from keyhole.results import dump

    if processes < 0:
        raise InputError(f"expected 0 processes or more, got {processes}")
    expect_folder(out, page, resume)
    method = _method(
        share, ranking, schedule, as_released, scope=scope.value, scale=scale.value,
        spare=spare.value, target=target, continuation=continuation, seed=seed,
    )  # fmt: skip
    source = _source(model, task, device, longest, allow_pickle)
    tried = _examples(source, data, text, label, classes, examples)
    say(f"{model}: {len(tried)} examples, at most {percent(share, 2)} of {_SCOPES[scope]}")
    try:
        with _cluster(dask) as (executor, size), progress("examples") as track:
            show = track("as released" if as_released else "HackAttend", len(tried))
            found = sweep(
                method,
                source,
                tried,
                executor,
                workers=size or processes,
                resume=resume,
                watch=show,
            )
    except KeyboardInterrupt:
        kept = f"; what is finished is in {resume}: the same command goes on" if resume else ""
        say(f"keyhole: stopped{kept}", style="yellow")
        raise typer.Exit(INTERRUPTED) from None
    result = {**found.to_dict(), "kind": "disruption", "data": data or "the reviews in the box"}
    if out is not None:
        write_text(out, dump(result))
    if page is not None:
        write_text(page, _page(source, model, tried, found, method))
    if as_json:
        typer.echo(dump(result))
    say(_summary(found))
    if found.failed and not found.outcomes:
        raise typer.Exit(FAILURE)
    raise typer.Exit(FINDINGS if found.flips else CLEAN)


_SCOPES = {ScopeName.HEAD: "each head's units", ScopeName.MODEL: "all units"}


def _method(
    share: float,
    ranking: RankingName | None,
    schedule: ScheduleName | None,
    as_released: bool,
    **options: Any,
) -> HackAttend:
    from keyhole.disrupt import HackAttend

    greedy = as_released or schedule is ScheduleName.GREEDY
    if options["scale"] != ScaleName.FULL and not greedy:
        raise InputError("expected --as-released or --schedule greedy with --scale, got neither")
    if ranking is not None:
        options["ranking"] = ranking.value
    if as_released:
        if schedule is ScheduleName.RERANK:
            raise InputError("expected --schedule greedy with --as-released, got rerank")
        return HackAttend.as_released(share, **options)
    if schedule is not None:
        options["schedule"] = schedule.value
    return HackAttend.strongest(share, **options)


def _source(
    model: str, task: TaskName | None, device: str, longest: int, allow_pickle: bool
) -> ModelSource:
    from keyhole.disrupt import ModelSource
    from keyhole.models.loading import task_of

    name = model_path(model)
    guessed = task_of(name) if task is None else task.value
    if guessed == "base":
        raise InputError(
            f"expected a model with a head, got {model}: name its --task, or train one with "
            "keyhole harden"
        )
    return ModelSource(name, guessed, device, longest, allow_pickle)


def _examples(
    source: ModelSource,
    data: str | None,
    text: list[str] | None,
    label: str,
    classes: str | None,
    limit: int | None,
) -> list[Example]:
    from keyhole.data import read_examples
    from keyhole.models.demo import EXAMPLES, FOLDER
    from keyhole.models.loading import SPEAKING, class_names, load_config

    if limit is not None and limit < 1:
        raise InputError(f"expected one example or more, got {limit}")
    if data is None:
        if source.name != str(FOLDER):
            raise InputError("expected --data with examples, got none")
        return list(EXAMPLES[:limit])
    names = classes.split(",") if classes else class_names(load_config(source.name))
    speaks = source.task in SPEAKING  # it needs no labels
    found = read_examples(
        data, text=text or (), label="" if speaks else label, names=names, limit=limit,
        labelled=False,
    )  # fmt: skip
    if (source.task == "choice") != bool(found[0].choices):
        wanted = "choices" if source.task == "choice" else "texts"
        raise InputError(f"expected {wanted} in {data} for {source.task}, got {found[0].text[:40]}")
    return found


@contextmanager
def _cluster(address: str | None) -> Generator[tuple[Executor | None, int]]:
    """A Dask cluster as an executor and its number of workers, where there is an address."""
    if address is None:
        yield None, 0
        return
    try:
        library = importlib.import_module("distributed")
    except ImportError as missing:
        raise InputError(
            "expected distributed for --dask, got none: pip install 'keyhole[cluster]'"
        ) from missing
    try:
        client: Any = library.Client(address, timeout="10s")
    except (OSError, ValueError, TypeError) as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise KeyholeError(f"expected a Dask scheduler at {address}, got {first}") from error
    with client:
        yield client.get_executor(), max(1, len(client.scheduler_info()["workers"]))


def _page(
    source: ModelSource, model: str, examples: list[Example], found: Disruption, method: HackAttend
) -> str:
    """The audit's own page, with this one finding."""
    from datetime import UTC, datetime

    from keyhole import report
    from keyhole.audit import Audit
    from keyhole.audit.flips import cuts_of, finding
    from keyhole.models.loading import load_config, load_tokenizer

    cuts = cuts_of(
        load_tokenizer(source.name), load_config(source.name), examples, found, source.task
    )
    one = finding("", found, cuts, found.seconds)
    return report.render(
        Audit(model, source.name, (one,), (), method.seed, found.seconds,
              datetime.now(UTC).isoformat(timespec="seconds"))
    )  # fmt: skip


def _summary(found: Disruption) -> str:
    right = len(found.attacked)
    lines = [f"{found.flips} of {right} right answers flipped ({percent(found.success, 1)})"]
    if found.flips:
        lines[0] += f", by {percent(found.share, 2)} of all units on average"
    lines.append(
        f"accuracy before: {percent(found.accuracy, 1)} ({found.skipped} of {len(found.outcomes)} "
        f"were wrong and left alone); {found.queries:.0f} queries an example, {found.seconds:.1f} s"
    )
    lines.append(f"control, nothing cut: logits changed by {found.control.change:g}")
    lines += [f"no outcome for {name}: {why}" for name, why in found.failed]
    return "\n".join(lines)
