"""What every inversion returns: one type, judged, with its JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from keyhole.files import write_tensors, write_text
from keyhole.results import FORMAT, Status, dump, environment

_ADVICE = {
    Status.RECOVERED: "Do not hand this output to people who may not see the input.",
    Status.INEXACT: "Nearly an input: more steps, or the output is not as exact as stated.",
    Status.UNSOLVED: "Try more starts or another seed; the output may also be rounded or foreign.",
    Status.INTERRUPTED: "X is the best so far: run again with more time, or start from it.",
    Status.MISMATCH: "The output is not one of this layer's: check the weights, biases and layer.",
    Status.NOT_IDENTIFIABLE: "A family of inputs has this output; known tokens would narrow it.",
    Status.NOT_APPLICABLE: "Mend the problem, or use a method that takes it.",
}


@dataclass(frozen=True, eq=False)
class Inversion:
    """An input with the given output, or how far the search came.

    `residual` is the judge's: the largest entry of `attention(X) − B`, relative to the numbers
    that it is made of. `solutions` are all different exact inputs that were found, `X` the one of
    least norm (what the paper's regulariser prefers as γ → 0): the output alone cannot tell which
    of them was put in. `condition` is that of the equations at X: an error ε in B may be one of
    condition·ε in X. `trace` holds (iteration, residual norm) of the start that led to X.
    """

    status: Status
    reason: str
    method: str
    X: Tensor | None
    residual: float | None
    iterations: int
    seconds: float
    starts: int = 0
    solutions: tuple[Tensor, ...] = ()
    condition: float | None = None
    trace: tuple[tuple[int, float], ...] = ()
    environment: dict[str, str] = field(default_factory=environment)

    @property
    def solved(self) -> bool:
        return self.status is Status.RECOVERED

    @property
    def advice(self) -> str:
        return _ADVICE.get(self.status, self.status.advice)

    def to_dict(self) -> dict[str, Any]:
        """Everything but the tensors."""
        data = asdict(replace(self, X=None, solutions=()))
        del data["X"]
        return {
            "format": FORMAT,
            "kind": "inversion",
            **data,
            "solutions": len(self.solutions),
            "advice": self.advice,
        }

    def save(self, path: str | Path) -> None:
        """Write `path` (JSON) and, where an input was found, the tensors beside it."""
        path = Path(path)
        data = self.to_dict()
        if self.X is not None:
            inputs = path.with_suffix(".safetensors")
            tensors = {"X": self.X}
            if self.solutions:
                tensors["solutions"] = torch.stack(self.solutions)
            write_tensors(inputs, tensors)
            data["inputs"] = inputs.name
        write_text(path, dump(data))
