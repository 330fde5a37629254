"""`keyhole extract TARGET --against-defences` as a function."""

from __future__ import annotations

from pathlib import Path

from keyhole.core import Status
from keyhole.core.endpoint import EndpointOptions
from keyhole.core.errors import InputError
from keyhole.core.progress import Progress, Track, silent, untracked
from keyhole.extract.adapted import Adapted
from keyhole.extract.auto import Kind, choose
from keyhole.extract.defences import DefencesTried, HonestClient, Trial, Tried, trials
from keyhole.extract.judge import NEARLY
from keyhole.oracle.connection import without_password
from keyhole.oracle.ledger import Notice, ignored, session
from keyhole.oracle.protocol import Counted, Oracle, identity_of
from keyhole.oracle.target import open_target

_USELESS = 0.1  # relative error from which a copy is of no use, whatever clients get
_SAME = 1e-8  # relative error up to which a copy is the target


def against_defences(
    target: str | Oracle,
    *,
    usual_norm: float | None = None,
    ledger: str | Path | None = None,
    seed: int = 0,
    track: Track = untracked,
    endpoint: EndpointOptions | None = None,
    authorized: bool = False,
    notice: Notice = ignored,
) -> DefencesTried:
    """Put every defence in front of a target, attack it as it is best attacked, and measure both.

    `target` is what the command line takes, or any oracle that answers with one head's scores; the
    defences stand in this process, in front of it. `usual_norm` is the norm of an honest client's
    tokens, d^¼ if not given. The attacker knows which defence it meets. `endpoint`, `authorized`
    and `notice` are as for an extraction.
    """
    name = without_password(target) if isinstance(target, str) else identity_of(target)
    oracle = target
    if isinstance(oracle, str):
        oracle = open_target(oracle, options=endpoint, authorized=authorized)
    with session({"": oracle}, ledger=ledger, notice=notice) as surfaces:
        ready = surfaces[""]
        expect_one_head(ready, seed)
        client = HonestClient.of(ready, usual_norm, seed)
        planned = trials(ready.dim, usual_norm, seed)
        overall = track("extract", len(planned))
        tried: list[Tried] = []
        for number, trial in enumerate(planned):
            overall(number, note=trial.name)
            tried.append(try_defence(trial, ready, client, seed))
        overall(len(planned))
    return DefencesTried(name, oracle.dim, tuple(tried), seed)


def expect_one_head(oracle: Oracle, seed: int) -> None:
    """Refuse a target that the attacks on defences are not for."""
    kind = choose(oracle, seed).kind
    if kind is not Kind.HEAD:
        raise InputError(
            f"expected one head's scores, which the attacks on defences read, got {kind}"
        )


def try_defence(
    trial: Trial, target: Oracle, client: HonestClient, seed: int, progress: Progress = silent
) -> Tried:
    """One defence, from both sides."""
    change = trial.change
    defended = Counted(change.applied(target), trial.queries(target.dim), progress)
    attack = Adapted(change, seed=seed)
    result = attack(defended)
    error = None if result.model is None else client.error_of(result.model)
    honest = client.served(change.applied(target), labels=change.sign_only)
    status = _verdict(result.status, error, honest.error)
    return Tried(
        defence=trial.name,
        setting=_setting(trial, target.dim),
        attack=str(attack),
        status=status,
        reason=result.reason,
        thief_error=error,
        honest_error=honest.error,
        refused=honest.refused,
        queries=result.queries,
        seconds=result.seconds,
        waiting=None if trial.rate is None else result.queries / trial.rate,
    )


def _verdict(status: Status, error: float | None, honest: float) -> Status:
    """By the copy's error on questions that the attack never saw.

    A copy that is better than what honest clients get is given away too, unless both are useless.
    """
    if error is None:
        untried = status in (Status.ORACLE_FAILED, Status.NOT_APPLICABLE)
        return status if untried else Status.UNSOLVED
    if error <= _SAME:
        return Status.RECOVERED
    return Status.INEXACT if error <= NEARLY or error <= min(honest, _USELESS) else Status.UNSOLVED


def _setting(trial: Trial, dim: int) -> str:
    budget = trial.queries(dim)
    parts = (
        str(trial.change),
        "" if budget is None else f"{budget:,} queries at most",
        "" if trial.rate is None else f"{trial.rate:g} queries a second",
    )
    return ", ".join(part for part in parts if part) or "answers as they are"
