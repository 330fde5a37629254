"""An oracle behind a server that speaks the Open Inference Protocol v2, in FP64.

MLServer, Triton, KServe and OpenVINO all do. Questions travel as JSON numbers, which carry a
float64 exactly. Passing failures (no connection, 429, 502–504) are tried again a few times.

The server is not trusted: what it may cost is bounded by `Limits` (60 s and 64 MiB a request,
dimensions to 16,384), and an answer that does not fit the question is refused in one line.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, cast
from urllib.parse import unquote

import torch
from torch import Tensor

from keyhole.errors import InputError
from keyhole.oracle.http import Http, Limits, shown
from keyhole.oracle.protocol import OracleError, check_sequences

_LONGEST_NAME = 1000
_DIGITS = 25  # bytes that a float64 takes in JSON, at most


class OpenInference:
    """The model `model` at `url`; its dimension is read from the server unless given.

    `batch` bounds the sequences in one request, `headers` may carry a token. `limits` bounds what
    the server may cost; `timeout` is its `seconds`, the time of a whole request with its retries.
    A `dim` that is given may exceed `limits.dim`.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        dim: int | None = None,
        batch: int = 512,
        timeout: float | None = None,
        retries: int = 4,
        headers: dict[str, str] | None = None,
        limits: Limits | None = None,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise InputError(f"expected a URL such as http://localhost:8080, got {url}")
        if batch < 1:
            raise InputError(f"expected a batch of 1 or more, got {batch}")
        if retries < 0:
            raise InputError(f"expected 0 retries or more, got {retries}")
        limits = limits or Limits()
        if timeout is not None:
            limits = replace(limits, seconds=timeout)
        self.identity = f"{url.rstrip('/')}/v2/models/{model}"
        self._name = unquote(model.partition("/")[0])  # what follows may be a version
        self._batch = batch
        self._http = Http(self.identity, limits, retries=retries, headers=headers)
        try:
            self._input, self.dim = self._inspect(dim)
        except BaseException:
            self.close()
            raise

    def _inspect(self, dim: int | None) -> tuple[str, int]:
        metadata = self._http.request("GET", self.identity)
        self._expect_model(metadata.get("name"))
        name, served = _input_of(metadata, self.identity)
        if dim is not None and served is not None and dim != served:
            raise InputError(f"expected dimension {dim}, got {shown(served)} from {self.identity}")
        known = dim if dim is not None else served
        if known is None:
            raise InputError(f"expected a dimension in the metadata of {self.identity}: give dim=")
        if dim is None and known > self._http.limits.dim:
            raise OracleError(
                f"expected a dimension of at most {self._http.limits.dim:,} from {self.identity}, "
                f"got {shown(known)}: give dim= or raise Limits(dim=)"
            )
        return name, known

    def _expect_model(self, name: object) -> None:
        if name is not None and name != self._name:
            raise OracleError(
                f"expected model {self._name} from {self.identity}, got {_described(name)}"
            )

    def close(self) -> None:
        """Give the connections back; contextlib.closing() does it at the end of a block."""
        self._http.close()

    def __call__(self, sequences: Tensor) -> Tensor:
        check_sequences(sequences, self.dim)
        parts: list[Tensor] = []
        for questions in sequences.split(self._rows(sequences)):
            try:
                answers = self._infer(questions)
                if parts and answers.shape[1:] != parts[0].shape[1:]:
                    raise self._unfit(list(answers.shape), questions)
            except OracleError as error:  # what was answered before is paid for
                if parts:
                    error.answers = torch.cat(parts)
                raise
            parts.append(answers)
        answers = torch.cat(parts)
        bad = int((~torch.isfinite(answers)).reshape(len(answers), -1).any(1).sum())
        if bad:
            raise OracleError(
                f"expected finite answers from {self.identity}, got NaN or infinity in {bad} of "
                f"{len(answers)}",
                answers,
            )
        return answers

    def _rows(self, sequences: Tensor) -> int:
        """Sequences per request, so that answers twice as wide as the questions are allowed."""
        limits = self._http.limits
        numbers = min(limits.body // _DIGITS, limits.parts) // 2
        _, length, dim = sequences.shape
        return max(1, min(self._batch, numbers // (length * dim)))

    def _infer(self, sequences: Tensor) -> Tensor:
        question = {
            "name": self._input,
            "shape": list(sequences.shape),
            "datatype": "FP64",
            "data": sequences.reshape(-1).tolist(),
        }
        reply = self._http.request("POST", f"{self.identity}/infer", {"inputs": [question]})
        self._expect_model(reply.get("model_name"))
        output = _first(reply.get("outputs"))
        if output is None or "shape" not in output or "data" not in output:
            raise OracleError(
                f"expected outputs with shape and data from {self.identity}, got "
                f"{_described(reply if output is None else output)}"
            )
        shape = self._shape_of(output["shape"], sequences)
        values = _numbers(output["data"], math.prod(shape))
        if values is None:
            raise OracleError(
                f"expected {math.prod(shape):,} numbers for shape {shape} from {self.identity}, "
                f"got {_described(output['data'])}"
            )
        # Servers give a score per sequence as a column; a vector of one number is a score.
        return values.reshape(shape[:1] if shape[1:] == [1] else shape)

    def _shape_of(self, shape: object, sequences: Tensor) -> list[int]:
        """The shape of the answers, if an oracle may answer so; see protocol.py."""
        sizes = _sizes(shape)
        count, length, _ = sequences.shape
        if (
            sizes is None
            or len(sizes) not in (1, 2, 3)
            or sizes[0] != count
            or (len(sizes) == 3 and sizes[1] != length)
            or min(sizes[1:], default=1) < 1
        ):
            raise self._unfit(shape, sequences)
        widest = max(self._http.limits.dim, self.dim)
        if len(sizes) > 1 and sizes[-1] > widest:
            raise OracleError(
                f"expected answers at most {widest:,} wide from {self.identity}, "
                f"got {shown(sizes[-1])}: raise Limits(dim=)"
            )
        return sizes

    def _unfit(self, shape: object, sequences: Tensor) -> OracleError:
        count, length, _ = sequences.shape
        return OracleError(
            f"expected answers of one shape, ({count}), ({count}, m) or ({count}, {length}, m), "
            f"from {self.identity}, got {_described(shape)}"
        )


def _input_of(metadata: dict[str, Any], url: str) -> tuple[str, int | None]:
    """The name of the model's input and its last dimension, where the server tells."""
    inputs = metadata.get("inputs") or [{}]
    tensor = _first(inputs)
    if tensor is None:
        raise OracleError(f"expected a list of inputs from {url}, got {_described(inputs)}")
    name, shape = tensor.get("name", "sequences"), tensor.get("shape", [])
    if not isinstance(name, str) or not name.isprintable() or len(name) > _LONGEST_NAME:
        raise OracleError(f"expected the name of an input from {url}, got {_described(name)}")
    sizes = _sizes(shape)
    if sizes is None:
        raise OracleError(f"expected the shape of an input from {url}, got {_described(shape)}")
    return name, sizes[-1] if sizes and sizes[-1] > 0 else None


def _first(items: object) -> dict[str, Any] | None:
    """The first of a list of objects."""
    if not isinstance(items, list) or not items:
        return None
    item = cast("list[object]", items)[0]
    return cast("dict[str, Any]", item) if isinstance(item, dict) else None


def _sizes(shape: object) -> list[int] | None:
    if not isinstance(shape, list):
        return None
    sizes = cast("list[object]", shape)
    whole = [size for size in sizes if isinstance(size, int) and not isinstance(size, bool)]
    return whole if len(whole) == len(sizes) and min(whole, default=0) >= -1 else None


def _numbers(data: object, count: int) -> Tensor | None:
    """The numbers of a list, flat or nested, if there are `count`."""
    if not isinstance(data, list):
        return None
    items = cast("list[object]", data)
    if len(items) != count and not (items and isinstance(items[0], list)):
        return None
    try:
        values = torch.tensor(items, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None
    return values.reshape(-1) if values.numel() == count else None


def _described(value: object) -> str:
    """What stands in a server's answer, in a few words however large or deep it is."""
    if isinstance(value, dict):
        keys = list(cast("dict[str, Any]", value))
        return f"an object with {shown(', '.join(keys[:5])) or 'no keys'}"
    if isinstance(value, list):
        items = cast("list[object]", value)
        short = len(items) <= 5 and all(isinstance(item, int | float) for item in items)
        return shown(items) if short else f"a list of {len(items):,}"
    return shown(repr(value[:80] if isinstance(value, str) else value))
