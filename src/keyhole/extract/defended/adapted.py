"""The attack that fits a defence: the attacker knows what the server does, only not its weights.

rounds, or adds noise       long tokens; intervals, then least squares over many probes,
                            which averages errors out (tolerant.py)
answers with labels         bisects (sign_only.py)
shortens long tokens        tokens that stay inside (ordinary_questions.py)
refuses short sequences     writes them several times over (copies.py)
refuses unusual inputs      asks like anybody else (ordinary_questions.py)
"""

from __future__ import annotations

from dataclasses import dataclass

from keyhole.extract.defended.copies import Copied
from keyhole.extract.extraction import Extraction
from keyhole.extract.judge import Method
from keyhole.extract.ordinary_labels import OrdinaryLabels
from keyhole.extract.ordinary_questions import LONGEST, OrdinaryQuestions
from keyhole.extract.sign_only import SignOnly
from keyhole.extract.single_head import SingleHead
from keyhole.extract.tolerant import Tolerant
from keyhole.oracle.degraded import Degradation
from keyhole.oracle.protocol import Oracle

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
            *([_INSIDE * self.change.max_norm / LONGEST] if self.change.max_norm else []),
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
