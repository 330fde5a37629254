"""What an honest client asks, what a defence costs it, and how good an attacker's copy is to it.

Both errors are measured on the same questions, against the answers of the bare target, so that they
can be set side by side: an attacker whose copy is off by less than the server's own answers has a
better server than its clients have.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from keyhole.core.errors import expect_number
from keyhole.extract.defended.ordinary_tokens import usual_norm_of
from keyhole.oracle.http import Refused
from keyhole.oracle.protocol import Oracle, ask

_STREAM = 0x484F4E45  # keeps these questions apart from every attack's
_LENGTHS = (4, 8, 16)
_EACH = 40  # questions of each length
_SPREAD = 0.1  # of the logarithm of a token's norm


@dataclass(frozen=True)
class Service:
    """The error of what a client is left with, and the share of its questions that are refused."""

    error: float
    refused: float


@dataclass(frozen=True)
class HonestClient:
    """Questions of 4, 8 and 16 random tokens whose norms lie about `usual_norm`, and the truth."""

    questions: tuple[Tensor, ...]
    truth: Tensor

    @classmethod
    def of(cls, target: Oracle, usual_norm: float | None = None, seed: int = 0) -> HonestClient:
        """Asks the bare target, as its owner can."""
        expect_number("a usual norm", usual_norm, above=0)
        norm = usual_norm_of(target.dim) if usual_norm is None else usual_norm
        stream = torch.Generator().manual_seed(seed ^ _STREAM)
        questions: list[Tensor] = []
        for length in _LENGTHS:
            shape = (_EACH, length, target.dim)
            tokens = torch.randn(shape, generator=stream, dtype=torch.float64)
            sizes = _SPREAD * torch.randn(*shape[:2], 1, generator=stream, dtype=torch.float64)
            tokens = torch.nn.functional.normalize(tokens, dim=-1)
            questions.append(norm * sizes.exp() * tokens)
        return cls(tuple(questions), torch.cat([ask(target, part) for part in questions]))

    def served(self, defended: Oracle, labels: bool = False) -> Service:
        """What is left of the answers; one that is refused counts as 0."""
        given: list[float] = []
        refused = 0
        for part in self.questions:
            for question in part:
                try:
                    given.append(float(ask(defended, question[None])[0]))
                except Refused:
                    given.append(0.5 if labels else 0.0)
                    refused += 1
        answers = torch.tensor(given, dtype=torch.float64)
        error = self._error(2 * answers - 1 if labels else answers)
        return Service(error, refused / len(given))

    def error_of(self, copy: Oracle) -> float:
        """How far an attacker's copy is off."""
        return self._error(torch.cat([ask(copy, part) for part in self.questions]))

    def _error(self, given: Tensor) -> float:
        """The root mean square error relative to the answers, read at the best scale.

        Labels have no scale, and a v that is stolen from labels has none.
        """
        square = float(given @ given)
        factor = float(given @ self.truth) / square if square else 0.0
        return float((factor * given - self.truth).norm() / self.truth.norm())
