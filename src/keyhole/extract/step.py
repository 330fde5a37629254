"""What an attack knows at some point, and how much of the whole that is."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from keyhole.extract.extraction import Statement
from keyhole.oracle.protocol import Oracle
from keyhole.oracle.storage import Planted


@dataclass(frozen=True)
class Step:
    """What an attack knows at some point: a model, and the number of unknowns it settles.

    `known` of `floor` unknowns are settled, whatever turns out later: where their number is still
    open, `floor` is the most that there can be, or None if that is open too.
    `guarantee` and `guarantee_v` bound the error of every entry of W and of v, where that can be
    proved from the answers if what `assumed` says of them holds. `confirm` tests that with other
    questions: how many answers speak against it, of how many. `numbers` is how many an answer
    holds, so that `floor / numbers` answers are the fewest that could do. `remark` is what was
    found out besides the weights; it joins the reason of a judged result. `stated` is what the
    method's theorem says in advance.
    """

    model: Planted
    known: int
    floor: int | None
    guarantee: float | None = None
    guarantee_v: float | None = None
    numbers: int = 1
    remark: str = ""
    assumed: str = ""
    confirm: Callable[[Oracle], tuple[int, int]] | None = None
    stated: Statement | None = None

    @property
    def share(self) -> float:
        """Of the unknowns, how much is settled at least."""
        return self.known / self.floor if self.floor else 0.0

    @property
    def fewest(self) -> int | None:
        """The fewest answers that could do."""
        return None if self.floor is None else math.ceil(self.floor / self.numbers)
