"""Naive references for docs/disrupt.md, with single units and explicit masks, without keyhole."""

from __future__ import annotations

import itertools

import numpy as np
import torch


def removed(a, j):
    """Return a row of probabilities after key j is cut before the softmax."""
    kept = np.array([0.0 if key == j else p for key, p in enumerate(a)])
    return kept / kept.sum()


def removal_effect(a, g):
    """Return the effect of cutting each unit on the linear loss Σ g a, by cutting it."""
    effect = np.zeros_like(a)
    for i in range(a.shape[0]):
        for j in range(a.shape[1]):
            effect[i, j] = (g[i] * removed(a[i], j)).sum() - (g[i] * a[i]).sum()
    return effect


def mask_gradient(scores, g):
    """Return minus the gradient of Σ g·softmax(scores + M) by M at 0, by central differences."""
    small = 1e-6
    slope = np.zeros_like(scores)
    for i, row in enumerate(scores):
        for j in range(len(row)):
            ends = []
            for step in (small, -small):
                moved = np.exp(
                    [score + step * (key == j) for key, score in enumerate(row)]
                )
                ends.append((g[i] * moved / moved.sum()).sum())
            slope[i, j] = (ends[1] - ends[0]) / (2 * small)
    return slope


def bert_logits(model, ids, mask, cut, silent=(), bumps=None):
    """A BERT classifier written out; `cut` holds (layer, head, query, key), `mask` tokens (1, n).

    Heads `silent`, (layer, head), give nothing; `bumps` are added to a layer's
    probabilities.
    """
    config = model.config
    n = ids.shape[1]
    shape = (1, config.num_attention_heads, n, n)
    opened = [mask[:, None, None, :].expand(shape).double() for _ in bert_layers(model)]
    for layer, head, query, key in cut:
        opened[layer] = opened[layer].clone()
        opened[layer][0, head, query, key] = 0
    return bert_under(
        model, ids, opened, {(layer, 0, head) for layer, head in silent}, bumps
    )


def bert_layers(model):
    return model.bert.encoder.layer


def bert_under(model, ids, opened, silent=(), bumps=None, seen=None):
    """The head's numbers of sequences `ids`, under each layer's mask of zeros and ones.

    Masks are (sequences, heads, n, n), a zero adds the least number to a score. Heads
    `silent`, (layer, sequence, head), give nothing; `bumps` are added to a layer's
    probabilities, which are put into the list `seen`.
    """
    x = model.bert.embeddings(input_ids=ids)
    size, n = ids.shape
    heads = model.config.num_attention_heads
    for number, layer in enumerate(bert_layers(model)):
        own = layer.attention.self
        q, k, v = (
            part(x).view(size, n, heads, -1).transpose(1, 2)
            for part in (own.query, own.key, own.value)
        )
        scores = q @ k.transpose(-1, -2) / (x.shape[-1] // heads) ** 0.5
        least = torch.finfo(scores.dtype).min
        weights = (scores + (1 - opened[number].to(scores.dtype)) * least).softmax(-1)
        if seen is not None:
            seen.append(weights.detach())
        if bumps is not None:
            weights = weights + bumps[number]
        keep = torch.ones(size, heads, dtype=x.dtype)
        for at, row, head in silent:
            if at == number:
                keep[row, head] = 0
        out = (
            ((weights * keep[:, :, None, None]) @ v)
            .transpose(1, 2)
            .reshape(size, n, -1)
        )
        x = layer.attention.output(out, x)
        x = layer.output(layer.intermediate(x), x)
    return model.classifier(model.bert.pooler(x))


def as_released(model, ids, label, share, ranking="gradient"):
    """HackAttend on one sentence, as its code does it: the units cut at the first flip, or all.

    Any position but the first may be cut, as query and as key, k = int(share·(n−1)²) of
    them in each head, at least 1. Layers, and heads inside a layer, in the order of the
    confidence in the label without them, the lowest first.
    """
    layers = model.config.num_hidden_layers
    heads = model.config.num_attention_heads
    n = len(ids[0])
    real = torch.ones_like(ids)
    zeros = [torch.zeros(1, heads, n, n, dtype=torch.float64) for _ in range(layers)]
    bumps = [zero.requires_grad_() for zero in zeros]
    logits = bert_logits(model, ids, real, [], bumps=bumps)
    loss = -logits.log_softmax(-1)[0, label]
    slopes = torch.autograd.grad(loss, bumps, allow_unused=True, materialize_grads=True)
    slopes = [slope[0].tolist() for slope in slopes]

    def sure(silent):
        with torch.no_grad():
            return float(
                bert_logits(model, ids, real, [], silent).softmax(-1)[0, label]
            )

    def cost_of_layer(layer):
        return sure({(layer, head) for head in range(heads)})

    k = max(1, int(share * (n - 1) ** 2 + 1e-9))
    cut = []
    for layer in sorted(range(layers), key=cost_of_layer):
        for head in sorted(
            range(heads), key=lambda head, layer=layer: sure({(layer, head)})
        ):
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


def released_program(model, ids, real, label, share, cutting=True):
    """HackAttend's released program on a text, or on a question with several choices.

    `ids` (choices, positions) are padded, the first `real[c]` of choice c are tokens.
    Written from github.com/liongkj/HackAttend, commit 98a1d52: query_model,
    get_confidence_score, get_filter_strategy, generate_pertubed_attention_mask,
    greedy_attack, and the modified BERT. Returns each layer's last mask (choices,
    heads, positions, positions), the number of its queries, and whether the answer
    flipped.
    """
    choices, size = ids.shape
    layers = model.config.num_hidden_layers
    heads = model.config.num_attention_heads
    choice = choices > 1
    total = sum(real)
    every = range(choices), range(heads), range(size), range(size)

    def masks(is_open):
        made = [is_open(*unit) for unit in itertools.product(range(layers), *every)]
        return list(
            torch.tensor(made).view(layers, choices, heads, size, size).double()
        )

    padding = masks(lambda layer, c, h, q, k: k < real[c])

    def answer(opened, silent=()):
        """The prediction, and the confidence in it."""
        with torch.no_grad():
            sure = bert_under(model, ids, opened, silent).view(-1).softmax(-1)
        return int(sure.argmax()), float(sure.max())

    def token(c, position):  # one that is not [CLS]
        return 0 < position < real[c]

    # The gradient by zeros added to the probabilities, and the probabilities
    # themselves.
    zeros = [
        torch.zeros(choices, heads, size, size, dtype=torch.float64) for _ in padding
    ]
    bumps = [zero.requires_grad_() for zero in zeros]
    maps = []
    logits = bert_under(model, ids, padding, bumps=bumps, seen=maps).view(-1)
    loss = -logits.log_softmax(-1)[label]
    slopes = torch.autograd.grad(loss, bumps, allow_unused=True, materialize_grads=True)
    k_units = int(share * sum(n - 1 for n in real) ** 2 / choices + 1e-6) or 1

    def chosen(layer, head):
        """The units (query, key) that an attacked head loses, in every choice."""
        scored = []
        for values in ((-slopes[layer]).tolist(), maps[layer].tolist()):
            table = []
            for c in range(choices):
                own = []
                for q, k in itertools.product(range(size), range(size)):
                    spared = not token(c, q) or (not choice and not token(c, k))
                    own.append((0.0 if spared else values[c][head][q][k], q, k))
                table.append(own)
            scored.append(table)
        gradient, attention = scored
        none = all(score == 0 for own in gradient for score, _, _ in own)
        lost = set()
        for own in attention if none else gradient:
            best = sorted(own, key=lambda unit: -unit[0])[:k_units]
            lost |= {(q, k) for score, q, k in best if score > 0}
        return lost if cutting else set()

    def layer_cost(layer):
        closed = [mask * (number != layer) for number, mask in enumerate(padding)]
        predicted, sure = answer(closed)
        return predicted == label, sure

    def head_cost(layer, head):
        rows = range(head * choices, (head + 1) * choices)
        silent = {(layer, c, row % heads) for c, row in enumerate(rows)}
        return answer(padding, silent)[1]

    attacked = {}
    queries = 0

    def is_open(layer, c, h, q, k):
        inside = q < real[c] and (choice or k < real[c])
        if not any(at == layer for at, _ in attacked):
            return inside
        if (layer, h) in attacked:
            if q == 0:
                return choice or token(c, k)
            if k == 0 and not choice:
                return q < real[c]
            return inside and (q, k) not in attacked[layer, h]
        if k == 0 and q < total:
            return True
        if q == 0:
            return c == 0 and k < total
        return inside

    for layer in sorted(range(layers), key=layer_cost):
        for head in sorted(
            range(heads), key=lambda head, layer=layer: head_cost(layer, head)
        ):
            attacked[layer, head] = chosen(layer, head)
            queries += 1
            opened = masks(is_open)
            if answer(opened)[0] != label:
                return opened, queries, True
    return opened, queries, False
