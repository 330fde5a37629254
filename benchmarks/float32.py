"""Attention in float32, as in PyTorch modules: which kinds are extracted, and how precisely.

All modules with weights in float32 that `extract.run` claims to cover: 27 single heads
(d = 8, 16, 32, three scales, three seeds), and 54 with an output bias, biased
projections, a temperature, a LayerNorm in front, or 2 or 4 heads. The error of a copy
is measured here, against the same module in float64 on 64 fresh sequences of 1 to 8
tokens, and compared with the module's own error on them. Modules of other kinds (cubed
scores, a window of four tokens, keys that depend on the position) must not be called
recovered.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

import show
from keyhole import extract
from keyhole.extract import Status
from planted import fresh_error
from show import Row

KINDS = ("output bias", "biases", "temperature", "LayerNorm", "2 heads", "4 heads")
OTHERS = ("cubed scores", "window", "positions")
DIMS = (8, 16, 32)
SCALES = (0.3, 1.0, 3.0)
SEEDS = range(3)


class Heads(nn.Module):
    """`softmax(x_last W Xᵀ) X v` and common additions to it."""

    def __init__(self, kind: str, dim: int, scale: float, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.kind = kind
        self.dim = dim
        heads = int(kind[0]) if kind.endswith("heads") else 1
        self.W = nn.Parameter(scale * torch.randn(heads, dim, dim) / math.sqrt(dim))
        self.v = nn.Parameter(torch.randn(heads, dim))
        self.norm = nn.LayerNorm(dim)
        nn.init.uniform_(self.norm.weight, 0.5, 1.5)
        nn.init.normal_(self.norm.bias, 0, 0.3)
        self.query_bias = nn.Parameter(torch.randn(dim))
        self.key_bias = nn.Parameter(torch.randn(dim))
        self.bias = nn.Parameter(torch.randn(()))

    @torch.no_grad()
    def forward(self, sequences: Tensor) -> Tensor:
        X = sequences.to(self.W.dtype)
        if self.kind == "LayerNorm":
            X = self.norm(X)
        keys = X
        last = X[:, -1]
        if self.kind == "biases":
            keys = X + self.key_bias
            last = last + self.query_bias
        scores = torch.einsum("bnd,hde,be->bhn", keys, self.W, last)
        if self.kind == "temperature":
            scores = scores / math.sqrt(self.dim)
        if self.kind == "cubed scores":
            scores = scores**3
        if self.kind == "positions":
            scores = scores + 0.1 * torch.arange(X.shape[1], dtype=X.dtype)
        if self.kind == "window":
            scores = scores[..., -4:]
            X = X[:, -4:]
        answers = torch.einsum("bhn,bnd,hd->b", scores.softmax(-1), X, self.v)
        if self.kind in ("output bias", "biases"):
            answers = answers + self.bias
        return answers.double()


def run(quick: bool, processes: int = 1) -> Iterator[Row]:
    dims, seeds = ((8,), range(1)) if quick else (DIMS, SEEDS)
    scales = (1.0,) if quick else SCALES
    plain = [
        Heads("1 heads", d, scale, seed)
        for d in dims
        for scale in scales
        for seed in seeds
    ]
    yield _row(f"{len(plain)} heads", plain, len(plain) - (not quick), processes)
    most = DIMS[:1] if quick else DIMS
    rest = [Heads(kind, d, 1.0, seed) for kind in KINDS for d in most for seed in seeds]
    what = f"{len(rest)} with biases, temperature, LayerNorm, heads"
    yield _row(what, rest, len(rest) * 8 // 9, processes)
    others = [Heads(kind, 8, 1.0, seed) for kind in OTHERS for seed in seeds]
    claimed = [
        f"{module.kind}: {result.status}"
        for module in others
        if (result := extract.run(module)).status is Status.RECOVERED
    ]
    what = f"{len(others)} of other kinds called recovered"
    yield show.exactly(what, len(claimed), 0, "; ".join(claimed))


def attacked(module: Heads) -> dict[str, Any]:
    result = extract.run(module)
    exact = copy.deepcopy(module).double()
    off, own = (
        fresh_error(exact, each, range(1, 9), 8) for each in (result.model, module)
    )
    return {
        "kind": module.kind,
        "dim": module.dim,
        "status": str(result.status),
        "error": None if result.model is None else off,
        "own": own,
        "queries": result.queries,
        "reason": result.reason,
    }


def _row(what: str, modules: list[Heads], least: int, processes: int) -> Row:
    """Count the modules recovered to within 16 times their own error."""
    rows, seconds = show.timed(
        lambda: list(show.spread_out(attacked, modules, processes))
    )
    statuses = Counter(row["status"] for row in rows)
    ratios = [
        row["error"] / row["own"] for row in rows if row["status"] == Status.RECOVERED
    ]
    good = sum(ratio <= 16 for ratio in ratios)
    worst = max(ratios, default=0.0)
    queries = sum(row["queries"] for row in rows)
    met = good >= least and not statuses[str(Status.MISMATCH)]
    found = ", ".join(f"{count} {status}" for status, count in statuses.most_common())
    return Row(
        what,
        f"{good} recovered",
        f"≥ {least}, no mismatch",
        met,
        f"{found}; errors up to {worst:.1f} times the module's own; {queries:,} queries, "
        f"{seconds:.0f} s",
        run={"modules": rows},
    )


if __name__ == "__main__":
    show.main(run)
