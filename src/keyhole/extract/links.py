"""What a server does to its scores, found out from a dozen answers to single tokens.

Behind no link, every kind of target is linear or piecewise linear along a ray of single tokens:
with y(t) the answer to [t·a], y(2) − y(0) = 2·(y(1) − y(0)), and the same for −a. Behind a sigmoid,
a tanh or a softmax that holds for the answers once they are undone, and for nothing else, as soon
as the answers are large enough to bend. y(0) is the offset.
"""

from __future__ import annotations

import torch
from torch import Tensor

from keyhole.oracle.links import NAMES, Link, undone
from keyhole.oracle.protocol import Oracle, ask

_STEPS = torch.tensor([0.0, 1.0, 2.0, -1.0, -2.0], dtype=torch.float64)
_BENT = 0.3  # a range of answers over which a sigmoid or a tanh is seen to bend
_TRIES = 12
_ORDER = ("softmax", "identity", "sigmoid", "tanh")


def find_link(oracle: Oracle, seed: int, error: float) -> Link:
    """The link that makes answers along a ray add up; `error` is that of an answer, relative."""
    stream = torch.Generator().manual_seed(seed ^ 0x4C494E4B)
    direction = torch.randn(oracle.dim, generator=stream, dtype=torch.float64)
    ray = _STEPS[:, None, None] * (direction / torch.linalg.vector_norm(direction))
    scale = 1.0
    answers = ask(oracle, ray)
    names = _names(answers)
    for _ in range(_TRIES):
        spread = float((answers - answers[:1]).abs().max())
        saturated = any(not bool(undone(name, answers).isfinite().all()) for name in names)
        if names == ["identity"] or (not saturated and spread >= _BENT):
            break
        further = min(max(2.0, _BENT / max(spread, 1e-9)), 2.0**20)
        scale *= 0.25 if saturated else further
        answers = ask(oracle, scale * ray)
        names = _names(answers)
    misses = {name: _miss(undone(name, answers)) for name in names}
    # Of links that fit alike the first: two classes behind a softmax are sigmoids too.
    best = min(misses, key=lambda name: (misses[name] > max(1e-9, 100 * error), _ORDER.index(name)))
    if misses[best] > max(1e-6, 1e3 * error):
        best = "identity"  # no link makes it add up: a target of another kind
        return Link(best, torch.zeros((), dtype=torch.float64))
    return Link(best, _offset(best, answers))


def _names(answers: Tensor) -> list[str]:
    return [name for name in NAMES if _possible(name, answers)]


def _possible(name: str, answers: Tensor) -> bool:
    inside = bool((answers > 0).all() & (answers < 1).all())
    if bool(((answers == 0) | (answers == 1)).all()):
        return name == "identity"  # labels
    match name:
        case "identity":
            return True
        case "softmax":
            several = answers.ndim > 1 and answers.shape[-1] > 1
            whole = several and bool(((answers.sum(-1) - 1).abs() < 1e-2).all())
            return whole and bool((answers >= 0).all())
        case "sigmoid":
            return inside
        case _:
            return bool((answers.abs() < 1).all())


def _miss(scores: Tensor) -> float:
    """How far scores at 0, 1, 2, −1, −2 are from two straight rays, relative to the largest."""
    if not bool(scores.isfinite().all()):
        return torch.inf
    zero, single, double, minus, minus_double = scores.unbind(0)
    off = torch.stack(
        [double - zero - 2 * (single - zero), minus_double - zero - 2 * (minus - zero)]
    )
    size = (scores - zero).abs().max()
    return float(off.abs().max() / size.clamp(min=1e-300)) if float(size) else 0.0


def _offset(name: str, answers: Tensor) -> Tensor:
    """The scores of the zero token: of its one position, where every token answers."""
    zero = undone(name, answers)[0]
    while zero.ndim > 1:
        zero = zero[0]
    return zero
