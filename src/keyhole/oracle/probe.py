"""Servers of language models: which routes answer, with a key and without, and what they return.

`Server.at` recognises the program that runs at an address. `Server.try_route` asks one
route about one text. Without a key nothing but the request is sent, so a route that
answers is open to all.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from typing import Any, cast

from keyhole.core.endpoint import EndpointOptions, without_password
from keyhole.oracle.http import Http, Limits, Refused, shown
from keyhole.oracle.protocol import OracleError

MANY = 1_000_000  # log-probabilities to ask for, to get all that the server gives
SAFE = 1_000  # log-probabilities that every server has
# log-probabilities to ask for if more are refused; -1 asks for all
_FEWER = (-1, SAFE, 20, 5)
# Asked for more log-probabilities than they have tokens, these servers answer or
# refuse. SGLang 0.5.23 crashes.
_TAKES_MANY = ("llama.cpp", "vLLM")
_KEY_REQUIRED = (401, 403)
# Raised by reading an answer that has another form.
WRONG_FORM = (KeyError, IndexError, TypeError, ValueError, AttributeError)
# An answer may hold a log-probability for each of 256,000 tokens, with its text and its
# bytes.
LIMITS = Limits(body=256 * 2**20, parts=16_000_000)


@dataclass(frozen=True)
class Answered:
    """An answer of a route: `content` as `Route.read` returns it, or None and the reason.

    `chosen` says that log-probabilities are of tokens that the request named, and not
    of the likeliest tokens.
    """

    content: Any = None
    status: int = 200
    reason: str = ""
    requests: int = 1
    chosen: bool = False

    @property
    def open(self) -> bool:
        return self.content is not None

    @property
    def shut(self) -> bool:
        """Does the route exist, but require a key?"""
        return self.status in _KEY_REQUIRED


@dataclass(frozen=True)
class Server:
    """A server of a language model: its address, the program that runs there, its model's name."""

    url: str
    kind: str
    model: str
    options: EndpointOptions = field(default_factory=EndpointOptions)
    # as the user gave it, maybe with a password
    address: str = field(default="", repr=False)

    @classmethod
    def at(cls, url: str, options: EndpointOptions | None = None) -> Server:
        """Return the server at an address, recognised by what it states about itself."""
        address = url.rstrip("/")
        options = options or EndpointOptions()
        server = cls(without_password(address), "", "default", options, address)
        with closing(server.http(key=True)) as http:
            models: Any = _stated(http, f"{server.url}/v1/models")
            about: Any = None
            with suppress(*WRONG_FORM):
                about = models["data"][0]
            about = about if isinstance(about, Mapping) else {}
            kinds = {"llamacpp": "llama.cpp", "vllm": "vLLM", "sglang": "SGLang"}
            kind = kinds.get(str(about.get("owned_by", "")), "")
            if not kind and isinstance(_stated(http, f"{server.url}/props"), Mapping):
                kind = "llama.cpp"
        if not kind and models is None:
            raise OracleError(
                f"{server.url} is no server of llama.cpp, vLLM, SGLang or OpenAI's form: it "
                "answers neither /v1/models nor /props"
            )
        return replace(server, kind=kind, model=str(about.get("id", "default")))

    def http(self, *, key: bool) -> Http:
        """Return a connection to the server, on which secrets are sent only with `key`."""
        address = (self.address if key else "") or self.url
        return Http(address, self.options, limits=LIMITS, retries=1, key=key)

    @property
    def routes(self) -> list[Route]:
        """The routes of its kind and those of OpenAI's form; all routes if its kind is unknown."""
        own = [route for route in ROUTES if route.server == self.kind]
        others = [r for r in ROUTES if not self.kind or r.server == "OpenAI's form"]
        by_path: dict[str, Route] = {}
        for route in (*own, *others):
            by_path.setdefault(route.path, route)
        return list(by_path.values())

    def try_route(
        self,
        route: Route,
        text: str,
        *,
        key: bool = False,
    ) -> Answered:
        """Ask a route about a text; if it refuses to give many log-probabilities, ask for fewer."""
        first = MANY if self.kind in _TAKES_MANY else SAFE
        with closing(self.http(key=key)) as http:
            answered = self._ask(http, route, route.asked(text, self.model, first))
            if route.gives == LOGPROBS and answered.status in (400, 422):
                for count in _FEWER:
                    answered = self._ask(
                        http, route, route.asked(text, self.model, count)
                    )
                    if answered.open:
                        break
        return answered

    def ask_tokens(
        self,
        route: Route,
        text: str,
        tokens: Sequence[int],
        *,
        key: bool = False,
    ) -> Answered:
        """Ask for the log-probabilities of these tokens, `route.chosen` of them at a time."""
        content = route.asked(text, self.model, 1)
        groups = [
            tokens[at : at + route.chosen] for at in range(0, len(tokens), route.chosen)
        ]
        found: dict[int, float] = {}
        with closing(self.http(key=key)) as http:
            for group in groups:
                answered = self._ask(http, route, {**content, route.naming: [*group]})
                if not answered.open or not set(group) <= answered.content.keys():
                    return Answered(
                        None, answered.status, "chosen tokens are not given"
                    )
                found |= answered.content
        return Answered(found, requests=len(groups), chosen=True)

    def _ask(
        self,
        http: Http,
        route: Route,
        content: dict[str, Any],
    ) -> Answered:
        url = f"{self.url}{route.path.partition('#')[0]}"
        try:
            answer = http.ask("POST", url, content)
        except Refused as error:
            read = error.status if error.status in route.enabled else None
            return Answered(
                read, error.status, shown(f"{error.status}: {error.text}", 120)
            )
        except OracleError as error:
            return Answered(None, 0, shown(error, 200))
        try:
            read = route.read(answer)
        except WRONG_FORM:
            read = None
        if read is None:
            return Answered(reason=f"no {route.gives} in the answer")
        return Answered(read)


def _stated(http: Http, url: str) -> object:
    """Return what a route answers: None if it does not exist, {} if it requires a key."""
    try:
        return http.ask("GET", url)
    except Refused as error:
        return {} if error.status in _KEY_REQUIRED else None


# The routes of servers of language models, and the setting that closes each.
#
# All but vLLM's /pooling were tried on the servers themselves. In a request, `$text`,
# `$model` and `$count` stand for a text, the model's name and a number of
# log-probabilities. No request changes anything on the server: a slot is asked to be
# saved under a name that no file can have.

STATES = "token states"
VECTOR = "embedding"
LOGPROBS = "log-probabilities"
CACHE = "cache files"
TOKEN_ID = "token_id:"  # noqa: S105 - vLLM writes this before the id of a token
_PROXY = "--api-key, and a proxy in front that lets only the routes through that clients need"


@dataclass(frozen=True)
class Route:
    """One route of a server, what it gives away, and what closes it.

    - `read`: returns the content of an answer: rows of states, a vector, or log-probabilities by
      token. It returns None or raises if the answer has no such content.
    - `enabled`: the statuses of a refusal that show that the route exists.
    - `arithmetic`: the arithmetic of the server if it is coarser than float32 (models/capture.py).
    - `numbered`: log-probabilities come with the ids of their tokens.
    - `chosen`: how many tokens of the client's choice an answer covers, whatever the cap on the
      likeliest tokens is. `naming` is the field of the request that names them.
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

    def asked(
        self,
        text: str,
        model: str,
        count: int = SAFE,
    ) -> dict[str, Any]:
        """Return the request about a text, for `count` log-probabilities."""
        values = {"$text": text, "$model": model, "$count": count}
        return _filled(dict(self.content), values)


def _filled(content: Any, values: Mapping[str, Any]) -> Any:
    if isinstance(content, dict):
        inside = content
        return {name: _filled(value, values) for name, value in inside.items()}
    if isinstance(content, list):
        return [_filled(value, values) for value in cast("list[Any]", content)]
    return values.get(content, content) if isinstance(content, str) else content


def _rows(rows: Any) -> list[list[float]] | None:
    """Return rows of numbers if they have one width."""
    if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
        return None
    if len({len(row) for row in rows}) != 1:
        return None
    return [[float(number) for number in row] for row in rows]


def _llama_rows(answer: Any) -> list[list[float]] | None:
    """Return the rows of llama.cpp, which gives a pooled vector as a single row."""
    rows = _rows(answer[0]["embedding"])
    return None if rows is None or len(rows) == 1 else rows


def _pooled(answer: Any) -> list[float] | None:
    vector = answer["data"][0]["embedding"]
    if isinstance(vector[0], float | int):
        return [float(number) for number in vector]
    return None


def _by_id(entries: Any) -> dict[int, float]:
    return {int(entry["id"]): float(entry["logprob"]) for entry in entries}


def logprobs_of(answer: Any) -> dict[Any, float]:
    """Return the log-probabilities after a prompt, in llama.cpp's own form or in OpenAI's.

    The keys are the ids of tokens, or their texts if the answer has no ids: llama.cpp
    gives ids in both forms, and vLLM gives them if it is asked to.
    """
    if "choices" not in answer:
        return _by_id(answer["completion_probabilities"][0]["top_logprobs"])
    logprobs = answer["choices"][0]["logprobs"]
    if "content" not in logprobs:
        entries = logprobs["top_logprobs"][0].items()
        return {_id_or_text(token): float(value) for token, value in entries}
    entries = logprobs["content"][0]["top_logprobs"]
    if "id" in entries[0]:
        return _by_id(entries)
    return {entry["token"]: float(entry["logprob"]) for entry in entries}


def _id_or_text(token: str) -> int | str:
    return int(token.removeprefix(TOKEN_ID)) if token.startswith(TOKEN_ID) else token


def _sglang_logprobs(answer: Any) -> dict[int, float]:
    """Return the log-probabilities of SGLang's triples (log-probability, id, text)."""
    given = answer["meta_info"]
    (entries,) = given.get("output_token_ids_logprobs") or given["output_top_logprobs"]
    return {int(entry[1]): float(entry[0]) for entry in entries}


_COMPLETION = {
    "model": "$model",
    "prompt": "$text",
    "max_tokens": 1,
    "logprobs": "$count",
    "temperature": 0,
}
_NUMBERED = {**_COMPLETION, "return_tokens_as_token_ids": True}
ROUTES = (
    Route(
        "llama.cpp",
        "/embeddings",
        STATES,
        f"Start it with --pooling mean, not none; {_PROXY}.",
        _llama_rows,
        {"content": "$text"},
        arithmetic="8-bit blocks",
    ),
    Route(
        "llama.cpp",
        "/completion",
        LOGPROBS,
        f"{_PROXY} and takes n_probs out of requests.",
        logprobs_of,
        {"prompt": "$text", "n_predict": 1, "n_probs": "$count", "temperature": 0},
        arithmetic="8-bit blocks",
        numbered=True,
    ),
    Route(
        "llama.cpp",
        "/slots/0?action=save",
        CACHE,
        f"Start it without --slot-save-path, or keep that folder as secret as prompts; {_PROXY}.",
        lambda answer: answer["id_slot"],
        {"filename": "../"},
        enabled=(400,),
    ),
    Route(
        "OpenAI's form",
        "/v1/embeddings",
        VECTOR,
        f"Treat embeddings as the texts; {_PROXY}.",
        _pooled,
        {"model": "$model", "input": "$text", "encoding_format": "float"},
    ),
    Route(
        "OpenAI's form",
        "/v1/completions",
        LOGPROBS,
        f"Cap logprobs at a few (20); {_PROXY}.",
        logprobs_of,
        _COMPLETION,
    ),
    Route(
        "OpenAI's form",
        "/v1/chat/completions",
        LOGPROBS,
        f"Cap top_logprobs at a few; {_PROXY}.",
        logprobs_of,
        {
            "model": "$model",
            "messages": [{"role": "user", "content": "$text"}],
            "max_tokens": 1,
            "logprobs": True,
            "top_logprobs": "$count",
            "temperature": 0,
        },
    ),
    Route(
        "vLLM",
        "/pooling",
        STATES,
        f"Its --api-key does not guard this route: {_PROXY}.",
        lambda answer: _rows(answer["data"][0]["data"]),
        {"model": "$model", "input": "$text", "task": "token_embed"},
        arithmetic="bfloat16",
    ),
    Route(
        "vLLM",
        "/pooling#embed",
        VECTOR,
        f"Its --api-key does not guard this route: {_PROXY}.",
        lambda answer: [float(number) for number in answer["data"][0]["data"]],
        {"model": "$model", "input": "$text", "task": "embed"},
    ),
    Route(
        "vLLM",
        "/v1/completions",
        LOGPROBS,
        f"--max-logprobs does not cap logprob_token_ids: {_PROXY} and takes it out of requests.",
        logprobs_of,
        _NUMBERED,
        arithmetic="bfloat16",
        numbered=True,
        chosen=128,
    ),
    Route(
        "vLLM",
        "/invocations",
        LOGPROBS,
        f"Its --api-key does not guard this route: {_PROXY}.",
        logprobs_of,
        _NUMBERED,
        arithmetic="bfloat16",
        numbered=True,
        chosen=128,
    ),
    Route(
        "SGLang",
        "/generate",
        STATES,
        f"Start it without --enable-return-hidden-states; {_PROXY}.",
        # The first states are those of the prompt: all rows or only the last one.
        lambda answer: _rows(answer["meta_info"]["hidden_states"][0]),
        {
            "text": "$text",
            "sampling_params": {"max_new_tokens": 1},
            "return_hidden_states": True,
        },
        arithmetic="bfloat16",
    ),
    Route(
        "SGLang",
        "/generate#logprob",
        LOGPROBS,
        f"{_PROXY} and caps top_logprobs_num.",
        _sglang_logprobs,
        {
            "text": "$text",
            "sampling_params": {"max_new_tokens": 1, "temperature": 0},
            "return_logprob": True,
            "top_logprobs_num": "$count",
        },
        arithmetic="bfloat16",
        numbered=True,
        chosen=SAFE,
        naming="token_ids_logprob",
    ),
)
