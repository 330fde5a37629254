"""A BERT classifier written out in float64: its weights, and one pass with all that lies between.

    s = q kᵀ/√w    a = softmax(s)    y = x + Σ_h O_h (a_h v_h) + b    u = norm₁(y)
    z = u + W₂ gelu(W₁u + b₁) + b₂    x' = norm₂(z)

layer after layer, then `logits = C tanh(P x₀ + p) + c` of the first token. One text at a time, so
that nothing is padded; masks of one layer make a batch of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from keyhole.core.errors import InputError

Linear = tuple[Tensor, Tensor]
GELU_BEND = 2 / math.sqrt(2 * math.pi)  # |gelu''(x)| = |2 − x²|·φ(x), which is largest at 0


@dataclass(frozen=True, eq=False)
class Norm:
    """γ·(y − mean)/σ + β, with σ² = |y − mean|²/d + ε."""

    gain: Tensor
    shift: Tensor
    least: float

    def parts(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """The centred y, and σ."""
        centred = y - y.mean(-1, keepdim=True)
        return centred, (centred.square().mean(-1, keepdim=True) + self.least).sqrt()

    def __call__(self, y: Tensor) -> Tensor:
        centred, size = self.parts(y)
        return self.gain * centred / size + self.shift


@dataclass(frozen=True, eq=False)
class Layer:
    """Per head: Q, K, V (heads, w, d) with their shifts (heads, 1, w), O (heads, d, w)."""

    query: Linear
    key: Linear
    value: Linear
    output: Linear
    first: Norm
    inner: Linear
    outer: Linear
    second: Norm

    def scores(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, v (…, heads, n, w) and s (…, heads, n, n)."""
        x = x.unsqueeze(-3)
        q, k, v = (x @ W.mT + b for W, b in (self.query, self.key, self.value))
        return q, k, v, q @ k.mT / q.shape[-1] ** 0.5

    def attended(self, x: Tensor, heads: Tensor) -> Tensor:
        """y from what the heads give, (…, heads, n, w)."""
        weight, bias = self.output
        return x + (heads @ weight.mT).sum(-3) + bias

    @property
    def feed_weights(self) -> Tensor:
        """How much the bend of each hidden unit (wide,) weighs in what the feed-forward gives."""
        return GELU_BEND * self.outer[0].norm(dim=0)

    def widened(self, u: Tensor) -> Tensor:
        return u @ self.inner[0].mT + self.inner[1]

    def fed(self, u: Tensor, wide: Tensor) -> Tensor:
        return u + torch.nn.functional.gelu(wide) @ self.outer[0].mT + self.outer[1]


@dataclass(frozen=True, eq=False)
class Trace:
    """One layer of a pass: everything that a bound is made of."""

    x: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    s: Tensor
    a: Tensor
    heads: Tensor
    y: Tensor
    u: Tensor
    wide: Tensor
    z: Tensor
    out: Tensor

    def detached(self) -> Trace:
        return Trace(**{name: value.detach() for name, value in vars(self).items()})


@dataclass(frozen=True, eq=False)
class Classifier:
    """The weights of a BERT classifier; `embedded` is what goes into its first layer."""

    layers: tuple[Layer, ...]
    pooler: Linear
    classes: Linear

    def passed(
        self, x: Tensor, cut: Tensor | None = None, start: int = 0
    ) -> tuple[Tensor, list[Trace]]:
        """Logits (…, classes) and every layer's trace, from the input (n, d) of layer `start` on.

        `cut` (…, heads, n, n) masks that layer alone.
        """
        x = x if cut is None else x.expand(*cut.shape[:-3], *x.shape)
        traces: list[Trace] = []
        for layer in self.layers[start:]:
            q, k, v, s = layer.scores(x)
            masked = s if cut is None else s.masked_fill(cut, -torch.inf)
            a, cut = masked.softmax(-1), None
            heads = a @ v
            y = layer.attended(x, heads)
            u = layer.first(y)
            wide = layer.widened(u)
            z = layer.fed(u, wide)
            out = layer.second(z)
            traces.append(Trace(x, q, k, v, s, a, heads, y, u, wide, z, out))
            x = out
        pooled = torch.tanh(x[..., 0, :] @ self.pooler[0].mT + self.pooler[1])
        return pooled @ self.classes[0].mT + self.classes[1], traces


def written_out(model: Any) -> Classifier:
    """The classifier that a BertForSequenceClassification is; others are refused."""
    name = type(model).__name__
    if name != "BertForSequenceClassification" or model.config.hidden_act != "gelu":
        raise InputError(
            f"expected a BERT classifier with gelu to certify, got {name} "
            f"with {getattr(model.config, 'hidden_act', 'another activation')}"
        )
    if model.config.num_labels < 2:
        raise InputError(f"expected two classes or more to certify, got {model.config.num_labels}")
    blocks = model.bert.encoder.layer
    count = int(model.config.num_attention_heads)
    return Classifier(
        tuple(_layer(block, count) for block in blocks),
        _linear(model.bert.pooler.dense), _linear(model.classifier),
    )  # fmt: skip


def embedded(model: Any, ids: Tensor, types: Tensor | None) -> Tensor:
    """The embeddings (n, d) of one text (n,), in float64."""
    kinds = None if types is None else types.unsqueeze(0)
    with torch.no_grad():
        return model.bert.embeddings(input_ids=ids.unsqueeze(0), token_type_ids=kinds)[0].double()


def _layer(block: Any, heads: int) -> Layer:
    own, output = block.attention.self, block.attention.output
    weight, bias = _linear(output.dense)
    return Layer(
        *(_split(part, heads) for part in (own.query, own.key, own.value)),
        output=(weight.unflatten(1, (heads, -1)).movedim(1, 0), bias),
        first=_norm(output.LayerNorm), inner=_linear(block.intermediate.dense),
        outer=_linear(block.output.dense), second=_norm(block.output.LayerNorm),
    )  # fmt: skip


def _split(part: Any, heads: int) -> Linear:
    weight, bias = _linear(part)
    return weight.unflatten(0, (heads, -1)), bias.view(heads, 1, -1)


def _linear(part: Any) -> Linear:
    return part.weight.detach().double(), part.bias.detach().double()


def _norm(part: Any) -> Norm:
    return Norm(part.weight.detach().double(), part.bias.detach().double(), float(part.eps))
