"""What tokens answer to chosen keys: the measurement behind every extraction from vectors.

With `f` as in attention.py and c = the number of zero tokens and queries, the sequence

    [Tδ_1 ; … ; Tδ_p ; 0 ; … ; 0 ; εx_1 ; … ; εx_k],    T = s·R,  ε = s/R,  R huge

makes token x_i answer, to rounding,

    o_i / T = Σ_h Σ_j a_hj · V_hᵀδ_j,   a_hj = e^{z_hj} / (c + Σ_j e^{z_hj}),
                                        z_hj = s²·x_iᵀ W_h δ_j.

It is the paper's `[x+δ ; x]` (proof of Theorem 4.1) with two changes. The query is so short that
its own value and its scores among queries vanish, so that any number of queries share one
sequence without disturbing each other; and since the answer is a vector, as many keys may stand
beside each other as the values `V_hᵀδ_j` are independent: their weights follow by a linear solve
and their forms by `z_hj = log(c·a_hj / (1 − Σ_j a_hj))`. Where only the last token answers, k = 1
and each query is a sequence of its own; where every token does, k queries cost one sequence.

Long keys make long answers, so noise or rounding of a fixed size drowns in them: the
amplification of tolerant.py, for nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from keyhole.core import Status, Unsuccessful
from keyhole.extract.bilinear import batch_rows
from keyhole.oracle.protocol import Oracle, ask

_REACH = 2.0**45  # R: its square is far beyond rounding
_EPSILON = torch.finfo(torch.float64).eps
_LEAK = 2.0**-60
_ALIKE = 1e-9  # rows that differ by less, relative to the largest, are the same row


@dataclass(frozen=True)
class Panel:
    """An oracle that answers with vectors, and which of its tokens answer and see what."""

    oracle: Oracle
    outputs: int
    every_token: bool
    causal: bool

    @property
    def dim(self) -> int:
        return self.oracle.dim

    def respond(self, keys: Tensor, xs: Tensor, square: float = 1.0, zeros: int = 0) -> Tensor:
        """`o_i / T` for each group of keys (groups, p, d) and each x: (groups, len(xs), m)."""
        s = math.sqrt(square)
        groups, p, d = keys.shape
        asked = xs if self.every_token else xs[:1]
        tokens = torch.zeros(p + zeros + len(asked), d, dtype=torch.float64)
        if self.every_token:
            tokens[p + zeros :] = xs * (s / _REACH)
            sequences = tokens.expand(groups, -1, -1).clone()
            sequences[:, :p] = keys * (s * _REACH)
        else:
            sequences = tokens.expand(groups, len(xs), -1, -1).clone()
            sequences[:, :, :p] = (keys * (s * _REACH)).unsqueeze(1)
            sequences[:, :, -1] = xs * (s / _REACH)
            sequences = sequences.flatten(0, 1)
        answers = self.ask(sequences)
        if self.every_token:
            answers = answers[:, p + zeros :]
        return answers.reshape(groups, len(xs), self.outputs) / (s * _REACH)

    def references(self, queries: int, zeros: int) -> Tensor:
        """c, the tokens of score 0 that each of so many queries sees, itself included."""
        if not self.every_token:
            return torch.full((queries,), 1.0 + zeros, dtype=torch.float64)
        if self.causal:
            return zeros + torch.arange(1, queries + 1, dtype=torch.float64)
        return torch.full((queries,), float(zeros + queries), dtype=torch.float64)

    def ask(self, sequences: Tensor) -> Tensor:
        """Answers in batches, each of the shape that this oracle has shown."""
        rows = batch_rows(*sequences.shape[1:])
        return torch.cat([self._one_batch(part) for part in sequences.split(rows)])

    def _one_batch(self, sequences: Tensor) -> Tensor:
        answers = ask(self.oracle, sequences)
        count, length, _ = sequences.shape
        wanted = (count, length, self.outputs) if self.every_token else (count, self.outputs)
        if answers.shape != wanted:
            raise Unsuccessful(
                Status.MISMATCH,
                f"the answers change their shape: {wanted} before, {tuple(answers.shape)} now",
            )
        return answers


def open_panel(oracle: Oracle) -> tuple[Panel, Tensor]:
    """Which tokens answer and what they see, and `Σ_h V_h` (d×m).

    A zero token's scores are all zero, so it answers with the mean of what it sees, whatever W
    is. `[0 ; e_1 ; 0 ; e_2 ; … ; 0]` then tells everything: causal zero tokens answer with running
    sums of the rows of V, which is all of V at once; others agree on the sum of all rows, and
    d − 1 one-token queries bring the rows themselves.
    """
    d = oracle.dim
    basis = _REACH * torch.eye(d, dtype=torch.float64)
    tokens = torch.zeros(1, 2 * d + 1, d, dtype=torch.float64)
    tokens[0, 1::2] = basis
    answers = ask(oracle, tokens)
    if answers.ndim not in (2, 3) or (answers.ndim == 3 and answers.shape[1] != 2 * d + 1):
        raise Unsuccessful(
            Status.NOT_APPLICABLE,
            "expected a vector for the last token or for every token, "
            f"got answers of shape {tuple(answers.shape[1:])}",
        )
    every_token = answers.ndim == 3
    means = answers[0, ::2] if every_token else answers
    causal = bool((means - means[-1]).abs().max() > _ALIKE * answers.abs().max())
    panel = Panel(oracle, answers.shape[-1], every_token, causal)
    if causal:
        # Row k of these sees 2k + 1 tokens.
        seen = 2 * torch.arange(d + 1, dtype=torch.float64).unsqueeze(1) + 1
        return panel, (means * seen).diff(dim=0) / _REACH
    last = means[-1:] * (2 * d + 1)
    if d > 1:
        rows = panel.ask(basis[: d - 1].unsqueeze(1)).reshape(d - 1, panel.outputs)
        last = torch.cat([rows, last - rows.sum(0)])
    return panel, last / _REACH


def solve_scores(answers: Tensor, values: Tensor, references: Tensor) -> tuple[Tensor, Tensor]:
    """z and what rounding may have done to it, both (…, k, H, p).

    `answers` is (…, k, m) as from `Panel.respond`, `values` (H, p, m) holds the `V_hᵀδ_j`.
    """
    heads, p, _ = values.shape
    inverse = torch.linalg.pinv(values.flatten(0, 1), rtol=_EPSILON)
    weights = (answers @ inverse).unflatten(-1, (heads, p))
    size = torch.linalg.vector_norm(answers, dim=-1)[..., None, None]
    spread = torch.linalg.vector_norm(inverse, dim=0).reshape(heads, p)
    # Short queries have values too, 1/R² of the keys' and up to the ladder's length times that.
    floor = _LEAK * torch.linalg.vector_norm(values, dim=-1).max()
    noise = _EPSILON * (size * spread + weights.abs()) + floor * spread
    rest = 1 - weights.sum(-1, keepdim=True)
    tiny = _EPSILON**2
    z = torch.log(weights.clamp(min=tiny) / rest.clamp(min=tiny) * references[:, None, None])
    errors = noise / weights.clamp(min=tiny)
    errors = errors + (noise.sum(-1, keepdim=True) + _EPSILON) / rest.clamp(min=tiny)
    return z, torch.where((weights > 0) & (rest > 0), errors, torch.inf)
