"""`keyhole audit --targets`: parse, one library call, print."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from keyhole import report
from keyhole.assess import Assessment
from keyhole.audit import Member, Opening, fleet, read_fleet
from keyhole.audit.check import Checked
from keyhole.audit.fleet_file import members_of
from keyhole.cli.answers import answer
from keyhole.cli.app import expect_new, interruptible
from keyhole.cli.bars import bars
from keyhole.cli.console import say
from keyhole.cli.judging import Judge
from keyhole.errors import InputError
from keyhole.files import exists, is_folder, trouble, write_text
from keyhole.report import json_form
from keyhole.results import Fleet
from keyhole.resume import records_in

FOLDER, JOURNAL, INDEX = Path("keyhole-fleet"), "fleet.journal", "index.html"


def expect_none_of(given: Mapping[str, bool]) -> None:
    """Refuse what is of one target alone."""
    for name, is_given in given.items():
        if is_given:
            raise InputError(
                f"expected {name} without --targets, got both: a fleet's targets and ledgers stand "
                "in its file, its pages go to --out"
            )


def audit_fleet(
    targets: Path | Sequence[str], judge: Judge, base: Opening, out: Path, *, processes: int,
    dask: str | None, force: bool, as_json: bool,
) -> int:  # fmt: skip
    """Audit every target of a file into a folder; the exit code of all of them together."""
    members = read_fleet(targets, base) if isinstance(targets, Path) else members_of(targets, base)
    pages = {member.name: f"{member.stem}.html" for member in members}
    journal, index = out / JOURNAL, out / INDEX
    _expect_folder(out)
    if not exists(journal):  # else: the same command goes on, and writes its own files again
        files = [name for member in members for name in _files(out, member)]
        expect_new(index, *files, force=force)
    with interruptible(lambda: _kept(journal)), bars("audit", "checks") as track:
        result = fleet(
            members, processes=processes, dask=dask, journal=journal, force=force, track=track,
            resuming=_say_resuming,
            finished=lambda member, audit: _write(out, member, judge(audit)),
        )  # fmt: skip
        write_text(index, report.render_fleet(result, pages, judge))
    again = _unanswered(result, journal)
    answer(result.to_dict(), report.fleet_table(result, judge), as_json=as_json)
    say(f"page: {index}   findings: {out}/*.json")
    if again:
        say(again)
    codes = {judge(audit).exit_code for audit in result.audits.values()}
    return next(code for code in (1, 3, 0) if code in codes)


def _files(out: Path, member: Member) -> tuple[Path, Path]:
    return out / f"{member.stem}.json", out / f"{member.stem}.html"


def _write(out: Path, member: Member, assessment: Assessment) -> None:
    findings, page = _files(out, member)
    write_text(findings, json_form.render(assessment))
    write_text(page, report.render(assessment.audit, assessment))


def _expect_folder(out: Path) -> None:
    if exists(out) and not is_folder(out):
        raise InputError(f"expected --out as a folder, got {out}: it is a file")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise trouble("a folder to write", out, error) from error


def _say_resuming(done: int, total: int) -> None:
    say(f"resuming: {done} of {total} checks are done")


def _kept(journal: Path) -> str:
    """What a stopped fleet has behind it."""
    records = records_in(journal)
    if not records:
        return ""
    return f"what is finished is in {journal} and beside it: the same command resumes"


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
