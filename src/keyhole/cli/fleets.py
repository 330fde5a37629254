"""`keyhole audit --targets`: parse, one library call, print."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from keyhole import report
from keyhole.assess import Assessment, FleetAssessment, assess_fleet
from keyhole.audit import Member, fleet, read_fleet
from keyhole.audit.check import Checked
from keyhole.audit.fleets import members_of
from keyhole.audit.options import AuditOptions
from keyhole.cli.app import interruptible
from keyhole.cli.bars import bars, report_resuming
from keyhole.cli.console import answer, say
from keyhole.cli.outputs import Outputs, expect_new
from keyhole.cli.policy import Judge
from keyhole.core import Audit, Fleet, read
from keyhole.core.errors import InputError
from keyhole.core.files import exists, is_folder, unwritable, write_text
from keyhole.core.journal import records_in
from keyhole.report import json_form
from keyhole.report.fleet import FLEET_FORMATS, MOST_RUNS, document

FOLDER, JOURNAL, INDEX = Path("keyhole-fleet"), "fleet.journal", "index.html"


def audit_fleet(
    targets: Path | Sequence[str], judge: Judge, options: AuditOptions, out: Path, *,
    baseline: Path | None, outputs: Sequence[str] | None, processes: int, dask: str | None,
    force: bool, as_json: bool,
) -> int:  # fmt: skip
    """Audit every target of a file into a folder; the exit code of all of them."""
    if isinstance(targets, Path):
        members = read_fleet(targets, options)
    else:
        members = members_of(targets, options)
    pages = {member.name: f"{member.stem}.html" for member in members}
    journal, index = out / JOURNAL, out / INDEX
    judges = _judges(judge, members, baseline, out)
    _expect_folder(out)
    files = [name for member in members for name in _files(out, member)]
    resumes = exists(journal)  # the same command goes on, and writes its own files again
    expect_new(*(() if resumes else (index, *files)), force=force)
    wanted = Outputs.of(
        outputs, FLEET_FORMATS, force=force or resumes, as_json=as_json, others=(index, *files)
    )
    _expect_few_runs(wanted, len(members))
    with interruptible(lambda: _kept(journal)), bars("audit", "checks") as track:
        result = fleet(
            members, processes=processes, dask=dask, journal=journal, force=force, track=track,
            resuming=report_resuming,
            finished=lambda member, audit: _write(out, member, judges[member.name](audit)),
        )  # fmt: skip
        assessment = assess_fleet(result, lambda name, audit: judges[name](audit))
        write_text(index, report.render_fleet(result, pages, assessment))
        wanted.write(assessment)
    again = _unanswered(result, journal)
    if not wanted.printed(assessment):
        answer(document(assessment), report.fleet_table(result, assessment), as_json=as_json)
    say(f"html: {index}   json: {out}/*.json")
    wanted.report()
    if again:
        say(again)
    return assessment.exit_code


def _judges(
    judge: Judge, members: Sequence[Member], baseline: Path | None, out: Path
) -> dict[str, Judge]:
    """A judge for each target: where there is a baseline, what is not in it is new."""
    if baseline is None:
        return {member.name: judge for member in members}
    if not is_folder(baseline):
        raise InputError(
            f"--baseline takes the folder of an earlier fleet's --out; {baseline} is no folder"
        )
    if exists(out) and baseline.samefile(out):
        raise InputError(f"--baseline and --out are both {out}: choose another --out")
    earlier = _named_audits(baseline)
    missing = [member.name for member in members if member.name not in earlier]
    if len(missing) == len(members):
        raise InputError(f"{baseline} holds no findings of these targets")
    if missing:
        say(f"not in the baseline: {', '.join(missing)}")
    nothing = Audit(target="", identity="", findings=())
    return {member.name: judge.against(earlier.get(member.name, nothing)) for member in members}


def _named_audits(folder: Path) -> dict[str, Audit]:
    """What an earlier fleet wrote there, by the names of its targets."""
    audits: dict[str, Audit] = {}
    for path in sorted(folder.glob("*.json")):
        data = read(path)
        name = data.get("name")
        if data.get("kind") == Audit.kind and isinstance(name, str):
            audits[name] = Audit.load(path)
    return audits


def _expect_few_runs(wanted: Outputs[FleetAssessment], targets: int) -> None:
    """Before hours of work: GitHub refuses a file of more runs as a whole."""
    if "sarif-github" in wanted.asked and targets > MOST_RUNS:
        raise InputError(
            f"GitHub takes at most {MOST_RUNS} targets in a file, and these are {targets}: write "
            "sarif, or make several fleets of it"
        )


def _files(out: Path, member: Member) -> tuple[Path, Path]:
    return out / f"{member.stem}.json", out / f"{member.stem}.html"


def _write(out: Path, member: Member, assessment: Assessment) -> None:
    findings, page = _files(out, member)
    write_text(findings, json_form.render(assessment, member.name))
    write_text(page, report.render(assessment.audit, assessment))


def _expect_folder(out: Path) -> None:
    if exists(out) and not is_folder(out):
        raise InputError(f"--out takes a folder; {out} is a file")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise unwritable(out, error) from error


def _kept(journal: Path) -> str:
    """What a stopped fleet has behind it."""
    records = records_in(journal)
    if not records:
        return ""
    return f"what is finished is in {journal} and next to it: the same command resumes"


def _unanswered(result: Fleet, journal: Path) -> str:
    """Remove the journal of a fleet that is complete; of another, say how it is completed."""
    missing = [
        name
        for name, audit in result.audits.items()
        if not Checked(audit.findings, audit.skips).answered
    ]
    if not missing or not exists(journal):
        journal.unlink(missing_ok=True)
        return ""
    return (
        f"{len(missing)} of {len(result.audits)} targets had checks without a result: the others "
        f"are kept in {journal}, and the same command makes those again"
    )
