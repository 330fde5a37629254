"""Log-probabilities of next tokens from a server's completions, asked for by token ids.

`Completions.at(address)` is an oracle of such answers, for attacks on a language
model's last layer.

    POST /completion       llama.cpp's own form: `n_probs` sets how many, without a cap
    POST /v1/completions   OpenAI's form, as llama.cpp and vLLM speak it: `logprobs` sets how many

A question is a sequence of rows (token, bias), as token_questions.py encodes it:
(token, 0) for each token of the prompt, and (token, b) at the end for each token that a
`logit_bias` of b raises. So if a server returns only the best k tokens, chosen ones are
brought among them:

    tokens raised   method       answer
    none            _whole       the log-probability of every token
    one             _sampled     its log-probability: a large bias makes the server sample it
    several         _raised      their log-probabilities less the biases, up to a constant
                    _greedy      0 for the one that is sampled, if the server gives no probabilities

A number that the server did not return is ABSENT. Tests with llama.cpp show that
log-probabilities are those before the bias unless `post_sampling_probs` asks for those
after it; `_raised` does, and the answer consists of exactly the raised tokens. vLLM
needs no bias: it returns the log-probabilities of any 128 tokens that
`logprob_token_ids` names, whatever its cap on `logprobs`.

The answer for a vocabulary of 50,000 tokens is 5 MB of JSON. A regular expression finds
its entries in a third of the time that a parser takes. An answer whose fields have
another order is parsed.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from contextlib import closing, suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor

from keyhole.core.endpoint import EndpointOptions, without_password
from keyhole.core.errors import InputError, expect_among
from keyhole.core.float64 import full, tensor
from keyhole.oracle.http import Http, Refused
from keyhole.oracle.probe import (
    LIMITS,
    MANY,
    SAFE,
    TOKEN_ID,
    WRONG_FORM,
    Server,
    logprobs_of,
)
from keyhole.oracle.protocol import OracleError, check_sequences
from keyhole.oracle.token_questions import ABSENT, DIM, parts_of

COMPLETION = "/completion"
OPENAI = "/v1/completions"
ROUTES = (COMPLETION, OPENAI)
_BAD_REQUEST = 400
# refusals of a number of log-probabilities, among other things
_TOO_MANY = (_BAD_REQUEST, 422)
_FORCED = 1000.0  # a bias that exceeds every logit, so that the token is sampled
# Quotes inside a token's text are escaped, so no text can look like the beginning of an
# entry.
_ENTRY = re.compile(
    rb'\{"id":(\d+),"token":"(?:[^"\\]|\\.)*","bytes":\[[\d,]*\],"logprob":(-?[\d.eE+-]+)\}'
)


class Completions:
    """The next token's log-probabilities on a server; token_questions.py encodes the questions.

    `vocabulary` is the number of tokens as the server states it, as vLLM's refusals
    show it, or as the first whole answer shows it. `width` is what llama.cpp states; no
    attack relies on it. More log-probabilities than `most` are not asked for at a time,
    since more would crash some servers.
    """

    dim = DIM
    may_change = True  # the server may load another model under the same address
    precision = 2.0**-24  # relative; servers compute in float32

    def __init__(
        self,
        url: str,
        model: str = "default",
        route: str = COMPLETION,
        vocabulary: int | None = None,
        width: int | None = None,
        options: EndpointOptions | None = None,
        most: int = MANY,
    ) -> None:
        expect_among("route", route, ROUTES)
        self.url = without_password(url.rstrip("/"))
        self.model = model
        self.route = route
        self.vocabulary = vocabulary
        self.width = width
        self.most = most
        self._whole_token: int | None = None  # if it is sampled, answers are whole
        self._http = Http(
            url.rstrip("/"), options or EndpointOptions(), limits=LIMITS, retries=1
        )

    @classmethod
    def at(cls, address: str, options: EndpointOptions | None = None) -> Completions:
        """Return the completions at an address: of a server, or of one of its two routes."""
        route = next((route for route in ROUTES[::-1] if address.endswith(route)), None)
        url = address.removesuffix(route or "").rstrip("/")
        server = Server.at(url, options)
        if server.kind == "SGLang":
            raise InputError(
                f"{server.url} is a server of SGLang, which crashes if asked for more "
                "log-probabilities than it has tokens: audit it with --model"
            )
        native = server.kind == "llama.cpp"
        route = route or (COMPLETION if native else OPENAI)
        most = MANY if native or server.kind == "vLLM" else SAFE
        with closing(server.http(key=True)) as http:
            if server.kind == "vLLM":
                vocabulary = _vocabulary(http, server)
                width = None
            else:
                vocabulary, width = _stated_sizes(http, server.url)
        return cls(url, server.model, route, vocabulary, width, server.options, most)

    @property
    def identity(self) -> str:
        return f"{self.url}{self.route} {self.model}"

    def close(self) -> None:
        self._http.close()

    def __call__(self, sequences: Tensor) -> Tensor:
        check_sequences(sequences, DIM)
        return torch.stack([self._answer(rows) for rows in sequences])

    def _answer(self, rows: Tensor) -> Tensor:
        prompt, raised, biases = parts_of(rows)
        if not len(raised):
            return self._whole(prompt.tolist())
        pairs = list(zip(raised.tolist(), biases.tolist(), strict=True))
        if len(pairs) == 1:
            return self._sampled(prompt.tolist(), pairs[0][0])
        return self._raised(prompt.tolist(), pairs)

    def _whole(self, prompt: list[int]) -> Tensor:
        """Return the log-probability of every token; ABSENT for all if llama.cpp returns none.

        It returns none if the token that it samples is part of a character or ends the
        text. So a bias makes it sample a token that worked before, which does not
        change log-probabilities.
        """
        request = {**self._request(prompt, self.most), "temperature": 0}
        if self.route == COMPLETION and self._whole_token is not None:
            request |= self._bias([(self._whole_token, _FORCED)])
        try:
            ids, values = _entries(self._ask(request))
        except Refused as error:
            if error.status not in _TOO_MANY:
                raise
            why = f"{error}: if it gives no whole answers, give -o top=N, to choose tokens"
            raise Refused(why, error.status, error.text) from error
        size = self.vocabulary or len(ids)
        if not len(ids) and self.vocabulary:
            return full(ABSENT, size)
        if len(ids) != size or not np.array_equal(np.sort(ids), np.arange(size)):
            raise OracleError(
                f"{self.url}{self.route} gave log-probabilities of {len(ids):,} tokens, asked for "
                f"{self.most:,}, and not of the whole vocabulary: give -o top=N, to choose tokens"
            )
        self.vocabulary = size
        if self._whole_token is None:  # the likeliest token was sampled, so it works
            self._whole_token = int(ids[values.argmax()])
        vector = np.empty(size)
        vector[ids] = values
        return torch.from_numpy(vector).clamp(min=ABSENT)

    def _sampled(self, prompt: list[int], token: int) -> Tensor:
        """Return the log-probability of one token, which a bias makes the server sample."""
        request = {**self._request(prompt, 1), "temperature": 0}
        answer = self._ask(request | self._bias([(token, _FORCED)]))
        value = ABSENT  # also if the answer has an unknown form
        with suppress(*WRONG_FORM):
            value = _sampled_of(answer, token)
        return tensor([value])

    def _raised(self, prompt: list[int], pairs: list[tuple[int, float]]) -> Tensor:
        """Return the raised tokens' log-probabilities, less their biases, up to a constant."""
        if len(pairs) > self.most:
            raise OracleError(
                f"{self.url}{self.route} is asked for at most {self.most:,} log-probabilities at a "
                f"time, not {len(pairs):,}: give a smaller -o top=N"
            )
        answer = self._ask(
            {
                **self._request(prompt, len(pairs)),
                **self._bias(pairs),
                "post_sampling_probs": True,
                "temperature": 1.0,
                "top_k": 0,
                "top_p": 1.0,
                "min_p": 0.0,
                "samplers": [],
                "logprob_token_ids": [token for token, _ in pairs],
            }
        )
        given: dict[int, float] = {}
        # An answer of an unknown form counts as ABSENT: the question was asked and is
        # paid for.
        with suppress(*WRONG_FORM):
            # vLLM returns those before the bias.
            if _openai_logprobs(answer) is not None:
                known = logprobs_of(answer)
                numbers = [max(known.get(token, ABSENT), ABSENT) for token, _ in pairs]
                return tensor(numbers)
            for entry in _first(answer)["top_probs"]:
                share = float(entry["prob"])
                given[int(entry["id"])] = math.log(share) if share > 0 else ABSENT
        if not given:
            return self._greedy(prompt, pairs)
        values = [(given.get(token, ABSENT), bias) for token, bias in pairs]
        numbers = [value - bias if value > ABSENT else value for value, bias in values]
        return tensor(numbers)

    def _greedy(self, prompt: list[int], pairs: list[tuple[int, float]]) -> Tensor:
        """Return 0 for the raised token that is sampled, for servers without probabilities."""
        request = {**self._request(prompt, 0), **self._bias(pairs), "temperature": 0}
        answer = self._ask(request | {"return_tokens": True, "return_token_ids": True})
        sampled: object = None
        with suppress(*WRONG_FORM):
            if "tokens" in answer:
                ids = answer["tokens"]
            else:
                ids = answer["choices"][0]["token_ids"]
            sampled = ids[0]
        return tensor([0.0 if token == sampled else ABSENT for token, _ in pairs])

    def _request(self, prompt: list[int], count: int) -> dict[str, Any]:
        count = count if self.vocabulary is None else min(count, self.vocabulary)
        # The cache is off, so that an answer does not depend on what was asked before.
        if self.route == COMPLETION:
            return {
                "prompt": prompt,
                "n_predict": 1,
                "n_probs": count,
                "cache_prompt": False,
            }
        return {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": 1,
            "logprobs": count,
            "cache_prompt": False,
            "return_tokens_as_token_ids": True,
        }

    def _bias(self, pairs: list[tuple[int, float]]) -> dict[str, Any]:
        if self.route == COMPLETION:
            return {"logit_bias": [list(pair) for pair in pairs]}
        return {"logit_bias": {str(token): bias for token, bias in pairs}}

    def _ask(self, request: dict[str, Any]) -> Any:
        return self._http.ask(
            "POST", f"{self.url}{self.route}", request, fast_parse=parse_entries
        )


Entries = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]  # ids, log-probabilities


def parse_entries(body: bytearray) -> Entries | None:
    """Return the entries of a long answer of llama.cpp; None for other answers."""
    found = _ENTRY.findall(body)
    if len(found) < 1000:
        return None
    ids = np.array([token for token, _ in found]).astype(np.int64)
    return ids, np.array([value for _, value in found]).astype(np.float64)


def _entries(answer: Any) -> Entries:
    """Return the ids and log-probabilities of an answer; empty if it has none."""
    if isinstance(answer, tuple):
        return answer
    pairs: list[tuple[int, float]] = []
    with suppress(*WRONG_FORM):
        pairs = [(int(token), value) for token, value in logprobs_of(answer).items()]
    table = np.array(pairs, dtype=np.float64).reshape(-1, 2)
    return table[:, 0].astype(np.int64), table[:, 1]


def _openai_logprobs(answer: Any) -> Any:
    """Return the log-probabilities of an answer in OpenAI's own form, as vLLM gives it.

    Return None for llama.cpp, which has another form, or null if it sampled half a
    character.
    """
    given = (answer.get("choices") or [{}])[0].get("logprobs") or {}
    return given if given and "content" not in given else None


def _first(answer: Any) -> Any:
    """Return the entry of the first new token in either form of llama.cpp."""
    if "choices" in answer:
        return answer["choices"][0]["logprobs"]["content"][0]
    return answer["completion_probabilities"][0]


def _sampled_of(answer: Any, token: int) -> float:
    """Return the log-probability of the sampled token if it is this one."""
    if (given := _openai_logprobs(answer)) is not None:
        sampled = int(str(given["tokens"][0]).removeprefix(TOKEN_ID))
        return float(given["token_logprobs"][0]) if sampled == token else ABSENT
    entry = _first(answer)
    return float(entry["logprob"]) if int(entry["id"]) == token else ABSENT


def _stated_sizes(http: Http, url: str) -> tuple[int | None, int | None]:
    """Return the vocabulary and the width that llama.cpp states."""
    with suppress(Refused, *WRONG_FORM):
        models: Any = http.ask("GET", f"{url}/v1/models")
        about = models["data"][0]["meta"]
        vocabulary = int(about["n_vocab"])
        width = int(about["n_embd"])
        if 0 < vocabulary <= LIMITS.parts and 0 < width <= LIMITS.dim:
            return vocabulary, width
    return None, None


def _vocabulary(http: Http, server: Server) -> int | None:
    """Find the number of tokens of vLLM by bisection: status 400 refuses ids outside of it.

    Return None if a request is refused for another reason, as without a key.
    """

    def refused(token: int) -> bool:
        asked = {"model": server.model, "prompt": [0], "max_tokens": 1, "logprobs": 1}
        try:
            http.ask(
                "POST", f"{server.url}{OPENAI}", {**asked, "logprob_token_ids": [token]}
            )
        except Refused as error:
            if error.status != _BAD_REQUEST:
                raise
            return True
        return False

    size = 0
    with suppress(Refused):
        size = bisect_left(range(LIMITS.parts), True, key=refused)
    return size if 0 < size < LIMITS.parts else None
