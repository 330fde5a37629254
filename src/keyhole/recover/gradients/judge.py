"""The judge of a recovered batch: the client's update is made again from it, and compared.

A batch counts only if its own update differs from the leaked one by no more than the leak's errors
(errors.py). In units of those the mean of the squared differences is 1 or less for the right batch,
over millions of numbers. A text's own part of the update has to stand out from the errors, or else
the text might be another one: its length in units of the errors is compared with what chance gives.

Where the errors are larger than float32's, one wrong token might hide in them. So each token has a
rival, the one with the nearest embedding, in its place: the update with the rival has to fit worse
by odds of V·e¹⁰ : 1 (errors being Gaussian). One that does not leaves its text unverified.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from keyhole.recover.attack import Target
from keyhole.recover.gradients.update import Batch, Update, gradient, made, noise_of
from keyhole.recover.judge import ODDS

_LIMIT = 1.1  # the mean squared difference in units of the errors, at most
_FINE = 5e-4  # of the update's size: errors below it hide no token
_BLOCKS = 2  # that rivals are compared in: more would only be stronger


@dataclass(frozen=True, eq=False)
class Fit:
    """`residual` and `errors` are relative to the update's size; `verified` is of each text."""

    residual: float
    errors: float
    verified: tuple[bool, ...]
    passes: int


def judge(target: Target, update: Update, batch: Batch) -> Fit:
    """Compare a batch's own update with the leaked one."""
    errors = Errors.of(update, target.model)
    given = made(target.model, batch, update.protocol)
    count, misfit, far, size, error = 0, 0.0, 0.0, 0.0, 0.0
    for name in update.values:
        leaked, own = update.values[name].to(target.parts.device).double(), given[name].double()
        variance, off = errors.variance(name), (leaked - own).square()
        live = (leaked != 0) | (own != 0)
        count += int(live.sum())
        misfit += float((off / variance).sum())
        far, size = far + float(off.sum()), size + float(leaked.square().sum())
        error += float((variance * live).sum())
    residual, relative = (math.sqrt(each / max(size, 1e-300)) for each in (far, error))
    texts = len(batch.texts)
    if texts != update.texts or misfit > _LIMIT * count:
        return Fit(residual, relative, (False,) * texts, 1)
    proofs = _Proofs(target, update, batch, errors, given)
    verified = tuple(proofs.holds(number, relative > _FINE) for number in range(texts))
    return Fit(residual, relative, verified, 1 + proofs.passes)


@dataclass(eq=False)
class _Proofs:
    """What speaks for each text of a batch whose update fits as a whole."""

    target: Target
    update: Update
    batch: Batch
    errors: Errors
    given: Mapping[str, Tensor]
    passes: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        model, parts = self.target.model, self.target.parts
        self._weights = {name: each.detach() for name, each in model.named_parameters()}
        inside = {id(each) for block in parts.blocks[:_BLOCKS] for each in block.parameters()}
        names = [name for name, each in model.named_parameters() if id(each) in inside]
        self._names = [name for name in names if name in self.update.values]
        self._variance = {name: self.errors.variance(name) for name in self._names}
        self._off = {
            name: self.update.values[name].to(parts.device).double() - self.given[name].double()
            for name in self._names
        }

    def holds(self, number: int, coarse: bool) -> bool:
        """Would the update show it if this text were another one?"""
        own = self._part(self.batch[number], number)
        if (
            self._worse(own, {name: torch.zeros_like(each) for name, each in own.items()})
            < self._odds
        ):
            return False
        text = self.batch.texts[number]
        for place in range(len(text)) if coarse else ():
            rival = (*text[:place], self._nearest(text[place]), *text[place + 1 :])
            other = self._part(Batch((rival,), self.batch[number].labels), number)
            if self._worse(own, other) < self._odds:
                return False
        return True

    @property
    def _odds(self) -> float:
        return 2 * (math.log(self.target.vocabulary) + ODDS)

    def _part(self, text: Batch, number: int) -> dict[str, Tensor]:
        """What one text adds to the update, with the number of the text that it stands for."""
        self.passes += 1
        protocol = self.update.protocol
        own = gradient(self.target.model, self._weights, text)
        share = -protocol.rate * protocol.steps if protocol.steps > 1 else 1.0
        if protocol.clip is not None:
            length = float(torch.stack([each.norm() for each in own.values()]).norm())
            share *= min(1.0, protocol.clip / max(length, 1e-30))
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


# How exact an update is: rounding, stated noise, float32 itself, and the last bits of weights.

_FLOOR = 3e-5  # of the update's root mean square: what float32 may differ by between machines
_BITS = {"bfloat16": 8, "float16": 11}


@dataclass(frozen=True, eq=False)
class Errors:
    """The standard deviation of the error of every number of an update, tensor by tensor."""

    update: Update
    model: Any
    floor: float

    @classmethod
    def of(cls, update: Update, model: Any) -> Errors:
        total = sum(float(each.float().square().sum()) for each in update.values.values())
        numbers = sum(int((each != 0).sum()) for each in update.values.values())
        return cls(update, model, _FLOOR * math.sqrt(total / max(1, numbers)))

    def variance(self, name: str) -> Tensor:
        """Of each number of one tensor; `coarse` parts alone, without what float32 leaves."""
        return self.coarse(name) + self.floor**2

    def coarse(self, name: str) -> Tensor:
        """The part that is more than float32's: rounding, noise, and the bits of weights."""
        protocol = self.update.protocol
        weight = self.model.get_parameter(name).detach()
        leaked = self.update.values[name].to(weight.device).double()
        variance = torch.full_like(leaked, noise_of(protocol, self.update.texts) ** 2)
        if self.update.precision in _BITS:
            step = torch.exp2(torch.frexp(leaked).exponent.double() - _BITS[self.update.precision])
            variance += torch.where(leaked == 0, 0.0, step.square() / 12)
        if protocol.steps > 1:  # a difference of weights, each of which is rounded at every step
            last = torch.exp2(torch.frexp(weight).exponent.double() - 24)
            variance += protocol.steps * last.square() / 12
        return variance
