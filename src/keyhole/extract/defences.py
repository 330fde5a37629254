"""Every defence of a server in front of a target, attacked by the method that fits it best.

The attacker knows the defence, but not the weights (`Adapted`):

    the server                        the attacker
    rounds answers, or adds noise     sends long tokens, computes intervals, and averages errors
                                      out by least squares (tolerant.py)
    answers with labels               bisects (sign_only.py)
    clips long tokens                 sends shorter ones (ordinary_questions.py)
    refuses short sequences           repeats them until they are long enough (`Copied`)
    refuses unusual inputs            sends ordinary ones (ordinary_questions.py)
    answers only one odd length       sends ordinary ones (ordinary_questions.py)

The errors of the attacker's copy and of the server's own answers are measured on one
set of queries, against the answers of the bare target. If the copy's error is smaller,
the attacker has a better server than its clients. `keyhole audit --against-defences`
and `keyhole lab defences` run this.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from keyhole.core import Status
from keyhole.core.errors import InputError, expect_count
from keyhole.core.progress import Progress, silent
from keyhole.extract.extraction import Extraction
from keyhole.extract.judge import NEARLY, Method
from keyhole.extract.ordinary_questions import (
    LONG,
    OrdinaryLabels,
    OrdinaryQuestions,
    usual_norm_of,
)
from keyhole.extract.sign_only import SignOnly
from keyhole.extract.single_head import SingleHead
from keyhole.extract.tolerant import Tolerant
from keyhole.oracle.defences import Degradation, Wrapper
from keyhole.oracle.http import Refused
from keyhole.oracle.protocol import Counted, Oracle, ask

_INSIDE = (
    1 - 1e-9
)  # share of a bound on norms that tokens use, so that rounding does not exceed it
_LABELS = 1e-4  # the accuracy to which weights are bisected
_USELESS = 0.1  # relative error from which a copy is of no use, whatever clients get
_SAME = 1e-8  # relative error up to which a copy counts as the target


@dataclass(frozen=True)
class Adapted:
    """The attack on one head behind a known `change`: a method, and whether tokens are copied.

    If answers are inexact, it sends `repeats` times as many queries as there are
    unknowns.
    """

    change: Degradation
    repeats: int = 16
    seed: int = 0

    def __call__(self, oracle: Oracle) -> Extraction:
        if self._copies:
            oracle = Copied(oracle, self.change.min_tokens or 1, self.change.max_tokens)
        return self.method(oracle)

    def __str__(self) -> str:
        name = type(self.method).__name__
        return f"{name}, tokens copied" if self._copies else name

    @property
    def answer_error(self) -> float:
        """The sum of all errors that an answer may have."""
        decimals = self.change.decimals
        rounding = 0.0 if decimals is None else 0.5 * 10.0**-decimals
        return (self.change.noise or 0.0) + (self.change.fresh_noise or 0.0) + rounding

    @property
    def method(self) -> Method:
        change = self.change
        error = self.answer_error
        seed = self.seed
        least = change.min_tokens or 1
        pair = 2 * math.ceil(
            least / 2
        )  # the length of a pair repeated until it is long enough
        ordinary = change.usual_norm is not None or pair > (change.max_tokens or pair)
        if ordinary and change.sign_only:
            return OrdinaryLabels(change.usual_norm, least, seed=seed)
        if change.sign_only:
            return SignOnly(accuracy=_LABELS, seed=seed)
        if ordinary or (change.max_norm is not None and not error):
            if change.max_norm is None:
                longest = None
            else:
                longest = _INSIDE * change.max_norm / LONG
            norms = [norm for norm in (change.usual_norm, longest) if norm is not None]
            oversampling = self.repeats / 2 if error else 1.5
            norm = min(norms, default=None)
            return OrdinaryQuestions(norm, least, error, oversampling, seed)
        if error:
            return Tolerant(
                error, max_norm=change.max_norm, repeats=self.repeats, seed=seed
            )
        return SingleHead(seed=seed)

    @property
    def _copies(self) -> bool:
        """Whether tokens are copied until a sequence is long enough."""
        limited = (
            self.change.min_tokens is not None or self.change.max_tokens is not None
        )
        return limited and not isinstance(self.method, OrdinaryQuestions)


class Copied(Wrapper):
    """Sends shorter sequences to a server that takes `min_tokens` to `max_tokens` tokens.

    Repeating a whole sequence does not change a head's answer: c copies of a token
    share the attention that one had. This assumes that the target does not add
    positions to its inputs.
    """

    def __init__(
        self, inner: Oracle, min_tokens: int, max_tokens: int | None = None
    ) -> None:
        expect_count("min_tokens", min_tokens)
        super().__init__(inner)  # answers do not change, and neither does the identity
        self._min = min_tokens
        self._max = max_tokens

    def __call__(self, sequences: Tensor) -> Tensor:
        length = sequences.shape[1]
        copies = math.ceil(self._min / length)
        if self._max is not None and copies * length > self._max:
            raise InputError(
                f"no multiple of {length} is among the lengths that are answered, {self._min} to "
                f"{self._max} tokens"
            )
        return ask(self.inner, sequences.repeat(1, copies, 1))


def try_defence(
    trial: Trial,
    target: Oracle,
    client: HonestClient,
    seed: int,
    progress: Progress = silent,
) -> Tried:
    """Attack the target behind one defence, and measure both the copy and the service."""
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
        attacker_error=error,
        honest_error=honest.error,
        refused=honest.refused,
        queries=result.queries,
        seconds=result.seconds,
    )


def _verdict(status: Status, error: float | None, honest: float) -> Status:
    """Return the status by the copy's error on queries that the attack never saw.

    A copy that is better than what honest clients get counts too, unless both are
    useless.
    """
    if error is None:
        untried = status in (Status.ORACLE_FAILED, Status.NOT_APPLICABLE)
        return status if untried else Status.UNSOLVED
    if error <= _SAME:
        return Status.RECOVERED
    if error <= NEARLY or error <= min(honest, _USELESS):
        return Status.INEXACT
    return Status.UNSOLVED


def _setting(trial: Trial, dim: int) -> str:
    """Describe a defence by what it changes and what it limits."""
    budget = trial.queries(dim)
    parts = (
        str(trial.change),
        "" if budget is None else f"{budget:,} queries at most",
        "" if trial.rate is None else f"{trial.rate:g} queries a second",
    )
    return ", ".join(part for part in parts if part) or "answers as they are"


@dataclass(frozen=True)
class Tried:
    """The result of one defence. Errors are relative, on an honest client's queries; None: no copy.

    `refused` is the share of the honest client's queries that the defence refuses.
    """

    defence: str
    setting: str
    attack: str
    status: Status
    reason: str
    attacker_error: float | None
    honest_error: float
    refused: float
    queries: int
    seconds: float


@dataclass(frozen=True)
class Trial:
    """One defence: how it changes queries and answers, and how many queries a client may send.

    `budget` is a share of the unknowns d² + d, `rate` is in queries a second.
    """

    name: str
    change: Degradation
    budget: float | None = None
    rate: float | None = None

    def queries(self, dim: int) -> int | None:
        """Return the budget as a number of queries."""
        return None if self.budget is None else int(self.budget * (dim * dim + dim))


def trials(dim: int, seed: int = 0) -> list[Trial]:
    """Return one defence of each kind, alone and combined, for scores of about 1."""
    norm = usual_norm_of(dim)
    none = Degradation(seed=seed)
    bounded = replace(none, max_norm=norm)
    usual = replace(none, usual_norm=norm)
    return [
        Trial("no defence", none),
        Trial("rounding", replace(none, decimals=2)),
        Trial("rounding, norms clipped", replace(bounded, decimals=2)),
        Trial(
            "noise, the same for a question, norms clipped",
            replace(bounded, noise=0.01),
        ),
        Trial(
            "noise, anew each time, norms clipped", replace(bounded, fresh_noise=0.01)
        ),
        Trial("label only", replace(none, sign_only=True)),
        Trial("norms clipped", bounded),
        Trial("short sequences refused", replace(none, min_tokens=3)),
        Trial("unusual inputs refused", usual),
        Trial("short and unusual inputs refused", replace(usual, min_tokens=3)),
        Trial(
            "short and unusual inputs refused, rounding",
            replace(usual, min_tokens=3, decimals=2),
        ),
        Trial(
            "short and unusual inputs refused, label only",
            replace(usual, min_tokens=3, sign_only=True),
        ),
        Trial("a budget of half the unknowns", none, budget=0.5),
        Trial("one query a second", none, rate=1.0),
    ]


_STREAM = 0x484F4E45  # so that these queries differ from every attack's
_LENGTHS = (4, 8, 16)
_EACH = 40  # queries of each length
_SPREAD = 0.1  # standard deviation of the logarithm of a token's norm


@dataclass(frozen=True)
class Service:
    """The error of the answers that a client gets, and the share of its queries refused."""

    error: float
    refused: float


@dataclass(frozen=True)
class HonestClient:
    """Sequences of 4, 8 and 16 random tokens with norms near the usual one, and true answers."""

    questions: tuple[Tensor, ...]
    truth: Tensor

    @classmethod
    def of(cls, target: Oracle, seed: int = 0) -> HonestClient:
        """Ask the bare target, as its owner can."""
        norm = usual_norm_of(target.dim)
        stream = torch.Generator().manual_seed(seed ^ _STREAM)
        questions: list[Tensor] = []
        for length in _LENGTHS:
            shape = (_EACH, length, target.dim)
            tokens = torch.randn(shape, generator=stream, dtype=torch.float64)
            sizes = _SPREAD * torch.randn(
                *shape[:2], 1, generator=stream, dtype=torch.float64
            )
            tokens = torch.nn.functional.normalize(tokens, dim=-1)
            questions.append(norm * sizes.exp() * tokens)
        return cls(
            tuple(questions), torch.cat([ask(target, part) for part in questions])
        )

    def served(self, defended: Oracle, labels: bool = False) -> Service:
        """Measure a server's answers; a refused one counts as 0."""
        given: list[float] = []
        refused = 0
        for part in self.questions:
            for question in part:
                try:
                    given.append(float(ask(defended, question[None])[0]))
                except Refused:
                    given.append(0.5 if labels else 0.0)
                    refused += 1
        answers = torch.tensor(given, dtype=torch.float64)
        error = self._error(2 * answers - 1 if labels else answers)
        return Service(error, refused / len(given))

    def error_of(self, copy: Oracle) -> float:
        return self._error(torch.cat([ask(copy, part) for part in self.questions]))

    def _error(self, given: Tensor) -> float:
        """Return the root mean square error relative to the truth, after the best scaling.

        Labels have no scale, and neither has a v that was extracted from labels.
        """
        square = float(given @ given)
        factor = float(given @ self.truth) / square if square else 0.0
        return float((factor * given - self.truth).norm() / self.truth.norm())
