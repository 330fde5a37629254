"""Many heads in orthogonal subspaces, with or without knowledge of the subspaces.

Appendix C of *Provably Learning Attention with Queries* (arXiv 2601.16873). Assumption
C.1: head h has `W_h = P_h W_h P_h` and `v_h = P_h v_h` with orthogonal projectors P_h.
On sequences inside one subspace only its head answers (Proposition C.2), so with known
bases Theorem 4.1 inside each of them takes Σ_h (k_h² + k_h) queries.

Without bases, the paper conjectures a way by Hessians. Here the Hessians give, for each
head, a part of its subspace that holds v_h (`finest_blocks`). That is enough:

    v_h′ᵀδ = 0 for all h′ ≠ h   ⇒   f([x+δ ; x]) = vᵀx + σ(δᵀW_hx)·v_hᵀδ   for every x,

so only head h answers, as in Theorem 4.1. Its rows `W_hᵀδ` lie in its subspace again,
and are the next δ, until no new direction is found. In all this takes about d +
d(d+1)·levels + d²/2 … d² queries.

A head with W_h = 0 has no curvature; it is what the other heads leave of v.
docs/orthogonal_heads.md shows, with figures, where this works and where it fails.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from keyhole.core import Status, Unsuccessful, mismatch
from keyhole.core.errors import InputError, expect_count, expect_number
from keyhole.core.files import read_tensors
from keyhole.core.float64 import Stream, identity, normal, random_stream, tensor, zeros
from keyhole.core.numerics import thin_svd
from keyhole.extract.bilinear import (
    MAX_SCALES,
    BilinearForms,
    Derived,
    ProbeBasis,
    ask_scores,
    lengths,
    max_abs,
    normalized,
    random_orthogonal,
    read_values,
)
from keyhole.extract.extraction import Extraction, Step, expect_finite_weights, setting
from keyhole.extract.judge import Method
from keyhole.oracle.planted import MultiHead
from keyhole.oracle.protocol import Oracle, ask

_ORTHOGONAL = 1e-8
_SILENT = 1e-13  # relative to the whole of v, a shorter v_h is rounding


@dataclass(frozen=True)
class OrthogonalHeads(Method):
    """Extraction of heads in orthogonal subspaces (Appendix C).

    `bases` holds one d×k matrix with orthonormal columns per head. Without bases the
    subspaces are searched, with the fields after `tolerance`.
    """

    bases: Sequence[Tensor] | None = field(
        default=None,
        repr=False,
        metadata={"help": "a .safetensors file with a basis of each head's subspace"},
    )
    seed: int = 0
    tolerance: float = 1e-8
    points: int = setting(2, "tokens x at which Hessians are taken")
    levels: int = setting(2, "answers for each entry of a Hessian (Richardson)")
    precision: float = setting(1e-16, "relative error of an answer")

    def __post_init__(self) -> None:
        expect_count("points", self.points)
        expect_count("levels", self.levels)
        expect_number("precision", self.precision, above=0, below=1)
        if self.bases is not None:
            _check_bases(self.bases)

    def __call__(self, oracle: Oracle) -> Extraction:
        if self.bases is not None and self.bases[0].shape[0] != oracle.dim:
            raise InputError(
                f"bases must have as many rows as the target has dimensions, {oracle.dim}: got "
                f"{self.bases[0].shape[0]}"
            )
        return super().__call__(oracle)

    def expected_queries(self, dim: int) -> int | None:  # noqa: ARG002
        if self.bases is None:
            return None
        return sum(k * k + k for k in (basis.shape[1] for basis in self.bases))

    def steps(self, oracle: Oracle) -> Iterator[Step]:
        if self.bases is None:
            yield from self._search(oracle)
        else:
            yield from self._inside(oracle, self.bases)

    def _inside(self, oracle: Oracle, bases: Sequence[Tensor]) -> Iterator[Step]:
        """Apply Theorem 4.1 in each subspace; heads with v_h = 0 never answer and are left out."""
        d = oracle.dim
        widths = [basis.shape[1] for basis in bases]
        unknowns = sum(k * (k + 1) for k in widths)
        v = read_values(_inside(oracle, torch.cat(list(bases), dim=1)))
        heads: list[tuple[Tensor, Tensor]] = []
        shown: list[Tensor] = []
        for basis, values in zip(bases, v.split(widths), strict=True):
            if lengths(values) > _SILENT * lengths(v):
                heads.append((zeros(d, d), basis @ values))
                shown.append(basis)
        known = len(v)
        yield Step(_heads(heads), known, unknowns)
        stream = random_stream(self.seed)
        for h, basis in enumerate(shown):
            v_h = heads[h][1]
            W = _one_head(_inside(oracle, basis), basis.mT @ v_h, stream)
            heads[h] = (basis @ W @ basis.mT, v_h)
            known += len(W) ** 2
            yield Step(_heads(heads), known, unknowns)

    def _search(self, oracle: Oracle) -> Iterator[Step]:
        """Find the subspaces by Hessians, and grow each head from its part."""
        d = oracle.dim
        stream = random_stream(self.seed)
        v = read_values(oracle)
        no_weights = MultiHead([zeros(d, d)], [v])
        yield Step(no_weights, known=d, unknowns=d * d + d)
        blocks = self._blocks(oracle, v, stream)
        heads: list[_Growth] = []
        for h, block in enumerate(blocks):
            others = [head.basis for head in heads]
            others += [block.mT for block in blocks[h + 1 :]]
            heads.append(_Growth(oracle, v, block, others, self.resolution))
            heads[-1].run(block.mT)
            yield _step(heads, v, self.resolution)
        if not heads:  # nothing curves: W = 0
            yield Step(no_weights, known=d, unknowns=d)
            return
        # Directions that no row led to may still be columns of some W_h. Leave out the
        # direction where a head with W_h = 0 would answer too.
        constant = _constant_direction(heads, v, self.resolution)
        free = _complement([*(head.basis for head in heads), constant], d)
        if len(free):
            for head in heads:
                head.extend(free, stream)
        final = _step(heads, v, self.resolution)
        yield replace(final, unknowns=final.known)

    @property
    def step(self) -> float:
        """The size of scores for which rounding, ε/z, equals truncation, z^(2·levels)."""
        return self.precision ** (1 / (2 * self.levels + 1))

    @property
    def noise(self) -> float:
        """The error of a Hessian, relative to its largest singular value."""
        return 10 * self.precision / self.step

    @property
    def resolution(self) -> float:
        """The relative size below which rows of W_h are zero; they inherit errors of Hessians."""
        return min(max(1e-7, 100 * self.noise), 1e-2)

    def _blocks(
        self,
        oracle: Oracle,
        v: Tensor,
        stream: Stream,
    ) -> list[Tensor]:
        """Return a part of each head's subspace (d×k) that holds its v_h."""
        forms = QuadraticForms(oracle, v, self.step, self.levels)
        xs = random_orthogonal(oracle.dim, stream)[: self.points]
        hessians = [forms.hessian(x, stream) for x in xs]
        blocks = finest_blocks(hessians, self.noise, stream)
        least = self.resolution * lengths(v)
        return [block for block in blocks if lengths(block.mT @ v) > least]


def _one_head(
    oracle: Oracle,
    v: Tensor,
    stream: Stream,
) -> Tensor:
    """Apply Theorem 4.1 with v known: d² queries."""
    probes = ProbeBasis.draw(v, stream)
    X = random_orthogonal(len(v), stream)
    Zt = zeros(len(v), len(v))  # row j: Δ W x_j
    BilinearForms(oracle, v).grid(probes.deltas, X, Zt)
    return probes.solve(Zt.mT) @ X


def _inside(oracle: Oracle, basis: Tensor) -> Oracle:
    """Return the oracle on sequences inside one subspace, in its coordinates."""

    def answers(sequences: Tensor) -> Tensor:
        return ask(oracle, sequences @ basis.mT)

    return Derived(basis.shape[1], answers)


def _alone(oracle: Oracle, others: Tensor) -> Oracle:
    """Return the oracle less `v_hᵀx` of other heads, which add it to `[x+δ ; x]` if v_hᵀδ = 0."""

    def answers(sequences: Tensor) -> Tensor:
        return ask(oracle, sequences) - sequences[:, -1] @ others

    return Derived(oracle.dim, answers)


class _Growth:
    """One head: rows of W_h, each of which may lead to a new direction of its subspace."""

    def __init__(
        self,
        oracle: Oracle,
        v: Tensor,
        block: Tensor,
        others: list[Tensor],
        resolution: float,
    ) -> None:
        self.v = block @ (block.mT @ v)
        self._forms = BilinearForms(_alone(oracle, v - self.v), self.v)
        # W_h x = 0 for x in the known parts of the other subspaces.
        self._X = _complement(others, len(v))
        self._resolution = resolution
        self._unit = normalized(self.v)
        self.basis = self._unit[None]  # orthonormal rows
        self._along_v = self._measure(self.basis)
        self._rows = self._along_v  # W_hᵀ of each

    def weights(self) -> Tensor:
        return self.basis.mT @ self._rows

    def run(self, part: Tensor) -> None:
        """Follow the rows of W_h from a part of its subspace until no direction is new."""
        fresh = self._outside(torch.cat([part, self._along_v]))
        while len(fresh) and len(self.basis) < len(self._X):
            fresh = self._outside(self._add(fresh))

    def extend(self, directions: Tensor, stream: Stream) -> None:
        """Add directions that this head may have too, if one query shows that it has any."""
        mix = normalized(normal(stream, len(directions)) @ directions)
        x = normalized(normal(stream, len(self._X)) @ self._X)
        form = self._forms.pairs((mix + self._unit)[None], x[None])[0]
        if (form - self._along_v[0] @ x).abs() > self._resolution * self._rows.norm():
            self._add(directions)

    def _add(self, directions: Tensor) -> Tensor:
        """Add directions to the basis, and return their rows of W_h."""
        rows = self._measure(directions + self._unit) - self._along_v
        self.basis = torch.cat([self.basis, directions])
        self._rows = torch.cat([self._rows, rows])
        return rows

    def _measure(self, deltas: Tensor) -> Tensor:
        """Return `δᵀW_h` for each δ."""
        out = zeros(len(self._X), len(deltas))
        self._forms.grid(deltas, self._X, out)
        return out.mT @ self._X

    def _outside(self, rows: Tensor) -> Tensor:
        """Return orthonormal directions of the rows that are not in the basis yet."""
        least = self._resolution * lengths(rows).max()
        for _ in range(2):
            rows = rows - (rows @ self.basis.mT) @ self.basis
        _, sizes, directions = thin_svd(rows)
        return directions[sizes > least]


def _constant_direction(
    heads: list[_Growth],
    v: Tensor,
    resolution: float,
) -> Tensor:
    """Return the direction of what the heads leave of v, as a row; no row if they leave nothing."""
    constant = v - torch.stack([head.v for head in heads]).sum(0)
    found = bool(lengths(constant) > resolution * lengths(v))
    return normalized(constant)[None][: int(found)]


def _step(
    heads: list[_Growth],
    v: Tensor,
    resolution: float,
) -> Step:
    """Return what is known: the heads so far, and one with W = 0 for what they leave of v."""
    d = len(v)
    parts = [(head.weights(), head.v) for head in heads]
    for unit in _constant_direction(heads, v, resolution):
        parts.append((zeros(d, d), (v @ unit) * unit))
    known = d + sum(len(head.basis) ** 2 for head in heads)
    return Step(_heads(parts), known, max(known, d * d + d))


def _complement(parts: list[Tensor], d: int) -> Tensor:
    """Return orthonormal rows that span the complement of the given rows."""
    if not parts:
        return identity(d)
    _, sizes, right = torch.linalg.svd(torch.cat(parts))
    return right[int((sizes > 0.5).sum()) :]


def _heads(parts: list[tuple[Tensor, Tensor]]) -> MultiHead:
    expect_finite_weights(*itertools.chain(*parts))
    if not parts:
        raise mismatch("no finite weights explain the answers")
    W, v = zip(*parts, strict=True)
    return MultiHead(list(W), list(v))


def load_bases(path: str | Path) -> list[Tensor]:
    """Read bases from a .safetensors file: one d×k matrix with orthonormal columns per head."""
    _, tensors = read_tensors(path, "a .safetensors file of bases")
    bases = [tensors[name] for name in sorted(tensors)]
    try:
        _check_bases(bases)
    except InputError as error:
        raise InputError(f"{error} in {path}") from error
    return bases


def _check_bases(bases: Sequence[Tensor]) -> None:
    """Raise InputError unless all columns together are orthonormal."""
    if not len(bases):
        raise InputError("bases must hold at least one basis")
    for basis in bases:
        same_space = basis.ndim == 2 and basis.shape[0] == bases[0].shape[0]
        if not same_space or basis.dtype != torch.float64:
            raise InputError(
                f"expected float64 bases of shape (d, k), got {tuple(basis.shape)} in {basis.dtype}"
            )
    every = torch.cat(list(bases), dim=1)
    apart = max_abs(every.mT @ every - identity(every.shape[1]))
    if not apart <= _ORTHOGONAL:
        raise InputError(
            f"the bases must be orthonormal and orthogonal to each other: off by {apart:.1e}"
        )


# Orthogonal subspaces from Hessians: the route that Appendix C conjectures.
#
# With `g_h = W_h x`,
#
#     φ_x(δ) = f([x+δ ; x]) − vᵀx = Σ_h σ(g_hᵀδ)·v_hᵀδ,    ∇²φ_x(0) = ¼ Σ_h (g_h v_hᵀ + v_h g_hᵀ).
#
# If the heads are in orthogonal subspaces, all these Hessians are block-diagonal in one
# basis. The paper proposes finite differences and a finest simultaneous
# block-diagonalisation (Murota et al.) without proof. What makes it work here:
#
# - `φ_x(δ) − ½vᵀδ = ½ Σ_h tanh(g_hᵀδ/2)·v_hᵀδ` is even in δ, and v is known exactly: one answer
#   gives one entry of the quadratic form with an error of second order, z²/12 for scores of size z.
#   If x is shortened by as much as δ is lengthened, rounding costs ε/z. Measured errors, relative
#   to the largest entry: 1e-10 with one answer per entry, 2e-12 with two (one step of Richardson).
# - A Hessian only has rank 2H, so one x cannot show whole subspaces, but two are enough: they show
#   `span(v_h, W_h x_1, W_h x_2)` of each head, a block that no basis splits further. The rest of
#   the subspace is grown from it (`_Growth`).
# - The commutant is computed on the range of the Hessians only: 3H dimensions instead of d.

_REACH = 2.0**40
_START = 2.0**-16  # s² at which the size of the scores is first measured
_LARGEST = 2.0**30
_LARGE = 1e-2


@dataclass(frozen=True)
class QuadraticForms:
    """`½ δᵀ∇²φ_x(0)δ` by finite differences, with scores of about the size `step`."""

    oracle: Oracle
    v: Tensor
    step: float
    levels: int

    def hessian(self, x: Tensor, stream: Stream) -> Tensor:
        """Return ∇²φ_x(0), from d(d+1)/2 forms in a random orthonormal basis."""
        d = len(x)
        Q = random_orthogonal(d, stream)
        i, j = torch.triu_indices(d, d)
        square = self._scale(Q, x)
        if square is None:
            return zeros(d, d)
        # (q_i + q_j)/√2 has length 1 off the diagonal, q_i on it.
        pairs = torch.where((i == j)[:, None], Q[i], (Q[i] + Q[j]) / 2**0.5)
        H = zeros(d, d)
        H[i, j] = H[j, i] = 2 * self._extrapolated(pairs, x, square)
        half = H.diagonal() / 2
        entries = H - half[None] - half[:, None]
        entries.diagonal().copy_(H.diagonal())
        return Q.mT @ entries @ Q

    def _extrapolated(
        self,
        deltas: Tensor,
        x: Tensor,
        square: float,
    ) -> Tensor:
        """Extrapolate by Richardson: errors are even powers of the scale, halved each time."""
        table: list[Tensor] = []
        for level in range(self.levels):
            row = [self._forms(deltas, x, square / 2**level)]
            for power, coarse in enumerate(table, start=1):
                row.append(row[-1] + (row[-1] - coarse) / (4**power - 1))
            table = row
        return table[-1]

    def _forms(
        self,
        deltas: Tensor,
        x: Tensor,
        square: float,
    ) -> Tensor:
        """Return `(φ_x(tδ) − ½t·vᵀδ) / t²` with `t·x` in place of x: the score is square·δᵀWx."""
        short = square / _REACH
        last = short * x
        tokens = torch.stack([_REACH * deltas + last, last.expand_as(deltas)], 1)
        answers = ask_scores(self.oracle, tokens) / _REACH
        alone = short / _REACH * (self.v @ x)
        return (answers - alone - deltas @ self.v / 2) / square

    def _scale(self, Q: Tensor, x: Tensor) -> float | None:
        """Return the square with scores of about the size `step`; None if nothing is curved."""
        probes = (normalized(self.v) + Q[:4]) / 2**0.5
        square = _START
        for _ in range(MAX_SCALES):
            curvature = self._forms(probes, x, square) / (probes @ self.v)
            size = max_abs(curvature) * 4
            if size * square > 0.1:
                square /= 2.0**12
            elif size * square > 1e-9:
                return self.step / size
            elif square > _LARGEST:
                return None
            else:
                square *= 2.0**16
        raise Unsuccessful(Status.SATURATED, "no scale shows how the answers curve")


def finest_blocks(
    hessians: list[Tensor],
    noise: float,
    stream: Stream,
) -> list[Tensor]:
    """Return orthonormal bases (d×k) of the finest subspaces that all symmetric matrices preserve.

    `noise` is the error of the matrices, relative to the largest.
    """
    left, sizes, _ = torch.linalg.svd(torch.cat(hessians, dim=1))
    if not sizes[0] > 0:
        return []
    frame = left[:, : _gap(sizes / sizes[0], noise)]
    commuting = _commutant([frame.mT @ H @ frame / sizes[0] for H in hessians], noise)
    mix = normal(stream, len(commuting))
    values, vectors = torch.linalg.eigh(torch.einsum("c,cij->ij", mix, commuting))
    # There are as many eigenvalues as the commutant has dimensions: cut at the widest
    # gaps.
    widest = values.diff().argsort(descending=True)[: len(commuting) - 1]
    cuts = (widest.sort().values + 1).tolist()
    return [frame @ block for block in torch.tensor_split(vectors, cuts, dim=1)]


def _gap(sizes: Tensor, noise: float) -> int:
    """Return how many of the falling sizes are above their widest gap, if noise has this size."""
    logs = torch.cat([sizes, tensor([noise])]).clamp(min=noise).log()
    drops = logs[:-1] - logs[1:]
    drops[sizes[1:].ge(_LARGE).nonzero()] = 0  # large sizes are not noise
    return int(drops.argmax()) + 1


def _commutant(matrices: list[Tensor], noise: float) -> Tensor:
    """Return an orthonormal basis (c, n, n) of the symmetric matrices that commute with all."""
    n = len(matrices[0])
    i, j = torch.triu_indices(n, n)
    index = torch.arange(len(i))
    basis = zeros(len(i), n, n)
    basis[index, i, j] = basis[index, j, i] = torch.where(
        i == j, 1.0, 0.5**0.5
    ).double()
    brackets = torch.cat([(basis @ H - H @ basis).flatten(1) for H in matrices], dim=1)
    left, sizes, _ = thin_svd(brackets)
    # The identity commutes with everything, so the last size is always noise.
    count = _gap(sizes[:-1], noise) if len(sizes) > 1 else 0
    return torch.einsum("ac,aij->cij", left[:, count:], basis)
