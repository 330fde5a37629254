"""Which norms a block has, and whether it answers vectors or scores, from a few single tokens.

`View.open` takes an oracle and returns a `View`, which asks it with the tokens that its
norms distinguish. For tokens Λx with Λ → ∞ the answer y, a vector, behaves in one of
three ways:

    y stays bounded          a norm is behind the sums (post_norm.py)
    y − Λx stays bounded     a norm is in front of the parts: N(Λx) has one length for all Λ
    y − Λx grows with Λ      there is no norm

A LayerNorm ignores the mean of a token, and an RMS norm does not. Scores `w·h +
F(N(h))` behave in the same way next to w·Λx; w is their odd part.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from keyhole import attention
from keyhole.core import Unsuccessful, not_applicable
from keyhole.core.float64 import normal, ones
from keyhole.extract.bilinear import batch_rows, max_abs, random_orthogonal
from keyhole.oracle.protocol import Oracle, ask

FAR = 2.0**20  # length of tokens next to which what attention adds is nothing to a norm
_FARTHEST = 2.0**60  # the same for scores, to which only w·x is added
WIDE = 128  # from this width on blocks are read by methods of their own
_SAME = 1e-9


@dataclass(frozen=True)
class View:
    """The target, asked with single tokens; in front of a LayerNorm, with tokens of mean 0.

    `axes` (d, e) are orthonormal columns: the directions that a norm keeps.
    """

    oracle: Oracle
    norm: str
    axes: Tensor
    residual: (
        Tensor  # (d, m): maps h to its part of an answer; identity, or w for scores
    )
    every_token: bool
    causal: bool

    @property
    def dim(self) -> int:
        return self.oracle.dim

    @property
    def numbers(self) -> int:
        """The size of an answer."""
        return self.residual.shape[1]

    @property
    def scores(self) -> bool:
        return self.numbers == 1

    @property
    def wide(self) -> bool:
        return self.axes.shape[1] >= WIDE

    @classmethod
    def open(cls, oracle: Oracle, stream: torch.Generator) -> View:
        """Find the norms: from how answers grow with a token, and whether its mean matters."""
        d = oracle.dim
        x = math.sqrt(d) * random_orthogonal(d, stream)[0]
        answers, *seen = answered_tokens(oracle, x)
        if answers.ndim == 1:
            return cls._of_scores(oracle, x, stream)
        expect_vectors(answers, d)
        identity = torch.eye(d, dtype=torch.float64)
        view = cls(oracle, "none", identity, identity, *seen)
        one, two, shifted = view.ask(FAR * torch.stack([x, 2 * x, x + x.mean().sign()]))
        if max_abs(two) < 2 * math.sqrt(FAR):
            return replace(view, norm="behind")
        if max_abs(two - one - FAR * x) > 1e-3 * math.sqrt(FAR):
            return view
        rest = one - FAR * x
        moved = shifted - FAR * (x + x.mean().sign()) - rest
        if max_abs(moved) > 1e-6 * max_abs(rest):
            return replace(view, norm="rms")
        return replace(view, norm="layer", axes=without_mean(d, stream))

    @classmethod
    def _of_scores(
        cls,
        oracle: Oracle,
        x: Tensor,
        stream: torch.Generator,
    ) -> View:
        """Find the norms: with them, the even part of the answer to a long token is constant."""
        d = oracle.dim
        identity = torch.eye(d, dtype=torch.float64)
        far = _FARTHEST * torch.cat([identity, -identity])
        forth, back = last(oracle, far.unsqueeze(1)).chunk(2)
        view = cls(
            oracle, "rms", identity, (forth - back) / (2 * _FARTHEST), False, False
        )
        tokens = FAR * torch.stack([x, 2 * x, x + x.mean().sign()])
        forth, back = view.ask(torch.cat([tokens, -tokens])).chunk(2)
        one, two, shifted = ((forth + back)[:, 0]).tolist()
        if abs(two - one) > 1e-3 * math.sqrt(FAR):
            raise not_applicable(
                "the answers are numbers, and there is no norm in front of a feed-forward layer: "
                "such blocks are read only from vectors"
            )
        if abs(shifted - one) > 1e-5 * abs(one):
            return view
        return replace(view, norm="layer", axes=without_mean(d, stream))

    def ask(self, tokens: Tensor) -> Tensor:
        """Return the answers to single tokens (n, d)."""
        return last(self.oracle, tokens.unsqueeze(1))

    def normed(self, tokens: Tensor, epsilon: float) -> Tensor:
        """Return N(tokens), in coordinates (n, e)."""
        if self.norm == "none":
            return tokens
        return (
            attention.normed(tokens, epsilon, centred=self.norm == "layer") @ self.axes
        )

    def slopes(
        self,
        by_normed: Tensor,
        h: Tensor,
        epsilon: float,
    ) -> Tensor:
        """Return derivatives by h (n, m, d), from those by N(h) (n, m, e)."""
        if self.norm == "none":
            return by_normed
        u = self.normed(h, epsilon)
        centred = h - h.mean(1, keepdim=True) if self.norm == "layer" else h
        size = (centred.square().mean(1) + epsilon).sqrt()
        along = torch.einsum("nme,ne->nm", by_normed, u)
        full = by_normed @ self.axes.mT
        full = full - along[..., None] * (u @ self.axes.mT)[:, None] / h.shape[1]
        return full / size[:, None, None]

    def tokens(
        self,
        count: int,
        length: float,
        stream: torch.Generator,
    ) -> Tensor:
        """Draw random tokens of about `length` times √d."""
        xi = normal(stream, count, self.axes.shape[1])
        return length * xi @ self.axes.mT


def without_mean(d: int, stream: torch.Generator) -> Tensor:
    """Return a random orthonormal basis (d, d − 1) of the vectors of mean 0."""
    rows = [ones(d, 1), random_orthogonal(d, stream)[:, 1:]]
    return torch.linalg.qr(torch.cat(rows, 1))[0][:, 1:].contiguous()


def expect_vectors(answers: Tensor, dim: int) -> None:
    """Raise Unsuccessful unless answers are vectors as long as a token."""
    if answers.ndim not in (2, 3) or answers.shape[-1] != dim:
        raise not_applicable(
            f"the answers, of shape {tuple(answers.shape[1:])}, are not vectors of {dim} numbers: "
            "a layer that is added to its tokens gives vectors as long as they are"
        )


def not_a_block() -> Unsuccessful:
    return not_applicable(
        "what single tokens answer is not a residual and a feed-forward layer"
    )


def answered_tokens(oracle: Oracle, x: Tensor) -> tuple[Tensor, bool, bool]:
    """Return answers to pairs, whether every token has one, and whether the mask is causal."""
    pairs = ask(oracle, torch.stack([torch.stack([x, -x]), torch.stack([x, 2 * x])]))
    if pairs.ndim != 3:
        return pairs, False, False
    apart = max_abs(pairs[0, 0] - pairs[1, 0])
    return pairs, True, apart <= _SAME * max_abs(pairs)


def last(oracle: Oracle, sequences: Tensor) -> Tensor:
    """Return the last token's answers, as vectors; a score becomes a vector of one number."""
    parts = sequences.split(batch_rows(*sequences.shape[1:]))
    answers = torch.cat([ask(oracle, part) for part in parts])
    if answers.ndim == 1:
        return answers.unsqueeze(1)
    return answers[:, -1] if answers.ndim == 3 else answers
