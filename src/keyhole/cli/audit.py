"""`keyhole audit`: parse, one library call, print."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from keyhole.audit.options import AuditOptions
from keyhole.cli import options as opt
from keyhole.cli.app import command, interruptible
from keyhole.cli.bars import bars, report_resuming
from keyhole.cli.console import answer, say
from keyhole.cli.outputs import OutputFiles, Outputs
from keyhole.cli.policy import BaselineFile, Environment, Judge, PolicyFile
from keyhole.core import Audit
from keyhole.core.errors import InputError
from keyhole.core.options import OUTPUT, TARGET

if TYPE_CHECKING:
    from collections.abc import Sequence

PAGE, FINDINGS = Path("keyhole-report.html"), Path("keyhole-report.json")
_TARGET_HELP = (
    "A .safetensors file, http://host:port/v2/models/NAME, a model (folder, .gguf file or hub "
    "name), demo, or a vector store: chroma:FOLDER, qdrant:FOLDER, lancedb:FOLDER, postgresql://…, "
    "http://…/v1/embeddings, or a file .faiss, .parquet, .npy, .npz, .jsonl; with --model also "
    "http://host:port, a server of a language model, or a file: a saved slot of llama.cpp, a leak "
    "of keyhole lab capture, or what another program saved of a model's states or cache (.pt, "
    ".safetensors)."
)


@command(
    "keyhole audit demo --output json=audit.json --output html=audit.html "
    "--output sarif=audit.sarif",
    "keyhole audit ./my-model --data texts.tsv --texts 10",
)
def audit(
    target: Annotated[str | None, typer.Argument(metavar="TARGET", help=_TARGET_HELP)] = None,
    targets: Annotated[
        Path | None,
        opt.about(
            "Audit every target of a TOML file instead, with these options by their names; what "
            "the file does not say is as given here.",
            TARGET,
            metavar="FILE",
        ),
    ] = None,
    *,
    options: AuditOptions,
    outputs: OutputFiles = None,
    out: Annotated[
        Path | None,
        opt.about(
            "With --targets: where findings and pages go, keyhole-fleet if not given.",
            OUTPUT,
            metavar="FOLDER",
        ),
    ] = None,
    policy: PolicyFile = None,
    environment: Environment = None,
    baseline: BaselineFile = None,
    force: opt.Force = False,
    as_json: opt.Json = False,
    processes: opt.Processes = 0,
    dask: opt.Dask = None,
) -> None:
    """Try every attack that applies, and report what the target gives away.

    The page goes to keyhole-report.html and the findings to keyhole-report.json, unless --output
    names other files. Every finished check is kept in a journal next to the findings until those
    are written; the same command goes on from there. Without TARGET the policy's targets are
    audited.
    """
    judge = Judge.of(policy, environment, None)
    options = replace(options, only=options.only or tuple(judge.policy.exposures))
    named: Sequence[str] = judge.policy.targets if target is None and targets is None else ()
    if named and judge.policy.data is not None:
        options = replace(options, data=options.data or judge.policy.data)
    if len(named) == 1:
        target = named[0]
    fleet = targets or (named if len(named) > 1 else ())
    if fleet:
        from keyhole.cli.fleets import FOLDER, audit_fleet

        if target is not None or options.ledger is not None:
            given = "TARGET" if target is not None else "--ledger"
            raise InputError(f"{given} is for one target: a fleet names its own in --targets FILE")
        raise typer.Exit(
            audit_fleet(
                fleet, judge, options, out or FOLDER, baseline=baseline, outputs=outputs,
                processes=processes, dask=dask, force=force, as_json=as_json,
            )
        )  # fmt: skip
    if target is None:
        raise InputError("name a TARGET, a file of them with --targets, or a policy with targets")
    if out is not None:
        raise InputError("--out is for --targets; use --output FORMAT=FILE for one target")
    if baseline is not None:
        judge = judge.against(Audit.load(baseline))
    _audit_one(
        target, options, judge, outputs, processes=processes, dask=dask, force=force,
        as_json=as_json,
    )  # fmt: skip


def _audit_one(
    target: str, options: AuditOptions, judge: Judge, outputs: list[str] | None, *,
    processes: int, dask: str | None, force: bool, as_json: bool,
) -> None:  # fmt: skip
    from keyhole import report
    from keyhole.audit.run import audit as run
    from keyhole.report import json_form
    from keyhole.report.formats import FORMATS

    always = {"html": PAGE, "json": FINDINGS}
    wanted = Outputs.of(outputs, FORMATS, force=force, as_json=as_json, defaults=always)
    findings = wanted.file("json") if "json" in dict(wanted.files) else FINDINGS
    journal = findings.with_name(f"{findings.name}.journal")
    with (
        interruptible(lambda: _kept(journal, options.ledger)),
        bars("audit", "checks") as track,
    ):
        result = run(
            target, options, processes=processes, dask=dask, journal=journal, force=force,
            track=track, resuming=report_resuming, notice=say,
        )  # fmt: skip
        assessment = judge(result)
        wanted.write(assessment)
    again = _unanswered(result, journal)
    if not wanted.printed(assessment):
        answer(json_form.document(assessment), report.table(result, assessment), as_json=as_json)
    wanted.report()
    if missing := _missing_extras(result):
        say(f"not all of it was tried or proved: pip install 'keyhole[{missing}]' adds the rest")
    if again:
        say(again)
    raise typer.Exit(assessment.exit_code)


def _kept(journal: Path, ledger: str | None) -> str:
    """What a stopped audit has behind it."""
    from keyhole.core.journal import records_in
    from keyhole.oracle.ledger import answers_in

    checks = records_in(journal)
    kept = [f"{checks} finished checks are in {journal}"] if checks else []
    if ledger is not None:
        kept.append(f"{answers_in(Path(ledger)):,} answers are in {ledger}")
    return f"{' and '.join(kept)}: the same command resumes" if kept else ""


def _missing_extras(result: Audit) -> str:
    """The extras that are not installed, such as `models,proofs`."""
    named = {part.extra for part in (*result.findings, *result.skips)}
    return ",".join(sorted(named - {""}))


def _unanswered(result: Audit, journal: Path) -> str:
    """Remove the journal of an audit that is complete; of another, say how it is completed."""
    from keyhole.audit.check import Checked

    if Checked(result.findings).answered or not journal.exists():
        journal.unlink(missing_ok=True)
        return ""
    return (
        f"some checks had no answer: the others are kept in {journal}, and the same command with "
        "--force makes those again"
    )
