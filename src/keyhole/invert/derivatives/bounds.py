"""The paper's bounds on the Hessian, compared with what is measured.

*Unmasking Transformers*, with `‖W‖, ‖V‖, ‖X‖ ≤ R`, `|b_ij| ≤ R`, `R ≥ 1`:

    Lemma 4.4   ‖∇²L(X) − ∇²L(Y)‖ ≤ O(n³d³R¹⁰) ‖X − Y‖_F       the Hessian is Lipschitz
    Lemma 4.5   ∇²L(X) ⪰ −O(ndR⁸)·I                             its eigenvalues are bounded below

The norms are spectral. They are at most the Frobenius norms of Theorem 1.3, so R is not
larger.

Theorem 1.3 bounds W, V and B but not X; its lemmas assume a "bounded parameter"
(appendix G.1). A bound on X is needed: the first derivative of a score grows with X, so
the Hessian has no bound in the weights alone. R covers X too.
`lowest_bound_without_input` uses the theorem's own R, which covers ‖W‖_F, ‖V‖_F and
|b_ij|.

The lemmas give no constants. With constant 1 both fail even if R covers X: at R = 1, n
= 2, d = 1 an eigenvalue is −4.8 against −2, and the Hessian's Lipschitz constant is
17.5 against 8. This module uses proved constants (docs/mathematics.md, "The Hessian of
inversion"). With f′, f″, f‴ along a direction of length 1,

    ‖f − B‖_F ≤ 2√(nm) R²,   ‖f′‖_F ≤ 2√n R⁴,   ‖f″‖_F ≤ 7R⁶,   ‖f‴‖_F ≤ 38R⁸
    L″ = 2‖f′‖² + 2⟨f − B, f″⟩ ≥ −28 √(nm) R⁸
    |L‴| = |6⟨f′, f″⟩ + 2⟨f − B, f‴⟩| ≤ (84√n + 152√(nm)) R¹⁰ ≤ 236 √(nm) R¹⁰

which are the lemmas with √(nm) in place of nd and n³d³. H heads multiply f and its
derivatives by H. A residual connection adds X to f − B and E to f′. A key bias of norm
at most R adds a row to S′: ‖S′‖_F ≤ 3√n R², ‖f′‖_F ≤ 2.5√n R⁴, ‖f″‖_F ≤ 13n R⁶ and
‖f‴‖_F ≤ 90 n^{3/2} R⁸. A mask changes nothing. All values are of the loss without γ,
which would add 2γ to every eigenvalue.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from keyhole.core.errors import InputError, expect_count, expect_number
from keyhole.core.float64 import normal, random_stream
from keyhole.core.machine import expect_memory
from keyhole.core.result import Result
from keyhole.invert.derivatives.equations import prepared
from keyhole.invert.derivatives.hessian import hessian
from keyhole.invert.problem import Problem

MOST_NEIGHBOURS = 100_000  # each costs a Hessian and its eigenvalues
_RADII = (1e-3, 1e-2, 1e-1, 1.0)  # distances of the neighbours, relative to ‖X‖
_HALVINGS = 30  # attempts to shorten a step until the neighbour is in the ball ‖X‖ ≤ R


@dataclass(frozen=True, repr=False)
class Bounds(Result):
    """The bounds of the lemmas (`lipschitz_bound`, `lowest_bound`) and the measured values."""

    R: float
    R_without_input: (
        float  # the least R of Theorem 1.3: over ‖W‖_F, ‖V‖_F and |b_ij|, not X
    )
    norms: dict[str, float]  # the norms that the paper assumes to be at most R
    beyond: tuple[str, ...]  # what the layer has and the paper's does not
    lipschitz_bound: float  # n³d³R¹⁰
    lipschitz_proved: float  # (84√n + 152√(nm))R¹⁰, with a proved constant
    lowest_bound: float  # −ndR⁸
    lowest_proved: float  # −28√(nm)R⁸, with a proved constant
    lowest_bound_without_input: float  # −ndR⁸ with R_without_input
    lowest: float  # the least eigenvalue of ∇²L(X)
    highest: float
    lipschitz: (
        float  # the largest measured ‖∇²L(X) − ∇²L(Y)‖ / ‖X − Y‖_F, where ‖Y‖ ≤ R
    )
    neighbours: int

    kind: ClassVar[str] = "bounds"

    @property
    def assumptions(self) -> dict[str, bool]:
        """The assumptions of the lemmas, and whether each holds."""
        held = {f"{name} ≤ R": size <= self.R for name, size in self.norms.items()}
        return {
            **held,
            "one head, without biases, mask and residual connection": not self.beyond,
        }

    @property
    def proved(self) -> bool:
        """Whether both proved constants apply: all norms are at most R."""
        return all(size <= self.R for size in self.norms.values())

    @property
    def gamma(self) -> float:
        """The paper's regulariser, with the sign and constant that make the Hessian definite."""
        return -self.lowest_proved

    def summary(self) -> str:
        norms = ", ".join(f"{name} = {size:.3g}" for name, size in self.norms.items())
        lines = [f"R = {self.R:.3g}: {norms}", "assumptions of the paper:"]
        for words, held in self.assumptions.items():
            if self.beyond and "head" in words:
                more = f" ({', '.join(self.beyond)})"
            else:
                more = ""
            lines.append(f"  {'holds' if held else 'does not hold'}: {words}{more}")
        unproved = "" if self.proved else ", not proved: R is too small"

        def lower(name: str, bound: float) -> str:
            return f"  {name} {bound:.3g}: {'holds' if self.lowest >= bound else 'VIOLATED'}"

        def upper(name: str, bound: float) -> str:
            return f"  {name} {bound:.3g}: {'holds' if self.lipschitz <= bound else 'VIOLATED'}"

        return "\n".join(
            [
                *lines,
                f"least eigenvalue of the Hessian {self.lowest:.3g} (greatest {self.highest:.3g})",
                lower("Lemma 4.5, -n d R^8 =", self.lowest_bound),
                lower("with a proved constant:", self.lowest_proved) + unproved,
                lower(
                    "Theorem 1.3 as stated, ‖W‖_F, ‖V‖_F, ‖X‖ left out "
                    f"(R = {self.R_without_input:.3g}):",
                    self.lowest_bound_without_input,
                ),
                f"Lipschitz constant of the Hessian seen {self.lipschitz:.3g} "
                f"(of {self.neighbours} neighbours)",
                upper("Lemma 4.4, n^3 d^3 R^10 =", self.lipschitz_bound),
                upper("with a proved constant:", self.lipschitz_proved) + unproved,
                f"gamma that makes the Hessian positive definite while ‖X‖ ≤ R: {self.gamma:.3g}"
                f"{unproved}",
            ]
        )

    def contents(self) -> dict[str, Any]:
        return {**asdict(self), "assumptions": self.assumptions, "gamma": self.gamma}


def bounds(
    problem: Problem,
    X: Tensor,
    *,
    R: float | None = None,
    seed: int = 0,
    neighbours: int = 32,
) -> Bounds:
    """Compare the lemmas with the Hessian at X (n×d) and at seeded random neighbours of X.

    `R` defaults to the least that covers the weights, the output and X. If it is
    smaller, the result says which assumption does not hold.
    """
    if X.ndim != 2:
        raise InputError(f"expected X of shape n×d, got {tuple(X.shape)}")
    expect_count("neighbours", neighbours, most=MOST_NEIGHBOURS)
    expect_memory(4 * 8 * X.numel() ** 2, f"the Hessian of {X.numel():,} unknowns")
    expect_number("R", R, least=1)
    problem = replace(problem, gamma=0.0)
    _, inputs, _ = prepared(problem, X)
    X = inputs[0]
    sizes = norms(problem, X)
    R = max(1.0, *sizes.values()) if R is None else R
    H = hessian(problem, X)
    eigenvalues = _eigenvalues(H)
    unknowns = float(X.numel())
    without = stated_radius(problem)
    return Bounds(
        R=R,
        R_without_input=without,
        norms=sizes,
        beyond=_beyond(problem),
        lipschitz_bound=unknowns**3 * _power(R, 10),
        lipschitz_proved=_lipschitz_constant(problem, R),
        lowest_bound=-unknowns * _power(R, 8),
        lowest_proved=-paper_gamma(problem, R),
        lowest_bound_without_input=-unknowns * _power(without, 8),
        lowest=float(eigenvalues[0]),
        highest=float(eigenvalues[-1]),
        lipschitz=_measured_lipschitz(problem, X, R, H, seed, neighbours),
        neighbours=neighbours,
    )


def norms(problem: Problem, X: Tensor | None = None) -> dict[str, float]:
    """Return the norms that the paper bounds by R, each the largest over all heads and entries."""
    sizes = {
        "‖W‖": torch.linalg.matrix_norm(problem.W, 2).max(),
        "‖V‖": torch.linalg.matrix_norm(problem.V, 2).max(),
        "|b_ij|": problem.unbiased.abs().max(),
    }
    if problem.key_bias is not None:
        sizes["‖key bias‖"] = problem.key_bias.norm(dim=-1).max()
    if X is not None:
        sizes["‖X‖"] = torch.linalg.matrix_norm(X, 2).max()
    return {name: float(size) for name, size in sizes.items()}


def radius(problem: Problem, X: Tensor | None = None) -> float:
    """Return the least R ≥ 1 that covers W, V, the output and, if given, inputs (…, n, d)."""
    return max(1.0, *norms(problem, X).values())


def stated_radius(problem: Problem) -> float:
    """Return the least R ≥ 1 of Theorem 1.3 as stated: Frobenius norms of W and V, and |b_ij|."""
    lengths = [
        torch.linalg.matrix_norm(weights).max() for weights in (problem.W, problem.V)
    ]
    return max(1.0, *map(float, lengths), norms(problem)["|b_ij|"])


def paper_gamma(problem: Problem, R: float) -> float:
    """Return γ of Definition 4.6, with the sign turned and the proved constant.

    No eigenvalue of ∇²L is below −γ while all norms are at most R. So the Hessian of `L
    + γ‖X‖²` is positive definite wherever ‖X‖ ≤ R, if R covers the weights and the
    output too.
    """
    off, _, second, _ = _derivative_bounds(problem)
    return 2 * off * second * _power(R, 8)


def _lipschitz_constant(problem: Problem, R: float) -> float:
    """Return a Lipschitz constant of ∇²L that holds while all norms are at most R."""
    off, first, second, third = _derivative_bounds(problem)
    return (6 * first * second + 2 * off * third) * _power(R, 10)


def _derivative_bounds(problem: Problem) -> tuple[float, float, float, float]:
    """Return the factors of R², R⁴, R⁶ and R⁸ in the bounds of ‖f − B‖, ‖f′‖, ‖f″‖ and ‖f‴‖."""
    heads = problem.heads
    n = problem.length
    m = problem.outputs
    residual = problem.residual
    first = 2.0
    second = 7.0
    third = 38.0
    if problem.key_bias is not None:
        first = 2.5
        second = 13.0 * n
        third = 90.0 * n**1.5
    return (
        (heads + 1 + residual) * (n * m) ** 0.5,
        heads * first * n**0.5 + residual,
        heads * second,
        heads * third,
    )


def _power(R: float, exponent: int) -> float:
    """Return a power, or infinity if it overflows."""
    try:
        return R**exponent
    except OverflowError:
        return math.inf


def _beyond(problem: Problem) -> tuple[str, ...]:
    extras = {
        f"{problem.heads} heads": problem.heads > 1,
        "a key bias": problem.key_bias is not None,
        "an output bias": problem.output_bias is not None,
        "a causal mask": problem.causal,
        "a residual connection": problem.residual,
    }
    return tuple(name for name, present in extras.items() if present)


def _measured_lipschitz(
    problem: Problem,
    X: Tensor,
    R: float,
    H: Tensor,
    seed: int,
    neighbours: int,
) -> float:
    """Return the largest ‖∇²L(X) − ∇²L(Y)‖ / ‖X − Y‖_F at random neighbours Y; H is ∇²L(X)."""
    stream = random_stream(seed)
    size = max(float(X.norm()), 1.0)
    largest = 0.0
    for number in range(neighbours):
        away = normal(stream, *X.shape).to(X.device)
        if problem.known is not None:
            away = torch.where(problem.known.isnan(), away, 0.0)
        length = float(away.norm())
        if length == 0.0:
            break
        step = _inside_ball(X, away * (_RADII[number % len(_RADII)] * size / length), R)
        change = _eigenvalues(hessian(problem, X + step) - H).abs().max()
        largest = max(largest, float(change / step.norm()))
    return largest


def _eigenvalues(H: Tensor) -> Tensor:
    if not H.isfinite().all():
        raise InputError(
            "the second derivatives overflow float64: scale the weights, the output and X down"
        )
    return torch.linalg.eigvalsh(H)


def _inside_ball(
    X: Tensor,
    step: Tensor,
    R: float,
) -> Tensor:
    """Reverse or shorten a step from X until it ends where ‖Y‖ ≤ R, as the lemma assumes.

    If X is outside the ball the step is unchanged, and `Bounds.assumptions` says so.
    """
    for _ in range(_HALVINGS):
        for signed in (step, -step):
            if float(torch.linalg.matrix_norm(X + signed, 2)) <= R:
                return signed
        step = step / 2
    return step * 2**_HALVINGS
