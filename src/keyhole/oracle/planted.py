"""Targets whose weights we planted, so that a theft can be measured against the truth.

Each is a frozen set of parameters that answers like an oracle; an extraction hands back the same
types. They travel as .safetensors.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor

from keyhole import attention
from keyhole.core.errors import InputError
from keyhole.oracle.protocol import check_sequences


class Parametric(ABC):
    """What planted targets share: named parameters, an identity made of them, checked shapes."""

    kind: str

    @property
    @abstractmethod
    def dim(self) -> int: ...

    def tensors(self) -> dict[str, Tensor]:
        """The parameters by name, as they are stored."""
        return {name: value for name, value in self._fields() if isinstance(value, Tensor)}

    @abstractmethod
    def answers(self, tokens: Tensor) -> Tensor:
        """To sequences (b, n, d) of the right shape."""

    def __call__(self, sequences: Tensor) -> Tensor:
        return self.answers(check_sequences(sequences, self.dim))

    def flags(self) -> dict[str, str]:
        """What is not a tensor but changes the answers."""
        return {n: str(v) for n, v in self._fields() if isinstance(v, bool | int | float | str)}

    def _fields(self) -> list[tuple[str, Any]]:
        return [(each.name, getattr(self, each.name)) for each in fields(cast("Any", self))]

    @property
    def unknowns(self) -> int:
        """How many numbers an attacker has to learn if nothing is known about the weights."""
        return sum(tensor.numel() for tensor in self.tensors().values())

    @cached_property
    def identity(self) -> str:
        digest = hashlib.blake2b(repr(self.flags()).encode(), digest_size=16)
        for name, tensor in sorted(self.tensors().items()):
            digest.update(f"{name}:{tuple(tensor.shape)}:".encode())
            digest.update(tensor.contiguous().numpy().tobytes())
        return f"{self.kind}:{digest.hexdigest()}"

    def _require(self, name: str, tensor: Tensor, *shape: int | None) -> None:
        got = tuple(tensor.shape)
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        if len(got) != len(shape) or any(
            size is not None and size != real for size, real in zip(shape, got, strict=True)
        ):
            raise InputError(f"expected {name} of shape ({wanted}), got {got}")
        if tensor.dtype != torch.float64:
            raise InputError(f"expected {name} in float64, got {tensor.dtype}: use .double()")
        if not bool(torch.isfinite(tensor).all()):
            raise InputError(f"{name} holds NaN or infinity")


@dataclass(frozen=True, eq=False)
class Head(Parametric):
    """One scoring head: `f(X) = Σ_i softmax_i(x_iᵀ W x_N) · vᵀx_i`."""

    W: Tensor
    v: Tensor
    kind = "head"

    def __post_init__(self) -> None:
        self._require("v", self.v, None)
        self._require("W", self.W, self.dim, self.dim)

    @property
    def dim(self) -> int:
        return self.v.shape[0]

    def answers(self, tokens: Tensor) -> Tensor:
        return attention.output(tokens, self.W.mT, self.v[:, None], last=True).squeeze(-1)


@dataclass(frozen=True, eq=False)
class MultiHead(Parametric):
    """Several heads, summed: `f(X) = Σ_h Σ_i softmax_i(x_iᵀ W_h x_N) · v_hᵀx_i`."""

    W: Sequence[Tensor]
    v: Sequence[Tensor]
    kind = "multi-head"

    def __post_init__(self) -> None:
        if len(self.W) != len(self.v) or not self.v:
            raise InputError(f"each W needs its v, got {len(self.W)} W and {len(self.v)} v")
        self._require("v", self.v[0], None)
        for W, v in zip(self.W, self.v, strict=True):
            self._require("v", v, self.dim)
            self._require("W", W, self.dim, self.dim)

    @property
    def dim(self) -> int:
        return self.v[0].shape[0]

    @cached_property
    def _stacked(self) -> tuple[Tensor, Tensor]:
        return torch.stack([W.mT for W in self.W]), torch.stack(list(self.v)).unsqueeze(-1)

    def tensors(self) -> dict[str, Tensor]:
        return {"W": torch.stack(list(self.W)), "v": torch.stack(list(self.v))}

    def answers(self, tokens: Tensor) -> Tensor:
        W, V = self._stacked
        return attention.output(tokens, W, V, last=True).squeeze(-1)


@dataclass(frozen=True, eq=False)
class BiasedHeads(Parametric):
    """Heads with biases, behind a norm or none.

        f(X) = b + Σ_h Σ_i softmax_i(n_iᵀ(W_h n_N + c_h)) · v_hᵀn_i,    n = x or norm(x)

    A query's bias changes every score alike and a factor of the norm is part of W and v, so this is
    what any head with projections, biases and a LayerNorm (`centred`) or RMSNorm in front amounts
    to. `W` is (H, d, d), `v` and `c` are (H, d), `b` is (1,).
    """

    W: Tensor
    v: Tensor
    c: Tensor
    b: Tensor
    normed: bool = False
    centred: bool = False
    epsilon: float = 0.0
    kind = "biased-heads"

    def __post_init__(self) -> None:
        self._require("v", self.v, None, None)
        self._require("W", self.W, len(self.v), self.dim, self.dim)
        self._require("c", self.c, len(self.v), self.dim)
        self._require("b", self.b, 1)

    @property
    def dim(self) -> int:
        return self.v.shape[1]

    def answers(self, tokens: Tensor) -> Tensor:
        if self.normed:
            tokens = attention.normed(tokens, self.epsilon, centred=self.centred)
        V = self.v.unsqueeze(-1)
        return attention.output(tokens, self.W.mT, V, last=True, key_bias=self.c)[:, 0] + self.b


@dataclass(frozen=True, eq=False)
class OneLayer(Parametric):
    """A one-layer Transformer: `F(X) = wᵀ ReLU(A Σ_i softmax_i(x_iᵀ W x_N) x_i)`."""

    W: Tensor
    A: Tensor
    w: Tensor
    kind = "one-layer"

    def __post_init__(self) -> None:
        self._require("w", self.w, None)
        self._require("A", self.A, self.w.shape[0], None)
        self._require("W", self.W, self.dim, self.dim)

    @property
    def dim(self) -> int:
        return self.A.shape[1]

    def answers(self, tokens: Tensor) -> Tensor:
        hidden = attention.output(tokens, self.W.mT, self.A.mT, last=True)
        return torch.relu(hidden) @ self.w


@dataclass(frozen=True, eq=False)
class ReluFfn(Parametric):
    """A two-layer ReLU network on the last token alone: `φ(x) = wᵀ ReLU(A x)`, no biases."""

    A: Tensor
    w: Tensor
    kind = "relu"

    def __post_init__(self) -> None:
        self._require("w", self.w, None)
        self._require("A", self.A, self.w.shape[0], None)

    @property
    def dim(self) -> int:
        return self.A.shape[1]

    def answers(self, tokens: Tensor) -> Tensor:
        return torch.relu(tokens[:, -1] @ self.A.mT) @ self.w


@dataclass(frozen=True, eq=False)
class Attention(Parametric):
    """An attention layer that answers with vectors: the last token's, or every token's.

    `W` is (H, d, d) and `V` (H, d, m); an output projection is already inside `V`. Here the query
    stands on the left, as in a layer: `S = X W Xᵀ`.
    """

    W: Tensor
    V: Tensor
    every_token: bool = False
    causal: bool = False
    kind = "attention"

    def __post_init__(self) -> None:
        self._require("V", self.V, None, None, None)
        self._require("W", self.W, self.V.shape[0], self.dim, self.dim)

    @property
    def dim(self) -> int:
        return self.V.shape[1]

    def answers(self, tokens: Tensor) -> Tensor:
        return attention.output(
            tokens, self.W, self.V, causal=self.causal, last=not self.every_token
        )


@dataclass(frozen=True, eq=False)
class AttentionLayers(Parametric):
    """Layers of attention alone, one after the other, each added to what it reads.

        X ↦ X + Σ_h softmax(X W_h Xᵀ) X V_h     over the heads h of a layer, then of the next

    `W` and `V` are (H, d, d); `layers` (H,) holds the layer of each head, 0, 1, …, in order.
    """

    W: Tensor
    V: Tensor
    layers: Tensor
    every_token: bool = False
    causal: bool = False
    kind = "attention-layers"

    def __post_init__(self) -> None:
        self._require("V", self.V, None, None, None)
        self._require("V", self.V, None, self.dim, self.dim)
        self._require("W", self.W, len(self.V), self.dim, self.dim)
        self._require("layers", self.layers, len(self.V))
        numbers = [float(depth) for depth, count in enumerate(self.sizes) for _ in range(count)]
        if not numbers or self.layers.tolist() != numbers:
            raise InputError("layers must be 0, 1, … in order, one number for each head")

    @property
    def dim(self) -> int:
        return self.V.shape[1]

    @property
    def sizes(self) -> list[int]:
        """How many heads each layer has."""
        return self.layers.unique_consecutive(return_counts=True)[1].tolist()

    @property
    def unknowns(self) -> int:
        return self.W.numel() + self.V.numel()

    def answers(self, tokens: Tensor) -> Tensor:
        sizes = self.sizes
        *layers, (W, V) = zip(self.W.split(sizes), self.V.split(sizes), strict=True)
        for forms, values in layers:
            tokens = tokens + attention.output(tokens, forms, values, causal=self.causal)
        asking = tokens if self.every_token else tokens[:, -1]
        return asking + attention.output(
            tokens, W, V, causal=self.causal, last=not self.every_token
        )


@dataclass(frozen=True, eq=False)
class OutputMatrix(Parametric):
    """The last layer of a language model alone, the logits of a final state.

    `W h` for the last state h of a sequence; row i of W is that of the token `tokens[i]`.

    An extraction knows W up to an invertible matrix on its right (and, from log-probabilities, up
    to a row that is added to all rows): its columns are an orthonormal basis of what they span.
    With `constant` the last of them is the direction of what all answers share, an output bias or
    that of the final norm, beyond those in which answers differ. `blocks` of them are none of the
    model's: see `width`. With `rotated` they are no basis, but W with the gain of the final norm,
    up to a rotation.
    """

    W: Tensor
    tokens: Tensor
    constant: bool = False
    blocks: int = 0
    rotated: bool = False
    kind = "output-layer"

    def __post_init__(self) -> None:
        self._require("W", self.W, None, None)
        self._require("tokens", self.tokens, len(self.W))

    @property
    def dim(self) -> int:
        return self.W.shape[1]

    @property
    def width(self) -> int:
        """The width of the model that gives answers of this rank: of the two that do, the even one.

        States behind an RMSNorm span as many dimensions r as they have numbers, behind a LayerNorm
        one less; what all answers share adds one. So r is the width of an RMSNorm without and of a
        LayerNorm with an output bias or a bias of its own; otherwise it is r − 1 (RMSNorm) or r + 1
        (LayerNorm). The pairs give the same answers, so no question tells them apart; but heads
        share the width out among them, and no model has an odd one.

        llama.cpp multiplies a matrix in Q4_1 or Q5_1 by states in blocks of 32 numbers, and the
        least weight of a block by their sum, which it keeps apart and in float16: one direction
        more for each block.
        """
        rank = self.dim - self.blocks
        if rank % 2 == 0:
            return rank
        return rank - 1 if self.constant else rank + 1

    def answers(self, tokens: Tensor) -> Tensor:
        return tokens[:, -1] @ self.W.mT

    def outside(self, answers: Tensor) -> Tensor:
        """What no state explains of answers (b, tokens), centred where W is: zero for its own."""
        basis = torch.linalg.qr(self.W).Q if self.rotated else self.W
        return answers - (answers @ basis) @ basis.mT
