"""`keyhole audit` as a function: every attack that applies to a target, judged, as findings.

A target's parts say what is to be checked (target.py); the checks are tasks of one runner
(core/tasks.py), in this process or on workers, which open the target themselves: neither weights
nor texts are sent to them. A journal (core/journal.py) holds finished checks, without those that
the target did not answer: they run again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from keyhole.audit.check import Check, Checked, joined, nothing_to_try
from keyhole.audit.options import AuditOptions
from keyhole.audit.stores import StoreTarget, texts_read, whole
from keyhole.audit.target import DECODER, NamedTarget, Target, target_of
from keyhole.audit.texts import TextTarget
from keyhole.audit.texts import left_out as layers_left_out
from keyhole.core import Audit, Skip, environment
from keyhole.core.endpoint import without_password
from keyhole.core.errors import InputError, KeyholeError, expect_count
from keyhole.core.exposure import NOT_CHECKED, Exposure, is_chosen
from keyhole.core.journal import Journal, Run, stopping_on_ctrl_c
from keyhole.core.machine import threads_for
from keyhole.core.progress import Expecting, Track, untracked
from keyhole.core.tasks import MOST_PROCESSES, Done, Runner, Task, Work
from keyhole.models.loading import kept_open
from keyhole.oracle import Oracle
from keyhole.oracle.ledger import Notice, ignored
from keyhole.report import words

_PRIOR = 0.15  # how much the expected pace counts, as a share of the weight of all checks
Resuming = Callable[[int, int], None]  # called with how many checks are done, of how many


def audit(
    target: str | NamedTarget | Oracle | Mapping[str, Oracle] | TextTarget | StoreTarget | Target,
    options: AuditOptions | None = None,
    *,
    processes: int = 0,
    dask: str | None = None,
    journal: str | Path | None = None,
    answers: str | Path | None = None,
    force: bool = False,
    complete: bool = True,
    track: Track = untracked,
    resuming: Resuming = lambda done, total: None,  # noqa: ARG005
    notice: Notice = ignored,
    **more: Any,
) -> Audit:
    """Try every attack that applies to a target, and report what it gives away.

    `target` is what the command line takes (`demo`, a file, an address, a model's folder or name, a
    vector store), or an oracle, several by name, or a model with its texts. The fields of
    `AuditOptions` are keywords. Checks run in `processes` worker processes (0: in this one), or on
    the `dask` cluster at that address; an endpoint over the network, or with a ledger, is asked
    by this process alone. `journal` is the file that remembers finished checks: an audit that was
    stopped goes on from it (and calls `resuming`); remove it once the findings are saved.
    Another audit's journal is refused, or replaced with `force`. `answers` is the file that keeps
    a server's answers if the options name no ledger. With `complete`, a check that fails ends the
    audit; otherwise it becomes a skip with the reason. `notice` is called with what a person
    should know at once.
    """
    expect_count("--processes", processes, 0, MOST_PROCESSES)
    workers = dask if dask is not None else processes
    if isinstance(target, str):
        target = NamedTarget(target, AuditOptions(**more) if options is None else options)
    named = target if isinstance(target, NamedTarget) else None
    if named is not None:
        options, named = named.options, named.anywhere() if workers else named
    elif options is None:
        options = AuditOptions(**more)
    started = time.perf_counter()
    opened = target_of(cast("Oracle", target)) if named is None else named.open()
    opening = time.perf_counter() - started
    store = opened.store
    ledger = options.ledger or (answers if opened.is_asked else None)
    with opened.ready(ledger, notice) as ready, ExitStack() as stack:
        checks = numbered(checks_of(ready, options))
        for check in checks.values():
            if check.queries:
                notice(f"{words.exposure(check.exposure)}: up to {check.queries:,} questions")
        if store is not None:
            notice(words.begins(len(store.rows), store.count))
        if workers and named is not None and named.local_only:
            notice("the checks run in this process, which holds the target's ledger and secrets")
            workers = 0
        run = _identity_of_run(opened, options)
        memory = stack.enter_context(Journal(journal, run, force=force))
        runner = stack.enter_context(Runner(workers))
        stack.enter_context(threads_for(opened.size))
        checking = Checking(checks, runner, memory, track, notice, store)

        def work(key: str) -> Work:
            if not workers:
                return partial(run_check, checks[key], track)
            if named is None:
                raise InputError(
                    "--processes and --dask need a target by its name: workers open it"
                )
            return partial(run_in_worker, named, opened.identity, key)

        checking.begin(work)
        if checking.done:
            resuming(checking.done, len(checks))
        checking.report()
        for done in runner.run():
            if done.error is not None and complete:
                raise done.error
            checking.take(done)
        # Inside `threads_for`: an audit records how many threads computed it.
        return _audit_of(opened, options, checking.checked, opening + checking.seconds)


def _audit_of(opened: Target, options: AuditOptions, checked: Checked, seconds: float) -> Audit:
    untried = [
        skip
        for name, model in opened.models.items()
        for skip in layers_left_out(name, model.loaded.model, model.layers)
    ]
    skips = checked.skips
    # If a target has several parts, it is no news that one lacks an exposure that another has. A
    # decoder does not count as a part next to its encoder.
    if len([part for part in opened.parts if part.name != DECODER]) > 1:
        left = left_out(options.only)
        skips = tuple(skip for skip in skips if skip.unchecked or skip == left)
    observed = bool(opened.parts) and all(part.observed for part in opened.parts)
    return Audit(
        target=opened.name or opened.identity,
        identity=opened.identity,
        findings=tuple(
            replace(finding, observed=observed) for finding in whole(opened.store, checked.findings)
        ),
        skips=(*opened.skips, *untried, *skips),
        seed=options.seed,
        seconds=seconds,
        name=options.name or "",
        returns=options.returns,
    )


def run_check(check: Check, track: Track, worker: int = 0) -> Checked:  # noqa: ARG001
    with stopping_on_ctrl_c():
        return check.run(track)


def checks_of(target: Target, options: AuditOptions) -> list[Check]:
    """All checks in the order of the findings; one that `only` leaves out keeps its number."""
    only = options.only
    return [
        check if is_chosen(check.exposure, only) else nothing_to_try(left_out(only), check.exposure)
        for part in target.parts
        for check in part.checks(options.seed, against_defences=options.against_defences)
    ]


def left_out(only: Sequence[str]) -> Skip:
    """The skip that stands for all exposures that `only` leaves out."""
    exposure = Exposure(NOT_CHECKED, "others", name=", ".join(only))
    return Skip(exposure, "none", "left out, as --only or the policy says")


def numbered(checks: Sequence[Check]) -> dict[str, Check]:
    """Every check under a key of its own, in the order of the findings."""
    return {f"{number}. {check.name}": check for number, check in enumerate(checks, 1)}


def _identity_of_run(target: Target, options: AuditOptions) -> Run:
    """What the findings depend on: a journal in which it differs is refused."""
    return {
        "run": "audit",
        "keyhole": environment()["keyhole"],
        "target": target.identity,
        "seed": options.seed,
        "exposures": list(options.only) or "all",
        "against defences": options.against_defences,
        **{part.name or "model": part.settings for part in target.parts if part.settings},
    }


class Checking:
    """The checks of a target: which are done, what they found, how long the rest will take."""

    def __init__(
        self, checks: Mapping[str, Check], runner: Runner, journal: Journal, track: Track,
        notice: Notice = ignored, store: StoreTarget | None = None,
    ) -> None:  # fmt: skip
        self.checks, self.runner, self.journal = checks, runner, journal
        self._store, self._notice, self._progress = store, notice, track("audit")
        self._made: dict[str, tuple[Checked, float]] = {}

    def begin(self, work: Callable[[str], Work]) -> None:
        """Recall checks that are in the journal; the others become tasks."""
        for key in self.checks:
            if key in self.journal:
                self._made[key] = self.journal.recall(key, _recalled)
            else:
                self.runner.add(Task(key, work(key)))

    def take(self, done: Done) -> None:
        """Keep what a check found, or a skip with the reason if it failed."""
        key, exposure = done.task.key, self.checks[done.task.key].exposure
        if done.error is not None:
            skip = Skip(exposure, "none", reason_of(done.error), unchecked=True)
            self._made[key] = Checked(skips=(skip,)), 0.0
        else:
            checked: Checked = done.value
            if checked.answered:
                self.journal.add({key: {**checked.to_dict(), "seconds": done.seconds}})
            self._made[key] = checked, done.seconds
            self._stream(checked)
        self.report(words.in_full(exposure))

    def _stream(self, checked: Checked) -> None:
        """Report what was read from a store as soon as a check ends."""
        last = texts_read(checked.findings)
        if self._store is not None and last:
            tried = texts_read(each for made, _ in self._made.values() for each in made.findings)
            rows, count = self._store.rows, self._store.count
            self._notice(words.so_far(last, tried, len(rows), count))

    @property
    def checked(self) -> Checked:
        return joined(self._made[key][0] for key in self.checks)

    @property
    def done(self) -> int:
        return len(self._made)

    @property
    def seconds(self) -> float:
        """The time that all finished checks took."""
        return sum(seconds for _, seconds in self._made.values())

    def report(self, note: str = "") -> None:
        if isinstance(self._progress, Expecting):
            left = sum(self.cost(task.key) for task in self.runner.left())
            self._progress.expect(left / len(self.runner))
        self._progress(self.done, len(self.checks) or None, note)

    def cost(self, key: str) -> float:
        """Seconds that a check will take: its weight, times how slow finished checks were.

        That factor starts at 1, as if `_PRIOR` of all weights had taken the expected seconds.
        """
        prior = _PRIOR * sum(check.weight for check in self.checks.values())
        weight = sum(self.checks[done].weight for done in self._made)
        pace = (self.seconds + prior) / (weight + prior) if prior else 1.0
        return self.checks[key].weight * pace


def _recalled(record: dict[str, Any]) -> tuple[Checked, float]:
    return Checked.from_dict(record), float(record["seconds"])


def reason_of(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, KeyholeError) else f"{type(error).__name__}: {text}"[:500]


# What a worker does: open the target itself, and run one check.


def run_in_worker(named: NamedTarget, identity: str, key: str, worker: int = 0) -> Checked:
    """Run one check of a target that has this `identity`; the target stays open for the next."""
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
