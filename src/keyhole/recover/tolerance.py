"""Does a tried token explain what leaked at its position? A test against the leak's own error.

Behind the true prefix, the right token leaves exactly the leak's error: what rounding and noise put
there, nothing of it grows from position to position. With `u_j` the standard deviation of that
error for each number, `q = mean_j (difference_j / u_j)²` is near 1 for the right token and larger
for any other, by the squared distance of the two tokens' rows. A token is accepted when
`q ≤ 1 + 6 √(2/f)`, six deviations of a chi-square over `f` numbers.

`u² = rounding² + noise² + (κ s)²`: the rounding that is stated or visible in the numbers, the noise
that is stated or learnt, and a share `κ` of each number's spread `s` over tokens for arithmetic in
another order or on another machine. Where nothing is accepted, the best of the tried tokens tells
what the error would have to be (the same for all numbers, or in proportion to their spread,
whichever is likelier); it is believed if random tokens would do much worse, and kept for what
follows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from keyhole.recover.leaks import Leak
from keyhole.recover.precision import precision_of

_ARITHMETIC = 1e-4
_DEVIATIONS = 6.0
_BELIEVED = 1.5  # how much worse random tokens must do before an unknown error is believed


@dataclass(frozen=True, eq=False)
class Tolerance:
    """The error expected in each number of a leak's rows: `rounding` (n, f), `noise`, `share`."""

    rounding: Tensor
    noise: float
    share: float = _ARITHMETIC

    @classmethod
    def of(cls, leak: Leak, start: int) -> Tolerance:
        """What the leak says about itself, from position `start` on."""
        sigma = precision_of(replace(leak, noise=0.0)).sigma[start:]
        if leak.kind == "kv":
            # Undoing the rotation mixes the errors of two numbers: the row's own mean is right.
            sigma = sigma.square().nanmean(-1, keepdim=True).sqrt().expand_as(sigma)
        return cls(sigma.nan_to_num(0.0), float(leak.noise or 0.0))

    @property
    def error(self) -> float:
        """The typical error of one number, for the ordering."""
        return float((self.rounding.square().mean(-1).median() + self.noise**2).sqrt())

    def misfit(self, position: int, differences: Tensor, spread: Tensor) -> Tensor:
        """`q` of differences (k, f) between what tokens gave and what leaked at a position."""
        unit = self.rounding[position].square() + self.noise**2 + (self.share * spread).square()
        return (differences.square() / unit).nanmean(-1)

    def limit(self, numbers: int) -> float:
        return 1 + _DEVIATIONS * (2 / numbers) ** 0.5

    def learnt(self, differences: Tensor, spread: Tensor) -> Learnt | None:
        """The best of the tried `differences` (k, f), if random tokens would do much worse."""
        explanations: list[Learnt] = []
        for unit, name in ((torch.ones_like(spread), "noise"), (spread, "share")):
            q = (differences / unit).square().nanmean(-1)
            usual = float(2 * (spread / unit).square().mean())  # of two tokens in one context
            best = int(q.argmin())
            size = float(q[best].sqrt())
            if not usual >= _BELIEVED * size**2:
                continue
            # Of the two explanations the likelier one: Gaussian errors of size · unit.
            surprise = float((unit * size).log().mean())
            better = replace(self, **{name: 1.1 * max(size, getattr(self, name))})
            explanations.append(Learnt(best, surprise, better))
        return min(explanations, key=lambda learnt: learnt.surprise, default=None)


@dataclass(frozen=True, eq=False)
class Learnt:
    """An error that would make the tried token number `best` right."""

    best: int
    surprise: float
    tolerance: Tolerance
