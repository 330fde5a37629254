"""Leaks behind a defence, read by an attacker who knows which defence it is.

The attacker does not know the defence's secret, but uses the server too: texts of the attacker's
own leak under the same secret.
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
_SOLVED = {
    "rotated": "rotation solved from rows of own texts",
    "scrambled": "map solved from sums of own texts",
    "mixed": "map solved from sums of own texts",
}
_LONG = 3 * BLOCK  # tokens of a text of the attacker's own
_PARTLY = 0.5  # of the tokens: what is called nearly recovered
_APART = 10_000  # keeps the seeds of the attacker's texts apart from the others'
_SPARE = 1.3  # times as many rows, or sums, as there are dimensions


@dataclass(frozen=True)
class LeakTried:
    """What came back of texts behind one defence; `own` texts of the attacker's leaked besides."""

    defence: str
    exposure: str
    texts: int
    attack: str = "read as it is"
    status: Status = Status.UNSOLVED
    reason: str = ""
    exact: int = 0
    tokens: float = 0.0
    own: int = 0
    seconds: float = 0.0


def read_behind(
    loaded: Loaded, texts: Sequence[str], exposure: Exposure | str, defence: str, seed: int = 0
) -> LeakTried:
    """Hide what leaks of `texts` behind a defence, and read it all the same."""
    if defence not in DEFENCES:
        raise InputError(f"unknown defence {defence}: choose one of {', '.join(DEFENCES)}")
    exposure = Exposure.parse(exposure) if isinstance(exposure, str) else exposure
    started = time.perf_counter()
    target = Target.of(loaded.model, loaded.tokenizer)
    plain = [leak_of(loaded.model, loaded.tokenizer, text, exposure) for text in texts]
    truths = [
        loaded.tokenizer(text, truncation=True, max_length=leak.length)["input_ids"]
        for text, leak in zip(texts, plain, strict=True)
    ]
    tried = LeakTried(defence, str(exposure), len(texts))
    try:
        leaks = [_defended(leak, defence, seed + number) for number, leak in enumerate(plain)]
        if defence in FORMS:
            known = own_texts(target, exposure, defence, seed)
            tried = replace(tried, attack=_SOLVED[defence], own=len(known))
            leaks = _undone(target, known, leaks, defence)
        tried = _judged(tried, recover_texts(loaded.model, loaded.tokenizer, leaks), truths)
    except Unsuccessful as end:
        tried = replace(tried, status=end.status, reason=end.reason)
    return replace(tried, seconds=time.perf_counter() - started)


def _undone(target: Target, known: Pairs, leaks: Sequence[Leak], form: str) -> list[Leak]:
    """The leaks without the secret, as far as texts of the attacker's own show it."""
    if form == "rotated":
        return unrotated(known, leaks)
    return [in_no_order(target, leak) for leak in unscrambled(known, leaks)]


def _judged(
    tried: LeakTried, recoveries: Sequence[TextRecovery], truths: Sequence[list[int]]
) -> LeakTried:
    """By the texts themselves, which the auditor knows."""
    pairs = list(zip(truths, recoveries, strict=True))
    right = sum(a == b for truth, read in pairs for a, b in zip(truth, read.ids, strict=False))
    exact = sum(read.verified and read.ids == truth for truth, read in pairs)
    tokens, status = right / sum(map(len, truths)), Status.UNSOLVED
    if exact == len(truths):
        status = Status.RECOVERED
    elif exact or tokens >= _PARTLY:
        status = Status.INEXACT
    return replace(tried, status=status, reason=recoveries[0].reason, exact=exact, tokens=tokens)


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
