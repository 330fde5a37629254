"""The judge of a last layer: fresh prompts, and what of their answers no state can explain.

An answer y of the layer is W h: what remains of it outside of the columns of W is error, of the
matrix and of the answer. Fresh answers that are rounded cannot agree to more than their digits:
there the remainder is held against that of rounding alone.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch

from keyhole.errors import InputError
from keyhole.extract.domain import Witness
from keyhole.extract.extraction import Check, Extraction
from keyhole.extract.judge import JUDGE_STREAM, Method, Step, attempt, verdict
from keyhole.extract.last_layer.answers import Answers, Prompts
from keyhole.extract.last_layer.described import LastLayer
from keyhole.oracle.counted import Counted
from keyhole.oracle.ledger import remembered
from keyhole.oracle.output_matrix import OutputMatrix
from keyhole.oracle.protocol import BudgetExhausted, Oracle, OracleError
from keyhole.results import Status, Unsuccessful

_FRESH = 8
_ROUNDING = 4.0  # of what rounding alone would leave: the matrix has its own share of it


@dataclass(frozen=True)
class LayerStep(Step):
    """A last layer, with what is known of it and where its answers come from."""

    layer: LastLayer | None = None
    answers: Answers | None = None


def settle(method: Method, oracle: Oracle) -> Extraction:
    """Run the attack and judge the matrix that it proposes."""
    started = time.perf_counter()
    counted, before = Counted(oracle), remembered(oracle)
    steps, status, reason = attempt(method, Witness(counted))
    queries, free = counted.queries, remembered(oracle) - before
    last = steps[-1][1] if steps else None
    check: Check | None = None
    if isinstance(last, LayerStep) and status is Status.UNVERIFIED:
        try:
            check, left = _checked(last, method)
        except BudgetExhausted:
            reason = "the budget ended before the result could be checked"
        except (OracleError, InputError) as error:
            status, reason = Status.ORACLE_FAILED, str(error)
        except Unsuccessful as end:
            status, reason = end.status, end.reason
        else:
            check = Check(check.worst, check.mean, counted.queries - queries,
                          remembered(oracle) - before - free)  # fmt: skip
            status, reason = _verdict(check, left, last, method.tolerance)
    layer = last.layer if isinstance(last, LayerStep) else None
    return Extraction(
        status=status,
        reason=reason if layer is None else f"{reason}; {layer}",
        method=repr(method),
        model=last.model if last else None,
        queries=queries,
        seconds=time.perf_counter() - started,
        check=check,
        remembered=free,
        floor=last.floor if last else None,
        known=last.known / last.floor if last else 0.0,
        layer=layer,
    )


def _checked(step: LayerStep, method: Method) -> tuple[Check, float]:
    """The worst and mean error relative to the largest number, and the RMS of what remains."""
    assert step.answers is not None  # noqa: S101
    assert isinstance(step.model, OutputMatrix)  # noqa: S101
    stream = torch.Generator().manual_seed(method.seed ^ JUDGE_STREAM)
    prompts = Prompts(getattr(method, "length", 4), stream)
    rows = torch.stack([step.answers.fresh(prompts) for _ in range(_FRESH)])
    if step.layer is not None and step.layer.log_probabilities:
        rows = rows - rows.mean(1, keepdim=True)
    outside = step.model.outside(rows)
    wrong = outside.abs() / rows.abs().amax(1, keepdim=True)
    return Check(float(wrong.max()), float(wrong.mean()), 0), float(outside.square().mean().sqrt())


def _verdict(check: Check, left: float, step: LayerStep, accepted: float) -> tuple[Status, str]:
    status, reason = verdict(check, accepted)
    decimals = None if step.layer is None else step.layer.decimals
    if status is Status.MISMATCH and decimals is not None:
        rounding = 10.0**-decimals / math.sqrt(12)
        if left <= _ROUNDING * rounding:
            return Status.INEXACT, f"{reason}, which rounding explains"
    return status, reason
