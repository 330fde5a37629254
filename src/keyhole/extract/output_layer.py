"""A language model's last layer from its logits or log-probabilities (Carlini et al., 2403.06634).

    y = W h + b + c·1,    W (v, d),  h the state behind the final norm,  v ≫ d

with c = 0 for logits and c = −log Σ exp for log-probabilities. Whatever the model
computes before, the answers y to random prompts all lie in the space that the columns
of W (and b) span: n of them, as rows of Y, have rank min(n, r), so for n > r singular
values fall off a cliff at r. The right singular vectors are a basis of that space, W·A
for an invertible A. From log-probabilities the mean over tokens is subtracted first: W
is then known up to a row that is added to all rows.

r is d, or near it (`OutputMatrix.width` says which, and how that shows). At least r
answers are needed. We send r/12 more (16 at least), because the effect of errors of the
answers depends on the smallest singular value, which grows like √n − √r.

This gives away the projector P = W (WᵀW)⁻¹ Wᵀ of the centred W, and nothing else. If W
is also the table of input embeddings (tied), those are known up to the same map: which
differences of tokens are parallel, which tokens are linearly dependent, and all angles
and distances after whitening by the table's own covariance, which are entries of P.
Lengths, cosines and inner products of the table itself are W M Wᵀ for an unknown metric
M of d(d + 1)/2 numbers. (The final norm puts all h on one ellipsoid, which determines
M; that takes d(d + 1)/2 answers: `rotation`.)

Departures. The paper takes the steepest fall of singular values. Ours must end on
values that are nearly equal, or above what rounding can cause (`cliff`), so that too
few answers give no width at all. If a target gives only the best k tokens, a bias
raises the wanted ones (token_answers.py): ⌈(v − 1)/(k − 1)⌉ queries a row for all of W,
r/(k − 1) for the width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from keyhole.core import Status, Unsuccessful, not_applicable, not_identifiable
from keyhole.core.errors import InputError, expect_count
from keyhole.core.float64 import EPSILON, TINY, Stream, ones, random_stream, zeros
from keyhole.core.machine import expect_memory
from keyhole.extract.arithmetic import decimals_of
from keyhole.extract.bilinear import max_abs
from keyhole.extract.extraction import Check, Extraction, LastLayer, Step, setting
from keyhole.extract.judge import JUDGE_STREAM, Exam, Method
from keyhole.extract.token_answers import (
    Answers,
    ChosenTokens,
    Prompts,
    WholeVectors,
    is_normalised,
)
from keyhole.models.demo import open_model
from keyhole.models.next_token import unembedding
from keyhole.oracle.planted import OutputMatrix
from keyhole.oracle.protocol import BudgetExhausted, Oracle, stated
from keyhole.oracle.token_questions import DIM, Logits

_FIRST = 32  # rows before the rank is first computed
_SPARE = 16  # rows beyond the rank, at least,
_SHARE = 12  # or the rank divided by this
_ELLIPSOID = 1e-2  # the largest error of |n|² = d, relative to d
_COLUMNS = 8  # tokens in a singular value decomposition, for each of its rows


@dataclass(frozen=True)
class OutputLayer(Method):
    """Extraction of a language model's width and of its last matrix, up to its symmetry."""

    top: int | None = setting(
        None, "how many log-probabilities the target gives, if not all; 0: only a token"
    )
    tokens: int | None = setting(
        None,
        "with top: rows of the matrix to read; by default as many as the width needs",
    )
    length: int = setting(4, "tokens of a random prompt")
    rotation: bool = setting(
        False, "send enough prompts to know the matrix up to a rotation"
    )
    most: int = setting(20_000, "the most prompts to send")
    seed: int = 0
    tolerance: float = 1e-5

    def __post_init__(self) -> None:
        for name in ("top", "tokens", "length", "most"):
            expect_count(name, getattr(self, name), least=int(name != "top"))
        if self.tokens is not None and self.top is None:
            raise InputError(
                "tokens needs top as well: whole answers have all rows of the matrix"
            )

    def __call__(self, oracle: Oracle | Callable[[Tensor], Tensor]) -> Extraction:
        asked = oracle if isinstance(oracle, Oracle) else Logits(oracle)
        return super().__call__(asked)

    def examine(self, oracle: Oracle, step: Step) -> Exam:  # noqa: ARG002
        if not isinstance(step, LayerStep) or step.layer is None:
            raise AssertionError  # `steps` yields nothing else
        stream = random_stream(self.seed ^ JUDGE_STREAM)
        return LayerExam.fresh(step, step.layer, Prompts(self.length, stream))

    def steps(self, oracle: Oracle) -> Iterator[Step]:
        if oracle.dim != DIM:
            raise not_applicable(
                "it takes a language model that is asked by token ids: http://host:port, a "
                "model's folder, or a function of ids"
            )
        stream = random_stream(self.seed)
        answers = self._answers(oracle, stream)
        width = stated(oracle, "width")
        look: _Look | None = None
        goal = _FIRST
        try:
            while look is None or len(look.rows) < goal:
                look = _Look.at(answers.rows(goal), answers, stream)
                goal = look.goal
                if not look.cliff.seen and goal > self.most:
                    raise Unsuccessful(
                        Status.UNSOLVED,
                        f"no cliff in the singular values of {len(look.rows):,} answers",
                    )
        except BudgetExhausted:
            if len(rows := answers.complete_rows()) > 1:
                yield _Look.at(rows, answers, stream).step(width)
            raise
        step = look.step(width)
        yield step
        if self.rotation and step.layer is not None:
            yield self._up_to_rotation(step, step.layer)

    def _up_to_rotation(self, step: LayerStep, layer: LastLayer) -> LayerStep:
        """Return the step with its matrix on the axes of the ellipsoid of the final norm."""
        model = step.model
        differing = model.dim - model.constant
        needed = equations(differing, model.constant)
        found = None
        if layer.blocks:
            why = "a matrix in blocks of 32 adds directions that have no norm"
        elif needed > self.most:
            why = f"a rotation takes {needed:,} answers, and most is {self.most:,}"
        else:
            why = f"{needed:,} answers lie on no one ellipsoid: too few digits, or no final norm"
            rows = centred(step.answers.rows(needed), layer.log_probabilities)
            z = rows @ model.W[:, :differing]
            found = ellipsoid(z, model.width, model.constant)
        if found is None or found[1] > _ELLIPSOID:
            return replace(step, layer=replace(layer, no_rotation=why))
        C, error = found
        W = torch.cat([model.W[:, :differing] @ C, model.W[:, differing:]], 1)
        model = replace(model, W=W.contiguous(), rotated=True)
        return replace(step, model=model, layer=replace(layer, ellipsoid=error))

    def _answers(self, oracle: Oracle, stream: Stream) -> Answers:
        """Return the source of answers: whole vectors, or chosen tokens if there is a `top`."""
        prompts = Prompts(self.length, stream)
        vocabulary = stated(oracle, "vocabulary")
        if self.top is None:
            return WholeVectors(oracle, prompts, vocabulary)
        if vocabulary is None:
            # Only a whole answer shows the vocabulary; a function in this process gives
            # one.
            vocabulary = len(WholeVectors(oracle, prompts, None).fresh(prompts))
        return ChosenTokens(
            oracle, prompts, vocabulary, self.top, self.tokens or 0, 2 * _SPARE, stream
        )


@dataclass(frozen=True, eq=False)
class _Look:
    """What so many rows show."""

    rows: Tensor
    answers: Answers
    log_probabilities: bool
    decimals: int | None
    cliff: Cliff

    @classmethod
    def at(
        cls,
        rows: Tensor,
        answers: Answers,
        stream: Stream,
    ) -> _Look:
        """Find the cliff in these rows; raise Unsuccessful if more rows cannot show one."""
        normalised = isinstance(answers, ChosenTokens) or is_normalised(rows)
        decimals = decimals_of(rows[:8])
        step = answers.step if decimals is None else 10.0**-decimals
        count, size = rows.shape
        some = torch.randperm(size, generator=stream)[: _COLUMNS * count + 256]
        found = cliff(centred(rows, normalised)[:, some], _SPARE // 2, step)
        if count >= size - 1 and not found.seen:
            if decimals is None:
                why = (
                    f"{count:,} answers fill all {size:,} dimensions of the tokens: the vocabulary "
                    "is no larger than the width, or the answers are not linear in a state"
                )
            else:
                why = (
                    f"{found.rank:,} directions stand out of rounding to {decimals} digits in "
                    f"{count:,} answers of {size:,} tokens, without a cliff behind them"
                )
            raise not_identifiable(why)
        return cls(rows, answers, normalised, decimals, found)

    @property
    def goal(self) -> int:
        """How many rows to read: those that the rank needs, or a few more to find it."""
        count = len(self.rows)
        rank = self.cliff.rank
        if self.cliff.seen:
            return max(count, rank + max(_SPARE, rank // _SHARE))
        return max(count + _SPARE, count * 17 // 16)

    def step(self, stated: int | None) -> LayerStep:
        """Return the step for these rows; `stated` is the width that the server states."""
        model = self._model()
        cliff = self.cliff
        if cliff.seen and cliff.rank == int(cliff.constant):
            raise not_identifiable("the answers do not depend on the prompt")
        vocabulary = self.answers.vocabulary or len(model.tokens)
        layer = LastLayer(
            rank=cliff.rank,
            width=model.width if cliff.seen else None,
            constant=cliff.constant,
            blocks=cliff.blocks,
            log_probabilities=self.log_probabilities,
            above=cliff.above,
            below=cliff.below,
            decimals=self.decimals,
            tokens=len(model.tokens),
            vocabulary=vocabulary,
            stated=stated,
        )
        unknowns = cliff.rank
        if not cliff.seen:
            unknowns = max(cliff.rank, stated or vocabulary)
        return LayerStep(model, cliff.rank, unknowns, layer=layer, answers=self.answers)

    def _model(self) -> OutputMatrix:
        """Return a basis of the rows' span: where they differ first, then what they share."""
        Q, R = torch.linalg.qr(centred(self.rows, self.log_probabilities).mT)
        cliff = self.cliff
        mean = R.mean(1, keepdim=True)
        basis = torch.linalg.svd(R)[0][:, : cliff.rank]
        if cliff.constant:
            differing = torch.linalg.svd(R - mean)[0][:, : cliff.rank - 1]
            shared = basis @ (basis.mT @ mean)
            shared = shared - differing @ (differing.mT @ shared)
            basis = torch.cat([differing, shared / shared.norm()], 1)
        W = (Q @ basis).contiguous()
        tokens = self.answers.tokens.double()
        return OutputMatrix(W, tokens, cliff.constant, cliff.blocks)


def centred(rows: Tensor, log_probabilities: bool) -> Tensor:
    """Return the rows without the number that all tokens of log-probabilities share."""
    if not log_probabilities:
        return rows
    return rows - rows.mean(1, keepdim=True)


# The rank of many answers: where their singular values fall off a cliff.
#
# Exact answers, as rows of Y (n, m), have rank r: all singular values after the first r
# are zero. Printed answers have errors. Errors of rounding to a step s have the
# standard deviation σ = s/√12, and the singular values of n × m such errors end at
# about σ·(√n + √m) (Marchenko and Pastur), so a larger singular value is not rounding.
# Other errors (float32, a server's own arithmetic) have no known size. There the cliff
# must be steep, and the values after it nearly equal in comparison: singular values of
# answers without errors decay smoothly, and have no cliff while n ≤ r. A steep cliff is
# tried first, since answers of six digits may have other, larger errors.
#
# Subtracting the mean answer shows whether the answers share a constant: then they lie
# in an affine space of dimension r − 1, and not only in a linear space of dimension r.

_STEEP = 10.0  # ratio of a cliff, if nothing is known of the errors,
_STEEP_KNOWN = 1.3  # and if the errors are those of rounding
_BEYOND = 1.1  # times the largest singular value that rounding can have
_BLOCK = 32


@dataclass(frozen=True)
class Cliff:
    """The number of singular values that stand out, the last of them, and the first of the others.

    `seen` means that the fall between them is a cliff; if not, `rank` is a lower bound.
    `constant` means that the mean answer is one of the directions. `blocks` come from
    arithmetic in blocks of 32 numbers (oracle/planted.py): one for each block, far
    below the others.
    """

    rank: int
    above: float
    below: float
    seen: bool
    constant: bool = False
    blocks: int = 0


def cliff(
    answers: Tensor,
    spare: int,
    step: float | None = None,
) -> Cliff:
    """Find the cliff of answers (n, m), at least `spare` before the last singular value.

    `step` is that of their rounding, if it is known.
    """
    n, m = answers.shape
    sizes = torch.linalg.svdvals(answers)
    least = max(float(sizes[0]) * EPSILON * max(n, m), TINY)
    values: list[float] = sizes.clamp(min=least).tolist()
    found = _steepest(values, spare)
    if not found.seen and step is not None:
        edge = _BEYOND * step / math.sqrt(12) * (math.sqrt(n) + math.sqrt(m))
        found = _beyond(values, edge, spare)
    if not found.seen:
        return found
    without = torch.linalg.svdvals(answers - answers.mean(0))
    level = math.sqrt(found.above * found.below)
    constant = int((without > level).sum()) < found.rank
    blocks = _blocks(values, found.rank, int(constant))
    return replace(found, constant=constant, blocks=blocks)


def _blocks(
    values: list[float],
    rank: int,
    constant: int,
) -> int:
    """Return how many directions are one for each 32 of the others, after a fall of their own."""
    blocks, rest = divmod(rank - constant, _BLOCK + 1)
    width = blocks * _BLOCK + constant
    steep = blocks and not rest and values[width - 1] >= _STEEP * values[width]
    return blocks if steep else 0


def _steepest(values: list[float], spare: int) -> Cliff:
    """Return the steepest fall, if it is steeper than the decay after it."""
    falls: list[tuple[float, int]] = []
    for rank in range(1, len(values) - spare + 1):
        ratio = values[rank - 1] / values[rank]
        decay = values[rank] / values[-1]
        if ratio >= _STEEP and decay**2 <= ratio * _STEEP:
            falls.append((ratio, rank))
    if not falls:
        return Cliff(len(values), values[-1], 0.0, seen=False)
    rank = max(falls)[1]
    return Cliff(rank, values[rank - 1], values[rank], seen=True)


def _beyond(
    values: list[float],
    edge: float,
    spare: int,
) -> Cliff:
    """Return the fall at `edge`, the largest singular value of rounding errors."""
    rank = sum(value > edge for value in values)
    if rank in (0, len(values)):
        return Cliff(rank, values[rank - 1] if rank else 0.0, 0.0, seen=False)
    above = values[rank - 1]
    below = values[rank]
    seen = above >= _STEEP_KNOWN * below and len(values) - rank >= spare
    return Cliff(rank, above, below, seen)


# The layer up to a rotation, from the norm in front of it (after arXiv 2606.06854, *The
# Geometry of Last-Layer Model Stealing*, of which we had the abstract, not the text).
# Answers satisfy linear equations, which the singular values show, and one quadratic
# equation, since the final norm puts all states on an ellipsoid. With n(x) the
# normalised state, |n|² = d, G the gain of the norm and B the basis that was found,
#
#     y = W (G n + β) = B z,    z = c + C n,    (z − c)ᵀ N (z − c) = 1,    N⁻¹ = d·C Cᵀ.
#
# Each answer is one linear equation for N and c, of d(d + 1)/2 unknowns (and d more if
# answers share a constant). Then W G = B C is B·(N⁻¹/d)^½ up to a rotation, which gives
# the lengths, cosines and inner products of its rows. The rotation is a symmetry of
# everything before the layer, and no answer shows it. This works if the norm's ε is
# negligible, if the states fill the ellipsoid (the equations have full rank), and if d
# is small: d = 576 takes 166,176 answers. Answers that the fit did not use show whether
# it is an ellipsoid.

_KEPT = 16  # answers that the fit does not use
_EQUATIONS = 1.25  # equations for each unknown
_REGULAR = 1e-9  # least relative pivot of equations that have one solution


def equations(dim: int, shifted: bool) -> int:
    """Return how many answers an ellipsoid takes."""
    return int(_EQUATIONS * (dim * (dim + 1) // 2 + shifted * dim)) + 2 * _KEPT


def ellipsoid(
    z: Tensor,
    width: int,
    shifted: bool,
) -> tuple[Tensor, float] | None:
    """Return (C Cᵀ)^½ from coordinates (n, r) of answers, and the error of |n|² = d on unused ones.

    Return None if the equations are not regular, or if their solution is no ellipsoid.
    """
    expect_memory(
        3 * 8 * len(z) * z.shape[1] ** 2 // 2,
        f"an ellipsoid in {z.shape[1]} dimensions",
    )
    white = torch.linalg.cholesky(torch.linalg.inv(z.mT @ z / len(z)))
    u = z @ white
    d = u.shape[1]
    rows, columns = torch.triu_indices(d, d)
    terms = u[:, rows] * u[:, columns] * torch.where(rows == columns, 1.0, 2.0)
    if shifted:
        terms = torch.cat([terms, u], 1)
    Q, R = torch.linalg.qr(terms[:-_KEPT])
    pivots = R.diagonal().abs()
    if not pivots.min() > _REGULAR * pivots.max():
        return None
    right = Q.mT @ ones(len(Q), 1)
    solution = torch.linalg.solve_triangular(R, right, upper=True)[:, 0]
    quadratic, linear = solution.split([len(rows), len(solution) - len(rows)])
    M = zeros(d, d)
    M[rows, columns] = M[columns, rows] = quadratic
    centre = zeros(d)
    if shifted:
        centre = torch.linalg.solve(M, -0.5 * linear)
    N = white @ M @ white.mT / (1 + centre @ M @ centre)
    axes, sides = torch.linalg.eigh(N)
    if not axes[0] > 0:
        return None
    residual = terms[-_KEPT:] @ solution - 1
    C = (sides / (width * axes).sqrt()) @ sides.mT
    return C, max_abs(residual)


# The judge of a last layer: the part of fresh answers that no state can explain.
#
# An answer y of the layer is W h: its part outside of the columns of W is error, of the
# matrix and of the answer. Rounded answers, and a matrix from such answers, are only
# exact to their digits; then a matrix counts as approximate if it explains most of
# them.

_FRESH = 8
_ROUNDED = 0.1  # the largest share of rounded answers that a right matrix leaves


@dataclass(frozen=True)
class LayerStep(Step):
    """A last layer, with the source of its answers."""

    model: OutputMatrix
    answers: Answers = field(kw_only=True)


@dataclass(frozen=True, kw_only=True)
class LayerExam(Exam):
    """Fresh answers of the layer, and the part that the proposed matrix does not explain."""

    outside: Tensor
    layer: LastLayer

    @classmethod
    def fresh(
        cls,
        step: LayerStep,
        layer: LastLayer,
        prompts: Prompts,
    ) -> LayerExam:
        rows = torch.stack([step.answers.fresh(prompts) for _ in range(_FRESH)])
        rows = centred(rows, layer.log_probabilities)
        return cls(((rows, rows),), outside=step.model.outside(rows), layer=layer)

    @property
    def domain(self) -> None:
        return None

    def grade(self, model: Oracle) -> Check:
        del model  # the matrix of the step, by which `outside` was found
        ((rows, _),) = self.sets
        residual = self.outside.abs() / rows.abs().amax(1, keepdim=True).clamp(min=TINY)
        return self.check([residual.flatten()])

    def verdict(
        self,
        check: Check,
        step: Step,
        accepted: float,
    ) -> tuple[Status, str]:
        status, reason = super().verdict(check, step, accepted)
        if status is Status.MISMATCH and self.layer.decimals is not None:
            ((rows, _),) = self.sets
            share = float(self.outside.norm() / rows.norm())
            if share <= _ROUNDED:
                reason = f"{reason}, {share:.1e} of their size outside, by rounding"
                return Status.INEXACT, reason
        return status, reason


# An extracted last layer compared with the true one, after the best linear map.
#
# The truth is W (v, d). The extraction gives an orthonormal basis B of its columns, for
# the chosen tokens. Log-probabilities show W only up to a row c that is added to all
# rows; then B is orthogonal to the column 1 of ones. The distance is that of the best
# map A and row c:
#
#     min ‖W − B A − 1 cᵀ‖_F      at  A = Bᵀ(W − 1 wᵀ),  w the mean row of W
#
# Only the judge and benchmarks know W.


def true_matrix(reference: str | Path) -> tuple[Tensor, bool]:
    """Return a model's matrix in float64, and whether it is also the table of inputs."""
    model = open_model(str(reference), task="causal").model
    W = unembedding(model).weight
    return W.detach().double().cpu(), W is model.get_input_embeddings().weight


def compared(result: Extraction, reference: str | Path) -> Extraction:
    """Return the result with the distance of its matrix from that of the reference."""
    layer = result.layer
    model = result.model
    if layer is None or not isinstance(model, OutputMatrix):
        return result
    W, tied = true_matrix(reference)
    if len(W) < layer.vocabulary:
        raise InputError(
            f"the reference {reference} must have {layer.vocabulary:,} tokens: it has {len(W):,}"
        )
    rms, relative = distance(model, W, centred=layer.log_probabilities)
    layer = replace(layer, rms=rms, relative=relative, tied=tied)
    # The reason describes the layer.
    reason = result.reason.replace(str(result.layer), str(layer))
    return replace(result, layer=layer, reason=reason)


def distance(
    model: OutputMatrix,
    truth: Tensor,
    *,
    centred: bool,
) -> tuple[float, float]:
    """Return the RMS of W − B A − 1 cᵀ for the best map, and relative to that of W."""
    W = truth[model.tokens.long()]
    if centred:
        W = W - W.mean(0)
    rms = float(model.outside(W.mT).square().mean().sqrt())
    return rms, rms / float(W.square().mean().sqrt().clamp(min=TINY))
