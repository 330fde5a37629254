"""Choose a method that fits the target, from its answers to a few dozen queries.

First measure how exact the answers are (arithmetic.py), then find and invert the
*link*, the function that a server applies to its scores (`find_link`). If answers are
less exact than float64, or if the target normalises its tokens, the weights are fitted
within the answers' error (fitted.py). Otherwise a few answers show the kind of target:

    answers                                       kind of target            method
    vectors                                       an attention layer        FullOutput
    only 0 and 1                                  a threshold               SignOnly, FittedSigns
    multiples of 10⁻ᵏ                             rounding to k decimals    Tolerant, τ = ½·10⁻ᵏ
    f([a]) + f([−a]) ≠ 0                          a ReLU behind the head    OneLayerTransformer
    logits of [x+δ ; x] linear in δ               one head                  LowRank
    logits of [x+δ ; x] not linear in δ           several heads             MultiHead

For one head, `z(δ) = logit((f([x+δ ; x]) − f([x])) / f([δ])) = δᵀWx` is linear in δ;
for several heads it is a mixture, which is not linear for generic δ. The choice is only
a guess, and the judge tests its result. If answers are inexact, or if the first method
finds that the target is of another kind, heads are fitted by least squares before the
attack gives up.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import Any

import torch
from torch import Tensor

from keyhole.core import Status
from keyhole.core.errors import InputError
from keyhole.core.float64 import EPSILON, random_stream, tensor, zeros
from keyhole.extract.arithmetic import (
    EXACT,
    digits,
    exact_decimals,
    measured_errors,
    own_error,
    smallest,
)
from keyhole.extract.attention_layers import AttentionLayers
from keyhole.extract.bilinear import max_abs, random_units
from keyhole.extract.block import TransformerBlock
from keyhole.extract.blocks.view import last
from keyhole.extract.domain import CHANGED, Witness, within
from keyhole.extract.extraction import Extraction
from keyhole.extract.fitted import Fitted, Refined, find_norm
from keyhole.extract.fitted_layer import FittedLayer
from keyhole.extract.fitted_signs import FittedSigns
from keyhole.extract.full_output import FullOutput
from keyhole.extract.judge import NEARLY, Method
from keyhole.extract.low_rank import LowRank
from keyhole.extract.multi_head import MultiHead
from keyhole.extract.one_layer import OneLayerTransformer
from keyhole.extract.sign_only import SignOnly
from keyhole.extract.sub_layer import AttentionSubLayer
from keyhole.extract.tolerant import Tolerant
from keyhole.extract.transformer_blocks import TransformerBlocks
from keyhole.oracle.links import Link, Linked, Undone, uncertain, undone
from keyhole.oracle.protocol import BudgetExhausted, Counted, Oracle, OracleError, ask

_SAME = 1e-7  # relative difference up to which two answers count as equal
_MAX_DECIMALS = 9  # rounding to more decimals than this cannot be told from chance
_FAR = 1e6  # length of the tokens to send if shorter ones all get the same answer
_NEARLY_FLAT = 0.02  # relative change of answers that a norm's ε may cause
_MAX_DIM_FITTED = 128  # largest dimension for which heads are fitted
_MAX_DIM_SIGNS = 32  # the same where answers are signs
_RECOVERED = (Status.RECOVERED, Status.WITHIN)
_CLAIMS = (*_RECOVERED, Status.INEXACT)
# if the relative error of answers is larger, all weights are fitted together
_COARSE = 1e-5
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
    """How exact the answers are, and the tolerances that follow from it.

    `precision` is the relative error of an answer, and `absolute` an absolute error on
    top of it. `plain` means that scores are answered as they are, without a link or an
    offset.
    """

    precision: float = EPSILON
    plain: bool = True
    absolute: float = 0.0

    @property
    def rounded(self) -> bool:
        """Return whether answers are less exact than float64."""
        return self.precision > EXACT or self.absolute > 0

    @property
    def exact(self) -> bool:
        return self.plain and not self.rounded

    @property
    def accepted(self) -> float:
        """The error on fresh queries up to which a model counts as recovered."""
        return 1e-8 if self.exact else min(NEARLY, max(1e-6, 100 * self.precision))

    @property
    def same(self) -> float:
        """The relative difference up to which two answers count as equal."""
        return max(_SAME if self.exact else 1e-6, 64 * self.precision)

    @property
    def repeated(self) -> float:
        """The same for one query that is sent twice."""
        return max(1e-6, 100 * self.precision)

    @property
    def linear(self) -> float:
        """The distance from a linear piece up to which an answer counts as lying on it."""
        return 1e-12 if self.exact else max(1e-9, 16 * self.precision)

    @property
    def rank(self) -> float:
        """The relative size up to which a part of a column of W counts as rounding."""
        return 1e-11 if self.exact else 100 * max(self.precision, 1e-11)


@dataclass(frozen=True)
class Choice:
    """A method, why it was chosen, and the methods to try if it fails.

    `link` is the function that the server applies to its scores.
    """

    kind: Kind
    method: Method
    why: str
    link: Link | None = None
    arithmetic: Arithmetic = Arithmetic()
    fallbacks: tuple[Method, ...] = ()

    def view(self, oracle: Oracle) -> Oracle:
        """Return the oracle with its link inverted."""
        if self.link is None:
            return oracle
        arithmetic = self.arithmetic
        return Undone(oracle, self.link, arithmetic.precision, arithmetic.absolute)


@dataclass(frozen=True)
class Auto(Method):
    """Choose a method from a few answers, and run it."""

    seed: int = 0
    tolerance: float = 1e-8

    def __call__(self, oracle: Oracle) -> Extraction:
        counted = Counted(oracle)
        early = Witness(counted)
        unchosen = partial(Extraction, method=repr(self), model=None, seconds=0.0)
        try:
            choice = choose(early, self.seed)
        except BudgetExhausted:
            reason = f"stopped after {counted.queries:,} queries; nothing is known"
            return unchosen(Status.BUDGET, reason, queries=counted.queries)
        except (OracleError, InputError) as error:
            reason = str(error)
            return unchosen(Status.ORACLE_FAILED, reason, queries=counted.queries)
        view = choice.view(oracle)
        result = choice.method(view)
        spent = counted.queries
        why = f"{type(choice.method).__name__}, since {choice.why}"
        inexact = result.status is Status.INEXACT
        # Long tokens may saturate a link, and overflow a short format: norms in float32
        # are NaN.
        limited = choice.link is not None or choice.arithmetic.rounded
        failed = (
            inexact
            or result.status in _ANOTHER_KIND
            or (limited and result.status is Status.ORACLE_FAILED)
            or (result.status is Status.UNVERIFIED and result.model is None)
        )
        for fallback in choice.fallbacks if failed else ():
            second = fallback(view)
            if second.status in _RECOVERED or (
                not inexact and second.status not in _ANOTHER_KIND
            ):
                why = f"{type(fallback).__name__}, since {why} was wrong"
                spent += _cost(result)
                result = second
                break
            spent += _cost(second)
        result = _repeated(result, early, choice.arithmetic)
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


def _cost(result: Extraction) -> int:
    return result.queries + (0 if result.check is None else result.check.queries)


def _repeated(
    result: Extraction,
    early: Witness,
    arithmetic: Arithmetic,
) -> Extraction:
    """Repeat the first queries: the result stands only if the target still answers the same."""
    if result.check is None or result.status not in _CLAIMS:
        return result
    before = early.queries

    def same(
        now: Tensor,
        before: Tensor,
        allowed: float,
    ) -> bool:
        difference = max_abs(now - before)
        small = bool(difference <= 2 * arithmetic.absolute)
        return small or within(now, before, allowed)

    changed = early.contradicted(same, arithmetic.repeated, arithmetic.precision)
    repeated = early.queries - before
    check = replace(result.check, queries=result.check.queries + repeated)
    if not changed:
        return replace(result, check=check)
    return replace(
        result,
        status=Status.MISMATCH,
        reason=f"when repeated, {changed} of {repeated} queries {CHANGED}",
        check=check,
        guarantee=None,
        guarantee_v=None,
    )


def choose(oracle: Oracle, seed: int = 0) -> Choice:
    """Send a few dozen queries and return the method that fits the answers."""
    stream = random_stream(seed)
    a, b, x, y = random_units(4, oracle.dim, stream)
    first = torch.stack([torch.stack([a, b]), torch.stack([x, y])])
    pairs = ask(oracle, first)
    alone = ask(oracle, torch.stack([a, -a, b, -b, x, -x])[:, None])
    answers = torch.cat([pairs.flatten(), alone.flatten()])
    scores = pairs.ndim == 1
    if ((answers == 0) | (answers == 1)).all() and answers.any():
        several = (FittedSigns(seed=seed),) if oracle.dim <= _MAX_DIM_SIGNS else ()
        why = "the answers are 0 and 1"
        return Choice(Kind.SIGNS, SignOnly(seed=seed), why, fallbacks=several)
    if scores and (answers == answers[0]).all():
        # Rounding may hide shorter tokens.
        with suppress(OracleError, InputError):
            far = _FAR * torch.stack([a, -a, b, -b])
            answers = torch.cat([answers[:1], ask(oracle, far[:, None])])
    if scores and (answers == answers[0]).all():
        link = Link("identity", answers[0].clone()) if answers[0] else None
        return Choice(Kind.HEAD, LowRank(seed=seed), "every answer is the same", link)
    precision, absolute = measured_errors(oracle, first[:1], pairs[:1], answers)
    decimals = None
    if digits(answers) <= EXACT:
        decimals = exact_decimals(answers, most=_MAX_DECIMALS)
    noisy = absolute > 0 and decimals is None
    if decimals is not None:  # this rounding hides the smaller errors of the arithmetic
        precision = digits(answers)
        absolute = 0.5 * 10.0**-decimals
    if scores and _behind_norm(oracle, torch.stack([a, b]), alone[:4]):
        fit = Fitted(precision=max(precision, 1e-14), answer_error=absolute, seed=seed)
        why = "answers do not grow with a token"
        return Choice(Kind.HEAD, fit, why, arithmetic=Arithmetic(precision))
    link, odd = find_link(oracle, seed, precision, absolute)
    if noisy and (link.offset.abs() <= 2 * absolute).all():
        link = replace(link, offset=torch.zeros_like(link.offset))  # it is only noise
    plain = link.name == "identity" and not link.offset.any()
    if not scores and link.name != "softmax":
        absolute = 0.0  # the methods for vectors have no absolute tolerance
    elif link.name != "identity":
        absolute = max(absolute, smallest(precision))
    arithmetic = Arithmetic(precision, plain, absolute)
    view = oracle if arithmetic.exact else Undone(oracle, link, precision, absolute)
    choice = _choice(view, link.scores(pairs), (a, b, x), odd, seed, arithmetic)
    why = choice.why
    if decimals is not None and absolute:
        why = f"the answers have {decimals} decimals and {why}"
    elif noisy and absolute:
        why = f"the answers are off by up to {absolute:.0e}, {why}"
    if plain:
        return replace(choice, why=why)
    return replace(choice, link=link, why=f"behind {link} {why}")


def _choice(
    view: Oracle,
    pairs: Tensor,
    tokens: tuple[Tensor, Tensor, Tensor],
    odd: bool,
    seed: int,
    arithmetic: Arithmetic,
) -> Choice:
    """Choose by the kind of answers, once the link is inverted; `odd` means f([−x]) = −f([x])."""
    choice = partial(Choice, arithmetic=arithmetic)
    # Behind a link such as a sigmoid, scores have fewer digits than answers.
    unbounded = not isinstance(view, Undone) or view.link.name == "identity"
    errors: dict[str, Any] = {
        "precision": max(arithmetic.precision, 1e-14 if unbounded else 1e-8),
        "answer_error": arithmetic.absolute if unbounded else 0.0,
    }

    def made(kind: Callable[..., Method], **settings: float) -> Method:
        return kind(seed=seed, tolerance=arithmetic.accepted, **settings)

    def refined(method: Method) -> Method:
        if arithmetic.exact:
            return method
        return Refined(method, method.seed, method.tolerance)

    if pairs.ndim > 1:
        kind = Kind.LAST_VECTOR if pairs.ndim == 2 else Kind.EVERY_VECTOR
        # With biases, a residual, a norm or positions, the target is an attention
        # sub-layer. With a feed-forward layer as well it is a block, whose answers have
        # a token's dimension.
        others = (made(AttentionSubLayer),)
        method = refined(made(FullOutput))
        why = "the answers are vectors"
        if pairs.shape[-1] == view.dim:
            others += (made(TransformerBlock), made(TransformerBlocks))
            if _deep(view, tokens[0], tokens[2], arithmetic.same):
                method = made(AttentionLayers)
                why = "one layer would weigh long tokens and short differences alike"
        return choice(kind, method, why, fallbacks=others)
    if not odd:
        why = "answers to a token and to its opposite are not opposite"
        fit = FittedLayer(**errors, seed=seed)
        if arithmetic.absolute or arithmetic.precision > _COARSE:
            return choice(Kind.LAYER, fit, why)
        method = refined(made(OneLayerTransformer, resolution=arithmetic.linear))
        fallback = made(TransformerBlock) if arithmetic.exact else fit
        return choice(Kind.LAYER, method, why, fallbacks=(fallback,))
    fits: tuple[Method, ...] = ()
    if view.dim <= _MAX_DIM_FITTED:
        fits = (Fitted(**errors, seed=seed),)
    if arithmetic.plain and arithmetic.absolute:
        # `choose` puts "the answers have 3 decimals and" or the like in front of "no
        # more".
        tolerant = Tolerant(tolerance=arithmetic.absolute, seed=seed)
        return choice(Kind.ROUNDED, tolerant, "no more", fallbacks=fits)
    if arithmetic.rounded and fits:
        why = f"the answers are exact to {arithmetic.precision:.0e}"
        return choice(Kind.HEAD, fits[0], why)
    if _one_head(view, *tokens, arithmetic.same):
        method = made(LowRank, resolution=arithmetic.rank)
        why = "its logits add up as one head's do"
        return choice(Kind.HEAD, method, why, fallbacks=fits)
    method = made(MultiHead)
    why = "its logits do not add up as one head's would"
    if fits and not arithmetic.exact:
        return choice(Kind.HEADS, fits[0], why)
    return choice(Kind.HEADS, method, why, fallbacks=fits)


def _deep(
    oracle: Oracle,
    delta: Tensor,
    x: Tensor,
    same: float,
) -> bool:
    """Return whether the target has several layers of attention and nothing else.

    Attention alone is linear in single tokens, and odd. With one layer, with or without
    a residual, `s·(y([sx + δ/s ; sx]) − y([sx]))` is the same for every s; with several
    layers it is not.
    """
    y, other, both = last(oracle, torch.stack([x, delta, x + delta])[:, None])
    pair = torch.stack([x + delta, x])
    long = torch.stack([2 * x + delta / 2, 2 * x])
    near, minus, far = last(oracle, torch.stack([pair, -pair, long]))
    nonlinear = torch.stack([y + other - both, near + minus])
    change = (near - y) - 2 * (far - 2 * y)
    limit = same * max_abs(both)
    return max_abs(nonlinear) <= limit < max_abs(change)


def _behind_norm(
    oracle: Oracle,
    tokens: Tensor,
    alone: Tensor,
) -> bool:
    """Return whether a token eight times as long gets the same answer, as it does behind a norm."""
    plus, minus = alone.view(-1, 2).unbind(1)
    change = max_abs(ask(oracle, 8 * tokens[:, None]) - plus)
    if change > _NEARLY_FLAT * max_abs(plus - minus):
        return False
    return find_norm(oracle, random_stream(0)).normed


def _one_head(
    oracle: Oracle,
    a: Tensor,
    b: Tensor,
    x: Tensor,
    same: float,
) -> bool:
    """Return whether `z(a) + z(b) = z(a+b)`, at a scale where the gates are half open."""
    deltas = torch.stack([a, b, a + b])
    square = 1.0
    for _ in range(12):
        s = math.sqrt(square)
        tokens = torch.stack([s * (x + deltas), (s * x).expand_as(deltas)], dim=1)
        of_x, of_a, of_b = ask(oracle, (s * torch.stack([x, a, b]))[:, None])
        signal = torch.stack([of_a, of_b, of_a + of_b])
        alpha = (ask(oracle, tokens) - of_x) / signal
        if ((alpha < 1e-3) | (alpha > 1 - 1e-3)).any():
            square /= 16  # saturated, or several heads, whose α can be any number
            continue
        z = torch.logit(alpha)
        if max_abs(z) > 0.05:
            return bool((z[0] + z[1] - z[2]).abs() <= same * max_abs(z))
        square *= 16
    return False


# The link, the function that a server applies to its scores, from answers to single
# tokens.
#
# The scores of every kind of target are linear along a ray of single tokens: if y(t) is
# the score of [t·a], then y(2) − y(0) = 2·(y(1) − y(0)), and the same holds for −a. The
# inverse of the right link (identity, sigmoid, tanh or softmax) gives scores that
# satisfy this. The inverse of a wrong one does not, once tokens are long enough for the
# link to bend. Tokens are made longer until all links but one violate it by more than
# the errors of the answers explain. y(0) is the offset, and y(1) + y(−1) = 2y(0) if the
# target has only heads.

_ALONG = tensor([0.0, 1.0, 2.0, -1.0, -2.0])  # t
_RAYS = 3
_LENGTHS = 16  # of tokens that are tried
_FURTHER = 16.0  # factor on the length of tokens while the answers do not differ yet
_BEYOND = 3.0  # a link is refuted if it is off by so many errors of the answers
_ORDER: tuple[str, ...] = ("softmax", "identity", "sigmoid", "tanh")


def find_link(
    oracle: Oracle,
    seed: int,
    precision: float,
    absolute: float = 0.0,
) -> tuple[Link, bool]:
    """Return the link whose inverse makes answers linear along rays, and whether scores are odd.

    `precision` is the relative error of an answer, `absolute` its absolute error.
    """
    stream = random_stream(seed ^ 0x4C494E4B)
    rays = _ALONG[1:, None, None] * random_units(_RAYS, oracle.dim, stream)
    zero = torch.zeros_like(rays[0, :1])
    questions = torch.cat([zero, rays.flatten(0, 1)])[:, None]
    names = list(_ORDER)
    odd = dict.fromkeys(_ORDER, True)
    scale = 1.0
    first: dict[str, Tensor] = {}  # the first answers that did not refute a link
    for _ in range(_LENGTHS):
        try:
            flat = ask(oracle, scale * questions)
        except (OracleError, InputError):
            break  # the target refuses such long tokens
        answers = _by_ray(flat)
        if first and ((answers.abs() == 1) | (answers == 0)).all():
            break  # saturated
        error = max(precision, 1e-10) * answers.abs() + absolute
        names = [name for name in names if _possible(name, answers)]
        if {"softmax", "sigmoid"} <= {*names} and answers.shape[-1] == 2:
            # Each of two classes behind a softmax is also a sigmoid.
            names.remove("sigmoid")
        unmeasured = precision > EXACT and flat.ndim == 1
        for name in list(names):
            bent, uneven = _refutes(name, answers, error)
            if unmeasured and (bent or uneven):
                # The real error exceeds that of the last digit.
                own = own_error(oracle, scale * questions, flat, precision)
                error = torch.maximum(error, _by_ray(own))
                unmeasured = False
                bent, uneven = _refutes(name, answers, error)
            odd[name] &= not uneven
            if bent:
                names.remove(name)
            else:
                first.setdefault(name, answers)
        differ = max_abs(answers - answers[:1]) > 8 * error.max()
        if len(names) < 2 and differ:
            break
        scale *= 2 if differ else _FURTHER
    if not names:  # no link makes answers linear: a target of another kind
        return Link("identity", zeros()), odd["identity"]
    best = names[0]
    # The zero token's scores; if every token answers, those of its only position.
    offset = undone(best, first[best])[0, 0]
    while offset.ndim > 1:
        offset = offset[0]
    return Link(best, offset), odd[best]


def _by_ray(flat: Tensor) -> Tensor:
    """Return answers as (steps, rays, …), where step 0 is the zero token on every ray."""
    others = flat[1:].unflatten(0, (-1, _RAYS))
    return torch.cat([flat[:1].expand_as(others[0])[None], others])


def _possible(name: str, answers: Tensor) -> bool:
    """Return whether answers are in this link's range and the zero token's score is finite."""
    labels = bool(((answers == 0) | (answers == 1)).all())
    if name == "identity" or labels:
        return name == "identity"
    if name == "softmax":
        several = answers.ndim > 2 and answers.shape[-1] > 1
        if not several or ((answers.sum(-1) - 1).abs() >= 1e-2).any():
            return False
    low = -1.0 if name == "tanh" else 0.0
    inside = bool((answers >= low).all() & (answers <= 1).all())
    return inside and bool(undone(name, answers[0]).isfinite().all())


def _refutes(
    name: str,
    answers: Tensor,
    error: Tensor,
) -> tuple[bool, bool]:
    """Return whether scores at 0, ±1, ±2 are off two straight rays, and off one straight line."""
    y = undone(name, answers)
    e = uncertain(name, answers, error)
    bent = y[[2, 4]] + y[0] - 2 * y[[1, 3]]
    uneven = y[[1, 2]] + y[[3, 4]] - 2 * y[0]
    return (
        _beyond(bent, e[[2, 4]] + e[0] + 2 * e[[1, 3]]),
        _beyond(uneven, e[[1, 2]] + e[[3, 4]] + 2 * e[0]),
    )


def _beyond(residual: Tensor, allowed: Tensor) -> bool:
    """Return whether anything is off by more than its error explains, where both are finite."""
    known = residual.isfinite() & allowed.isfinite()
    return bool((residual.abs() > _BEYOND * allowed)[known].any())
