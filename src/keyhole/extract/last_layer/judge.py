"""The judge of a last layer: fresh prompts, and what of their answers no state can explain.

An answer y of the layer is W h: what remains of it outside of the columns of W is error, of the
matrix and of the answer. Fresh answers that are rounded cannot agree to more than their digits, nor
the matrix that came from such: there a matrix is known approximately if it explains most of them.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from keyhole.core import Status, Unsuccessful
from keyhole.core.errors import InputError
from keyhole.extract.domain import Witness
from keyhole.extract.extraction import Check, Extraction
from keyhole.extract.judge import JUDGE_STREAM, Method, attempt, verdict
from keyhole.extract.last_layer.answers import Answers, Prompts
from keyhole.extract.last_layer.described import LastLayer
from keyhole.extract.step import Step
from keyhole.oracle.counted import Counted
from keyhole.oracle.ledger import remembered
from keyhole.oracle.output_matrix import OutputMatrix
from keyhole.oracle.protocol import BudgetExhausted, Oracle, OracleError

_FRESH = 8
_TINY = torch.finfo(torch.float64).tiny
_ROUNDED = 0.1  # of the answers' size, where all of it lies outside of a wrong matrix


@dataclass(frozen=True, kw_only=True)
class LayerStep(Step):
    """A last layer, with what is known of it and where its answers come from."""

    matrix: OutputMatrix
    layer: LastLayer
    answers: Answers


def settle(method: Method, oracle: Oracle, length: int) -> Extraction:
    """Run the attack and judge the matrix that it proposes by prompts of so many tokens."""
    started = time.perf_counter()
    counted, before = Counted(oracle), remembered(oracle)
    steps, status, reason = attempt(method, Witness(counted))
    queries, free = counted.queries, remembered(oracle) - before
    seconds = time.perf_counter() - started
    last = steps[-1][1] if steps else None
    if not isinstance(last, LayerStep):
        return Extraction(status, reason, repr(method), None, queries, seconds, remembered=free)
    check: Check | None = None
    if status is Status.UNVERIFIED:
        prompts = Prompts(length, torch.Generator().manual_seed(method.seed ^ JUDGE_STREAM))
        try:
            outside, rows = _unexplained(last, prompts)
        except BudgetExhausted:
            reason = "the budget ended before the result could be checked"
        except (OracleError, InputError) as error:
            status, reason = Status.ORACLE_FAILED, str(error)
        except Unsuccessful as end:
            status, reason = end.status, end.reason
        else:
            wrong = outside.abs() / rows.abs().amax(1, keepdim=True).clamp(min=_TINY)
            asked, paid = counted.queries - queries, remembered(oracle) - before - free
            check = Check(float(wrong.max()), float(wrong.mean()), asked, paid)
            status, reason = _verdict(check, outside, rows, last.layer.decimals, method.tolerance)
    return Extraction(
        status=status,
        reason=f"{reason}; {last.layer}",
        method=repr(method),
        model=last.matrix,
        queries=queries,
        seconds=seconds,
        check=check,
        remembered=free,
        floor=last.floor,
        known=last.share if status is not Status.MISMATCH else 0.0,
        layer=last.layer,
    )


def _unexplained(step: LayerStep, prompts: Prompts) -> tuple[Tensor, Tensor]:
    """What no state explains of fresh answers, and those answers."""
    rows = torch.stack([step.answers.fresh(prompts) for _ in range(_FRESH)])
    if step.layer.log_probabilities:
        rows = rows - rows.mean(1, keepdim=True)
    return step.matrix.outside(rows), rows


def _verdict(
    check: Check, outside: Tensor, rows: Tensor, decimals: int | None, accepted: float
) -> tuple[Status, str]:
    status, reason = verdict(check, accepted)
    if status is Status.MISMATCH and decimals is not None:
        share = float(torch.linalg.vector_norm(outside) / torch.linalg.vector_norm(rows))
        if share <= _ROUNDED:
            return Status.INEXACT, f"{reason}, {share:.1e} of their size outside, by rounding"
    return status, reason
