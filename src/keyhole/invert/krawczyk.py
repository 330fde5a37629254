"""Certificates: a proof that exactly one solution lies within a stated distance of an input X̂.

The Krawczyk test (R. Krawczyk 1969; see S. M. Rump, *Verification methods*, Acta
Numerica 2010, Section 13). Let `r(X) = attention(X) − B`, let `Y` be any matrix (here
the float64 inverse of J at X̂), and let J(box) enclose the derivatives over the box X̂
± ρ. If, entry by entry,

    |Y r(X̂)| + |I − Y J(box)|·ρ ≤ ρ      and      ‖I − Y J(box)‖∞ < 1

then the box holds exactly one solution, and its distance from X̂ is at most the left
side. The reason is that `X ↦ X − Y r(X)` maps the box into itself and contracts it, and
that Y has an inverse.

How it is computed:
- Ball arithmetic evaluates everything (`Balls`), and every bound is rounded upwards. Only Y, M and
  ρ come from float64; the proof does not depend on their accuracy.
- r, J and Y are those of the mixed equations `r(X) M`, where M is I or V⁻¹, whichever promises
  narrower bounds.
- ρ starts at |Y r|. While the left side exceeds ρ, it becomes the next ρ, so that the smallest box
  is found from below.

What is proved:
- `radius` bounds the distance from the given X̂ to the solution, in every entry. X̂ is not polished
  first, and gets no certificate if it is far from a solution.
- Uniqueness is local: other inputs outside the box may have the same output.
- The proof takes B as exact. `radius_within` holds for every output within ±τ of B, entry by entry:
  r becomes r ± τ, so |Y r| becomes |Y r| + τ|Y|1.
- The test needs as many equations as unknowns and a non-singular J; otherwise the reason says so.
"""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from keyhole.core.errors import InputError, expect_count, expect_number, optional
from keyhole.core.result import Result
from keyhole.invert.derivatives.equations import Equations
from keyhole.invert.problem import Problem

if TYPE_CHECKING:
    from flint import arb, arb_mat


BITS = 128
_ATTEMPTS = 8  # boxes of growing size
_MARGIN = (
    1.02  # growth of the next box, because the contraction factor grows with the box
)


@dataclass(frozen=True)
class Certificate(Result):
    """Proof that exactly one solution lies within `radius` of X, or the `reason` why there is none.

    `radius_within` is such a radius for every output within ±`tolerance` of B, or None
    if that is not proved. `condition` is a float64 estimate of the Jacobian's condition
    number and no part of the proof.
    """

    radius: float | None
    reason: str
    radius_within: float | None = None
    tolerance: float = 0.0
    condition: float | None = None
    unknowns: int = 0
    bits: int = BITS
    seconds: float = 0.0

    kind: ClassVar[str] = "certificate"

    @property
    def proved(self) -> bool:
        return self.radius is not None

    def contents(self) -> dict[str, Any]:
        """Return data for JSON, which has no infinity: a singular system has no condition."""
        data = asdict(self)
        if self.condition is not None and not math.isfinite(self.condition):
            data["condition"] = None
        return {"proved": self.proved, **data}

    def summary(self) -> str:
        if self.radius is None:
            return f"no certificate: {self.reason}"
        return (
            f"proved: exactly one input with this output lies within {self.radius:.1e}"
        )


def certify(
    problem: Problem,
    X: Tensor,
    *,
    tolerance: float | None = None,
    bits: int = BITS,
) -> Certificate:
    """Prove that a solution lies near X, or say why that cannot be proved.

    `tolerance` (τ) replaces that of the problem. `bits` is the precision of the ball
    arithmetic.
    """
    started = time.perf_counter()
    X = _checked(problem, X)
    tolerance = problem.tolerance if tolerance is None else tolerance
    expect_number("tolerance", tolerance, least=0)
    expect_count("bits", bits, least=64)
    flint()
    unknowns = int(problem.unknown.sum())
    blank = Certificate(None, _unfit(problem, X), None, tolerance, None, unknowns, bits)
    certificate = blank if blank.reason else _attempt(problem, X, blank)
    return replace(certificate, seconds=time.perf_counter() - started)


def _checked(problem: Problem, X: Tensor) -> Tensor:
    # Callers without a type checker may pass anything.
    if not isinstance(X, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError(f"expected X as a torch.Tensor, got {type(X).__name__}")
    if X.shape != (problem.length, problem.dim) or X.is_complex():
        got = "×".join(map(str, X.shape)) or "a number"
        raise InputError(
            f"expected X of shape {problem.length}×{problem.dim}, real, got {got}, {X.dtype}"
        )
    return X.detach().cpu().double()


def _unfit(problem: Problem, X: Tensor) -> str:
    """Return why the test does not apply, or "" if nothing shows that before the computation."""
    if problem.fault:
        return f"does not apply: {problem.fault}"
    if not X.isfinite().all():
        wrong = int((~X.isfinite()).sum())
        return f"does not apply: X holds {wrong} NaN or infinite numbers"
    if problem.gamma > 0:
        return (
            "does not apply: with γ > 0 the solution minimises a sum and does not reproduce the "
            "output exactly; certify against the problem with γ = 0"
        )
    free = problem.unknown.cpu()
    equations = problem.B.numel()
    unknowns = int(free.sum())
    if equations != unknowns:
        if equations > unknowns:
            kind = "with more equations, a rounded output has no exact solution"
        else:
            kind = "with fewer equations, whole families of inputs give the same output"
        return (
            "does not apply: the proof needs as many equations as unknowns, and there are "
            f"{equations} equations for {unknowns} unknowns; {kind}"
        )
    if problem.known is not None:
        if unknowns < X.numel():
            off = float((X - problem.known.cpu())[~free].abs().max())
        else:
            off = 0
        if off > 0:
            return (
                f"does not apply: X contradicts the known entries, by up to {off:.1e}"
            )
    return ""


def _attempt(
    problem: Problem,
    X: Tensor,
    blank: Certificate,
) -> Certificate:
    J = Equations.of(problem, "cpu").jacobian(X.unsqueeze(0))[0]
    J = J[:, problem.unknown.cpu().flatten()]
    if not J.isfinite().all():
        return replace(
            blank, reason="does not apply: the layer overflows float64 at this X"
        )
    Y, mix = _preconditioners(problem, J)
    values = torch.linalg.svdvals(J)
    condition = float(values[0] / values[-1]) if values[-1] > 0 else math.inf
    blank = replace(blank, condition=condition)
    singular = (
        "does not apply: at this X the equations are singular, or too close to it for float64 "
        f"(condition {condition:.0e}): some change of X leaves the output as it is, so the "
        "output alone does not determine X. Possible causes are a V without an inverse, or two "
        "equal tokens"
    )
    if not Y.isfinite().all():
        return replace(blank, reason=singular)
    with flint().ctx.workprec(blank.bits):
        test = _Krawczyk.at(problem, X, Y, mix)
        if not test.contraction(0.0)[1] < 1:
            return replace(blank, reason=singular)
        return _concluded(test, blank)


def _preconditioners(problem: Problem, J: Tensor) -> tuple[Tensor, Tensor]:
    """Return Y and M, where M is I or (Σ_h V_h)⁻¹.

    The bounds grow with the sizes of Y and of the mixed values V M, so the M of the
    smaller product is chosen.
    """
    V = problem.V.cpu() if problem.V.ndim == 3 else problem.V.cpu().unsqueeze(0)
    m = problem.outputs
    choices = [torch.eye(m, dtype=torch.float64)]
    if m == problem.dim:
        choices.append(torch.linalg.inv_ex(V.sum(0))[0])
    best: list[tuple[float, Tensor, Tensor]] = []
    for M in choices:
        mixed = (M.T @ J.unflatten(0, (-1, m))).flatten(0, 1)
        Y, _ = torch.linalg.inv_ex(mixed)
        size = float(Y.abs().sum(1).max() * (V @ M).abs().sum((0, 1)).max())
        best.append((size if math.isfinite(size) else math.inf, Y, M))
    _, Y, M = min(best, key=lambda choice: choice[0])
    return Y, M


def _concluded(test: _Krawczyk, blank: Certificate) -> Certificate:
    """Fill in the radii that the test proves, or the reason why it does not."""
    tau = blank.tolerance
    radius, reach = test.radius(0.0)
    if radius is None:
        return replace(
            blank,
            reason="not proved: X is not close enough to a solution, or there is none near it. One "
            f"Newton step moves X by {reach:.1e}, and over a box of that size the derivatives "
            "change too much. Let a solver continue from X, then certify again",
        )
    within, reach = (radius, 0.0) if tau == 0 else test.radius(tau)
    reason = ""
    if within is None:
        reason = (
            f"proved for B as given, not for B ± {tau:.1e}: errors of that size can move X by "
            f"about {reach:.1e}, and over a box of that size the derivatives change too much"
        )
    return replace(blank, radius=radius, radius_within=within, reason=reason)


@dataclass(frozen=True, eq=False)
class _Krawczyk:
    """The test at one X, for boxes of any size. A column holds one bound for each unknown."""

    balls: Balls
    X: arb_mat
    J: arb_mat  # at X itself
    Y: arb_mat
    sizes: arb_mat  # |Y|
    step: arb_mat  # |Y r(X) M|
    defect: arb_mat  # row sums of |I − Y J(X)|

    @classmethod
    def at(
        cls,
        problem: Problem,
        X: Tensor,
        inverse: Tensor,
        mix: Tensor,
    ) -> _Krawczyk:
        layer = Balls.of(problem, mix)
        centre = exact(X)
        Y = exact(inverse)
        J = layer.jacobian(centre, 0.0)
        identity = exact(torch.eye(len(inverse), dtype=torch.float64))
        step = magnitudes(Y * layer.residuals(centre))
        defect = row_sums(identity - Y * J)
        return cls(layer, centre, J, Y, magnitudes(Y), step, defect)

    def contraction(self, radius: float) -> tuple[arb_mat, float]:
        """Return bounds of the row sums of |I − Y J(box)|, and the largest of them.

        J(box) = J(X̂) + D, so |I − Y J(X̂)| + |Y||D| is a bound. The product of the
        large matrices Y and J(X̂) is computed once for all boxes.
        """
        sums = self.defect
        if radius > 0:
            D = self.balls.jacobian(self.X, radius) - self.J
            sums = sums + self.sizes * row_sums(D)
        return sums, _largest(sums)

    def gain(self) -> arb_mat:
        """Return the row sums of |Y Mᵀ|: M mixes errors of B, token by token, before Y."""
        make = flint().arb_mat
        size = self.Y.nrows()
        m = self.balls.mix.nrows()
        through = (
            make(size * size // m, m, self.Y.entries()) * self.balls.mix.transpose()
        )
        return row_sums(make(size, size, through.entries()))

    def radius(self, tolerance: float) -> tuple[float | None, float]:
        """Return a proved radius for outputs within ±tolerance, or None, and the first step."""
        reach = self.step + self.gain() * tolerance if tolerance else self.step
        first = box = _largest(reach)
        for _ in range(_ATTEMPTS):
            box *= _MARGIN
            if not math.isfinite(box):
                break
            sums, largest = self.contraction(box)
            if not largest < 1:  # a larger box would not contract either
                break
            image = _largest(reach + sums * box)
            if image <= box:
                return image, first
            # near the fixed point, if the contraction factor does not change
            box = max(image, first / (1 - largest))
        return None, first


def _largest(column: arb_mat) -> float:
    return max(upward(entry) for entry in column.entries())


# The equations of one problem in ball arithmetic: a number is a midpoint with a
# rigorous radius.
#
#     r(X) = Σ_h A_h X V_h (+ X) − B        J(box) ∋ dr/dX at every X of the box X̂ ± ρ
#
# Weights, outputs and X̂ are float64 and enter exactly. Each operation of Arb
# (python-flint) encloses the true value, so rounding is accounted for. J is the formula
# of equations.py with balls in place of numbers.
#
# Two equal forms make the balls narrower. The scores differ from those at X̂ by
# `e_iᵀWx̂_j + (Wᵀx̂_i + u)ᵀe_j + e_iᵀWe_j` with |e| ≤ ρ, which is bounded entry by
# entry. And `A_ij = 1/(1 + Σ_{k≠j} e^{S_ik}/e^{S_ij})` contains each score only once.
#
# The equations may be mixed, `r(X) M` with an m×m matrix M. With M ≈ V⁻¹ the values
# become the tokens themselves, so an ill-conditioned V does not widen the bounds, and
# larger boxes pass the test. The solutions are the same unless M is singular; then J is
# singular too, and there is no certificate.
#
# All methods compute at the precision that the caller sets (flint's `workprec`).

Rows = list[list["arb"]]


def flint() -> Any:
    return optional(
        "flint", "certificates need python-flint, which is not installed", "proofs"
    )


def exact(matrix: Tensor) -> arb_mat:
    """Convert a float64 matrix (or a vector, to a column) without rounding."""
    rows = matrix.unsqueeze(-1) if matrix.ndim == 1 else matrix
    return flint().arb_mat(*rows.shape, rows.flatten().tolist())


def upward(number: arb) -> float:
    """Return a float64 that is at least every number in the ball, or infinity."""
    bound = float(number.upper())
    return math.inf if math.isnan(bound) else math.nextafter(bound, math.inf)


def magnitudes(matrix: arb_mat) -> arb_mat:
    """Return upper bounds of the entries' absolute values."""
    entries = [entry.abs_upper() for entry in matrix.entries()]
    return flint().arb_mat(matrix.nrows(), matrix.ncols(), entries)


def row_sums(matrix: arb_mat) -> arb_mat:
    """Return upper bounds of `Σ_j |M_ij|` as a column."""
    ones = [1] * matrix.ncols()
    return magnitudes(matrix) * flint().arb_mat(matrix.ncols(), 1, ones)


@dataclass(frozen=True, eq=False)
class Balls:
    """One problem with exact numbers, where V and B are multiplied by M = `mix`.

    `free` says which entries of X are unknown, row by row.
    """

    W: list[arb_mat]
    V: list[arb_mat]
    B: arb_mat
    mix: arb_mat
    key_bias: list[arb_mat] | None
    free: list[list[bool]]
    causal: bool
    residual: bool

    @classmethod
    def of(cls, problem: Problem, mix: Tensor | None = None) -> Balls:
        M = exact(torch.eye(problem.outputs) if mix is None else mix)
        W, V = (
            [exact(t) for t in (weights if weights.ndim == 3 else weights.unsqueeze(0))]
            for weights in (problem.W, problem.V)
        )
        B = exact(problem.B)
        u = problem.key_bias
        if problem.output_bias is not None:
            B = B - _on_every_row(
                exact(problem.output_bias).transpose(), problem.length
            )
        biases = None
        if u is not None:
            biases = [exact(bias).transpose() for bias in u.reshape(len(W), -1)]
        free = problem.unknown.tolist()
        V = [values * M for values in V]
        return cls(W, V, B * M, M, biases, free, problem.causal, problem.residual)

    def residuals(self, X: arb_mat) -> arb_mat:
        """`(attention(X) − B) M` as a column of n·m balls."""
        out = -self.B
        for h, V in enumerate(self.V):
            queries = self._queries(X, h)
            out = out + self._maps(queries * X.transpose()) * (X * V)
        out = out + X * self.mix if self.residual else out
        return flint().arb_mat(out.nrows() * out.ncols(), 1, out.entries())

    def jacobian(self, X: arb_mat, radius: float) -> arb_mat:
        """J(box) for the box X ± radius: n·m rows, and a column for each unknown entry."""
        make = flint().arb_mat
        n = X.nrows()
        d = X.ncols()
        m = self.B.ncols()
        widths = make(
            n, d, [radius if free else 0.0 for row in self.free for free in row]
        )
        box = _widened(X, widths)
        heads = [self._head(X, widths, box, h) for h in range(len(self.W))]
        across = make(
            len(heads), m * d, [v for V in self.V for v in V.transpose().entries()]
        )
        keys = make([row for head in heads for row in head.keys.tolist()])
        J: Rows = []
        for i in range(n):
            C = [head.C[i] for head in heads]  # H, n·m
            own = make(
                m,
                len(C) * n,
                [c[j * m + a] for a in range(m) for c in C for j in range(n)],
            )
            own = (own * keys).entries()
            # C_il q_iᵀ + A_il Vᵀ, for every token l; heads are the inner dimension
            moved = make(C).transpose() * make([head.queries[i] for head in heads])
            mixed = make([head.A[i] for head in heads]).transpose() * across
            blocks = [
                x + y for x, y in zip(moved.entries(), mixed.entries(), strict=True)
            ]
            J += self._rows(i, blocks, own, d)
        return make(J)

    def _rows(
        self,
        i: int,
        blocks: list[arb],
        own: list[arb],
        d: int,
    ) -> Rows:
        """Return the m rows of J for token i, without the columns of known entries."""
        m = self.B.ncols()
        for a, b in itertools.product(range(m), range(d)):
            bypass = self.mix[b, a] if self.residual else 0
            blocks[(i * m + a) * d + b] += own[a * d + b] + bypass
        return [
            [
                blocks[(token * m + a) * d + b]
                for token, row in enumerate(self.free)
                for b, free in enumerate(row)
                if free
            ]
            for a in range(m)
        ]

    def _head(
        self,
        X: arb_mat,
        widths: arb_mat,
        box: arb_mat,
        h: int,
    ) -> _Head:
        W = self.W[h]
        at = self._queries(X, h)
        keys_at = X * W.transpose()
        scores = at * X.transpose()
        spread = widths * magnitudes(keys_at).transpose()
        spread = spread + magnitudes(at) * widths.transpose()
        spread = spread + widths * magnitudes(W) * widths.transpose()
        A = self._maps(_widened(scores, spread))
        H = box * self.V[h]
        values = H.tolist()
        outputs = (A * H).tolist()
        C = [
            [
                p * (v - o)
                for p, value in zip(row, values, strict=True)
                for v, o in zip(value, output, strict=True)
            ]
            for row, output in zip(A.tolist(), outputs, strict=True)
        ]
        queries = self._queries(box, h)
        return _Head(A.tolist(), C, queries.tolist(), box * W.transpose())

    def _queries(self, X: arb_mat, h: int) -> arb_mat:
        """`Wᵀx_i + u`, row by row."""
        queries = X * self.W[h]
        if self.key_bias is None:
            return queries
        return queries + _on_every_row(self.key_bias[h], X.nrows())

    def _maps(self, scores: arb_mat) -> arb_mat:
        rows: Rows = []
        for i, row in enumerate(scores.tolist()):
            seen = row[: i + 1] if self.causal else row
            rows.append(_softmax(seen) + [flint().arb(0)] * (len(row) - len(seen)))
        return flint().arb_mat(rows)


@dataclass(frozen=True, eq=False)
class _Head:
    """The parts of J for one head: A (n×n), `C_ij = A_ij (h_j − o_i)` (row i: n·m), Q and K."""

    A: Rows
    C: Rows
    queries: Rows
    keys: arb_mat


def _softmax(scores: list[arb]) -> list[arb]:
    # Any exact shift gives the same result, as long as nothing overflows.
    peak = max(scores, key=lambda s: float(s.mid())).mid()
    powers = [(score - peak).exp() for score in scores]
    zero = flint().arb(0)
    before = list(itertools.accumulate(powers[:-1], initial=zero))
    after = list(itertools.accumulate(powers[:0:-1], initial=zero))[::-1]
    return [
        1 / (1 + (b + a) / p) for p, b, a in zip(powers, before, after, strict=True)
    ]


def _widened(centres: arb_mat, widths: arb_mat) -> arb_mat:
    """Return balls that contain every number within `widths` of a number in `centres`."""
    ball = flint().arb
    entries = [
        centre + ball(0, width)
        for centre, width in zip(centres.entries(), widths.entries(), strict=True)
    ]
    return flint().arb_mat(centres.nrows(), centres.ncols(), entries)


def _on_every_row(row: arb_mat, n: int) -> arb_mat:
    return flint().arb_mat([row.entries()] * n)
