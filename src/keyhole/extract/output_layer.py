"""A language model's last layer from its logits or log-probabilities (Carlini et al., 2403.06634).

    y = W h + b + c·1,    W (v, d),  h the state behind the final norm,  v ≫ d

with c = 0 for logits and c = −log Σ exp for log-probabilities. The answers y to random prompts all
lie in the space that the columns of W (and b) span, whatever the model computes before: n of them,
as rows of Y, have rank min(n, r), so that singular values fall off a cliff at r once n > r. The
right singular vectors are a basis of that space, W·A for an invertible A. From log-probabilities
the mean over tokens is taken off first: W is then known up to a row that is added to all rows.

r is d, or beside it (which, and how it is told: `OutputMatrix.width`). The fewest answers that do
are r. We ask for r/12 more (16 at least), because errors of the answers count by the smallest
singular value, which grows like √n − √r.

What it gives away is the projector P = W (WᵀW)⁻¹ Wᵀ of the centred W, and nothing else. Where W is
the table of input embeddings too (tied), those are known up to the same map: which differences of
tokens are parallel, which tokens depend on each other linearly, and all angles and distances after
whitening by the table's own covariance, which are entries of P. Lengths, cosines and inner products
of the table itself are W M Wᵀ for a metric M that stays unknown, d(d + 1)/2 numbers. (The final
norm puts all h on one ellipsoid, which would tell M up to a rotation; that takes d(d + 1)/2 answers
and more digits than float32 has, and is not done here.)

Departures. The paper takes the steepest fall of singular values; ours must end on flat ground, or
above what rounding can cause (last_layer/spectrum.py), so that answers which are too few give no
width at all. Targets that give only the best k are asked for tokens that a bias raises
(last_layer/answers.py): ⌈(v − 1)/(k − 1)⌉ questions a row for all of W, r/(k − 1) for the width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from keyhole.core import Status, Unsuccessful
from keyhole.core.errors import InputError
from keyhole.extract.extraction import Extraction
from keyhole.extract.last_layer.answers import (
    Answers,
    ChosenTokens,
    Prompts,
    WholeVectors,
    is_normalised,
)
from keyhole.extract.last_layer.described import LastLayer
from keyhole.extract.last_layer.judge import LayerStep, settle
from keyhole.extract.last_layer.spectrum import Cliff, cliff, decimals_of
from keyhole.extract.step import Step
from keyhole.oracle.output_matrix import OutputMatrix
from keyhole.oracle.protocol import BudgetExhausted, Oracle
from keyhole.oracle.token_questions import DIM, Logits, stated_by

_FIRST = 32  # rows before the first look
_SPARE = 16  # rows beyond the rank, at least
_SHARE = 12  # and one for so many of the rank
_COLUMNS = 8  # tokens for each row that a look takes; all of them would tell no more


@dataclass(frozen=True)
class OutputLayer:
    """The width of a language model and the matrix of its last layer, up to its symmetry.

    `top` is how many log-probabilities the target gives at a time, if not all: tokens are then
    chosen by a bias. `tokens` is how many rows of the matrix to read so; by default as many as the
    width takes. `length` is that of the random prompts, `most` how many are asked at most.
    """

    top: int | None = None
    tokens: int | None = None
    length: int = 4
    most: int = 20_000
    seed: int = 0
    tolerance: float = 1e-5

    def __post_init__(self) -> None:
        for name in ("top", "tokens", "length", "most"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"expected {name} of 1 or more, got {value}")
        if self.tokens is not None and self.top is None:
            raise InputError("expected --top with --tokens, got none: whole answers have all rows")

    def __call__(self, oracle: Oracle | Callable[[Tensor], Tensor]) -> Extraction:
        asked = oracle if isinstance(oracle, Oracle) else Logits(oracle)
        return settle(self, asked, self.length)

    def expected(self, dim: int) -> int | None:  # noqa: ARG002
        """Nobody knows the width before."""
        return None

    def steps(self, oracle: Oracle) -> Iterator[Step]:
        if oracle.dim != DIM:
            raise Unsuccessful(
                Status.NOT_APPLICABLE,
                "it takes a language model that is asked by token ids: http://host:port, a "
                "model's folder, or a function of ids",
            )
        stream = torch.Generator().manual_seed(self.seed)
        answers = self._answers(oracle, stream)
        width = stated_by(oracle, "width")
        look, goal = None, _FIRST
        try:
            while look is None or len(look.rows) < goal:
                look = _Look.at(answers.rows(goal), answers, stream)
                goal = look.goal
                if not look.cliff.seen and goal > self.most:
                    reason = f"no cliff in the singular values of {len(look.rows):,} answers"
                    raise Unsuccessful(Status.UNSOLVED, reason)
        except BudgetExhausted:
            if len(rows := answers.complete()) > 1:
                yield _Look.at(rows, answers, stream).step(width)
            raise
        yield look.step(width)

    def _answers(self, oracle: Oracle, stream: torch.Generator) -> Answers:
        prompts, vocabulary = Prompts(self.length, stream), stated_by(oracle, "vocabulary")
        if self.top is None:
            return WholeVectors(oracle, prompts, vocabulary)
        if vocabulary is None:
            # Only a whole answer tells; a function in this process gives one.
            whole = WholeVectors(oracle, prompts, None)
            vocabulary = len(whole.fresh(prompts))
        return ChosenTokens(
            oracle, prompts, vocabulary, self.top, self.tokens, 2 * _SPARE, stream
        )  # fmt: skip


@dataclass(frozen=True, eq=False)
class _Look:
    """What so many rows show."""

    rows: Tensor
    answers: Answers
    centred: bool
    decimals: int | None
    cliff: Cliff

    @classmethod
    def at(cls, rows: Tensor, answers: Answers, stream: torch.Generator) -> _Look:
        centred = isinstance(answers, ChosenTokens) or is_normalised(rows)
        decimals = decimals_of(rows[:8])
        step = None if decimals is None else 10.0**-decimals
        count, size = rows.shape
        order = torch.randperm(size, generator=stream)[: _COLUMNS * count + 256]
        found = cliff(taken_off(rows, centred)[:, order], _SPARE // 2, step)
        if count >= size - 1 and not found.seen:
            why = f"{count:,} answers fill all {size:,} dimensions of the tokens: the vocabulary "
            why += "is no larger than the width, or the answers are not linear in a state"
            if decimals is not None:
                why = f"{found.rank:,} directions stand out of rounding to {decimals} digits in "
                why += f"{count:,} answers of {size:,} tokens, without a cliff behind them"
            raise Unsuccessful(Status.NOT_IDENTIFIABLE, why)
        return cls(rows, answers, centred, decimals, found)

    @property
    def goal(self) -> int:
        """Rows to go on to: a few more, or what lifts the smallest singular value above zero."""
        count, rank = len(self.rows), self.cliff.rank
        if self.cliff.seen:
            return max(count, _enough(rank))
        return _more(count)

    def step(self, stated: int | None) -> LayerStep:
        model, cliff, whole = self._model(), self.cliff, self.cliff.seen
        if whole and cliff.rank == int(cliff.constant):
            raise Unsuccessful(Status.NOT_IDENTIFIABLE, "the answers do not depend on the prompt")
        vocabulary = self.answers.vocabulary or len(model.tokens)
        layer = LastLayer(
            rank=cliff.rank, width=model.width if whole else None, constant=cliff.constant,
            blocks=cliff.blocks, log_probabilities=self.centred, above=cliff.above,
            below=cliff.below, decimals=self.decimals, tokens=len(model.tokens),
            vocabulary=vocabulary, stated=stated,
        )  # fmt: skip
        floor = cliff.rank if whole else max(cliff.rank, stated or vocabulary)
        return LayerStep(
            model, cliff.rank, floor, remark=str(layer), matrix=model, layer=layer,
            answers=self.answers,
        )  # fmt: skip

    def _model(self) -> OutputMatrix:
        """A basis of what the rows span: where they differ first, then what they share."""
        Q, R = torch.linalg.qr(taken_off(self.rows, self.centred).mT)
        rank, mean = self.cliff.rank, R.mean(1, keepdim=True)
        basis = torch.linalg.svd(R)[0][:, :rank]
        if self.cliff.constant:
            differing = torch.linalg.svd(R - mean)[0][:, : rank - 1]
            shared = basis @ (basis.mT @ mean)
            shared = shared - differing @ (differing.mT @ shared)
            basis = torch.cat([differing, shared / torch.linalg.vector_norm(shared)], 1)
        tokens = self.answers.tokens.double()
        return OutputMatrix(
            (Q @ basis).contiguous(), tokens, self.cliff.constant, self.cliff.blocks
        )


def answers_for(rank: int) -> int:
    """How many whole answers a layer of this rank takes, where its cliff is as steep as usual."""
    count = _FIRST
    while count < rank + _SPARE // 2:
        count = _more(count)
    return max(count, _enough(rank))


def _more(count: int) -> int:
    return max(count + _SPARE, count * 17 // 16)


def _enough(rank: int) -> int:
    return rank + max(_SPARE, rank // _SHARE)


def taken_off(rows: Tensor, centred: bool) -> Tensor:
    """Without the number that all tokens of a log-probability vector share."""
    return rows - rows.mean(1, keepdim=True) if centred else rows
