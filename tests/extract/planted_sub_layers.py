"""Random sub-layers, for the tests of several modules."""

from __future__ import annotations

import torch

from keyhole.oracle import SubLayer


def planted(
    d=12, heads=3, groups=3, k=4, rotary=False, biases=True, seed=0, **more
) -> SubLayer:
    """Scores of about 1 for tokens of norm √d, every head of its own."""
    stream = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=stream, dtype=torch.float64)

    speeds = 10000.0 ** -(torch.arange(0, k, 2, dtype=torch.float64) / k)
    return SubLayer(
        Q=normal(heads, d, k) * d**-0.5 * k**-0.25,
        q=normal(heads, k) * biases,
        K=normal(groups, d, k) * d**-0.5 * k**-0.25,
        V=normal(groups, d, k) * d**-0.5,
        O=normal(heads, k, d) * k**-0.5,
        b=normal(d) * biases,
        frequencies=speeds.repeat(groups, 1) if rotary else normal(groups, 0),
        **more,
    )


BERT = {}
LLAMA = {
    "heads": 4,
    "groups": 2,
    "k": 4,
    "d": 16,
    "rotary": True,
    "biases": False,
    "epsilon": 1e-5,
    "residual": True,
    "causal": True,
}
