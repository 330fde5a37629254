"""Which unit to cut first: scores from attention probabilities `a` and the loss's gradient `g`.

*Unveiling Vulnerability of Self-Attention* (arXiv 2402.16470), Section 3.4 and its ablations. With
`g_ij = ∂loss/∂a_ij`, taken at zeros added to the post-softmax probabilities, a unit scores

    gradient            −g            as released
    magnitude           |g|           ablation
    attention           a             ablation
    random              uniform       ablation
    gradient*attention  −g·a          the effect of setting a to zero without renormalising
    removal             a/(1−a)·(Σ_l a_il g_il − g_ij)

Removal is exact to first order for what really happens: a unit that is cut before the softmax
gives its share to the others of its row, which become `a_il/(1−a_ij)`. So the row moves by
`a_ij/(1−a_ij)·(a_il − [l = j])`, and `g` times that is the formula. The larger the score, the more
the cut raises the loss.

A unit that is already cut has a worth too: `a'` of the probability it would come back with, times
the same bracket (`worth_of_cut`), to first order in the reverse direction.
"""

from __future__ import annotations

from typing import Literal, get_args

from torch import Tensor

Ranking = Literal[
    "gradient", "magnitude", "attention", "random", "gradient*attention", "removal"
]  # fmt: skip
RANKINGS: tuple[str, ...] = get_args(Ranking)
# A score above zero says that the cut raises the loss; the others only order.
SIGNED = frozenset({"gradient*attention", "removal"})
_LEAST = 1e-6  # 1−a of a unit that holds all of its row: cutting it has no first-order effect


def score(ranking: str, a: Tensor, g: Tensor, noise: Tensor) -> Tensor:
    """Scores of units (…, q, k); `noise`, of the same shape, is the random ranking's."""
    match ranking:
        case "gradient":
            return -g
        case "magnitude":
            return g.abs()
        case "attention":
            return a
        case "random":
            return noise
        case "gradient*attention":
            return -g * a
        case _:
            return removal(a, g)


def removal(a: Tensor, g: Tensor) -> Tensor:
    """How much the loss rises, to first order, when a unit is cut and its row renormalised."""
    return a / (1 - a).clamp(min=_LEAST) * _bracket(a, g)


def worth_of_cut(a: Tensor, g: Tensor, returning: Tensor) -> Tensor:
    """How much the loss would fall if a cut unit came back with the probability `returning`."""
    return returning * _bracket(a, g)


def _bracket(a: Tensor, g: Tensor) -> Tensor:
    return (a * g).sum(-1, keepdim=True) - g
