"""Two-layer ReLU networks without biases, with about m·d queries for m neurons.

Section 4.1 of *Provably Learning Attention with Queries* (arXiv 2601.16873) assumes a learner for
`φ(x) = wᵀ ReLU(A x)`; this is one. Since ReLU(z) = (|z| + z)/2,

    φ(x) = E(x) + ℓᵀx,   E(x) = ½ Σ_k w_k |a_kᵀx|,   ℓ = ½ Aᵀw = the odd part of φ:  2d queries

and E, being even and linear between hyperplanes, is learnt from one half circle:

    find every kink on x(θ) = a cos θ + b sin θ (half_circle.py)      about 7 queries a kink
    G_j = ∇E in each piece, at steps across the circle                d − 1 queries a kink
    G_j − G_{j−1} = ±w_k a_k; its sign along θ is that of w_k

Departures and choices:

- A gradient is taken at steps as long as the piece seems to allow; one more question tests that
  they stayed inside, and shorter steps follow where they did not.
- A piece between two close kinks allows short steps only, and its gradient is known worse. The
  signs of all neurons are known by then, so E is linear in what is missing: a few questions from
  the whole region where the two neurons differ settle it by least squares (`polish`).
- What remains between answers and model is again such a function: it is searched once more.
- The function is what can be known. Parallel neurons merge; antiparallel ones share a hyperplane
  and leave a linear part; w_k = 0 or a_k = 0 leave nothing. Orientations follow from
  `Σ_k ±½ w_k a_k = ℓ` where that has an answer (absolute_terms.py); where none is found, two more
  neurons carry the linear remainder.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from keyhole.core import Status, Unsuccessful
from keyhole.core.errors import InputError
from keyhole.core.numerics import least_squares
from keyhole.extract.bilinear import batch_rows, random_orthogonal, scalar
from keyhole.extract.extraction import Extraction
from keyhole.extract.judge import Exam, settle
from keyhole.extract.relu.absolute_terms import Folds, neurons
from keyhole.extract.relu.half_circle import Pieces, find_pieces
from keyhole.extract.step import Step
from keyhole.oracle.planted import ReluFfn
from keyhole.oracle.protocol import BudgetExhausted, Oracle, ask

_MOST = 1024  # neurons, where the caller names no width
_STEP = 1 / 16  # of the distance to the nearest kink: leaves the piece one time in twenty
_SHORTER = 0.25
_TRIES = 8
_SHORT = 1e-4  # a gradient taken at shorter steps is worth polishing
_POLISHED = 512  # unknowns of one least squares problem: more take longer than the oracle does
_CHOICE = 8  # how many vectors to choose each of the polishing questions from
_ROUNDS = 3
_SLACK = 1e-4  # of a later round's largest remainder
_LOOKS = 4  # at the state on the way
_CHECKS = 8
_AGREES = 1e3  # resolutions: what remains is rounding and its growth, not another neuron
_PER_KINK = 7  # measured: questions on the circle
_LENGTHS = (1, 1, 1, 1, 1)  # the judge's sequences: other lengths may say something else


@dataclass(frozen=True)
class ReluNetwork:
    """Exact extraction of a ReLU network from the answers to sequences of length one.

    `width` is the largest number of neurons, if it is known. Answers within `resolution` of a
    linear piece, relative to the largest, are on it: raise it for an oracle that rounds.
    """

    width: int | None = None
    seed: int = 0
    tolerance: float = 1e-8
    resolution: float = 1e-12

    def __post_init__(self) -> None:
        if self.width is not None and self.width < 0:
            raise InputError(f"expected a width of 0 or more, got {self.width}")
        if not 0 < self.resolution < 1:
            raise InputError(f"expected a resolution between 0 and 1, got {self.resolution}")

    def __call__(self, oracle: Oracle) -> Extraction:
        return settle(self, oracle, examine=_one_token)

    def expected(self, dim: int) -> int | None:
        """About; the search on the circle depends on where the kinks lie."""
        return None if self.width is None else 2 * dim + self.width * (dim - 1 + _PER_KINK)

    def steps(self, oracle: Oracle) -> Iterator[Step]:
        d = oracle.dim
        stream = torch.Generator().manual_seed(self.seed)
        frame = random_orthogonal(d, stream)
        target = _Target.meet(oracle, frame, self.resolution)
        yield _partial(target, d, None if self.width is None else d * max(2, self.width))
        for _ in range(_ROUNDS):
            folds = yield from self._round(target, frame, stream)
            target = replace(target, folds=target.folds.joined(folds))
            if target.agrees(stream):
                break
            frame = random_orthogonal(d, stream)
        model, unknowns = target.network()
        yield Step(model, known=unknowns, floor=unknowns)

    def _round(
        self, target: _Target, frame: Tensor, stream: torch.Generator
    ) -> Generator[Step, None, Folds]:
        """The folds that the target's present remainder shows on one half circle."""
        d = len(frame)
        if d == 1:
            remainder = target.remainder(frame)
            return Folds(2 * remainder.abs().unsqueeze(1), remainder.sign())
        pieces = self._pieces(target, frame[:2])
        m = len(pieces.kinks)
        if not m:
            return Folds.none(d)
        cells = _Cells(target, frame, pieces)

        def known() -> Step:
            folds, full = cells.folds()
            at = replace(target, folds=target.folds.joined(folds))
            return _partial(at, known=d + 2 * m + full * (d - 2), floor=(m + 1) * d)

        yield known()
        try:
            for rows in torch.arange(m).split(max(1, m // _LOOKS)):
                cells.measure(rows)
                yield known()
        except BudgetExhausted:
            yield known()
            raise
        cells.polish(stream)
        return cells.folds()[0]

    def _pieces(self, target: _Target, plane: Tensor) -> Pieces:
        limit = _MOST if self.width is None else self.width

        def values(t: Tensor) -> Tensor:
            return target.remainder(torch.stack([t.cos(), t.sin()], 1) @ plane)

        pieces = find_pieces(values, target.tolerance, limit)
        kinks = len(pieces.kinks)
        if kinks > limit:
            raise Unsuccessful(
                Status.MISMATCH, f"{kinks:,} hyperplanes found, {limit:,} neurons expected"
            )
        return pieces


def _one_token(oracle: Oracle, seed: int, step: Step) -> Exam:  # noqa: ARG001
    return Exam.draw(oracle, seed, _LENGTHS)


def _partial(target: _Target, known: int, floor: int | None) -> Step:
    return Step(target.network(orient=False)[0], known=known, floor=floor)


@dataclass(frozen=True)
class _Target:
    """The even part of the oracle's answers, less the folds that are known."""

    oracle: Oracle
    linear: Tensor
    unit: float
    resolution: float
    folds: Folds

    @classmethod
    def meet(cls, oracle: Oracle, frame: Tensor, resolution: float) -> _Target:
        """`ℓᵀq = (φ(q) − φ(−q))/2` for an orthonormal frame: 2d queries.

        From here on answers are in units of the largest of these, so that no size of the weights
        can overflow or vanish.
        """
        d = len(frame)
        zero = torch.zeros(d, dtype=torch.float64)
        blank = cls(oracle, zero, 1.0, resolution, Folds.none(d))
        answers = blank.remainder(torch.cat([frame, -frame]))
        largest = float(answers.abs().max())
        answers = answers / (unit := largest or 1.0)
        return replace(blank, linear=0.5 * (answers[:d] - answers[d:]) @ frame, unit=unit)

    def network(self, *, orient: bool = True) -> tuple[ReluFfn, int]:
        """What is known as neurons, and the number of their unknowns."""
        model, unknowns = neurons(self.folds, self.linear, orient=orient)
        return ReluFfn(self.unit * model.A, model.w), unknowns

    def remainder(self, x: Tensor) -> Tensor:
        """What the answers at (…, d) leave. If the budget ends, the exception holds a part."""
        points = x.reshape(-1, x.shape[-1])
        answers: list[Tensor] = []
        try:
            for part in points.split(batch_rows(1, points.shape[1])):
                answers.append(scalar(ask(self.oracle, part.unsqueeze(1))))
        except BudgetExhausted as end:
            answers += [] if end.answers is None else [end.answers]
            done = torch.cat(answers) if answers else torch.empty(0, dtype=torch.float64)
            raise BudgetExhausted(end.budget, self._even(points[: len(done)], done)) from end
        return self._even(points, torch.cat(answers)).reshape(x.shape[:-1])

    def _even(self, points: Tensor, answers: Tensor) -> Tensor:
        return answers / self.unit - points @ self.linear - self.folds(points)

    def tolerance(self, values: Tensor) -> float:
        """Rounding; and once folds are known, their errors, which are not to be taken for kinks."""
        largest = float(values.abs().max())
        slack = _SLACK * largest if len(self.folds) else 0.0
        return max(self.resolution * max(1.0, largest), slack)

    def agrees(self, stream: torch.Generator) -> bool:
        x = torch.randn(_CHECKS, len(self.linear), generator=stream, dtype=torch.float64)
        x = x / torch.linalg.vector_norm(x, dim=1, keepdim=True)
        return float(self.remainder(x).abs().max()) <= _AGREES * self.resolution


class _Cells:
    """The gradients G_j of the target, one for each piece of the half circle."""

    def __init__(self, target: _Target, frame: Tensor, pieces: Pieces) -> None:
        self._target = target
        self._plane, self._across = frame[:2], frame[2:]
        self._kinks = pieces.kinks
        middles = pieces.kinks + pieces.widths / 2
        angles = torch.stack([middles.cos(), middles.sin()], 1)
        self._centres = angles @ self._plane
        self._levels = (angles * pieces.planar).sum(1)
        self._steps = _STEP * (pieces.widths / 2).sin()
        self._gradients = pieces.planar @ self._plane
        self._measured = torch.full(pieces.kinks.shape, len(frame) == 2)

    def measure(self, indices: Tensor) -> None:
        """Complete the gradients of some pieces; d − 1 queries each, more where a step fails."""
        if not len(self._across):
            return
        test = -self._across.sum(0, keepdim=True) / math.sqrt(len(self._across))
        directions = torch.cat([self._across, test])
        for _ in range(_TRIES):
            steps = self._steps[indices, None, None] * directions
            points = self._centres[indices].unsqueeze(1) + steps
            try:
                values = self._target.remainder(points)
            except BudgetExhausted as end:
                full = 0 if end.answers is None else len(end.answers) // len(directions)
                if end.answers is not None and full:
                    rows = end.answers[: full * len(directions)].reshape(full, -1)
                    self._record(indices[:full], rows)
                raise
            indices = self._record(indices, values)
            if not len(indices):
                return
            self._steps[indices] *= _SHORTER

    def _record(self, rows: Tensor, values: Tensor) -> Tensor:
        """Gradients from answers at steps across the circle; returns the pieces that were left."""
        steps, levels = self._steps[rows].unsqueeze(1), self._levels[rows].unsqueeze(1)
        rises = values - levels
        slopes = rises[:, :-1] / steps
        planar = (self._gradients[rows] @ self._plane.mT) @ self._plane
        self._gradients[rows] = planar + slopes @ self._across
        self._measured[rows] = True
        expected = -rises[:, :-1].sum(1) / math.sqrt(len(self._across))
        return rows[(rises[:, -1] - expected).abs() > 4 * self._target.tolerance(values)]

    def folds(self) -> tuple[Folds, int]:
        """`n_k = ±(G_k − G_{k−1})`, and how many of them are known in all directions."""
        # Half a turn on, E is the same and its gradient the opposite.
        before = torch.cat([-self._gradients[-1:], self._gradients[:-1]])
        full = self._measured & self._measured.roll(1)
        jumps = self._gradients - before
        planar = (jumps @ self._plane.mT) @ self._plane
        jumps = torch.where(full.unsqueeze(1), jumps, planar)
        onward = torch.stack([-self._kinks.sin(), self._kinks.cos()], 1) @ self._plane
        signs = torch.where((jumps * onward).sum(1) < 0, -1.0, 1.0).to(torch.float64)
        return Folds(jumps, signs), int(full.sum())

    def polish(self, stream: torch.Generator) -> None:
        """Mend the gradients that were taken at short steps, with d + 2 queries each."""
        d = len(self._centres[0])
        worst = self._steps.argsort()[: max(1, _POLISHED // d)]
        worst = worst[self._steps[worst] < _SHORT]
        if not len(worst) or d == 2:
            return
        folds, _ = self.folds()
        x = torch.cat([self._between(folds, int(j), stream) for j in worst])
        # With σ_k(x) the sign with which n_k enters E, E = Σ_j ½(σ_j − σ_{j+1})·G_jᵀx.
        enters = folds.signs * (x @ folds.normals.mT).sign()
        share = 0.5 * (enters - torch.cat([enters[:, 1:], -enters[:, :1]], 1))[:, worst]
        rows = (share.unsqueeze(2) * x.unsqueeze(1)).flatten(1)
        missing = self._target.remainder(x) - folds(x)
        self._gradients[worst] += least_squares(rows, missing).reshape(-1, d)

    def _between(self, folds: Folds, j: int, stream: torch.Generator) -> Tensor:
        """Unit vectors that lie, like piece j, between its two folds, and clear of all others."""
        d = len(self._centres[0])
        units = folds.normals / torch.linalg.vector_norm(folds.normals, dim=1, keepdim=True)
        pair = units[[j, (j + 1) % len(units)]]
        x = torch.randn(_CHOICE * (d + 2), d, generator=stream, dtype=torch.float64)
        heights = x @ pair.mT
        wanted = heights.abs() * (pair @ self._centres[j]).sign()
        x = x + (wanted - heights) @ torch.linalg.pinv(pair).mT
        x = x / torch.linalg.vector_norm(x, dim=1, keepdim=True)
        clearance = (x @ units.mT).abs().amin(1)
        return x[clearance.argsort(descending=True)[: d + 2]]
