"""Problems with a planted input, whose outputs come from the NumPy reference."""

from __future__ import annotations

from dataclasses import replace

import reference_stack
import torch

from keyhole import invert


def gaussians(seed):
    stream = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=stream, dtype=torch.float64)


def plant(
    n,
    d,
    seed=0,
    *,
    heads=1,
    m=None,
    s=0.3,
    v=1.0,
    biases=False,
    equal_tokens=False,
    **options,
):
    """Return (problem, X, maps)."""
    draw = gaussians(seed)
    X = draw(n, d)
    m = m or d
    if equal_tokens:
        X[1] = X[0]
    W = s * draw(heads, d, d) / d**0.5
    V = v * draw(heads, d, m)
    more = {"key_bias": draw(heads, d), "output_bias": draw(m)} if biases else {}
    arrays = {name: tensor.numpy() for name, tensor in more.items()}
    witness = reference_stack.output(
        X.numpy(), W.numpy(), V.numpy(), **options, **arrays
    )
    seen = (options.get("causal", False), arrays.get("key_bias"))
    maps = reference_stack.maps(X.numpy(), W.numpy(), *seen)
    if heads == 1:
        W = W[0]
        V = V[0]
        if biases:
            more["key_bias"] = more["key_bias"][0]
    problem = invert.Problem(W, V, torch.from_numpy(witness), **options, **more)
    return problem, X, torch.from_numpy(maps if heads > 1 else maps[0])


def plant_stack(n, d, depth, seed=0, *, residual=True, causal=False, v=1.0):
    """Return (stack, X)."""
    draw = gaussians(seed)
    X = draw(n, d)
    layers = []
    flow = X.numpy()
    for _ in range(depth):
        W = 0.3 * draw(d, d) / d**0.5
        V = v * draw(d, d) / (d * depth) ** 0.5
        blank = torch.zeros(n, d, dtype=torch.float64)
        layers.append(invert.Problem(W, V, blank, residual=residual, causal=causal))
        weights = (W.numpy()[None], V.numpy()[None])
        flow = reference_stack.output(flow, *weights, causal=causal, residual=residual)
    return (*layers[:-1], replace(layers[-1], B=torch.from_numpy(flow))), X


def off(solution, X):
    """Return the largest error, relative to the largest entry."""
    return float((solution - X).abs().max() / X.abs().max())
