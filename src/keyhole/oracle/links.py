"""Links: the functions that servers apply to a score before they answer, and their inverses.

With s the score (or scores) and b an offset, the answer is

    identity   s + b            sigmoid   1 / (1 + e^−(s+b))
    tanh       tanh(s + b)      softmax   e^(s_i + b_i) / Σ_j e^(s_j + b_j)

The logit inverts a sigmoid and atanh a tanh. Logarithms invert a softmax, up to their
mean, which is subtracted; a softmax of two classes is that of one score, s = log
p_1/p_0. A factor on the score is part of v.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from keyhole.core.errors import InputError, expect_among
from keyhole.oracle.protocol import Oracle, Wrapper, ask

NAMES = ("identity", "sigmoid", "tanh", "softmax")
# closer to the end of a range, an answer shows fewer than eight digits of a score
_SATURATED = 1e-8


@dataclass(frozen=True, eq=False)
class Link:
    """One of the functions above; `offset` is b, one number or one for each score of an answer."""

    name: str
    offset: Tensor

    def __post_init__(self) -> None:
        expect_among("a link", self.name, NAMES)
        if self.offset.ndim > 1 or not self.offset.isfinite().all():
            if self.offset.ndim > 1:
                got = f"shape {tuple(self.offset.shape)}"
            else:
                got = "NaN or infinity"
            raise InputError(
                f"expected an offset of one number or one for each score, got {got}"
            )

    def __str__(self) -> str:
        shift = "" if not self.offset.any() else "an offset"
        if self.name == "identity":
            return shift or "nothing"
        return f"a {self.name}{f' and {shift}' if shift else ''}"

    def answer(self, scores: Tensor) -> Tensor:
        """Return a server's answers for these scores."""
        scores = scores + self.offset
        match self.name:
            case "sigmoid":
                return torch.sigmoid(scores)
            case "tanh":
                return torch.tanh(scores)
            case "softmax" if self.offset.ndim == 0:
                return torch.stack([torch.sigmoid(-scores), torch.sigmoid(scores)], -1)
            case "softmax":
                return scores.softmax(-1)
            case _:
                return scores

    def scores(self, answers: Tensor) -> Tensor:
        """Return the scores for these answers."""
        return undone(self.name, answers) - self.offset


def undone(name: str, answers: Tensor) -> Tensor:
    """Return scores plus offset; not finite where an answer is saturated."""
    match name:
        case "sigmoid":
            return torch.logit(_inside(answers, 0.0, 1.0))
        case "tanh":
            return torch.atanh(_inside(answers, -1.0, 1.0))
        case "softmax":
            logs = _inside(answers, 0.0, 1.0).log()
            if answers.shape[-1] == 2:
                return logs[..., 1] - logs[..., 0]
            return logs - logs.mean(-1, keepdim=True)
        case _:
            return answers


def uncertain(
    name: str,
    answers: Tensor,
    error: Tensor,
) -> Tensor:
    """Return how far scores are off if answers are off by `error`; infinite if they saturate.

    The probabilities of a softmax are rounded separately, so their errors add up.
    """
    if name != "softmax":
        scores = undone(name, answers)
        moved = [
            (undone(name, answers + sign * error) - scores).abs() for sign in (1, -1)
        ]
        return torch.stack(moved).amax(0).nan_to_num(nan=torch.inf)
    ratios = answers / _inside(answers - error, 0.0, 1.0)
    parts = ratios.log().nan_to_num(nan=torch.inf)
    if answers.shape[-1] == 2:
        return parts.sum(-1)
    return parts + parts.mean(-1, keepdim=True)


def _inside(
    answers: Tensor,
    low: float,
    high: float,
) -> Tensor:
    """Move saturated answers to the end of the range, where the inverse is infinite."""
    answers = answers.masked_fill(answers - low < _SATURATED, low)
    return answers.masked_fill(high - answers < _SATURATED, high)


class Undone(Wrapper):
    """An oracle whose link is inverted: it answers with the scores.

    `precision` is the relative error of the inner oracle's answers, and `absolute` an
    absolute error on top of it, such as that of rounding to decimals.
    """

    def __init__(
        self,
        inner: Oracle,
        link: Link,
        precision: float | None = None,
        absolute: float = 0.0,
    ) -> None:
        super().__init__(inner, f"undone:{link.name}")
        self.link = link
        self.precision = precision
        self.absolute = absolute

    def __call__(self, sequences: Tensor) -> Tensor:
        return self.link.scores(ask(self.inner, sequences))

    def rounding(self, scores: Tensor, precision: float) -> Tensor:
        """Return how far scores are off because answers are rounded."""
        answers = self.link.answer(scores)
        error = precision * answers.abs() + self.absolute
        return uncertain(self.link.name, answers, error).nan_to_num(posinf=1e9)


class Linked:
    """A model behind a link: it answers as the server does, and is otherwise the model."""

    def __init__(self, inner: Any, link: Link) -> None:
        self.inner = inner
        self.link = link

    @property
    def dim(self) -> int:
        return int(self.inner.dim)

    def __call__(self, sequences: Tensor) -> Tensor:
        return self.link.answer(self.inner(sequences))

    def __getattr__(self, name: str) -> Any:
        # They do not exist yet while a copy is being made.
        if name in ("inner", "link"):
            raise AttributeError(name)
        return getattr(self.inner, name)

    def tensors(self) -> dict[str, Tensor]:
        return {**self.inner.tensors(), "offset": self.link.offset}

    def flags(self) -> dict[str, str]:
        return {**self.inner.flags(), "link": self.link.name}
