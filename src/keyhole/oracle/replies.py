"""What a server's reply to a batch of sequences says: the answers, or a line that says why not."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from keyhole.oracle.bodies import Garbled, shown
from keyhole.oracle.http import as_object
from keyhole.oracle.protocol import OracleError
from keyhole.oracle.tensors import (
    FLOATS,
    TEXTS,
    described,
    numbers,
    objects,
    signs,
    sizes_of,
    words,
)


@dataclass(frozen=True)
class Replies:
    """How replies of the model `model` at `url` are read.

    `asked` is the datatype of the questions, `widest` the most numbers in a vector, `output` the
    name of the tensor that holds the answers and `positive` the label that counts as 1.
    """

    url: str
    model: str
    asked: str
    widest: int
    output: str | None = None
    positive: str | None = None

    def read(self, data: object, sequences: Tensor, number: str) -> Tensor:
        """The answers to `sequences`, asked in the request of that number."""
        reply = as_object(data, self.url)
        if reply.get("id") not in (None, "", number):
            raise Garbled(f"expected the answer to the request made to {self.url}, got another's")
        expect_model(self.model, reply.get("model_name"), self.url)
        output = self._output(reply)
        shape = self._shape(output["shape"], sequences)
        values = self._values(output, shape)
        # Servers give a score per sequence as a column; a vector of one number is a score.
        return values.reshape(shape[:1] if shape[1:] == [1] else shape)

    def _output(self, reply: dict[str, Any]) -> dict[str, Any]:
        """The output to read: the one that was asked for, or else the first of numbers."""
        outputs = objects(reply.get("outputs")) or []
        if self.output is not None:
            outputs = [item for item in outputs if item.get("name") == self.output]
        of_numbers = [item for item in outputs if item.get("datatype") in FLOATS]
        output = next(iter(of_numbers or outputs), None)
        if output is None or "shape" not in output or "data" not in output:
            raise OracleError(
                f"expected outputs with shape and data from {self.url}, got "
                f"{described(reply if output is None else output)}"
            )
        return output

    def _values(self, output: dict[str, Any], shape: list[int]) -> Tensor:
        count, data, datatype = math.prod(shape), output["data"], output.get("datatype")
        labels = words(data, count) if datatype in TEXTS and shape[1:] in ([], [1]) else None
        if labels is not None:
            return torch.tensor(signs(labels, self.positive, self.url), dtype=torch.float64)
        values = numbers(data, count)
        if values is None:
            raise OracleError(
                f"expected {count:,} numbers for shape {shape} from {self.url}, "
                f"got {described(data)}"
            )
        # Numbers of a shorter format as they are there: printed, they have fewer digits. And
        # answers are no more exact than the questions they belong to.
        formats = [FLOATS[name] for name in (self.asked, datatype) if name in FLOATS]
        coarsest = max(formats, key=lambda dtype: torch.finfo(dtype).eps)
        return values if coarsest is torch.float64 else values.to(coarsest).to(torch.float64)

    def _shape(self, shape: object, sequences: Tensor) -> list[int]:
        """The shape of the answers, if an oracle may answer so; see protocol.py."""
        sizes = sizes_of(shape)
        count, length, _ = sequences.shape
        if (
            sizes is None
            or len(sizes) not in (1, 2, 3)
            or sizes[0] != count
            or (len(sizes) == 3 and sizes[1] != length)
            or min(sizes[1:], default=1) < 1
        ):
            raise self.unfit(shape, sequences)
        if len(sizes) > 1 and sizes[-1] > self.widest:
            raise OracleError(
                f"expected answers at most {self.widest:,} wide from {self.url}, "
                f"got {shown(sizes[-1])}: raise Limits(dim=)"
            )
        return sizes

    def unfit(self, shape: object, sequences: Tensor) -> OracleError:
        count, length, _ = sequences.shape
        return OracleError(
            f"expected answers of one shape, ({count}), ({count}, m) or ({count}, {length}, m), "
            f"from {self.url}, got {described(shape)}"
        )


def expect_model(expected: str, name: object, url: str) -> None:
    if name is not None and name != expected:
        raise OracleError(f"expected model {expected} from {url}, got {described(name)}")
