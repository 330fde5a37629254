"""Each method's error on fresh queries against the queries asked, and its lower bound.

`make pictures` draws it: docs/error-against-queries.png.
"""

from __future__ import annotations

from collections.abc import Iterator

import show
from keyhole import extract, oracle
from keyhole.extract import Extraction
from show import Row


def table(quick: bool) -> dict[str, Extraction]:
    """Return one extraction by each method, from targets of the same dimension."""
    d, r, heads = (8, 2, 2) if quick else (32, 4, 4)
    head = oracle.plant("head", dim=d, seed=3)
    low = oracle.plant("head", dim=d, rank=r, seed=3)
    many = oracle.plant("multi-head", dim=d, heads=heads, seed=3)
    layer = oracle.plant("one-layer", dim=d, width=d, seed=3)
    last = oracle.plant("attention", dim=d, seed=3)
    every = oracle.plant("attention", dim=d, every_token=True, seed=3)
    bounded = oracle.Clipped(oracle.Rounded(head, 6), 10.0)
    return {
        "SingleHead": extract.SingleHead()(head),
        f"LowRank, r={r}": extract.LowRank()(low),
        f"NuclearNorm, r={r}": extract.NuclearNorm(rank=r)(low),
        "Tolerant, 6 decimals": extract.Tolerant(5e-7)(oracle.Rounded(head, 6)),
        "Tolerant, 6 decimals, norms <= 10": extract.Tolerant(5e-7, max_norm=10.0)(
            bounded
        ),
        "SignOnly, 1e-6": extract.SignOnly(accuracy=1e-6)(oracle.SignOnly(head)),
        f"MultiHead, {heads} heads": extract.MultiHead()(many),
        f"OneLayerTransformer, width {d}": extract.OneLayerTransformer()(layer),
        "FullOutput, last token": extract.FullOutput()(last),
        "FullOutput, every token": extract.FullOutput()(every),
    }


def run(quick: bool) -> Iterator[Row]:
    for name, result in table(quick).items():
        yield Row(
            name,
            f"{result.queries:,} queries, error {result.check.worst:.1e}"
            if result.check
            else "–",
            details=f"{result.status}; lower bound {result.lower_bound:,}; "
            + " ".join(f"{queries}:{error:.0e}" for queries, error in result.trace),
        )


if __name__ == "__main__":
    show.main(run)
