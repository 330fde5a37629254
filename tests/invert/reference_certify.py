"""Naive attention in 60-digit decimals, and Newton's method on it, without keyhole."""

from __future__ import annotations

from decimal import Decimal, localcontext

DIGITS = 60
STEP = Decimal("1e-25")


def attention(X, W, V, key_bias=None, output_bias=None, causal=False, residual=False):
    """Compute with lists of lists of Decimal; W, V and key_bias have a further level, the heads."""
    n = len(X)
    d = len(X[0])
    m = len(V[0][0])
    out = [[Decimal(0)] * m for _ in range(n)]
    for h in range(len(W)):
        for i in range(n):
            seen = range(i + 1 if causal else n)
            weights = {}
            for j in seen:
                score = sum(
                    X[i][a] * W[h][a][b] * X[j][b] for a in range(d) for b in range(d)
                )
                if key_bias is not None:
                    score += sum(key_bias[h][a] * X[j][a] for a in range(d))
                weights[j] = score.exp()
            total = sum(weights.values())
            for j in seen:
                for c in range(m):
                    value = sum(X[j][a] * V[h][a][c] for a in range(d))
                    out[i][c] += weights[j] / total * value
    for i in range(n):
        for c in range(m):
            out[i][c] += output_bias[c] if output_bias is not None else 0
            out[i][c] += X[i][c] if residual else 0
    return out


def solve(X, B, unknown, steps=6, **layer):
    """Return the solution near X to about 40 digits; `unknown` lists the free entries (i, a)."""
    with localcontext() as context:
        context.prec = DIGITS
        X = [list(row) for row in X]
        for _ in range(steps):
            r = _residual(X, B, layer)
            columns = []
            for i, a in unknown:
                moved = [list(row) for row in X]
                moved[i][a] += STEP
                ahead = _residual(moved, B, layer)
                columns.append([(p - q) / STEP for p, q in zip(ahead, r, strict=True)])
            change = _gauss([list(row) for row in zip(*columns, strict=True)], r)
            for (i, a), c in zip(unknown, change, strict=True):
                X[i][a] -= c
        return X


def _residual(X, B, layer):
    out = attention(X, **layer)
    return [
        o - b
        for row, given in zip(out, B, strict=True)
        for o, b in zip(row, given, strict=True)
    ]


def _gauss(M, right):
    size = len(right)
    M = [[*row, r] for row, r in zip(M, right, strict=True)]
    for k in range(size):
        pivot = max(range(k, size), key=lambda i: abs(M[i][k]))
        M[k], M[pivot] = M[pivot], M[k]
        for i in range(size):
            if i != k:
                factor = M[i][k] / M[k][k]
                M[i] = [x - factor * y for x, y in zip(M[i], M[k], strict=True)]
    return [M[k][size] / M[k][k] for k in range(size)]
