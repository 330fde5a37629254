"""Texts recovered from hidden states: what benchmarks count against the planted ones."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

from torch import Tensor

import subjects
from keyhole import invert
from keyhole.models import Exposure, Loaded
from keyhole.recover import Mark
from keyhole.recover.attack import Attack
from subjects import Change


@dataclass(frozen=True, eq=False)
class Outcome:
    """Recovered texts and the planted ones."""

    truths: list[list[int]]
    recoveries: list[invert.TextRecovery]
    seconds: float

    @property
    def tokens(self) -> float:
        """The share of tokens that are right."""
        right = sum(
            a == b
            for truth, recovery in zip(self.truths, self.recoveries, strict=True)
            for a, b in zip(truth, recovery.ids, strict=False)
        )
        return right / sum(len(truth) for truth in self.truths)

    @property
    def exact(self) -> float:
        """The share of texts that are right and verified."""
        return sum(self._verified()) / len(self.recoveries)

    @property
    def false(self) -> int:
        return self._verified().count(False)

    def _verified(self) -> list[bool]:
        """Whether each text that is called verified is right."""
        pairs = zip(self.truths, self.recoveries, strict=True)
        return [truth == recovery.ids for truth, recovery in pairs if recovery.verified]

    @property
    def marked(self) -> tuple[int, int]:
        """How many tokens are marked verified, and how many of those are wrong."""
        right = [
            a == b
            for truth, recovery in zip(self.truths, self.recoveries, strict=True)
            for a, b, mark in zip(truth, recovery.ids, recovery.marks, strict=False)
            if mark is Mark.VERIFIED
        ]
        return len(right), len(right) - sum(right)

    @property
    def passes(self) -> float:
        return statistics.median(recovery.passes for recovery in self.recoveries)

    @property
    def searched(self) -> float:
        """Passes without the judge's."""
        return statistics.median(recovery.passes - recovery.judging for recovery in self.recoveries)

    @property
    def summary(self) -> str:
        return f"{self.tokens:.2%} of tokens, {self.exact:.1%} of texts exact and verified"

    @property
    def cost(self) -> str:
        backward = statistics.median(
            recovery.passes - recovery.forwards for recovery in self.recoveries
        )
        return (
            f"passes median {self.passes:.0f} ({backward:.0f} with a backward, "
            f"{self.passes - self.searched:.0f} the judge's), most "
            f"{max(recovery.passes for recovery in self.recoveries)}; {self.seconds:.2f} s a text, "
            f"fitted once on {self.recoveries[0].fitting} random texts"
        )


def recover(
    loaded: Loaded,
    ids: list[Tensor],
    layer: int,
    change: Change | None = None,
    method: Attack | None = None,
) -> Outcome:
    leaks = [subjects.leak_of(loaded, text, Exposure("hidden", layer), change) for text in ids]
    started = time.perf_counter()
    recoveries = invert.recover_texts(loaded.model, loaded.tokenizer, leaks, method=method)
    seconds = (time.perf_counter() - started) / len(ids)
    return Outcome([text.tolist() for text in ids], recoveries, seconds)
