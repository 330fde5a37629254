"""Attention layers, for the tests of several modules."""

from __future__ import annotations

from keyhole.oracle.planted import Attention
from keyhole.oracle.storage import plant

KINDS = [(False, False), (True, False), (True, True)]  # (every token, causal)


def layer(d=6, heads=1, m=6, every=True, causal=False, seed=0, **more) -> Attention:
    planted = plant(
        "attention",
        dim=d,
        heads=heads,
        outputs=m,
        every_token=every,
        causal=causal,
        seed=seed,
        **more,
    )
    assert isinstance(planted, Attention)
    return planted
