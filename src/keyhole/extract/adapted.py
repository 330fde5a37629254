"""The attack that fits a defence: the attacker knows what the server does, only not its weights.

the server                  the attacker
rounds, or adds noise       sends long tokens; intervals, then least squares over many probes,
                            which averages errors out (tolerant.py)
answers with labels         bisects (sign_only.py)
shortens long tokens        sends shorter ones (ordinary_questions.py)
refuses short sequences     writes them several times over (`Copied`)
refuses unusual inputs      asks like anybody else (ordinary_questions.py)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from keyhole.core.errors import InputError, expect_count
from keyhole.extract.bilinear import ask_scores
from keyhole.extract.extraction import Extraction
from keyhole.extract.judge import Method
from keyhole.extract.ordinary_labels import OrdinaryLabels
from keyhole.extract.ordinary_questions import LONG, OrdinaryQuestions
from keyhole.extract.sign_only import SignOnly
from keyhole.extract.single_head import SingleHead
from keyhole.extract.tolerant import Tolerant
from keyhole.oracle.defences import Degradation, Wrapper
from keyhole.oracle.protocol import Oracle, ask

_INSIDE = 1 - 1e-9  # of a bound on norms, in spite of rounding
_LABELS = 1e-4  # the accuracy to which weights are bisected


@dataclass(frozen=True)
class Adapted:
    """The attack on one head behind a `change` that is known, by its method and how it is asked.

    Inexact answers are asked for `repeats` times as often as there are unknowns.
    """

    change: Degradation
    repeats: int = 16
    seed: int = 0

    def __call__(self, oracle: Oracle) -> Extraction:
        return self.method(self._seen(oracle))

    def __str__(self) -> str:
        name = type(self.method).__name__
        return f"{name}, tokens copied" if self._copies else name

    @property
    def answer_error(self) -> float:
        """How far an answer may be off, all in all."""
        decimals = self.change.decimals
        rounding = 0.0 if decimals is None else 0.5 * 10.0**-decimals
        return (self.change.noise or 0.0) + (self.change.fresh_noise or 0.0) + rounding

    @property
    def method(self) -> Method:
        change, error, seed = self.change, self.answer_error, self.seed
        if change.usual_norm is not None and change.sign_only:
            return OrdinaryLabels(change.usual_norm, change.min_tokens or 2, seed=seed)
        if change.sign_only:
            return SignOnly(accuracy=_LABELS, seed=seed)
        if change.usual_norm is not None or (change.max_norm is not None and not error):
            return self._ordinary(error)
        if error:
            return Tolerant(error, max_norm=change.max_norm, repeats=self.repeats, seed=seed)
        return SingleHead(seed=seed)

    def _ordinary(self, error: float) -> Method:
        norms = [
            *([self.change.usual_norm] if self.change.usual_norm is not None else []),
            *([_INSIDE * self.change.max_norm / LONG] if self.change.max_norm else []),
        ]
        oversampling = self.repeats / 2 if error else 1.5
        return OrdinaryQuestions(
            min(norms), self.change.min_tokens or 1, error, oversampling, self.seed
        )

    @property
    def _copies(self) -> bool:
        limited = self.change.min_tokens is not None or self.change.max_tokens is not None
        return limited and not isinstance(self.method, OrdinaryQuestions | OrdinaryLabels)

    def _seen(self, oracle: Oracle) -> Oracle:
        if not self._copies:
            return oracle
        return Copied(oracle, self.change.min_tokens or 1, self.change.max_tokens)


# Copies of tokens get past a limit on lengths (ours).
#
# A head does not see how often a whole sequence is written: c copies of each token share out
# the attention that one had, so `f` of a sequence written c times is `f` of the sequence. Where no
# multiple of its length is allowed, a pair [a ; b] is asked as n copies of a and m of b,
#
#     f = vᵀb + σ(z + log(n/m))·vᵀ(a − b),   z = (a − b)ᵀWb,
#
# since n·e^score against m·e^score moves the logit by log(n/m); with v known the answer to [a ; b]
# itself follows. v is then asked for first, d queries.
#
# It needs a target that adds no positions to its inputs, as an attention layer itself does not.

_EPSILON = torch.finfo(torch.float64).eps


class Copied(Wrapper):
    """A server that takes `min_tokens` to `max_tokens` tokens, asked whatever one likes."""

    def __init__(self, inner: Oracle, min_tokens: int, max_tokens: int | None = None) -> None:
        expect_count("min_tokens", min_tokens)
        super().__init__(inner, "copied")
        self._min, self._max = min_tokens, max_tokens
        self._v: Tensor | None = None

    @property
    def identity(self) -> str:  # another question, the same answer
        return super().identity.removesuffix("|copied")

    def __call__(self, sequences: Tensor) -> Tensor:
        length = sequences.shape[1]
        copies = max(1, math.ceil(self._min / length))
        if self._fits(copies * length):
            return ask(self.inner, sequences.repeat(1, copies, 1))
        if length != 2 or not self._fits(self._min):
            raise InputError(
                f"no multiple of {length} is among the lengths that are answered, {self._min} to "
                f"{self._max} tokens"
            )
        return self._ask_unevenly(sequences)

    def _fits(self, length: int) -> bool:
        return length >= self._min and (self._max is None or length <= self._max)

    def _ask_unevenly(self, pairs: Tensor) -> Tensor:
        """Pairs [a ; b] as n copies of a and one more of b, and what the answer tells."""
        n = self._min // 2
        m = self._min - n
        order = torch.tensor([0] * n + [1] * m)
        v = self._values()
        a, b = (pairs @ v).unbind(1)
        alpha = (ask(self.inner, pairs[:, order]) - b) / (a - b)
        # Rounding may put α just outside; a = b tells nothing, and nothing is lost.
        inside = alpha.nan_to_num(0.5).clamp(_EPSILON**2, 1 - _EPSILON)
        return b + torch.sigmoid(torch.logit(inside) - math.log(n / m)) * (a - b)

    def _values(self) -> Tensor:
        if self._v is None:
            tokens = torch.eye(self.dim, dtype=torch.float64).unsqueeze(1)
            self._v = ask_scores(self.inner, tokens.repeat(1, self._min, 1))
        return self._v
