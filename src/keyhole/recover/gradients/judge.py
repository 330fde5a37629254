"""The judge of a recovered batch: the client's update is made again from it, and compared.

A batch counts only if its own update differs from the leaked one by no more than the leak's
errors: rounding, stated noise, float32 itself, and the last bits of weights. In units of those
the mean of the squared differences is 1 or less for the right batch, over millions of numbers. A
text's own part of the update has to stand out from the errors, or else the text might be another
one: its length in units of the errors is compared with what chance gives.

Where the errors are larger than float32's, one wrong token might hide in them. So each token has
alternatives in its place: the one with the nearest embedding, those that came nearest in the
search, and the token after it, exchanged. The update with any of them has to fit worse by odds of
V·e¹⁰ : 1 (errors being Gaussian). One that does not leaves its text unverified.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from keyhole.core import Status
from keyhole.recover.attack import Target
from keyhole.recover.gradients.update import (
    Batch,
    Update,
    adapted,
    clean_update,
    clipped_share,
    gradient,
)
from keyhole.recover.layers.precision import rounding_of
from keyhole.recover.recovery import ODDS, Mark, Verdict

CHANCE = 6.0  # standard deviations that what stands out from noise is away from its mean
_LIMIT = 1.1  # the mean squared difference in units of the errors, at most
_FINE = 5e-4  # of the update's size: errors below it hide no token
_ALTERNATIVES = 4  # tokens that might stand at a place, compared with the one that does
_BLOCKS = 2  # that alternatives are compared in: more would only be stronger
_FLOAT32 = 3e-5  # of the update's root mean square: what differs between machines

_OUTCOMES = {
    Mark.VERIFIED: (Status.RECOVERED, "the batch gives the leaked update again"),
    Mark.LIKELY: (
        Status.INEXACT, "all its rows lie in the span, but the batch does not give the update again"
    ),
    Mark.UNKNOWN: (Status.UNSOLVED, "not all its rows lie in the span"),
}  # fmt: skip


def judge(
    target: Target,
    update: Update,
    batch: Batch,
    in_span: Sequence[bool] = (),
    tokens: Sequence[Tensor] = (),
) -> list[Verdict]:
    """Compare a batch's own update with the leaked one: what each text is worth, as a whole.

    A text that is not verified is likely if it is `in_span`. Residual and precision are those of
    the batch, relative to the update's size. `tokens` might stand at each position instead.
    """
    errors = Errors.of(update, target.model)
    found = compared(target, update, batch, errors)
    residual, precision = found.residual, found.precision
    fits = len(batch.texts) == update.texts and found.misfit <= found.most
    proofs = _Proofs(target, update, batch, errors, found.given, tokens) if fits else None
    verdicts: list[Verdict] = []
    for number, ids in enumerate(batch.texts):
        verified, passes = proofs.holds(number, precision > _FINE) if proofs else (False, 0)
        likely = bool(in_span) and in_span[number]
        mark = Mark.VERIFIED if verified else Mark.LIKELY if likely else Mark.UNKNOWN
        status, reason = _OUTCOMES[mark]
        marks = (mark,) * len(ids)
        verdicts.append(Verdict(status, reason, verified, residual, precision, marks, passes))
    return verdicts


@dataclass(frozen=True, eq=False)
class Compared:
    """A batch's own update, and how far it is from the leaked one.

    `misfit` is the sum of the squared differences in units of the errors, `most` what it may be.
    """

    given: Mapping[str, Tensor]
    misfit: float
    most: float
    residual: float
    precision: float


def compared(target: Target, update: Update, batch: Batch, errors: Errors) -> Compared:
    given = clean_update(target.model, batch, update.protocol, update.adapters)
    count, misfit, far, size, error = 0, 0.0, 0.0, 0.0, 0.0
    for name in update.values:
        leaked = update.values[name].to(target.parts.device).double()
        own = given[name].double() if name in given else torch.zeros_like(leaked)
        variance, off = errors.variance(name), (leaked - own).square()
        live = (leaked != 0) | (own != 0)
        count += int(live.sum())
        misfit += float((off / variance).sum())
        far, size = far + float(off.sum()), size + float(leaked.square().sum())
        error += float((variance * live).sum())
    residual, precision = (math.sqrt(each / max(size, 1e-300)) for each in (far, error))
    # Stated noise is known exactly: then the sum is χ², with a deviation of √(2·count).
    exactly = update.protocol.multiplier and update.precision == "float32"
    most = count + CHANCE * math.sqrt(2 * count) if exactly else _LIMIT * count
    return Compared(given, misfit, most, residual, precision)


@dataclass(frozen=True, eq=False)
class Errors:
    """The error of every number of an update; `least` is the deviation that float32 leaves."""

    update: Update
    model: Any
    least: float

    @classmethod
    def of(cls, update: Update, model: Any) -> Errors:
        total = sum(float(each.float().square().sum()) for each in update.values.values())
        numbers = sum(int((each != 0).sum()) for each in update.values.values())
        return cls(update, model, _FLOAT32 * math.sqrt(total / max(1, numbers)))

    def variance(self, name: str) -> Tensor:
        """Of each number of one tensor."""
        return self.coarse(name) + self.least**2

    def coarse(self, name: str) -> Tensor:
        """The part that is more than float32's: rounding, noise, and the bits of weights."""
        protocol = self.update.protocol
        leaked = self.update.values[name].to(next(self.model.parameters()).device).double()
        variance = torch.full_like(leaked, protocol.noise_in(self.update.texts) ** 2)
        if self.update.precision != "float32":
            variance += rounding_of(leaked, self.update.precision)[1].square() / 12
        if protocol.steps > 1:  # a difference of weights, each of which is rounded at every step
            weight = self.model.get_parameter(name).detach()
            last = torch.exp2(torch.frexp(weight).exponent.double() - 24)
            variance += protocol.steps * last.square() / 12
        return variance


@dataclass(eq=False)
class _Proofs:
    """What speaks for each text of a batch whose update fits as a whole."""

    target: Target
    update: Update
    batch: Batch
    errors: Errors
    given: Mapping[str, Tensor]
    tokens: Sequence[Tensor]

    def __post_init__(self) -> None:
        model, parts = self.target.model, self.target.parts
        self._weights = {name: each.detach() for name, each in model.named_parameters()}
        inside = {id(each) for block in parts.blocks[:_BLOCKS] for each in block.parameters()}
        self._inside = [name for name, each in model.named_parameters() if id(each) in inside]
        starts = {name.removesuffix("weight") for name in self._inside}
        self._names = [
            name
            for name in self.update.values
            if name.removesuffix("weight").removesuffix("lora_A.").removesuffix("lora_B.") in starts
        ]
        self._variance = {name: self.errors.variance(name) for name in self._names}
        self._off = {
            name: self.update.values[name].to(parts.device).double() - self.given[name].double()
            for name in self._names
        }

    def holds(self, number: int, coarse: bool) -> tuple[bool, int]:
        """Would the update show it if this text were another one? And the passes that took."""
        odds = 2 * (math.log(self.target.vocabulary) + ODDS)
        own = self._part(self.batch[number], number)
        nothing = {name: torch.zeros_like(each) for name, each in own.items()}
        if self._worse(own, nothing) < odds:
            return False, 1
        text = self.batch.texts[number]
        passes = 1
        for place in range(len(text)) if coarse else ():
            for other in self._others(number, place):
                passes += 1
                if self._worse(own, self._part(other, number)) < odds:
                    return False, passes
        return True, passes

    def _others(self, number: int, place: int) -> Iterator[Batch]:
        """The text with other tokens at a place: near ones, the next one."""
        one = self.batch[number]
        text = one.texts[0]
        few = self.tokens[min(place, len(self.tokens) - 1)][:_ALTERNATIVES] if self.tokens else []
        for id_ in {self._nearest(text[place]), *map(int, few)} - {text[place]}:
            yield one.changed(0, place, id_)
        if place + 1 < len(text) and text[place] != text[place + 1]:
            yield one.changed(0, place, text[place + 1]).changed(0, place + 1, text[place])

    def _part(self, text: Batch, number: int) -> dict[str, Tensor]:
        """What one text adds to the update, with the number of the text that it stands for."""
        protocol = self.update.protocol
        only = self._inside if protocol.clip is None else None  # lengths are those of all
        own = gradient(self.target.model, self._weights, text, only)
        own = adapted(self.target.model, own, self.update.adapters)
        share = -protocol.rate * protocol.steps if protocol.steps > 1 else 1.0
        if protocol.clip is not None:
            share *= clipped_share(own, protocol.clip)
        if self.update.task == "causal" and protocol.clip is None:
            predicted = [len(each) - 1 for each in self.batch.texts]
            share *= predicted[number] / sum(predicted)
        else:
            share /= len(self.batch.texts)
        return {name: share * own[name].double() for name in self._names}

    def _worse(self, own: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
        """How much worse the update fits, in squared errors, with `other` instead of `own`."""
        worse = 0.0
        for name in self._names:
            change = own[name] - other[name]
            terms = (change.square() + 2 * change * self._off[name]) / self._variance[name]
            worse += float(terms.sum())
        return worse

    def _nearest(self, token: int) -> int:
        """The other token whose embedding is nearest."""
        table = self.target.parts.table
        far = (table - table[token]).square().sum(-1)
        far[token] = torch.inf
        return int(far.argmin())
