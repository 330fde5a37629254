"""Which routes of a server answer, with a key and without, and what they return.

`Server.at` recognises what runs there; `try_route` asks one route about one text. Without a key
nothing is sent but the request: who finds a route open needed nothing else either.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, cast

from keyhole.core.endpoint import EndpointOptions, without_password
from keyhole.oracle.connection import connected
from keyhole.oracle.http import Http, Limits, Refused, shown
from keyhole.oracle.protocol import OracleError

SAFE = 1_000  # log-probabilities that any server has
_FEWER = (-1, SAFE, 20, 5)  # to ask for where MANY are refused; -1: all
# Known to answer or to refuse where they are asked for more log-probabilities than they have
# tokens. SGLang 0.5.23 ends, with all that it serves.
_WITHSTAND = ("llama.cpp", "vLLM")
_SHUT = (401, 403)
# A log-probability for each of 256,000 tokens, with the token as text and as bytes.
LIMITS = Limits(body=256 * 2**20, parts=16_000_000)


@dataclass(frozen=True)
class Answered:
    """What a route gave: `content` as `Route.read` has it, or nothing, and why."""

    content: Any = None
    status: int = 200
    reason: str = ""
    requests: int = 1
    chosen: bool = False  # log-probabilities of tokens that were named, not of the likeliest

    @property
    def open(self) -> bool:
        return self.content is not None

    @property
    def shut(self) -> bool:
        """Is it there, for those who have a key?"""
        return self.status in _SHUT


@dataclass(frozen=True)
class Server:
    """A server of a language model: its address, what it is, the name of its model."""

    url: str
    kind: str
    model: str
    options: EndpointOptions = field(default_factory=EndpointOptions)
    address: str = field(default="", repr=False)  # as it was given, maybe with a password

    @classmethod
    def at(cls, url: str, options: EndpointOptions | None = None) -> Server:
        """What runs at an address, by what it says of itself."""
        options = options or EndpointOptions()
        address = url.rstrip("/")
        url = without_password(address)
        with closing(server_http(address, options, key=True)) as http:
            models = _stated(http, f"{url}/v1/models")
            entries = models.get("data") if isinstance(models, Mapping) else None
            first: Any = entries[0] if isinstance(entries, list) and entries else {}
            owner = str(first.get("owned_by", "")) if isinstance(first, Mapping) else ""
            name = str(first.get("id", "default")) if isinstance(first, Mapping) else "default"
            kind = {"llamacpp": "llama.cpp", "vllm": "vLLM", "sglang": "SGLang"}.get(owner, "")
            if not kind and isinstance(_stated(http, f"{url}/props"), Mapping):
                kind = "llama.cpp"
            if not kind and models is None:
                raise OracleError(
                    f"{url} is no server of llama.cpp, vLLM, SGLang or OpenAI's form: it answers "
                    "neither /v1/models nor /props"
                )
        return cls(url, kind, name, options, address)

    @property
    def routes(self) -> list[Route]:
        """Those of its kind and OpenAI's, one for a path; of an unknown kind all that are known."""
        own = [route for route in ROUTES if route.server == self.kind]
        others = [r for r in ROUTES if not self.kind or r.server == "OpenAI's form"]
        by_path: dict[str, Route] = {}
        for route in (*own, *others):
            by_path.setdefault(route.path, route)
        return list(by_path.values())

    def try_route(self, route: Route, text: str, *, key: bool = False) -> Answered:
        """Ask a route about a text; where too many log-probabilities are refused, for fewer."""
        content = route.asked(text, self.model)
        first = MANY if self.kind in _WITHSTAND else SAFE
        address = (self.address if key else "") or self.url
        with closing(server_http(address, self.options, key=key)) as http:
            answered = self._ask(http, route, _counted(content, first))
            if route.gives == LOGPROBS and answered.status in (400, 422):
                for count in _FEWER:
                    answered = self._ask(http, route, _counted(content, count))
                    if answered.open:
                        break
        return answered

    def ask_tokens(
        self, route: Route, text: str, tokens: Sequence[int], *, key: bool = False
    ) -> Answered:
        """The log-probabilities of chosen tokens after a text, `route.chosen` of them at a time."""
        content = _counted(route.asked(text, self.model), 1)
        groups = [tokens[at : at + route.chosen] for at in range(0, len(tokens), route.chosen)]
        found: dict[int, float] = {}
        address = (self.address if key else "") or self.url
        with closing(server_http(address, self.options, key=key)) as http:
            for group in groups:
                answered = self._ask(http, route, {**content, route.naming: [*group]})
                if not answered.open or not set(group) <= answered.content.keys():
                    return Answered(None, answered.status, "chosen tokens are not given")
                found |= answered.content
        return Answered(found, requests=len(groups), chosen=True)

    def _ask(self, http: Http, route: Route, content: dict[str, Any]) -> Answered:
        url = f"{self.url}{route.path.partition('#')[0]}"
        try:
            answer = http.ask("POST", url, content)
        except Refused as error:
            read = error.status if error.status in route.enabled else None
            return Answered(read, error.status, shown(f"{error.status}: {error.text}", 120))
        except OracleError as error:
            return Answered(None, 0, shown(error, 200))
        try:
            read = route.read(answer)
        except (KeyError, IndexError, TypeError, ValueError):  # another form than the route's
            read = None
        return Answered(read, reason="" if read is not None else f"no {route.gives} in the answer")


def _counted(content: dict[str, Any], count: int) -> dict[str, Any]:
    """The request, for so many log-probabilities."""
    return {name: count if value == MANY else value for name, value in content.items()}


def server_http(url: str, options: EndpointOptions, *, key: bool) -> Http:
    """A connection to a server of a language model."""
    return connected(options, url, limits=LIMITS, retries=1, key=key)


def _stated(http: Http, url: str) -> object:
    try:
        return http.ask("GET", url)
    except Refused as error:
        return {} if error.status in _SHUT else None


# What servers of language models answer, route by route, and the setting that closes each.
#
# All but vLLM's /pooling were tried on the servers themselves. `$text` and `$model` in a request
# stand for a text and the model's name. No request changes anything on the server: a slot is asked
# to be saved under a name that no file can have.

STATES, VECTOR, LOGPROBS, CACHE = "token states", "embedding", "log-probabilities", "cache files"
TOKEN_ID = "token_id:"  # noqa: S105 - what vLLM writes before the number of a token
MANY = 1_000_000  # log-probabilities that are asked for: all that there are
_PROXY = "--api-key, and a proxy in front that lets only the routes through that clients need"


@dataclass(frozen=True)
class Route:
    """One route of a server, what it gives away, and what closes it.

    `read` takes the answer apart: rows of states, a vector, pairs of token and log-probability;
    None where the answer has no such thing. `enabled` are statuses of a refusal that show that the
    route is there. `arithmetic` names one that is coarser than float32 (models/capture.py),
    `numbered` says that log-probabilities come with the numbers of their tokens, `chosen` of how
    many tokens of the client's choice they come at a time, whatever the cap on the likeliest is,
    and `naming` the field of the request that names them.
    """

    server: str
    path: str
    gives: str
    remedy: str
    read: Callable[[Any], Any]
    content: Mapping[str, Any] = field(default_factory=dict[str, Any])
    enabled: tuple[int, ...] = ()
    arithmetic: str = ""
    numbered: bool = False
    chosen: int = 0
    naming: str = "logprob_token_ids"

    @property
    def name(self) -> str:
        return f"POST {re.split('[?#]', self.path)[0]} of {self.server}"

    def asked(self, text: str, model: str) -> dict[str, Any]:
        """The request about a text."""
        return cast("dict[str, Any]", _filled(dict(self.content), {"$text": text, "$model": model}))


def _filled(content: Any, words: Mapping[str, str]) -> Any:
    if isinstance(content, dict):
        inside = cast("dict[str, Any]", content)
        return {name: _filled(value, words) for name, value in inside.items()}
    if isinstance(content, list):
        return [_filled(value, words) for value in cast("list[Any]", content)]
    return words.get(content, content) if isinstance(content, str) else content


def _rows(rows: Any) -> list[list[float]] | None:
    """Rows of numbers, of one width."""
    whole = isinstance(rows, list) and bool(rows) and all(isinstance(row, list) for row in rows)
    if not whole or len({len(row) for row in rows}) != 1:
        return None
    return [[float(number) for number in row] for row in rows]


def _llama_rows(answer: Any) -> list[list[float]] | None:
    """llama.cpp gives rows that are pooled in the same form: one alone, of length one."""
    rows = _rows(answer[0]["embedding"])
    pooled = rows is not None and len(rows) == 1
    return None if pooled else rows


def _pooled(answer: Any) -> list[float] | None:
    vector = answer["data"][0]["embedding"]
    return [float(number) for number in vector] if isinstance(vector[0], float | int) else None


def _by_id(entries: Any) -> dict[int, float]:
    return {int(entry["id"]): float(entry["logprob"]) for entry in entries}


def logprobs_of(answer: Any) -> dict[Any, float]:
    """What follows a prompt in llama.cpp's own form or in OpenAI's, by the tokens' numbers.

    By their texts where they have none: llama.cpp gives numbers in OpenAI's form too, vLLM where it
    is asked to.
    """
    if "choices" not in answer:
        return _by_id(answer["completion_probabilities"][0]["top_logprobs"])
    logprobs = answer["choices"][0]["logprobs"]
    if "content" not in logprobs:
        entries = logprobs["top_logprobs"][0].items()
        return {_number(token): float(value) for token, value in entries}
    entries = logprobs["content"][0]["top_logprobs"]
    if "id" in entries[0]:
        return _by_id(entries)
    return {entry["token"]: float(entry["logprob"]) for entry in entries}


def _number(token: str) -> int | str:
    """The number of a token as vLLM writes it when it is asked for numbers; any other text."""
    return int(token.removeprefix(TOKEN_ID)) if token.startswith(TOKEN_ID) else token


def _sglang_rows(answer: Any) -> list[list[float]] | None:
    """The first of its hidden states are the prompt's, all rows of it or the last alone."""
    return _rows(answer["meta_info"]["hidden_states"][0])


def _sglang_logprobs(answer: Any) -> dict[int, float]:
    """Triples of log-probability, number and text, of tokens that were named or the likeliest."""
    given = answer["meta_info"]
    (entries,) = given.get("output_token_ids_logprobs") or given["output_top_logprobs"]
    return {int(entry[1]): float(entry[0]) for entry in entries}


_NUMBERED = {
    "model": "$model", "prompt": "$text", "max_tokens": 1, "logprobs": MANY, "temperature": 0,
    "return_tokens_as_token_ids": True,
}  # fmt: skip
ROUTES = (
    Route(
        "llama.cpp", "/embeddings", STATES, f"Start it with --pooling mean, not none; {_PROXY}.",
        _llama_rows, {"content": "$text"}, arithmetic="8-bit blocks",
    ),
    Route(
        "llama.cpp", "/completion", LOGPROBS, f"{_PROXY} and takes n_probs out of requests.",
        logprobs_of,
        {"prompt": "$text", "n_predict": 1, "n_probs": MANY, "temperature": 0},
        arithmetic="8-bit blocks", numbered=True,
    ),
    Route(
        "llama.cpp", "/slots/0?action=save", CACHE,
        f"Start it without --slot-save-path, or keep that folder as secret as prompts; {_PROXY}.",
        lambda answer: answer["id_slot"], {"filename": "../"}, enabled=(400,),
    ),
    Route(
        "OpenAI's form", "/v1/embeddings", VECTOR, f"Treat embeddings as the texts; {_PROXY}.",
        _pooled, {"model": "$model", "input": "$text", "encoding_format": "float"},
    ),
    Route(
        "OpenAI's form", "/v1/completions", LOGPROBS, f"Cap logprobs at a few (20); {_PROXY}.",
        logprobs_of,
        {"model": "$model", "prompt": "$text", "max_tokens": 1, "logprobs": MANY, "temperature": 0},
    ),
    Route(
        "OpenAI's form", "/v1/chat/completions", LOGPROBS, f"Cap top_logprobs at a few; {_PROXY}.",
        logprobs_of,
        {
            "model": "$model", "messages": [{"role": "user", "content": "$text"}], "max_tokens": 1,
            "logprobs": True, "top_logprobs": MANY, "temperature": 0,
        },
    ),
    Route(
        "vLLM", "/pooling", STATES, f"Its --api-key does not guard this route: {_PROXY}.",
        lambda answer: _rows(answer["data"][0]["data"]),
        {"model": "$model", "input": "$text", "task": "token_embed"}, arithmetic="bfloat16",
    ),
    Route(
        "vLLM", "/pooling#embed", VECTOR, f"Its --api-key does not guard this route: {_PROXY}.",
        lambda answer: [float(number) for number in answer["data"][0]["data"]],
        {"model": "$model", "input": "$text", "task": "embed"},
    ),
    Route(
        "vLLM", "/v1/completions", LOGPROBS,
        f"--max-logprobs does not cap logprob_token_ids: {_PROXY} and takes it out of requests.",
        logprobs_of, _NUMBERED, arithmetic="bfloat16", numbered=True, chosen=128,
    ),
    Route(
        "vLLM", "/invocations", LOGPROBS, f"Its --api-key does not guard this route: {_PROXY}.",
        logprobs_of, _NUMBERED, arithmetic="bfloat16", numbered=True, chosen=128,
    ),
    Route(
        "SGLang", "/generate", STATES, f"Start it without --enable-return-hidden-states; {_PROXY}.",
        _sglang_rows,
        {"text": "$text", "sampling_params": {"max_new_tokens": 1}, "return_hidden_states": True},
        arithmetic="bfloat16",
    ),
    Route(
        "SGLang", "/generate#logprob", LOGPROBS, f"{_PROXY} and caps top_logprobs_num.",
        _sglang_logprobs,
        {
            "text": "$text", "sampling_params": {"max_new_tokens": 1, "temperature": 0},
            "return_logprob": True, "top_logprobs_num": MANY,
        },
        arithmetic="bfloat16", numbered=True, chosen=SAFE, naming="token_ids_logprob",
    ),
)  # fmt: skip
