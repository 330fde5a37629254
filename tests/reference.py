"""Naive NumPy loops, written from the formulas alone, as witnesses: never imports keyhole."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np


def softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()


def scores(X: np.ndarray, W: np.ndarray) -> np.ndarray:
    """S_ij = x_iᵀ W x_j."""
    n, d = X.shape
    S = np.zeros((n, n))
    for i in range(n):
        for j in range(n):
            for a in range(d):
                for b in range(d):
                    S[i, j] += X[i, a] * W[a, b] * X[j, b]
    return S


def attention(
    X: np.ndarray, W: np.ndarray, V: np.ndarray, causal: bool = False
) -> np.ndarray:
    """O = softmax(X W Xᵀ) X V, row by row."""
    n = len(X)
    S = scores(X, W)
    O = np.zeros((n, V.shape[1]))  # noqa: E741
    for i in range(n):
        seen = i + 1 if causal else n
        weights = softmax(S[i, :seen])
        for j in range(seen):
            O[i] += weights[j] * (X[j] @ V)
    return O


def head(X: np.ndarray, W: np.ndarray, v: np.ndarray) -> float:
    """f(X) = Σ_i softmax_i(x_iᵀ W x_N)·vᵀx_i: keys on the left, the last token is the query."""
    weights = softmax(np.array([x @ W @ X[-1] for x in X]))
    return float(sum(weight * (v @ x) for weight, x in zip(weights, X, strict=True)))


def multi_head(X: np.ndarray, Ws: np.ndarray, vs: np.ndarray) -> float:
    return sum(head(X, W, v) for W, v in zip(Ws, vs, strict=True))


def biased_heads(
    X: np.ndarray,
    Ws: np.ndarray,
    vs: np.ndarray,
    cs: np.ndarray,
    b: float,
    normed: bool,
    centred: bool,
    epsilon: float,
) -> float:
    """b + Σ_h Σ_i softmax_i(n_iᵀ(W_h n_N + c_h)) v_hᵀn_i, with n = x or a norm of it."""
    rows = []
    for x in X:
        x = x - x.mean() if normed and centred else x
        rows.append(x / np.sqrt((x * x).mean() + epsilon) if normed else x)
    total = b
    for W, v, c in zip(Ws, vs, cs, strict=True):
        weights = softmax(np.array([n @ (W @ rows[-1] + c) for n in rows]))
        total += sum(weight * (v @ n) for weight, n in zip(weights, rows, strict=True))
    return float(total)


def one_layer(X: np.ndarray, W: np.ndarray, A: np.ndarray, w: np.ndarray) -> float:
    """F(X) = wᵀ ReLU(A · attn(X)), attn(X) = Σ_i softmax_i(x_iᵀ W x_N) x_i."""
    hidden = A @ np.array([head(X, W, unit) for unit in np.eye(X.shape[1])])
    return float(w @ np.maximum(hidden, 0.0))


def steal_head(oracle, d: int) -> tuple[np.ndarray, np.ndarray]:
    """Theorem 4.1 as the paper states it: unit vectors, one query at a time.

    `oracle` takes an n×d array and returns a float.
    """
    v = np.array([oracle(unit[None]) for unit in np.eye(d)])
    k = int(np.abs(v).argmax())
    W = np.zeros((d, d))
    for j in range(d):
        x = np.eye(d)[j]

        def form(delta: np.ndarray, x: np.ndarray = x) -> float:
            alpha = (oracle(np.stack([x + delta, x])) - v @ x) / (v @ delta)
            return float(np.log(alpha / (1 - alpha)))

        anchor = form(np.eye(d)[k])
        for i in range(d):
            if i == k:
                W[i, j] = anchor
            elif (
                v[i] == 0
            ):  # e_i alone does not change the answer: add the anchor, and subtract it
                W[i, j] = form(np.eye(d)[k] + np.eye(d)[i]) - anchor
            else:
                W[i, j] = form(np.eye(d)[i])
    return W, v


def hits_in_all(hits: int, drawn: int, population: int, confidence) -> tuple[int, int]:
    """The least and largest K under which both tails have a probability above (1 − c)/2."""

    def chance(x: int, K: int) -> Fraction:
        if not 0 <= x <= K or not 0 <= drawn - x <= population - K:
            return Fraction(0)
        ways = math.comb(K, x) * math.comb(population - K, drawn - x)
        return Fraction(ways, math.comb(population, drawn))

    tail = (1 - confidence) / 2
    held = [
        K
        for K in range(population + 1)
        if sum(chance(x, K) for x in range(hits, drawn + 1)) > tail
        and sum(chance(x, K) for x in range(hits + 1)) > tail
    ]
    return held[0], held[-1]


def cell_misfit(f: np.ndarray, low: np.ndarray, high: np.ndarray, s: float) -> float:
    """−2 log of the probability that numbers f with errors of s lie between low and high."""

    def below(x: float) -> float:
        return math.erfc(-x / math.sqrt(2)) / 2

    total = 0.0
    for number, a, b in zip(f, low, high, strict=True):
        total -= 2 * math.log(below((b - number) / s) - below((a - number) / s))
    return total


def nearest_codes(f: np.ndarray, codebook: np.ndarray) -> list[int]:
    """The nearest centroid of each block of numbers."""
    size = codebook.shape[2]
    codes = []
    for block, centroids in enumerate(codebook):
        part = f[block * size : (block + 1) * size]
        apart = [sum((part - centroid) ** 2) for centroid in centroids]
        codes.append(apart.index(min(apart)))
    return codes


def one_edit_away(text: tuple[int, ...], vocabulary: range) -> set[tuple[int, ...]]:
    """Every text with one token replaced, inserted or deleted, or with two swapped."""
    edits = {text[:p] + text[p + 1 :] for p in range(len(text)) if len(text) > 1}
    for token in vocabulary:
        edits |= {(*text[:p], token, *text[p + 1 :]) for p in range(len(text))}
        edits |= {(*text[:p], token, *text[p:]) for p in range(len(text) + 1)}
    for p, q in itertools.combinations(range(len(text)), 2):
        edits.add((*text[:p], text[q], *text[p + 1 : q], text[p], *text[q + 1 :]))
    return edits - {text}


def distance_from_rows(row: np.ndarray, rows: np.ndarray) -> float:
    """The distance of a row from the span of others, relative to its length."""
    weights = np.linalg.lstsq(rows.T, row, rcond=None)[0]
    left = row.astype(float).copy()
    for weight, other in zip(weights, rows, strict=True):
        left -= weight * other
    return float(np.linalg.norm(left) / np.linalg.norm(row))


def gradient_of_map(deltas: np.ndarray, inputs: np.ndarray) -> np.ndarray:
    """The gradient of a linear map's weights: a sum of outer products, input by input."""
    total = np.zeros((deltas.shape[1], inputs.shape[1]))
    for delta, row in zip(deltas, inputs, strict=True):
        total += np.outer(delta, row)
    return total


def left_to_right(exposed, leaked: np.ndarray, vocabulary: int) -> list[int]:
    """At each position the token of the vocabulary whose row is nearest to the leaked one.

    `exposed` takes the ids of a text and returns its rows.
    """
    text: list[int] = []
    for row in leaked:
        apart = [
            float(np.square(exposed([*text, token])[-1] - row).sum())
            for token in range(vocabulary)
        ]
        text.append(apart.index(min(apart)))
    return text


def quantised(numbers, bits, groups):
    """Round each group of positions to even steps from its least to its largest; and the steps."""
    shape = numbers.shape
    numbers = numbers.ravel().astype(np.float64)
    given = numbers.copy()
    steps = np.zeros_like(numbers)
    for group in groups:
        least = min(numbers[i] for i in group)
        largest = max(numbers[i] for i in group)
        step = (largest - least) / (2**bits - 1)
        for i in group:
            given[i] = least + round((numbers[i] - least) / step) * step
            steps[i] = step
    return given.reshape(shape), steps.reshape(shape)


def kv_cloak(
    X: np.ndarray, size: int, draw: np.random.Generator, *, added=True, scales=1.0
):
    """KV-Cloak's S P (X M + A) of one head's rows (n, d), padded to whole blocks of `size`."""
    length, d = X.shape
    largest = 2.84 * scales * np.abs(X).max()
    rows = np.concatenate([X, np.full((-length % size, d), 1.5 * largest)])
    sizes = draw.uniform(1 / scales, scales, d // 2)
    angles = draw.uniform(0, 2 * np.pi, d // 2)
    S = np.linalg.qr(draw.normal(size=(size, size)))[0] * draw.uniform(
        1 / scales, scales, size
    )
    place = draw.integers(size)
    a = draw.uniform(3, 4, d) * largest
    stored = np.zeros_like(rows)
    for start in range(0, len(rows), size):
        block = np.zeros((size, d))
        for i in range(size):
            for j in range(d // 2):
                x = rows[start + i, j]
                y = rows[start + i, j + d // 2]
                block[i, j] = sizes[j] * (np.cos(angles[j]) * x - np.sin(angles[j]) * y)
                block[i, j + d // 2] = sizes[j] * (
                    np.sin(angles[j]) * x + np.cos(angles[j]) * y
                )
        if added:
            block[place] += a
        stored[start : start + size] = S @ block[draw.permutation(size)]
    return stored


def attention_of_kept(
    X: np.ndarray, W: np.ndarray, V: np.ndarray, kept: set
) -> np.ndarray:
    """Attention over the kept pairs (query, key) only; a query that keeps no key gives zero."""
    S = scores(X, W)
    O = np.zeros((len(X), V.shape[1]))  # noqa: E741
    for i in range(len(X)):
        keys = [j for j in range(len(X)) if (i, j) in kept]
        if keys:
            for weight, j in zip(softmax(S[i, keys]), keys, strict=True):
                O[i] += weight * (X[j] @ V)
    return O


def subsets(units) -> list[frozenset]:
    return [
        frozenset(s)
        for k in range(len(units) + 1)
        for s in itertools.combinations(units, k)
    ]


def smoothed(classify, units, keep: float, cut: frozenset, classes: int) -> np.ndarray:
    """P(f = c) over all masks, if each unit not in `cut` is kept with probability `keep`."""
    chances = np.zeros(classes)
    for kept in subsets(units):
        weight = keep ** len(kept) * (1 - keep) ** (len(units) - len(kept))
        chances[classify(kept - cut)] += weight
    return chances


def least_flip(vote, units) -> int:
    """The fewest units whose cut changes the vote; one more than all if none does."""
    before = vote(frozenset())
    for cut in subsets(units):  # the smallest first
        if vote(cut) != before:
            return len(cut)
    return len(units) + 1


def binomial_tail(hits: int, drawn: int, chance: Fraction) -> Fraction:
    """P(at least `hits` hits)."""
    return sum(
        (
            math.comb(drawn, x) * chance**x * (1 - chance) ** (drawn - x)
            for x in range(hits, drawn + 1)
        ),
        Fraction(0),
    )


def block(
    X: np.ndarray,
    parts: dict[str, np.ndarray],
    activation: str,
    norm: str,
    epsilon: float,
    epsilon_behind: float,
) -> np.ndarray:
    """The last token's answer of a Transformer block, head by head and unit by unit."""

    def normed(x: np.ndarray, e: float) -> np.ndarray:
        if norm == "none":
            return x
        x = x if norm == "rms" else x - x.mean()
        return x / np.sqrt((x * x).mean() + e)

    def bent(z: float) -> float:
        if activation == "relu":
            return max(z, 0.0)
        if activation == "silu":
            return z / (1 + math.exp(-z))
        return z * (1 + math.erf(z / math.sqrt(2))) / 2

    behind = norm == "behind"
    T = list(X) if behind else [normed(x, epsilon) for x in X]
    each = len(parts["Q"]) // len(parts["K"])
    h = X[-1] + parts["b"]
    for i in range(len(parts["Q"])):
        query = T[-1] @ parts["Q"][i] + parts["q"][i]
        K = parts["K"][i // each]
        V = parts["V"][i // each]
        scores = [query @ (t @ K) for t in T]
        for j in range(len(T) if len(parts["places"]) else 0):
            scores[j] += parts["places"][i][
                min(len(T) - 1 - j, len(parts["places"][i]) - 1)
            ]
        weights = softmax(np.array(scores))
        for weight, t in zip(weights, T, strict=True):
            h = h + weight * (t @ V) @ parts["O"][i]
    u = normed(h, epsilon if behind else epsilon_behind)
    seen = h if not len(parts["w"]) else parts["w"] @ h
    y = (parts["D"] * u if behind else seen) + parts["c"]
    for k in range(len(parts["A"])):
        unit = bent(parts["A"][k] @ u + parts["a"][k])
        if len(parts["G"]):
            unit *= parts["G"][k] @ u + parts["g"][k]
        y = y + unit * parts["C"][:, k]
    return parts["E"] * normed(y, epsilon_behind) + parts["e"] if behind else y


def levenberg_marquardt(
    residuals: Callable[[np.ndarray], np.ndarray],
    jacobian: Callable[[np.ndarray], np.ndarray],
    x: np.ndarray,
    steps: int,
    damping: float,
) -> list[tuple[np.ndarray, float]]:
    """Return x and λ after each step: (JᵀJ + λ·diag(JᵀJ))p = −Jᵀr, λ/5 if it helps, else 4λ."""
    path = []
    for _ in range(steps):
        J, r = jacobian(x), residuals(x)
        normal = J.T @ J
        p = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), -J.T @ r)
        if np.sum(residuals(x + p) ** 2) < np.sum(r**2):
            x = x + p
            damping = damping / 5
        else:
            damping = 4 * damping
        path.append((x, damping))
    return path
