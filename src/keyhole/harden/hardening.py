"""What hardening a model gave: the settings, each seed's training, the figures before and after.

It is the card (hardening.json) that stands beside the trained model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from torch import Tensor

from keyhole.core import Result, environment
from keyhole.harden.evaluate import Evaluation
from keyhole.harden.train import Training


@dataclass(frozen=True)
class Trained:
    """One seed: the folder of its model inside the output, what training cost, what it withstands.

    `after` is None where it was not measured, or not yet.
    """

    seed: int
    folder: str
    training: Training
    after: Evaluation | None = None

    def to_dict(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "folder": self.folder,
            "training": self.training.to_dict(),
            "after": _written(self.after),
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Trained:
        training = Training.from_dict(data["training"])
        return cls(data["seed"], data["folder"], training, _read(data["after"]))


@dataclass(frozen=True, repr=False)
class Hardening(Result):
    """`identity` is the model's before training, `before` what it withstood then.

    The card is written as it grows; `finished` says that it grows no more.
    """

    model: str
    method: str
    defence: str
    data: str
    examples: int
    settings: dict[str, Any]
    device: str
    seed: int = 0
    identity: str = ""
    before: Evaluation | None = None
    runs: tuple[Trained, ...] = ()
    finished: bool = False
    environment: dict[str, str] = field(default_factory=environment)

    kind: ClassVar[str] = "hardening"

    @property
    def after(self) -> tuple[Evaluation, ...]:
        """What was measured of each seed's model."""
        return tuple(trained.after for trained in self.runs if trained.after is not None)

    def evaluations(self) -> dict[str, Evaluation]:
        """What was measured, by what people call the models."""
        before = {} if self.before is None else {"the model before training": self.before}
        several = len(self.runs) > 1
        return before | {
            f"the model after training{f' {trained.folder}' if several else ''}": trained.after
            for trained in self.runs
            if trained.after is not None
        }

    def summary(self) -> str:
        lines = [f"{self.model}: {self.method}, {self.examples} examples"]
        several = len(self.runs) > 1
        lines += [
            f"{f'seed {trained.seed}: ' if several else ''}{trained.training.summary()}"
            for trained in self.runs
        ]
        lines += [
            f"{name}: {evaluation.summary()}" for name, evaluation in self.evaluations().items()
        ]
        return "\n".join(lines)

    def contents(self) -> dict[str, Any]:
        return {
            **{name: getattr(self, name) for name in _PLAIN},
            **self.settings,
            "finished": self.finished,
            "before": _written(self.before),
            "runs": [trained.to_dict() for trained in self.runs],
        }

    @classmethod
    def restore(cls, data: dict[str, Any], tensors: Mapping[str, Tensor]) -> Self:
        del tensors
        return cls(
            **{name: data[name] for name in _PLAIN},
            # Weights were not always averaged.
            settings={"average": 0.0, **{name: data[name] for name in _SETTINGS if name in data}},
            before=_read(data["before"]),
            runs=tuple(Trained.from_dict(trained) for trained in data["runs"]),
            finished=data.get("finished", True),  # cards did not always say so
        )


_PLAIN = ("model", "method", "defence", "data", "examples", "device", "seed", "identity",
          "environment")  # fmt: skip
_SETTINGS = ("epochs", "rate", "batch", "longest", "amp", "average")


def _written(evaluation: Evaluation | None) -> dict[str, Any] | None:
    return None if evaluation is None else evaluation.to_dict()


def _read(data: dict[str, Any] | None) -> Evaluation | None:
    return None if data is None else Evaluation.from_dict(data)
