"""Chooses the method that applies from the target's answers to a few dozen queries.

First it is found out how exact the answers are (arithmetic.py), and what the server does to its
scores is undone (`find_link`). Answers in less than float64 are fitted within their own error
(fitted.py), and so are those to tokens behind a norm. In exact answers each kind of target leaves a
mark that a few of them show:

    vectors                                       an attention layer        FullOutput
    nothing but 0 and 1                           a threshold               SignOnly
    whole multiples of 10⁻ᵏ                       rounding to k decimals    Tolerant, τ = ½·10⁻ᵏ
    f([a]) + f([−a]) ≠ 0                          a ReLU behind the head    OneLayerTransformer
    logits of [x+δ ; x] that add up in δ          one head                  LowRank
    logits that do not                            several heads             MultiHead

For one head, `z(δ) = logit((f([x+δ ; x]) − f([x])) / f([δ])) = δᵀWx` is linear in δ; for several it
is a mixture, and generic δ show that. The choice is a guess with a reason: the judge decides. Where
answers are inexact, or the first method finds that the target is of another kind, heads are fitted
by least squares (fitted.py) before anybody calls the target safe.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

import torch
from torch import Tensor

from keyhole.core import Status
from keyhole.core.errors import InputError
from keyhole.extract.arithmetic import EXACT, digits, measured_precision
from keyhole.extract.bilinear import random_units
from keyhole.extract.domain import CHANGED, Witness, within
from keyhole.extract.extraction import Extraction, Step
from keyhole.extract.fitted import Fitted, Refined, find_norm
from keyhole.extract.full_output import FullOutput
from keyhole.extract.judge import NEARLY, Method
from keyhole.extract.low_rank import LowRank
from keyhole.extract.multi_head import MultiHead
from keyhole.extract.one_layer import OneLayerTransformer
from keyhole.extract.output_layer import exact_decimals
from keyhole.extract.sign_only import SignOnly
from keyhole.extract.sub_layer import AttentionSubLayer
from keyhole.extract.tolerant import Tolerant
from keyhole.oracle.links import NAMES, Link, Linked, Undone, undone
from keyhole.oracle.protocol import BudgetExhausted, Counted, Oracle, OracleError, ask

_SAME = 1e-7  # two answers that should agree differ by no more than this, relatively
_DECIMALS = 9  # beyond this, rounding is too fine to be distinguished from chance
_FAR = 1e6  # length of tokens that are asked where shorter ones all have one answer
_NOT_ODD = "answers to a token and to its opposite are not opposite"
_NEARLY_FLAT = 0.02  # of the answers: what the ε of a norm still changes
_WIDEST = 128  # tokens that a fit is tried for
_RECOVERED = (Status.RECOVERED, Status.WITHIN)
_CLAIMS = (*_RECOVERED, Status.INEXACT)
_ANOTHER_KIND = (Status.MISMATCH, Status.SATURATED, Status.NOT_APPLICABLE)


class Kind(StrEnum):
    """What the answers look like."""

    HEAD = "one head's scores"
    HEADS = "several heads' scores"
    LAYER = "a one-layer Transformer's scores"
    ROUNDED = "rounded scores"
    SIGNS = "signs"
    LAST_VECTOR = "the last token's vector"
    EVERY_VECTOR = "every token's vector"


@dataclass(frozen=True)
class Arithmetic:
    """How exact the answers are, and what may then be expected of a method and its result.

    `precision` is the relative error of an answer; `plain` says that no link had to be undone.
    """

    precision: float = torch.finfo(torch.float64).eps
    plain: bool = True

    @property
    def exact(self) -> bool:
        return self.plain and self.precision <= EXACT

    @property
    def accepted(self) -> float:
        """The error on fresh queries up to which a model counts as recovered."""
        return 1e-8 if self.exact else min(NEARLY, max(1e-6, 100 * self.precision))

    @property
    def same(self) -> float:
        """How far two answers that should agree may differ, relative to the largest."""
        return max(_SAME if self.exact else 1e-6, 64 * self.precision)

    @property
    def repeated(self) -> float:
        """The same for one question asked twice."""
        return max(1e-6, 100 * self.precision)

    @property
    def linear(self) -> float:
        """How far from a linear piece answers may lie that are on it."""
        return 1e-12 if self.exact else max(1e-9, 16 * self.precision)

    @property
    def rank(self) -> float:
        """What counts as rounding in a column of W."""
        return 1e-11 if self.exact else 100 * max(self.precision, 1e-11)


@dataclass(frozen=True)
class Choice:
    """A method, and what in the answers speaks for it; `fallback` where that turns out wrong.

    `link` is what the server does to its scores.
    """

    kind: Kind
    method: Method
    why: str
    link: Link | None = None
    arithmetic: Arithmetic = Arithmetic()
    fallback: Method | None = None

    def view(self, oracle: Oracle) -> Oracle:
        """The oracle with its link undone."""
        if self.link is None:
            return oracle
        return Undone(oracle, self.link, precision=self.arithmetic.precision)


@dataclass(frozen=True)
class Auto(Method):
    """Chooses a method by looking at a few answers, and runs it."""

    seed: int = 0
    tolerance: float = 1e-8

    def __call__(self, oracle: Oracle) -> Extraction:
        counted = Counted(oracle)
        early = Witness(counted)
        try:
            choice = choose(early, self.seed)
        except BudgetExhausted:
            reason = f"stopped after {counted.queries:,} queries; nothing is known"
            return Extraction(Status.BUDGET, reason, repr(self), None, counted.queries, 0.0)
        except (OracleError, InputError) as error:
            return Extraction(
                Status.ORACLE_FAILED, str(error), repr(self), None, counted.queries, 0.0
            )
        view = choice.view(oracle)
        method, result = choice.method, choice.method(view)
        spent, why = counted.queries, f"{type(method).__name__}, since {choice.why}"
        inexact = result.status is Status.INEXACT
        if choice.fallback is not None and (inexact or result.status in _ANOTHER_KIND):
            spent += result.queries + (0 if result.check is None else result.check.queries)
            second = choice.fallback(view)
            if second.status in _RECOVERED or (not inexact and second.status not in _ANOTHER_KIND):
                why = f"{type(choice.fallback).__name__}, since {why} was wrong"
                result = second
        result = self._asked_again(result, early, choice)
        model = result.model
        if model is not None and choice.link is not None:
            model = Linked(model, choice.link)
        return replace(
            result,
            reason=f"{why}; {result.reason}",
            model=model,
            queries=result.queries + spent,
            trace=tuple((queries + spent, error) for queries, error in result.trace),
        )

    def _asked_again(self, result: Extraction, early: Witness, choice: Choice) -> Extraction:
        """The first answers of all once more: the target must be the one that was looked at."""
        if result.check is None or result.status not in _CLAIMS:
            return result
        before = early.queries
        arithmetic = choice.arithmetic
        changed = early.contradicted(within, arithmetic.repeated, arithmetic.precision)
        asked = early.queries - before
        result = replace(result, check=replace(result.check, queries=result.check.queries + asked))
        if changed:
            reason = f"asked again, {changed} of {asked} questions {CHANGED}"
            return replace(
                result, status=Status.MISMATCH, reason=reason, guarantee=None, guarantee_v=None
            )
        return result

    def steps(self, oracle: Oracle) -> Iterator[Step]:
        choice = choose(oracle, self.seed)
        yield from choice.method.steps(choice.view(oracle))


def choose(oracle: Oracle, seed: int = 0) -> Choice:
    """Look at a few dozen answers and name the method that fits them."""
    stream = torch.Generator().manual_seed(seed)
    a, b, x, y = random_units(4, oracle.dim, stream)
    first = torch.stack([torch.stack([a, b]), torch.stack([x, y])])
    pairs = ask(oracle, first)
    alone = ask(oracle, torch.stack([a, -a, b, -b, x, -x]).unsqueeze(1))
    seen = torch.cat([pairs.flatten(), alone.flatten()])
    if bool(((seen == 0) | (seen == 1)).all()) and bool(seen.any()):
        return Choice(Kind.SIGNS, SignOnly(seed=seed), "the answers are 0 and 1")
    if pairs.ndim == 1 and bool((seen == seen[0]).all()):
        seen = _further(oracle, torch.stack([a, -a, b, -b]), seen)
    if pairs.ndim == 1 and bool((seen == seen[0]).all()):
        link = None if not float(seen[0]) else Link("identity", seen[0].clone())
        return Choice(Kind.HEAD, LowRank(seed=seed), "every answer is the same", link)
    precision = measured_precision(oracle, first[:1], pairs[:1], seen)
    decimals = exact_decimals(seen, most=_DECIMALS) if digits(seen) <= EXACT else None
    if decimals is not None and pairs.ndim == 1:
        error = 0.5 * 10.0**-decimals
        why = f"the answers have {decimals} decimals"
        if float((alone[0::2] + alone[1::2]).abs().max()) > 2 * error * (1 + _SAME):
            return Choice(
                Kind.LAYER,
                OneLayerTransformer(seed=seed, tolerance=NEARLY, resolution=error),
                f"{why} and {_NOT_ODD}",
            )
        fallback = Fitted(answer_error=error, seed=seed) if oracle.dim <= _WIDEST else None
        return Choice(Kind.ROUNDED, Tolerant(tolerance=error, seed=seed), why, fallback=fallback)
    if pairs.ndim == 1 and _flat(oracle, torch.stack([a, b]), alone[:4]):
        fit = Fitted(precision=max(precision, 1e-14), seed=seed)
        why = "answers do not grow with a token"
        return Choice(Kind.HEAD, fit, why, arithmetic=Arithmetic(precision))
    link = find_link(oracle, seed, precision)
    plain = link.name == "identity" and not bool(link.offset.any())
    arithmetic = Arithmetic(precision, plain)
    if plain:
        return _choice(oracle, pairs, (a, b, x), alone, seed, arithmetic)
    scores = link.scores(pairs), (a, b, x), link.scores(alone)
    # Where a sigmoid or the like is nearly saturated, scores have fewer digits than answers.
    least = 1e-14 if link.name == "identity" else 1e-8
    choice = _choice(Undone(oracle, link), *scores, seed, arithmetic, least)
    return replace(choice, link=link, why=f"behind {link} {choice.why}")


def _choice(
    view: Oracle, pairs: Tensor, tokens: tuple[Tensor, Tensor, Tensor], alone: Tensor, seed: int,
    arithmetic: Arithmetic, least: float = 1e-14,
) -> Choice:  # fmt: skip
    """The choice among kinds, once the link is undone; `least` is the least error of a score."""
    accepted = arithmetic.accepted

    def refined(method: Method) -> Method:
        return method if arithmetic.exact else Refined(method)

    if pairs.ndim > 1:
        # Biases, a residual, a norm or positions make it a checkpoint's sub-layer.
        return Choice(
            Kind.LAST_VECTOR if pairs.ndim == 2 else Kind.EVERY_VECTOR,
            refined(FullOutput(seed=seed, tolerance=accepted)), "the answers are vectors",
            arithmetic=arithmetic, fallback=AttentionSubLayer(seed=seed, tolerance=accepted),
        )  # fmt: skip
    if float((alone[0::2] + alone[1::2]).abs().max()) > arithmetic.same * float(alone.abs().max()):
        method = OneLayerTransformer(seed=seed, tolerance=accepted, resolution=arithmetic.linear)
        return Choice(Kind.LAYER, refined(method), _NOT_ODD, arithmetic=arithmetic)
    fit = None
    if view.dim <= _WIDEST:
        fit = Fitted(precision=max(arithmetic.precision, least), seed=seed)
        if arithmetic.precision > EXACT:
            why = f"the answers are exact to {arithmetic.precision:.0e}"
            return Choice(Kind.HEAD, fit, why, arithmetic=arithmetic)
    if _one_head(view, *tokens, arithmetic.same):
        kind, why = Kind.HEAD, "its logits add up as one head's do"
        method = LowRank(seed=seed, tolerance=accepted, resolution=arithmetic.rank)
    else:
        kind, why = Kind.HEADS, "its logits do not add up as one head's would"
        method = MultiHead(seed=seed, tolerance=accepted)
        if fit is not None and not arithmetic.exact:
            method, fit = fit, None
    return Choice(kind, method, why, arithmetic=arithmetic, fallback=fit)


def _further(oracle: Oracle, tokens: Tensor, seen: Tensor) -> Tensor:
    """Answers to longer tokens, where a target takes them: rounding may hide shorter ones'."""
    try:
        return torch.cat([seen[:1], ask(oracle, _FAR * tokens.unsqueeze(1))])
    except (OracleError, InputError):
        return seen


def _flat(oracle: Oracle, tokens: Tensor, alone: Tensor) -> bool:
    """Is a token eight times as long the same to the target, as behind a norm?"""
    signs = alone.view(-1, 2)
    off = (ask(oracle, 8 * tokens.unsqueeze(1)) - signs[:, 0]).abs().max()
    flat = bool(off <= _NEARLY_FLAT * (signs[:, 0] - signs[:, 1]).abs().max())
    return flat and find_norm(oracle, torch.Generator().manual_seed(0)).normed


def _one_head(oracle: Oracle, a: Tensor, b: Tensor, x: Tensor, same: float) -> bool:
    """Is `z(a) + z(b) = z(a+b)`, at a scale where the gates are neither shut nor open?"""
    deltas = torch.stack([a, b, a + b])
    square = 1.0
    for _ in range(12):
        s = math.sqrt(square)
        tokens = torch.stack([s * (x + deltas), (s * x).expand_as(deltas)], dim=1)
        base = ask(oracle, (s * torch.stack([x, a, b])).unsqueeze(1))
        signal = torch.stack([base[1], base[2], base[1] + base[2]])
        alpha = (ask(oracle, tokens) - base[0]) / signal
        if bool(((alpha < 1e-3) | (alpha > 1 - 1e-3)).any()):
            square /= 16  # saturated, or never in range: several heads can push α anywhere
            continue
        z = torch.logit(alpha)
        if float(z.abs().max()) > 0.05:
            return bool((z[0] + z[1] - z[2]).abs() <= same * z.abs().max())
        square *= 16
    return False


# What a server does to its scores, found out from a dozen answers to single tokens.
#
# Behind no link, every kind of target is linear or piecewise linear along a ray of single tokens:
# with y(t) the answer to [t·a], y(2) − y(0) = 2·(y(1) − y(0)), and the same for −a. Behind a
# sigmoid, a tanh or a softmax that holds for the answers once they are undone, and for nothing
# else, as soon as the answers are large enough to bend. y(0) is the offset.

_STEPS = torch.tensor([0.0, 1.0, 2.0, -1.0, -2.0], dtype=torch.float64)
_BENT = 0.3  # a range of answers over which a sigmoid or a tanh is seen to bend
_TRIES = 12
_ORDER = ("softmax", "identity", "sigmoid", "tanh")


def find_link(oracle: Oracle, seed: int, error: float) -> Link:
    """The link that makes answers along a ray add up; `error` is that of an answer, relative."""
    stream = torch.Generator().manual_seed(seed ^ 0x4C494E4B)
    ray = _STEPS[:, None, None] * random_units(1, oracle.dim, stream)
    scale = 1.0
    answers = ask(oracle, ray)
    names = _names(answers)
    for _ in range(_TRIES):
        spread = float((answers - answers[:1]).abs().max())
        saturated = any(not bool(undone(name, answers).isfinite().all()) for name in names)
        if names == ["identity"] or (not saturated and spread >= _BENT):
            break
        further = min(max(2.0, _BENT / max(spread, 1e-9)), 2.0**20)
        scale *= 0.25 if saturated else further
        answers = ask(oracle, scale * ray)
        names = _names(answers)
    misses = {name: _miss(undone(name, answers)) for name in names}
    # Of links that fit alike the first: two classes behind a softmax are sigmoids too.
    best = min(misses, key=lambda name: (misses[name] > max(1e-9, 100 * error), _ORDER.index(name)))
    if misses[best] > max(1e-6, 1e3 * error):
        best = "identity"  # no link makes it add up: a target of another kind
        return Link(best, torch.zeros((), dtype=torch.float64))
    return Link(best, _offset(best, answers))


def _names(answers: Tensor) -> list[str]:
    return [name for name in NAMES if _possible(name, answers)]


def _possible(name: str, answers: Tensor) -> bool:
    inside = bool((answers > 0).all() & (answers < 1).all())
    if bool(((answers == 0) | (answers == 1)).all()):
        return name == "identity"  # labels
    match name:
        case "identity":
            return True
        case "softmax":
            several = answers.ndim > 1 and answers.shape[-1] > 1
            whole = several and bool(((answers.sum(-1) - 1).abs() < 1e-2).all())
            return whole and bool((answers >= 0).all())
        case "sigmoid":
            return inside
        case _:
            return bool((answers.abs() < 1).all())


def _miss(scores: Tensor) -> float:
    """How far scores at 0, 1, 2, −1, −2 are from two straight rays, relative to the largest."""
    if not bool(scores.isfinite().all()):
        return torch.inf
    zero, single, double, minus, minus_double = scores.unbind(0)
    off = torch.stack(
        [double - zero - 2 * (single - zero), minus_double - zero - 2 * (minus - zero)]
    )
    size = (scores - zero).abs().max()
    return float(off.abs().max() / size.clamp(min=1e-300)) if float(size) else 0.0


def _offset(name: str, answers: Tensor) -> Tensor:
    """The scores of the zero token: of its one position, where every token answers."""
    zero = undone(name, answers)[0]
    while zero.ndim > 1:
        zero = zero[0]
    return zero
