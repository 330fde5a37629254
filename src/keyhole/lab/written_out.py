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
            f"certificates are for BERT classifiers with gelu: got {name} "
            f"with {getattr(model.config, 'hidden_act', 'another activation')}"
        )
    if model.config.num_labels < 2:
        count = model.config.num_labels
        raise InputError(f"a certificate needs two classes or more: the model has {count}")
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


# How far a small change of one layer's input can move its output, token by token.
#
# Everything here belongs to one pass and no change in particular. Sizes are
# spectral norms of exact Jacobians, over-estimated by a Schatten norm, which takes products alone:
#
#     ‖M‖₂ ≤ (tr (MᵀM)⁸)^(1/16) ≤ d^(1/16)·‖M‖₂        (a factor of 1.35 for d = 128, mostly less)
#
# The attention of row i has the Jacobian, with w the width of a head,
#
#     ∂y_i/∂x_j = δ_ij (I + Σ_h O Cov_i Q/√w) + Σ_h a_ij O (V + (v_j − o_i)(Kᵀq_i)ᵀ/√w)
#     Cov_i = Σ_m a_im (v_m − o_i) k_mᵀ
#
# and a token's way from y_i to x'_i the product of norm, feed-forward and norm.

TANH_BEND = 4 / (3 * math.sqrt(3))  # |tanh''| at most
_ROUNDING = 1 + 1e-9  # float64 loses less in a product of matrices of a few hundred rows


def spectral(matrices: Tensor) -> Tensor:
    """At least the spectral norm of each matrix (…, d, d)."""
    size = matrices.flatten(-2).norm(dim=-1).clamp(min=1e-300)[..., None, None]
    power = (matrices / size).mT @ (matrices / size)
    power = power @ power
    power = power @ power
    eighth = power.square().sum((-1, -2))  # tr (MᵀM)⁸
    return eighth.pow(1 / 16) * size[..., 0, 0] * _ROUNDING


def quadratic(weights: Tensor, rows: Tensor) -> Tensor:
    """At least the largest eigenvalue of Σ_m weights_m·row_m row_mᵀ, weights (…, m) ≥ 0."""
    return spectral((rows.mT * weights.unsqueeze(-2)) @ rows)


@dataclass(frozen=True, eq=False)
class Sizes:
    """One layer's sizes; heads come first, then rows (queries), then columns (keys).

    `odds` a/(1−a); `reach` |O(v_j − o_i)|;
    `attention` and `whole` the norms of ∂y_i/∂x_j and ∂x'_i/∂x_j; `by_key`, `by_query` and
    `by_both` bound the change of a score by α·r_j, β·r_i and γ·r_i·r_j; `values` ‖O V‖.
    """

    a: Tensor
    odds: Tensor
    reach: Tensor
    attention: Tensor
    whole: Tensor
    by_key: Tensor
    by_query: Tensor
    by_both: Tensor
    values: Tensor
    token: Tensor  # ‖D C B‖: norm, feed-forward, norm
    norm_feed: Tensor  # ‖D C‖
    norm: Tensor  # ‖D‖
    feed: Tensor  # ‖C‖
    feed_norm: Tensor  # ‖C B‖
    first: Tensor  # ‖B‖
    bend: Tensor  # of the feed-forward: its second derivative is at most bend²
    length: tuple[Tensor, Tensor]  # |c| of the two norms' centred rows
    spread: tuple[Tensor, Tensor]  # σ of the two norms
    gain: tuple[float, float]  # their largest gains
    width: int  # d
    seen: Tensor  # (n,): 1 for the rows that somebody reads, else 0
    least: float  # the larger ε of the norms


def sizes(layer: Layer, trace: Trace, *, from_input: bool, rows: int) -> Sizes:
    """`from_input` is False where the layer's input cannot change; only `rows` are asked for."""
    n, d = trace.x.shape
    B, D = jacobian(layer.first, trace.y), jacobian(layer.second, trace.z)
    C = torch.eye(d, dtype=B.dtype, device=B.device) + layer.outer[0] @ (
        _gelu_slope(trace.wide).unsqueeze(-1) * layer.inner[0]
    )
    token = D @ C @ B
    away = trace.v.unsqueeze(-3) - trace.heads.unsqueeze(-2)  # (heads, i, j, w)
    moved = away @ layer.output[0].mT.unsqueeze(1)
    width = math.sqrt(away.shape[-1])
    (Q, _), (K, _), (V, _), (O, _) = layer.query, layer.key, layer.value, layer.output  # noqa: E741
    centre = (trace.a @ trace.k).unsqueeze(-2)
    attention, whole = trace.x.new_zeros(n, n), trace.x.new_zeros(n, n)
    for i in range(rows if from_input else 0):
        block = _block(layer, trace, i, away[:, i], width)
        attention[i], whole[i] = spectral(block), spectral(token[i] @ block)
    return Sizes(
        a=trace.a, odds=trace.a / (1 - trace.a), reach=moved.norm(dim=-1),
        attention=attention, whole=whole,
        by_key=(trace.q @ K).norm(dim=-1) / width,
        by_query=((trace.k.unsqueeze(-3) - centre) @ Q.unsqueeze(1)).norm(dim=-1) / width,
        by_both=spectral(Q.mT @ K) / width, values=spectral(O @ V), token=spectral(token),
        norm_feed=spectral(D @ C), norm=spectral(D), feed=spectral(C), feed_norm=spectral(C @ B),
        first=spectral(B),
        bend=quadratic(layer.feed_weights, layer.inner[0]).sqrt(),
        spread=(layer.first.parts(trace.y)[1][:, 0], layer.second.parts(trace.z)[1][:, 0]),
        length=(layer.first.parts(trace.y)[0].norm(dim=-1),
                layer.second.parts(trace.z)[0].norm(dim=-1)),
        gain=(float(layer.first.gain.abs().max()), float(layer.second.gain.abs().max())), width=d,
        seen=(torch.arange(n, device=trace.x.device) < rows).to(trace.x.dtype),
        least=max(layer.first.least, layer.second.least),
    )  # fmt: skip


def _block(layer: Layer, trace: Trace, i: int, away: Tensor, width: float) -> Tensor:
    """∂y_i/∂x_j for all j, (n, d, d)."""
    (Q, _), (K, _), (V, _), (O, _) = layer.query, layer.key, layer.value, layer.output  # noqa: E741
    a = trace.a[:, i]
    asked = (trace.q[:, i].unsqueeze(1) @ K)[:, 0] / width  # Kᵀq, (heads, d)
    ahead = a[..., None] * (away @ O.mT)  # a_ij O(v_j − o_i), (heads, n, d)
    block = torch.einsum("hj,hdw,hwe->jde", a, O, V) + torch.einsum("hjd,he->jde", ahead, asked)
    own = torch.einsum("hjd,hjw,hwe->de", ahead, trace.k, Q) / width
    block[i] += own + torch.eye(len(own), dtype=own.dtype, device=own.device)
    return block


def jacobian(norm: Norm, y: Tensor) -> Tensor:
    """γ(P − c cᵀ/(d σ²))/σ for every row, with c the centred row and P the centring."""
    centred, size = norm.parts(y)
    d = y.shape[-1]
    centring = torch.eye(d, dtype=y.dtype, device=y.device) - 1 / d
    unit = centred / (size * math.sqrt(d))
    outer = unit.unsqueeze(-1) * unit.unsqueeze(-2)
    return norm.gain.unsqueeze(-1) * (centring - outer) / size.unsqueeze(-1)


def _gelu_slope(x: Tensor) -> Tensor:
    density = torch.exp(-x.square() / 2) / math.sqrt(2 * math.pi)
    return torch.special.ndtr(x) + x * density


@dataclass(frozen=True, eq=False)
class Slopes:
    """One layer's share in the margin: how a change at each of its stages moves it.

    `along` G·(v_j − o_i) with G = Oᵀ∂margin/∂y_i; `value` |Vᵀ G|; `first` and `second` the slopes
    behind the two norms, along the centred row and in all; `feed` (n, wide) how much the bend of
    each hidden unit weighs.
    """

    along: Tensor
    value: Tensor
    first: tuple[Tensor, Tensor]
    feed: Tensor
    fed: Tensor  # (n,): the root of Σ feed_m·(change of hidden unit m)² for a move of 1
    second: tuple[Tensor, Tensor]


def slopes(
    classifier: Classifier, traces: list[Trace], logits: Tensor, label: int, other: int
) -> list[Slopes]:
    """From one backward pass of the margin between two classes."""
    stages = [stage for trace in traces for stage in (trace.y, trace.u, trace.z, trace.out)]
    margin = logits[label] - logits[other]
    found = torch.autograd.grad(margin, stages, retain_graph=True)
    made: list[Slopes] = []
    for number, (layer, trace) in enumerate(zip(classifier.layers, traces, strict=True)):
        y, u, z, out = found[4 * number : 4 * number + 4]
        G = y.unsqueeze(0) @ layer.output[0]  # (heads, n, w)
        feed = GELU_BEND * (z @ layer.outer[0]).abs()
        away = trace.v.unsqueeze(-3) - trace.heads.unsqueeze(-2)
        made.append(
            Slopes(
                along=(away @ G.unsqueeze(-1))[..., 0].detach(),
                value=(G @ layer.value[0]).norm(dim=-1),
                first=_norm_weights(layer.first, trace.y.detach(), u),
                feed=feed,
                fed=quadratic(feed, layer.inner[0]).sqrt(),
                second=_norm_weights(layer.second, trace.z.detach(), out),
            )
        )
    return made


def _norm_weights(norm: Norm, y: Tensor, slope: Tensor) -> tuple[Tensor, Tensor]:
    """|γg·c|/|c| and |P γg|: the slope along the centred row, and in all."""
    centred, _ = norm.parts(y)
    pulled = norm.gain * slope
    along = (pulled * centred).sum(-1).abs() / centred.norm(dim=-1).clamp(min=1e-300)
    return along, (pulled - pulled.mean(-1, keepdim=True)).norm(dim=-1)
