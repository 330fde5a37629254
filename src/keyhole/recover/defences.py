"""Leaks behind a defence, read by an attacker who knows which defence it is.

The attacker does not know the defence's secret, but uses the server too: texts of the attacker's
own leak under the same secret, or none do, and what the defence keeps has to tell.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from keyhole.core import Status, Unsuccessful
from keyhole.core.errors import InputError
from keyhole.models.capture import Exposure
from keyhole.models.loading import Loaded
from keyhole.recover.attack import Attack, Target
from keyhole.recover.gradients.update import DELTA, epsilon_of
from keyhole.recover.layers.inverse_map import random_texts
from keyhole.recover.leaks import PRECISIONS, KeyValues, Leak, MixedCache
from keyhole.recover.recovery import TextRecovery
from keyhole.recover.run import recover_texts
from keyhole.recover.secrets import (
    BLOCK,
    SECRETS,
    Pairs,
    by_lengths,
    matrices_of,
    undo_rotation,
    unrotated,
    unshielded,
    with_matrices,
)
from keyhole.recover.simulate import MAX_LENGTH, degrade, leak_of

DEFENCES = ("none", "permuted", "int8", "int4", *SECRETS)
_KEY = 7
_SOLVED = {
    "rotated": "rotation solved from rows of own texts",
    "shielded": "columns of own texts matched",
}
_BY_LENGTHS = "tokens by the lengths of rows, then the rotation from them"
_LONG = 3 * BLOCK  # tokens of a text of the attacker's own
_PARTLY = 0.5  # of the tokens: what is called nearly recovered
_APART = 10_000  # keeps the seeds of the attacker's texts apart from the others'
_SPARE = 1.3  # times as many rows as there are dimensions


@dataclass(frozen=True)
class LeakTried:
    """What came back of texts behind one defence; `own` texts of the attacker's leaked besides."""

    defence: str
    exposure: str
    texts: int
    attack: str = ""
    status: Status = Status.UNSOLVED
    reason: str = ""
    exact: int = 0
    tokens: float = 0.0
    own: int = 0
    seconds: float = 0.0


def read_behind(
    loaded: Loaded, texts: Sequence[str], exposure: Exposure | str, defence: str, seed: int = 0, *,
    own: int | None = None, known: int | None = None,
    hide: Callable[[Leak], Leak] | None = None, method: Attack | None = None,
) -> LeakTried:  # fmt: skip
    """Hide what leaks of `texts` behind a defence, and read it all the same.

    `own` is how many texts the attacker sends, by default as many as it takes; `known` how many
    tokens a cloaked cache is known to begin with. `hide` is a defence that is none of DEFENCES.
    `method` reads what is left, by default what reads such leaks.
    """
    if hide is None and defence not in DEFENCES:
        raise InputError(f"unknown defence {defence}: choose one of {', '.join(DEFENCES)}")
    exposure = Exposure.parse(exposure) if isinstance(exposure, str) else exposure
    started = time.perf_counter()
    target = Target.of(loaded.model, loaded.tokenizer)
    plain = [leak_of(loaded.model, loaded.tokenizer, text, exposure) for text in texts]
    longest = min(MAX_LENGTH, target.parts.max_length)
    truths = [
        loaded.tokenizer(text, truncation=True, max_length=longest)["input_ids"] for text in texts
    ]
    tried = LeakTried(defence, str(exposure), len(texts))
    try:
        leaks = [
            _defended(leak, defence, seed + number) if hide is None else hide(leak)
            for number, leak in enumerate(plain)
        ]
        if defence == "cloaked" and known is not None:
            leaks = [
                _opened(leak, truth[:known]) for leak, truth in zip(leaks, truths, strict=True)
            ]
        if hide is None and defence in _SOLVED:
            pairs, attack = _pairs(target, leaks, exposure, defence, seed, own)
            tried = replace(tried, attack=attack, own=0 if own == 0 else len(pairs))
            leaks = _undone(pairs, leaks, defence) if pairs else leaks
        read = recover_texts(loaded.model, loaded.tokenizer, leaks, method=method)
        tried = _judged(tried, read, truths)
    except Unsuccessful as end:
        tried = replace(tried, status=end.status, reason=end.reason)
    return replace(tried, seconds=time.perf_counter() - started)


def _opened(leak: Leak, known: list[int]) -> Leak:
    """A mixed cache of which the first tokens are known."""
    if not isinstance(leak, KeyValues):
        raise InputError(f"only a cache begins with known tokens here, not {leak.exposure}")
    return MixedCache(leak.keys, leak.values, leak.layer + 1, known=known)


def _pairs(
    target: Target, leaks: Sequence[Leak], exposure: Exposure, form: str, seed: int, own: int | None
) -> tuple[Pairs, str]:
    """What the attacker knows of texts and their leaks, and how the secret is found from it."""
    if own != 0:
        return own_texts(target, exposure, form, seed, own), _SOLVED[form]
    if exposure.kind == "kv" and form in ("rotated", "shielded"):
        return by_lengths(target, leaks), _BY_LENGTHS
    return [], ""


def _undone(known: Pairs, leaks: Sequence[Leak], form: str) -> list[Leak]:
    """The leaks without the secret, as far as texts of the attacker's own show it."""
    if leaks[0].kind == "pooled":
        rows = ([matrices_of(leak)[0] for leak in side] for side in zip(*known, strict=True))
        alignment = undo_rotation(*(torch.cat(side) for side in rows))
        undone = [alignment.undo(matrices_of(leak)[0].double()) for leak in leaks]
        return [with_matrices(leak, [row]) for leak, row in zip(leaks, undone, strict=True)]
    if form == "rotated" or known[0][1] is leaks[0]:
        return unrotated(known, leaks)
    return unshielded(known, leaks)


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
    best = next((read for read in recoveries if read.verified), recoveries[0])
    return replace(
        tried, attack=tried.attack or best.method, status=status, reason=recoveries[0].reason,
        exact=exact, tokens=tokens,
    )  # fmt: skip


def own_texts(
    target: Target, exposure: Exposure, form: str, seed: int, count: int | None = None
) -> Pairs:
    """Random texts of the attacker's own: what leaks of each, and how it is found with a secret."""
    stream = torch.Generator().manual_seed(seed)
    length = min(_LONG, target.parts.max_length)
    if count is None:
        width = max(m.shape[1] for m in matrices_of(_own(target, length, exposure, stream)))
        each = 1 if exposure.kind == "pooled" else length
        count = 1 if form == "shielded" else -(-int(_SPARE * width) // each) + 1
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
    if defence in PRECISIONS:
        return degrade(leak, defence)
    form = f"{defence}:{_KEY}" if defence in SECRETS else defence
    return degrade(leak, seed=seed, forms=[form])


def stated(noise: float, sigma: float, tokens: int, vocabulary: int) -> tuple[str, str]:
    """What noise promises, and what that proves of texts of so many tokens, if anything.

    Nobody names more than e^ε/N + δ of N equally likely texts, which says something below
    ε = n log(vocabulary) alone.
    """
    epsilon = epsilon_of(noise)
    proof = f"of N equally likely texts at most {math.exp(min(epsilon, 700)):.3g}/N + {DELTA:g}"
    says = epsilon < tokens * math.log(vocabulary)
    return f"ε = {epsilon:.3g}, δ = {DELTA:g}, σ = {sigma:.2g}", f"{proof} are named" * says


def gaussian(leak: Leak, clip: float, sigma: float, stream: torch.Generator) -> Leak:
    """The leak with rows of norm `clip` at most, and noise, whose size everybody knows.

    The Gaussian mechanism, calibrated exactly (Balle and Wang, arXiv 1805.06530, Theorem 8):
    `epsilon_of` and `noise_for` in recover/gradients/update.py, for what differs by Δ between two
    texts, with noise in units of Δ. Rows are scaled down to the largest norm C of public texts, so
    texts of n tokens differ by Δ = 2C√n; of a cache with layers l, μ² = Σ_l μ_l². The length is
    taken to be public.
    """
    scale = (clip / leak.rows(leak.tensors).norm(dim=-1, keepdim=True)).clamp(max=1)
    made = {
        name: tensor * scale + sigma * torch.randn(tensor.shape, generator=stream)
        for name, tensor in leak.tensors.items()
    }
    return replace(leak, **made, noise=sigma, precision=None)
