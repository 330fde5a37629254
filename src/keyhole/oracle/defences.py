"""Defences of a server: questions refused, tokens clipped, answers changed, around any oracle.

A refusal is an `http.Refused` with the status of a server's answer. One question that
is refused refuses its whole batch. Theorems are those of *Provably Learning Attention
with Queries* (arXiv 2601.16873).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from keyhole.core.float64 import random_stream
from keyhole.defence import Defence
from keyhole.oracle.http import Refused
from keyhole.oracle.protocol import Oracle, Wrapper, ask

# the HTTP status of a question that is understood and not answered
_UNPROCESSABLE = 422
_FACTOR = 2.0  # a usual token's norm is within this factor of the usual norm
_PEAK = 0.9  # the largest usual share of one coordinate in a token's squared norm
_COLLINEAR = 0.9  # the largest usual |cosine| of two tokens of a sequence


def defended(oracle: Oracle, defence: Defence) -> Oracle:
    """Return the oracle behind a defence; the oracle itself if that changes nothing."""
    return Defended(oracle, defence) if defence.parameters else oracle


class Defended(Wrapper):
    """An oracle behind a defence: questions are refused or clipped, then answers changed.

    With `noise` an answer's error is uniform and a function of the question's bytes and
    the seed (the deterministic oracle of Theorem 6.1), so repeating a question teaches
    nothing. `fresh_noise` comes from one seeded stream, and repetition averages it out.
    `sign_only` answers 1.0 if the score is positive and else 0.0: a membership query
    (Appendix B).
    """

    def __init__(self, inner: Oracle, defence: Defence) -> None:
        super().__init__(inner, "|".join(_changes(defence)))
        self.defence = defence
        self._stream = random_stream(defence.seed)

    def __call__(self, sequences: Tensor) -> Tensor:
        defence = self.defence
        if reason := refusal(defence, sequences):
            raise Refused(reason, _UNPROCESSABLE)
        asked = sequences
        if defence.max_norm is not None:
            norms = torch.linalg.vector_norm(sequences, dim=-1, keepdim=True)
            asked = sequences * (defence.max_norm / norms).clamp(max=1)
        answers = ask(self.inner, asked)
        if defence.noise is not None:
            size = answers[0].numel()
            drawn = [_errors(each, size, defence.seed) for each in sequences]
            errors = torch.stack(drawn).reshape(answers.shape)
            answers = answers + defence.noise * (errors * 2 - 1)
        if defence.fresh_noise is not None:
            shape = answers.shape
            errors = torch.rand(shape, generator=self._stream, dtype=torch.float64)
            answers = answers + defence.fresh_noise * (errors * 2 - 1)
        if defence.decimals is not None:
            answers = answers.round(decimals=defence.decimals)
        return (answers > 0).double() if defence.sign_only else answers


def _errors(
    question: Tensor,
    count: int,
    seed: int,
) -> Tensor:
    """Return `count` numbers between 0 and 1, always the same for one question."""
    data = question.detach().cpu().contiguous().numpy().tobytes()
    digest = hashlib.blake2b(data, digest_size=8, salt=seed.to_bytes(8, "little"))
    number = int.from_bytes(digest.digest()) >> 1  # 63 bits: a positive int64
    stream = random_stream(number)
    return torch.rand(count, generator=stream, dtype=torch.float64)


def _changes(defence: Defence) -> Iterator[str]:
    """Yield what identifies a defence, by which a ledger knows whose answers it holds."""
    if defence.max_norm is not None:
        yield f"clipped:{defence.max_norm!r}"
    if defence.noise is not None:
        yield f"noisy:{defence.noise!r}:{defence.seed}"
    if defence.fresh_noise is not None:
        yield f"noisy:{defence.fresh_noise!r}:{defence.seed}:fresh"
    if defence.decimals is not None:
        yield f"rounded:{defence.decimals}"
    if defence.sign_only:
        yield "sign"
    if defence.usual_norm is not None:
        yield f"usual:{defence.usual_norm!r}"
    if defence.min_tokens is not None or defence.max_tokens is not None:
        yield f"tokens:{defence.min_tokens}:{defence.max_tokens}"


def refusal(defence: Defence, sequences: Tensor) -> str:
    """Return why a server refuses these questions; empty if it answers them.

    A token is unusual if its norm is not within a factor of 2 of `usual_norm`, or if
    one coordinate holds over 90% of its squared norm; a sequence is unusual if two of
    its tokens are collinear (|cosine| over 0.9). Learned embeddings with a few large
    coordinates would need wider limits.
    """
    length = sequences.shape[1]
    least = defence.min_tokens or 1
    most = defence.max_tokens or length
    if length < least:
        return f"sequences need {least} tokens or more, not {length}"
    if length > most:
        return f"sequences have at most {most} tokens, not {length}"
    if defence.usual_norm is None:
        return ""
    norms = torch.linalg.vector_norm(sequences, dim=-1)
    low = defence.usual_norm / _FACTOR
    high = defence.usual_norm * _FACTOR
    if not ((norms >= low) & (norms <= high)).all():
        return f"unusual input: a token whose norm is not between {low:g} and {high:g}"
    units = sequences / norms.unsqueeze(-1)
    if units.shape[-1] > 1 and float(units.abs().max()) > math.sqrt(_PEAK):
        return "unusual input: a token along one coordinate"
    cosines = (units @ units.mT).abs()
    cosines.diagonal(dim1=-2, dim2=-1).zero_()
    if float(cosines.max()) > _COLLINEAR:
        return "unusual input: two tokens along one direction"
    return ""


class Rounded(Defended):
    """Rounds answers to `decimals` digits after the decimal point."""

    def __init__(self, inner: Oracle, decimals: int) -> None:
        super().__init__(inner, Defence(decimals=decimals))


class Noisy(Defended):
    """Adds an error within ±`tolerance` to answers; with `fresh` a new one each time."""

    def __init__(
        self,
        inner: Oracle,
        tolerance: float,
        seed: int = 0,
        *,
        fresh: bool = False,
    ) -> None:
        if fresh:
            defence = Defence(fresh_noise=tolerance, seed=seed)
        else:
            defence = Defence(noise=tolerance, seed=seed)
        super().__init__(inner, defence)


class SignOnly(Defended):
    """Answers 1.0 if the score is positive and else 0.0."""

    def __init__(self, inner: Oracle) -> None:
        super().__init__(inner, Defence(sign_only=True))


class Clipped(Defended):
    """Shortens tokens longer than `max_norm` to that norm before the target sees them."""

    def __init__(self, inner: Oracle, max_norm: float) -> None:
        super().__init__(inner, Defence(max_norm=max_norm))
