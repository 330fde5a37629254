"""What a careful (or an unlucky) server does to its answers: round, blur, threshold, clip, fail."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from keyhole.core.errors import InputError, expect_count, expect_number, expect_seed
from keyhole.oracle.protocol import Oracle, OracleError, ask, identity_of
from keyhole.oracle.refusing import LengthLimited, UsualOnly, expect_lengths
from keyhole.oracle.wrapper import Wrapper


class Rounded(Wrapper):
    """Answers rounded to `decimals` digits after the point."""

    def __init__(self, inner: Oracle, decimals: int) -> None:
        if not 0 <= decimals <= 15:
            raise InputError(f"expected 0 to 15 decimals, got {decimals}")
        super().__init__(inner, f"rounded:{decimals}")
        self.decimals = decimals

    def __call__(self, sequences: Tensor) -> Tensor:
        return torch.round(ask(self.inner, sequences), decimals=self.decimals)


class Noisy(Wrapper):
    """Answers within ±`tolerance` of the truth, the same each time a question is repeated.

    The error is uniform and a function of the question's bytes and the seed (Theorem 6.1's
    deterministic oracle): repeating a question teaches nothing. With `fresh` every answer has a
    new error, drawn from one seeded stream: then repetition helps.
    """

    def __init__(
        self, inner: Oracle, tolerance: float, seed: int = 0, *, fresh: bool = False
    ) -> None:
        if not (tolerance >= 0 and math.isfinite(tolerance)):
            raise InputError(f"expected a tolerance of 0 or more, got {tolerance}")
        super().__init__(inner, f"noisy:{tolerance!r}:{seed}{':fresh' if fresh else ''}")
        self.tolerance = tolerance
        self.seed = seed
        self._stream = torch.Generator().manual_seed(seed) if fresh else None

    def __call__(self, sequences: Tensor) -> Tensor:
        answers = ask(self.inner, sequences)
        if self._stream is not None:
            errors = torch.rand(answers.shape, generator=self._stream, dtype=torch.float64)
            return answers + self.tolerance * (errors * 2 - 1)
        each = answers[0].numel()
        errors = torch.stack([self._errors(question, each) for question in sequences])
        return answers + self.tolerance * errors.reshape(answers.shape)

    def _errors(self, question: Tensor, count: int) -> Tensor:
        data = question.detach().cpu().contiguous().numpy().tobytes()
        digest = hashlib.blake2b(data, digest_size=8, salt=self.seed.to_bytes(8, "little"))
        stream = torch.Generator().manual_seed(int.from_bytes(digest.digest()) >> 1)
        return torch.rand(count, generator=stream, dtype=torch.float64) * 2 - 1


class SignOnly(Wrapper):
    """Whether each answer is positive, as 1.0 or 0.0: a membership query (Appendix B)."""

    def __init__(self, inner: Oracle) -> None:
        super().__init__(inner, "sign")

    def __call__(self, sequences: Tensor) -> Tensor:
        return (ask(self.inner, sequences) > 0).to(torch.float64)


class Clipped(Wrapper):
    """Tokens longer than `max_norm` are shortened to it before the target sees them."""

    def __init__(self, inner: Oracle, max_norm: float) -> None:
        if not (max_norm > 0 and math.isfinite(max_norm)):
            raise InputError(f"expected a positive norm, got {max_norm}")
        super().__init__(inner, f"clipped:{max_norm!r}")
        self.max_norm = max_norm

    def __call__(self, sequences: Tensor) -> Tensor:
        norms = torch.linalg.vector_norm(sequences, dim=-1, keepdim=True)
        factor = torch.where(norms > self.max_norm, self.max_norm / norms, torch.ones_like(norms))
        return ask(self.inner, sequences * factor)


class Failing(Wrapper):
    """An endpoint that goes down after `after` answers."""

    def __init__(self, inner: Oracle, after: int) -> None:
        super().__init__(inner, "failing")
        self.after = after

    @property
    def identity(self) -> str:  # an outage changes no answer
        return identity_of(self.inner)

    def __call__(self, sequences: Tensor) -> Tensor:
        if len(sequences) > self.after:
            raise OracleError("expected an answer, got none: the endpoint is down")
        self.after -= len(sequences)
        return ask(self.inner, sequences)


@dataclass(frozen=True)
class Degradation:
    """What a server does to questions and answers, as a file or a command line says it.

    Sequences of fewer than `min_tokens` or more than `max_tokens` tokens are refused, and so are
    questions unlike those of clients whose tokens have about `usual_norm`. Tokens are clipped to
    `max_norm`; answers are off by up to `noise` (the same for the same question and `seed`) and by
    up to `fresh_noise` (anew each time), then rounded to `decimals`, then told by their sign alone.
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
        expect_number("a norm", self.max_norm, above=0)
        expect_number("a noise", self.noise, least=0)
        expect_number("a noise", self.fresh_noise, least=0)
        expect_number("a usual norm", self.usual_norm, above=0)
        expect_lengths(self.min_tokens, self.max_tokens)
        expect_count("decimals", self.decimals, 0, 15)
        expect_seed(self.seed)

    def __bool__(self) -> bool:
        return self != Degradation(seed=self.seed)

    def __str__(self) -> str:
        parts = (
            f"{self.min_tokens} tokens or more" if self.min_tokens is not None else "",
            f"{self.max_tokens} tokens at most" if self.max_tokens is not None else "",
            f"tokens of norm about {self.usual_norm:g}" if self.usual_norm is not None else "",
            f"tokens of norm {self.max_norm:g} at most" if self.max_norm is not None else "",
            f"answers within ±{self.noise:g}" if self.noise is not None else "",
            f"answers within ±{self.fresh_noise:g}, anew each time"
            if self.fresh_noise is not None
            else "",
            f"answers rounded to {self.decimals} decimals" if self.decimals is not None else "",
            "signs only" if self.sign_only else "",
        )
        return ", ".join(part for part in parts if part)

    def applied(self, oracle: Oracle) -> Oracle:
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
        # What is refused is refused first: the outermost of all.
        if self.usual_norm is not None:
            oracle = UsualOnly(oracle, self.usual_norm)
        if self.min_tokens is not None or self.max_tokens is not None:
            oracle = LengthLimited(oracle, self.min_tokens, self.max_tokens)
        return oracle

    def flags(self) -> dict[str, str]:
        """What a target's file says of it; `of` reads it."""
        if not self:
            return {}
        return {name: repr(value) for name, value in asdict(self).items() if value is not None}

    @classmethod
    def of(cls, flags: Mapping[str, str]) -> Degradation:
        """From a target's file, which may be anybody's."""

        def number(name: str, kind: type[float] | type[int]) -> float | int | None:
            try:
                return None if name not in flags else kind(flags[name])
            except ValueError as error:
                raise InputError(f"expected {name} as a number, got {flags[name]!r}") from error

        def count(name: str) -> int | None:
            value = number(name, int)
            return None if value is None else int(value)

        return cls(
            number("max_norm", float), number("noise", float), count("decimals"),
            flags.get("sign_only") == "True", count("seed") or 0, number("fresh_noise", float),
            count("min_tokens"), count("max_tokens"), number("usual_norm", float),
        )  # fmt: skip
