"""An endpoint of the Open Inference Protocol that takes texts, or the numbers of their tokens.

No vectors of an attacker's choice can be asked there, so that it is no oracle (protocol.py). What
can be had is what it answers to texts: `ask` gives every output as it is.
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
    Stated,
    described,
    named,
    numbers,
    sizes_of,
    stated,
    words,
)
from keyhole.oracle.protocol import OracleError

_NO_IDS = ("type", "position", "segment")  # inputs of whole numbers that are no ids


@dataclass(frozen=True, eq=False)
class Given:
    """One output for one text: numbers in a shape without the batch, or words."""

    name: str
    datatype: str
    values: Tensor | None
    labels: tuple[str, ...] = ()


class TextEndpoint:
    """The model `model` at `url`, which takes texts or numbers of tokens."""

    def __init__(self, url: str, model: str, options: EndpointOptions | None = None) -> None:
        self._options = options or EndpointOptions()
        self._model = ServedModel(url, model, self._options)
        self.identity = self._model.url
        try:
            self.inputs = stated(self._model.metadata(), "inputs", self.identity)
            self.input = self._chosen()
            self._model.http.expect_ready(f"{self.identity}/ready")
        except BaseException:
            self.close()
            raise

    def _chosen(self) -> Stated:
        if self._options.input is not None:
            return named(self.inputs, self._options.input, self.identity)
        taking = [tensor for tensor in self.inputs if tensor.datatype in (*TEXTS, *IDS)]
        plain = [
            tensor for tensor in taking
            if not tensor.masks and not any(word in tensor.name.lower() for word in _NO_IDS)
        ]  # fmt: skip
        if not plain:
            raise InputError(f"{self.identity} has no input of texts or tokens")
        return plain[0]

    @property
    def takes_texts(self) -> bool:
        return self.input.datatype in TEXTS

    @property
    def length(self) -> int | None:
        """How many tokens it takes, where it takes so many and no others."""
        sizes = self.input.shape
        return sizes[-1] if not self.takes_texts and len(sizes) == 2 and sizes[-1] > 0 else None

    def close(self) -> None:
        self._model.http.close()

    def ask(self, text: str | Sequence[int]) -> list[Given]:
        """Every output for one text, or for the numbers of its tokens."""
        inputs = [self._text(text)] if isinstance(text, str) else self._tokens(text)
        return self._model.infer(inputs, lambda outputs: [self._given(item) for item in outputs])

    def _text(self, text: str) -> dict[str, Any]:
        shape = [1] * max(1, len(self.input.shape))
        return {"name": self.input.name, "shape": shape, "datatype": "BYTES", "data": [text]}

    def _tokens(self, ids: Sequence[int]) -> list[dict[str, Any]]:
        """The ids, filled up with zeros that a mask leaves out where the length is fixed."""
        length = self.length or len(ids)
        if len(ids) > length:
            raise InputError(f"{self.identity} takes at most {length} tokens, not {len(ids)}")
        padded = torch.zeros(1, length, dtype=torch.int64)
        padded[0, : len(ids)] = torch.tensor(ids)
        counts = (torch.arange(length) < len(ids)).long().unsqueeze(0)
        filled = [self.input.filled(padded)]
        for tensor in self.inputs:
            if tensor.masks:
                filled.append(tensor.filled(counts))
            elif tensor != self.input and tensor.datatype in IDS:
                where = torch.arange(length).unsqueeze(0)
                values = where if "position" in tensor.name.lower() else torch.zeros_like(padded)
                filled.append(tensor.filled(values))
        return filled

    def _given(self, output: dict[str, Any]) -> Given:
        name, datatype = str(output.get("name", "")), str(output.get("datatype", ""))
        sizes = sizes_of(output.get("shape"))
        if sizes is None or min(sizes, default=1) < 0 or not sizes or sizes[0] != 1:
            raise OracleError(
                f"expected one answer for one text from {self.identity}, got the shape "
                f"{described(output.get('shape'))}"
            )
        count = math.prod(sizes)
        labels = words(output.get("data"), count)
        if datatype in TEXTS and labels is not None:
            return Given(name, datatype, None, tuple(labels))
        values = numbers(output.get("data"), count)
        if values is None:
            raise OracleError(
                f"expected {count:,} numbers for shape {sizes} from {self.identity}, got "
                f"{described(output.get('data'))}"
            )
        # A column of one number is a number.
        return Given(name, datatype, values.reshape([] if sizes[1:] == [1] else sizes[1:]))
