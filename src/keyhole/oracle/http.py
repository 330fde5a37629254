"""JSON over HTTP from a server that nobody vouches for.

Whatever it sends (gigabytes, bombs, nothing, garbage, one byte a minute) ends as one line, in the
memory and time that `Limits` states. Redirects are never followed: no answer comes from another
address than the one that was asked. Secrets that were sent are taken out of what comes back.
"""

from __future__ import annotations

import json
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from email.utils import parsedate_to_datetime
from typing import Any, NoReturn, TypeVar, cast

import httpcore
import httpx

from keyhole.core.errors import InputError
from keyhole.oracle.bodies import FAILURES, Garbled, Limits, body_of, opening_of, parsed, shown
from keyhole.oracle.pace import Pace
from keyhole.oracle.protocol import OracleError
from keyhole.oracle.transport import NotHttp, Transport, moments

__all__ = ["Garbled", "Http", "Limits", "Refused", "shown"]

_PASSING = frozenset({429, 502, 503, 504})
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 2.0
_INTERNAL_ERRORS = 3  # one after the other; the next counts as what the server has to say
_RESTART_PAUSE = 1.0  # between two looks at whether a server is there again
_LARGE = 2**20  # bytes of an answer, of which there is one at a time in memory
_NO_SUCH_ROUTE = (404, 405, 501)
_SECRET = 8  # letters at least; a shorter word may stand in any answer
Cut = Callable[[bytearray], object | None]  # takes what is needed out of a long body

T = TypeVar("T")


class Refused(OracleError):
    """A server that answered with an error; `status` is HTTP's number for it."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Http:
    """Asks for JSON and takes nothing else. Keeps its connections until closed.

    Passing failures (no connection, 429, 500, 502–504, garbage) are tried again `retries` times,
    with longer and longer pauses; a server that has answered before and is gone is waited for as
    long as a request may take. `rate` is how many requests there are in a second, at most; `trust`
    whose certificates count.
    """

    def __init__(
        self,
        url: str,
        limits: Limits,
        *,
        retries: int,
        headers: Mapping[str, str] | None = None,
        rate: float | None = None,
        trust: ssl.SSLContext | None = None,
    ) -> None:
        self.limits = limits
        self._retries = retries
        self._pace = Pace(rate)
        self._answered = False
        self._room = threading.Lock()  # for a large answer
        self._secrets = _secrets(headers or {})
        accept = {"Accept-Encoding": "gzip, deflate", "Content-Type": "application/json"}
        transport = Transport(_address(url), trust)
        try:
            self._client = httpx.Client(transport=transport, headers=accept | dict(headers or {}))
        except (TypeError, UnicodeEncodeError):  # its text holds the header, maybe a secret
            raise InputError("expected headers as ASCII text, got something else") from None

    def close(self) -> None:
        self._client.close()

    def request(self, verb: str, url: str, content: dict[str, Any] | None = None) -> dict[str, Any]:
        """The JSON object that `url` answers with."""
        return self.ask(verb, url, content, lambda data: as_object(data, url))

    def ask(
        self,
        verb: str,
        url: str,
        content: dict[str, Any] | None = None,
        read: Callable[[object], T] = lambda data: cast("T", data),
        cut: Cut | None = None,
    ) -> T:
        """What `read` makes of the JSON that `url` answers with, be it an object or anything else.

        `read` may raise Garbled, so that it is asked again on another connection. `cut` may take
        what it needs out of the body; where it gives None, all of it is parsed.
        """

        def taken(reply: httpx.Response, end: float) -> T:
            return self._read(reply, url, end, read, cut)

        return self._tried(verb, url, content, taken)

    def expect_ready(self, url: str) -> None:
        """Wait until `url` says that it is ready, where the server has such a route."""

        def taken(reply: httpx.Response, end: float) -> None:
            del end
            if not reply.is_success and reply.status_code not in _NO_SUCH_ROUTE:
                self._refuse(reply, url)
            opening_of(reply, self._hidden)  # a connection whose answer was read can be kept

        self._tried("GET", url, None, taken)

    def _tried(
        self, verb: str, url: str, content: dict[str, Any] | None,
        taken: Callable[[httpx.Response, float], T],
    ) -> T:  # fmt: skip
        body = None if content is None else json.dumps(content, allow_nan=False).encode()
        self._pace.wait()
        end = time.monotonic() + self.limits.seconds
        attempt = internal = 0
        while True:
            last = attempt >= self._retries
            pause = min(_FIRST_PAUSE * 2**attempt, _LONGEST_PAUSE)
            attempt += 1
            try:
                with self._stream(verb, url, body, end) as reply:
                    internal = internal + 1 if reply.status_code == 500 else 0
                    trouble = self._passing(reply, last or internal > _INTERNAL_ERRORS)
                    if trouble is None:
                        return self._kept_apart(reply, lambda reply: taken(reply, end))
                    pause = max(pause, _asked_to_wait(reply))
            except httpcore.TimeoutException:
                raise self._too_slow(url, "none in time") from None
            except httpcore.LocalProtocolError:  # its text holds the header, maybe a secret
                raise InputError("expected headers that HTTP allows, got others") from None
            except NotHttp as error:
                raise OracleError(f"expected HTTP from {url}, got {self._shown(error)}") from None
            except Garbled as error:
                if last:
                    raise
                trouble = str(error)
            except httpcore.ConnectError as error:
                _expect_trusted(error, url)
                trouble = self._shown(f"{type(error).__name__}: {error}")
                if self._answered and self._retries:  # it may be starting again
                    last, pause = False, _RESTART_PAUSE
            except FAILURES as error:
                trouble = self._shown(f"{type(error).__name__}: {error}")
            if last:
                raise OracleError(f"expected an answer from {url}, got {trouble}")
            if time.monotonic() + pause > end:
                raise self._too_slow(url, trouble)
            if "Retry-After" in trouble:  # said to all who ask
                self._pace.hold(pause)
            time.sleep(pause)
            self._pace.wait()

    def _stream(
        self, verb: str, url: str, body: bytes | None, end: float
    ) -> AbstractContextManager[httpx.Response]:
        return self._client.stream(verb, url, content=body, extensions={"timeout": moments(end)})

    def _kept_apart(self, reply: httpx.Response, take: Callable[[httpx.Response], T]) -> T:
        """What is taken of a reply; a connection that brought garbage is not used again.

        An answer that was sent twice would be taken for that of the next question.
        """
        try:
            taken = take(reply)
        except Garbled:
            with suppress(*FAILURES, OSError):
                reply.extensions["network_stream"].close()
            raise
        self._answered = True
        return taken

    def _passing(self, reply: httpx.Response, last: bool) -> str | None:
        """Why to ask again; None where the answer is to be taken as it is."""
        if reply.status_code == 500 and not last:
            return "status 500"
        if reply.status_code not in _PASSING:
            return None
        header = reply.headers.get("retry-after", "").strip()
        asked = _seconds(header) is not None
        with_wait = f" with Retry-After: {self._shown(header, 40)}" if asked else ""
        return f"status {reply.status_code}{with_wait}"

    def _too_slow(self, url: str, trouble: str) -> OracleError:
        seconds = f"{self.limits.seconds:g} s"
        return OracleError(
            f"expected an answer from {url} within {seconds}, got {trouble}: raise "
            "--endpoint timeout"
        )

    def _read(
        self, reply: httpx.Response, url: str, end: float, read: Callable[[object], T],
        cut: Cut | None,
    ) -> T:  # fmt: skip
        if not reply.is_success:
            self._refuse(reply, url)
        alone = False

        def grown(length: int) -> None:
            nonlocal alone
            if length > _LARGE and not alone:
                alone = self._room.acquire(timeout=max(0.0, end - time.monotonic()))
                if not alone:
                    raise self._too_slow(url, "none in time")

        try:
            body = self._hidden(body_of(reply, url, self.limits.body, grown))
            taken = None if cut is None else cut(body)
            return read(parsed(body, url, self.limits) if taken is None else taken)
        finally:
            if alone:
                self._room.release()

    def _refuse(self, reply: httpx.Response, url: str) -> NoReturn:
        status = reply.status_code
        if 300 <= status < 400:
            where = self._shown(reply.headers.get("location", "nowhere"), 100)
            raise OracleError(
                f"expected an answer from {url}, got {status}, a redirect to {where}: "
                "redirects are not followed"
            )
        opening = opening_of(reply, self._hidden)
        raise Refused(f"expected an answer from {url}, got {status}: {opening}", status)

    def _hidden(self, body: bytearray) -> bytearray:
        """What a server sent, without the secrets that it was sent."""
        for secret in self._secrets:
            if secret in body:
                body = body.replace(secret, b"(secret)")
        return body

    def _shown(self, text: object, longest: int = 200) -> str:
        return shown(self._hidden(bytearray(str(text), "utf-8", "replace")).decode(), longest)


def as_object(data: object, url: str) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise OracleError(f"expected a JSON object from {url}, got {shown(data)}")
    return cast("dict[str, Any]", data)


def _secrets(headers: Mapping[str, str]) -> list[bytes]:
    """The values of headers, and those after `Bearer`, the longest first."""
    words = [word for value in headers.values() for word in (value, *value.split())]
    long = {word.encode("utf-8", "replace") for word in words if len(word) >= _SECRET}
    return sorted(long, key=len, reverse=True)


def _expect_trusted(error: httpcore.ConnectError, url: str) -> None:
    """A certificate that nobody vouches for will not be better a second later."""
    cause = error.__cause__ or error.__context__  # the pool raises it again without its cause
    if isinstance(cause, ssl.SSLCertVerificationError):
        why = shown(cause.verify_message, 100)
        raise OracleError(
            f"expected a certificate that is trusted from {url}, got another ({why}): give --ca "
            "FILE with its authority, or --insecure"
        ) from None
    if isinstance(cause, ssl.SSLError):
        raise OracleError(f"expected TLS from {url}, got {shown(cause.reason or cause, 100)}")


def _address(url: str) -> httpx.URL:
    """The address, if a socket can be asked for it."""
    with suppress(httpx.InvalidURL, UnicodeError):
        address = httpx.URL(url)
        address.raw_host.decode().encode("idna")  # as the resolver will
        whole = not any(letter.isspace() for letter in url)
        if address.host and whole and 0 < (address.port or 80) < 2**16:
            return address
    raise InputError(f"expected a URL such as http://localhost:8080, got {shown(url, 200)}")


def _asked_to_wait(reply: httpx.Response) -> float:
    return _seconds(reply.headers.get("retry-after", "").strip()) or 0.0


def _seconds(header: str) -> float | None:
    """What Retry-After says, as a number or as a date."""
    if header.isascii() and header.isdigit():
        return float(header[:20])
    try:
        return parsedate_to_datetime(header).timestamp() - time.time()
    except (ValueError, TypeError, OverflowError):
        return None
