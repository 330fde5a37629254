"""Naive witnesses for docs/disrupt.md: single units, explicit masks. Never imports keyhole."""

from __future__ import annotations

import numpy as np
import torch


def removed(a, j):
    """A row of probabilities after key j was cut before the softmax."""
    kept = np.array([0.0 if key == j else p for key, p in enumerate(a)])
    return kept / kept.sum()


def removal_effect(a, g):
    """What cutting each unit of each row does to the linear loss Σ g a, by doing it."""
    effect = np.zeros_like(a)
    for i in range(a.shape[0]):
        for j in range(a.shape[1]):
            effect[i, j] = (g[i] * removed(a[i], j)).sum() - (g[i] * a[i]).sum()
    return effect


def bert_logits(model, ids, mask, cut, silent=(), bumps=None):
    """A BERT classifier written out, with additive masks; `cut` holds (layer, head, query, key).

    Heads `silent`, (layer, head), give nothing; `bumps` are added to a layer's probabilities.
    """
    bert = model.bert
    x = bert.embeddings(input_ids=ids)
    n, heads = ids.shape[1], model.config.num_attention_heads
    for number, layer in enumerate(bert.encoder.layer):
        own = layer.attention.self
        q, k, v = (
            part(x).view(1, n, heads, -1).transpose(1, 2)
            for part in (own.query, own.key, own.value)
        )
        scores = q @ k.transpose(-1, -2) / (x.shape[-1] // heads) ** 0.5
        for key in range(n):
            if mask[0, key] == 0:
                scores[..., key] = -torch.inf
        for at, head, query, key in cut:
            if at == number:
                scores[0, head, query, key] = torch.finfo(scores.dtype).min
        weights = scores.softmax(-1)
        if bumps is not None:
            weights = weights + bumps[number]
        keep = [float((number, head) not in silent) for head in range(heads)]
        weights = weights * torch.tensor(keep, dtype=x.dtype).view(1, heads, 1, 1)
        out = (weights @ v).transpose(1, 2).reshape(1, n, -1)
        x = layer.attention.output(out, x)
        x = layer.output(layer.intermediate(x), x)
    return model.classifier(bert.pooler(x))


def as_released(model, ids, label, share, ranking="gradient"):
    """HackAttend on one sentence, as its code does it: the units cut at the first flip, or all.

    Any position but the first may be cut, as query and as key, k = int(share·(n−1)²) of them in
    each head, at least 1. Layers, and heads inside a layer, in the order of the confidence in the
    label without them, the lowest first.
    """
    layers, heads, n = model.config.num_hidden_layers, model.config.num_attention_heads, len(ids[0])
    real = torch.ones_like(ids)
    zeros = [torch.zeros(1, heads, n, n, dtype=torch.float64) for _ in range(layers)]
    bumps = [zero.requires_grad_() for zero in zeros]
    logits = bert_logits(model, ids, real, [], bumps=bumps)
    loss = -logits.log_softmax(-1)[0, label]
    slopes = torch.autograd.grad(loss, bumps, allow_unused=True, materialize_grads=True)
    slopes = [slope[0].tolist() for slope in slopes]

    def sure(silent):
        with torch.no_grad():
            return float(bert_logits(model, ids, real, [], silent).softmax(-1)[0, label])

    def cost_of_layer(layer):
        return sure({(layer, head) for head in range(heads)})

    k = max(1, int(share * (n - 1) ** 2 + 1e-9))
    cut = []
    for layer in sorted(range(layers), key=cost_of_layer):
        for head in sorted(range(heads), key=lambda head, layer=layer: sure({(layer, head)})):
            scored = []
            for query in range(1, n):
                for key in range(1, n):
                    slope = slopes[layer][head][query][key]
                    score = -slope if ranking == "gradient" else abs(slope)
                    scored.append((-score, query, key))
            cut += [(layer, head, query, key) for _, query, key in sorted(scored)[:k]]
            with torch.no_grad():
                if int(bert_logits(model, ids, real, cut).argmax()) != label:
                    return cut, True
    return cut, False
