"""Every defence of a server as it is tried, and how much of the answers it leaves.

Lengths are in units of what honest clients' tokens have. Bounds on answers are for scores of size
about 1, as those of a v with entries of size 1 are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from keyhole.extract.defended.ordinary_tokens import usual_norm_of
from keyhole.oracle.degraded import Degradation


@dataclass(frozen=True)
class Trial:
    """One defence: what it does to questions and answers, and what a client may ask.

    `budget` is a share of the unknowns d² + d, `rate` in queries a second.
    """

    name: str
    change: Degradation
    budget: float | None = None
    rate: float | None = None

    def queries(self, dim: int) -> int | None:
        """What the budget comes to."""
        return None if self.budget is None else int(self.budget * (dim * dim + dim))


def trials(dim: int, usual_norm: float | None = None, seed: int = 0) -> list[Trial]:
    """One of each kind, alone and together."""
    norm = usual_norm_of(dim) if usual_norm is None else usual_norm
    none = Degradation(seed=seed)
    bounded, usual = replace(none, max_norm=norm), replace(none, usual_norm=norm)
    return [
        Trial("no defence", none),
        Trial("rounding", replace(none, decimals=2)),
        Trial("rounding, norms clipped", replace(bounded, decimals=2)),
        Trial("noise, the same for a question, norms clipped", replace(bounded, noise=0.01)),
        Trial("noise, anew each time, norms clipped", replace(bounded, fresh_noise=0.01)),
        Trial("label only", replace(none, sign_only=True)),
        Trial("norms clipped", bounded),
        Trial("short sequences refused", replace(none, min_tokens=3)),
        Trial("unusual inputs refused", usual),
        Trial("short and unusual inputs refused", replace(usual, min_tokens=3)),
        Trial(
            "short and unusual inputs refused, rounding", replace(usual, min_tokens=3, decimals=2)
        ),
        Trial(
            "short and unusual inputs refused, label only",
            replace(usual, min_tokens=3, sign_only=True),
        ),
        Trial("a budget of half the unknowns", none, budget=0.5),
        Trial("one query a second", none, rate=1.0),
    ]


def graded(dim: int, usual_norm: float | None = None, seed: int = 0) -> list[Trial]:
    """The defences that come in degrees, from little to much."""
    norm = usual_norm_of(dim) if usual_norm is None else usual_norm
    none = Degradation(seed=seed)
    bounded = replace(none, max_norm=2 * norm)  # so long that honest tokens are left as they are
    usual = replace(none, usual_norm=norm, min_tokens=3)
    return [
        *(Trial("rounding", replace(bounded, decimals=k)) for k in (4, 3, 2, 1, 0)),
        *(Trial("noise, the same for a question", replace(bounded, noise=tau)) for tau in _NOISE),
        *(Trial("noise, anew each time", replace(bounded, fresh_noise=tau)) for tau in _NOISE),
        *(Trial("norms clipped", replace(none, max_norm=norm * part)) for part in _PARTS),
        *(
            Trial("short and unusual inputs refused, rounding", replace(usual, decimals=k))
            for k in (4, 3, 2, 1)
        ),
        *(Trial("a budget", none, budget=share) for share in (0.25, 0.5, 0.75, 0.95)),
    ]


_NOISE = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
_PARTS = (1.2, 1.0, 0.5, 0.1)
