"""Which routes of a server answer, with a key and without, and what they return.

`Server.at` recognises what runs there; `try_route` asks one route about one text. Without a key
nothing is sent but the request: who finds a route open needed nothing else either.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from keyhole.core.endpoint import EndpointOptions
from keyhole.oracle.address import names_address, without_password
from keyhole.oracle.http import Http, Limits, Refused, shown
from keyhole.oracle.options import connected
from keyhole.oracle.protocol import OracleError
from keyhole.oracle.routes import LOGPROBS, MANY, ROUTES, Route

_FEWER = (1_000, 20, 5)  # log-probabilities to ask for where all of them are refused
_SHUT = (401, 403)
# A log-probability for each of 256,000 tokens, with the token as text and as bytes.
LIMITS = Limits(body=256 * 2**20, parts=16_000_000)


@dataclass(frozen=True)
class Answered:
    """What a route gave: `content` as `Route.read` has it, or nothing, and why."""

    content: Any = None
    status: int = 200
    reason: str = ""

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
            models = _told(http, f"{url}/v1/models")
            entries = models.get("data") if isinstance(models, Mapping) else None
            first: Any = entries[0] if isinstance(entries, list) and entries else {}
            owner = str(first.get("owned_by", "")) if isinstance(first, Mapping) else ""
            name = str(first.get("id", "default")) if isinstance(first, Mapping) else "default"
            kind = {"llamacpp": "llama.cpp", "vllm": "vLLM", "sglang": "SGLang"}.get(owner, "")
            if not kind and isinstance(_told(http, f"{url}/props"), Mapping):
                kind = "llama.cpp"
            if not kind and models is None:
                raise OracleError(
                    f"expected llama.cpp, vLLM, SGLang or OpenAI's form at {url}, got a server "
                    "that answers neither /v1/models nor /props"
                )
        return cls(url, kind, name, options, address)

    @property
    def routes(self) -> list[Route]:
        """Those of its kind; of an unknown one all that are known."""
        if not self.kind:
            return list(ROUTES)
        return [route for route in ROUTES if route.server in (self.kind, "OpenAI's form")]

    def try_route(self, route: Route, text: str, *, key: bool = False) -> Answered:
        """Ask a route about a text; where too many log-probabilities are refused, for fewer."""
        content = route.asked(text, self.model)
        address = (self.address if key else "") or self.url
        with closing(server_http(address, self.options, key=key)) as http:
            answered = self._ask(http, route, content)
            if route.gives == LOGPROBS and answered.status in (400, 422):
                for count in _FEWER:
                    fewer = {
                        name: count if value == MANY else value for name, value in content.items()
                    }
                    answered = self._ask(http, route, fewer)
                    if answered.open:
                        break
        return answered

    def _ask(self, http: Http, route: Route, content: dict[str, Any]) -> Answered:
        url = f"{self.url}{route.path}".removesuffix("?logprob")
        try:
            answer = http.ask("POST", url, content)
        except Refused as error:
            read = error.status if error.status in route.enabled else None
            return Answered(read, error.status, _words(error))
        except OracleError as error:
            return Answered(None, 0, _words(error))
        try:
            read = route.read(answer)
        except (KeyError, IndexError, TypeError, ValueError):  # another form than the route's
            read = None
        return Answered(read, reason="" if read is not None else f"no {route.gives} in the answer")


def names_server(name: str) -> bool:
    """Is it the address of a server alone, without a path that says what is asked?"""
    if not names_address(name):
        return False
    try:
        parts = urlsplit(name)
    except ValueError:  # half an IPv6 address
        return False
    return parts.path in ("", "/") and not parts.query


def _words(error: OracleError) -> str:
    """What came instead of an answer."""
    return shown(str(error).partition(", got ")[2] or error, 120)


def server_http(url: str, options: EndpointOptions, *, key: bool) -> Http:
    """A connection to a server of a language model."""
    return connected(options, url, limits=LIMITS, retries=1, key=key)


def _told(http: Http, url: str) -> object:
    try:
        return http.ask("GET", url)
    except Refused as error:
        return {} if error.status in _SHUT else None
