"""A block of a Transformer: attention and a feed-forward layer, with residual connections.

For tokens x_1 … x_n, with an answer for the last one or for every one, and N a norm or
the identity,

    h_i = x_i + Attention(N(x_1), …, N(x_n))_i          (oracle/sub_layer.py)
    y_i = h_i + C·f(N(h_i)) + c
    f_k(u) = φ(A_k·u + a_k)                             (ReLU, GELU, …)
    f_k(u) = φ(A_k·u + a_k)·(G_k·u + g_k)               (gated, as SwiGLU: G is not empty)

The norms are RMS norms or LayerNorms, each with its ε; their gains and biases are part
of the matrices and biases behind them. With LayerNorms behind the sums (BERT),

    h_i = N(x_i + Attention(x_1, …, x_n)_i)
    y_i = E·N(D·h_i + C·f(h_i) + c) + e                 (D and E diagonal)

D is the gain of the first norm, whose bias is part of a and c; E and e are the gain and
bias of the second.

For scores `w·y_n` of the last token, C and c have one row: w·h_n + C·f(N(h_n)) + c.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from keyhole import attention
from keyhole.core.errors import InputError, expect_among
from keyhole.core.float64 import full, tensor, zeros
from keyhole.oracle.planted import Parametric
from keyhole.oracle.sub_layer import SubLayer, no_places

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "gelu": functional.gelu,
    "gelu-tanh": partial(functional.gelu, approximate="tanh"),
    "silu": functional.silu,
    "sigmoid": torch.sigmoid,
}


NORMS = ("none", "rms", "layer", "behind")


@dataclass(frozen=True, eq=False)
class Block(Parametric):
    """`A` and `G` (width, d), `a` and `g` (width), `C` (d, width), `c` (d); attention
    as in SubLayer.

    `D`, `E` and `e` (d) belong to norms behind the sums, and are empty otherwise.
    `epsilon` is that of the first norm, `epsilon_behind` that of the second. `w` (d) is
    empty if answers are vectors; scores need norms in front, or none.
    """

    Q: Tensor
    q: Tensor
    K: Tensor
    V: Tensor
    O: Tensor  # noqa: E741
    b: Tensor
    frequencies: Tensor
    A: Tensor
    a: Tensor
    G: Tensor
    g: Tensor
    C: Tensor
    c: Tensor
    places: Tensor = field(default_factory=no_places)
    D: Tensor = field(default_factory=partial(zeros, 0))
    E: Tensor = field(default_factory=partial(zeros, 0))
    e: Tensor = field(default_factory=partial(zeros, 0))
    w: Tensor = field(default_factory=partial(zeros, 0))
    activation: str = "relu"
    norm: str = "none"
    epsilon: float = 0.0
    epsilon_behind: float = 0.0
    every_token: bool = False
    causal: bool = False
    kind = "block"
    NAMES: ClassVar = (
        *SubLayer.NAMES,
        "A",
        "a",
        "G",
        "g",
        "C",
        "c",
        "D",
        "E",
        "e",
        "w",
    )
    SHAPES: ClassVar = {"Q": "h d k", "A": "u d", "a": "u", "C": "m u", "c": "m"}

    def __post_init__(self) -> None:
        expect_among("activation", self.activation, tuple(ACTIVATIONS))
        expect_among("norm", self.norm, NORMS)
        super().__post_init__()
        d = self.dim
        width = len(self.A)
        behind = d * (self.norm == "behind")
        self._require("G", self.G, width * (len(self.G) > 0), d)
        self._require("g", self.g, len(self.G))
        self._require("w", self.w, d * self.scores)
        self._require("C", self.C, self.outputs, width)
        for name in ("D", "E", "e"):
            self._require(name, getattr(self, name), behind)
        if self.scores and (self.norm == "behind" or self.every_token):
            raise InputError(
                "a score is of the last token, without norms behind the sums"
            )
        if self.sub_layer.outputs != d:
            raise InputError(
                f"expected {d} outputs of attention, got {self.sub_layer.outputs}"
            )

    @property
    def scores(self) -> bool:
        return len(self.w) > 0

    @property
    def outputs(self) -> int:
        return 1 if self.scores else self.dim

    @cached_property
    def sub_layer(self) -> SubLayer:
        """The attention, which takes tokens behind the first norm."""
        parts = {name: getattr(self, name) for name in SubLayer.NAMES}
        return SubLayer(**parts, every_token=self.every_token, causal=self.causal)

    @property
    def unknowns(self) -> int:
        """The degrees of freedom of the function: parameters, less those of its symmetries.

        A ReLU unit, and likewise a gate, may be multiplied and its column of C divided;
        without a norm, b moves into a and c. Behind a LayerNorm the mean of a token
        does not matter; with norms behind the sums, neither does that of the sums, nor
        the length of the second sum.
        """
        free = len(self.A) * (self.activation == "relu") + len(self.G)
        free += self.dim if self.norm == "none" else -2
        if self.norm == "layer":
            groups, _, k = self.K.shape
            free += len(self.Q) * k + groups * (k + self.V.shape[2])
            free += len(self.A) + len(self.G)
        elif self.norm == "behind":
            free += len(self.Q) * self.V.shape[2] + 2 * len(self.A) + len(self.G) + 3
        names = self.NAMES[len(SubLayer.NAMES) :]
        network = sum(getattr(self, name).numel() for name in names)
        return self.sub_layer.unknowns + network - free

    def normed(self, tokens: Tensor, epsilon: float | Tensor) -> Tensor:
        if self.norm == "none":
            return tokens
        return attention.normed(tokens, epsilon, centred=self.norm != "rms")

    def feed_forward(self, u: Tensor) -> Tensor:
        units = ACTIVATIONS[self.activation](u @ self.A.mT + self.a)
        if len(self.G):
            units = units * (u @ self.G.mT + self.g)
        return units @ self.C.mT + self.c

    def answers(self, tokens: Tensor) -> Tensor:
        if self.norm != "behind":
            return self.added(tokens, self.epsilon, self.epsilon_behind)
        asking = self._asking(tokens)
        h = self.normed(asking + self.sub_layer.answers(tokens), self.epsilon)
        y = self.D * h + self.feed_forward(h)
        return self.E * self.normed(y, self.epsilon_behind) + self.e

    def added(
        self,
        tokens: Tensor,
        epsilon: float | Tensor,
        behind: float | Tensor,
    ) -> Tensor:
        """Return the answers of a block without norms behind the sums, for any two ε."""
        h = self._asking(tokens) + self.sub_layer.answers(self.normed(tokens, epsilon))
        y = self.feed_forward(self.normed(h, behind))
        return h @ self.w + y[..., 0] if self.scores else h + y

    def _asking(self, tokens: Tensor) -> Tensor:
        return tokens if self.every_token else tokens[:, -1]


@dataclass(frozen=True, eq=False)
class Blocks(Parametric):
    """Stacked blocks of one kind, with norms in front of their parts, without positions.

    The heads and the units of all blocks are concatenated; `heads` (H,) and `units`
    (width,) hold the number of the block of each, in order. `b` and `c` are (blocks,
    d), `epsilon` is (blocks, 2).
    """

    Q: Tensor
    q: Tensor
    K: Tensor
    V: Tensor
    O: Tensor  # noqa: E741
    A: Tensor
    a: Tensor
    G: Tensor
    g: Tensor
    C: Tensor
    b: Tensor
    c: Tensor
    epsilon: Tensor
    heads: Tensor
    units: Tensor
    activation: str = "gelu"
    norm: str = "rms"
    every_token: bool = False
    causal: bool = False
    kind = "blocks"
    SHAPES: ClassVar = {
        "A": "u d",
        "Q": "h d k",
        "epsilon": "l e",
        "b": "l d",
        "c": "l d",
        "heads": "h",
        "units": "u",
    }
    NUMBERS: ClassVar = (
        "Q",
        "q",
        "K",
        "V",
        "O",
        "A",
        "a",
        "G",
        "g",
        "C",
        "b",
        "c",
        "epsilon",
    )

    def __post_init__(self) -> None:
        expect_among("norm", self.norm, ("rms", "layer"))
        super().__post_init__()
        self._require("epsilon", self.epsilon, None, 2)
        for name in ("heads", "units"):
            places = getattr(self, name)
            if places.unique_consecutive().tolist() != list(range(len(self.epsilon))):
                raise InputError(
                    f"{name} must be 0, 1, … in order, with some in every block"
                )
        _ = self.blocks

    @classmethod
    def of(cls, blocks: Sequence[Block]) -> Blocks:
        """Stack blocks; the last one says which tokens have an answer."""
        last = blocks[-1]
        if len({(each.norm, each.activation) for each in blocks}) > 1:
            raise InputError("stacked blocks must have the same norm and activation")
        if any(
            each.sub_layer.rotary or len(each.places) or len(each.K) < len(each.Q)
            for each in blocks
        ):
            raise InputError("stacked blocks must not have positions or shared keys")
        parts = {
            name: [getattr(each, name) for each in blocks]
            for name in cls.NUMBERS
            if name != "epsilon"
        }

        def owners(name: str) -> Tensor:
            return torch.cat(
                [full(place, len(part)) for place, part in enumerate(parts[name])]
            )

        return cls(
            **{name: torch.cat(parts[name]) for name in cls.NUMBERS[:9]},
            C=torch.cat(parts["C"], 1),
            b=torch.stack(parts["b"]),
            c=torch.stack(parts["c"]),
            epsilon=tensor([(each.epsilon, each.epsilon_behind) for each in blocks]),
            heads=owners("Q"),
            units=owners("A"),
            activation=last.activation,
            norm=last.norm,
            every_token=last.every_token,
            causal=last.causal,
        )

    @property
    def unknowns(self) -> int:
        """The sum over blocks; with LayerNorms only the sum of all means of c shows."""
        free = len(self.epsilon) - 1 if self.norm == "layer" else 0
        return sum(block.unknowns for block in self.blocks) - free

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        found: list[Block] = []
        for place, (first, second) in enumerate(self.epsilon.tolist()):
            h = self.heads == place
            k = self.units == place
            gates = k[: len(self.G)]  # all units have gates, or none
            top = place == len(self.epsilon) - 1
            found.append(
                Block(
                    **{name: getattr(self, name)[h] for name in "QqKVO"},
                    b=self.b[place],
                    frequencies=zeros(int(h.sum()), 0),
                    A=self.A[k],
                    a=self.a[k],
                    G=self.G[gates],
                    g=self.g[gates],
                    C=self.C[:, k],
                    c=self.c[place],
                    activation=self.activation,
                    norm=self.norm,
                    epsilon=first,
                    epsilon_behind=second,
                    every_token=self.every_token or not top,
                    causal=self.causal,
                )
            )
        return tuple(found)

    def answers(self, tokens: Tensor) -> Tensor:
        for block, (first, second) in zip(self.blocks, self.epsilon, strict=True):
            tokens = block.added(tokens, first, second)
        return tokens
