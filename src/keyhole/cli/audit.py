"""`keyhole audit`: parse, one library call, print."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from keyhole import report
from keyhole.audit.check import Checked
from keyhole.audit.opening import Opening
from keyhole.audit.run import audit as run
from keyhole.cli.answers import answer
from keyhole.cli.app import (
    CorpusFile,
    DaskAddress,
    Device,
    Force,
    Json,
    LedgerFile,
    Processes,
    Seed,
    app,
    expect_folder,
    expect_new,
    interruptible,
)
from keyhole.cli.bars import bars
from keyhole.cli.console import say
from keyhole.cli.endpoint import asks_endpoint
from keyhole.cli.fleets import FOLDER, audit_fleet, expect_none_of
from keyhole.cli.judging import Environment, Judge, PolicyFile
from keyhole.cli.outputs import Outputs, output_option
from keyhole.core import Audit
from keyhole.core.endpoint import EndpointOptions
from keyhole.core.errors import MOST, InputError
from keyhole.core.files import write_text
from keyhole.core.journal import records_in
from keyhole.oracle.connection import without_password
from keyhole.oracle.ledger import answers_in
from keyhole.report import json_form
from keyhole.report.fleet import FLEET_FORMATS
from keyhole.report.formats import FORMATS

PAGE, FINDINGS = Path("keyhole-report.html"), Path("keyhole-report.json")


def _count(number: str | int) -> int:
    """A number, or all that there are."""
    if number == "all":
        return MOST
    try:
        return int(number)
    except ValueError:
        raise InputError(f"expected --texts as a number or all, got {number}") from None


@app.command(
    epilog="\b\nExample:\n  keyhole audit demo --json-file audit.json --page audit.html "
    "--output sarif=audit.sarif\n"
    "  keyhole audit ./my-model --data texts.tsv --texts 10"
)
@asks_endpoint
def audit(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="TARGET",
            help="A .safetensors file, http://host:port/v2/models/NAME, a model (folder, .gguf "
            "file or hub name), demo, or a vector store: chroma:FOLDER, qdrant:FOLDER, "
            "lancedb:FOLDER, postgresql://…, http://…/v1/embeddings, or a file .faiss, .parquet, "
            ".npy, .npz, .jsonl; with --model also http://host:port, a server of a language "
            "model, or a file: a saved slot of llama.cpp, a leak of keyhole capture, or what "
            "another program saved of a model's states or cache (.pt, .safetensors).",
        ),
    ] = None,
    targets: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Audit every target of a TOML file instead, with these options by their names; "
            "what the file does not say is as given here (docs/fleets.md).",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="With --targets: where findings and pages go, keyhole-fleet if not given.",
        ),
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="The encoder that made a store's vectors: a folder, a hub name, or demo; given "
            "several times, the right one is found. For a server or a leak, its model."
        ),
    ] = None,
    known: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Texts that are in the store, one per line: they show how its vectors are made.",
        ),
    ] = None,
    corpus: CorpusFile = None,
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Texts to try a model with: .txt (one a line), or .tsv, .csv, .jsonl with a "
            "column sentence or text.",
        ),
    ] = None,
    texts: Annotated[
        int | None,
        typer.Option(
            parser=_count,
            metavar="[NUMBER|all]",
            help="How many of the texts to read back: of a model the first 3, of a store 20 chosen "
            "at random, if not given.",
        ),
    ] = None,
    flips: Annotated[
        int, typer.Option(help="How many of a classifier's answers to try to flip.")
    ] = 12,
    column: Annotated[str | None, typer.Option(help="The column that holds the texts.")] = None,
    label: Annotated[
        str | None,
        typer.Option(
            help="The column that holds the right class: label, if there is one; without it, the "
            "model's own answer is taken to be right."
        ),
    ] = None,
    layers: Annotated[
        str | None,
        typer.Option(
            help="Layers to look at, such as 1,6,12, or all; by default all of a small model, of "
            "others the first, middle, last."
        ),
    ] = None,
    device: Device = "cpu",
    processes: Processes = 0,
    dask: DaskAddress = None,
    *,
    endpoint: EndpointOptions,
    authorized: bool,
    page: Annotated[
        Path, typer.Option(metavar="FILE", help="Where to write the page for people.")
    ] = PAGE,
    json_file: Annotated[
        Path, typer.Option(metavar="FILE", help="Where to write the findings for a pipeline.")
    ] = FINDINGS,
    outputs: Annotated[
        list[str] | None,
        output_option(FORMATS, f" (of a fleet, one file for all: {', '.join(FLEET_FORMATS)})"),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[FAMILY|RULE]",
            help="Check only this: weights, inputs, text, predictions, or rules such as "
            "KH-TEXT-HIDDEN-STATES or KH-WEIGHTS-*. May be given several times.",
        ),
    ] = None,
    policy: PolicyFile = None,
    environment: Environment = None,
    baseline: Annotated[
        Path | None,
        typer.Option(
            metavar="AUDIT.json|FOLDER",
            help="An earlier audit of the same target: what is no worse than there does not fail. "
            "With --targets, the folder of --out of an earlier fleet.",
        ),
    ] = None,
    ledger: LedgerFile = None,
    force: Force = False,
    against_defences: Annotated[
        bool,
        typer.Option(
            "--against-defences",
            help="Also put defences in front of endpoints that score with one head, and of what "
            "models leak; the attack on each knows the defence.",
        ),
    ] = False,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Try every attack that applies, and report what the target gives away.

    Every finished check is kept in a journal beside the findings until those are written; the same
    command goes on from there. Without TARGET the policy's targets are audited.
    """
    judge = Judge.of(policy, environment, None)
    chosen = tuple(only or judge.policy.exposures)
    named = judge.policy.targets if target is None and targets is None else ()
    if named and judge.policy.data is not None:
        data = data or Path(judge.policy.data)
    if len(named) == 1:
        target = named[0]
    fleet = targets or (named if len(named) > 1 else ())
    if fleet:
        own = {"TARGET": target is not None, "--ledger": ledger is not None, "--page": page != PAGE,
               "--json-file": json_file != FINDINGS,}  # fmt: skip
        expect_none_of(own)
        base = Opening(
            "", tuple(model or ()), known and str(known), corpus and str(corpus),
            data and str(data), texts, flips, column, label, _numbers(layers), device,
            authorized=authorized, endpoint=endpoint, against_defences=against_defences, seed=seed,
            only=chosen,
        )  # fmt: skip
        raise typer.Exit(
            audit_fleet(
                fleet, judge, base.anywhere(), out or FOLDER, baseline=baseline, outputs=outputs,
                processes=processes, dask=dask, force=force, as_json=as_json,
            )
        )  # fmt: skip
    if target is None:
        raise InputError("expected TARGET, --targets FILE, or a policy with targets, got none")
    if out is not None:
        raise InputError(f"expected --out with --targets, got {without_password(target)}")
    if baseline is not None:
        judge = judge.against(Audit.load(baseline))
    journal = json_file.with_name(f"{json_file.name}.journal")
    expect_folder(json_file, page)
    expect_new(json_file, page, force=force)
    wanted = Outputs.of(outputs, (json_file, page), FORMATS, force=force, as_json=as_json)
    with (
        interruptible(lambda: _kept(journal, ledger)),
        bars("audit", "checks") as track,
    ):
        result = run(
            target, model=model, known=known, corpus=corpus,
            data=data, texts=texts, flips=flips, column=column, label=label,
            layers=_numbers(layers), device=device, processes=processes, dask=dask, ledger=ledger,
            journal=journal, force=force, authorized=authorized, endpoint=endpoint,
            against_defences=against_defences, only=chosen, seed=seed, track=track,
            resuming=_say_resuming, notice=say,
        )  # fmt: skip
        assessment = judge(result)
        write_text(json_file, json_form.render(assessment))
        write_text(page, report.render(result, assessment))
        wanted.write(assessment)
    again = _unanswered(result, journal)
    if not wanted.printed(assessment):
        answer(json_form.document(assessment), report.table(result, assessment), as_json=as_json)
    say(f"page: {page}   findings: {json_file}")
    if missing := _missing_extras(result):
        say(f"not all of it was tried or proved: pip install 'keyhole[{missing}]' adds the rest")
    if again:
        say(again)
    raise typer.Exit(assessment.exit_code)


def _say_resuming(done: int, total: int) -> None:
    say(f"resuming: {done} of {total} checks are done")


def _kept(journal: Path, ledger: Path | None) -> str:
    """What a stopped audit has behind it."""
    checks = records_in(journal)
    kept = [f"{checks} finished checks are in {journal}"] if checks else []
    if ledger is not None:
        kept.append(f"{answers_in(ledger):,} answers are in {ledger}")
    return f"{' and '.join(kept)}: the same command resumes" if kept else ""


def _missing_extras(result: Audit) -> str:
    """The extras that are not installed, such as `models,proofs`."""
    named = {part.extra for part in (*result.findings, *result.skips)}
    return ",".join(sorted(named - {""}))


def _unanswered(result: Audit, journal: Path) -> str:
    """Remove the journal of an audit that is complete; of another, say how it is completed."""
    if Checked(result.findings).answered or not journal.exists():
        journal.unlink(missing_ok=True)
        return ""
    return (
        f"some checks had no answer: the others are kept in {journal}, and the same command with "
        "--force makes those again"
    )


def _numbers(layers: str | None) -> tuple[int, ...] | Literal["all"] | None:
    if layers is None or layers == "all":
        return layers
    try:
        return tuple(int(part) for part in layers.split(","))
    except ValueError:
        raise InputError(f"expected layers such as 1,6,12, or all, got {layers}") from None
