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
and `benchmarks/defences.py` run this.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from keyhole.core import Status
from keyhole.core.float64 import normal, random_stream, tensor
from keyhole.core.progress import Progress, silent
from keyhole.defence import Defence
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
from keyhole.oracle.defences import defended
from keyhole.oracle.http import Refused
from keyhole.oracle.protocol import Counted, Oracle, Wrapper, ask

# share of a bound on norms that tokens use, so that rounding does not exceed it
_INSIDE = 1 - 1e-9
_LABELS = 1e-4  # the accuracy to which weights are bisected
_USELESS = 0.1  # relative error from which a copy is of no use, whatever clients get
_SAME = 1e-8  # relative error up to which a copy counts as the target


@dataclass(frozen=True)
class Adapted:
    """The attack on one head behind a known defence: a method, and whether tokens are copied.

    If answers are inexact, it sends `repeats` times as many queries as there are
    unknowns.
    """

    defence: Defence
    repeats: int = 16
    seed: int = 0

    def __call__(self, oracle: Oracle) -> Extraction:
        if self._copies:
            oracle = Copied(oracle, self.defence.min_tokens or 1)
        return self.method(oracle)

    def __str__(self) -> str:
        name = type(self.method).__name__
        return f"{name}, tokens copied" if self._copies else name

    @property
    def method(self) -> Method:
        change = self.defence
        error = (change.noise or 0.0) + (change.fresh_noise or 0.0)
        if change.decimals is not None:
            error += 0.5 * 10.0**-change.decimals
        least = change.min_tokens or 1
        pair = 2 * math.ceil(least / 2)  # its length, repeated until it is accepted
        usual = change.usual_norm
        ordinary = usual is not None or pair > (change.max_tokens or pair)
        if change.sign_only:
            if ordinary:
                return OrdinaryLabels(usual, least, seed=self.seed)
            return SignOnly(accuracy=_LABELS, seed=self.seed)
        if ordinary or (change.max_norm is not None and not error):
            norms = [] if usual is None else [usual]
            if change.max_norm is not None:
                norms.append(_INSIDE * change.max_norm / LONG)
            oversampling = self.repeats / 2 if error else 1.5
            norm = min(norms, default=None)
            return OrdinaryQuestions(norm, least, error, oversampling, self.seed)
        if error:
            return Tolerant(
                error, max_norm=change.max_norm, repeats=self.repeats, seed=self.seed
            )
        return SingleHead(seed=self.seed)

    @property
    def _copies(self) -> bool:
        """Whether tokens are copied until a sequence is long enough."""
        limits = (self.defence.min_tokens, self.defence.max_tokens)
        ordinary = isinstance(self.method, OrdinaryQuestions)
        return limits != (None, None) and not ordinary


class Copied(Wrapper):
    """Repeats sequences until they have the `min_tokens` that a server asks for.

    Repeating a whole sequence does not change a head's answer: c copies of a token
    share the attention that one had. This assumes that the target does not add
    positions to its inputs.
    """

    def __init__(self, inner: Oracle, min_tokens: int) -> None:
        super().__init__(inner)  # answers do not change, and neither does the identity
        self._min = min_tokens

    def __call__(self, sequences: Tensor) -> Tensor:
        copies = math.ceil(self._min / sequences.shape[1])
        return ask(self.inner, sequences.repeat(1, copies, 1))


@dataclass(frozen=True)
class Tried:
    """The attack on a target behind a defence, and the service of honest clients.

    `error` is that of the attacker's copy on an honest client's queries, None without a
    copy.
    """

    attack: str
    status: Status
    extraction: Extraction
    error: float | None
    service: Service


def try_defence(
    defence: Defence,
    target: Oracle,
    client: HonestClient,
    seed: int,
    progress: Progress = silent,
) -> Tried:
    """Attack the target behind a defence, and measure both the copy and the service."""
    attack = Adapted(defence, seed=seed)
    counted = Counted(defended(target, defence), defence.max_queries, progress)
    result = attack(counted)
    error = None if result.model is None else client.error_of(result.model)
    service = client.served(defended(target, defence), labels=defence.sign_only)
    status = _verdict(result.status, error, service.error)
    return Tried(str(attack), status, result, error, service)


def _verdict(
    status: Status,
    error: float | None,
    honest: float,
) -> Status:
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


def server_defences(dim: int, seed: int = 0) -> list[Defence]:
    """Return one defence of each kind, alone and combined, for scores of about 1."""
    clipped = {"max_norm": usual_norm_of(dim)}
    usual = {"usual_norm": usual_norm_of(dim)}
    short = {"min_tokens": 3}
    named: dict[str, dict[str, Any]] = {
        "no defence": {},
        "rounding": {"decimals": 2},
        "rounding, norms clipped": {**clipped, "decimals": 2},
        "noise, the same for a question, norms clipped": {**clipped, "noise": 0.01},
        "noise, anew each time, norms clipped": {**clipped, "fresh_noise": 0.01},
        "label only": {"sign_only": True},
        "norms clipped": clipped,
        "short sequences refused": short,
        "unusual inputs refused": usual,
        "short and unusual inputs refused": {**usual, **short},
        "short and unusual inputs refused, rounding": {**usual, **short, "decimals": 2},
        "short and unusual inputs refused, label only": {
            **usual,
            **short,
            "sign_only": True,
        },
        "a budget of half the unknowns": {"max_queries": (dim * dim + dim) // 2},
        "one query a second": {"rate": 1.0},
    }
    return [Defence(name=name, seed=seed, **given) for name, given in named.items()]


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
        stream = random_stream(seed ^ _STREAM)
        questions: list[Tensor] = []
        for length in _LENGTHS:
            tokens = normal(stream, _EACH, length, target.dim)
            sizes = (_SPREAD * normal(stream, _EACH, length, 1)).exp()
            questions.append(norm * sizes * normalize(tokens, dim=-1))
        truth = torch.cat([ask(target, part) for part in questions])
        return cls(tuple(questions), truth)

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
        answers = tensor(given)
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
