"""`keyhole audit` as a function: run every check of a target, and collect findings and skips.

The parts of a target make its checks (target.py). The checks are tasks of a runner
(core/tasks.py), in this process or on workers. A worker opens the target itself, so
that neither weights nor texts are sent. Finished checks are kept in a journal
(core/journal.py), except those that the target did not answer, which an audit that
resumes repeats.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from keyhole.audit.check import (
    Check,
    Checked,
    joined,
    one_skip,
    run_check,
    skipped_check,
)
from keyhole.audit.options import AuditOptions
from keyhole.audit.stores import StoreTarget, merged, readings_in
from keyhole.audit.target import DECODER, NamedTarget, Target, target_of
from keyhole.audit.texts import TextTarget
from keyhole.audit.texts import left_out as layers_left_out
from keyhole.core import Audit, Skip, environment
from keyhole.core.endpoint import without_password
from keyhole.core.errors import InputError, KeyholeError, expect_count
from keyhole.core.exposure import NOT_CHECKED, Exposure, is_chosen
from keyhole.core.journal import Journal, Run
from keyhole.core.machine import threads_for
from keyhole.core.progress import Expecting, Track, untracked
from keyhole.core.result import typed
from keyhole.core.tasks import MOST_PROCESSES, Done, Runner, Task, Work
from keyhole.models.loading import kept_open
from keyhole.oracle import Oracle
from keyhole.oracle.ledger import Notice, ignored
from keyhole.report import words


def audit(
    target: str
    | NamedTarget
    | Oracle
    | Mapping[str, Oracle]
    | TextTarget
    | StoreTarget
    | Target,
    options: AuditOptions | None = None,
    *,
    processes: int = 0,
    dask: str | None = None,
    journal: str | Path | None = None,
    answers: str | Path | None = None,
    force: bool = False,
    complete: bool = True,
    track: Track = untracked,
    notice: Notice = ignored,
    **more: Any,
) -> Audit:
    """Try every attack that applies to a target, and report what it gives away.

    `target` is what the command line takes (`demo`, a file, an address, a model's
    folder or name, a vector store), or an oracle, several oracles by name, or a model
    with its texts. Options are given as `options` or as keywords, the fields of
    `AuditOptions`.

    - Checks run in `processes` worker processes (0: in this one), or on the `dask` cluster at that
      address. An endpoint on the network or with a ledger is queried by this process
      alone.
    - `journal` is the file that keeps finished checks. An audit that was stopped resumes from it.
      Remove it once the findings are saved. The journal of another audit is refused, or
      replaced with `force`.
    - `answers` is the file that keeps a server's answers if the options name no ledger.
    - With `complete`, a check that fails ends the audit; otherwise it becomes a skip.
    - `notice` is called with messages for the user.
    """
    expect_count("--processes", processes, 0, MOST_PROCESSES)
    workers = workers_of(processes, dask)
    options = options or AuditOptions(**more)
    if isinstance(target, str):
        target = NamedTarget(target, options)
    named = None
    started = time.perf_counter()
    if isinstance(target, NamedTarget):
        options = target.options
        named = target.anywhere() if workers else target
        opened = named.open()
    else:
        opened = target_of(cast("Oracle", target))
    opening = time.perf_counter() - started
    store = opened.store
    ledger = options.ledger
    if ledger is None and opened.has_server:
        ledger = answers
    with opened.ready(ledger, notice) as ready, ExitStack() as stack:
        checks = numbered(checks_of(ready, options))
        for check in checks.values():
            if check.queries:
                notice(
                    f"{words.exposure(check.exposure)}: up to {check.queries:,} questions"
                )
        if store is not None:
            notice(words.begins(len(store.rows), store.source.count))
        if workers and named is not None and named.local_only:
            notice(
                "the checks run in this process, which holds the target's ledger and secrets"
            )
            workers = 0
        run = _identity_of_run(opened, options)
        finished = stack.enter_context(Journal(journal, run, force=force))
        runner = stack.enter_context(Runner(workers))
        stack.enter_context(threads_for(opened.size))
        checking = Checking(checks, runner, finished, track, notice, store)

        def work(key: str) -> Work:
            if not workers:
                return lambda _: run_check(checks[key], track)
            if named is None:
                raise InputError(
                    "--processes and --dask need a target by its name: workers open it"
                )
            return partial(run_in_worker, named, opened.identity, key)

        checking.begin(work)
        if checking.done:
            notice(resuming(checking.done, len(checks), "checks"))
        checking.report()
        for done in runner.run():
            if done.error is not None and complete:
                raise done.error
            checking.take(done)
        # Inside `threads_for`, because the audit records the number of threads.
        return _audit_of(opened, options, checking.checked, opening + checking.seconds)


def workers_of(processes: int, dask: str | None) -> int | str:
    """Return what a Runner takes: the address of a Dask cluster, or the number of processes."""
    if dask is not None:
        return dask
    return processes


def resuming(
    done: int,
    total: int,
    unit: str,
) -> str:
    return f"resuming: {done} of {total} {unit} are done"


def _audit_of(
    opened: Target,
    options: AuditOptions,
    checked: Checked,
    seconds: float,
) -> Audit:
    layers = [
        skip
        for name, model in opened.models.items()
        for skip in layers_left_out(name, model.loaded.model, model.layers)
    ]
    skips = checked.skips
    # Of several parts, each lacks exposures that another has: those skips would tell
    # nothing. A decoder does not count as a part next to its encoder.
    if len([part for part in opened.parts if part.name != DECODER]) > 1:
        by_choice = left_out(options.only)
        skips = tuple(skip for skip in skips if skip.unchecked or skip == by_choice)
    observed = bool(opened.parts) and all(part.observed for part in opened.parts)
    return Audit(
        target=opened.name or opened.identity,
        identity=opened.identity,
        findings=tuple(
            replace(each, observed=observed)
            for each in merged(opened.store, checked.findings)
        ),
        skips=(*opened.skips, *layers, *skips),
        seed=options.seed,
        seconds=seconds,
        name=options.name or "",
        returns=options.returns,
    )


def checks_of(target: Target, options: AuditOptions) -> list[Check]:
    """Return all checks in the order of the findings.

    A check that `only` leaves out is replaced by one that skips it, so that numbers
    stay the same.
    """
    skip = left_out(options.only)
    checks: list[Check] = []
    for part in target.parts:
        for check in part.checks(options):
            if not is_chosen(check.exposure, options.only):
                check = skipped_check(skip, check.exposure)
            checks.append(check)
    return checks


def left_out(only: Sequence[str]) -> Skip:
    """Return the one skip for all exposures that `only` leaves out."""
    exposure = Exposure(NOT_CHECKED, "others", name=", ".join(only))
    return Skip(exposure, "none", "left out, as --only or the policy says")


def numbered(checks: Sequence[Check]) -> dict[str, Check]:
    """Return the checks in their order, each under its own key."""
    return {f"{number}. {check.name}": check for number, check in enumerate(checks, 1)}


def _identity_of_run(target: Target, options: AuditOptions) -> Run:
    """Return what the findings depend on: a journal in which it differs is refused."""
    return {
        "run": "audit",
        "keyhole": environment()["keyhole"],
        "target": target.identity,
        "seed": options.seed,
        "exposures": list(options.only) or "all",
        "against defences": options.against_defences,
        **{
            part.name or "model": part.settings
            for part in target.parts
            if part.settings
        },
    }


class Checking:
    """The progress of an audit: its finished checks, their results, and the time left."""

    def __init__(
        self,
        checks: Mapping[str, Check],
        runner: Runner,
        journal: Journal,
        track: Track,
        notice: Notice = ignored,
        store: StoreTarget | None = None,
    ) -> None:
        self.checks = checks
        self.runner = runner
        self.journal = journal
        self._store = store
        self._notice = notice
        self._progress = track("audit")
        self._finished: dict[str, Checked] = {}

    def begin(self, work: Callable[[str], Work]) -> None:
        """Read finished checks from the journal, and make tasks of the others."""
        for key in self.checks:
            if key in self.journal:
                self._finished[key] = self.journal.recall(key, partial(typed, Checked))
            else:
                self.runner.add(Task(key, work(key)))

    def take(self, done: Done) -> None:
        """Keep the result of a check, or a skip with the reason if it failed."""
        key = done.task.key
        check = self.checks[key]
        exposure = check.exposure
        if done.error is not None:
            attack = check.attack or "none"
            checked = one_skip(exposure, attack, reason_of(done.error), unchecked=True)
        else:
            checked: Checked = done.value
            if checked.answered:
                self.journal.add({key: asdict(checked)})
        self._finished[key] = checked
        latest = readings_in(checked.findings)
        if self._store is not None and latest:
            finished = self._finished.values()
            tried = readings_in(each for part in finished for each in part.findings)
            rows = len(self._store.rows)
            self._notice(words.so_far(latest, tried, rows, self._store.source.count))
        self.report(words.in_full(exposure))

    @property
    def checked(self) -> Checked:
        return joined(self._finished[key] for key in self.checks)

    @property
    def done(self) -> int:
        return len(self._finished)

    @property
    def seconds(self) -> float:
        """The time that all finished checks took."""
        return sum(checked.seconds for checked in self._finished.values())

    def report(self, note: str = "") -> None:
        """Report progress; finished checks tell how long a weight of 1 takes here."""
        weight = sum(self.checks[key].weight for key in self._finished)
        if isinstance(self._progress, Expecting) and weight:
            left = sum(self.checks[task.key].weight for task in self.runner.left())
            self._progress.expect(left * self.seconds / weight / len(self.runner))
        self._progress(self.done, len(self.checks) or None, note)


def reason_of(error: Exception) -> str:
    """Return an error in one line, as the reason of a skip."""
    text = " ".join(str(error).split())
    if isinstance(error, KeyholeError):
        return text
    return f"{type(error).__name__}: {text}"[:500]


def run_in_worker(
    named: NamedTarget,
    identity: str,
    key: str,
    worker: int = 0,
) -> Checked:
    """Open the target, which must have this `identity`, and run one check.

    The target stays open for the worker's next check.
    """
    named = named.on(worker)
    with kept_open(named, partial(_open, named)) as (own, checks):
        if own != identity:
            raise InputError(
                f"{without_password(named.name)} is {own} where a worker runs, and {identity} "
                "where the audit began: it must be the same on every machine"
            )
        return run_check(checks[key], untracked)


def _open(named: NamedTarget, resources: ExitStack) -> tuple[str, dict[str, Check]]:
    opened = named.open()
    target = resources.enter_context(opened.ready(named.options.ledger))
    return opened.identity, numbered(checks_of(target, named.options))
