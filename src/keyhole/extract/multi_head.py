"""Many heads, exactly: one query for each unknown number, and about H(2d + 130) more.

H heads have H(d² + d) unknowns, or H(2rd − r² + d) if their W have rank r. The target
is

    f(X) = Σ_h Σ_i softmax_i(x_iᵀ W_h x_N)·v_hᵀx_i

with H unknown. Fix the last token x and let `g_h = W_h x`. For one head l there are two
**mask tokens** x+D1 and x+D2 that take all attention of the other heads and none of its
own (heads/masks.py), so that

    f([x+δ ; x+D1 ; x+D2 ; x]) − f([x ; x+D1 ; x+D2 ; x]) = σ(g_lᵀδ)·v_lᵀδ:

this is one head alone, and Theorem 4.1 of *Provably Learning Attention with Queries*
(arXiv 2601.16873) applies to it. The v_h may be any, and H may exceed d. The stages:

    Σ_h v_h = f([e_i])                                                    d queries
    heads/far_field.py    the directions of g_h, from long δ              about (d + 60)H
    heads/rays.py         v_h and g_h at one x_0, from short δ;           2dH
                          heads with proportional W, which no mask separates
    `Columns`             W_h at all x                                    d²H, less for low rank

Without masks, the far field (long δ, where all σ are 0 or 1) would have to be searched
again at d tokens. With them, it is needed at one token and to a few digits, and all
parameters come from the near field, to rounding. docs/mathematics.md proves a bound on
all of it, `most_queries`. (arXiv 2608.03294, multi_head_as_published.py, takes 4Hd² −
2H + 1.)

Limits. Heads with equal W act as one, and heads with v = 0 are invisible (Proposition
7.1): the result is the canonical form (canonical.py). The oracle must answer to about
1e-12 of its largest answer, and take tokens of norm 1e13/|W|: rounded, noisy or clipped
answers end in a status. The fresh queries judge the function, not each head: a head
whose v is 1e-6 of another's is only known to 1e-5. Precision falls if there are as many
lines as dimensions or more: benchmarks/extraction.py prints the worst of such cases.
Heads with positively proportional W (in one dimension, all of one sign) are separated
if there are at most four, if their v do not add up to zero, and if the ratios of their
W are neither too close to 1 nor too large for float64. If not, the status is *not
applicable*; but if their v cancel, no far field shows them, and the fresh queries call
the result a *mismatch*.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from keyhole.core import Status, mismatch, not_identifiable
from keyhole.core.errors import InputError, expect_count
from keyhole.core.float64 import (
    EPSILON,
    Stream,
    full,
    identity,
    normal,
    random_stream,
    tensor,
    zeros,
)
from keyhole.core.numerics import thin_svd
from keyhole.core.text import number
from keyhole.extract.arithmetic import EXACT, digits, exact_decimals, own_error
from keyhole.extract.bilinear import ask_scores, lengths, max_abs, normalized
from keyhole.extract.extraction import Extraction, Step, setting
from keyhole.extract.heads.far_field import BadToken, Lines
from keyhole.extract.heads.masks import (
    IsolatedHeads,
    Rays,
    Rows,
    leak_probes,
    mask_others,
    read_logits,
    starting_with,
)
from keyhole.extract.heads.rays import find_rays
from keyhole.extract.judge import Exam, Method
from keyhole.extract.low_rank import degrees_of_freedom
from keyhole.oracle import planted
from keyhole.oracle.protocol import BudgetExhausted, Counted, Oracle, OracleError

_LINEAR = 1e-9  # the relative error to which answers of length one must be linear
_ATTEMPTS = 3  # tokens x_0 that are tried
_DECIMALS = 12  # answers rounded to more decimals count as exact
_WRONG = 1e-3  # after a larger error, the next attempt stays closer to x_0
# by this factor: opposite heads are exchanged unnoticed where W x passes 0
_CAUTION = 8.0


@dataclass(frozen=True)
class MultiHead(Method):
    """Exact extraction of any number of heads."""

    heads: int | None = setting(None, "how many there are; checked, not needed")
    seed: int = 0
    tolerance: float = 1e-8

    def __post_init__(self) -> None:
        expect_count("heads", self.heads)

    def expected_queries(self, dim: int) -> int | None:
        if self.heads is None:
            return None
        return self.heads * (dim * dim + 3 * dim + 60) + dim + 60

    def most_queries(self, dim: int, attempts: int = _ATTEMPTS) -> int | None:
        """Return the bound that docs/mathematics.md proves, for heads in general position."""
        if self.heads is None:
            return None
        tests = 1 if self.heads + 1 < dim // 2 else 3  # `leak_probes` of a mask
        each = self.heads * (dim * dim + (3 + tests) * dim + 667) + 170
        return dim + 4 + attempts * each

    def __call__(self, oracle: Oracle) -> Extraction:
        result = super().__call__(oracle)
        if result.status is not Status.MISMATCH:
            return result
        counted = Counted(oracle)
        inexact = False
        with suppress(BudgetExhausted, OracleError, InputError):
            inexact = _inexact(counted)
        result = replace(result, queries=result.queries + counted.queries)
        if not inexact:
            return result
        reason = (
            f"{result.reason}; the answers are rounded or noisy: heads are read one by one from "
            "answers exact to 1e-12 of themselves, and fitted (Fitted, auto) from others"
        )
        return replace(result, status=Status.UNVERIFIED, reason=reason, model=None)

    def steps(self, oracle: Oracle) -> Iterator[Step]:
        d = oracle.dim
        stream = random_stream(self.seed)
        v = _sum_of_values(oracle, stream)
        unknowns = None if self.heads is None else self.heads * (d * d + d)
        yield Step(planted.MultiHead([zeros(d, d)], [v]), d, unknowns)
        best: Step | None = None
        least = math.inf
        caution = 1.0
        for attempt in range(_ATTEMPTS):
            try:
                step = yield from _attempt(oracle, v, stream, caution)
                # Eight answers show whether another x_0 is worth its cost.
                seed = int(torch.randint(2**31, (), generator=stream))
                error = Exam.draw(oracle, seed, lengths=(4,)).grade(step.model).worst
            except BadToken:
                if attempt == _ATTEMPTS - 1 and best is None:
                    raise
                continue
            except BudgetExhausted:
                if best is not None:
                    yield best
                raise
            if error < least or best is None:
                best = step
                least = error
            if error <= self.tolerance / 10:
                break
            if error > _WRONG:
                caution *= _CAUTION
        if best is None:
            return
        yield best
        heads = len(best.model.tensors()["v"])
        if self.heads not in (None, heads):
            raise mismatch(
                f"{heads} heads answer, not {self.heads}: equal heads act as one, and heads "
                "with v = 0 are invisible"
            )


def _inexact(oracle: Oracle) -> bool:
    """Return whether answers are rounded, or change for equivalent queries."""
    questions = normal(random_stream(0), 4, 2, oracle.dim)
    answers = ask_scores(oracle, questions)
    if (answers == answers[0]).all():
        return False
    own = own_error(oracle, questions, answers, EPSILON)
    if digits(answers) > EXACT or exact_decimals(answers, most=_DECIMALS) is not None:
        return True
    return bool((own > 1e-12 * max_abs(answers)).all())


def _sum_of_values(oracle: Oracle, stream: Stream) -> Tensor:
    """Return Σ_h v_h from d answers of length one, with four more to test whether they are linear.

    The v_h may add up to zero, so an answer of length two shows what size is more than
    rounding.
    """
    d = oracle.dim
    v = ask_scores(oracle, identity(d)[:, None])
    x = normal(stream, d)
    factors = tensor([1.0, -1e3, 0.0])
    tests = factors[:, None] * x
    residual = ask_scores(oracle, tests[:, None]) - tests @ v
    pair = torch.stack([-2 * x.roll(1), x])[None]
    size = max(float(lengths(v) * lengths(x)), float(ask_scores(oracle, pair).abs()))
    if max_abs(residual / factors.abs().clamp(min=1)) > _LINEAR * size:
        raise mismatch(
            "answers of length one are not linear to 1e-9: no heads explain them"
        )
    return v


def _attempt(
    oracle: Oracle,
    v: Tensor,
    stream: Stream,
    caution: float,
) -> Generator[Step, None, Step]:
    """Run one extraction from a fresh x_0; caution keeps the other tokens near it."""
    lines, rays = find_rays(oracle, v, stream)
    if not len(rays):
        if len(lines.g):
            raise BadToken(
                Status.NOT_APPLICABLE, "heads with proportional W and v that cancel"
            )
        if not rays.v0.any():
            raise not_identifiable("every answer is zero: no head is visible")
        return _step(rays, None)
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


def _step(rays: Rays, columns: Columns | None) -> Step:
    """Return all heads so far: slope k of a ray is the head (c_k W, V_k); W = 0 comes last.

    Before any columns are known, W is known at x_0.
    """
    d = len(rays.x)
    matrices = rays.g[..., None] * rays.x / (rays.x @ rays.x)
    known = 2 * d * len(rays)
    unknowns = len(rays) * (d * d + d)
    if columns is not None:
        matrices = columns.matrices
        known = columns.known
        unknowns = columns.unknowns
    W: list[Tensor] = []
    v: list[Tensor] = []
    for ray, matrix in enumerate(matrices):
        for k in range(int(rays.slopes[ray])):
            W.append(rays.c[ray, k] * matrix)
            v.append(rays.V[ray, k])
    extra = (len(v) - len(rays)) * (d + 1)  # c_k and V_k of each further slope
    if rays.v0.any():
        W.append(zeros(d, d))
        v.append(rays.v0)
        extra += d
    model = planted.MultiHead(W, v)
    return Step(model, known + extra, unknowns + extra, remark=_remark(rays, columns))


def _remark(rays: Rays, columns: Columns | None) -> str:
    """Return how many heads were found, of which ranks, and how they are related."""
    constant = bool(rays.v0.any())
    heads = int(rays.slopes.sum()) + constant
    parts = [number(heads, "head", "heads")]
    if columns is not None:
        least = int(columns.rank.min())
        most = int(columns.rank.max())
        if most > least:
            parts.append(f"of rank {least} to {most}")
        elif least < len(rays.x):
            parts.append(f"of rank {least}")
    opposite = int((torch.bincount(rays.line) > 1).sum())
    proportional = int((rays.slopes > 1).sum())
    if opposite:
        parts.append(number(opposite, "opposite pair", "opposite pairs"))
    if proportional:
        parts.append(number(proportional, "group", "groups") + " of proportional W")
    if constant:
        parts.append("one with W = 0" if heads > 1 else "with W = 0")
    return ", ".join(parts)


# W of every ray on all of space, of full or low rank, from isolated gates.
#
# Take last tokens `x_j = x_0 + η_j u_j`, with u_j orthonormal and orthogonal to x_0.
# The masks built at x_0 still hold there, since their margins are relative to |D|. So
#
#     W x_0 = g_0,    W u_j = (g(x_j) − g_0) / η_j.
#
# One answer per (x_j, ray) tests the masks, and is the baseline of the others. Its
# probe ω has `g_kᵀω` of about 4 for every other head k, so that a leak shows, and vᵀω =
# 0 for its own head, so that a sound mask leaves nothing of it. (If there are many
# lines, or two heads on one, it takes three answers.) If a mask leaks, η_j is halved.
# The baseline is measured, not predicted, so that the oracle's rounding of `v_kᵀ(x+D)`
# is the same in it and in the answers that it is subtracted from.
#
# Low rank (Theorem 5.1 of arXiv 2601.16873, adaptively). Columns are measured on all d
# rows, a few more at a time, until one is in the span of the others. Then the singular
# vectors of all of them span the columns of W, and every further column needs r answers
# instead of d: about `rd + (d − r)r` in all, and d − r more for each column that
# brought nothing new.

_HALVINGS = 14
_REACH = 6.0  # the largest gᵀδ of probes, for which masks are made
_NOISE = 256.0  # a column must be so many times above rounding to count as new


@dataclass(frozen=True)
class Tokens:
    """The last tokens and the answers at δ = 0."""

    B: Tensor  # (d, d): x_0's direction, then the u_j
    eta: Tensor  # (d,): |x_0|, then the η_j
    x: Tensor  # (d, d): x_0, then the x_j
    base: Tensor  # (d, R): the baselines


class Columns:
    """Measures the columns `W u_j` of every ray, a few at a time."""

    def __init__(
        self,
        oracle: Oracle,
        lines: Lines,
        rays: Rays,
        v: Tensor,
        stream: Stream,
        caution: float,
    ) -> None:
        count, d = rays.g.shape
        reach = _REACH * lengths(lines.g) / lengths(rays.g)[:, None]
        values = rays.other_values()
        masks = mask_others(lines, rays.line, rays.sign, reach, stream, values)
        self._isolated = IsolatedHeads(oracle, masks.D, rays.v0)
        self._rays = rays
        # η_j / |x_0| to begin with: masks of little margin hold less far from x_0.
        step = min(0.5, 0.4 * float(masks.margin.min()) * d**0.5 / 3.5) / caution
        self._tokens = last_tokens(self._isolated, lines, rays, v, step, stream)
        self._rows = Rows.design(rays.frame[None], rays)
        self._measured = zeros(count, d, d)  # g_0, then g_j − g_0
        self._measured[:, 0] = rays.g
        self._basis = zeros(count, d, d)
        self._basis[:, 0] = normalized(rays.g)
        signal = (self._rows.deltas[:, 0] * rays.v).sum(1).abs()
        size = lengths(masks.D).amax(1) + lengths(rays.x)
        noise = EPSILON * float(lengths(rays.V).max()) * size / signal
        self._resolution = _NOISE * noise * lengths(rays.g)
        # how many columns are measured on all rows
        self._stop = torch.full((count,), d)
        self.rank = torch.full((count,), d)
        self.done = 1
        self.complete = False

    @property
    def matrices(self) -> Tensor:
        """W (R, d, d) of each ray's first slope, zero where it was not measured."""
        return (self._measured / self._tokens.eta[:, None]).mT @ self._tokens.B

    @property
    def unknowns(self) -> int:
        """The degrees of freedom of all heads, as far as their ranks are known."""
        d = len(self._rays.x)
        return sum(degrees_of_freedom(d, int(r)) for r in self.rank)

    @property
    def known(self) -> int:
        """How many of the unknowns are measured.

        For a W of rank r, m columns are r numbers each once their span, r(d − r) more,
        is known.
        """
        d = len(self._rays.x)
        if self.complete:
            return self.unknowns
        columns = self._stop.clamp(max=self.done).tolist()
        return sum(
            d + min(d * m, r * (d - r + m))
            for m, r in zip(columns, self.rank.tolist(), strict=True)
        )

    def grow(self) -> None:
        """Measure a few more columns, or the rest once every rank is known."""
        d = len(self._rays.x)
        live = (self._stop == d).nonzero()[:, 0]
        if not len(live) or self.done == d:
            self._finish()
            return
        m = self.done
        stop = min(d, m + max(1, min(m // 2, 4), m // 4))
        rows = self._rows.part(live)
        z = self._read(rows.deltas, live, m, stop)
        self._measured[live, m:stop] = rows.solve(z) - self._rays.g[live, None]
        self._find_low_ranks(live, stop)
        self.done = stop

    def _read(
        self,
        deltas: Tensor,
        rays: Tensor,
        start: int,
        stop: int,
    ) -> Tensor:
        """Return the logits (J, w, k) of probes (w, k, d) of some rays, for a range of columns."""
        some = slice(start, stop)
        used = torch.arange(deltas.shape[1]) < self.rank[rays, None]
        answered = read_logits(
            self._isolated,
            self._rays,
            self._tokens.x[some],
            self._tokens.base[some],
            deltas[used],
            rays[:, None].expand_as(used)[used],
        )
        if answered.isnan().any():
            raise BadToken(
                Status.MISMATCH, "an isolated gate answers outside its range"
            )
        z = zeros(stop - start, *used.shape)
        z[:, used] = answered
        return z

    def _find_low_ranks(self, live: Tensor, stop: int) -> None:
        """Set rank and span where one of the last columns is in the span of those before it."""
        fresh = self._measured[live, self.done : stop]
        known = self._basis[live, : self.done]
        for _ in range(2):  # twice against rounding
            fresh = fresh - (fresh @ known.mT) @ known
        Q, R = torch.linalg.qr(fresh.mT)
        new = R.diagonal(dim1=1, dim2=2).abs().amin(1) > self._resolution[live]
        self._basis[live, self.done : stop] = Q.mT
        low = live[~new]
        if not len(low):
            return
        measured = self._measured[low, :stop]
        _, sizes, span = thin_svd(measured)
        above = sizes > stop**0.5 * self._resolution[low, None]
        self._stop[low] = stop
        self.rank[low] = above.sum(1).clamp(min=1)
        self._basis[low, :stop] = span * above[..., None]

    def _finish(self) -> None:
        """Measure the other columns of rays of low rank, on as many rows as the rank."""
        d = len(self._rays.x)
        for stop in self._stop[self._stop < d].unique().tolist():
            rays = (self._stop == stop).nonzero()[:, 0]
            span = self._basis[rays, : int(self.rank[rays].max())]
            rows = Rows.design(span, self._rays.part(rays))
            g = rows.solve(self._read(rows.deltas, rays, stop, d))
            self._measured[rays, stop:] = g - self._rays.g[rays, None]
            self._measured[rays] = (self._measured[rays] @ span.mT) @ span
        self.complete = True


def last_tokens(
    isolated: IsolatedHeads,
    lines: Lines,
    rays: Rays,
    v: Tensor,
    step: float,
    stream: Stream,
) -> Tokens:
    """Return x_j as far from x_0 as every mask allows, each tested by the answer at δ = 0."""
    count, d = rays.g.shape
    size = float(lengths(rays.x))
    B = starting_with(rays.x[None], rays.frame[None])[0]
    B[0] = rays.x / size
    probes = leak_probes(lines, rays.line, rays.g, rays.V, stream)
    k = probes.shape[1]
    owner = torch.arange(count).repeat_interleave(k)

    def answers(x: Tensor) -> Tensor:
        y = isolated.grid(x, probes.flatten(0, 1), owner)
        return y.view(len(x), count, k)

    origin = answers(rays.x[None])
    shift = origin - v @ rays.x  # the same at every x while masks hold
    values = float(lengths(rays.V).max())
    noise = 2e-14 * values * (lengths(isolated.D).amax(1) + size)
    # of own values
    inexact = torch.where(rays.slopes > 1, 1e-10, 1e-12 if k > 1 else 2e-14)
    noise = noise + inexact * values * lengths(probes).amax(1)
    eta = full(step * size, d)
    eta[0] = 0
    base = origin[..., 0].repeat(d, 1)
    pending = torch.arange(1, d)
    for _ in range(_HALVINGS):
        x = rays.x + eta[pending, None] * B[pending]
        y = answers(x)
        base[pending] = y[..., 0]
        residual = y - shift - (x @ v)[:, None, None]
        leaks = residual.abs().amax(2) > noise
        pending = pending[leaks.any(1)]
        if not len(pending):
            x = rays.x + eta[:, None] * B
            eta[0] = size
            return Tokens(B, eta, x, base)
        eta[pending] /= 2
    raise BadToken(Status.MISMATCH, "no last tokens near x_0 keep the masks")
