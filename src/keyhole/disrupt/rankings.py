"""Which unit to cut first: scores from attention probabilities `a` and the loss's gradient `g`.

*Unveiling Vulnerability of Self-Attention* (arXiv 2402.16470), Section 3.4 and its ablations. With
`g_ij = ∂loss/∂a_ij`, taken at zeros added to the post-softmax probabilities, a unit scores

    gradient            −g            as the released code ranks
    magnitude           |g|           as the paper's text ranks, if its mask M stands here
    attention           a             ablation
    random              uniform       ablation
    mask-gradient       a·(Σ_l a_il g_il − g_ij)
    mask-magnitude      its absolute value
    gradient*attention  −g·a          ours: the effect of setting a to zero without renormalising
    removal             a/(1−a)·(Σ_l a_il g_il − g_ij)            ours

The paper's text takes the gradient with respect to the mask M, without saying where M stands. The
released code adds it to the probabilities. Added to the scores before the softmax, where a cut is
made, −∂loss/∂M is `mask-gradient`.

Removal is exact to first order for what really happens: a unit that is cut before the softmax
gives its share to the others of its row, which become `a_il/(1−a_ij)`. So the row moves by
`a_ij/(1−a_ij)·(a_il − [l = j])`, and `g` times that is the formula. The larger the score, the more
the cut raises the loss.

To add a ranking, write its function and its line in RANKINGS.

A unit that is already cut has a worth too: `a'` of the probability it would come back with, times
the same bracket (`worth_of_cut`), to first order in the reverse direction.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

_LEAST = 1e-6  # 1−a of a unit that holds all of its row: cutting it has no first-order effect


def gradient(a: Tensor, g: Tensor, noise: Tensor) -> Tensor:
    del a, noise
    return -g


def magnitude(a: Tensor, g: Tensor, noise: Tensor) -> Tensor:
    del a, noise
    return g.abs()


def attention(a: Tensor, g: Tensor, noise: Tensor) -> Tensor:
    del g, noise
    return a


def random(a: Tensor, g: Tensor, noise: Tensor) -> Tensor:
    del a, g
    return noise


def mask_gradient(a: Tensor, g: Tensor, noise: Tensor | None = None) -> Tensor:
    """How much the loss rises, to first order, when a unit's score falls by a little."""
    del noise
    return a * _bracket(a, g)


def mask_magnitude(a: Tensor, g: Tensor, noise: Tensor) -> Tensor:
    return mask_gradient(a, g, noise).abs()


def gradient_attention(a: Tensor, g: Tensor, noise: Tensor) -> Tensor:
    del noise
    return -g * a


def removal(a: Tensor, g: Tensor, noise: Tensor | None = None) -> Tensor:
    """How much the loss rises, to first order, when a unit is cut and its row renormalised."""
    del noise
    return a / (1 - a).clamp(min=_LEAST) * _bracket(a, g)


# Scores of units (…, q, k) from a, g and noise of that shape, by the name that people type.
RANKINGS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "removal": removal,
    "gradient": gradient,
    "magnitude": magnitude,
    "mask-gradient": mask_gradient,
    "mask-magnitude": mask_magnitude,
    "attention": attention,
    "gradient*attention": gradient_attention,
    "random": random,
}
# A score above zero says that the cut raises the loss; those of the others only order.
SIGNED = frozenset({"gradient*attention", "mask-gradient", "removal"})


def worth_of_cut(a: Tensor, g: Tensor, returning: Tensor) -> Tensor:
    """How much the loss would fall if a cut unit came back with the probability `returning`."""
    return returning * _bracket(a, g)


def _bracket(a: Tensor, g: Tensor) -> Tensor:
    return (a * g).sum(-1, keepdim=True) - g
