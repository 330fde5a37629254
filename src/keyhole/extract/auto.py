"""Which method applies: found out from the oracle's answers, with a dozen questions.

Each kind of target leaves a mark that a few answers show:

    vectors                                       an attention layer        FullOutput
    nothing but 0 and 1                           a threshold               SignOnly
    whole multiples of 10⁻ᵏ                       rounding to k decimals    Tolerant, τ = ½·10⁻ᵏ
    f([a]) + f([−a]) ≠ 0                          a ReLU behind the head    OneLayerTransformer
    logits of [x+δ ; x] that add up in δ          one head                  LowRank
    logits that do not                            several heads             MultiHead

For one head, `z(δ) = logit((f([x+δ ; x]) − f([x])) / f([δ])) = δᵀWx` is linear in δ; for several it
is a mixture, and generic δ show that. The choice is a guess with a reason: the judge decides.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

import torch
from torch import Tensor

from keyhole.errors import InputError
from keyhole.extract.extraction import Extraction
from keyhole.extract.full_output import FullOutput
from keyhole.extract.judge import Method, Step
from keyhole.extract.low_rank import LowRank
from keyhole.extract.multi_head import MultiHead
from keyhole.extract.one_layer import OneLayerTransformer
from keyhole.extract.sign_only import SignOnly
from keyhole.extract.tolerant import Tolerant
from keyhole.oracle.counted import Counted
from keyhole.oracle.protocol import BudgetExhausted, Oracle, OracleError, ask
from keyhole.results import Status

_SAME = 1e-7  # two answers that should agree differ by no more than this, relatively
_DECIMALS = 9  # beyond this, rounding is too fine to be told from chance


class Kind(StrEnum):
    """What the answers look like."""

    HEAD = "one head's scores"
    HEADS = "several heads' scores"
    LAYER = "a one-layer Transformer's scores"
    ROUNDED = "rounded scores"
    SIGNS = "signs"
    LAST_VECTOR = "the last token's vector"
    EVERY_VECTOR = "every token's vector"


@dataclass(frozen=True)
class Choice:
    """A method, and what in the answers speaks for it."""

    kind: Kind
    method: Method
    why: str


@dataclass(frozen=True)
class Auto:
    """Chooses a method by looking at a few answers, and runs it."""

    seed: int = 0
    tolerance: float = 1e-8

    def expected(self, dim: int) -> int | None:  # noqa: ARG002
        return None

    def __call__(self, oracle: Oracle) -> Extraction:
        counted = Counted(oracle)
        try:
            choice = choose(counted, self.seed)
        except BudgetExhausted:
            reason = f"stopped after {counted.queries:,} queries; nothing is known"
            return self._failed(Status.BUDGET, reason, counted.queries)
        except (OracleError, InputError) as error:
            return self._failed(Status.ORACLE_FAILED, str(error), counted.queries)
        result = choice.method(oracle)
        return replace(
            result,
            reason=f"{type(choice.method).__name__}, since {choice.why}; {result.reason}",
            queries=result.queries + counted.queries,
            trace=tuple((queries + counted.queries, error) for queries, error in result.trace),
        )

    def steps(self, oracle: Oracle) -> Iterator[Step]:
        yield from choose(oracle, self.seed).method.steps(oracle)

    def _failed(self, status: Status, reason: str, queries: int) -> Extraction:
        return Extraction(status, reason, repr(self), None, queries, seconds=0.0)


def choose(oracle: Oracle, seed: int = 0) -> Choice:
    """Look at a dozen answers and name the method that fits them."""
    stream = torch.Generator().manual_seed(seed)
    raw = torch.randn(4, oracle.dim, generator=stream, dtype=torch.float64)
    a, b, x, y = raw / torch.linalg.vector_norm(raw, dim=1, keepdim=True)
    pairs = ask(oracle, torch.stack([torch.stack([a, b]), torch.stack([x, y])]))
    if pairs.ndim > 1:
        kind = Kind.LAST_VECTOR if pairs.ndim == 2 else Kind.EVERY_VECTOR
        return Choice(kind, FullOutput(seed=seed), "the answers are vectors")
    singles = ask(oracle, torch.stack([a, -a, b, -b, x, -x]).unsqueeze(1))
    seen = torch.cat([pairs, singles])
    if bool(((seen == 0) | (seen == 1)).all()) and bool(seen.any()):
        return Choice(Kind.SIGNS, SignOnly(seed=seed), "the answers are 0 and 1")
    decimals = _decimals(seen)
    if decimals is not None:
        method = Tolerant(tolerance=0.5 * 10.0**-decimals, seed=seed)
        return Choice(Kind.ROUNDED, method, f"the answers have {decimals} decimals")
    scale = float(singles.abs().max())
    if float((singles[0::2] + singles[1::2]).abs().max()) > _SAME * scale:
        why = "answers to a token and to its opposite are not opposite"
        return Choice(Kind.LAYER, OneLayerTransformer(seed=seed), why)
    if _one_head(oracle, a, b, x):
        return Choice(Kind.HEAD, LowRank(seed=seed), "its logits add up as one head's do")
    return Choice(Kind.HEADS, MultiHead(seed=seed), "its logits do not add up as one head's would")


def _decimals(answers: Tensor) -> int | None:
    """The fewest decimals that all answers share, if few enough to be no accident."""
    for decimals in range(_DECIMALS + 1):
        shifted = answers * 10.0**decimals
        if bool(((shifted - shifted.round()).abs() <= 1e-6).all()):
            return decimals
    return None


def _one_head(oracle: Oracle, a: Tensor, b: Tensor, x: Tensor) -> bool:
    """Is `z(a) + z(b) = z(a+b)`, at a scale where the gates are neither shut nor open?"""
    deltas = torch.stack([a, b, a + b])
    square = 1.0
    for _ in range(12):
        s = math.sqrt(square)
        tokens = torch.stack([s * (x + deltas), (s * x).expand_as(deltas)], dim=1)
        base = ask(oracle, (s * torch.stack([x, a, b])).unsqueeze(1))
        signal = torch.stack([base[1], base[2], base[1] + base[2]])
        alpha = (ask(oracle, tokens) - base[0]) / signal
        if bool(((alpha < 1e-3) | (alpha > 1 - 1e-3)).any()):
            square /= 16  # saturated, or never in range: several heads can push α anywhere
            continue
        z = torch.logit(alpha)
        if float(z.abs().max()) > 0.05:
            return bool((z[0] + z[1] - z[2]).abs() <= _SAME * z.abs().max())
        square *= 16
    return False
