"""Rankings of units: scores from attention probabilities `a` and the gradient `g` of the loss.

*Unveiling Vulnerability of Self-Attention* (arXiv 2402.16470), Section 3.4 and its
ablations. With `g_ij = ∂loss/∂a_ij`, taken with respect to zeros added after the
softmax, a unit scores

    gradient            −g            as in the released code
    magnitude           |g|           as in the paper's text, if its mask M is after the softmax
    attention           a             ablation
    random              uniform       ablation
    mask-gradient       a·(Σ_l a_il g_il − g_ij)
    mask-magnitude      its absolute value
    gradient*attention  −g·a          ours: the effect of setting a to zero without renormalising
    removal             a/(1−a)·(Σ_l a_il g_il − g_ij)            ours

The paper's text takes the gradient with respect to the mask M, and does not say where M
is added. The released code adds it to the probabilities. If it is added to the scores
before the softmax, where a cut is made, −∂loss/∂M is `mask-gradient`.

`removal` is the first-order effect of the actual cut. Cutting a unit before the softmax
gives its probability to the others of its row, which become `a_il/(1−a_ij)`. So the row
changes by `a_ij/(1−a_ij)·(a_il − [l = j])`, and `g` times that change is the formula. A
larger score means that the cut raises the loss more.

The worth of a unit that is already cut is computed in the reverse direction
(`worth_of_cut`): the probability with which it would return, times the same bracket.

To add a ranking, add its function to RANKINGS.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

_LEAST = 1e-6  # least value of 1 − a, for a unit that holds all of its row


def mask_gradient(a: Tensor, g: Tensor) -> Tensor:
    """The first-order rise of the loss when a unit's score falls by a little."""
    return a * _bracket(a, g)


def removal(a: Tensor, g: Tensor) -> Tensor:
    """The first-order rise of the loss when a unit is cut and its row renormalised."""
    return a / (1 - a).clamp(min=_LEAST) * _bracket(a, g)


def worth_of_cut(
    a: Tensor,
    g: Tensor,
    returning: Tensor,
) -> Tensor:
    """The first-order fall of the loss if a cut unit returns with the probability `returning`."""
    return returning * _bracket(a, g)


def _bracket(a: Tensor, g: Tensor) -> Tensor:
    return (a * g).sum(-1, keepdim=True) - g


# Functions from a, g and noise (…, q, k) to the scores of that shape, by name.
RANKINGS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "removal": lambda a, g, _: removal(a, g),
    "gradient": lambda _a, g, _: -g,
    "magnitude": lambda _a, g, _: g.abs(),
    "mask-gradient": lambda a, g, _: mask_gradient(a, g),
    "mask-magnitude": lambda a, g, _: mask_gradient(a, g).abs(),
    "attention": lambda a, _g, _: a,
    "gradient*attention": lambda a, g, _: -g * a,
    "random": lambda _a, _g, noise: noise,
}
# Rankings whose scores are positive exactly where the cut raises the loss, to first
# order.
SIGNED = frozenset({"gradient*attention", "mask-gradient", "removal"})
