"""Certificates: a proof that an exact solution lies within a stated distance of a found X.

The Krawczyk test (R. Krawczyk 1969; see S. M. Rump, *Verification methods*, Acta Numerica 2010,
Section 13). With `r(X) = attention(X) − B`, any matrix `Y` (here the float64 inverse of J at X̂)
and an enclosure J(box) of the derivatives over the box X̂ ± ρ, entry by entry,

    |Y r(X̂)| + |I − Y J(box)|·ρ ≤ ρ      and      ‖I − Y J(box)‖∞ < 1

prove that the box holds exactly one solution, and that it lies within the left side of X̂:
`X ↦ X − Y r(X)` maps the box into itself and contracts it, and Y has an inverse.

The equations are mixed first (`Balls`): r, J and Y are those of `r(X) M` with M = V⁻¹ where that
promises narrower bounds.

All of it is evaluated in ball arithmetic (`Balls`) and every bound is rounded upwards. Only Y, M
and ρ come from float64, and the proof does not depend on how good they are. ρ starts at |Y r|, and
while the left side is larger than ρ it becomes the next ρ: the smallest box is found from below.

What is proved, and what is not:
- `radius` is around the X that was given, which is not polished before: it covers the distance
  from there to the solution, in every entry. X far from a solution gets no certificate.
- Uniqueness is local: inputs that give the same outputs may exist outside the box.
- The proof is about B as given, rounded as it is. `radius_within` holds for every B' within ±τ of
  B, entry by entry: r becomes r ± τ, so |Y r| becomes |Y r| + τ|Y|1.
- There must be as many equations as unknowns and J must be non-singular; the reason says when not.
"""

from __future__ import annotations

import importlib
import itertools
import math
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from keyhole.core.errors import InputError, MissingExtra, expect_count, expect_number
from keyhole.core.result import FORMAT, restored
from keyhole.invert.derivatives.equations import Equations
from keyhole.invert.problem import Problem

if TYPE_CHECKING:
    from flint import arb, arb_mat


BITS = 128
_ATTEMPTS = 8
_MARGIN = 1.02  # the next box, larger than what is needed by as much as κ may grow meanwhile


@dataclass(frozen=True)
class Certificate:
    """Within `radius` of X, in every entry, lies exactly one solution; or `reason` says why not.

    `radius_within` is the same for every output within ±`tolerance` of B; None if not proved.
    `condition` is that of the Jacobian, a float64 estimate and no part of the proof.
    """

    radius: float | None
    reason: str
    radius_within: float | None = None
    tolerance: float = 0.0
    condition: float | None = None
    unknowns: int = 0
    bits: int = BITS
    seconds: float = 0.0

    @property
    def proved(self) -> bool:
        return self.radius is not None

    def to_dict(self) -> dict[str, Any]:
        """For JSON, which knows no infinity: the condition of a singular system is left out."""
        data = asdict(self)
        if self.condition is not None and not math.isfinite(self.condition):
            data["condition"] = None
        return {"format": FORMAT, "proved": self.proved, **data}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Certificate:
        return restored(cls, data, more=True)

    def summary(self) -> str:
        if self.radius is None:
            return f"no certificate: {self.reason}"
        return f"proved: exactly one input with this output lies within {self.radius:.1e}"


def certify(
    problem: Problem, X: Tensor, *, tolerance: float | None = None, bits: int = BITS
) -> Certificate:
    """Prove that a solution lies near X, or say why that cannot be done.

    `tolerance` (τ) takes the place of the problem's own. `bits` is the precision of the balls.
    """
    started = time.perf_counter()
    X = _checked(problem, X)
    tolerance = problem.tolerance if tolerance is None else tolerance
    expect_number("tolerance", tolerance, least=0)
    expect_count("bits", bits, least=64)
    flint()
    unknowns = int(unknown(problem).sum())
    blank = Certificate(None, _unfit(problem, X), None, tolerance, None, unknowns, bits)
    certificate = blank if blank.reason else _attempt(problem, X, blank)
    return replace(certificate, seconds=time.perf_counter() - started)


def _checked(problem: Problem, X: Tensor) -> Tensor:
    # Not everyone who calls this has a type checker.
    if not isinstance(X, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError(f"expected X as a torch.Tensor, got {type(X).__name__}")
    if X.shape != (problem.length, problem.dim) or X.is_complex():
        got = "×".join(map(str, X.shape)) or "a number"
        raise InputError(
            f"expected X of shape {problem.length}×{problem.dim}, real, got {got}, {X.dtype}"
        )
    return X.detach().cpu().to(torch.float64)


def _unfit(problem: Problem, X: Tensor) -> str:
    """Why the test does not apply, as far as that shows before anything is computed."""
    if problem.fault:
        return f"does not apply: {problem.fault}"
    if not X.isfinite().all():
        wrong = int((~X.isfinite()).sum())
        return f"does not apply: X holds {wrong} NaN or infinite numbers"
    if problem.gamma > 0:
        return (
            "does not apply: with γ > 0 the input that is sought minimises a sum and does not "
            "reproduce the output exactly; certify against the problem with γ = 0"
        )
    free = unknown(problem).cpu()
    equations, unknowns = problem.B.numel(), int(free.sum())
    if equations != unknowns:
        kind = (
            "outputs rounded anywhere then have no exact solution at all"
            if equations > unknowns
            else "whole families of inputs then give the same output"
        )
        return (
            f"does not apply: {equations} equations for {unknowns} unknowns, and the proof needs "
            f"as many of one as of the other; {kind}"
        )
    if problem.known is not None:
        off = float((X - problem.known.cpu())[~free].abs().max()) if unknowns < X.numel() else 0
        if off > 0:
            return f"does not apply: X contradicts the known entries, by up to {off:.1e}"
    return ""


def _attempt(problem: Problem, X: Tensor, blank: Certificate) -> Certificate:
    J = Equations.of(problem, "cpu").jacobian(X.unsqueeze(0))[0]
    J = J[:, unknown(problem).cpu().flatten()]
    if not J.isfinite().all():
        return replace(blank, reason="does not apply: the layer overflows float64 at this X")
    Y, mix = _preconditioners(problem, J)
    blank = replace(blank, condition=_condition(J))
    singular = (
        "does not apply: at this X the equations are singular, or too close to it for float64 "
        f"(condition {blank.condition:.0e}): some change of X leaves the output as it is, so the "
        "output alone cannot pin X down. V without an inverse or two equal tokens would do that"
    )
    if not Y.isfinite().all():
        return replace(blank, reason=singular)
    with precision(blank.bits):
        test = _Krawczyk.at(problem, X, Y, mix)
        if not test.contraction(0.0)[1] < 1:
            return replace(blank, reason=singular)
        return _settled(test, blank)


def _preconditioners(problem: Problem, J: Tensor) -> tuple[Tensor, Tensor]:
    """Y and M: of M = 1 and M = V⁻¹ (of all heads together) the one that promises narrower bounds.

    The bounds grow with the size of Y and with that of the mixed values.
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


def _condition(J: Tensor) -> float:
    values = torch.linalg.svdvals(J)
    return float(values[0] / values[-1]) if values[-1] > 0 else math.inf


def _settled(test: _Krawczyk, blank: Certificate) -> Certificate:
    tau = blank.tolerance
    radius, reach = test.radius(0.0)
    if radius is None:
        return replace(
            blank,
            reason=f"not proved: X is not close enough to a solution, if there is one near it. One "
            f"Newton step moves X by {reach:.1e}, and over a box that wide the layer bends too "
            "much for the proof. Let a solver continue from X, then certify again",
        )
    within, reach = (radius, 0.0) if tau == 0 else test.radius(tau)
    reason = ""
    if within is None:
        reason = (
            f"proved for B as given, not for B ± {tau:.1e}: errors of that size can move X by "
            f"about {reach:.1e}, and over a box that wide the layer bends too much for the proof"
        )
    return replace(blank, radius=radius, radius_within=within, reason=reason)


@dataclass(frozen=True, eq=False)
class _Krawczyk:
    """The test at one X, for boxes of any size. Columns hold one bound for each unknown."""

    balls: Balls
    X: arb_mat
    J: arb_mat  # at X itself
    Y: arb_mat
    sizes: arb_mat  # |Y|
    step: arb_mat  # |Y r(X) M|
    defect: arb_mat  # row sums of |I − Y J(X)|

    @classmethod
    def at(cls, problem: Problem, X: Tensor, inverse: Tensor, mix: Tensor) -> _Krawczyk:
        layer, centre, Y = Balls.of(problem, mix), exact(X), exact(inverse)
        J = layer.jacobian(centre, 0.0)
        identity = exact(torch.eye(len(inverse), dtype=torch.float64))
        step = magnitudes(Y * layer.residuals(centre))
        defect = row_sums(identity - Y * J)
        return cls(layer, centre, J, Y, magnitudes(Y), step, defect)

    def contraction(self, radius: float) -> tuple[arb_mat, float]:
        """Row sums of |I − Y J(box)|, and the largest of them.

        J(box) = J(X̂) + D, so that |I − Y J(X̂)| + |Y||D| bounds them: the one product of large
        matrices serves every box.
        """
        sums = self.defect
        if radius > 0:
            D = self.balls.jacobian(self.X, radius) - self.J
            sums = sums + self.sizes * row_sums(D)
        return sums, _largest(sums)

    def gain(self) -> arb_mat:
        """Row sums of |Y Mᵀ|: errors of B pass through M, token by token, before they meet Y."""
        make, size, m = flint().arb_mat, self.Y.nrows(), self.balls.mix.nrows()
        through = make(size * size // m, m, self.Y.entries()) * self.balls.mix.transpose()
        return row_sums(make(size, size, through.entries()))

    def radius(self, tolerance: float) -> tuple[float | None, float]:
        """A proved radius for outputs within ±tolerance, or None; and how far one step reaches."""
        reach = self.step + self.gain() * tolerance if tolerance else self.step
        first = box = _largest(reach)
        for _ in range(_ATTEMPTS):
            box *= _MARGIN
            if not math.isfinite(box):
                break
            sums, largest = self.contraction(box)
            if not largest < 1:  # nor would it be for any larger box
                break
            image = _largest(reach + sums * box)
            if image <= box:
                return image, first
            # What the fixed point is near to, if κ stays as it is
            box = max(image, first / (1 - largest))
        return None, first


def _largest(column: arb_mat) -> float:
    return max(upward(entry) for entry in column.entries())


# The equations of one problem in ball arithmetic: every number a midpoint with a rigorous radius.
#
#     r(X) = Σ_h A_h X V_h (+ X) − B        J(box) ∋ dr/dX at every X of the box X̂ ± ρ
#
# Weights, outputs and X̂ are float64 and enter exactly; each operation of Arb (python-flint) then
# encloses the true value, so that nothing that float64 would have rounded is lost. J is the formula
# of equations.py with balls in the place of numbers, not a linearisation of it.
#
# Where the plain replacement would be wide, an equal form that is narrower takes its place. The
# scores differ from those at X̂ by `e_iᵀWx̂_j + (Wᵀx̂_i + u)ᵀe_j + e_iᵀWe_j` with |e| ≤ ρ, which is
# bounded entry by entry; and `A_ij = 1/(1 + Σ_{k≠j} e^{S_ik}/e^{S_ij})` holds each score once.
#
# The equations may be mixed, `r(X) M` with an m×m matrix M: with M ≈ V⁻¹ the values become the
# tokens themselves, and what an ill-conditioned V would add to every bound is gone, so wider boxes
# pass the test. The solutions are the same unless M is singular, and then every J is, so no
# certificate can come of it.
#
# All methods work at the precision of the caller (`precision`).

Rows = list[list["arb"]]


def flint() -> Any:
    try:
        return importlib.import_module("flint")  # by name: it is an extra
    except ModuleNotFoundError as missing:
        raise MissingExtra(
            "certificates need python-flint, which is not installed", "proofs"
        ) from missing


@contextmanager
def precision(bits: int) -> Generator[None]:
    """Arb's working precision, put back afterwards: it is one setting for the whole process."""
    with flint().ctx.workprec(bits):
        yield


def exact(matrix: Tensor) -> arb_mat:
    """A float64 matrix (or vector, as a column) without any rounding."""
    rows = matrix.unsqueeze(-1) if matrix.ndim == 1 else matrix
    return flint().arb_mat(*rows.shape, rows.flatten().tolist())


def upward(number: arb) -> float:
    """A float64 that is no smaller than any number of the ball; infinity where there is none."""
    bound = float(number.upper())
    return math.inf if math.isnan(bound) else math.nextafter(bound, math.inf)


def magnitudes(matrix: arb_mat) -> arb_mat:
    """Entry by entry, an upper bound of |·|."""
    entries = [entry.abs_upper() for entry in matrix.entries()]
    return flint().arb_mat(matrix.nrows(), matrix.ncols(), entries)


def row_sums(matrix: arb_mat) -> arb_mat:
    """`Σ_j |M_ij|` as a column, bounded from above."""
    ones = [1] * matrix.ncols()
    return magnitudes(matrix) * flint().arb_mat(matrix.ncols(), 1, ones)


@dataclass(frozen=True, eq=False)
class Balls:
    """One problem, its numbers exact, V and B times M = `mix`.

    `free` says which entries of X (row by row) are unknown.
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
        B, u = exact(problem.B), problem.key_bias
        if problem.output_bias is not None:
            B = B - _on_every_row(exact(problem.output_bias).transpose(), problem.length)
        biases = None
        if u is not None:
            biases = [exact(bias).transpose() for bias in u.reshape(len(W), -1)]
        free = unknown(problem).tolist()
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
        """J(box) for the box X ± radius in the unknown entries: n·m rows, a column per unknown."""
        make = flint().arb_mat
        n, d, m = X.nrows(), X.ncols(), self.B.ncols()
        widths = make(n, d, [radius if free else 0.0 for row in self.free for free in row])
        box = _widened(X, widths)
        heads = [self._head(X, widths, box, h) for h in range(len(self.W))]
        across = make(len(heads), m * d, [v for V in self.V for v in V.transpose().entries()])
        keys = make([row for head in heads for row in head.keys.tolist()])
        J: Rows = []
        for i in range(n):
            C = [head.C[i] for head in heads]  # H, n·m
            own = make(m, len(C) * n, [c[j * m + a] for a in range(m) for c in C for j in range(n)])
            own = (own * keys).entries()
            # C_il q_iᵀ + A_il Vᵀ, for every token l; heads are the inner dimension
            moved = make(C).transpose() * make([head.queries[i] for head in heads])
            mixed = make([head.A[i] for head in heads]).transpose() * across
            blocks = [x + y for x, y in zip(moved.entries(), mixed.entries(), strict=True)]
            J += self._rows(i, blocks, own, d)
        return make(J)

    def _rows(self, i: int, blocks: list[arb], own: list[arb], d: int) -> Rows:
        """The m rows of J that belong to token i, without the columns of known entries."""
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

    def _head(self, X: arb_mat, widths: arb_mat, box: arb_mat, h: int) -> _Head:
        W = self.W[h]
        at, keys_at = self._queries(X, h), X * W.transpose()
        scores = at * X.transpose()
        spread = widths * magnitudes(keys_at).transpose()
        spread = spread + magnitudes(at) * widths.transpose()
        spread = spread + widths * magnitudes(W) * widths.transpose()
        A = self._maps(_widened(scores, spread))
        H = box * self.V[h]
        values, outputs = H.tolist(), (A * H).tolist()
        C = [
            [p * (v - o) for p, value in zip(row, values, strict=True)
             for v, o in zip(value, output, strict=True)]
            for row, output in zip(A.tolist(), outputs, strict=True)
        ]  # fmt: skip
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
    """What J is made of: A (n×n), `C_ij = A_ij (h_j − o_i)` (row i: n·m), queries and keys."""

    A: Rows
    C: Rows
    queries: Rows
    keys: arb_mat


def unknown(problem: Problem) -> Tensor:
    """True where an entry of X is to be found: (n, d)."""
    if problem.known is None:
        return problem.B.new_ones(problem.length, problem.dim).bool()
    return problem.known.isnan()


def _softmax(scores: list[arb]) -> list[arb]:
    # Any exact shift will do, as long as nothing overflows.
    peak = max(scores, key=lambda s: float(s.mid())).mid()
    powers = [(score - peak).exp() for score in scores]
    nothing = flint().arb(0)
    before = list(itertools.accumulate(powers[:-1], initial=nothing))
    after = list(itertools.accumulate(powers[:0:-1], initial=nothing))[::-1]
    return [1 / (1 + (b + a) / p) for p, b, a in zip(powers, before, after, strict=True)]


def _widened(centres: arb_mat, widths: arb_mat) -> arb_mat:
    """Balls around balls: every number within `widths` of every number of `centres`."""
    ball = flint().arb
    entries = [
        centre + ball(0, width)
        for centre, width in zip(centres.entries(), widths.entries(), strict=True)
    ]
    return flint().arb_mat(centres.nrows(), centres.ncols(), entries)


def _on_every_row(row: arb_mat, n: int) -> arb_mat:
    return flint().arb_mat([row.entries()] * n)
