"""`keyhole audit`, of one target or of many."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from keyhole.audit.options import AuditOptions, expect_fitting
from keyhole.cli import options as opt
from keyhole.cli.app import command, interruptible
from keyhole.cli.bars import bars
from keyhole.cli.outputs import OutputFiles, Outputs, expect_new, say
from keyhole.cli.policy import BaselineFile, Environment, Judge, PolicyFile
from keyhole.core import Audit, read
from keyhole.core.errors import InputError
from keyhole.core.files import exists, is_folder, unwritable, write_text
from keyhole.core.journal import digest, records_in
from keyhole.core.options import OUTPUT, TARGET, option

if TYPE_CHECKING:
    from keyhole.audit.fleets import Member

_NO_FILE_NAME = re.compile(r"[^\w.-]+")
FOLDER = Path("keyhole-fleet")
JOURNAL = "fleet.journal"
INDEX = "index.html"
JOURNALS = "*.journal"
_TARGET_HELP = (
    "A .safetensors file, http://host:port/v2/models/NAME, a model (folder, .gguf file or hub "
    "name), demo, or a vector store: chroma:FOLDER, qdrant:FOLDER, lancedb:FOLDER, milvus:FOLDER, "
    "milvus:http://host:port, weaviate:http://host:port, postgresql://…, http://…/v1/embeddings, "
    "or a file .faiss, .parquet, .npy, .jsonl; with --model also "
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
    target: Annotated[
        str | None, typer.Argument(metavar="TARGET", help=_TARGET_HELP)
    ] = None,
    targets: Path | None = option(
        None,
        "Audit every target in a TOML file instead. The file may set all these options by name; "
        "those that it does not set are taken from the command line.",
        TARGET,
        metavar="FILE",
    ),
    *,
    options: AuditOptions,
    outputs: OutputFiles = None,
    out: Path | None = option(
        None,
        "With --targets: where findings and pages go, keyhole-fleet if not given.",
        OUTPUT,
        metavar="FOLDER",
    ),
    policy: PolicyFile = None,
    environment: Environment = None,
    baseline: BaselineFile = None,
    force: opt.Force = False,
    as_json: opt.Json = False,
    processes: opt.Processes = 0,
    dask: opt.Dask = None,
) -> None:
    """Try every attack that applies, and report what the target gives away.

    The page goes to keyhole-NAME.html and the findings to keyhole-NAME.json, where NAME
    comes from the target, unless --output names other files. Every finished check is
    kept in a journal next to the findings until those are written; the same command
    resumes from it. Without TARGET, the policy's targets are audited.
    """
    judge = Judge.of(policy, environment, None)
    rules = judge.policy
    judge = replace(judge, policy=replace(rules, returns=()))  # they go into each audit
    options = replace(options, returns=options.returns or rules.returns)
    fleet: Path | Sequence[str] = targets or ()
    if target is None and targets is None and rules.targets:
        options = replace(options, data=options.data or rules.data)
        fleet = rules.targets
        if len(fleet) == 1:
            (target,) = fleet
            fleet = ()
    run = _Run(
        judge, options, outputs, force, as_json, {"processes": processes, "dask": dask}
    )
    if fleet:
        own = {"TARGET": target, "--ledger": options.ledger, "--name": options.name}
        for name, value in own.items():
            if value is not None:
                raise InputError(
                    f"{name} is for one target: in a fleet, each target has its own"
                )
        raise typer.Exit(_audit_fleet(fleet, run, out or FOLDER, baseline))
    if target is None:
        raise InputError(
            "name a TARGET, a file of them with --targets, or a policy with targets"
        )
    if out is not None:
        raise InputError(
            "--out is for --targets; use --output FORMAT=FILE for one target"
        )
    if baseline is not None:
        run = replace(run, judge=judge.against(Audit.load(baseline)))
    raise typer.Exit(_audit_one(target, run, baseline))


@dataclass(frozen=True)
class _Run:
    """The options of a command; `scale` says where checks are made."""

    judge: Judge
    options: AuditOptions
    outputs: list[str] | None
    force: bool
    as_json: bool
    scale: dict[str, Any]


def _audit_one(
    target: str,
    run: _Run,
    baseline: Path | None,
) -> int:
    from keyhole import report
    from keyhole.report.formats import FORMATS

    stem = f"keyhole-{short_name(target)}"
    options = run.options
    always = {kind: Path(f"{stem}.{kind}") for kind in ("html", "json")}
    wanted = Outputs.of(
        run.outputs,
        FORMATS,
        force=run.force,
        as_json=run.as_json,
        defaults=always,
        baselines=[baseline],
        inputs=(target, options.model, options.data, options.known, options.corpus),
    )
    # Before torch loads, so that mistakes show at once.
    expect_fitting(target, target, options)
    from keyhole.audit.run import audit as audit_target

    findings = wanted.file("json")
    # The name identifies the command, so that another command that was stopped keeps
    # its journal.
    command_id = digest(target, asdict(replace(options, ledger=None)))[:8]
    journal = findings.with_name(f"{findings.name}.{command_id}.journal")
    answers = findings.with_name(f"{findings.stem}.answers.db")
    ledger = options.ledger
    if "://" in target:
        ledger = ledger or str(answers)
    kept = partial(_kept, journal, ledger)
    with interruptible(kept), bars("audit", "checks") as track:
        result = audit_target(
            target,
            options,
            journal=journal,
            answers=answers,
            force=True,  # this command's journal is useless if the target has changed
            track=track,
            notice=say,
            **run.scale,
        )
        assessment = run.judge(result)
        wanted.write(assessment)
    again = _kept_for_another_try([replace(result, skips=())], journal)
    wanted.report(assessment, report.table)
    extras = {part.extra for part in (*result.findings, *result.skips)} - {""}
    if extras:
        missing = ",".join(sorted(extras))
        say(
            f"not all of it was tried or proved: pip install 'keyhole[{missing}]' adds the rest"
        )
    if again:
        same = "the same command"
        if run.outputs:
            same += " with --force"
        say(f"some checks had no answer: {same} repeats only those ({again})")
    return assessment.exit_code


def short_name(target: str) -> str:
    """Return a name for files about a target, with a digest if its own name does not fit."""
    from keyhole.core.endpoint import without_password

    public = without_password(target).rstrip("/")
    name = shown = public.rpartition("://")[2]
    if exists(target):
        place = Path(target).resolve()
        shown = str(place)
        name = place.name
        folder = Path.cwd()
        if place.is_relative_to(folder) and place != folder:
            name = shown = str(place.relative_to(folder))
    stem = _NO_FILE_NAME.sub("-", name.replace("./", "")).strip("-.")[:60]
    if stem and stem == re.sub("[:/]", "-", shown.replace("./", "")):
        return stem
    return f"{stem}-{digest(shown)[:6]}".removeprefix("-")


def _kept(journal: Path, ledger: str | None) -> str:
    """Return a sentence about what a stopped audit has saved."""
    from keyhole.oracle.ledger import answers_in

    checks = records_in(journal)
    kept: list[str] = []
    if checks:
        kept.append(f"{checks} finished checks are in {journal}")
    if ledger is not None:
        kept.append(f"{answers_in(Path(ledger)):,} answers are in {ledger}")
    if not kept:
        return ""
    return f"{' and '.join(kept)}: the same command resumes"


def _kept_for_another_try(audits: Iterable[Audit], journal: Path) -> str:
    """Remove the journal if every check had a result; otherwise return what is kept in it."""
    from keyhole.audit.check import Checked

    complete = all(Checked(audit.findings, audit.skips).answered for audit in audits)
    if complete or not exists(journal):
        journal.unlink(missing_ok=True)
        return ""
    return f"the results of the others are kept in {journal}"


# Many targets: `keyhole audit --targets`.


def _audit_fleet(
    targets: Path | Sequence[str],
    run: _Run,
    out: Path,
    baseline: Path | None,
) -> int:
    """Audit every target of a file into a folder, and return the exit code."""
    from keyhole import report
    from keyhole.assess import assess_fleet
    from keyhole.audit.fleets import fleet, members_of, read_fleet
    from keyhole.report.fleet import FLEET_FORMATS
    from keyhole.report.formats import FORMATS

    if isinstance(targets, Path):
        members = read_fleet(targets, run.options)
    else:
        members = members_of(targets, run.options)
    journal = out / JOURNAL
    index = out / INDEX
    judges = _judges(run.judge, members, baseline, out)
    _make_folder(out)
    baselines: list[Path] = []
    if baseline is not None:
        baselines = sorted(baseline.glob("*.json"))
    kinds = ("json", "html")
    files = [index]
    files += [out / f"{member.stem}.{kind}" for member in members for kind in kinds]
    # A run that resumes replaces its own files.
    force = run.force or any(out.glob(JOURNALS))
    expect_new(*files, force=force)
    wanted = Outputs.of(
        run.outputs,
        FLEET_FORMATS,
        force=force,
        as_json=run.as_json,
        others=files,
        baselines=baselines,
    )

    def kept() -> str:
        if not any(out.glob(JOURNALS)):
            return ""
        return f"what is finished is in {out}/{JOURNALS}: the same command resumes"

    def write(member: Member, audit: Audit) -> None:
        assessment = judges[member.name](audit)
        for kind in kinds:
            write_text(out / f"{member.stem}.{kind}", FORMATS[kind](assessment))

    with interruptible(kept), bars("audit", "targets") as track:
        result = fleet(
            members,
            journal=journal,
            force=run.force,
            track=track,
            notice=say,
            finished=write,
            **run.scale,
        )
        assessment = assess_fleet(result, lambda name, audit: judges[name](audit))
        pages = {member.name: f"{member.stem}.html" for member in members}
        write_text(index, report.render_fleet(assessment, pages))
        wanted.write(assessment)
    again = _kept_for_another_try(result.audits.values(), journal)
    wanted.report(assessment, report.fleet_table)
    say(f"html: {index}   json: {out}/*.json")
    if again:
        say(
            f"some targets had checks without a result: the same command repeats those ({again})"
        )
    return assessment.exit_code


def _judges(
    judge: Judge,
    members: Sequence[Member],
    baseline: Path | None,
    out: Path,
) -> dict[str, Judge]:
    """Return a judge for each target; targets that the baseline lacks count as new."""
    if baseline is None:
        return {member.name: judge for member in members}
    if not is_folder(baseline):
        raise InputError(
            f"--baseline takes the folder of an earlier fleet's --out; {baseline} is no folder"
        )
    if exists(out) and baseline.samefile(out):
        raise InputError(f"--baseline and --out are both {out}: choose another --out")
    earlier: dict[str, Audit] = {}
    for path in sorted(baseline.glob("*.json")):
        data = read(path)
        if data.get("kind") == Audit.kind and data.get("name"):
            audit = Audit.load(path)
            earlier[audit.name] = audit
    missing = [member.name for member in members if member.name not in earlier]
    if len(missing) == len(members):
        raise InputError(f"{baseline} holds no findings of these targets")
    if missing:
        say(f"not in the baseline: {', '.join(missing)}")
    return {
        member.name: judge.against(earlier.get(member.name), *earlier.values())
        for member in members
    }


def _make_folder(out: Path) -> None:
    if exists(out) and not is_folder(out):
        raise InputError(f"--out takes a folder; {out} is a file")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise unwritable(out, error) from error
