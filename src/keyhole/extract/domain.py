"""The domain of a model: the lengths and norms up to which it agrees with the target.

A judge that asks only short sequences of ordinary tokens would call a head recovered
although its attention ends after eight tokens, or its server clips long ones. So a
model that passed is tested further out: on sequences of up to 64 tokens, on tokens a
hundred times shorter and longer, on repeated tokens, and on combinations. Its claim is
limited to the domain in which it agrees. If the target answers differently beyond, that
is an outcome of its own; a target that refuses a query (one with a limit on lengths,
say) ends the domain without contradicting the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from keyhole.core.errors import InputError
from keyhole.core.float64 import normal, random_stream
from keyhole.extract.arithmetic import within_own_error
from keyhole.extract.bilinear import lengths, max_abs
from keyhole.oracle.protocol import (
    BudgetExhausted,
    Counted,
    Oracle,
    OracleError,
    ask,
    finite,
)

_STREAM = 0x444F4D41  # makes these queries differ from those of every attack
_LONGER = (16, 32, 64)
# shorter and longer tokens, from the ordinary ones outwards
_FACTORS = ((0.1, 0.01), (10.0, 100.0))
_LENGTHS = (2, 5)  # at which other norms are tried
_EACH = 2
_HALVINGS = 5  # of tokens whose scores a sigmoid or tanh hides

_COARSE = 0.1  # relative error of a model above which a comparison means nothing
# answers smaller than this, relative to the tokens' size, may be all rounding
_FAINT = 1e-6

CHANGED = "had other answers: the target changes, or answers at random"
# the model's answers, the target's, an error
Agrees = Callable[[Tensor, Tensor, float], bool]
# the same, with the questions first
Same = Callable[[Tensor, Tensor, Tensor, float], bool]


def within(
    given: Tensor,
    answers: Tensor,
    allowed: float,
) -> bool:
    """Return whether answers differ by no more than this share of the largest."""
    return max_abs(given - answers) <= allowed * max_abs(answers)


@dataclass(frozen=True)
class Domain:
    """Lengths of sequences and norms of tokens, both inclusive, and the largest answer seen."""

    lengths: tuple[int, int]
    norms: tuple[float, float]
    largest: float = 0.0

    @classmethod
    def of(cls, questions: Sequence[Tensor], answers: Sequence[Tensor] = ()) -> Domain:
        """Return the domain that sequences (b, n, d) and their answers cover."""
        norms = [lengths(part) for part in questions]
        counts = [part.shape[1] for part in questions]
        low = min(float(each.min()) for each in norms)
        high = max(float(each.max()) for each in norms)
        largest = max((max_abs(part) for part in answers), default=0.0)
        return cls((min(counts), max(counts)), (low, high), largest)

    def joined(self, other: Domain) -> Domain:
        lengths = (*self.lengths, *other.lengths)
        norms = (*self.norms, *other.norms)
        largest = max(self.largest, other.largest)
        return Domain((min(lengths), max(lengths)), (min(norms), max(norms)), largest)

    def __str__(self) -> str:
        short, long = self.lengths
        low, high = self.norms
        tokens = f"{short} to {long} tokens" if long > short else f"{short} token"
        return f"{tokens} of norm {low:.2g} to {high:.2g}, answers up to {self.largest:.2g}"


def within_reach(oracle: Oracle, sequences: Tensor) -> tuple[Tensor, Tensor]:
    """Return sequences and their answers, after halving tokens whose score is infinite.

    An endpoint with a sigmoid or a tanh cannot show the scores of longer ones.
    """
    for _ in range(_HALVINGS):
        try:
            return sequences, ask(oracle, sequences)
        except OracleError as error:
            if error.answers is None or not error.answers.isinf().any():
                raise
            beyond = ~error.answers.isfinite().reshape(len(sequences), -1).all(1)
        sequences = torch.where(beyond[:, None, None], sequences / 2, sequences)
    return sequences, ask(oracle, sequences)


@dataclass
class Explorer:
    """Tests a model beyond the domain in which it is known to agree.

    `error` is the model's own relative error for tokens of ordinary size; `max_norm` is
    the largest norm of a token that the target is known to accept.
    """

    oracle: Oracle
    model: Oracle
    same: Same
    error: float
    seed: int
    max_norm: float = math.inf

    def __post_init__(self) -> None:
        self._stream = random_stream(self.seed ^ _STREAM)

    def explore(self, known: Domain) -> tuple[Domain, bool]:
        """Return the domain in which the model agrees, and whether the target differs beyond it.

        The domain is grown from `known`; if that has one length, only other norms are
        tested.
        """
        longest = known.lengths[1]
        several = longest > 1
        domain = known
        differs = False
        if several:
            differs = self._ask(longest, 1.0, repeats=True)[0] is False
        lengths = _LENGTHS if several else (1,)
        ways = [[(length, 1.0) for length in _LONGER if several]]
        for factors in _FACTORS:
            ways.append([(length, factor) for factor in factors for length in lengths])
        for way in ways:
            for length, factor in way:
                agrees, tried = self._ask(length, factor)
                differs |= agrees is False
                if not agrees:
                    break
                domain = domain.joined(tried)
        if several and not differs and domain.lengths[1] > longest:
            # Long sequences of long, and of short, tokens: both at once.
            for _, factor in _FACTORS:
                agrees, _ = self._ask(domain.lengths[1], factor)
                if not agrees:
                    differs |= agrees is False
                    domain = replace(domain, lengths=known.lengths)
        return domain, differs

    def _ask(
        self,
        length: int,
        factor: float,
        *,
        repeats: bool = False,
    ) -> tuple[bool | None, Domain]:
        """Return whether both agree on tokens of norm about `factor` and `factor·√d`, or None.

        None means that there is no answer. An error of W has a larger effect on longer
        tokens, since scores grow with the square: if it may be too large, nothing is
        asked.
        """
        dim = self.oracle.dim
        sequences = normal(self._stream, 2, _EACH, length, dim)
        sequences[0] /= math.sqrt(dim)
        sequences = factor * sequences.flatten(0, 1)
        if repeats:
            sequences[:, 1::2] = sequences[:, 1:2]
        # In spite of rounding, no token is longer than the target accepts.
        share = self.max_norm * (1 - 1e-12) / lengths(sequences)
        sequences = sequences * share.clamp(max=1.0)[..., None]
        domain = Domain.of([sequences])
        error = self.error * max(1.0, factor**2)
        if error > _COARSE:
            return None, domain
        try:
            answers = ask(self.oracle, sequences)
        except (OracleError, InputError, BudgetExhausted):
            return None, domain
        try:
            given = ask(self.model, sequences)
        except OracleError:
            return False, domain
        if given.shape != answers.shape:
            return False, domain
        same = self.same(sequences, given, answers, error)
        return same, Domain.of([sequences], [answers])


class Witness:
    """Keeps a few of the attack's own queries with their answers."""

    def __init__(self, inner: Counted) -> None:
        self.inner = inner
        self.kept: list[tuple[Tensor, Tensor]] = []
        self.dim = inner.dim
        self._batches = 0

    @property
    def queries(self) -> int:
        return self.inner.queries

    def __call__(self, sequences: Tensor) -> Tensor:
        answers = self.inner(finite(sequences))  # an overflow is not the oracle's fault
        self._batches += 1
        if self._batches & (self._batches - 1) == 0 and len(answers):  # 1, 2, 4, 8, …
            self.kept.append((sequences[:1].clone(), answers[:1].clone()))
        return answers

    def contradicted(
        self,
        agrees: Agrees,
        error: float,
        precision: float,
    ) -> int:
        """Count the kept queries whose answer differs now by more than its own error."""
        changed = 0
        norms = [Domain.of([sequences]).norms[1] for sequences, _ in self.kept]
        gain = max(
            (
                max_abs(answers) / norm
                for (_, answers), norm in zip(self.kept, norms, strict=True)
                if norm
            ),
            default=0,
        )
        with suppress(BudgetExhausted, OracleError, InputError):
            for (sequences, answers), norm in zip(self.kept, norms, strict=True):
                now = ask(self.inner, sequences)
                largest = max(max_abs(now), max_abs(answers))
                if largest <= _FAINT * gain * norm:
                    continue  # answers that cancel may be all rounding
                changed += now.shape != answers.shape or not (
                    agrees(now, answers, error)
                    or within_own_error(self.inner, sequences, now, answers, precision)
                )
        return changed
