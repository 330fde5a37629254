"""The result of an inversion: an input that the judge has checked, or why there is none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from keyhole.core import Status, environment
from keyhole.core.result import FORMAT, Result
from keyhole.invert.krawczyk import Certificate

_ADVICE = {
    Status.RECOVERED: "Do not hand this output to people who may not see the input.",
    Status.INEXACT: "Nearly an input: more steps, or the output is not as exact as stated.",
    Status.UNSOLVED: "Try more starts or another seed; B may be rounded, or of another layer.",
    Status.INTERRUPTED: "X is the best so far: run again with more time, or start from it.",
    Status.MISMATCH: "The output is not one of this layer's: check the weights, biases and layer.",
    Status.NOT_IDENTIFIABLE: "A family of inputs has this output; known tokens would narrow it.",
    Status.NOT_APPLICABLE: "Correct the problem, or use a method that takes it.",
}


@dataclass(frozen=True, eq=False, repr=False)
class Inversion(Result):
    """An input with the given output, or the best input that the search reached.

    `residual` is the judge's: the largest entry of `attention(X) − B`, relative to the
    terms that it is the sum of. `solutions` are all the different exact inputs that
    were found. The output does not determine which of them the layer received. `X` is
    the solution of least norm, which the paper's regulariser prefers as γ → 0.
    `condition` is the condition number of the equations at X: an error ε in B may
    become condition·ε in X. `trace` holds (iteration, residual norm) for the start that
    led to X. `certificate` is the proof about X, if one was requested.
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
            lines.append(
                f"condition {self.condition:.1e}: errors in the output grow by that much"
            )
        if self.certificate is not None:
            lines.append(self.certificate.summary())
        return "\n".join([*lines, self.advice])

    def contents(self) -> dict[str, Any]:
        data = asdict(replace(self, X=None, solutions=(), certificate=None))
        del data["X"]
        proof = None
        if self.certificate is not None:
            proof = {"format": FORMAT, **self.certificate.contents()}
        more = {
            "solutions": len(self.solutions),
            "certificate": proof,
            "advice": self.advice,
        }
        return {**data, **more}

    def tensors(self) -> dict[str, Tensor]:
        if self.X is None:
            return {}
        if self.solutions:
            found = {"solutions": torch.stack(list(self.solutions))}
        else:
            found = {}
        return {"X": self.X, **found}

    @classmethod
    def restore(cls, data: dict[str, Any], tensors: Mapping[str, Tensor]) -> Self:
        bare = super().restore({**data, "X": None, "solutions": []}, tensors)
        solutions = tuple(tensors.get("solutions", ()))
        return replace(bare, X=tensors.get("X"), solutions=solutions)
