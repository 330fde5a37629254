"""The attack that fits a defence, for an attacker who knows the defence but not the weights.

the server                             the attacker
rounds answers, or adds noise          sends long tokens, computes intervals, and averages
                                       errors out by least squares (tolerant.py)
answers with labels                    bisects (sign_only.py)
clips long tokens                      sends shorter ones (ordinary_questions.py)
refuses short sequences                repeats them until they are long enough (`Copied`)
refuses unusual inputs                 sends ordinary ones (ordinary_questions.py)
answers only one odd length            sends ordinary ones (ordinary_questions.py)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from keyhole.core.errors import InputError, expect_count
from keyhole.extract.extraction import Extraction
from keyhole.extract.judge import Method
from keyhole.extract.ordinary_questions import LONG, OrdinaryLabels, OrdinaryQuestions
from keyhole.extract.sign_only import SignOnly
from keyhole.extract.single_head import SingleHead
from keyhole.extract.tolerant import Tolerant
from keyhole.oracle.defences import Degradation, Wrapper
from keyhole.oracle.protocol import Oracle, ask

_INSIDE = 1 - 1e-9  # share of a bound on norms that tokens use, so that rounding does not exceed it
_LABELS = 1e-4  # the accuracy to which weights are bisected


@dataclass(frozen=True)
class Adapted:
    """The attack on one head behind a known `change`: a method, and whether tokens are copied.

    If answers are inexact, it sends `repeats` times as many queries as there are unknowns.
    """

    change: Degradation
    repeats: int = 16
    seed: int = 0

    def __call__(self, oracle: Oracle) -> Extraction:
        if self._copies:
            oracle = Copied(oracle, self.change.min_tokens or 1, self.change.max_tokens)
        return self.method(oracle)

    def __str__(self) -> str:
        name = type(self.method).__name__
        return f"{name}, tokens copied" if self._copies else name

    @property
    def answer_error(self) -> float:
        """The sum of all errors that an answer may have."""
        decimals = self.change.decimals
        rounding = 0.0 if decimals is None else 0.5 * 10.0**-decimals
        return (self.change.noise or 0.0) + (self.change.fresh_noise or 0.0) + rounding

    @property
    def method(self) -> Method:
        """The method that fits the defence."""
        change, error, seed = self.change, self.answer_error, self.seed
        least = change.min_tokens or 1
        pair = 2 * math.ceil(least / 2)  # the length of a pair repeated until it is long enough
        ordinary = change.usual_norm is not None or pair > (change.max_tokens or pair)
        if ordinary and change.sign_only:
            return OrdinaryLabels(change.usual_norm, least, seed=seed)
        if change.sign_only:
            return SignOnly(accuracy=_LABELS, seed=seed)
        if ordinary or (change.max_norm is not None and not error):
            longest = None if change.max_norm is None else _INSIDE * change.max_norm / LONG
            norms = [norm for norm in (change.usual_norm, longest) if norm is not None]
            oversampling = self.repeats / 2 if error else 1.5
            norm = min(norms, default=None)
            return OrdinaryQuestions(norm, least, error, oversampling, seed)
        if error:
            return Tolerant(error, max_norm=change.max_norm, repeats=self.repeats, seed=seed)
        return SingleHead(seed=seed)

    @property
    def _copies(self) -> bool:
        """Whether tokens are copied until a sequence is long enough."""
        limited = self.change.min_tokens is not None or self.change.max_tokens is not None
        return limited and not isinstance(self.method, OrdinaryQuestions)


class Copied(Wrapper):
    """Sends shorter sequences to a server that takes `min_tokens` to `max_tokens` tokens.

    Repeating a whole sequence does not change a head's answer: c copies of a token share the
    attention that one had. This assumes that the target does not add positions to its inputs.
    """

    def __init__(self, inner: Oracle, min_tokens: int, max_tokens: int | None = None) -> None:
        expect_count("min_tokens", min_tokens)
        super().__init__(inner)  # answers do not change, and neither does the identity
        self._min, self._max = min_tokens, max_tokens

    def __call__(self, sequences: Tensor) -> Tensor:
        length = sequences.shape[1]
        copies = math.ceil(self._min / length)
        if self._max is not None and copies * length > self._max:
            raise InputError(
                f"no multiple of {length} is among the lengths that are answered, {self._min} to "
                f"{self._max} tokens"
            )
        return ask(self.inner, sequences.repeat(1, copies, 1))
