"""Heads fitted to inexact answers by least squares (ours): several, with biases, behind a norm.

The exact methods solve for one number at a time, at scales where everything else
vanishes. Answers in float32 or less, or behind a sigmoid, are not exact enough for
that. Here the weights are fitted to many answers of ordinary size. Fix the last token
x, and put δ = n(y) − n(x), where n is a norm or the identity, and g_h = W_h n(x) + c_h.
Then

    φ(y) = f([y ; x]) − f([x]) = Σ_h σ(g_hᵀδ)·v_hᵀδ,                  u = Σ_h v_h,
    φ(y) − ½uᵀδ               = ½ Σ_h tanh(½g_hᵀδ)·v_hᵀδ.

u is known from single tokens, f([x]) = b + uᵀn(x). The right side is the same for (g_h,
v_h) and (−g_h, −v_h), so no fit fails because of a wrong sign; Σ_h v_h = u settles the
signs afterwards. The stages:

    b and u                     linear least squares on single tokens
    g_h and v_h at one x        Levenberg–Marquardt, 2dH unknowns, several starts; H = 1, 2, …
    g_h at d further tokens x   the same with v_h known, starting from the first g_h
    W_h and c_h                 linear least squares
    all of them                 Gauss–Newton on every answer

H is the smallest number of heads that explains the answers within their own error
(arithmetic.py), and fresh queries confirm it. c = 0 is tried first. This takes a few
times as many queries as there are unknowns. A norm shows on one token: f([t·a]) hardly
depends on t > 0, and where it does depends on the norm's ε.

If answers are off by up to ±τ (`answer_error`), they are amplified as in tolerant.py: y
is made t times longer and x t times shorter, which leaves every gate as it is and
divides the effect of τ by t. That is not possible with biases c or a norm, which f([tδ
; 0]) ≠ ½(f([tδ]) + f([0])) shows. If answers are coarse (bfloat16, or 3 decimals behind
a sigmoid), their rounding error is known, and heads are added until only that error
remains. The covariance of the fit tells the judge how far the model may be off
(`uncertainty`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from keyhole import attention
from keyhole.core import Status, Unsuccessful, mismatch, not_identifiable
from keyhole.core.errors import InputError, expect_count, expect_number
from keyhole.core.float64 import normal, random_stream, zeros
from keyhole.core.least_squares import Options, Point, minimize
from keyhole.core.numerics import least_squares
from keyhole.extract.arithmetic import answered, own_error, precision_of, rounding
from keyhole.extract.bilinear import max_abs, random_orthogonal, random_units, scalar
from keyhole.extract.domain import CHANGED
from keyhole.extract.extraction import Extraction, Step, setting
from keyhole.extract.gauss_newton import refined, uncertainty
from keyhole.extract.judge import NEARLY, Exam, Method
from keyhole.oracle.links import Link, Undone
from keyhole.oracle.planted import (
    Attention,
    BiasedHeads,
    Head,
    MultiHead,
    OneLayer,
    Parametric,
)
from keyhole.oracle.protocol import Oracle, OracleError, ask

_EPSILON = torch.finfo(torch.float64).eps
_SQUARES = 4.0 ** torch.arange(
    -6, 7, dtype=torch.float64
)  # the s² that are tried for a scale
_PAIRS = 16  # pairs that find a scale, and that measure the answers' own error
# a scale must show this share of the effect of the gates that the best scale shows,
_BLUR = 0.5
_PLENTY = 1e3  # or so many times the errors of the answers
_OPEN = 0.2  # |α − ½| of gates that count as half open
# root mean square residual, in units of the answers' own error, of a right model
_EXPLAINED = 5.0
_ROUNDED = 1.3  # the same for coarse answers, in units of their rounding error
_COARSE = 1e-5  # answers with a larger relative error are coarse
_MORE = 3  # factor on the number of random sequences if answers are coarse
_BETTER = 0.7  # further heads must reduce the residuals to this share
# tokens are made so many times longer than answers may be off, if that is possible
_AMPLE = 1e9
# the same as `_EXPLAINED` for single tokens, beyond which no heads explain them
_NONLINEAR = 30.0
_SETTLED = (
    0.35  # a model known to this share of an answer's rounding needs no more answers
)
_TEMPERED = (
    1e-2  # least error that a first fit assumes, as a share of the answers' size
)
_LEAST = 0.3  # share of the tenth percentile of the errors that is the least error
# ratio of the largest error to the smallest beyond which errors count as uneven
_UNEVEN = 100.0
_BY_GATES = Options(damping=0.1, max_steps=150, rtol=1e-3, patience=15)
_EXACT = (
    1e-4  # mean square of residuals, in units of the error, that no fit improves on
)
_BATCH = 4096
_LENGTHS = (2, 3, 4)  # of the random sequences
_ROUNDS = 4  # batches of starts for each number of heads
_SMALL = 24  # H·d up to which fits are cheap, and many starts are tried
_FURTHER = 0.5  # distance of the further tokens from the first, as a share of |x|
_UNSIGNED = 0.2  # share of |u| by which Σ_h v_h may differ from u before the last fit
_WORK = 192  # the largest H·d that is fitted at one token
UNKNOWNS = 4500  # the most unknowns that are fitted all at once


@dataclass(frozen=True)
class Fitted(Method):
    """Extraction of one or several heads from inexact answers."""

    heads: int | None = setting(None, "how many there are, if that is known")
    answer_error: float = setting(0.0, "how far an answer may be off")
    precision: float = setting(_EPSILON, "relative error of an answer")
    most: int = setting(6, "the most heads to try, if their number is not known")
    oversampling: float = setting(3.0, "queries for each unknown")
    starts: int = setting(8, "starts of a fit that are run as one batch")
    seed: int = 0
    tolerance: float = 1e-8

    def __post_init__(self) -> None:
        for name in ("most", "starts", "heads"):
            expect_count(name, getattr(self, name))
        expect_number("answer_error", self.answer_error, least=0)
        expect_number("precision", self.precision, above=0)
        expect_number("oversampling", self.oversampling, above=1)

    @property
    def accepted(self) -> float:
        return max(self.tolerance, 4 * self.precision)

    def __call__(self, oracle: Oracle) -> Extraction:
        if self.answer_error:
            none = Link("identity", zeros())
            oracle = Undone(oracle, none, self.precision, self.answer_error)
        return super().__call__(oracle)

    def examine(self, oracle: Oracle, step: Step) -> Exam:  # noqa: ARG002
        exam = Exam.draw(oracle, self.seed, gain=self.gain(oracle))
        return replace(exam, excused=max(NEARLY, 16 * self.precision))

    def gain(self, oracle: Oracle) -> float:
        """Return the factor that makes ±τ harmless; 1 if τ = 0 or long tokens change gates."""
        gain = max(1.0, _AMPLE * self.answer_error)
        (a,) = random_units(1, oracle.dim, random_stream(self.seed))
        if gain == 1:
            return gain
        try:
            single = ask(
                oracle, torch.stack([0 * a, gain * a, 2 * gain * a]).unsqueeze(1)
            )
            pair = ask(oracle, torch.stack([gain * a, 0 * a])[None])
        except (OracleError, InputError):
            return 1.0
        zero, one, two = scalar(single).tolist()
        off = max(abs(two - 2 * one + zero), abs(2 * float(scalar(pair)) - one - zero))
        return gain if off <= 8 * self.answer_error + _COARSE * abs(one) else 1.0

    def expected_queries(self, dim: int) -> int | None:
        if self.heads is None:
            return None
        return math.ceil(self.oversampling * (self.heads * dim * (dim + 3) + dim + 1))

    def steps(self, oracle: Oracle) -> Iterator[Step]:
        stream = random_stream(self.seed)
        norm = find_norm(oracle, stream)
        field = _NearField(self, oracle, norm, self.gain(oracle), stream)
        most = max(1, min(self.most, _WORK // oracle.dim))
        counts = range(1, most + 1) if self.heads is None else (self.heads,)
        best, miss, least = self._search(field, counts)
        if best is None or miss > 2 * field.possible:
            # A fit of one head cannot end in a local minimum, so its failure is a
            # proof.
            refuted = self.heads == 1 and least > field.possible
            raise Unsuccessful(
                Status.MISMATCH if refuted else Status.UNVERIFIED,
                f"{counts[-1]} heads leave residuals {min(miss, least):.1e} times the answers' own "
                "error: try more starts, or answers with more digits",
            )
        error = torch.cat([error for _, _, error in field.asked]).median()
        model, remark = _simplest(best, float(error))
        if len(best.v) > 1:
            remark = "; ".join(
                filter(None, (f"{len(best.v)} heads explain the answers", remark))
            )
        free = tuple(
            name for name in ("W", "v", "c", "b") if name != "c" or best.c.any()
        )
        uncertain = None
        if best.unknowns <= UNKNOWNS:
            uncertain = uncertainty(best, free, field.asked)
        yield Step(
            model, model.unknowns, model.unknowns, remark=remark, uncertainty=uncertain
        )

    def _search(
        self, field: _NearField, counts: Sequence[int]
    ) -> tuple[BiasedHeads | None, float, float]:
        """Return the best model of any number of heads, its misfit, and the least at one token."""
        fits: dict[int, tuple[Tensor, Tensor, float]] = {}
        miss = math.inf
        best = None

        def try_everywhere(heads: int) -> None:
            """Extend the fit at one token to all tokens, and keep the model if it is better."""
            nonlocal miss, best
            for repeated in range(_ROUNDS // 2):
                g, v, _ = field.heads_at_one_token(heads) if repeated else fits[heads]
                if (known := field.further_tokens(g, v)) is not None:
                    model, missed = self._fitted(field, *known, v)
                    if best is None or missed < _BETTER * miss:
                        miss = missed
                        best = model
                if miss <= field.enough or not field.coarse:
                    break

        for heads in counts:
            fits[heads] = field.heads_at_one_token(heads)
            if fits[heads][2] <= field.sure:
                try_everywhere(heads)
                if miss <= field.enough or (best is not None and heads > len(best.v)):
                    break
            if heads == counts[0]:
                field.expect_steady()  # before the long search for more heads
        least = min(at_one for _, _, at_one in fits.values())
        if best is None and least <= field.possible:
            try_everywhere(
                next(heads for heads, fit in fits.items() if fit[2] <= 2 * least)
            )
        return best, miss, least

    def _fitted(
        self,
        field: _NearField,
        x: Tensor,
        g: Tensor,
        v: Tensor,
    ) -> tuple[BiasedHeads, float]:
        """Fit W and c to g (tokens, H, d) at tokens x, then everything; return model and misfit."""
        b = field.b
        norm = field.norm
        dim = field.oracle.dim
        n = norm.applied(x)
        ones = torch.ones(len(x), 1, dtype=torch.float64)
        values = g.flatten(1)
        heads = len(v)
        plain = least_squares(n, values).unflatten(1, (heads, dim))
        biased = least_squares(torch.cat([n, ones], 1), values).unflatten(
            1, (heads, dim)
        )
        zero = torch.zeros_like(v)
        candidates = [
            (("W", "v", "b"), plain, zero),
            (("W", "v", "c", "b"), biased[:-1], biased[-1]),
        ]
        near = list(field.asked)
        count = self.oversampling / 2 * heads * (dim + 1) * dim
        field.ask_at_large(math.ceil((_MORE if field.coarse else 1) * count))
        models: list[BiasedHeads] = []
        for free, Wt, c in candidates[norm.normed :]:
            W = Wt.permute(1, 2, 0).contiguous()
            model = BiasedHeads(W, v, c, b, norm.normed, norm.centred, norm.epsilon)
            if model.unknowns <= UNKNOWNS:
                if (
                    field.uneven
                ):  # first the answers near x, then all, with larger errors assumed
                    for asked in (near, field.asked):
                        model = refined(model, free, tempered(asked))
                model = refined(model, free, field.asked)
            models.append(model)
            if misfit(model, field.asked) <= field.sure:
                if field.uneven and model.unknowns <= UNKNOWNS:
                    models = [field.settled(model, free, math.ceil(count))]
                break
        best = min(models, key=lambda model: misfit(model, field.asked))
        return best, misfit(best, field.asked)


def _simplest(
    model: BiasedHeads, error: float
) -> tuple[Head | MultiHead | BiasedHeads, str]:
    """Return the model as plain heads if it has nothing else, and a remark on what else it has."""
    if model.normed:
        return model, "behind a LayerNorm" if model.centred else "behind an RMSNorm"
    if model.c.any() or model.b.abs() > _EXPLAINED * error:
        return model, "with biases"
    W = model.W
    v = model.v
    return (Head(W[0], v[0]) if len(v) == 1 else MultiHead(list(W), list(v))), ""


@dataclass(frozen=True)
class Norm:
    """What a target does to its tokens first: nothing, a LayerNorm (`centred`) or an RMSNorm."""

    normed: bool = False
    centred: bool = False
    epsilon: float = 0.0

    def applied(self, tokens: Tensor) -> Tensor:
        if not self.normed:
            return tokens
        return attention.normed(tokens, self.epsilon, centred=self.centred)


def find_norm(oracle: Oracle, stream: torch.Generator) -> Norm:
    """Find the norm from f([t·a]) for several t, and from f([a + 1])."""
    directions = normal(stream, 4, oracle.dim)
    if oracle.dim < 2:
        return Norm()
    a = attention.normed(directions, 0.0, centred=True)

    def odd(tokens: Tensor) -> Tensor:
        """Return what the sign of a token changes."""
        answers = scores(oracle, torch.cat([tokens, -tokens]).unsqueeze(1)).view(2, -1)
        return answers[0] - answers[1]

    first = odd(a)
    size = max_abs(first)
    for factor in (8.0, 0.125):
        if not max_abs(odd(factor * a) - first) <= 0.01 * size or not size:
            return Norm()
    shifted = scores(oracle, torch.stack([a[0], a[0] + 1]).unsqueeze(1))
    centred = bool((shifted[1] - shifted[0]).abs() <= 0.01 * size)
    pick = int(first.abs().argmax())
    square = 1e-5
    for _ in range(8):
        share = float(odd(math.sqrt(square) * a[pick : pick + 1])[0] / first[pick]) ** 2
        if share > 0.98 and square > 1e-13:
            square /= 30
        elif share < 0.05:
            square *= 30
        else:
            break
    else:
        return Norm(True, centred)
    epsilon = max(0.0, square * (1 - share) / (share - square))
    return Norm(True, centred, epsilon if share <= 0.98 else 0.0)


Asked = list[tuple[Tensor, Tensor, Tensor]]  # sequences, answers, errors


def smallest_error(errors: Tensor, answers: Tensor) -> float:
    """Return the least error that any answer counts with: relative errors near 0 are too small."""
    largest = max_abs(answers[answers.isfinite()])
    return max(32 * _EPSILON * largest, _LEAST * float(errors.quantile(0.1)))


def misfit(model: Parametric, asked: Asked) -> float:
    """Return the root mean square of the model's residuals, in units of the answers' errors."""
    misses = torch.cat([(model(X) - y) / error for X, y, error in asked if len(y)])
    return float(misses.square().mean().sqrt())


def tempered(asked: Asked) -> Asked:
    """Return the answers with larger errors: a few very exact ones would make many local minima."""
    size = float(torch.cat([y for _, y, _ in asked]).square().mean().sqrt())
    return [(X, y, error.clamp(min=_TEMPERED * size)) for X, y, error in asked]


class _NearField:
    """Answers to single tokens and to pairs [y ; x], and what they show of the heads."""

    def __init__(
        self,
        method: Fitted,
        oracle: Oracle,
        norm: Norm,
        gain: float,
        stream: torch.Generator,
    ) -> None:
        self.method = method
        self.oracle = oracle
        self.norm = norm
        self.stream = stream
        self.asked: Asked = []
        self.error = 0.0
        self.precision = method.precision
        dim = oracle.dim
        scale = token_size(oracle, stream, gain, self.precision, norm)
        # Behind a norm, the length of x does not matter: δ alone sets the scale.
        self.spread = scale * gain
        self.size = math.sqrt(dim) if norm.normed else scale / gain
        self.x = self._normals(dim)
        self.x *= self.size / torch.linalg.vector_norm(self.x)
        self.longest = self.size * gain**2
        count = math.ceil(method.oversampling * (dim + 1))
        tokens = self._normals(count, dim) * self.longest / math.sqrt(dim)
        answers = self._ask(tokens.unsqueeze(1))
        tokens = self.asked[-1][0][:, 0]
        self.precision = max(method.precision, precision_of(oracle, answers))
        if not answers.any():
            if method.answer_error or self.precision > _EPSILON:
                raise Unsuccessful(
                    Status.UNVERIFIED,
                    "every answer of ordinary size is rounded to zero",
                )
            raise not_identifiable("every answer is zero, whatever W may be")
        self._weigh(self._ask(self._pairs(self.x, _PAIRS)))
        n = norm.applied(tokens)
        weights = 1 / self.asked[0][2][:, None]
        rows = torch.cat([n, torch.ones(len(n), 1, dtype=torch.float64)], 1)
        solution = least_squares(weights * rows, weights * answers[:, None])
        self.u = solution[:-1, 0]
        self.b = solution[-1]
        miss = weights * (answers[:, None] - rows @ solution)
        if miss.square().mean().sqrt() > _NONLINEAR * self.possible / _EXPLAINED:
            raise mismatch(
                "answers to single tokens are not linear: no heads explain them"
            )

    def _weigh(self, paired: Tensor) -> None:
        """Find the error of an answer; for coarse answers it is that of their rounding.

        In units of that error, `sure` is the residual of a right model, and `possible`
        what the residual may be if the target's arithmetic is worse than its answers
        show.
        """
        known = torch.cat([y for _, y, _ in self.asked])
        rounded = rounding(self.oracle, paired, self.precision)
        own = own_error(self.oracle, self.asked[-1][0], paired, self.precision)
        own = own.clamp(max=4 * float(own.median()))
        least = smallest_error(rounded, known)
        self.coarse = float(rounded.median()) > _COARSE * max_abs(known)
        self.error = least
        self.sure = _ROUNDED
        self.enough = _ROUNDED
        if not self.coarse:
            self.sure = _EXPLAINED
            self.enough = 2 * _EXPLAINED
            if rounded.max() <= _UNEVEN * float(
                rounded.median()
            ):  # no link near its end
                self.error += float(own.square().mean().sqrt())
        errors = torch.cat([self._errors(y) for _, y, _ in self.asked])
        self.uneven = self.coarse or float(errors.max()) > _UNEVEN * float(errors.min())
        self.possible = _EXPLAINED * max(
            1.0, float((own / self._errors(paired)).median())
        )
        # For the answers from before the error was known.
        self.asked = [(X, y, self._errors(y)) for X, y, _ in self.asked]

    def _errors(self, answers: Tensor) -> Tensor:
        """Return the error of each answer, which is larger near the end of a link's range."""
        even = rounding(self.oracle, answers, self.precision) / math.sqrt(3)
        return torch.hypot(even, torch.full_like(answers, self.error))

    def _normals(self, *shape: int) -> Tensor:
        return normal(self.stream, *shape)

    def _ask(self, sequences: Tensor) -> Tensor:
        """Return the answers that are finite (a link may be saturated), and keep them for later."""
        answers = scores(self.oracle, sequences)
        usable = answers.isfinite()
        answers = answers[usable]
        self.asked.append((sequences[usable], answers, self._errors(answers)))
        return answers

    def _pairs(self, x: Tensor, count: int) -> Tensor:
        """Return sequences [y ; x] with y around x."""
        sizes = 0.3 + torch.rand(count, 1, generator=self.stream, dtype=torch.float64)
        y = x + self.spread * sizes / math.sqrt(len(x)) * self._normals(count, len(x))
        return torch.stack([y, x.expand_as(y)], 1)

    def _even(self, x: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return δ (count, d), φ − ½uᵀδ and its error (count,) of new queries at x."""
        answers = self._ask(self._pairs(x, count))
        pairs = self.norm.applied(self.asked[-1][0])
        error = self.asked[-1][2]
        delta = pairs[:, 0] - pairs[:, 1]
        phi = answers - self.b - pairs[:, 1] @ self.u
        return delta, phi - 0.5 * delta @ self.u, error

    def heads_at_one_token(self, heads: int) -> tuple[Tensor, Tensor, float]:
        """Fit g and v (H, d) at the first token; return them and the residual."""
        dim = len(self.x)
        unknowns = dim if heads == 1 else 2 * heads * dim
        more = 2 if self.coarse else 1
        count = math.ceil(more * self.method.oversampling * unknowns) + 8
        delta, even, error = self._even(self.x, count)
        size = float(self.u.abs().mean()) or max_abs(even)
        spread = 1 / float(delta.square().sum(1).mean().sqrt())
        best = torch.zeros(heads, dim), torch.zeros(heads, dim), math.inf
        small = heads < 4 or heads * dim <= _SMALL
        for _ in range(1 if heads == 1 else 2 * _ROUNDS if small else _ROUNDS // 2):
            shape = self.method.starts, heads, dim
            g = spread * self._normals(*shape)
            v = size * self._normals(*shape)
            if heads == 1:
                g[0], v = 0.0, self.u.expand(shape)
            g, v, misses = _fit_gates(
                delta, even, g, v, error, self.sure, fixed=heads == 1
            )
            for k in range(len(g)):
                free = self.coarse or float(misses[k]) <= self.sure
                signs = _signs(v[k], self.u, math.inf if free else _UNSIGNED)
                if float(misses[k]) < best[2] and signs is not None:
                    best = g[k] * signs, v[k] * signs, float(misses[k])
            if best[2] <= self.sure:
                break
        return best

    def further_tokens(self, g: Tensor, v: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return tokens x (d + 1, d), the first included, and g (d + 1, H, d) there, or None."""
        heads, dim = v.shape
        count = math.ceil(self.method.oversampling / 2 * heads * dim) + 8
        steps = _FURTHER * self.size * random_orthogonal(dim, self.stream)
        tokens = self.x[None]
        known = g[None]
        for _ in range(_ROUNDS):
            x = self.x + steps
            data = [self._even(each, count) for each in x]
            least = min(len(even) for _, even, _ in data)
            if least < heads * dim:  # too few answers are finite, because of a link
                steps = steps / 2
                continue
            columns = zip(*data, strict=True)
            delta, even, error = (
                torch.stack([p[:least] for p in part]) for part in columns
            )
            start = g.expand(len(x), heads, dim)
            found, _, misses = _fit_gates(
                delta,
                even,
                start,
                v.expand_as(start),
                error,
                self.sure,
                fixed=True,
                every=True,
            )
            good = misses <= 2 * self.sure
            tokens = torch.cat([tokens, x[good]])
            known = torch.cat([known, found[good]])
            steps = steps[~good] / 2
            if not len(steps):
                return tokens, known
        return None

    def ask_at_large(self, count: int) -> None:
        """Ask random sequences: pairs around a few tokens show little of the rest of the space."""
        dim = len(self.x)
        for length in _LENGTHS:
            shape = math.ceil(count / len(_LENGTHS)), length, dim
            tokens = self._normals(*shape) / math.sqrt(dim)
            if self.coarse:  # rounding hides at one size what it shows at another
                tokens *= (
                    2 * torch.rand(len(tokens), 1, 1, generator=self.stream).double()
                    + 0.2
                )
            self._ask(
                torch.cat(
                    [self.longest * tokens[:, :-1], self.size * tokens[:, -1:]], 1
                )
            )

    def settled(
        self,
        model: BiasedHeads,
        free: tuple[str, ...],
        count: int,
    ) -> BiasedHeads:
        """Fit the model to more and more answers, until it is known better than an answer."""
        dim = len(self.x)
        ordinary = self._normals(4 * _PAIRS, 3, dim) / math.sqrt(dim)
        for _ in range(_ROUNDS):
            error = uncertainty(model, free, self.asked)(ordinary)
            own = rounding(self.oracle, model(ordinary), self.precision)
            if float((error / own).quantile(0.95)) <= _SETTLED:
                break
            self.ask_at_large(count)
            model = refined(model, free, self.asked)
            count = 2 * count
        return model

    def expect_steady(self) -> None:
        """Raise Unsuccessful if the first queries, repeated, get other answers."""
        questions, answers, error = (part[:_PAIRS] for part in self.asked[0])
        off = (scores(self.oracle, questions) - answers).abs()
        changed = int((off > 4 * self.possible * error).sum())
        if changed:
            raise mismatch(
                f"when repeated, {changed} of {len(answers)} queries {CHANGED}"
            )


def _signs(
    v: Tensor,
    u: Tensor,
    allowed: float,
) -> Tensor | None:
    """Return signs (H, 1) for which the values v (H, d) add up to u, within `allowed`, or None."""
    choices = torch.tensor(
        list(itertools.product((1.0, -1.0), repeat=len(v))), dtype=v.dtype
    )
    misses = torch.linalg.vector_norm(choices @ v - u, dim=1)
    best = int(misses.argmin())
    size = float(
        torch.linalg.vector_norm(v, dim=1).max().clamp(min=torch.linalg.vector_norm(u))
    )
    return choices[best].unsqueeze(1) if float(misses[best]) <= allowed * size else None


def _fit_gates(
    delta: Tensor,
    even: Tensor,
    g: Tensor,
    v: Tensor,
    error: Tensor,
    sure: float,
    *,
    fixed: bool,
    every: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Fit g and v (S, H, d) from S starts as one batch, with v constant if `fixed`.

    δ (N, d) is the same for all starts, or each has its own (S, N, d). The fit ends
    when one start explains the answers and gains no more (with `every`, when each
    does). Returned residuals are in units of the error. If errors are uneven, the fit
    starts with larger errors for exact answers.
    """
    count = even.shape[-1]
    x = g[:, None] if fixed else torch.stack([g, v], 1)

    def linearize(
        x: Tensor,
        rows: Tensor,
        error: Tensor,
    ) -> Point:
        own = (delta, even, error)
        if delta.ndim == 3:
            own = (delta[rows], even[rows], error[rows])
        return _gates(x, v[rows] if fixed else x[:, 1], *own)

    def fit(error: Tensor, sure: float) -> tuple[Tensor, Tensor]:
        def stop(finished: Tensor, loss: Tensor) -> bool:
            explained = finished & (loss <= count * sure**2)
            return bool(finished.all() or (explained.any() and not every))

        return minimize(partial(linearize, error=error), x, options, stop)

    options = replace(_BY_GATES, target=_EXACT * count)
    if error.max() > _UNEVEN * float(error.min()):
        least = _TEMPERED * float(even.square().mean().sqrt())
        x, _ = fit(error.clamp(min=least), 0.3)
    x, loss = fit(error, sure)
    return x[:, 0], v if fixed else x[:, 1], (loss / count).sqrt()


def _gates(
    x: Tensor,
    v: Tensor,
    delta: Tensor,
    even: Tensor,
    error: Tensor,
) -> Point:
    """Return residuals (S, N) in units of the error at g and, if unknown, v (S, 1 or 2, H, d)."""
    tanh = torch.tanh(0.5 * x[:, 0] @ delta.mT)
    values = v @ delta.mT
    r = (0.5 * (tanh * values).sum(1) - even) / error

    def jacobian() -> Tensor:
        slopes = torch.stack([0.25 * (1 - tanh.square()) * values, 0.5 * tanh], 1)
        weights = slopes[:, : x.shape[1]].flatten(1, 2) / error.unsqueeze(-2)
        return (weights.mT[..., None] * delta.unsqueeze(-2)).flatten(2)

    return Point(x, r, jacobian)


def token_size(
    oracle: Oracle,
    stream: torch.Generator,
    gain: float,
    precision: float,
    norm: Norm,
) -> float:
    """Return the size of tokens (behind a norm, of δ) at which gates are half open.

    α of `[s(x+δ) ; sx]` leaves ½ where s²·δᵀWx is about 1. The result is the smallest
    such s, or, if a link is nearly saturated there, the s at which errors of the
    answers hide the least of α.
    """
    raw = normal(stream, 2, _PAIRS, oracle.dim)
    x, delta = raw / math.sqrt(oracle.dim)
    if norm.normed:
        x = x * math.sqrt(oracle.dim)
    best = 1.0
    clearest = 0.0
    for square in _SQUARES.tolist():
        s = math.sqrt(square)
        if norm.normed:
            y = x + s * delta
            last = x
        else:
            y = s * gain * (x + delta)
            last = s / gain * x
        single = scores(oracle, torch.cat([last, y]).unsqueeze(1))
        both = scores(oracle, torch.stack([y, last], 1))
        every = torch.cat([single, both]).view(3, -1)
        error = rounding(oracle, every, precision).nan_to_num(torch.inf).amax(0)
        apart = every[1] - every[0]
        off = both - every[:2].mean(0)
        clear = every.isfinite().all(0) & (apart.abs() > 8 * error)
        seen = float((off.abs() / error).nan_to_num(0.0).median())
        if seen > clearest:
            best = s
            clearest = seen
        if (
            2 * int(clear.sum()) >= _PAIRS
            and (off / apart).abs()[clear].median() > _OPEN
        ):
            return s if seen > min(_BLUR * clearest, _PLENTY) else best
    return best


def scores(oracle: Oracle, sequences: Tensor) -> Tensor:
    """Return one score per sequence, with NaN where a link is saturated."""
    return torch.cat([scalar(answered(oracle, X)) for X in sequences.split(_BATCH)])


@dataclass(frozen=True)
class Refined(Method):
    """A method for exact answers whose result is then fitted to many answers.

    Parameters that are read one by one inherit the rounding of one answer; a fit
    averages it out.
    """

    method: Method
    seed: int
    tolerance: float

    def steps(self, oracle: Oracle) -> Iterator[Step]:
        step: Step | None = None
        for step in self.method.steps(oracle):
            yield step
        if step is None or not isinstance(step.model, OneLayer | Attention):
            return
        model = step.model
        stream = random_stream(self.seed)
        if model.unknowns > UNKNOWNS:
            return
        # However many numbers an answer has, it shows one gate for each token but the
        # last.
        if isinstance(model, OneLayer):
            lengths = (1, 2, 3, 4)
            share = 1
        else:
            lengths = (1, 4, 8)
            share = 8
        asked: list[tuple[Tensor, Tensor, Tensor]] = []
        for length in lengths:
            shape = math.ceil(model.unknowns / share) + 8, length, oracle.dim
            tokens = normal(stream, *shape)
            tokens[::2] /= (
                oracle.dim**0.25
            )  # scores of about 1, where W is of ordinary size
            answers = ask(oracle, tokens)
            asked.append((tokens, answers, torch.full_like(answers, max_abs(answers))))
        yield replace(step, model=refined(model, tuple(model.tensors()), asked))
