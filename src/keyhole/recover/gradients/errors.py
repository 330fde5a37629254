"""How exact an update is: rounding, stated noise, float32 itself, and the last bits of weights."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from keyhole.recover.gradients.client import noise_of
from keyhole.recover.gradients.update import Update

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
