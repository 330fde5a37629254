"""An oracle behind a server that speaks the Open Inference Protocol v2, in FP64.

MLServer, Triton, KServe and OpenVINO all do. Questions travel as JSON numbers, which carry a
float64 exactly. Passing failures (no connection, 429, 502–504) are tried again a few times.
"""

from __future__ import annotations

import time
from typing import Any, cast

import httpx
import torch
from torch import Tensor

from keyhole.errors import InputError
from keyhole.oracle.protocol import OracleError, check_sequences

_PASSING = frozenset({429, 502, 503, 504})


class OpenInference:
    """The model `model` at `url`; its dimension is read from the server unless given.

    `batch` bounds the sequences in one request, `headers` may carry a token.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        dim: int | None = None,
        batch: int = 512,
        timeout: float = 60.0,
        retries: int = 4,
        headers: dict[str, str] | None = None,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise InputError(f"expected a URL such as http://localhost:8080, got {url}")
        if batch < 1:
            raise InputError(f"expected a batch of 1 or more, got {batch}")
        self.identity = f"{url.rstrip('/')}/v2/models/{model}"
        self._batch = batch
        self._retries = retries
        self._client = httpx.Client(timeout=timeout, headers=headers)
        try:
            self._input, self.dim = self._inspect(dim)
        except BaseException:
            self.close()
            raise

    def _inspect(self, dim: int | None) -> tuple[str, int]:
        name, served = _input_of(self._send("GET", self.identity), self.identity)
        if dim is not None and served is not None and dim != served:
            raise InputError(f"expected dimension {dim}, got {served} from {self.identity}")
        known = dim if dim is not None else served
        if known is None:
            raise InputError(f"expected a dimension in the metadata of {self.identity}: give dim=")
        return name, known

    def close(self) -> None:
        """Give the connections back; contextlib.closing() does it at the end of a block."""
        self._client.close()

    def __call__(self, sequences: Tensor) -> Tensor:
        check_sequences(sequences, self.dim)
        return torch.cat([self._infer(part) for part in sequences.split(self._batch)])

    def _infer(self, sequences: Tensor) -> Tensor:
        question = {
            "name": self._input,
            "shape": list(sequences.shape),
            "datatype": "FP64",
            "data": sequences.reshape(-1).tolist(),
        }
        reply = self._send("POST", f"{self.identity}/infer", {"inputs": [question]})
        try:
            answer = reply["outputs"][0]
            values = torch.tensor(answer["data"], dtype=torch.float64)
            shape = [int(size) for size in answer["shape"]]
            # Servers give a score per sequence as a column; a vector of one number is a score.
            return values.reshape(shape[:1] if shape[1:] == [1] else shape)
        except (KeyError, IndexError, TypeError, ValueError, RuntimeError) as error:
            raise OracleError(
                f"expected outputs with shape and data, got {reply!r:.120}"
            ) from error

    def _send(self, verb: str, url: str, content: dict[str, Any] | None = None) -> dict[str, Any]:
        trouble = ""
        for attempt in range(self._retries + 1):
            if attempt:
                time.sleep(min(0.25 * 2**attempt, 8.0))
            try:
                reply = self._client.request(verb, url, json=content)
            except httpx.TransportError as error:
                trouble = f"{type(error).__name__}: {error}"
                continue
            if reply.status_code in _PASSING:
                trouble = f"status {reply.status_code}"
                continue
            if not reply.is_success:
                text = " ".join(reply.text.split())[:200]
                raise OracleError(f"expected an answer from {url}, got {reply.status_code}: {text}")
            return _object(reply, url)
        raise OracleError(f"expected an answer from {url}, got {trouble}")


def _object(reply: httpx.Response, url: str) -> dict[str, Any]:
    try:
        data = reply.json()
    except ValueError as error:
        raise OracleError(f"expected JSON from {url}, got {reply.text!r:.80}") from error
    if not isinstance(data, dict):
        raise OracleError(f"expected a JSON object from {url}, got {type(data).__name__}")
    return cast("dict[str, Any]", data)


def _input_of(metadata: dict[str, Any], url: str) -> tuple[str, int | None]:
    """The name of the model's input and its last dimension, where the server tells."""
    inputs = metadata.get("inputs") or [{}]
    try:
        name = str(inputs[0].get("name", "sequences"))
        shape = [int(size) for size in inputs[0].get("shape", [])]
    except (AttributeError, TypeError, ValueError, KeyError, IndexError) as error:
        raise OracleError(
            f"expected the metadata of a model from {url}, got {inputs!r:.80}"
        ) from error
    return name, shape[-1] if shape and shape[-1] > 0 else None
