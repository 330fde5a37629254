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
from dataclasses import dataclass, replace
from enum import StrEnum

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
from keyhole.extract.bilinear import random_units
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
_DECIMALS = 9  # rounding to more decimals than this cannot be told from chance
_FAR = 1e6  # length of the tokens to send if shorter ones all get the same answer
_NOT_ODD = "answers to a token and to its opposite are not opposite"
_NEARLY_FLAT = 0.02  # relative change of answers that a norm's ε may cause
_WIDEST = 128  # largest dimension for which heads are fitted
_WIDEST_SIGNS = 32  # the same where answers are signs
_RECOVERED = (Status.RECOVERED, Status.WITHIN)
_CLAIMS = (*_RECOVERED, Status.INEXACT)
_COARSE = (
    1e-5  # if the relative error of answers is larger, all weights are fitted together
)
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
        return Undone(
            oracle, self.link, self.arithmetic.precision, self.arithmetic.absolute
        )


@dataclass(frozen=True)
class Auto(Method):
    """Choose a method from a few answers, and run it."""

    seed: int = 0
    tolerance: float = 1e-8

    def __call__(self, oracle: Oracle) -> Extraction:
        counted = Counted(oracle)
        early = Witness(counted)
        try:
            choice = choose(early, self.seed)
        except BudgetExhausted:
            reason = f"stopped after {counted.queries:,} queries; nothing is known"
            return Extraction(
                Status.BUDGET, reason, repr(self), None, counted.queries, 0.0
            )
        except (OracleError, InputError) as error:
            return Extraction(
                Status.ORACLE_FAILED, str(error), repr(self), None, counted.queries, 0.0
            )
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
                spent = spent + _cost(result)
                result = second
                break
            spent += _cost(second)
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

    def _asked_again(
        self, result: Extraction, early: Witness, choice: Choice
    ) -> Extraction:
        """Repeat the first queries: the result stands only if the target still answers the same."""
        if result.check is None or result.status not in _CLAIMS:
            return result
        before = early.queries
        arithmetic = choice.arithmetic

        def same(now: Tensor, before: Tensor, allowed: float) -> bool:
            off = float((now - before).abs().max())
            return off <= 2 * arithmetic.absolute or within(now, before, allowed)

        changed = early.contradicted(same, arithmetic.repeated, arithmetic.precision)
        asked = early.queries - before
        result = replace(
            result, check=replace(result.check, queries=result.check.queries + asked)
        )
        if changed:
            reason = f"when repeated, {changed} of {asked} queries {CHANGED}"
            return replace(
                result,
                status=Status.MISMATCH,
                reason=reason,
                guarantee=None,
                guarantee_v=None,
            )
        return result


def _cost(result: Extraction) -> int:
    return result.queries + (0 if result.check is None else result.check.queries)


def choose(oracle: Oracle, seed: int = 0) -> Choice:
    """Send a few dozen queries and return the method that fits the answers."""
    stream = random_stream(seed)
    a, b, x, y = random_units(4, oracle.dim, stream)
    first = torch.stack([torch.stack([a, b]), torch.stack([x, y])])
    pairs = ask(oracle, first)
    alone = ask(oracle, torch.stack([a, -a, b, -b, x, -x]).unsqueeze(1))
    seen = torch.cat([pairs.flatten(), alone.flatten()])
    if ((seen == 0) | (seen == 1)).all() and seen.any():
        several = (FittedSigns(seed=seed),) if oracle.dim <= _WIDEST_SIGNS else ()
        return Choice(
            Kind.SIGNS,
            SignOnly(seed=seed),
            "the answers are 0 and 1",
            fallbacks=several,
        )
    if pairs.ndim == 1 and (seen == seen[0]).all():
        seen = _further(oracle, torch.stack([a, -a, b, -b]), seen)
    if pairs.ndim == 1 and (seen == seen[0]).all():
        link = None if not float(seen[0]) else Link("identity", seen[0].clone())
        return Choice(Kind.HEAD, LowRank(seed=seed), "every answer is the same", link)
    precision, absolute = measured_errors(oracle, first[:1], pairs[:1], seen)
    decimals = exact_decimals(seen, most=_DECIMALS) if digits(seen) <= EXACT else None
    noisy = absolute > 0 and decimals is None
    if decimals is not None:  # this rounding hides the smaller errors of the arithmetic
        precision = digits(seen)
        absolute = 0.5 * 10.0**-decimals
    if pairs.ndim == 1 and _flat(oracle, torch.stack([a, b]), alone[:4]):
        fit = Fitted(precision=max(precision, 1e-14), answer_error=absolute, seed=seed)
        why = "answers do not grow with a token"
        return Choice(Kind.HEAD, fit, why, arithmetic=Arithmetic(precision))
    link, odd = find_link(oracle, seed, precision, absolute)
    if noisy and (link.offset.abs() <= 2 * absolute).all():
        link = Link(
            link.name, torch.zeros_like(link.offset)
        )  # the offset is only noise
    plain = link.name == "identity" and not link.offset.any()
    if pairs.ndim > 1 and link.name != "softmax":
        absolute = 0.0  # the methods for vectors have no absolute tolerance
    elif link.name != "identity":
        absolute = max(absolute, smallest(precision))
    arithmetic = Arithmetic(precision, plain, absolute)
    view = oracle if arithmetic.exact else Undone(oracle, link, precision, absolute)
    choice = _choice(view, link.scores(pairs), (a, b, x), odd, seed, arithmetic)
    if decimals is not None and arithmetic.absolute:
        choice = replace(
            choice, why=f"the answers have {decimals} decimals and {choice.why}"
        )
    elif noisy and arithmetic.absolute:
        choice = replace(
            choice, why=f"the answers are off by up to {absolute:.0e}, {choice.why}"
        )
    if plain:
        return choice
    return replace(choice, link=link, why=f"behind {link} {choice.why}")


def _choice(
    view: Oracle,
    pairs: Tensor,
    tokens: tuple[Tensor, Tensor, Tensor],
    odd: bool,
    seed: int,
    arithmetic: Arithmetic,
) -> Choice:
    """Choose by the kind of answers, once the link is inverted; `odd` means f([−x]) = −f([x])."""
    accepted = arithmetic.accepted
    # Behind a link such as a sigmoid, scores have fewer digits than answers.
    unbounded = not isinstance(view, Undone) or view.link.name == "identity"
    precision = max(arithmetic.precision, 1e-14 if unbounded else 1e-8)
    answer_error = arithmetic.absolute if unbounded else 0.0

    def refined(method: Method) -> Method:
        if arithmetic.exact:
            return method
        return Refined(method, method.seed, method.tolerance)

    if pairs.ndim > 1:
        kind = Kind.LAST_VECTOR if pairs.ndim == 2 else Kind.EVERY_VECTOR
        # With biases, a residual, a norm or positions, the target is an attention
        # sub-layer. With a feed-forward layer as well it is a block, whose answers have
        # a token's dimension.
        others: tuple[Method, ...] = (AttentionSubLayer(seed=seed, tolerance=accepted),)
        if pairs.shape[-1] == view.dim:
            whole = (TransformerBlock, TransformerBlocks)
            others = (*others, *(each(seed=seed, tolerance=accepted) for each in whole))
        method = refined(FullOutput(seed=seed, tolerance=accepted))
        why = "the answers are vectors"
        if pairs.shape[-1] == view.dim and _deep(
            view, tokens[0], tokens[2], arithmetic.same
        ):
            method = AttentionLayers(seed=seed, tolerance=accepted)
            why = "one layer would weigh long tokens and short differences alike"
        return Choice(kind, method, why, arithmetic=arithmetic, fallbacks=others)
    if not odd:
        method = OneLayerTransformer(
            seed=seed, tolerance=accepted, resolution=arithmetic.linear
        )
        fit = FittedLayer(precision=precision, answer_error=answer_error, seed=seed)
        if arithmetic.absolute or arithmetic.precision > _COARSE:
            return Choice(Kind.LAYER, fit, _NOT_ODD, arithmetic=arithmetic)
        block = TransformerBlock(seed=seed, tolerance=accepted)
        fallbacks = (block,) if arithmetic.exact else (fit,)
        return Choice(
            Kind.LAYER,
            refined(method),
            _NOT_ODD,
            arithmetic=arithmetic,
            fallbacks=fallbacks,
        )
    fit = None
    if view.dim <= _WIDEST:
        fit = Fitted(precision=precision, answer_error=answer_error, seed=seed)
    others = () if fit is None else (fit,)
    if arithmetic.plain and arithmetic.absolute:
        # `choose` puts "the answers have 3 decimals and" or the like in front of "no
        # more".
        tolerant = Tolerant(tolerance=arithmetic.absolute, seed=seed)
        return Choice(
            Kind.ROUNDED, tolerant, "no more", arithmetic=arithmetic, fallbacks=others
        )
    if arithmetic.rounded and fit is not None:
        why = f"the answers are exact to {arithmetic.precision:.0e}"
        return Choice(Kind.HEAD, fit, why, arithmetic=arithmetic)
    if _one_head(view, *tokens, arithmetic.same):
        kind = Kind.HEAD
        why = "its logits add up as one head's do"
        method = LowRank(seed=seed, tolerance=accepted, resolution=arithmetic.rank)
    else:
        kind = Kind.HEADS
        why = "its logits do not add up as one head's would"
        method = MultiHead(seed=seed, tolerance=accepted)
        if fit is not None and not arithmetic.exact:
            method = fit
            others = ()
    return Choice(kind, method, why, arithmetic=arithmetic, fallbacks=others)


def _deep(oracle: Oracle, delta: Tensor, x: Tensor, same: float) -> bool:
    """Return whether the target has several layers of attention and nothing else.

    Attention alone is linear in single tokens, and odd. With one layer, with or without
    a residual, `s·(y([sx + δ/s ; sx]) − y([sx]))` is the same for every s; with several
    layers it is not.
    """
    y, other, both = last(oracle, torch.stack([x, delta, x + delta]).unsqueeze(1))
    pair = torch.stack([x + delta, x])
    long = torch.stack([2 * x + delta / 2, 2 * x])
    near, minus, far = last(oracle, torch.stack([pair, -pair, long]))
    apart = torch.stack([y + other - both, near + minus])
    moved = (near - y) - 2 * (far - 2 * y)
    limit = same * float(both.abs().max())
    return float(apart.abs().max()) <= limit < float(moved.abs().max())


def _further(oracle: Oracle, tokens: Tensor, seen: Tensor) -> Tensor:
    """Return answers to longer tokens if the target takes them: rounding may hide shorter ones."""
    try:
        return torch.cat([seen[:1], ask(oracle, _FAR * tokens.unsqueeze(1))])
    except (OracleError, InputError):
        return seen


def _flat(oracle: Oracle, tokens: Tensor, alone: Tensor) -> bool:
    """Return whether a token eight times as long gets the same answer, as it does behind a norm."""
    signs = alone.view(-1, 2)
    off = (ask(oracle, 8 * tokens.unsqueeze(1)) - signs[:, 0]).abs().max()
    flat = bool(off <= _NEARLY_FLAT * (signs[:, 0] - signs[:, 1]).abs().max())
    return flat and find_norm(oracle, random_stream(0)).normed


def _one_head(oracle: Oracle, a: Tensor, b: Tensor, x: Tensor, same: float) -> bool:
    """Return whether `z(a) + z(b) = z(a+b)`, at a scale where the gates are half open."""
    deltas = torch.stack([a, b, a + b])
    square = 1.0
    for _ in range(12):
        s = math.sqrt(square)
        tokens = torch.stack([s * (x + deltas), (s * x).expand_as(deltas)], dim=1)
        base = ask(oracle, (s * torch.stack([x, a, b])).unsqueeze(1))
        signal = torch.stack([base[1], base[2], base[1] + base[2]])
        alpha = (ask(oracle, tokens) - base[0]) / signal
        if ((alpha < 1e-3) | (alpha > 1 - 1e-3)).any():
            square /= 16  # saturated, or several heads, whose α can be any number
            continue
        z = torch.logit(alpha)
        if z.abs().max() > 0.05:
            return bool((z[0] + z[1] - z[2]).abs() <= same * z.abs().max())
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

_STEPS = tensor([0.0, 1.0, 2.0, -1.0, -2.0])
_RAYS = 3
_TRIES = 16
_FURTHER = 16.0  # factor on the length of tokens while the answers do not differ yet
_BEYOND = 3.0  # a link is refuted if it is off by so many errors of the answers
_ORDER: tuple[str, ...] = ("softmax", "identity", "sigmoid", "tanh")


def find_link(
    oracle: Oracle, seed: int, precision: float, absolute: float = 0.0
) -> tuple[Link, bool]:
    """Return the link whose inverse makes answers linear along rays, and whether scores are odd.

    `precision` is the relative error of an answer, `absolute` its absolute error.
    """
    stream = random_stream(seed ^ 0x4C494E4B)
    rays = _STEPS[1:, None, None] * random_units(_RAYS, oracle.dim, stream)
    questions = torch.cat(
        [torch.zeros_like(rays[0, :1]), rays.flatten(0, 1)]
    ).unsqueeze(1)
    names = list(_ORDER)
    odd = dict.fromkeys(_ORDER, True)
    scale = 1.0
    kept = dict[str, Tensor]()
    for _ in range(_TRIES):
        try:
            flat = ask(oracle, scale * questions)
        except (OracleError, InputError):
            break  # the target refuses such long tokens
        answers = _by_ray(flat)
        if kept and ((answers.abs() == 1) | (answers == 0)).all():
            break  # saturated
        error = max(precision, 1e-10) * answers.abs() + absolute
        names = [name for name in names if _possible(name, answers)]
        if "softmax" in names and answers.shape[-1] == 2 and "sigmoid" in names:
            names.remove(
                "sigmoid"
            )  # each of two classes behind a softmax is also a sigmoid
        unmeasured = precision > EXACT and flat.ndim == 1
        for name in list(names):
            bent, uneven = _misses(name, answers, error)
            if (
                bent or uneven
            ) and unmeasured:  # the real error exceeds that of the last digit
                own = _by_ray(own_error(oracle, scale * questions, flat, precision))
                error = torch.maximum(error, own)
                unmeasured = False
                bent, uneven = _misses(name, answers, error)
            odd[name] &= not uneven
            if bent:
                names.remove(name)
            else:
                kept.setdefault(name, answers)
        spread = (answers - answers[:1]).abs().max()
        if len(names) < 2 and spread > 8 * error.max():
            break
        scale *= 2 if spread > 8 * error.max() else _FURTHER
    if not names:  # no link makes answers linear: a target of another kind
        return Link("identity", zeros()), odd["identity"]
    best = names[0]
    return Link(best, _offset(best, kept[best])), odd[best]


def _by_ray(flat: Tensor) -> Tensor:
    """Return answers as (steps, rays, …), where step 0 is the zero token on every ray."""
    moved = flat[1:].unflatten(0, (len(_STEPS) - 1, _RAYS))
    return torch.cat([flat[:1].expand_as(moved[0])[None], moved])


def _possible(name: str, answers: Tensor) -> bool:
    """Return whether answers are in this link's range and the zero token's score is finite."""
    labels = bool(((answers == 0) | (answers == 1)).all())
    if name == "identity" or labels:
        return name == "identity"
    if name == "softmax":
        whole = answers.ndim > 2 and answers.shape[-1] > 1
        if not whole or ((answers.sum(-1) - 1).abs() >= 1e-2).any():
            return False
    low = -1.0 if name == "tanh" else 0.0
    inside = bool((answers >= low).all() & (answers <= 1).all())
    return inside and bool(undone(name, answers[0]).isfinite().all())


def _misses(name: str, answers: Tensor, error: Tensor) -> tuple[bool, bool]:
    """Return whether scores at 0, ±1, ±2 are off two straight rays, and off one straight line."""
    scores = undone(name, answers)
    errors = uncertain(name, answers, error)
    zero, single, double, minus, minus_double = scores.unbind(0)
    e0, e1, e2, f1, f2 = errors.unbind(0)
    bent = torch.stack([double + zero - 2 * single, minus_double + zero - 2 * minus])
    allowed = torch.stack([e2 + e0 + 2 * e1, f2 + e0 + 2 * f1])
    uneven = torch.stack([single + minus - 2 * zero, double + minus_double - 2 * zero])
    most = torch.stack([e1 + f1 + 2 * e0, e2 + f2 + 2 * e0])
    return _beyond(bent, allowed), _beyond(uneven, most)


def _beyond(off: Tensor, allowed: Tensor) -> bool:
    """Return whether anything is off by more than its error explains, where both are finite."""
    known = off.isfinite() & allowed.isfinite()
    return bool((off.abs() > _BEYOND * allowed)[known].any())


def _offset(name: str, answers: Tensor) -> Tensor:
    """Return the zero token's scores; if every token answers, those of its only position."""
    zero = undone(name, answers)[0, 0]
    while zero.ndim > 1:
        zero = zero[0]
    return zero
