"""`keyhole audit --targets` as a function: many targets, whose checks are one pool of tasks.

Whoever opens a target says what is to be checked of it (elsewhere.py): that is the first task of
each, and its checks are the others. All of them go to a crew (crew.py). One journal remembers every
finished check; a target of which all are there is not opened again, unless its files were touched.
A target that cannot be opened, or a check that cannot be made, is written down as that, and does
not stop the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from keyhole.audit.check import Checked, joined
from keyhole.audit.costs import Costs
from keyhole.audit.elsewhere import make, plan_of
from keyhole.audit.fleet_file import Member, read_fleet
from keyhole.audit.journal import Resuming, recalled, remember
from keyhole.audit.plan import Plan
from keyhole.core import Audit, Fleet, Skip, environment
from keyhole.core.errors import InputError, KeyholeError, expect_count
from keyhole.core.exposure import NOT_CHECKED, Exposure
from keyhole.core.journal import Journal
from keyhole.core.progress import Expecting, Track, untracked
from keyhole.core.tasks import MOST_PROCESSES, Done, Runner, Task
from keyhole.models.loading import close_kept
from keyhole.report import words

Finished = Callable[[Member, Audit], None]  # told of every target as soon as all of it is checked


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

    `targets` is a file (fleet_file.py), or what `read_fleet` made of one. `processes` makes the
    checks in so many of them, 0 in this one, `dask` on the cluster at that address. `journal` is
    the file that remembers finished checks, from which a fleet that was stopped goes on
    (`resuming` is told so); another run's is refused, or replaced with `force`. `finished` is told
    of every target's audit as soon as there is one.
    """
    started = time.perf_counter()
    expect_count("--processes", processes, 0, MOST_PROCESSES)
    members = read_fleet(targets) if isinstance(targets, str | Path) else list(targets)
    costs = Costs({member.name: member.opening.size for member in members})
    run = {"run": "fleet", "keyhole": environment()["keyhole"]}
    here = processes == 0 and dask is None
    with (
        Journal(journal, run, force=force) as memory,
        Runner(dask or processes, partial(_cost, costs)) as crew,
    ):
        work = _Fleet(members, memory, crew, costs, track, finished, inside=here)
        work.begin(resuming)
        for done in crew.run():
            work.take(done)
        audits = {member.name: work.audits[member.name] for member in members}
    close_kept()
    return Fleet(audits, time.perf_counter() - started)


def _cost(costs: Costs, task: Task) -> float:
    check = task.key.removeprefix(task.group)
    return costs.of_check(task.group, check) if check else costs.of_target(task.group)


class _Fleet:
    """A fleet under way."""

    def __init__(
        self, members: Sequence[Member], journal: Journal, crew: Runner, costs: Costs, track: Track,
        finished: Finished, *, inside: bool,
    ) -> None:  # fmt: skip
        self.members = {member.name: member for member in members}
        self.journal, self.crew, self.costs = journal, crew, costs
        self.track = track if inside else untracked  # a worker's parts are not seen from here
        self.progress, self.finished, self.inside = track("audit"), finished, inside
        self.estimate: tuple[float, float] | None = None  # when, and the seconds left then
        self.audits: dict[str, Audit] = {}
        self.plans: dict[str, Plan] = {}
        self.checked: dict[str, dict[str, tuple[Checked, float]]] = {}
        self.fingerprints = {member.name: member.opening.fingerprint() for member in members}

    def begin(self, resuming: Resuming) -> None:
        """What is known already, and the first tasks of the rest."""
        plans = {name: plan for name in self.members if (plan := self._recalled(name))}
        done = sum(key in self.journal for name, plan in plans.items() for key in _keys(name, plan))
        if done:
            resuming(done, sum(len(plan.checks) for plan in plans.values()))
        for name, member in self.members.items():
            plan = plans.get(name)
            if plan is not None:
                self._go_on(name, plan)
            else:
                opening = member.opening
                self.crew.add(Task(name, partial(plan_of, opening), name, opening.stays))
        self._tell("")

    def take(self, done: Done) -> None:
        """What a task gave: what is to be checked of a target, or one check of it."""
        name = done.task.group
        if name not in self.plans:
            if done.error is not None:
                self._end(name, _unopened(name, done.error))
                return
            plan: Plan = done.value
            record = {"files": self.fingerprints[name], "plan": plan.to_dict()}
            self.journal.add({f"target {name}": record})
            self._go_on(name, plan)
            self._tell("")
            return
        check = done.task.key.removeprefix(name)
        if done.error is not None:
            reason = _reason(done.error)
            checked = Checked(skips=(Skip(self.plans[name].checks[check], "none", reason, True),))
        else:
            checked = done.value
            remember(self.journal, _key(name, self.plans[name], check), checked, done.seconds)
            self.costs.learn(name, check, done.seconds)
        self.checked[name][check] = checked, done.seconds
        self._end_if_complete(name)
        self._tell(f"{name}: {words.exposure(self.plans[name].checks[check])}")

    def _recalled(self, name: str) -> Plan | None:
        """What an earlier run was to check of a target, if that is as it was.

        Nobody can tell from here whether another model answers at an address: unless all of it was
        checked, it is asked.
        """
        record = self.journal.records.get(f"target {name}")
        if record is None or record.get("files") != self.fingerprints[name]:
            return None
        try:
            plan = Plan.from_dict(record["plan"])
        except (KeyError, InputError) as error:
            raise InputError(
                f"expected the checks of {name} in {self.journal.path}, got {error}: give --force, "
                "or remove this file"
            ) from error
        complete = all(key in self.journal for key in _keys(name, plan))
        return plan if complete or not self.members[name].opening.stays else None

    def _go_on(self, name: str, plan: Plan) -> None:
        """The checks of a target that are not in the journal."""
        self.plans[name], self.checked[name] = plan, {}
        opening = self.members[name].opening
        for check in plan.checks:
            key = _key(name, plan, check)
            if key in self.journal:
                self.checked[name][check] = recalled(self.journal, key)
                self.costs.learn(name, check, self.checked[name][check][1])
                continue
            work = partial(make, opening, plan.identity, check)
            if self.inside:
                work = partial(work, track=self.track)
            self.crew.add(Task(f"{name}{check}", work, name, opening.stays))
        self._end_if_complete(name)

    def _end_if_complete(self, name: str) -> None:
        plan, made = self.plans[name], self.checked[name]
        if len(made) == len(plan.checks):
            seconds = sum(took for _, took in made.values())
            checked = joined(made[check][0] for check in plan.checks)
            self._end(name, plan.audit(checked, seconds))

    def _end(self, name: str, audit: Audit) -> None:
        self.audits[name] = audit
        self.finished(self.members[name], audit)

    def _tell(self, note: str) -> None:
        """How many checks are done; of targets that are not open, as many are assumed as usual."""
        done = sum(len(made) for made in self.checked.values())
        total = sum(len(plan.checks) for plan in self.plans.values())
        unopened = len(self.members) - len(self.audits.keys() | self.plans.keys())
        if self.plans:
            total += unopened * total // len(self.plans)
        left = self._left()
        if left is not None and isinstance(self.progress, Expecting):
            self.progress.expect(left)
        self.progress(done, total or None, note)

    def _left(self) -> float | None:
        """The seconds to come; worked out once a second at most, since a fleet may be large."""
        now = time.monotonic()
        if self.costs.known and (self.estimate is None or now - self.estimate[0] >= 1):
            tasks = self.crew.left()
            self.estimate = now, sum(_cost(self.costs, task) for task in tasks) / len(self.crew)
        return None if self.estimate is None else self.estimate[1] - (now - self.estimate[0])


def _key(name: str, plan: Plan, check: str) -> str:
    return f"{name} {plan.digest} {check}"


def _keys(name: str, plan: Plan) -> list[str]:
    digest = plan.digest
    return [f"{name} {digest} {check}" for check in plan.checks]


def _unopened(name: str, error: Exception) -> Audit:
    """A target that nobody could open: nothing of it was checked."""
    skip = Skip(Exposure(NOT_CHECKED, "target"), "none", _reason(error), unchecked=True)
    return Audit(target=name, identity="", findings=(), skips=(skip,))


def _reason(error: Exception) -> str:
    words = " ".join(str(error).split())
    return words if isinstance(error, KeyholeError) else f"{type(error).__name__}: {words}"[:500]
