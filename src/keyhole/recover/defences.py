"""Leaks with a defence, read by an attacker who knows which defence it is.

The attacker does not know the defence's secret, but may use the server: texts that the attacker
sends leak with the same secret. Without such texts, the attacker uses what the defence preserves.
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
from keyhole.recover.texts import recover_texts

DEFENCES = ("none", "permuted", "int8", "int4", *SECRETS)
_KEY = 7
_SOLVED = {
    "rotated": "rotation solved from rows of own texts",
    "shielded": "columns of own texts matched",
}
_BY_LENGTHS = "tokens by the lengths of rows, then the rotation from them"
_OWN_LENGTH = 3 * BLOCK  # tokens of a text that the attacker sends
_PARTLY = 0.5  # the share of right tokens that counts as inexact and not unsolved
_SEED_OFFSET = 10_000  # keeps the seeds of the attacker's texts different from the others'
_SURPLUS = 1.3  # rows that the attacker collects, as a multiple of the dimensions


@dataclass(frozen=True)
class LeakTried:
    """The outcome of an attack on texts with one defence; the attacker sent `own` texts."""

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
    """Apply a defence to the leaks of `texts`, and attack them all the same.

    `own` is the number of texts that the attacker sends, by default as many as are needed. `known`
    is the number of first tokens that the attacker knows of a cloaked cache. `hide` is a defence
    that is not in DEFENCES. `method` attacks the result, by default the attack on such leaks.
    """
    if hide is None and defence not in DEFENCES:
        raise InputError(f"unknown defence {defence}: choose one of {', '.join(DEFENCES)}")
    exposure = Exposure.parse(exposure) if isinstance(exposure, str) else exposure
    started = time.perf_counter()
    target = Target.of(loaded.model, loaded.tokenizer)
    plain = [leak_of(loaded.model, loaded.tokenizer, text, exposure) for text in texts]
    max_length = min(MAX_LENGTH, target.parts.max_length)
    truths = [
        loaded.tokenizer(text, truncation=True, max_length=max_length)["input_ids"]
        for text in texts
    ]
    tried = LeakTried(defence, str(exposure), len(texts))
    try:
        leaks = [
            _defended(leak, defence, seed + number) if hide is None else hide(leak)
            for number, leak in enumerate(plain)
        ]
        if defence == "cloaked" and known is not None:
            leaks = [
                _with_known(leak, truth[:known]) for leak, truth in zip(leaks, truths, strict=True)
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


def _with_known(leak: Leak, known: list[int]) -> Leak:
    """Return a mixed cache whose first tokens are known."""
    if not isinstance(leak, KeyValues):
        raise InputError(f"only a cache can have known first tokens, not {leak.exposure}")
    return MixedCache(leak.keys, leak.values, leak.layer + 1, known=known)


def _pairs(
    target: Target, leaks: Sequence[Leak], exposure: Exposure, form: str, seed: int, own: int | None
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
        rows = ([matrices_of(leak)[0] for leak in side] for side in zip(*known, strict=True))
        alignment = undo_rotation(*(torch.cat(side) for side in rows))
        undone = [alignment.undo(matrices_of(leak)[0].double()) for leak in leaks]
        return [with_matrices(leak, [row]) for leak, row in zip(leaks, undone, strict=True)]
    if form == "rotated" or known[0][1] is leaks[0]:  # a permutation is a rotation too
        return unrotated(known, leaks)
    return unshielded(known, leaks)


def _compared(
    tried: LeakTried, recoveries: Sequence[TextRecovery], truths: Sequence[list[int]]
) -> LeakTried:
    """Return the outcome with what the comparison with the true texts shows."""
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
    """Return random texts of the attacker, each with its plain leak and its leak with a secret."""
    stream = torch.Generator().manual_seed(seed)
    length = min(_OWN_LENGTH, target.parts.max_length)

    def leak() -> Leak:
        ids = random_texts(target, 1, length, stream)[0].tolist()
        return leak_of(target.model, None, ids, exposure)

    if count is None:
        width = max(matrix.shape[1] for matrix in matrices_of(leak()))
        each = 1 if exposure.kind == "pooled" else length
        count = 1 if form == "shielded" else -(-int(_SURPLUS * width) // each) + 1
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
    """Return what noise promises, and what that proves of texts of `tokens` tokens, if anything.

    Nobody names more than e^ε/N + δ of N equally likely texts. That says something only for
    ε < n log(vocabulary), with n tokens.
    """
    epsilon = epsilon_of(noise)
    proof = f"of N equally likely texts at most {math.exp(min(epsilon, 700)):.3g}/N + {DELTA:g}"
    says = epsilon < tokens * math.log(vocabulary)
    return f"ε = {epsilon:.3g}, δ = {DELTA:g}, σ = {sigma:.2g}", f"{proof} are named" * says


def gaussian(leak: Leak, clip: float, sigma: float, stream: torch.Generator) -> Leak:
    """Return the leak with rows of norm `clip` at most, and stated noise of deviation `sigma`.

    This is the Gaussian mechanism, calibrated exactly (Balle and Wang, arXiv 1805.06530, Theorem 8)
    by `epsilon_of` and `noise_for` in recover/gradients/update.py. They take noise in units of Δ,
    the largest difference between two texts. Rows are scaled down to the largest norm C of public
    texts, so Δ = 2C√n for texts of n tokens. For a cache with layers l, μ² = Σ_l μ_l². The length
    is taken to be public.
    """
    scale = (clip / leak.rows(leak.tensors).norm(dim=-1, keepdim=True)).clamp(max=1)
    made = {
        name: tensor * scale + sigma * torch.randn(tensor.shape, generator=stream)
        for name, tensor in leak.tensors.items()
    }
    return replace(leak, **made, noise=sigma, precision=None)
