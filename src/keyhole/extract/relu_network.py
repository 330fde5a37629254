"""Two-layer ReLU networks without biases, with about m·d queries for m neurons.

Section 4.1 of *Provably Learning Attention with Queries* (arXiv 2601.16873) assumes a
learner for `φ(x) = wᵀ ReLU(A x)`; this is one. Since ReLU(z) = (|z| + z)/2,

    φ(x) = E(x) + ℓᵀx,   E(x) = ½ Σ_k w_k |a_kᵀx|,   ℓ = ½ Aᵀw = the odd part of φ:  2d queries

and E, which is even and linear between hyperplanes, is learned from one half circle:

    find every kink on x(θ) = a cos θ + b sin θ (`find_pieces`)      about 7 queries a kink
    G_j = ∇E in each piece, from steps across the circle              d − 1 queries a kink
    G_j − G_{j−1} = ±w_k a_k; its sign along θ is that of w_k

Departures and choices:

- A gradient is taken at the longest steps that should stay inside its piece. One more query tests
  that they did, and if not, shorter steps follow.
- A piece between two close kinks only allows short steps, so its gradient is less exact. By then
  the signs of all neurons are known, so E is linear in the missing part, and a few
  queries from the whole region where the two neurons differ give it by least squares
  (`polish`).
- The difference between answers and model is again such a function, and is searched once more.
- Only the function can be known. Parallel neurons merge; antiparallel ones share a hyperplane and
  leave a linear part; neurons with w_k = 0 or a_k = 0 leave nothing. Orientations
  follow from `Σ_k ±½ w_k a_k = ℓ` if a solution is found (`neurons`); if not, two more
  neurons carry the linear remainder.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from keyhole.core import mismatch
from keyhole.core.errors import expect_count, expect_number
from keyhole.core.float64 import normal, random_stream, tensor, zeros
from keyhole.core.numerics import least_squares
from keyhole.extract.bilinear import (
    ask_scores,
    ask_through,
    lengths,
    max_abs,
    random_orthogonal,
    random_units,
)
from keyhole.extract.extraction import Step, setting
from keyhole.extract.judge import Exam, Method
from keyhole.oracle.planted import ReluFfn
from keyhole.oracle.protocol import BudgetExhausted, Oracle

_MOST = 1024  # the most neurons, if the caller gives no width
_STEP = (
    1 / 16
)  # share of the distance to the nearest kink: one step in twenty leaves the piece
_SHORTER = 0.25
_TRIES = 8
_SHORT = 1e-4  # gradients taken at shorter steps are polished
# the most unknowns of one least squares problem: more take longer than the queries
_POLISHED = 512
_CHOICE = 8  # vectors drawn for each polishing query, from which the best is used
_ROUNDS = 3
# share of the largest remainder that a later round takes for errors of the folds
_SLACK = 1e-4
_LOOKS = 4  # intermediate steps
_CHECKS = 8
_AGREES = (
    1e3  # times the resolution: a smaller remainder is rounding, not another neuron
)
_PER_KINK = 7  # measured: queries on the circle


@dataclass(frozen=True)
class ReluNetwork(Method):
    """Exact extraction of a ReLU network from the answers to sequences of length one."""

    width: int | None = setting(None, "the largest number of neurons, if it is known")
    seed: int = 0
    tolerance: float = 1e-8
    resolution: float = setting(
        1e-12,
        "how far an answer may be off a linear piece; more if answers are rounded",
    )

    def __post_init__(self) -> None:
        expect_count("width", self.width, 0)
        expect_number("resolution", self.resolution, above=0, below=1)

    def examine(self, oracle: Oracle, step: Step) -> Exam:  # noqa: ARG002
        """Draw single tokens only: in longer sequences, attention may precede the network."""
        return Exam.draw(oracle, self.seed, (1,) * 5)

    def expected_queries(self, dim: int) -> int | None:
        """Return an estimate: the search on the circle depends on where the kinks lie."""
        if self.width is None:
            return None
        return 2 * dim + self.width * (dim - 1 + _PER_KINK)

    def steps(self, oracle: Oracle) -> Iterator[Step]:
        d = oracle.dim
        stream = random_stream(self.seed)
        frame = random_orthogonal(d, stream)
        target = _Target.measure(oracle, frame, self.resolution)
        most = None if self.width is None else d * max(2, self.width)
        yield target.partial(d, most)
        for _ in range(_ROUNDS):
            folds = yield from self._round(target, frame, stream)
            target = replace(target, folds=target.folds.joined(folds))
            if target.agrees(stream):
                break
            frame = random_orthogonal(d, stream)
        model, unknowns = target.network()
        yield Step(model, unknowns, unknowns)

    def _round(
        self,
        target: _Target,
        frame: Tensor,
        stream: torch.Generator,
    ) -> Generator[Step, None, Folds]:
        """Return the folds that the target's remainder shows on one half circle."""
        d = len(frame)
        if d == 1:
            remainder = target.remainder(frame)
            return Folds(2 * remainder.abs()[:, None], remainder.sign())
        pieces = self._pieces(target, frame[:2])
        m = len(pieces.kinks)
        if not m:
            return Folds.none(d)
        gradients = _Gradients(target, frame, pieces)

        def known() -> Step:
            folds, full = gradients.folds()
            at = replace(target, folds=target.folds.joined(folds))
            return at.partial(d + 2 * m + full * (d - 2), (m + 1) * d)

        yield known()
        try:
            for rows in torch.arange(m).split(max(1, m // _LOOKS)):
                gradients.measure(rows)
                yield known()
        except BudgetExhausted:
            yield known()
            raise
        gradients.polish(stream)
        return gradients.folds()[0]

    def _pieces(self, target: _Target, plane: Tensor) -> Pieces:
        """Find the pieces of the remainder on the half circle of a plane."""
        limit = _MOST if self.width is None else self.width

        def values(t: Tensor) -> Tensor:
            return target.remainder(_on_circle(t) @ plane)

        pieces = find_pieces(values, target.tolerance, limit)
        kinks = len(pieces.kinks)
        if kinks > limit:
            raise mismatch(
                f"{kinks:,} hyperplanes found, more than {limit:,} neurons have"
            )
        return pieces


@dataclass(frozen=True)
class _Target:
    """The even part of the oracle's answers, less the folds found so far."""

    oracle: Oracle
    linear: Tensor
    unit: float
    resolution: float
    folds: Folds

    @classmethod
    def measure(
        cls,
        oracle: Oracle,
        frame: Tensor,
        resolution: float,
    ) -> _Target:
        """Measure `ℓᵀq = (φ(q) − φ(−q))/2` for an orthonormal frame, with 2d queries.

        Later answers are in units of the largest of these, so that no size of weights
        overflows.
        """
        d = len(frame)
        blank = cls(oracle, zeros(d), 1.0, resolution, Folds.none(d))
        answers = blank.remainder(torch.cat([frame, -frame]))
        unit = max_abs(answers) or 1.0
        forth, back = (answers / unit).chunk(2)
        return replace(blank, linear=0.5 * (forth - back) @ frame, unit=unit)

    def partial(self, known: int, unknowns: int | None) -> Step:
        return Step(self.network(orient=False)[0], known, unknowns)

    def network(self, *, orient: bool = True) -> tuple[ReluFfn, int]:
        """Return what is known as neurons, and the number of their unknowns."""
        model, unknowns = neurons(self.folds, self.linear, orient=orient)
        return ReluFfn(self.unit * model.A, model.w), unknowns

    def remainder(self, x: Tensor) -> Tensor:
        """Return what the model does not explain at points (…, d), also when a budget ends."""
        points = x.reshape(-1, x.shape[-1])

        def unexplained(answers: Tensor) -> Tensor:
            at = points[: len(answers)]
            return answers / self.unit - at @ self.linear - self.folds(at)

        rest = ask_through(self.oracle, points[:, None], unexplained, ask_scores)
        return rest.reshape(x.shape[:-1])

    def tolerance(self, values: Tensor) -> float:
        """Return the error of values: rounding, and that of the folds once some are known."""
        largest = max_abs(values)
        slack = _SLACK * largest if len(self.folds) else 0.0
        return max(self.resolution * max(1.0, largest), slack)

    def agrees(self, stream: torch.Generator) -> bool:
        """Return whether random points leave no remainder but rounding."""
        x = random_units(_CHECKS, len(self.linear), stream)
        return max_abs(self.remainder(x)) <= _AGREES * self.resolution


class _Gradients:
    """The gradients G_j of the target, one for each piece of the half circle."""

    def __init__(
        self,
        target: _Target,
        frame: Tensor,
        pieces: Pieces,
    ) -> None:
        self._target = target
        self._plane = frame[:2]
        self._across = frame[2:]
        self._kinks = pieces.kinks
        angles = _on_circle(pieces.middles)
        self._centres = angles @ self._plane
        self._levels = (angles * pieces.planar).sum(1)
        self._steps = _STEP * (pieces.widths / 2).sin()
        self._gradients = pieces.planar @ self._plane
        self._measured = torch.full(pieces.kinks.shape, len(frame) == 2)

    def measure(self, indices: Tensor) -> None:
        """Complete the gradients of some pieces: d − 1 queries each, more if a step is too long."""
        if not len(self._across):
            return
        test = -self._across.sum(0, keepdim=True) / math.sqrt(len(self._across))
        directions = torch.cat([self._across, test])
        for _ in range(_TRIES):
            steps = self._steps[indices, None, None] * directions
            points = self._centres[indices, None] + steps
            try:
                values = self._target.remainder(points)
            except BudgetExhausted as end:
                paid = zeros(0) if end.answers is None else end.answers
                full = len(paid) // len(directions)
                if full:
                    rows = paid[: full * len(directions)].reshape(full, -1)
                    self._record(indices[:full], rows)
                raise
            indices = self._record(indices, values)
            if not len(indices):
                return
            self._steps[indices] *= _SHORTER

    def _record(self, rows: Tensor, values: Tensor) -> Tensor:
        """Set gradients from values at steps across the circle; return the pieces steps left."""
        rises = values - self._levels[rows, None]
        slopes = rises[:, :-1] / self._steps[rows, None]
        planar = (self._gradients[rows] @ self._plane.mT) @ self._plane
        self._gradients[rows] = planar + slopes @ self._across
        self._measured[rows] = True
        expected = -rises[:, :-1].sum(1) / math.sqrt(len(self._across))
        left = (rises[:, -1] - expected).abs() > 4 * self._target.tolerance(values)
        return rows[left]

    def folds(self) -> tuple[Folds, int]:
        """Return `n_k = ±(G_k − G_{k−1})`, and how many of them are known in all directions."""
        # After half a turn, E is the same and its gradient is the opposite.
        before = torch.cat([-self._gradients[-1:], self._gradients[:-1]])
        full = self._measured & self._measured.roll(1)
        jumps = self._gradients - before
        planar = (jumps @ self._plane.mT) @ self._plane
        jumps = torch.where(full[:, None], jumps, planar)
        onward = _on_circle(self._kinks + math.pi / 2) @ self._plane
        signs = _signs((jumps * onward).sum(1))
        return Folds(jumps, signs), int(full.sum())

    def polish(self, stream: torch.Generator) -> None:
        """Improve the gradients that were taken at short steps, with d + 2 queries each."""
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
        rows = (share[..., None] * x[:, None]).flatten(1)
        missing = self._target.remainder(x) - folds(x)
        self._gradients[worst] += least_squares(rows, missing).reshape(-1, d)

    def _between(
        self,
        folds: Folds,
        j: int,
        stream: torch.Generator,
    ) -> Tensor:
        """Return unit vectors between the two folds of piece j, and far from all others."""
        d = len(self._centres[0])
        units = folds.normals / lengths(folds.normals)[:, None]
        pair = units[[j, (j + 1) % len(units)]]
        x = normal(stream, _CHOICE * (d + 2), d)
        heights = x @ pair.mT
        wanted = heights.abs() * (pair @ self._centres[j]).sign()
        x = x + (wanted - heights) @ torch.linalg.pinv(pair).mT
        x = x / lengths(x)[:, None]
        clearance = (x @ units.mT).abs().amin(1)
        return x[clearance.argsort(descending=True)[: d + 2]]


# All kinks of a piecewise linear function on one half circle.
#
# A function that is linear between hyperplanes through the origin has, along `x(θ) = a
# cos θ + b sin θ`, the form `p cos θ + q sin θ` between kinks. A half circle crosses
# every hyperplane once. An even function has E(θ + π) = E(θ), so the half circle closes
# and has no ends that need special treatment.
#
# Each level of the search sends one batch. If three neighbouring answers fit one piece,
# the two arcs between them are settled. If an open arc lies between two settled ones,
# their pieces intersect at some angle in it: the kink, if there is only one. The next
# queries are just before and just after that angle. If each still fits its piece, the
# arc between them holds the kink, which is then known to rounding without a long
# bisection. (A query at the intersection itself would be no test: with two kinks of
# opposite sign on the same side of it, it fits both pieces.) Other open arcs are
# halved.

_FIRST = 16  # points of the first level
_LEVELS = 64
_FINEST = 1e-10  # shorter arcs are not divided: what is in them counts as one kink
_REACH = 0.05  # an arc is only settled by a neighbour at least this long relative to it
_LONGER = 4.0
# the queries next to a kink are where its two pieces differ by so many tolerances
_CLEAR = 1e3


@dataclass(frozen=True)
class Pieces:
    """Kinks in rising order; piece j is from kink j to the next, the last one to kinks[0] + π.

    `planar` (m, 2) holds p and q of each piece, for angles between kinks[0] and
    kinks[0] + π.
    """

    kinks: Tensor
    planar: Tensor

    @property
    def widths(self) -> Tensor:
        return _widths(self.kinks)

    @property
    def middles(self) -> Tensor:
        return self.kinks + self.widths / 2


def _widths(kinks: Tensor) -> Tensor:
    return kinks.diff(append=kinks[:1] + math.pi)


def _on_circle(angles: Tensor) -> Tensor:
    return torch.stack([angles.cos(), angles.sin()], 1)


def _signs(values: Tensor) -> Tensor:
    return torch.where(values < 0, -1.0, 1.0).double()


def find_pieces(
    values: Callable[[Tensor], Tensor],
    tolerance: Callable[[Tensor], float],
    limit: int,
) -> Pieces:
    """Return every kink of `values`, a function of angles with period π.

    `tolerance` returns, for the values so far, how far a value may be off its piece.
    Raise Unsuccessful if there are more than `limit` kinks.
    """
    t = (torch.arange(_FIRST, dtype=torch.float64) + 0.5) * (math.pi / _FIRST)
    y = values(t)
    for _ in range(_LEVELS):
        search = _Search(t, y, tolerance(y))
        t_new = search.next_points()
        if not len(t_new):
            return search.pieces()
        if len(t_new) > 4 * limit + _FIRST:
            break
        t, order = torch.cat([t, t_new]).sort()
        y = torch.cat([y, values(t_new)])[order]
    raise mismatch(f"the answers bend in more than {limit:,} places of a half circle")


class _Search:
    """What the values so far show: which arcs are settled, and which angles to ask for next.

    Arc i is from point i to the next one, and the last arc from the last point to the
    first.
    """

    def __init__(
        self,
        t: Tensor,
        y: Tensor,
        tolerance: float,
    ) -> None:
        self._t = t
        self._y = y
        self._tolerance = tolerance
        self._arcs = (t.roll(-1) - t).remainder(math.pi)
        before = self._arcs.roll(1)
        after = self._arcs
        chord = (y.roll(1) * after.sin() + y.roll(-1) * before.sin()) / (
            before + after
        ).sin()
        self._straight = (y - chord).abs() <= tolerance
        by_left = self._straight & (before >= _REACH * after)
        by_right = self._straight.roll(-1) & (after.roll(-1) >= _REACH * after)
        self._settled = by_left | by_right
        between = self._settled.roll(1) & self._settled.roll(-1) & ~self._settled
        meeting, self._bend = self._meetings()
        # From short neighbours, the pieces are too inexact to tell a kink from
        # rounding.
        doubt = 4 * tolerance * (1 / before + 1 / after.roll(-1))
        self._meets = between & (meeting > 0) & (meeting < after) & (self._bend > doubt)
        self._meeting = torch.where(self._meets, meeting, after / 2)
        sharp = self._meets & (self._bend * after <= 4 * _CLEAR * tolerance)
        self._bridge = ~self._settled & (sharp | (after <= _FINEST))

    def _meetings(self) -> tuple[Tensor, Tensor]:
        """Return how far after point i the pieces around arc i meet, and how much they differ."""
        # With angles counted from point i, both pieces are `p cos + q sin`.
        p = self._y
        back = self._arcs.roll(1)
        turn = self._arcs
        q = (p * back.cos() - p.roll(1)) / back.sin()
        value = self._y.roll(-1)
        on = self._arcs.roll(-1)
        slope = (self._y.roll(-2) - value * on.cos()) / on.sin()
        p_far = value * turn.cos() - slope * turn.sin()
        q_far = value * turn.sin() + slope * turn.cos()
        angle = torch.atan2(p_far - p, q - q_far).remainder(math.pi)
        return angle, torch.hypot(p_far - p, q_far - q)

    def next_points(self) -> Tensor:
        """Return two points next to each meeting, and the middle of every other open arc."""
        meets = self._meets & ~self._bridge
        # An open arc next to a much longer open one waits: that may settle it once
        # divided.
        open_arcs = torch.where(self._settled, 0.0, self._arcs)
        longest = torch.maximum(open_arcs.roll(1), open_arcs.roll(-1))
        halved = ~(
            self._settled
            | self._bridge
            | self._meets
            | (longest > _LONGER * self._arcs)
        )
        start = self._t[meets]
        at = self._meeting[meets]
        length = self._arcs[meets]
        aside = _CLEAR * self._tolerance / self._bend[meets]
        left = torch.maximum(
            at - 2 * aside, at / 2
        )  # uneven: half way must not be the kink
        right = torch.minimum(at + aside, (at + length) / 2)
        middles = self._t[halved] + self._arcs[halved] / 2
        return torch.cat([start + left, start + right, middles]).remainder(math.pi)

    def pieces(self) -> Pieces:
        """Return the kinks and pieces, once no more points are needed."""
        # A kink may also be exactly at a point: both arcs next to it are settled.
        hit = ~self._straight & ~self._bridge & ~self._bridge.roll(1)
        found = hit | self._bridge
        kinks = (self._t + torch.where(hit, 0.0, self._meeting))[found]
        if not len(kinks):
            return Pieces(kinks, zeros(0, 2))
        kinks = kinks[0] + (kinks - kinks[0]).remainder(math.pi)
        t = kinks[0] + (self._t - kinks[0]).remainder(math.pi)
        return Pieces(kinks, _fit(kinks, t, self._y))


def _fit(
    kinks: Tensor,
    t: Tensor,
    y: Tensor,
) -> Tensor:
    """Return p and q (m, 2) of each piece by least squares."""
    m = len(kinks)
    half = _widths(kinks) / 2
    middles = kinks + half
    reach = half.sin()
    piece = torch.searchsorted(kinks, t, right=True) - 1
    # Counted from the middle and in units of the width, the two unknowns hardly mix.
    angle = t - middles[piece]
    rows = torch.stack([angle.cos(), angle.sin() / reach[piece]], 1)
    square = zeros(m, 2, 2).index_add(0, piece, rows[..., None] * rows[:, None])
    moment = zeros(m, 2, 1).index_add(0, piece, (rows * y[:, None])[..., None])
    p, q = (torch.linalg.pinv(square) @ moment)[..., 0].unbind(1)
    c = middles.cos()
    s = middles.sin()
    q = q / reach
    return torch.stack([c * p - s * q, s * p + c * q], 1)


# Sums of folds, `E(x) = ½ Σ_k s_k |n_kᵀx|` with s_k = ±1: the even part of a ReLU
# network.
#
# A neuron w·ReLU(aᵀx) is the fold of n = |w|·a with s = sign(w), plus a linear
# function. Folds and the linear part ℓ of the whole are turned into neurons again:
#
#     E(x) + ℓᵀx = Σ_k s_k ReLU(o_k n_kᵀx) + rᵀx,   r = ℓ − ½ Σ_k s_k o_k n_k,   any o_k = ±1.
#
# The true orientations make r = 0. If the n_k are independent, they solve a linear
# system. With up to about 2d neurons, the cube [−1, 1]^m generically meets the affine
# space of solutions only in that corner, and alternating reflections find it. With more
# neurons it is a subset-sum problem: if they are few, all corners are tried; if not,
# two more neurons, ReLU(rᵀx) − ReLU(−rᵀx), carry the remainder, so that the function is
# exact in any case.

_REFLECTIONS = 200
_FEW = 14  # neurons for which all orientations are tried
_EXACT = 1e-10  # a remainder below this share of the sum of the folds is rounding


@dataclass(frozen=True)
class Folds:
    """The normals n_k (m, d) and signs s_k (m,)."""

    normals: Tensor
    signs: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return 0.5 * (x @ self.normals.mT).abs() @ self.signs

    def __len__(self) -> int:
        return len(self.signs)

    def joined(self, other: Folds) -> Folds:
        normals = torch.cat([self.normals, other.normals])
        return Folds(normals, torch.cat([self.signs, other.signs]))

    @classmethod
    def none(cls, d: int) -> Folds:
        return cls(zeros(0, d), zeros(0))


def neurons(
    folds: Folds,
    linear: Tensor,
    *,
    orient: bool = True,
    exact: float = _EXACT,
) -> tuple[ReluFfn, int]:
    """Return a network with these folds and this linear part, and the number of its unknowns.

    A remainder of up to `exact` of the sum of the folds counts as an error, not as two
    neurons.
    """
    halves = 0.5 * folds.signs[:, None] * folds.normals
    o = _orientations(halves, linear, exact) if orient else torch.ones_like(folds.signs)
    remainder = linear - o @ halves
    A = o[:, None] * folds.normals
    w = folds.signs
    if remainder.norm() <= exact * (lengths(halves).sum() + linear.norm()):
        # ℓ was read directly and is more exact: spread the difference over the neurons.
        A = A + (2 / max(1, len(w))) * torch.outer(w, remainder)
        return ReluFfn(A, w), max(A.numel(), len(linear))
    A = torch.cat([A, torch.stack([remainder, -remainder])])
    w = torch.cat([w, tensor([1.0, -1.0])])
    return ReluFfn(A, w), A.numel() - len(remainder)  # two neurons, one vector


def _orientations(
    halves: Tensor,
    linear: Tensor,
    exact: float,
) -> Tensor:
    """Return signs o with `oᵀ halves = ℓ` if they are found, and other signs if not."""
    inverse = torch.linalg.pinv(halves)  # (d, m)
    allowed = exact * lengths(halves).sum()
    z = zeros(len(halves))
    o = torch.ones_like(z)
    # With independent normals there is one solution, and the first pass finds it.
    independent = int(torch.linalg.matrix_rank(halves)) == len(halves)
    for _ in range(1 if independent else _REFLECTIONS):
        solution = z - (z @ halves - linear) @ inverse
        o = _signs(solution)
        if (o @ halves - linear).norm() <= allowed:
            return o
        z = z + (2 * solution - z).clamp(-1, 1) - solution
    if independent or len(halves) > _FEW:
        return o
    corners = torch.cartesian_prod(*[tensor([-1.0, 1.0])] * len(halves))
    corners = corners.reshape(-1, len(halves))
    return corners[lengths(corners @ halves - linear).argmin()]
