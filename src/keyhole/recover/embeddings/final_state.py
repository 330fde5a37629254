"""The last state that gives next-token logits, exactly (after Carlini et al., arXiv 2403.06634).

    y = W h + b + c·1,    W (v, d) of full column rank, v ≫ d

with c = 0 for logits and c = −log Σ exp for log-probabilities. So h (and c) is the
solution of a least squares problem in float64. It has d or d + 1 unknowns and v
equations, so that the leak's rounding averages out. Tokens whose logit did not leak are
left out; d of them (or d + 1) must have leaked. h is the state after the final norm,
which removes the length of the residual stream. A prompt is then read from its logits
as text from one vector, `Pooled(last)` of that prompt (reader.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from keyhole.core import Status, Unsuccessful
from keyhole.core.tensors import append_ones, normalized
from keyhole.models.capture import Exposure
from keyhole.models.next_token import unembedding
from keyhole.recover.leaks import Leak, Logits, Pooled

_DEPENDENT = 1e-10  # of the largest pivot: columns of W that are linearly dependent


def final_states(model: nn.Module, leak: Logits) -> Tensor:
    """Return the state (1, d) that gives the logits, in float64."""
    head = unembedding(model)
    leaked = leak.leaked
    W = head.weight.detach().double().cpu()[leaked]
    answers = leak.values[:, leaked].double()
    bias = cast("Any", head).bias
    if bias is not None:
        answers = answers - bias.detach().double().cpu()[leaked]
    width = W.shape[1]
    if leak.log_probabilities:
        W = append_ones(W)
    if len(W) < W.shape[1]:
        reason = f"{len(W)} logits leaked, and {W.shape[1]} are needed for the state behind them"
        raise Unsuccessful(Status.NOT_IDENTIFIABLE, reason)
    Q, R = torch.linalg.qr(W)
    pivots = R.diagonal().abs()
    if pivots.min() <= _DEPENDENT * pivots.max():
        reason = (
            "other states give the same logits: the unembedding has dependent columns"
        )
        raise Unsuccessful(Status.NOT_IDENTIFIABLE, reason)
    return torch.linalg.solve_triangular(R, Q.T @ answers.T, upper=True).T[:, :width]


def vectors_of(model: nn.Module, leaks: Sequence[Leak]) -> tuple[Tensor, Exposure]:
    """Return one vector of length one for each leak, and the exposure that gives such vectors.

    For logits this is the last state.
    """
    if isinstance(leaks[0], Pooled):
        values = torch.stack([cast("Pooled", leak).values for leak in leaks])
        return normalized(values), leaks[0].exposure
    states = torch.cat([final_states(model, cast("Logits", leak)) for leak in leaks])
    return normalized(states).float(), Exposure("pooled", pooling="last")
