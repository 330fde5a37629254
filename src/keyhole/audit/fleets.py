"""Many targets in one audit: `keyhole audit --targets fleet.toml`, and that file.

    [defaults]
    texts = 2

    [[target]]
    name = "reviews"
    target = "./models/reviews"
    data = "reviews.tsv"

    [[target]]
    target = "./others/*"

The keys are the fields of `AuditOptions` and `EndpointOptions`. What a target says comes before the
defaults, and those before the command line. Names of files begin in the folder of this file.

Each target is one task of a runner: the audit of it alone, with a journal of its checks. Another
journal remembers finished targets, which are not opened again unless their files were touched. A
target that cannot be opened, or a check that cannot be made, is written down as that, and does not
stop the others.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, cast, get_type_hints

from keyhole.audit.check import Checked
from keyhole.audit.options import AuditOptions
from keyhole.audit.run import Resuming, audit, reason_of
from keyhole.audit.target import NamedTarget, absolute
from keyhole.core import Audit, Fleet, Skip, environment
from keyhole.core.endpoint import EndpointOptions, headers_of, without_password
from keyhole.core.errors import InputError, expect_count, expect_keys
from keyhole.core.exposure import NOT_CHECKED, Exposure
from keyhole.core.files import exists, is_folder, read_toml
from keyhole.core.journal import Journal
from keyhole.core.options import Option
from keyhole.core.progress import Track, untracked
from keyhole.core.result import typed
from keyhole.core.tasks import MOST_PROCESSES, Done, Runner, Task
from keyhole.target import TargetKind, kind_of

_OWN = ("target", "name", "ledger")  # of one target alone
_PATTERN = re.compile(r"[*?\[]")
_STEM = 80  # letters of a file's name


@dataclass(frozen=True)
class Member:
    """One target of a fleet: its name, the name of its files, and what is opened."""

    name: str
    stem: str
    target: NamedTarget

    def journal(self, fleet: str | Path | None) -> Path | None:
        """The file for its checks, next to that of its fleet, which every process finds."""
        return None if fleet is None else Path(fleet).absolute().with_name(f"{self.stem}.journal")


Finished = Callable[[Member, Audit], None]  # called with every target once all of it is checked


def fleet(
    targets: str | Path | Sequence[Member],
    *,
    processes: int = 0,
    dask: str | None = None,
    journal: str | Path | None = None,
    force: bool = False,
    track: Track = untracked,
    resuming: Resuming = lambda done, total: None,  # noqa: ARG005
    finished: Finished = lambda member, audit: None,  # noqa: ARG005
) -> Fleet:
    """Audit every target of a fleet, and report what each gives away.

    `targets` is a file, or what `read_fleet` made of one. `processes` audits so many at a time
    (0: in this process), `dask` on the cluster at that address. `journal` is the file that
    remembers finished targets, and next to it is one for the checks of each that is not; a fleet
    that was stopped goes on from there (`resuming` is called then). Another run's is refused, or
    replaced with `force`. `finished` is called with every target's audit as soon as there is one.
    """
    started = time.perf_counter()
    expect_count("--processes", processes, 0, MOST_PROCESSES)
    members = read_fleet(targets) if isinstance(targets, str | Path) else list(targets)
    prints = {member.name: member.target.fingerprint() for member in members}
    audits: dict[str, Audit] = {}
    progress = track("audit", len(members))
    run = {"run": "fleet", "keyhole": environment()["keyhole"]}
    with Journal(journal, run, force=force) as memory:

        def end(member: Member, audit: Audit) -> None:
            audits[member.name] = replace(audit, name=member.name)
            finished(member, audits[member.name])
            progress(len(audits), None, member.name)

        def take(done: Done) -> None:
            member: Member = done.task.key
            if done.error is not None:
                where, reason = Exposure(NOT_CHECKED, "target"), reason_of(done.error)
                skip = Skip(where, "none", reason, unchecked=True)
                end(member, Audit(target=member.name, identity="", findings=(), skips=(skip,)))
                return
            audit: Audit = done.value
            if Checked(audit.findings, audit.skips).answered:
                record = {"files": prints[member.name], "audit": audit.to_dict()}
                memory.add({member.name: record})
                if (checks := member.journal(journal)) is not None:
                    checks.unlink(missing_ok=True)
            end(member, audit)

        left: list[Member] = []
        for member in members:
            record = memory.records.get(member.name, {})
            if record.get("files") == prints[member.name]:
                end(member, memory.recall(member.name, _recalled))
            else:
                left.append(member)
        if audits:
            resuming(len(audits), len(members))
        left.sort(key=lambda member: -member.target.size)  # no large one remains for the end
        # A ledger, and the secrets of an address, do not leave this machine.
        here = [member for member in left if dask is not None and member.target.local_only]
        sent = [member for member in left if member not in here]
        for workers, some in ((dask if dask is not None else processes, sent), (0, here)):
            with Runner(workers if some else 0) as runner:
                more = {"track": track} if runner.in_process else {}
                for member in some:
                    work = partial(_audited, member.target, member.journal(journal), **more)
                    runner.add(Task(member, work))
                for done in runner.run():
                    take(done)
    return Fleet({each.name: audits[each.name] for each in members}, time.perf_counter() - started)


def _recalled(record: dict[str, Any]) -> Audit:
    return Audit.from_dict(record["audit"])


def _audited(target: NamedTarget, journal: Path | None, worker: int = 0, **more: Any) -> Audit:
    """What a worker does: all of one target; on another machine there may be no such folder."""
    kept = journal if journal is not None and is_folder(journal.parent) else None
    return audit(target.on(worker), journal=kept, force=True, complete=False, **more)


def read_fleet(path: str | Path, base: AuditOptions | None = None) -> list[Member]:
    """The targets of a file; `base` holds the options that hold where the file says nothing."""
    base = AuditOptions() if base is None else absolute(base, Path.cwd())
    data = read_toml(path, "a fleet file")
    expect_keys(data, ("defaults", "target"), str(path))
    defaults = data.get("defaults", {})
    entries = data.get("target", [])
    if not isinstance(defaults, dict):
        raise InputError(f"expected [defaults] as a table in {path}, got {defaults!r:.40}")
    if not isinstance(entries, list) or not entries:
        raise InputError(f"{path} has no [[target]]: it needs one or more")
    folder = Path(path).absolute().parent
    shared = tuple(key for key in _KEYS if key not in _OWN)
    base = _with(base, cast("dict[str, Any]", defaults), folder, f"{path}, [defaults]", shared)
    made: list[tuple[str, NamedTarget]] = []
    for number, entry in enumerate(cast("list[Any]", entries), 1):
        made += _entry(base, entry, folder, f"{path}, [[target]] {number}")
    return _members(made, path)


def members_of(targets: Sequence[str], base: AuditOptions) -> list[Member]:
    """Targets by their names alone, as a policy lists them."""
    made = [(without_password(name), NamedTarget(name, base).anywhere()) for name in targets]
    return _members(made, "the policy")


def _entry(
    base: AuditOptions, entry: Any, folder: Path, where: str
) -> list[tuple[str, NamedTarget]]:
    """One [[target]], or as many as its pattern matches."""
    if not isinstance(entry, dict):
        raise InputError(f"expected a table in {where}, got {entry!r:.40}")
    given = cast("dict[str, Any]", entry)
    options = _with(base, given, folder, where, (*_OWN, *_KEYS))
    target = _typed(str, given.get("target", ""), "target", where)
    name = _typed(str, given.get("name", ""), "name", where)
    if not target.strip():
        raise InputError(f"{where} has no target")
    names = _matching(target, folder, where)
    return [
        (_name(name, each, several=len(names) > 1), NamedTarget(each, options, str(folder)))
        for each in names
    ]


def _name(name: str, target: str, *, several: bool) -> str:
    shown = without_password(target).removeprefix("./")
    return f"{name}/{Path(shown).name}" if name and several else name or shown


def _matching(target: str, folder: Path, where: str) -> list[str]:
    """A name as it is, or the targets in a folder that a pattern matches."""
    literal = "://" in target or not _PATTERN.search(target)
    if literal or exists(folder / target):
        return [target]
    pattern = Path(target)
    start = Path(pattern.anchor) if pattern.is_absolute() else folder
    try:
        matches = sorted(start.glob(str(pattern.relative_to(pattern.anchor))))
    except (ValueError, NotImplementedError, OSError) as error:
        raise InputError(f"{target} in {where} is not a pattern of names") from error
    names = [
        str(path if pattern.is_absolute() else path.relative_to(folder))
        for path in matches
        if not path.name.startswith(".") and _is_target(path)
    ]
    if not names:
        raise InputError(f"no target matches {target} in {where}")
    return names


def _is_target(path: Path) -> bool:
    """What can be audited without being told what it is: no leak, no folder of anything."""
    kind = kind_of(str(path))
    if kind is TargetKind.MODEL:
        return path.suffix == ".gguf" or exists(path / "config.json")
    return kind is TargetKind.STORE or path.suffix == ".safetensors"


# What the keys of a fleet file mean: the fields of both classes, by their names and types.
_AUDIT, _ENDPOINT = get_type_hints(AuditOptions), get_type_hints(EndpointOptions)
_ABOUT: dict[str, Option | None] = {
    each.name: each.metadata.get("option")
    for options in (AuditOptions, EndpointOptions)
    for each in fields(options)
}
_KEYS = (*(key for key in (*_AUDIT, *_ENDPOINT) if key not in ("endpoint", "headers")), "header")


def _with(
    base: AuditOptions, given: Mapping[str, Any], folder: Path, where: str, keys: Sequence[str]
) -> AuditOptions:
    """The options of a table, written over those of `base`."""
    given = {key.replace("-", "_"): value for key, value in given.items()}
    expect_keys(given, keys, where)
    audit: dict[str, Any] = {}
    endpoint: dict[str, Any] = {}
    for key, value in given.items():
        if key == "header":
            endpoint["headers"] = headers_of(_typed(tuple[str, ...], value, key, where))
        elif key in _ENDPOINT:
            endpoint[key] = _option(_ENDPOINT[key], value, key, folder, where)
        elif key in _AUDIT and key != "name":  # that of a row is not its targets'
            audit[key] = _option(_AUDIT[key], value, key, folder, where)
    audit["endpoint"] = replace(base.endpoint, **endpoint)
    options = replace(base, **audit)
    return replace(options, model=absolute(options, folder).model)


def _option(kind: Any, value: Any, key: str, folder: Path, where: str) -> Any:
    about = _ABOUT[key]
    if about is not None and about.parse is not None:  # a word, or what it stands for
        if isinstance(value, str):
            return about.parse(value)
        kind = tuple[int, ...] if key == "layers" else kind
    value = _typed(kind, value, key, where)
    return str(folder / value) if about is not None and about.file else value


def _typed(kind: Any, value: Any, key: str, where: str) -> Any:
    several = getattr(kind, "__origin__", None) is tuple
    if several and not isinstance(value, list):
        value = [value]
    given = typed(kind, value, f"{key} in {where}")
    if any(isinstance(each, str) and "\0" in each for each in (given if several else [given])):
        raise InputError(f"{key} in {where} holds a NUL character")
    return given


def _members(made: list[tuple[str, NamedTarget]], path: str | Path) -> list[Member]:
    """Every target with a name of its own, and a plain one for its files, whatever it is called."""
    members: dict[str, Member] = {}
    stems = {"index", "fleet"}  # its page and its journal
    for name, target in made:
        if name in members:
            raise InputError(f"{path} has two targets called {name[:80]}: give each a name")
        plain = re.sub(r"[^A-Za-z0-9_]+", "-", name)[:_STEM].strip("-").lower() or "target"
        stem, number = plain, 1
        while stem in stems:
            number += 1
            stem = f"{plain}-{number}"
        stems.add(stem)
        members[name] = Member(name, stem, target)
    return list(members.values())
