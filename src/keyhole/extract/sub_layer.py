"""An attention sub-layer of a real checkpoint: biases, residual, norm, positions (ours).

The target is `y` of oracle/sub_layer.py: several heads that may share keys and values, biases,
rotary positions, an RMS norm in front, the input added behind. Nothing of this is assumed; numbers
of heads, widths, ε and frequencies show in the answers. Only the last token's vector is used.

What can be known. The same function has many parameters:
- `V_g → V_g T`, `O_h → T⁻¹ O_h` for any invertible T, and `K_g → K_g T`, `Q_h, q_h → Q_h T⁻ᵀ,
  q_h T⁻ᵀ`; with rotary positions only those T that commute with all R_m, a complex number for each
  plane;
- weights sum to 1, so a bias of the values is one of the output, `b + Σ_h (v_h O_h)`; and a bias of
  the keys adds one number to all scores of a query, which the softmax does not see (without rotary
  positions);
- a norm's gain is part of Q, K and V; 1/√k is part of Q; the order of heads is free.
A sub-layer comes back up to these, in `unknowns` numbers (oracle/sub_layer.py).

    surroundings.py        norm, ε, residual, b                     a few queries
    Σ_h M_h = Σ_h V_h O_h  from single tokens                       d + 1
    values.py              what each head writes                    5/4·k·(H + 12) and a few dozen
    strengthened           points with large scores, if a norm keeps those of others small: d
    scores.py              scores of all heads from one answer
                           keys from 9/8·k/s or more x              2·d/s and more
                           queries at d + 1 points                  2(d + 1), 3(d + 1)

with s heads that share keys. For MiniLM, d = 384 and H = 12, that is 2.1 times the unknowns over
the numbers in an answer; for SmolLM2, d = 576, s = 3 and H = 9, 3.6 times. Heads are told
apart without a far field, because behind a norm there is none: tokens are bounded, and no gate
opens all the way.

Limits. The heads' outputs must be independent (H·k ≤ m), and the answers exact to about 1e-15 of
their size: the solves in a row cost six to eight digits. Behind a LayerNorm, as a BERT block has
it, every answer lost its mean and its length; such a target is refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from keyhole.core import Status, Unsuccessful
from keyhole.extract.bilinear import random_orthogonal
from keyhole.extract.extraction import Step
from keyhole.extract.judge import Method
from keyhole.extract.sub_layers.scores import Factors, Reader, read_factors
from keyhole.extract.sub_layers.surroundings import (
    LostSum,
    Surroundings,
    open_surroundings,
    read_total,
)
from keyhole.extract.sub_layers.values import (
    Probe,
    Values,
    find_anchor,
    find_residual,
    read_vectors,
    strengthened,
    where_scores_vary,
)
from keyhole.oracle.protocol import Oracle
from keyhole.oracle.sub_layer import SubLayer

_AXES = 6  # of the subspace that points come from
_OPEN = (0.75, 0.92)  # how far gates should go from half open, on average
_SCALES = 16
_SHORT = 0.1  # of √d, where lengths are sought from below
_PAIRS = 3
_FAINT = 0.5  # scores below this, on average, cost too many digits
_BOUND = 0.67  # of the norm's radius, for two orthogonal tokens whose sum stays inside
_WIDEST = 0.95  # of the radius, for one
_INWARDS = 0.45  # of the length of asking tokens, for differences that lead to shorter ones
_SCORES = 0.7  # where logarithms of weights lose least


@dataclass(frozen=True)
class AttentionSubLayer(Method):
    """Exact extraction of a checkpoint's attention sub-layer that returns vectors."""

    seed: int = 0
    tolerance: float = 1e-8

    def expected_queries(self, dim: int) -> int | None:
        """For heads that fill the width and share nothing."""
        return 7 * dim

    def steps(self, oracle: Oracle) -> Iterator[Step]:
        stream = torch.Generator().manual_seed(self.seed)
        model = read_attention(open_surroundings(oracle, stream), stream)
        yield Step(model, model.unknowns, model.unknowns, numbers=model.outputs,
                   remark=_described(model))  # fmt: skip


def read_attention(
    view: Surroundings, stream: torch.Generator, total: Tensor | None = None, share: float = 1.0
) -> SubLayer:
    """Everything, where the surroundings are known; `total` is Σ_h M_h if that is, too.

    Tokens are as long as suits their gates, or a share of that.
    """
    d = view.dim
    length = min(math.sqrt(d), _BOUND * view.radius)
    if total is None:
        total = read_total(view, length, stream)
    if view.direction is not None:
        length = share * _fitting_length(view, total, _SHORT * length, stream)
    elif view.asking is None:
        length = share * _fitting_length(view, total, length, stream)
    else:
        length = _INWARDS * view.asking
    subspace = random_orthogonal(d, stream)[: min(_AXES, d // 2)]
    positions = _positions_matter(view, length, stream)
    probe = Probe(view, total, subspace, length, positions)
    delta = None
    if view.direction is not None:
        probe, delta = where_scores_vary(probe, stream)
    anchor = find_anchor(probe, stream, delta)
    if anchor.scores.square().mean().sqrt() < _FAINT and length >= _BOUND * view.radius:
        probe = strengthened(probe, anchor, stream)
        anchor = find_anchor(probe, stream, anchor.delta)
    view, total = find_residual(view, total, anchor)
    probe = replace(probe, view=view, total=total)
    values = Values.of(total, *read_vectors(probe, anchor, stream)).completed(probe, stream)
    scores = float(anchor.scores.square().mean().sqrt())
    stronger = _SCORES / max(2 * scores, 1e-3)
    length = length * (math.sqrt(stronger) if view.asking is None else stronger)
    reader = Reader(view, values.of_heads, values.O)
    factors = read_factors(
        reader, values.groups, min(length, _WIDEST * view.radius), positions, stream
    )
    return _assembled(view, values, factors)


def _fitting_length(
    view: Surroundings, total: Tensor, length: float, stream: torch.Generator
) -> float:
    """Of x and δ, at which most gates of `[x + δ ; x]` are neither half open nor shut."""
    most = _BOUND * view.radius
    for _ in range(_SCALES):
        pairs = [length * random_orthogonal(view.dim, stream)[:2] for _ in range(_PAIRS)]
        x, delta = torch.stack(pairs, 1)
        try:
            forward, backward = (
                view.answer(torch.stack([x + sign * delta, x], 1)) - x @ total for sign in (1, -1)
            )
        except LostSum:
            return length / 1.5
        # Σ_h tanh(z_h/2)·δM_h next to Σ_h δM_h
        ratio = float((forward + backward).norm() / (forward - backward).norm())
        if ratio > _OPEN[1]:
            length /= 1.5 if ratio < 1.5 else 3
        elif ratio < _OPEN[0] and length < most:
            length = min(length * (1.5 if ratio > 0.1 or view.direction else 4), most)
        else:
            break
    return length


def _positions_matter(view: Surroundings, length: float, stream: torch.Generator) -> bool:
    """Does a key answer otherwise one place further in front?"""
    x, key = length * random_orthogonal(view.dim, stream)[:2]
    x = x if view.asking is None else x * view.asking / length
    near, further = view.answer(
        torch.stack([torch.stack([0 * x, key, x]), torch.stack([key, 0 * x, x])])
    )
    return bool((near - further).abs().max() > 1e-9 * near.abs().max())


def _assembled(view: Surroundings, values: Values, factors: Factors) -> SubLayer:
    order = [head for group in values.groups for head in group]
    layer = {
        "Q": factors.Q[order], "q": factors.q[order], "K": factors.K,
        "V": values.V, "O": values.O[order], "b": view.b,
        "frequencies": factors.frequencies,
    }  # fmt: skip
    if not all(bool(torch.isfinite(part).all()) for part in layer.values()):
        raise Unsuccessful(Status.MISMATCH, "no finite weights explain the answers")
    layer = {name: part.contiguous() for name, part in layer.items()}
    return SubLayer(**layer, epsilon=view.epsilon, residual=view.residual,
                    every_token=view.every_token, causal=view.causal)  # fmt: skip


def _described(model: SubLayer) -> str:
    heads, _, k = model.Q.shape
    shared = len(model.K)
    parts = [f"{heads} heads of width {k}"]
    if shared < heads:
        parts.append(f"{heads // shared} share keys and values each")
    if model.rotary:
        parts.append("rotary positions")
    if model.epsilon is not None:
        parts.append(f"an RMS norm in front (epsilon {model.epsilon:.2e})")
    parts.append("the input added" if model.residual else "no residual")
    return ", ".join(parts)
