"""What every inversion returns: one type, judged, saved and shown like all results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from keyhole.core import Status, environment
from keyhole.core.result import Result, restored
from keyhole.invert.krawczyk import Certificate

_ADVICE = {
    Status.RECOVERED: "Do not hand this output to people who may not see the input.",
    Status.INEXACT: "Nearly an input: more steps, or the output is not as exact as stated.",
    Status.UNSOLVED: "Try more starts or another seed; the output may also be rounded or foreign.",
    Status.INTERRUPTED: "X is the best so far: run again with more time, or start from it.",
    Status.MISMATCH: "The output is not one of this layer's: check the weights, biases and layer.",
    Status.NOT_IDENTIFIABLE: "A family of inputs has this output; known tokens would narrow it.",
    Status.NOT_APPLICABLE: "Correct the problem, or use a method that takes it.",
}


@dataclass(frozen=True, eq=False, repr=False)
class Inversion(Result):
    """An input with the given output, or how far the search came.

    `residual` is the judge's: the largest entry of `attention(X) − B`, relative to the numbers
    that it is made of. `solutions` are all different exact inputs that were found, `X` the one of
    least norm (what the paper's regulariser prefers as γ → 0): the output alone cannot tell which
    of them was put in. `condition` is that of the equations at X: an error ε in B may be one of
    condition·ε in X. `trace` holds (iteration, residual norm) of the start that led to X.
    `certificate` is the proof about X, where one was asked for.
    """

    status: Status
    reason: str
    method: str = ""
    X: Tensor | None = None
    residual: float | None = None
    iterations: int = 0
    seconds: float = 0.0
    starts: int = 0
    solutions: tuple[Tensor, ...] = ()
    condition: float | None = None
    trace: tuple[tuple[int, float], ...] = ()
    certificate: Certificate | None = None
    environment: dict[str, str] = field(default_factory=environment)

    kind: ClassVar[str] = "inversion"
    tensors_key: ClassVar[str] = "inputs"

    @property
    def solved(self) -> bool:
        return self.status is Status.RECOVERED

    @property
    def advice(self) -> str:
        return _ADVICE.get(self.status, self.status.advice)

    def summary(self) -> str:
        lines = [
            f"{self.status}: {self.reason}",
            f"{self.starts:,} starts, {self.iterations:,} iterations, {self.seconds:.2f} s",
        ]
        if self.condition is not None:
            lines.append(f"condition {self.condition:.1e}: errors in the output grow by that much")
        if self.certificate is not None:
            lines.append(self.certificate.summary())
        return "\n".join([*lines, self.advice])

    def contents(self) -> dict[str, Any]:
        data = asdict(replace(self, X=None, solutions=(), certificate=None))
        del data["X"]
        proof = None if self.certificate is None else self.certificate.to_dict()
        more = {"solutions": len(self.solutions), "certificate": proof, "advice": self.advice}
        return {**data, **more}

    def tensors(self) -> dict[str, Tensor]:
        if self.X is None:
            return {}
        found = {"solutions": torch.stack(list(self.solutions))} if self.solutions else {}
        return {"X": self.X, **found}

    @classmethod
    def restore(cls, data: dict[str, Any], tensors: Mapping[str, Tensor]) -> Self:
        proof = data["certificate"]
        return restored(
            cls, data, more=True, X=tensors.get("X"), solutions=tuple(tensors.get("solutions", ())),
            certificate=None if proof is None else Certificate.from_dict(proof),
        )  # fmt: skip
