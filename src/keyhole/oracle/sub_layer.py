"""The attention sub-layer of a Transformer, as checkpoints have it, that answers with vectors.

For tokens x_1 … x_n, with an answer for the last one or for every one,

    t_j = x_j / √(mean(x_j²) + ε)                           (RMS norm in front; else t_j = x_j)
    y_i = x_i + b + Σ_h Σ_j a_hij · t_j V_g O_h             (x_i only with a residual)
    a_hi = softmax_j((t_i Q_h + q_h) R_{j−i} (t_j K_g)ᵀ + β_h(i − j)),   g the group of head h

where R_m turns plane f, made of the coordinates f and f + k/2, by m·frequencies[g, f]
(rotary positions, arXiv 2104.09864), and is the identity without frequencies.
Consecutive heads share keys and values. The other numbers of a checkpoint are folded
in: 1/√k into Q and q, a norm's gain into Q, K and V, the bias of the values into b.
Without rotary positions a bias of the keys adds the same number to all scores of a
query, so there is none. β is a position bias (MPNet, ALiBi): a number for each distance
between the query and a key in front of it; larger distances share the last number.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from keyhole import attention
from keyhole.core.errors import InputError
from keyhole.core.float64 import zeros
from keyhole.oracle.planted import Parametric


def no_places() -> Tensor:
    """Return the empty tensor that stands for no position bias."""
    return zeros(0, 0)


def rotated(vectors: Tensor, angles: Tensor) -> Tensor:
    """Rotate the plane of coordinates f and f + k/2 of vectors (…, k) by angles (…, k/2)."""
    cos = angles.cos()
    sin = angles.sin()
    x, y = vectors.chunk(2, -1)
    return torch.cat([x * cos - y * sin, x * sin + y * cos], -1)


@dataclass(frozen=True, eq=False)
class SubLayer(Parametric):
    """`Q` (H, d, k), `q` (H, k), `K` and `V` (G, d, k), `O` (H, k, m), `b` (m)."""

    Q: Tensor
    q: Tensor
    K: Tensor
    V: Tensor
    O: Tensor  # noqa: E741
    b: Tensor
    frequencies: Tensor  # (G, k/2), or (G, 0) without rotary positions
    places: Tensor = field(default_factory=no_places)  # β (H, distances), or empty
    residual: bool = False
    every_token: bool = False
    causal: bool = False
    epsilon: float | None = None  # of the RMS norm in front, if there is one
    kind = "sub-layer"
    SHAPES: ClassVar = {
        "Q": "h d k",
        "K": "g d k",
        "V": "g d v",
        "q": "h k",
        "O": "h v m",
        "b": "m",
        "frequencies": "g f",
    }
    NAMES: ClassVar = ("Q", "q", "K", "V", "O", "b", "frequencies", "places")

    def __post_init__(self) -> None:
        super().__post_init__()
        (heads, d, k) = self.Q.shape
        groups = len(self.K)
        if not groups or heads % groups:
            raise InputError(f"{heads} heads cannot share {groups} keys evenly")
        planes = self.frequencies.shape[1]
        if planes not in (0, k / 2):
            raise InputError(
                f"expected {k / 2:g} frequencies or none for each K, got {planes}"
            )
        if len(self.places):
            self._require("places", self.places, heads, None)
            if self.every_token and not self.causal:
                raise InputError(
                    "a position bias needs answers of the last token, or a causal mask: "
                    "its biases are of tokens in front"
                )
        if self.residual and self.outputs != d:
            raise InputError(
                f"expected {d} outputs with a residual, got {self.outputs}"
            )
        if self.epsilon is not None and not 0 < self.epsilon < math.inf:
            raise InputError(f"an epsilon must be above 0, not {self.epsilon}")

    @property
    def outputs(self) -> int:
        return self.O.shape[2]

    @property
    def rotary(self) -> bool:
        return self.frequencies.shape[1] > 0

    @property
    def unknowns(self) -> int:
        """The degrees of freedom of the function: parameters, less those of its symmetries.

        Keys and queries may be multiplied by any invertible matrix and its inverse, or,
        with rotary positions, by one complex number for each plane; values and outputs
        by any matrix. The biases of a head's positions may have one number added.
        """
        groups, _, k = self.K.shape
        between = k if self.rotary else k * k
        free = groups * (between + self.V.shape[2] ** 2)
        return super().unknowns - free - len(self.places) + (self.epsilon is not None)

    def answers(self, tokens: Tensor) -> Tensor:
        given = tokens
        if self.epsilon is not None:
            tokens = attention.normed(tokens, self.epsilon, centred=False)
        asking = slice(None) if self.every_token else slice(-1, None)
        output = self._attention(tokens, tokens[:, asking])
        if self.residual:
            output = output + given[:, asking]
        return output if self.every_token else output[:, 0]

    @cached_property
    def _stacked(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Q, K, V and O of all heads as one matrix each."""
        Q, K, V = (part.transpose(0, 1).flatten(1) for part in (self.Q, self.K, self.V))
        return Q, K, V, self.O.flatten(0, 1)

    def _attention(self, tokens: Tensor, asking: Tensor) -> Tensor:
        (heads, _, k) = self.Q.shape
        groups = len(self.K)
        Q, K, V, O = self._stacked  # noqa: E741
        n = tokens.shape[1]
        m = asking.shape[1]
        queries = (asking @ Q).unflatten(-1, (heads, k)) + self.q
        keys = (tokens @ K).unflatten(-1, (groups, k))
        if self.rotary:
            positions = torch.arange(n, dtype=torch.float64)
            keys = self._turned(keys, positions, 1)
            queries = self._turned(queries, positions[n - m :], heads // groups)
        queries = queries.unflatten(2, (groups, -1))
        scores = torch.einsum("bmghk,bngk->bghmn", queries, keys)
        if len(self.places):
            apart = torch.arange(n - m, n)[:, None] - torch.arange(n)
            apart = apart.clamp(0, self.places.shape[1] - 1)
            added = self.places[:, apart]  # (H, m, n)
            scores = scores + added.unflatten(0, (groups, -1))
        causal = self.causal and self.every_token
        weights = attention.probabilities(scores, causal=causal)
        values = (tokens @ V).unflatten(-1, (groups, -1))
        mixed = torch.einsum("bghmn,bngv->bmghv", weights, values)
        return mixed.flatten(2) @ O + self.b

    def _turned(
        self,
        vectors: Tensor,
        positions: Tensor,
        each: int,
    ) -> Tensor:
        """Apply R_p to vectors (batch, n, heads, k); `each` consecutive heads share frequencies."""
        angles = positions[:, None, None] * self.frequencies.repeat_interleave(each, 0)
        return rotated(vectors, angles)
