"""Many heads, exactly: H(d² + d) queries, or H(2rd − r² + d) for rank r, and about H(2d + 130).

The answers come from `f(X) = Σ_h Σ_i softmax_i(x_iᵀ W_h x_N)·v_hᵀx_i`, H unknown.
Fix the asking token x and put `g_h = W_h x`. For one head l there are two **mask tokens** x+D1 and
x+D2 that take the attention of all other heads and none of its own (masks.py), so that

    f([x+δ ; x+D1 ; x+D2 ; x]) − f([x ; x+D1 ; x+D2 ; x]) = σ(g_lᵀδ)·v_lᵀδ:

one head alone, in the near field, and Theorem 4.1 of *Provably Learning Attention with Queries*
(arXiv 2601.16873) applies to it. Nothing is assumed about the v, nor about H against d. The stages:

    Σ_h v_h = f([e_i])                                        d queries
    far_field.py, crossings.py   the directions of g_h        about (d + 60)H
    rays.py                      v_h and g_h at one x_0       2dH
    columns.py                   W_h at all x                 d(d − 1)H + dH, less for low rank
    slopes.py                    heads with proportional W, which no mask parts

Without masks every crossing would have to be found again at d tokens; with them the far field is
needed at one token only and to a few digits, and all parameters come from the near field, to
rounding. (The published count, arXiv 2608.03294, is 4Hd² − 2H + 1.)

Limits. Heads with equal W act as one and heads with v = 0 are invisible (Proposition 7.1): what is
returned is the canonical form (canonical.py). The oracle must answer to about 1e-12 of its largest
answer, and take tokens of norm 1e13/|W|: rounded, noisy or clipped answers end in a status. The
fresh queries judge the function, not each head: a head whose v is 1e-6 of another's is known to
1e-5 only. Precision falls where lines crowd (H ≥ d): benchmarks/multi_head.py
prints the worst of its related cases. Of heads with positively proportional W at most three are
told apart.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Generator, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from keyhole.core import Status, Unsuccessful
from keyhole.core.errors import InputError
from keyhole.extract.bilinear import ask_scores
from keyhole.extract.extraction import Extraction
from keyhole.extract.heads.columns import Columns
from keyhole.extract.heads.far_field import Unlucky
from keyhole.extract.heads.near_field import Rays
from keyhole.extract.heads.rays import find_rays
from keyhole.extract.judge import settle
from keyhole.extract.step import Step
from keyhole.oracle import planted
from keyhole.oracle.protocol import BudgetExhausted, Oracle

_LINEAR = 1e-9  # length-one answers must be linear to this
_ATTEMPTS = 3  # tokens x_0
_WRONG = 1e-3  # beyond this an attempt has mistaken something, and the next is more cautious
_CAUTION = 8.0  # an opposite pair changes places, unseen, where W x passes through 0


@dataclass(frozen=True)
class MultiHead:
    """Exact extraction of any number of heads; `heads`, if given, is checked and not needed."""

    heads: int | None = None
    seed: int = 0
    tolerance: float = 1e-8

    def __post_init__(self) -> None:
        if self.heads is not None and self.heads < 1:
            raise InputError(f"expected 1 head or more, got {self.heads}")

    def __call__(self, oracle: Oracle) -> Extraction:
        return settle(self, oracle)

    def expected(self, dim: int) -> int | None:
        if self.heads is None:
            return None
        return self.heads * (dim * dim + 3 * dim + 60) + dim + 60

    def steps(self, oracle: Oracle) -> Iterator[Step]:
        d = oracle.dim
        stream = torch.Generator().manual_seed(self.seed)
        v = _sum_of_values(oracle, stream)
        nothing = torch.zeros(d, d, dtype=torch.float64)
        floor = None if self.heads is None else self.heads * (d * d + d)
        yield Step(planted.MultiHead([nothing], [v]), d, floor)
        best: Step | None = None
        reached, caution = math.inf, 1.0
        for attempt in range(_ATTEMPTS):
            try:
                step = yield from _attempt(oracle, v, stream, caution)
                miss = _miss(oracle, step.model, stream)
            except Unlucky:
                if attempt == _ATTEMPTS - 1 and best is None:
                    raise
                continue
            except BudgetExhausted:
                if best is not None:
                    yield best
                raise
            if miss < reached or best is None:
                best, reached = step, miss
            if miss <= self.tolerance / 10:
                break
            caution *= _CAUTION if miss > _WRONG else 1
        if best is not None:
            yield best
            self._count(len(best.model.tensors()["v"]))

    def _count(self, heads: int) -> None:
        if self.heads is not None and heads != self.heads:
            raise Unsuccessful(
                Status.MISMATCH,
                f"{heads} heads answer, not {self.heads}: equal heads act as one, and heads with "
                "v = 0 are invisible",
            )


def _sum_of_values(oracle: Oracle, stream: torch.Generator) -> Tensor:
    """Σ_h v_h from d answers of length one; four more tell whether they are linear.

    The v_h may add up to zero: an answer of length two tells what is large and what is rounding.
    """
    d = oracle.dim
    if d < 2:
        raise Unsuccessful(
            Status.NOT_APPLICABLE,
            "in one dimension all heads share one line, which no mask parts: SingleHead reads one",
        )
    v = ask_scores(oracle, torch.eye(d, dtype=torch.float64).unsqueeze(1))
    x = torch.randn(d, generator=stream, dtype=torch.float64)
    factors = torch.tensor([1.0, -1e3, 0.0], dtype=torch.float64)
    tests = factors.unsqueeze(1) * x
    answers = ask_scores(oracle, tests.unsqueeze(1))
    pair = torch.stack([x.roll(1), x]).unsqueeze(0)
    norm = float(torch.linalg.vector_norm(v) * torch.linalg.vector_norm(x))
    size = max(norm, float(ask_scores(oracle, pair).abs()))
    miss = float(((answers - tests @ v) / factors.abs().clamp(min=1)).abs().max())
    if miss > _LINEAR * size:
        raise Unsuccessful(
            Status.MISMATCH,
            "answers of length one are not linear to 1e-9: rounded, noisy, or no such model",
        )
    return v


def _attempt(
    oracle: Oracle, v: Tensor, stream: torch.Generator, caution: float
) -> Generator[Step, None, Step]:
    """One extraction from a fresh x_0; caution keeps the other tokens near it."""
    lines, rays = find_rays(oracle, v, stream)
    if not len(rays):
        return _only_zero(rays)
    columns: Columns | None = None
    half = False
    try:
        columns = Columns(oracle, lines, rays, v, stream, caution)
        while not columns.complete:
            columns.grow()
            if not half and 2 * columns.done > oracle.dim:
                half = True
                yield _step(rays, columns)
    except BudgetExhausted:
        yield _step(rays, columns)
        raise
    return _step(rays, columns)


def _only_zero(rays: Rays) -> Step:
    d = len(rays.x)
    if not bool(rays.v0.any()):
        raise Unsuccessful(Status.NOT_IDENTIFIABLE, "every answer is zero: no head is visible")
    model = planted.MultiHead([torch.zeros(d, d, dtype=torch.float64)], [rays.v0])
    return Step(model, d, d, remark="1 head, with W = 0")


def _step(rays: Rays, columns: Columns | None) -> Step:
    """Slope k of a ray is the head (c_k W, V_k); a head with W = 0 comes last.

    Before any columns are known, W is known at x_0.
    """
    W: list[Tensor] = []
    v: list[Tensor] = []
    only = rays.g.unsqueeze(2) * rays.x / (rays.x @ rays.x)
    for ray, matrix in enumerate(only if columns is None else columns.matrices):
        for k in range(int(rays.slopes[ray])):
            W.append(rays.c[ray, k] * matrix)
            v.append(rays.V[ray, k])
    d, more = len(rays.x), len(v) - len(rays)
    extra = more * (d + 1)
    known, floor = 2 * d * len(rays), len(rays) * (d * d + d)
    if columns is not None:
        known, floor = columns.known, columns.floor
    if bool(rays.v0.any()):
        W.append(torch.zeros(d, d, dtype=torch.float64))
        v.append(rays.v0)
        extra += d
    model = planted.MultiHead(W, v)
    return Step(model, known + extra, floor + extra, remark=_remark(rays, columns))


def _remark(rays: Rays, columns: Columns | None) -> str:
    """How many heads were found, of which ranks, and which of them are related."""
    heads = int(rays.slopes.sum()) + int(rays.v0.any())
    said = [f"{heads} head{'s' if heads > 1 else ''}"]
    ranks = [] if columns is None else sorted(set(columns.rank.tolist()))
    if ranks and ranks != [len(rays.x)]:
        said.append(
            "of rank " + (f"{ranks[0]}" if len(ranks) == 1 else f"{ranks[0]} to {ranks[-1]}")
        )
    opposite = sum(1 for count in Counter(rays.line.tolist()).values() if count > 1)
    proportional = int((rays.slopes > 1).sum())
    if opposite:
        said.append(f"{opposite} opposite pair{'s' if opposite > 1 else ''}")
    if proportional:
        said.append(f"{proportional} group{'s' if proportional > 1 else ''} of proportional W")
    if bool(rays.v0.any()):
        said.append("one with W = 0")
    return ", ".join(said)


def _miss(oracle: Oracle, model: Oracle, stream: torch.Generator) -> float:
    """Eight answers tell whether another x_0 is worth its price; the judge decides the rest."""
    tokens = torch.randn(2, 4, 4, oracle.dim, generator=stream, dtype=torch.float64)
    tokens[0] /= math.sqrt(oracle.dim)
    tokens = tokens.flatten(0, 1)
    answers = ask_scores(oracle, tokens)
    miss = (answers - ask_scores(model, tokens)).abs().view(2, 4).amax(1)
    return float((miss / answers.abs().view(2, 4).amax(1).clamp(min=1e-300)).max())
