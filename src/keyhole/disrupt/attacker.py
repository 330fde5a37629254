"""What every attacker on attention is, and how a result describes the one that made it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, is_dataclass
from typing import Any, Protocol

from torch import Tensor

from keyhole.data import Batch
from keyhole.disrupt.disruption import Disruption


class Attacker(Protocol):
    """A way to cut attention; a frozen dataclass of hyperparameters.

    `words` says how attention is cut; `control` is True where the cuts are chosen at random, so
    that whatever flips has nothing to do with the choice.
    """

    @property
    def words(self) -> str: ...
    @property
    def control(self) -> bool: ...
    @property
    def seed(self) -> int: ...

    def __call__(
        self, model: Any, batch: Batch, labels: Tensor | None = None, *, ids: Sequence[str] = ()
    ) -> Disruption:
        """Attack a batch; `ids` name its examples in the result, labels may be the model's own."""
        ...


def described(attacker: Attacker) -> dict[str, Any]:
    """The attacker as results hold it: its name, its words and its hyperparameters."""
    settings = asdict(attacker) if is_dataclass(attacker) else {"seed": attacker.seed}
    return {
        "attack": type(attacker).__name__,
        **settings,
        "words": attacker.words,
        "control": attacker.control,
    }
