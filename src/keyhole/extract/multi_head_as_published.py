"""Many heads as published: 4Hd² − 2H + 1 queries, exact answers, H known.

*Provably Learning Multi-Head Attention with Queries* (arXiv 2608.03294). We had its
abstract, not its text: "by varying the number of copies of a token, our algorithm
obtains samples of a rational function whose interpolation separates the canonical
heads. Additional queries formed by adding selected token vectors then match the same
head across different queries", with exactly 4Hd² − 2H + 1 queries of up to 2H + 1
tokens. That determines the algorithm except for the choice of sums:

    f([x+δ, k times ; x]) − vᵀx = Σ_h a_h·k/(k + t_h),    a_h = v_hᵀδ,   t_h = exp(−δᵀW_hx).

2H values, k = 1 … 2H, are 2H linear equations for numerator and denominator; the roots
of the denominator are the −t_h, and the residues are the a_h. So each of d² pairs (δ_i,
x_j) gives a_h and the form δ_iᵀW_hx_j of every head, in some order (2Hd² queries). For
all pairs but (δ_1, x_1), a sum is measured as well (2H(d² − 1) queries), which shows
the order of heads. The queries are:

    f([x_1])                       1 query, which is vᵀx_1
    (δ_i, x_1)                     for all i
    (δ_1 + δ_i, x_1)               for i > 1: a_h and forms add up; the a_h give v_h, and so vᵀx
    (δ_i, x_j), (δ_i, x_1 + x_j)   for all i, one j > 1 after the other: forms add up

multi_head.py is our method. This one is a baseline: its equations for 2H coefficients
lose digits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from keyhole.core import Status, Unsuccessful
from keyhole.core.errors import expect_count
from keyhole.core.float64 import (
    arange,
    full,
    identity,
    normal,
    ones,
    random_stream,
    zeros,
)
from keyhole.extract.bilinear import ask_scores
from keyhole.extract.extraction import Step, setting
from keyhole.extract.judge import Method
from keyhole.oracle import planted
from keyhole.oracle.protocol import Oracle


@dataclass(frozen=True)
class MultiHeadAsPublished(Method):
    """Extraction of a known number of heads by rational interpolation (arXiv 2608.03294)."""

    heads: int = setting(2, "how many there are")
    seed: int = 0
    tolerance: float = 1e-8

    def __post_init__(self) -> None:
        expect_count("heads", self.heads)

    def expected_queries(self, dim: int) -> int:
        return 4 * self.heads * dim * dim - 2 * self.heads + 1

    def steps(self, oracle: Oracle) -> Iterator[Step]:
        d = oracle.dim
        H = self.heads
        stream = random_stream(self.seed)
        # Forms δᵀWx are about 1 if W is of ordinary size.
        delta, x = normal(stream, 2, d, d) / d**0.25
        alone = ask_scores(oracle, x[:1].unsqueeze(1)).expand(d)
        own = self._separated(oracle, delta, x[:1].expand_as(x), alone)
        sums = self._separated(
            oracle, delta[:1] + delta[1:], x[:1].expand_as(x[1:]), alone[1:]
        )
        at_first = torch.stack(
            [own[0], *map(_in_order, own[:1].expand_as(sums), own[1:], sums)]
        )
        values = torch.linalg.solve(delta, at_first[:, :, 0]).mT  # (H, d)
        forms = zeros(H, d, d)  # δ_iᵀ W_h x_j
        forms[:, :, 0] = at_first[:, :, 1].mT
        self._require_finite(values)
        unknowns = H * (d * d + d)
        nothing = zeros(H, d, d)
        yield Step(planted.MultiHead(list(nothing), list(values)), H * d, unknowns)
        v = values.sum(0)
        for j in range(1, d):
            last = x[j].expand_as(x)
            both = (x[0] + x[j]).expand_as(x)
            own = self._separated(oracle, delta, last, last @ v)
            sums = self._separated(oracle, delta, both, both @ v)
            sums[:, :, 0] *= 2  # a_h depends on δ alone, so it is the same in both
            forms[:, :, j] = torch.stack(list(map(_in_order, at_first, own, sums)))[
                :, :, 1
            ].mT
        W = torch.linalg.solve(delta, forms) @ torch.linalg.inv(x.mT)
        self._require_finite(W)
        yield Step(planted.MultiHead(list(W), list(values)), unknowns, unknowns)

    def _require_finite(self, found: Tensor) -> None:
        if not found.isfinite().all():
            raise Unsuccessful(
                Status.UNVERIFIED,
                f"no {self.heads} heads interpolate the answers: fewer answer, or float64 has too "
                f"few digits for equations of {2 * self.heads} unknowns",
            )

    def _separated(
        self,
        oracle: Oracle,
        delta: Tensor,
        x: Tensor,
        alone: Tensor,
    ) -> Tensor:
        """Return a_h and δᵀW_hx of all heads, (n, H, 2), for n pairs (δ, x) with f([x]) `alone`."""
        if not len(x):
            return zeros(0, self.heads, 2)
        copies = arange(1, 2 * self.heads + 1)
        key = (x + delta).unsqueeze(1)
        last = x.unsqueeze(1)
        answers = [
            ask_scores(oracle, torch.cat([key.expand(-1, int(k), -1), last], 1))
            for k in copies
        ]
        # Σ_h a_h/(k + t_h) = P(k)/Q(k), Q monic: sQ(k) = P(k) is linear in their
        # coefficients.
        s = (torch.stack(answers, 1) - alone[:, None]) / copies
        powers = copies[:, None] ** arange(0, self.heads + 1)
        lower = powers[:, :-1].expand(len(s), -1, -1)
        system = torch.cat([lower, -s.unsqueeze(2) * lower], 2)
        top = (s * powers[:, -1]).unsqueeze(2)
        solution, failed = torch.linalg.solve_ex(system, top)
        solution[failed != 0] = math.nan
        P, Q = solution.squeeze(2).split(self.heads, 1)
        return torch.stack(
            [_residues_and_forms(p, q) for p, q in zip(P, Q, strict=True)]
        )


def _residues_and_forms(p: Tensor, q: Tensor) -> Tensor:
    """Return a_h and −log t_h, (H, 2), of `P/Q` with Q monic, lowest coefficients first.

    The residue at a pole −t_h is P there, divided by the distances from the other
    poles.
    """
    if not (p.isfinite() & q.isfinite()).all():
        return full(math.nan, len(q), 2)
    companion = torch.diag(ones(len(q) - 1), -1)
    companion[:, -1] = -q
    poles = torch.linalg.eigvals(companion).real
    powers = poles[:, None] ** arange(0, len(q))
    apart = poles[:, None] - poles + identity(len(q))
    return torch.stack([powers @ p / apart.prod(1), -(-poles).log()], 1)


def _in_order(
    anchor: Tensor,
    other: Tensor,
    sums: Tensor,
) -> Tensor:
    """Return the rows (a_h, form) of `other` in the order of `anchor`.

    Rows of one head add up to a row of `sums`, in whatever place: the distance is a
    pair's cost.
    """
    added = anchor[:, None] + other  # (H, H, 2)
    size = added.abs().flatten(0, 1).amax(0).clamp(min=1e-300)
    off = ((added.unsqueeze(2) - sums) / size).abs().sum(-1).amin(2)
    _, order = linear_sum_assignment(off.nan_to_num(1e9).clamp(max=1e9).numpy())
    return other[torch.as_tensor(order)]
