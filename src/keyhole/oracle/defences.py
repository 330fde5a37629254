"""Defences of a server: wrappers that refuse questions or change answers, around any oracle.

They refuse questions, clip tokens, round answers, add noise to them, or reduce them to
signs. A refusal is an `http.Refused` with the status of a server's answer. One question
that is refused refuses its whole batch. The string that each passes to `Wrapper` is its
part of the identity by which a ledger knows whose answers it holds. Theorems are those
of *Provably Learning Attention with Queries* (arXiv 2601.16873).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor

from keyhole.core.errors import InputError, expect_count, expect_number, expect_seed
from keyhole.oracle.http import Refused
from keyhole.oracle.protocol import Oracle, Wrapper, ask

_UNPROCESSABLE = (
    422  # the HTTP status of a question that is understood and not answered
)
_FACTOR = 2.0  # a usual token's norm is within this factor of the usual norm
_PEAK = 0.9  # the largest usual share of one coordinate in a token's squared norm
_NOBODY: Any = None  # an oracle that is never asked
_COLLINEAR = 0.9  # the largest usual |cosine| of two tokens of a sequence


class LengthLimited(Wrapper):
    """Refuses sequences of fewer than `min_tokens` or more than `max_tokens` tokens.

    The published attacks ask sequences of one and two tokens.
    """

    def __init__(
        self,
        inner: Oracle,
        min_tokens: int | None = None,
        max_tokens: int | None = None,
    ) -> None:
        expect_count("min_tokens", min_tokens)
        expect_count("max_tokens", max_tokens)
        if (
            min_tokens is not None
            and max_tokens is not None
            and min_tokens > max_tokens
        ):
            raise InputError(
                f"min_tokens must not exceed max_tokens: they are {min_tokens} and {max_tokens}"
            )
        super().__init__(inner, f"tokens:{min_tokens}:{max_tokens}")
        self.min_tokens = min_tokens or 1
        self.max_tokens = max_tokens

    def __call__(self, sequences: Tensor) -> Tensor:
        length = sequences.shape[1]
        reason = ""
        if length < self.min_tokens:
            reason = f"sequences need {self.min_tokens} tokens or more, not {length}"
        elif self.max_tokens is not None and length > self.max_tokens:
            reason = f"sequences have at most {self.max_tokens} tokens, not {length}"
        if reason:
            raise Refused(reason, _UNPROCESSABLE)
        return ask(self.inner, sequences)


class UsualOnly(Wrapper):
    """Refuses questions unlike those of honest clients; each question is judged by itself.

    A token is unusual if its norm is not within a factor of 2 of `usual_norm`, or if
    one coordinate holds over 90% of its squared norm; a sequence is unusual if two of
    its tokens are collinear (|cosine| over 0.9). Learned embeddings with a few large
    coordinates would need wider limits.
    """

    def __init__(self, inner: Oracle, usual_norm: float) -> None:
        expect_number("a usual norm", usual_norm, above=0)
        super().__init__(inner, f"usual:{usual_norm!r}")
        self.usual_norm = usual_norm

    def __call__(self, sequences: Tensor) -> Tensor:
        reason = self.unusual(sequences)
        if reason:
            raise Refused(f"unusual input: {reason}", _UNPROCESSABLE)
        return ask(self.inner, sequences)

    def unusual(self, sequences: Tensor) -> str:
        """Return why no honest client would ask these questions; empty if there is no reason."""
        norms = torch.linalg.vector_norm(sequences, dim=-1)
        low = self.usual_norm / _FACTOR
        high = self.usual_norm * _FACTOR
        if not bool(((norms >= low) & (norms <= high)).all()):
            return f"a token whose norm is not between {low:g} and {high:g}"
        units = sequences / norms.unsqueeze(-1)
        if self.dim > 1 and float(units.abs().max()) > math.sqrt(_PEAK):
            return "a token along one coordinate"
        cosines = (units @ units.mT).abs()
        cosines.diagonal(dim1=-2, dim2=-1).zero_()
        if float(cosines.max()) > _COLLINEAR:
            return "two tokens along one direction"
        return ""


class Rounded(Wrapper):
    """Rounds answers to `decimals` digits after the decimal point."""

    def __init__(self, inner: Oracle, decimals: int) -> None:
        expect_count("decimals", decimals, 0, 15)
        super().__init__(inner, f"rounded:{decimals}")
        self.decimals = decimals

    def __call__(self, sequences: Tensor) -> Tensor:
        return torch.round(ask(self.inner, sequences), decimals=self.decimals)


class Noisy(Wrapper):
    """Adds an error within ±`tolerance` to answers, the same each time a question is repeated.

    The error is uniform and a function of the question's bytes and the seed (the
    deterministic oracle of Theorem 6.1), so repeating a question teaches nothing. With
    `fresh`, every answer gets a new error from one seeded stream, which repetition
    averages out.
    """

    def __init__(
        self, inner: Oracle, tolerance: float, seed: int = 0, *, fresh: bool = False
    ) -> None:
        expect_number("a noise", tolerance, least=0)
        super().__init__(
            inner, f"noisy:{tolerance!r}:{seed}{':fresh' if fresh else ''}"
        )
        self.tolerance = tolerance
        self.seed = seed
        self._stream = torch.Generator().manual_seed(seed) if fresh else None

    def __call__(self, sequences: Tensor) -> Tensor:
        answers = ask(self.inner, sequences)
        if self._stream is not None:
            errors = torch.rand(
                answers.shape, generator=self._stream, dtype=torch.float64
            )
            return answers + self.tolerance * (errors * 2 - 1)
        size = answers[0].numel()
        errors = torch.stack([self._errors(question, size) for question in sequences])
        return answers + self.tolerance * errors.reshape(answers.shape)

    def _errors(self, question: Tensor, count: int) -> Tensor:
        """Return `count` numbers between −1 and 1, always the same for one question."""
        data = question.detach().cpu().contiguous().numpy().tobytes()
        digest = hashlib.blake2b(
            data, digest_size=8, salt=self.seed.to_bytes(8, "little")
        )
        seed = int.from_bytes(digest.digest()) >> 1  # 63 bits: a positive int64
        stream = torch.Generator().manual_seed(seed)
        return torch.rand(count, generator=stream, dtype=torch.float64) * 2 - 1


class SignOnly(Wrapper):
    """Answers 1.0 if the score is positive and else 0.0: a membership query (Appendix B)."""

    def __init__(self, inner: Oracle) -> None:
        super().__init__(inner, "sign")

    def __call__(self, sequences: Tensor) -> Tensor:
        return (ask(self.inner, sequences) > 0).to(torch.float64)


class Clipped(Wrapper):
    """Shortens tokens longer than `max_norm` to that norm before the target sees them."""

    def __init__(self, inner: Oracle, max_norm: float) -> None:
        expect_number("a norm", max_norm, above=0)
        super().__init__(inner, f"clipped:{max_norm!r}")
        self.max_norm = max_norm

    def __call__(self, sequences: Tensor) -> Tensor:
        norms = torch.linalg.vector_norm(sequences, dim=-1, keepdim=True)
        factor = torch.where(
            norms > self.max_norm, self.max_norm / norms, torch.ones_like(norms)
        )
        return ask(self.inner, sequences * factor)


@dataclass(frozen=True)
class Degradation:
    """What a server does to questions and answers, as a file or a command line states it.

    The server refuses sequences of fewer than `min_tokens` or more than `max_tokens`
    tokens, and questions unlike those of clients whose tokens have about `usual_norm`.
    It clips tokens to `max_norm`. It adds an error of up to `noise` to answers (the
    same for the same question and `seed`) and one of up to `fresh_noise` (new each
    time). It rounds them to `decimals`, and reduces them to their sign.
    """

    max_norm: float | None = None
    noise: float | None = None
    decimals: int | None = None
    sign_only: bool = False
    seed: int = 0
    fresh_noise: float | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    usual_norm: float | None = None

    def __post_init__(self) -> None:
        expect_seed(self.seed)
        self.applied(_NOBODY)  # the wrappers check their settings

    def __bool__(self) -> bool:
        """Is anything refused or changed? A seed alone changes nothing."""
        return self != Degradation(seed=self.seed)

    def __str__(self) -> str:
        parts = (
            (self.min_tokens, "{} tokens or more"),
            (self.max_tokens, "{} tokens at most"),
            (self.usual_norm, "tokens of norm about {:g}"),
            (self.max_norm, "tokens of norm {:g} at most"),
            (self.noise, "answers within ±{:g}"),
            (self.fresh_noise, "answers within ±{:g}, anew each time"),
            (self.decimals, "answers rounded to {} decimals"),
            (self.sign_only or None, "signs only"),
        )
        return ", ".join(
            words.format(value) for value, words in parts if value is not None
        )

    def applied(self, oracle: Oracle) -> Oracle:
        """Return the oracle behind these defences."""
        if self.max_norm is not None:
            oracle = Clipped(oracle, self.max_norm)
        if self.noise is not None:
            oracle = Noisy(oracle, self.noise, self.seed)
        if self.fresh_noise is not None:
            oracle = Noisy(oracle, self.fresh_noise, self.seed, fresh=True)
        if self.decimals is not None:
            oracle = Rounded(oracle, self.decimals)
        if self.sign_only:
            oracle = SignOnly(oracle)
        # Refusals are outermost: a question is refused before it is changed.
        if self.usual_norm is not None:
            oracle = UsualOnly(oracle, self.usual_norm)
        if self.min_tokens is not None or self.max_tokens is not None:
            oracle = LengthLimited(oracle, self.min_tokens, self.max_tokens)
        return oracle

    def to_flags(self) -> dict[str, str]:
        """Return the settings as a target's file stores them; `of` reads them."""
        if not self:
            return {}
        return {
            name: repr(value)
            for name, value in asdict(self).items()
            if value is not None
        }

    @classmethod
    def of(cls, flags: Mapping[str, str]) -> Degradation:
        """Return the defences that `to_flags` wrote into a target's file, which is not trusted."""
        sign_only = flags.get("sign_only", "False")
        if sign_only not in ("True", "False"):
            raise InputError(f"expected sign_only as True or False, got {sign_only!r}")
        values: dict[str, Any] = {"sign_only": sign_only == "True"}
        for name in flags.keys() & {field.name for field in fields(cls)} - {
            "sign_only"
        }:
            if name in ("decimals", "seed", "min_tokens", "max_tokens"):
                kind = int
            else:
                kind = float
            try:
                values[name] = kind(flags[name])
            except ValueError as error:
                raise InputError(
                    f"expected {name} as a number, got {flags[name]!r}"
                ) from error
        return cls(**values)
