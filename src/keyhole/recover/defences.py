"""Texts read from leaks with a defence, by an attacker who knows which defence it is.

The attacker does not know the defence's secret, but may use the server: the attacker's
own texts leak with the same secret. Without them, the attacker uses what the defence
does not change.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import cast

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
from keyhole.recover.simulate import MAX_LENGTH, degrade, leak_of, token_ids
from keyhole.recover.texts import recover_texts

DEFENCES = ("none", "permuted", "int8", "int4", *SECRETS)
_KEY = 7  # from which secrets are drawn; any number would do
_SOLVED = {  # what own texts are used for, by defence
    "rotated": "rotation solved from rows of own texts",
    "shielded": "columns of own texts matched",
}
_BY_LENGTHS = "tokens by the lengths of rows, then the rotation from them"
_OWN_LENGTH = 3 * BLOCK  # tokens of a text that the attacker sends
_PARTLY = 0.5  # the share of right tokens that counts as inexact and not unsolved
_SEED_OFFSET = (
    10_000  # keeps the seeds of the attacker's texts different from the others'
)
_SURPLUS = 1.3  # rows that the attacker collects for each dimension


@dataclass(frozen=True)
class LeakTried:
    """The outcome: `exact` texts read, the share of right `tokens`, `own` texts that were sent."""

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
    loaded: Loaded,
    texts: Sequence[str],
    exposure: Exposure | str,
    defence: str,
    seed: int = 0,
    *,
    own: int | None = None,
    known: int | None = None,
    hide: Callable[[Leak], Leak] | None = None,
    method: Attack | None = None,
) -> LeakTried:
    """Apply a defence to the leaks of `texts`, and try to read the texts from what is left.

    `own` is the number of texts that the attacker sends, by default as many as are
    needed. `known` is how many first tokens of each text the attacker knows, for a
    cloaked cache. `hide` is a defence that is not in DEFENCES. `method` is the attack
    on the result, if not the usual one.
    """
    if hide is None and defence not in DEFENCES:
        raise InputError(
            f"unknown defence {defence}: choose one of {', '.join(DEFENCES)}"
        )
    exposure = Exposure.parse(exposure)
    started = time.perf_counter()
    target = Target.of(loaded.model, loaded.tokenizer)
    plain = [leak_of(loaded.model, loaded.tokenizer, text, exposure) for text in texts]
    max_length = min(MAX_LENGTH, target.parts.max_length)
    truths = [token_ids(loaded.tokenizer, text, max_length) for text in texts]
    tried = LeakTried(defence, str(exposure), len(texts))
    try:
        leaks = [
            _defended(leak, defence, seed + number) if hide is None else hide(leak)
            for number, leak in enumerate(plain)
        ]
        if defence == "cloaked" and known is not None:
            leaks = [
                MixedCache(leak.keys, leak.values, leak.layer + 1, known=truth[:known])
                for leak, truth in zip(
                    cast("list[KeyValues]", leaks), truths, strict=True
                )
            ]
        if hide is None and defence in _SOLVED:
            pairs, attack = _pairs(target, leaks, exposure, defence, seed, own)
            tried = replace(tried, attack=attack, own=0 if own == 0 else len(pairs))
            leaks = _undone(pairs, leaks, defence) if pairs else leaks
        read = recover_texts(loaded.model, loaded.tokenizer, leaks, method=method)
        tried = _compared(tried, read, truths)
    except Unsuccessful as end:
        tried = replace(tried, status=end.status, reason=end.reason)
    return replace(tried, seconds=time.perf_counter() - started)


def _pairs(
    target: Target,
    leaks: Sequence[Leak],
    exposure: Exposure,
    form: str,
    seed: int,
    own: int | None,
) -> tuple[Pairs, str]:
    """Return the texts whose plain leaks the attacker knows, and the name of the attack."""
    if own != 0:
        return own_texts(target, exposure, form, seed, own), _SOLVED[form]
    if exposure.kind == "kv":
        return by_lengths(target, leaks), _BY_LENGTHS
    return [], ""


def _undone(known: Pairs, leaks: Sequence[Leak], form: str) -> list[Leak]:
    """Return the leaks without the secret, as far as the known texts determine it."""
    if leaks[0].kind == "pooled":
        rows = (
            [matrices_of(leak)[0] for leak in side] for side in zip(*known, strict=True)
        )
        alignment = undo_rotation(*(torch.cat(side) for side in rows))
        undone = [alignment.undo(matrices_of(leak)[0].double()) for leak in leaks]
        return [
            with_matrices(leak, [row]) for leak, row in zip(leaks, undone, strict=True)
        ]
    from_lengths = known[0][1] is leaks[0]  # the pairs are of the leaks themselves
    if form == "rotated" or from_lengths:  # a permutation is a rotation too
        return unrotated(known, leaks)
    return unshielded(known, leaks)


def _compared(
    tried: LeakTried, recoveries: Sequence[TextRecovery], truths: Sequence[list[int]]
) -> LeakTried:
    """Return the outcome with what a comparison with the true tokens shows."""
    pairs = list(zip(truths, recoveries, strict=True))
    right = sum(
        a == b for truth, read in pairs for a, b in zip(truth, read.ids, strict=False)
    )
    exact = sum(read.verified and read.ids == truth for truth, read in pairs)
    tokens = right / sum(map(len, truths))
    status = Status.UNSOLVED
    if exact == len(truths):
        status = Status.RECOVERED
    elif exact or tokens >= _PARTLY:
        status = Status.INEXACT
    best = next((read for read in recoveries if read.verified), recoveries[0])
    return replace(
        tried,
        attack=tried.attack or best.method,
        status=status,
        reason=recoveries[0].reason,
        exact=exact,
        tokens=tokens,
    )


def own_texts(
    target: Target, exposure: Exposure, form: str, seed: int, count: int | None = None
) -> Pairs:
    """Return, for random texts of the attacker, the plain leak and the leak with the secret."""
    stream = torch.Generator().manual_seed(seed)
    length = min(_OWN_LENGTH, target.parts.max_length)

    def leak() -> Leak:
        ids = random_texts(target, 1, length, stream)[0].tolist()
        return leak_of(target.model, None, ids, exposure)

    if count is None:
        width = max(matrix.shape[1] for matrix in matrices_of(leak()))
        each = 1 if exposure.kind == "pooled" else length
        count = 1 if form == "shielded" else math.ceil(int(_SURPLUS * width) / each) + 1
    plain = [leak() for _ in range(count)]
    return [
        (each, _defended(each, form, seed + _SEED_OFFSET + number))
        for number, each in enumerate(plain)
    ]


def _defended(leak: Leak, defence: str, seed: int) -> Leak:
    if defence == "none":
        return leak
    if defence in PRECISIONS:
        return degrade(leak, defence)
    form = f"{defence}:{_KEY}" if defence in SECRETS else defence
    return degrade(leak, seed=seed, forms=[form])


def stated(noise: float, sigma: float, tokens: int, vocabulary: int) -> tuple[str, str]:
    """Return the privacy that noise gives, in words, and what that proves of texts, or "".

    `sigma` is its deviation, and `noise` that in units of Δ (see `gaussian`). Nobody
    names the right one of N equally likely texts with a probability above e^ε/N + δ.
    For n tokens N ≤ vocabularyⁿ, so this says nothing unless ε < n log(vocabulary).
    """
    epsilon = epsilon_of(noise)
    setting = f"ε = {epsilon:.3g}, δ = {DELTA:g}, σ = {sigma:.2g}"
    if epsilon >= tokens * math.log(vocabulary):
        return setting, ""
    most = f"{math.exp(min(epsilon, 700)):.3g}/N + {DELTA:g}"
    return setting, f"of N equally likely texts at most {most} are named"


def gaussian(leak: Leak, clip: float, sigma: float, stream: torch.Generator) -> Leak:
    """Return the leak with rows of norm `clip` at most, and stated noise of deviation `sigma`.

    This is the Gaussian mechanism, calibrated exactly (Balle and Wang, arXiv
    1805.06530, Theorem 8) by `epsilon_of` and `noise_for` in
    recover/gradients/update.py. They take noise in units of Δ, the largest difference
    between two leaks. Rows are scaled down to the largest norm C = `clip` of public
    texts, so Δ = 2C√n for texts of n tokens. For a cache with layers l, (Δ/σ)² = Σ_l
    (Δ_l/σ_l)². The length is taken to be public.
    """
    scale = (clip / leak.rows(leak.tensors).norm(dim=-1, keepdim=True)).clamp(max=1)
    made = {
        name: tensor * scale + sigma * torch.randn(tensor.shape, generator=stream)
        for name, tensor in leak.tensors.items()
    }
    return replace(leak, **made, noise=sigma, precision=None)
