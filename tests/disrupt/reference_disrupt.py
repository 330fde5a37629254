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


def bert_logits(model, ids, mask, cut):
    """A BERT classifier written out, with additive masks; `cut` holds (layer, head, query, key)."""
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
                scores[0, head, query, key] = -torch.inf
        out = (scores.softmax(-1) @ v).transpose(1, 2).reshape(1, n, -1)
        x = layer.attention.output(out, x)
        x = layer.output(layer.intermediate(x), x)
    return model.classifier(bert.pooler(x))
