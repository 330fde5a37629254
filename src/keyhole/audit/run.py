"""`keyhole audit` as a function: every attack that applies to a target, judged, as findings.

A target's parts say what is to be checked (target.py); the checks are tasks of one runner
(core/tasks.py), in this process or on workers, which open the target themselves: neither weights
nor texts travel. A journal (core/journal.py) remembers finished checks; one that the target did not
answer is not written down, and made again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from keyhole.audit.check import Check, Checked, joined, nothing_to_try
from keyhole.audit.options import AuditOptions
from keyhole.audit.stores import StoreFacts, StoreTarget, whole
from keyhole.audit.target import DECODER, NamedTarget, Target, target_of
from keyhole.audit.texts import TextTarget
from keyhole.audit.texts import left_out as layers_left_out
from keyhole.core import Audit, Skip, environment
from keyhole.core.endpoint import without_password
from keyhole.core.errors import InputError, KeyholeError, expect_count
from keyhole.core.exposure import NOT_CHECKED, Exposure, is_chosen
from keyhole.core.journal import Journal, Run, digest, stopping_on_ctrl_c
from keyhole.core.machine import threads_for
from keyhole.core.progress import Expecting, Track, untracked
from keyhole.core.result import restored
from keyhole.core.tasks import MOST_PROCESSES, Done, Runner, Task
from keyhole.models.loading import kept_open
from keyhole.oracle import Oracle
from keyhole.oracle.ledger import Notice, ignored
from keyhole.report import words

_TOLD = 0.15  # of all checks: so many count as done in just the time that their weights say
Resuming = Callable[[int, int], None]  # called with how many checks are done, of how many


def audit(
    target: str | Oracle | Mapping[str, Oracle] | TextTarget | StoreTarget | Target,
    options: AuditOptions | None = None,
    *,
    processes: int = 0,
    dask: str | None = None,
    journal: str | Path | None = None,
    answers: str | Path | None = None,
    force: bool = False,
    track: Track = untracked,
    resuming: Resuming = lambda done, total: None,  # noqa: ARG005
    notice: Notice = ignored,
    **more: Any,
) -> Audit:
    """Try every attack that applies to a target, and report what it gives away.

    `target` is what the command line takes (`demo`, a file, an address, a model's folder or name, a
    vector store), or an oracle, several by name, or a model with its texts. The fields of
    `AuditOptions` are keywords. `processes` makes the checks in so many of them (0: in this one),
    `dask` on the cluster at that address; an endpoint over the network, or with a ledger, is asked
    by this process alone. `journal` is the file that remembers finished checks, from which an audit
    that was stopped goes on (`resuming` is called then); remove it once the findings are saved.
    Another audit's journal is refused, or replaced with `force`. `answers` is the file that keeps
    those of a server, where the options name no ledger. `notice` is called with what a person
    should know at once.
    """
    started = time.perf_counter()
    options = AuditOptions(**more) if options is None else options
    expect_count("--processes", processes, 0, MOST_PROCESSES)
    workers = dask if dask is not None else processes
    named = None
    if isinstance(target, str):
        named = NamedTarget(target, options)
        named = named.anywhere() if workers else named
        opened = named.open()
    else:
        opened = target_of(target)
    opening = time.perf_counter() - started
    ledger = options.ledger or (answers if opened.is_asked else None)
    with opened.ready(ledger, notice) as ready, ExitStack() as stack:
        checks = numbered(checks_of(ready, options))
        for check in checks.values():
            if check.queries:
                notice(f"{words.exposure(check.exposure)}: up to {check.queries:,} questions")
        plan = Plan.of(opened, checks, options, opening)
        for store in opened.stores.values():
            notice(words.begins(len(store.rows), store.count))
        if workers and named is not None and named.local_only:
            notice("its checks are made in this process, which holds its ledger and secrets")
            workers = 0
        memory = stack.enter_context(Journal(journal, plan.determined, force=force))
        runner = stack.enter_context(Runner(workers))
        stack.enter_context(threads_for(opened.size))
        run = Checking(runner, memory, track, notice)
        send = partial(_sent, named, plan) if workers else partial(_local, checks, track)
        run.begin("", plan, send)
        if run.done:
            resuming(run.done, run.total)
        run.report()
        for done in runner.run():
            if done.error is not None:
                raise done.error
            run.take(done)
        return run.audit_of("")  # before threads change: it notes how many there were


def _local(checks: Mapping[str, Check], track: Track, key: str) -> Callable[[int], Checked]:
    return partial(_in_process, checks[key], track)


def _sent(named: NamedTarget | None, plan: Plan, key: str) -> Callable[[int], Checked]:
    """What a worker is sent: which check of the target it is."""
    if named is None:
        raise InputError("--processes and --dask need a target by its name: workers open it")
    return partial(make, named, plan.identity, key)


def _in_process(check: Check, track: Track, worker: int = 0) -> Checked:  # noqa: ARG001
    with stopping_on_ctrl_c():
        return check.run(track)


def checks_of(target: Target, options: AuditOptions) -> list[Check]:
    """In the order of the findings; what `only` leaves out keeps its number."""
    only = options.only
    return [
        check if is_chosen(check.exposure, only) else nothing_to_try(left_out(only), check.exposure)
        for part in target.parts
        for check in part.checks(options.seed, against_defences=options.against_defences)
    ]


def left_out(only: Sequence[str]) -> Skip:
    """What an audit of some exposures says of the others."""
    exposure = Exposure(NOT_CHECKED, "others", name=", ".join(only))
    return Skip(exposure, "none", "left out, as --only or the policy says")


def numbered(checks: Sequence[Check]) -> dict[str, Check]:
    """Every check under a key of its own, in the order of the findings."""
    return {f"{number}. {check.name}": check for number, check in enumerate(checks, 1)}


@dataclass(frozen=True)
class Plan:
    """The exposure of each check, by its key, and what the audit says besides their findings.

    It is made where the target is opened, by a worker maybe; whoever has it can name every check
    and make the audit of what they gave. `determined` is everything that the findings follow from.
    `several`: the target has several parts, and what one does not give another does (a decoder
    gives nothing in its encoder's place). `seconds` is what opening took.
    """

    name: str
    identity: str
    determined: dict[str, Any]
    checks: dict[str, Exposure]
    weights: dict[str, float]
    skips: tuple[Skip, ...] = ()
    several: bool = False
    stores: dict[str, StoreFacts] = field(default_factory=dict[str, StoreFacts])
    seed: int = 0
    seconds: float = 0.0
    only: tuple[str, ...] = ()
    called: str = ""
    returns: tuple[str, ...] = ()
    observed: bool = False

    @classmethod
    def of(
        cls, opened: Target, checks: Mapping[str, Check], options: AuditOptions, seconds: float
    ) -> Plan:
        untried = (
            layers_left_out(name, model.loaded.model, model.layers)
            for name, model in opened.models.items()
        )
        return cls(
            name=opened.name or opened.identity,
            called=options.name or "",
            returns=options.returns,
            observed=bool(opened.parts) and all(part.observed for part in opened.parts),
            identity=opened.identity,
            determined=dict(_determined(opened, options)),
            checks={key: check.exposure for key, check in checks.items()},
            weights={key: check.weight for key, check in checks.items()},
            skips=(*opened.skips, *(skip for skips in untried for skip in skips)),
            several=len([part for part in opened.parts if part.name != DECODER]) > 1,
            stores={store.exposure.part: store.facts for store in opened.stores.values()},
            seed=options.seed,
            seconds=seconds,
            only=options.only,
        )

    @property
    def digest(self) -> str:
        """Two plans share it only if their checks give the same."""
        return digest(self.determined, list(self.checks))

    def audit(self, checked: Checked, seconds: float) -> Audit:
        """What all checks gave, as an audit."""
        skips = checked.skips
        if self.several:
            skips = tuple(skip for skip in skips if skip.unchecked or skip == left_out(self.only))
        return Audit(
            target=self.name,
            identity=self.identity,
            findings=tuple(
                replace(finding, observed=self.observed)
                for finding in whole(self.stores, checked.findings)
            ),
            skips=(*self.skips, *skips),
            seed=self.seed,
            seconds=self.seconds + seconds,
            name=self.called,
            returns=self.returns,
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Plan:
        return restored(cls, data)


def _determined(target: Target, options: AuditOptions) -> Run:
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
    """The checks of targets on one runner: what is done, what it gave, how long the rest takes.

    A check takes as many seconds as its weight says, times what those that are done took of theirs.
    """

    def __init__(
        self, runner: Runner, journal: Journal, track: Track, notice: Notice = ignored
    ) -> None:
        self.runner, self.journal, self._notice = runner, journal, notice
        self._progress = track("audit")
        self.plans: dict[str, Plan] = {}
        self._keys: dict[str, str] = {}  # what the journal's keys of a target begin with
        self._made: dict[str, dict[str, tuple[Checked, float]]] = {}
        self._spent = self._weight = 0.0  # seconds of the checks that are done, and their weights

    def begin(
        self, name: str, plan: Plan, work: Callable[[str], Callable[[int], Checked]],
        *, journal_key: str = "", local_only: bool = False,
    ) -> None:  # fmt: skip
        """Take in a target: checks in the journal are done, the others become tasks."""
        self.plans[name], self._keys[name], self._made[name] = plan, journal_key, {}
        for key in plan.checks:
            if journal_key + key in self.journal:
                self._learn(name, key, *self.journal.recall(journal_key + key, _recalled))
            else:
                self.runner.add(Task((name, key), work(key), name, local_only))

    def take(self, done: Done, unopened: int = 0) -> None:
        """What a check gave; where it could not be made, that is written in its place."""
        name, key = done.task.key
        exposure = self.plans[name].checks[key]
        if done.error is not None:
            skip = Skip(exposure, "none", reason_of(done.error), unchecked=True)
            self._made[name][key] = Checked(skips=(skip,)), 0.0
        else:
            checked: Checked = done.value
            if checked.answered:
                record = {**checked.to_dict(), "seconds": done.seconds}
                self.journal.add({self._keys[name] + key: record})
            self._learn(name, key, checked, done.seconds)
            self._stream(name, checked)
        self.report(f"{name}: " * bool(name) + words.in_full(exposure), unopened)

    def _stream(self, name: str, checked: Checked) -> None:
        """Say what was read of a store as soon as it is."""
        facts = self.plans[name].stores
        for given in checked.findings:
            if given.part in facts and given.texts:
                tried = [
                    reading
                    for made, _ in self._made[name].values()
                    for each in made.findings
                    if each.part == given.part and each.texts
                    for reading in each.texts[0].readings
                ]
                about = facts[given.part]
                last = given.texts[0].readings
                self._notice(words.so_far(last, tried, about.sample, about.count))

    def is_complete(self, name: str) -> bool:
        return len(self._made[name]) == len(self.plans[name].checks)

    def audit_of(self, name: str) -> Audit:
        plan, made = self.plans[name], self._made[name]
        checked = joined(made[key][0] for key in plan.checks)
        return plan.audit(checked, sum(seconds for _, seconds in made.values()))

    @property
    def done(self) -> int:
        return sum(map(len, self._made.values()))

    @property
    def total(self) -> int:
        return sum(len(plan.checks) for plan in self.plans.values())

    def report(self, note: str = "", unopened: int = 0) -> None:
        """How much is done; targets that are not open yet are taken to be like the others."""
        known = max(1, len(self.plans))
        ahead = [task.key for task in self.runner.left() if task.key[1] is not None]
        if self.plans and isinstance(self._progress, Expecting):
            seconds = sum(self.cost(name, key) for name, key in ahead)
            seconds += unopened * self._spent / known
            self._progress.expect(seconds / len(self.runner))
        self._progress(self.done, self.total + unopened * self.total // known or None, note)

    def cost(self, name: str, key: str) -> float:
        """Its weight in seconds, corrected by what those that are done took of theirs."""
        told = _TOLD * sum(sum(plan.weights.values()) for plan in self.plans.values())
        pace = (self._spent + told) / (self._weight + told) if told else 1.0
        return self.plans[name].weights[key] * pace

    def _learn(self, name: str, key: str, checked: Checked, seconds: float) -> None:
        self._made[name][key] = checked, seconds
        self._spent += seconds
        self._weight += self.plans[name].weights[key]


def _recalled(record: dict[str, Any]) -> tuple[Checked, float]:
    return Checked.from_dict(record), float(record["seconds"])


def reason_of(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, KeyholeError) else f"{type(error).__name__}: {text}"[:500]


# What a worker does: open the target itself, say what is to be checked, and check.


def plan_of(named: NamedTarget, worker: int = 0) -> Plan:
    """What is to be checked of a target, which is opened for it."""
    with kept_open((named, worker), partial(_open, named, worker)) as (plan, _):
        return plan


def make(
    named: NamedTarget, identity: str, key: str, worker: int = 0, track: Track = untracked
) -> Checked:
    """One check of a target, which is opened unless it is open; `identity` is what it must be."""
    with kept_open((named, worker), partial(_open, named, worker)) as (plan, checks):
        if plan.identity != identity:
            raise InputError(
                f"{without_password(named.name)} is {plan.identity} where a worker runs, and "
                f"{identity} where the audit began: it must be the same on every machine"
            )
        return _in_process(checks[key], track)


def _open(named: NamedTarget, worker: int, resources: ExitStack) -> tuple[Plan, dict[str, Check]]:
    started = time.perf_counter()
    opened = named.open(worker)
    target = resources.enter_context(opened.ready(named.options.ledger))
    checks = numbered(checks_of(target, named.options))
    return Plan.of(opened, checks, named.options, time.perf_counter() - started), checks
