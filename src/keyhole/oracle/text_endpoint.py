"""An endpoint of the Open Inference Protocol that takes texts or token ids.

An attacker cannot send vectors of their choice to it, so it is not an oracle (protocol.py). All
they get is its answers to texts: `ask` returns every output unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from keyhole.core.endpoint import EndpointOptions
from keyhole.core.errors import InputError
from keyhole.oracle.open_inference import (
    IDS,
    TEXTS,
    ServedModel,
    TensorSpec,
    as_numbers,
    as_sizes,
    as_strings,
    describe,
    find_tensor,
    tensor_specs,
)
from keyhole.oracle.protocol import OracleError

_NOT_TOKENS = ("type", "position", "segment")  # in the names of integer inputs other than token ids


@dataclass(frozen=True, eq=False)
class Output:
    """One output for one text: numbers, in a shape without the batch, or strings."""

    name: str
    datatype: str
    values: Tensor | None
    labels: tuple[str, ...] = ()


class TextEndpoint:
    """The model `model` at `url`, which takes texts or token ids."""

    def __init__(self, url: str, model: str, options: EndpointOptions | None = None) -> None:
        self._options = options or EndpointOptions()
        self._model = ServedModel(url, model, self._options)
        self.identity = self._model.url
        try:
            self.inputs = tensor_specs(self._model.metadata(), "inputs", self.identity)
            self.input = self._choose_input()
            self._model.http.expect_ready(f"{self.identity}/ready")
        except BaseException:
            self.close()
            raise

    def _choose_input(self) -> TensorSpec:
        """The input that the options name, or the first that takes texts or token ids."""
        if self._options.input is not None:
            return find_tensor(self.inputs, self._options.input, self.identity)
        for tensor in self.inputs:
            other = tensor.is_mask or any(word in tensor.name.lower() for word in _NOT_TOKENS)
            if tensor.datatype in (*TEXTS, *IDS) and not other:
                return tensor
        raise InputError(f"{self.identity} has no input of texts or tokens")

    @property
    def takes_texts(self) -> bool:
        return self.input.datatype in TEXTS

    @property
    def length(self) -> int | None:
        """The only number of tokens that it takes; None where any number will do."""
        sizes = self.input.shape
        return sizes[-1] if not self.takes_texts and len(sizes) == 2 and sizes[-1] > 0 else None

    def close(self) -> None:
        self._model.http.close()

    def ask(self, text: str | Sequence[int]) -> list[Output]:
        """Every output for one text, given as a string or as token ids."""
        inputs = [self._text(text)] if isinstance(text, str) else self._tokens(text)
        return self._model.infer(inputs, lambda outputs: [self._output(item) for item in outputs])

    def _text(self, text: str) -> dict[str, Any]:
        shape = [1] * max(1, len(self.input.shape))
        return {"name": self.input.name, "shape": shape, "datatype": "BYTES", "data": [text]}

    def _tokens(self, ids: Sequence[int]) -> list[dict[str, Any]]:
        """The ids and the inputs that go with them: attention masks, positions, token types.

        Where the length is fixed, the ids are padded with zeros that the mask leaves out.
        """
        length = self.length or len(ids)
        if len(ids) > length:
            raise InputError(f"{self.identity} takes at most {length} tokens, not {len(ids)}")
        padded = torch.zeros(1, length, dtype=torch.int64)
        padded[0, : len(ids)] = torch.tensor(ids)
        positions = torch.arange(length).unsqueeze(0)
        mask = (positions < len(ids)).long()
        inputs = [self.input.as_input(padded)]
        for tensor in self.inputs:
            if tensor.is_mask:
                inputs.append(tensor.as_input(mask))
            elif tensor != self.input and tensor.datatype in IDS:
                is_position = "position" in tensor.name.lower()
                values = positions if is_position else torch.zeros_like(padded)
                inputs.append(tensor.as_input(values))
        return inputs

    def _output(self, output: dict[str, Any]) -> Output:
        name, datatype = str(output.get("name", "")), str(output.get("datatype", ""))
        sizes = as_sizes(output.get("shape"))
        if sizes is None or min(sizes, default=1) < 0 or not sizes or sizes[0] != 1:
            raise OracleError(
                f"expected one answer for one text from {self.identity}, got the shape "
                f"{describe(output.get('shape'))}"
            )
        count = math.prod(sizes)
        labels = as_strings(output.get("data"), count)
        if datatype in TEXTS and labels is not None:
            return Output(name, datatype, None, tuple(labels))
        values = as_numbers(output.get("data"), count)
        if values is None:
            raise OracleError(
                f"expected {count:,} numbers for shape {sizes} from {self.identity}, got "
                f"{describe(output.get('data'))}"
            )
        # A column of one number is a number.
        return Output(name, datatype, values.reshape([] if sizes[1:] == [1] else sizes[1:]))
