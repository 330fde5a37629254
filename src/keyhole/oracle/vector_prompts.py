"""Servers that take vectors in the place of a prompt's tokens: an oracle that is asked by them.

    vLLM     POST /v1/completions   prompt_embeds: a tensor (n, d) of torch.save, in base64
    SGLang   POST /generate         input_embeds: n lists of d numbers

Both as documented, not tried on the servers themselves. The answer to a sequence is the
log-probabilities of the `best` likeliest next tokens, the likeliest first: a function of the
vectors alone, whatever a server calls its tokens.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from keyhole.core.endpoint import EndpointOptions
from keyhole.core.errors import InputError
from keyhole.oracle.probe import Server, server_http
from keyhole.oracle.protocol import OracleError, check_sequences

BEST = 5  # the most that OpenAI's form gives


@dataclass(frozen=True)
class Form:
    """How a server takes vectors, how its answer is read, and what closes the route."""

    path: str
    remedy: str
    request: Callable[[Tensor, str, int], dict[str, Any]]
    read: Callable[[Any], list[float]]

    def name(self, server: str) -> str:
        return f"POST {self.path} of {server}"


def _vllm(rows: Tensor, model: str, best: int) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(rows.float(), file)
    vectors = base64.b64encode(file.getvalue()).decode()
    return {"model": model, "prompt_embeds": vectors, "max_tokens": 1, "logprobs": best,
            "temperature": 0}  # fmt: skip


def _sglang(rows: Tensor, model: str, best: int) -> dict[str, Any]:
    del model
    return {"input_embeds": rows.float().tolist(), "return_logprob": True, "top_logprobs_num": best,
            "sampling_params": {"max_new_tokens": 1, "temperature": 0}}  # fmt: skip


FORMS: Mapping[str, Form] = {
    "vLLM": Form(
        "/v1/completions", "Start it without --enable-prompt-embeds; --api-key.", _vllm,
        lambda answer: list(answer["choices"][0]["logprobs"]["top_logprobs"][0].values()),
    ),
    "SGLang": Form(
        "/generate", "--api-key, and a proxy in front that takes input_embeds out of requests.",
        _sglang, lambda answer: [e[0] for e in answer["meta_info"]["output_top_logprobs"][0]],
    ),
}  # fmt: skip


class VectorPrompts:
    """The best log-probabilities that follow a sequence of vectors (n, d), d given as `dim`."""

    may_change = True  # another model may stand behind the same address tomorrow
    precision = 2.0**-9  # servers compute in bfloat16

    def __init__(
        self, server: Server, dim: int, best: int = BEST, options: EndpointOptions | None = None,
        *, key: bool = True,
    ) -> None:  # fmt: skip
        if server.kind not in FORMS:
            known = " or ".join(FORMS)
            raise InputError(f"expected a server of {known}, got {server.kind or 'another'}")
        self.server, self.dim, self.best = server, dim, best
        self.form = FORMS[server.kind]
        address = (server.address if key else "") or server.url
        self._http = server_http(address, options or server.options, key=key)

    @property
    def identity(self) -> str:
        return f"{self.server.url}{self.form.path} {self.server.model}, by vectors"

    def close(self) -> None:
        self._http.close()

    def __call__(self, sequences: Tensor) -> Tensor:
        check_sequences(sequences, self.dim)
        return torch.stack([self._answer(rows) for rows in sequences])

    def _answer(self, rows: Tensor) -> Tensor:
        url = f"{self.server.url}{self.form.path}"
        answer: Any = self._http.ask(
            "POST", url, self.form.request(rows, self.server.model, self.best)
        )
        try:
            values = sorted((float(value) for value in self.form.read(answer)), reverse=True)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError):
            values = []
        if len(values) < self.best:
            raise OracleError(
                f"expected {self.best} log-probabilities from {url}, got {len(values)}"
            )
        return torch.tensor(values[: self.best], dtype=torch.float64)
