"""An oracle for servers that take vectors in place of the tokens of a prompt.

    vLLM     POST /v1/completions   prompt_embeds: a tensor (n, d) of torch.save, in base64
    SGLang   POST /generate         input_embeds: n lists of d numbers

The answer to a sequence is the log-probabilities of the BEST likeliest next tokens, in
descending order. It depends on the vectors alone, and not on how the server numbers its
tokens.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from keyhole.core.errors import InputError
from keyhole.oracle.probe import WRONG_FORM, Server
from keyhole.oracle.protocol import OracleError, check_sequences

BEST = 5  # the largest number that OpenAI's form allows


@dataclass(frozen=True)
class Form:
    """The request by which a server takes vectors, and the remedy that closes the route."""

    path: str
    remedy: str
    request: Callable[[Tensor, str], dict[str, Any]]
    read: Callable[[Any], list[float]]

    def name(self, server: str) -> str:
        return f"POST {self.path} of {server}"


def _vllm(rows: Tensor, model: str) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(rows.float(), file)
    vectors = base64.b64encode(file.getvalue()).decode()
    return {
        "model": model,
        "prompt_embeds": vectors,
        "max_tokens": 1,
        "logprobs": BEST,
        "temperature": 0,
        "return_tokens_as_token_ids": True,
    }


def _sglang(rows: Tensor, _model: str) -> dict[str, Any]:
    return {
        "input_embeds": rows.float().tolist(),
        "return_logprob": True,
        "top_logprobs_num": BEST,
        "sampling_params": {"max_new_tokens": 1, "temperature": 0},
    }


FORMS: Mapping[str, Form] = {
    "vLLM": Form(
        "/v1/completions",
        "Start it without --enable-prompt-embeds, or require a key with --api-key.",
        _vllm,
        lambda answer: list(
            answer["choices"][0]["logprobs"]["top_logprobs"][0].values()
        ),
    ),
    "SGLang": Form(
        "/generate",
        "Require a key with --api-key, and put a proxy in front that takes input_embeds out of "
        "requests.",
        _sglang,
        lambda answer: [e[0] for e in answer["meta_info"]["output_top_logprobs"][0]],
    ),
}


class VectorPrompts:
    """The BEST largest log-probabilities after a sequence of vectors (n, d), with d = `dim`.

    The key and other secrets of `server` are sent only with `key`: without it, an
    answer shows that the route is open to all.
    """

    may_change = True  # the server may load another model under the same address
    precision = 2.0**-9  # relative; servers compute in bfloat16

    def __init__(
        self,
        server: Server,
        dim: int,
        *,
        key: bool = True,
    ) -> None:
        if server.kind not in FORMS:
            known = " or ".join(FORMS)
            raise InputError(
                f"this needs a server of {known}, not {server.kind or 'another kind'}"
            )
        self.server = server
        self.dim = dim
        self.form = FORMS[server.kind]
        self._http = server.http(key=key)

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
        request = self.form.request(rows, self.server.model)
        answer: Any = self._http.ask("POST", url, request)
        try:
            values = sorted(map(float, self.form.read(answer)), reverse=True)
        except WRONG_FORM:
            values = []
        if len(values) < BEST:
            raise OracleError(
                f"{url} gave {len(values)} log-probabilities instead of {BEST}"
            )
        return torch.tensor(values[:BEST], dtype=torch.float64)
