"""Many targets in one audit: `keyhole audit --targets fleet.toml`, and that file.

    [defaults]
    texts = 2

    [[target]]
    name = "reviews"
    target = "./models/reviews"
    data = "reviews.tsv"

    [[target]]
    target = "./others/*"

The keys are the fields of `AuditOptions` and `EndpointOptions`. A target's own keys
override the defaults, and the defaults override the command line. Paths are relative to
the folder of this file.

Each target is one task of a runner: an audit with its own journal of checks. The
journal of the fleet keeps finished targets, which are not opened again unless their
files have changed. A target that cannot be opened, or a check that fails, becomes a
skip and does not stop the others.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, get_origin, get_type_hints

from keyhole.audit.check import Checked
from keyhole.audit.options import AuditOptions
from keyhole.audit.run import audit, reason_of, resuming, workers_of
from keyhole.audit.target import NamedTarget, absolute
from keyhole.core import Audit, Fleet, Skip, environment
from keyhole.core.endpoint import EndpointOptions, headers_of, without_password
from keyhole.core.errors import InputError, expect_count, expect_keys
from keyhole.core.exposure import NOT_CHECKED, Exposure
from keyhole.core.files import exists, is_folder, read_toml
from keyhole.core.journal import Journal
from keyhole.core.options import options_of
from keyhole.core.progress import Track, untracked
from keyhole.core.result import typed
from keyhole.core.tasks import MOST_PROCESSES, Done, Runner, Task
from keyhole.oracle.ledger import Notice, ignored
from keyhole.target import TargetKind, kind_of

_OWN_KEYS = ("target", "name", "ledger")  # for one target, and not for [defaults]
_WILDCARD = re.compile(r"[*?\[]")
_MAX_STEM = 80  # letters of a file's name


@dataclass(frozen=True)
class Member:
    """One target of a fleet; `stem` is the name of its files without their endings."""

    name: str
    stem: str
    target: NamedTarget

    def journal(self, fleet: str | Path | None) -> Path | None:
        """Return the path of the journal of its checks, next to the journal of the fleet."""
        if fleet is None:
            return None
        return Path(fleet).absolute().with_name(f"{self.stem}.journal")


Finished = Callable[[Member, Audit], object]


def fleet(
    targets: str | Path | Sequence[Member],
    *,
    processes: int = 0,
    dask: str | None = None,
    journal: str | Path | None = None,
    force: bool = False,
    track: Track = untracked,
    notice: Notice = ignored,
    finished: Finished = lambda member, audit: None,  # noqa: ARG005
) -> Fleet:
    """Audit every target of a fleet, and report what each gives away.

    - `targets` is a file, or what `read_fleet` returned for one.
    - `processes` targets are audited at a time (0: one by one in this process), or `dask` is the
      address of a cluster.
    - `journal` is the file that keeps finished targets; the checks of an unfinished target are in a
      journal of its own next to it. A fleet that was stopped resumes from them. The
      journal of another run is refused, or replaced with `force`.
    - `notice` is called with messages for the user, and `finished` with the audit of each target as
      soon as it is done.
    """
    started = time.perf_counter()
    expect_count("--processes", processes, 0, MOST_PROCESSES)
    if isinstance(targets, str | Path):
        targets = read_fleet(targets)
    members = list(targets)
    fingerprints = {member.name: member.target.fingerprint() for member in members}
    audits: dict[str, Audit] = {}
    progress = track("audit", len(members))
    run = {"run": "fleet", "keyhole": environment()["keyhole"]}
    with Journal(journal, run, force=force) as finished_targets:

        def add(member: Member, audit: Audit) -> None:
            audits[member.name] = replace(audit, name=member.name)
            finished(member, audits[member.name])
            progress(len(audits), None, member.name)

        def take(done: Done) -> None:
            member: Member = done.task.key
            if done.error is not None:
                exposure = Exposure(NOT_CHECKED, "target")
                reason = reason_of(done.error)
                skip = Skip(exposure, "none", reason, unchecked=True)
                add(member, Audit(member.name, "", (), (skip,)))
                return
            audit: Audit = done.value
            if Checked(audit.findings, audit.skips).answered:
                record = {"files": fingerprints[member.name], "audit": audit.to_dict()}
                finished_targets.add({member.name: record})
                checks = member.journal(journal)
                if checks is not None:
                    checks.unlink(missing_ok=True)
            add(member, audit)

        def audit_group(group: Sequence[Member], workers: int | str) -> None:
            more: dict[str, Any] = {}
            if workers == 0:
                more["track"] = track
            with Runner(workers) as runner:
                for member in group:
                    checks = member.journal(journal)
                    work = partial(_audit_member, member.target, checks, **more)
                    runner.add(Task(member, work))
                for done in runner.run():
                    take(done)

        def read(record: dict[str, Any]) -> Audit:
            return Audit.from_dict(record["audit"])

        left: list[Member] = []
        for member in members:
            record = finished_targets.records.get(member.name, {})
            if record.get("files") == fingerprints[member.name]:
                add(member, finished_targets.recall(member.name, read))
            else:
                left.append(member)
        if audits:
            notice(resuming(len(audits), len(members), "targets"))
        local: list[Member] = []
        if dask is not None:
            # A ledger, and the secrets of an address, do not leave this machine.
            local = [member for member in left if member.target.local_only]
        remote = [member for member in left if member not in local]
        if remote:
            audit_group(remote, workers_of(processes, dask))
        audit_group(local, 0)
    return Fleet(
        {each.name: audits[each.name] for each in members},
        time.perf_counter() - started,
    )


def _audit_member(
    target: NamedTarget,
    journal: Path | None,
    worker: int = 0,
    **more: Any,
) -> Audit:
    """Audit one target in a worker, with a journal unless its folder is not on this machine."""
    if journal is not None and not is_folder(journal.parent):
        journal = None
    return audit(target.on(worker), journal=journal, force=True, complete=False, **more)


def read_fleet(path: str | Path, base: AuditOptions | None = None) -> list[Member]:
    """Read the targets of a fleet file; `base` are the options that the file overrides."""
    base = absolute(base or AuditOptions(), Path.cwd())
    data = read_toml(path, "a fleet file")
    expect_keys(data, ("defaults", "target"), str(path))
    folder = Path(path).absolute().parent
    shared = [key for key in _TYPES if key not in _OWN_KEYS]
    where = f"{path}, [defaults]"
    defaults = typed(dict[str, Any], data.get("defaults", {}), where)
    base = _overridden(base, defaults, folder, where, shared)
    where = f"{path}, [[target]]"
    entries = typed(list[dict[str, Any]], data.get("target", []), where)
    if not entries:
        raise InputError(f"{path} has no [[target]]: it needs one or more")
    targets: list[tuple[str, NamedTarget]] = []
    for number, entry in enumerate(entries, 1):
        targets += _targets_of_entry(base, entry, folder, f"{where} {number}")
    return _members(targets, path)


def members_of(targets: Sequence[str], base: AuditOptions) -> list[Member]:
    """Return the members of a fleet that a policy lists by name."""
    named = [
        (without_password(name), NamedTarget(name, base).anywhere()) for name in targets
    ]
    return _members(named, "the policy")


def _targets_of_entry(
    base: AuditOptions,
    entry: dict[str, Any],
    folder: Path,
    where: str,
) -> list[tuple[str, NamedTarget]]:
    """Return the target of a [[target]] with its name, or all targets that its pattern matches."""
    options = _overridden(base, entry, folder, where, [*_TYPES])
    target: str = entry.get("target", "")
    name: str = entry.get("name", "")
    if not target.strip():
        raise InputError(f"{where} has no target")
    found = _matches(target, folder, where)
    targets: list[tuple[str, NamedTarget]] = []
    for each in found:
        public = without_password(each).removeprefix("./")
        own_name = name or public
        if name and len(found) > 1:
            own_name = f"{name}/{Path(public).name}"
        targets.append((own_name, NamedTarget(each, options, str(folder))))
    return targets


def _matches(
    target: str,
    folder: Path,
    where: str,
) -> list[str]:
    """Return the targets in a folder that a pattern matches; any other name stays as it is."""
    literal = "://" in target or not _WILDCARD.search(target)
    if literal or exists(folder / target):
        return [target]
    start = Path(Path(target).anchor or folder)
    try:
        found = sorted(start.glob(target.removeprefix(Path(target).anchor)))
    except (ValueError, OSError) as error:
        raise InputError(f"{target} in {where} is not a pattern of names") from error
    found = [
        path for path in found if not path.name.startswith(".") and _is_target(path)
    ]
    if not found:
        raise InputError(f"no target matches {target} in {where}")
    if start != folder:
        return [str(path) for path in found]
    return [str(path.relative_to(folder)) for path in found]


def _is_target(path: Path) -> bool:
    """Whether a match of a pattern is a target: a model, a store or an endpoint.

    Leaks are left out because they need --model, and folders unless they hold a model.
    """
    kind = kind_of(str(path))
    if kind is TargetKind.MODEL:
        return path.suffix == ".gguf" or exists(path / "config.json")
    return kind is TargetKind.STORE or path.suffix == ".safetensors"


# The keys of a fleet file are the fields of both classes, and the target itself.
_ENDPOINT_TYPES = get_type_hints(EndpointOptions)
_OPTIONS = options_of(AuditOptions) | options_of(EndpointOptions)
_TYPES: dict[str, Any] = {
    "target": str,
    "header": tuple[str, ...],
    **get_type_hints(AuditOptions),
    **_ENDPOINT_TYPES,
    "layers": tuple[int, ...],  # or "all", which the option parses
}
del _TYPES["endpoint"], _TYPES["headers"]


def _overridden(
    base: AuditOptions,
    given: Mapping[str, Any],
    folder: Path,
    where: str,
    keys: Sequence[str],
) -> AuditOptions:
    """Return `base` with the options of a table of a fleet file."""
    given = {key.replace("-", "_"): value for key, value in given.items()}
    expect_keys(given, keys, where)
    audit: dict[str, Any] = {}
    endpoint: dict[str, Any] = {}
    for key, value in given.items():
        option = _OPTIONS.get(key)
        kind = _TYPES[key]
        if option and option.parse and isinstance(value, str):  # "all", or numbers
            value = option.parse(value)
        else:
            if get_origin(kind) is tuple and not isinstance(value, list):
                value = [value]  # one value stands for a list
            value = typed(kind, value, f"{key} in {where}")
        if option and option.file:
            value = str(folder / value)
        if key == "header":
            endpoint["headers"] = headers_of(value)
        elif key in _ENDPOINT_TYPES:
            endpoint[key] = value
        elif key not in ("target", "name"):  # those of the entry, not options
            audit[key] = value
    audit["endpoint"] = replace(base.endpoint, **endpoint)
    options = replace(base, **audit)
    return replace(options, model=absolute(options, folder).model)


def _members(targets: list[tuple[str, NamedTarget]], path: str | Path) -> list[Member]:
    """Return the members of a fleet, and give the files of each a plain name of their own."""
    members: dict[str, Member] = {}
    stems = {"index", "fleet"}  # the page and the journal of the fleet
    for name, target in targets:
        if name in members:
            raise InputError(
                f"{path} has two targets called {name[:80]}: give each a name"
            )
        plain = re.sub(r"[^A-Za-z0-9_]+", "-", name)[:_MAX_STEM].strip("-").lower()
        stem = plain = plain or "target"
        number = 1
        while stem in stems:
            number += 1
            stem = f"{plain}-{number}"
        stems.add(stem)
        members[name] = Member(name, stem, target)
    return list(members.values())
