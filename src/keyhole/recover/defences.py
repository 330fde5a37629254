"""Leaks behind a defence, each read as it is best read, by an attacker who knows which one it is.

He does not know a secret; but he uses the server too, and texts of his own leak with the same one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from keyhole.core import Status, Unsuccessful
from keyhole.core.errors import InputError
from keyhole.models.capture import Exposure
from keyhole.models.loading import Loaded
from keyhole.recover.attack import Target
from keyhole.recover.layers.inverse_map import random_texts
from keyhole.recover.leaks import Leak
from keyhole.recover.recovery import TextRecovery
from keyhole.recover.run import recover_texts
from keyhole.recover.secrets import (
    BLOCK,
    FORMS,
    Pairs,
    in_no_order,
    matrices_of,
    unrotated,
    unscrambled,
)
from keyhole.recover.simulate import degrade, leak_of, with_noise

DEFENCES = ("none", "noise", "permuted", *FORMS)
NOISE = 0.1  # in standard deviations of the leak
_KEY = 7
_LONG = 3 * BLOCK  # tokens of a text of the attacker's own
_PARTLY = 0.5  # of the tokens: what is called nearly recovered
_APART = 10_000  # keeps the seeds of the attacker's texts apart from the others'
_SPARE = 1.3  # times as many rows, or sums, as there are dimensions


@dataclass(frozen=True)
class LeakTried:
    """What came back of texts behind one defence; `own` texts of the attacker's leaked besides."""

    defence: str
    exposure: str
    attack: str
    status: Status
    reason: str
    texts: int
    exact: int
    tokens: float
    own: int
    seconds: float


def read_behind(
    loaded: Loaded, texts: Sequence[str], exposure: Exposure | str, defence: str, seed: int = 0
) -> LeakTried:
    """Hide what leaks of `texts` behind a defence, and read it all the same."""
    if defence not in DEFENCES:
        raise InputError(f"expected a defence among {', '.join(DEFENCES)}, got {defence}")
    exposure = Exposure.parse(exposure) if isinstance(exposure, str) else exposure
    started = time.perf_counter()
    target = Target.of(loaded.model, loaded.tokenizer)
    plain = [leak_of(loaded.model, loaded.tokenizer, text, exposure) for text in texts]
    truths = [
        loaded.tokenizer(text, truncation=True, max_length=leak.length)["input_ids"]
        for text, leak in zip(texts, plain, strict=True)
    ]
    reading = _Reading()
    try:
        leaks = [_defended(leak, defence, seed + number) for number, leak in enumerate(plain)]
        if defence in FORMS:
            leaks = reading.undo(target, leaks, exposure, defence, seed)
        reading.judge(recover_texts(loaded.model, loaded.tokenizer, leaks), truths)
    except Unsuccessful as end:
        reading.status, reading.reason = end.status, end.reason
    return LeakTried(
        defence, str(exposure), reading.attack, reading.status, reading.reason, len(texts),
        reading.exact, reading.tokens, reading.own, time.perf_counter() - started,
    )  # fmt: skip


@dataclass
class _Reading:
    """How a leak is read, and what has come of it so far."""

    attack: str = "read as it is"
    status: Status = Status.UNSOLVED
    reason: str = ""
    exact: int = 0
    tokens: float = 0.0
    own: int = 0

    def undo(
        self, target: Target, leaks: Sequence[Leak], exposure: Exposure, form: str, seed: int
    ) -> list[Leak]:
        """The leaks without the secret, as far as texts of one's own tell it."""
        known = own_texts(target, exposure, form, seed)
        self.own = len(known)
        if form == "rotated":
            self.attack = "rotation solved from rows of own texts"
            return unrotated(known, leaks)
        self.attack = "map solved from sums of own texts"
        return [in_no_order(target, leak) for leak in unscrambled(known, leaks)]

    def judge(self, recoveries: Sequence[TextRecovery], truths: Sequence[list[int]]) -> None:
        """By the texts themselves, which the auditor knows."""
        right = 0
        for truth, recovery in zip(truths, recoveries, strict=True):
            right += sum(a == b for a, b in zip(truth, recovery.ids, strict=False))
            self.exact += recovery.verified and recovery.ids == truth
        self.tokens = right / sum(map(len, truths))
        self.reason = recoveries[0].reason
        if self.exact == len(truths):
            self.status = Status.RECOVERED
        elif self.exact or self.tokens >= _PARTLY:
            self.status = Status.INEXACT


def own_texts(target: Target, exposure: Exposure, form: str, seed: int) -> Pairs:
    """Random texts of the attacker's own: what leaks of each, and how it is found with a secret."""
    stream = torch.Generator().manual_seed(seed)
    length = min(_LONG, target.parts.max_length)
    width = max(m.shape[1] for m in matrices_of(_own(target, length, exposure, stream)))
    each = length if form == "rotated" else -(-length // BLOCK)
    count = -(-int(_SPARE * width) // each) + 1
    plain = [_own(target, length, exposure, stream) for _ in range(count)]
    return [
        (leak, _defended(leak, form, seed + _APART + number)) for number, leak in enumerate(plain)
    ]


def _own(target: Target, length: int, exposure: Exposure, stream: torch.Generator) -> Leak:
    """What leaks of a random text of the attacker's own."""
    ids = random_texts(target, 1, length, stream)[0].tolist()
    return leak_of(target.model, None, ids, exposure)


def _defended(leak: Leak, defence: str, seed: int) -> Leak:
    if defence == "none":
        return leak
    if defence == "noise":
        return replace(with_noise(degrade(leak, noise=NOISE, seed=seed), NOISE), precision=None)
    form = f"{defence}:{_KEY}" if defence in FORMS else defence
    return degrade(leak, seed=seed, forms=[form])
