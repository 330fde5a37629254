"""Targets of known weights, so that an extraction can be compared with the truth.

Each is a frozen set of parameters that answers like an oracle. An extraction returns
the same types. storage.py writes them as .safetensors.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property, partial
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from keyhole import attention
from keyhole.core.errors import InputError
from keyhole.oracle.protocol import check_sequences


class Parametric(ABC):
    """A target made of named parameters, which determine its answers and its identity.

    `SHAPES` lists each tensor with the names of its sizes. A name that occurs twice is
    one size, and `d` is the dimension of a token.
    """

    kind: str
    SHAPES: ClassVar[dict[str, str]] = {}

    def __post_init__(self) -> None:
        sizes = {"1": 1}
        for name, shape in self.SHAPES.items():
            tensor = getattr(self, name)
            names = shape.split()
            if tensor.ndim == len(names):
                sizes = dict(zip(names, tensor.shape, strict=True)) | sizes
            self._require(name, tensor, *map(sizes.get, names))

    @property
    def dim(self) -> int:
        shapes = {name: shape.split() for name, shape in self.SHAPES.items()}
        name = next(name for name, sizes in shapes.items() if "d" in sizes)
        return getattr(self, name).shape[shapes[name].index("d")]

    def tensors(self) -> dict[str, Tensor]:
        """Return the parameters by name, as they are stored."""
        return {
            name: value
            for name, value in self._fields().items()
            if isinstance(value, Tensor)
        }

    @abstractmethod
    def answers(self, tokens: Tensor) -> Tensor:
        """Answer sequences (b, n, d), which are already checked."""

    def __call__(self, sequences: Tensor) -> Tensor:
        return self.answers(check_sequences(sequences, self.dim))

    def flags(self) -> dict[str, str]:
        """Return the settings besides the tensors that determine the answers."""
        return {
            name: str(value)
            for name, value in self._fields().items()
            if isinstance(value, bool | int | float | str)
        }

    def _fields(self) -> dict[str, Any]:
        names = [field.name for field in fields(cast("Any", self))]
        return {name: getattr(self, name) for name in names}

    @property
    def unknowns(self) -> int:
        """The count of numbers that an attacker without prior knowledge has to learn."""
        return sum(tensor.numel() for tensor in self.tensors().values())

    @cached_property
    def identity(self) -> str:
        digest = hashlib.blake2b(repr(self.flags()).encode(), digest_size=16)
        for name, tensor in sorted(self.tensors().items()):
            digest.update(f"{name}:{tuple(tensor.shape)}:".encode())
            digest.update(tensor.contiguous().numpy().tobytes())
        return f"{self.kind}:{digest.hexdigest()}"

    def _require(self, name: str, tensor: Tensor, *shape: int | None) -> None:
        """Raise InputError unless the tensor is finite, in float64 and of this shape."""
        got = tuple(tensor.shape)
        if len(got) != len(shape) or any(
            size not in (None, real) for size, real in zip(shape, got, strict=True)
        ):
            wanted = ", ".join("any" if size is None else str(size) for size in shape)
            raise InputError(f"expected {name} of shape ({wanted}), got {got}")
        if tensor.dtype != torch.float64:
            raise InputError(
                f"expected {name} in float64, got {tensor.dtype}: use .double()"
            )
        if not torch.isfinite(tensor).all():
            raise InputError(f"{name} holds NaN or infinity")


@dataclass(frozen=True, eq=False)
class Head(Parametric):
    """One scoring head: `f(X) = Σ_i softmax_i(x_iᵀ W x_N) · vᵀx_i`."""

    W: Tensor
    v: Tensor
    kind = "head"
    SHAPES: ClassVar = {"v": "d", "W": "d d"}

    def answers(self, tokens: Tensor) -> Tensor:
        V = self.v[:, None]
        return attention.output(tokens, self.W.mT, V, last=True)[:, 0]


@dataclass(frozen=True, eq=False)
class MultiHead(Parametric):
    """Several heads, summed: `f(X) = Σ_h Σ_i softmax_i(x_iᵀ W_h x_N) · v_hᵀx_i`."""

    W: Sequence[Tensor]
    v: Sequence[Tensor]
    kind = "multi-head"

    def __post_init__(self) -> None:
        if len(self.W) != len(self.v) or not self.v:
            raise InputError(
                f"each W needs its v, got {len(self.W)} W and {len(self.v)} v"
            )
        self._require("v", self.v[0], None)
        for W, v in zip(self.W, self.v, strict=True):
            self._require("v", v, self.dim)
            self._require("W", W, self.dim, self.dim)

    @property
    def dim(self) -> int:
        return self.v[0].shape[0]

    @cached_property
    def _stacked(self) -> tuple[Tensor, Tensor]:
        V = torch.stack(list(self.v))[..., None]
        return torch.stack([W.mT for W in self.W]), V

    def tensors(self) -> dict[str, Tensor]:
        return {"W": torch.stack(list(self.W)), "v": torch.stack(list(self.v))}

    def answers(self, tokens: Tensor) -> Tensor:
        W, V = self._stacked
        return attention.output(tokens, W, V, last=True)[:, 0]


@dataclass(frozen=True, eq=False)
class BiasedHeads(Parametric):
    """Heads with biases, after a norm or none.

        f(X) = b + Σ_h Σ_i softmax_i(n_iᵀ(W_h n_N + c_h)) · v_hᵀn_i,    n = x or norm(x)

    Any heads with projections, biases and a LayerNorm (`centred`) or RMSNorm before
    them have this form: a bias of the keys changes all scores of a query alike, and the
    gain of the norm is part of W and v. `W` is (H, d, d), `v` and `c` are (H, d), `b`
    is (1,).
    """

    W: Tensor
    v: Tensor
    c: Tensor
    b: Tensor
    normed: bool = False
    centred: bool = False
    epsilon: float = 0.0
    kind = "biased-heads"
    SHAPES: ClassVar = {"v": "h d", "W": "h d d", "c": "h d", "b": "1"}

    def answers(self, tokens: Tensor) -> Tensor:
        if self.normed:
            tokens = attention.normed(tokens, self.epsilon, centred=self.centred)
        W = self.W.mT
        V = self.v[..., None]
        scores = attention.output(tokens, W, V, last=True, key_bias=self.c)
        return scores[:, 0] + self.b


@dataclass(frozen=True, eq=False)
class OneLayer(Parametric):
    """A one-layer Transformer: `F(X) = wᵀ ReLU(A Σ_i softmax_i(x_iᵀ W x_N) x_i)`."""

    W: Tensor
    A: Tensor
    w: Tensor
    kind = "one-layer"
    SHAPES: ClassVar = {"w": "k", "A": "k d", "W": "d d"}

    def answers(self, tokens: Tensor) -> Tensor:
        hidden = attention.output(tokens, self.W.mT, self.A.mT, last=True)
        return torch.relu(hidden) @ self.w


@dataclass(frozen=True, eq=False)
class ReluFfn(Parametric):
    """A two-layer ReLU network on the last token alone: `φ(x) = wᵀ ReLU(A x)`, no biases."""

    A: Tensor
    w: Tensor
    kind = "relu"
    SHAPES: ClassVar = {"w": "k", "A": "k d"}

    def answers(self, tokens: Tensor) -> Tensor:
        return torch.relu(tokens[:, -1] @ self.A.mT) @ self.w


@dataclass(frozen=True, eq=False)
class Attention(Parametric):
    """An attention layer that answers with vectors: the last token's, or every token's.

    `W` is (H, d, d) and `V` (H, d, m), which includes the output projection. The query
    is the left factor of the scores, `S = X W Xᵀ`, unlike in the scoring heads above.
    """

    W: Tensor
    V: Tensor
    every_token: bool = False
    causal: bool = False
    kind = "attention"
    SHAPES: ClassVar = {"V": "h d m", "W": "h d d"}

    def answers(self, tokens: Tensor) -> Tensor:
        return attention.output(
            tokens, self.W, self.V, causal=self.causal, last=not self.every_token
        )


@dataclass(frozen=True, eq=False)
class AttentionLayers(Parametric):
    """A stack of layers of attention alone, each with a residual.

        X ↦ X + Σ_h softmax(X W_h Xᵀ) X V_h     over the heads h of one layer

    `W` and `V` are (H, d, d); `layers` (H,) holds the layer of each head, 0, 1, …, in
    order.
    """

    W: Tensor
    V: Tensor
    layers: Tensor
    every_token: bool = False
    causal: bool = False
    kind = "attention-layers"
    SHAPES: ClassVar = {"V": "h d d", "W": "h d d", "layers": "h"}

    def __post_init__(self) -> None:
        super().__post_init__()
        depths = list(range(len(self.sizes)))
        if not depths or self.layers.unique_consecutive().tolist() != depths:
            raise InputError(
                "layers must be 0, 1, … in order, one number for each head"
            )

    @property
    def sizes(self) -> list[int]:
        """The count of heads in each layer."""
        return self.layers.unique_consecutive(return_counts=True)[1].tolist()

    @property
    def unknowns(self) -> int:
        return self.W.numel() + self.V.numel()

    def answers(self, tokens: Tensor) -> Tensor:
        output = partial(attention.output, causal=self.causal)
        layers = zip(self.W.split(self.sizes), self.V.split(self.sizes), strict=True)
        *below, (W, V) = layers
        for forms, values in below:
            tokens = tokens + output(tokens, forms, values)
        asking = tokens if self.every_token else tokens[:, -1]
        return asking + output(tokens, W, V, last=not self.every_token)


@dataclass(frozen=True, eq=False)
class OutputMatrix(Parametric):
    """The last layer of a language model: the logits `W h` of the last state h of a sequence.

    Row i of W belongs to the token `tokens[i]`. An extraction determines W up to an
    invertible matrix on its right (and, from log-probabilities, up to a row that is
    added to all rows), so the columns of W are an orthonormal basis of the space that
    they span.

    With `constant`, the last column is the direction of what all answers share beyond
    their differences: an output bias or the bias of the final norm. `blocks` columns
    are due to the server's arithmetic and not to the model (see `width`). With
    `rotated`, W is no basis but the matrix itself with the gain of the final norm, up
    to a rotation.
    """

    W: Tensor
    tokens: Tensor
    constant: bool = False
    blocks: int = 0
    rotated: bool = False
    kind = "output-layer"
    SHAPES: ClassVar = {"W": "n d", "tokens": "n"}

    @property
    def width(self) -> int:
        """The width of the model: the even one of the two that explain answers of this rank.

        States after an RMSNorm span as many dimensions as they have numbers, states
        after a LayerNorm one fewer. What all answers share adds one. So the rank r is
        the width of an RMSNorm without such a share, or of a LayerNorm with an output
        bias or a bias of its own. Otherwise the width is r − 1 (RMSNorm) or r + 1
        (LayerNorm). Both models of a pair give the same answers, so no question tells
        them apart. But heads divide the width evenly, and no model has an odd width.

        llama.cpp multiplies a matrix in Q4_1 or Q5_1 by states in blocks of 32 numbers.
        It multiplies the minimum of a block of weights by the sum of the block of
        states, which it stores in float16. That adds one direction for each block.
        """
        rank = self.dim - self.blocks
        if rank % 2:
            rank += -1 if self.constant else 1
        return rank

    def answers(self, tokens: Tensor) -> Tensor:
        return tokens[:, -1] @ self.W.mT

    def outside(self, answers: Tensor) -> Tensor:
        """Return the part of answers (b, tokens) that no state explains.

        The answers must be centred if W is.
        """
        basis = torch.linalg.qr(self.W).Q if self.rotated else self.W
        return answers - (answers @ basis) @ basis.mT
