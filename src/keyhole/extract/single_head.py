"""One head, exactly, with d² + d queries.

Theorem 4.1 of *Provably Learning Attention with Queries* (arXiv 2601.16873): for v ≠ 0
the parameters of `f(X) = Σ_i softmax_i(x_iᵀ W x_N)·vᵀx_i`, for tokens x_1 … x_N, are
learnable from value queries:

    v_i = f([e_i])                                                    d queries
    δᵀWx = logit((f([x+δ ; x]) − vᵀx) / vᵀδ)  for d probes δ, d tokens x   d² queries

where the d probes δ, as rows of Δ, and the d tokens x, as rows of X, are bases. These
numbers are `Z = Δ W Xᵀ`, which is solved for W. The theorem takes unit vectors. For
precision (bilinear.py) we rotate both bases at random, and add v/‖v‖ to each probe. d²
+ d is also the number of unknowns, so no attack on scores can need fewer queries
without knowing more.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from keyhole.core.float64 import full, random_stream
from keyhole.extract.bilinear import (
    BilinearForms,
    ProbeBasis,
    random_orthogonal,
    read_values,
)
from keyhole.extract.extraction import Step
from keyhole.extract.judge import Method
from keyhole.oracle.planted import Head
from keyhole.oracle.protocol import BudgetExhausted, Oracle


@dataclass(frozen=True)
class SingleHead(Method):
    """Exact extraction of one head from its scores (Theorem 4.1)."""

    seed: int = 0
    tolerance: float = 1e-8

    def expected_queries(self, dim: int) -> int:
        return dim * dim + dim

    def steps(self, oracle: Oracle) -> Iterator[Step]:
        d = oracle.dim
        v = read_values(oracle)
        stream = random_stream(self.seed)
        probes = ProbeBasis.draw(v, stream)
        X = random_orthogonal(d, stream)
        Zt = full(math.nan, d, d)  # Zᵀ: row j is Δ W x_j

        def step_after(columns: int) -> Step:
            # X is orthogonal, so W = Δ⁻¹ZX. Of fewer columns of Z and rows of X this is
            # W for the tokens x_j that were asked about, and zero for the others.
            W = probes.solve(Zt[:columns].mT) @ X[:columns]
            return Step(Head(W, v), known=d + columns * d, unknowns=d * d + d)

        yield step_after(0)
        forms = BilinearForms(oracle, v)
        try:
            # Steps at 1, 2, 4, … columns cost little more than the last step alone.
            powers = [2**k for k in range(d.bit_length()) if 2**k < d]
            for start, stop in itertools.pairwise([0, *powers, d]):
                forms.grid(probes.deltas, X[start:stop], Zt[start:stop])
                yield step_after(stop)
        except BudgetExhausted:  # the columns that are complete still count
            yield step_after(int((~Zt.isnan().any(1)).sum()))
            raise
