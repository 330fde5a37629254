"""JSON over HTTP from a server that nobody vouches for.

Whatever it sends (gigabytes, bombs, nothing, garbage, one byte a minute) ends as one line, in the
memory and time that `Limits` states. Redirects are never followed: no answer comes from another
address than the one that was asked. Secrets that were sent are taken out of what comes back.

It stands on httpcore, the transport of httpx, which would bound the time between two bytes and not
that of a request (`_Stream`), read and unpack bodies without a bound (`_body`), and whose retries
know neither a deadline nor Retry-After (`Http._tried`).
"""

from __future__ import annotations

import json
import math
import socket
import ssl
import threading
import time
import urllib.request
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar, cast

import httpcore
import httpx

from keyhole.core.errors import InputError
from keyhole.core.text import inert
from keyhole.oracle.protocol import OracleError

_BUSY = frozenset({429, 502, 503, 504})
_NO_SUCH_ROUTE = (404, 405, 501)
_FIRST_PAUSE, _LAST_PAUSE = 0.1, 2.0  # between tries, in seconds: twice as long each time
_RESTART_PAUSE = 1.0  # between tries to connect to a server that has answered before
_INTERNAL_ERRORS = 3  # statuses 500 in a row; the next counts as what the server has to say
_LARGE = 2**20  # bytes of an answer, of which there is one at a time in memory
_PIECE = 2**14  # bytes that are unpacked at once
_WRITTEN = 2**16  # bytes that are written at once
_SECRET = 8  # letters at least; a shorter word may stand in any answer
_FAILURES = (httpcore.NetworkError, httpcore.ProtocolError)
Cut = Callable[[bytearray], object | None]  # takes what is needed out of a long body

T = TypeVar("T")


@dataclass(frozen=True)
class Limits:
    """What a server may cost; one that wants more is refused in a line that names the limit.

    - `seconds`: one request, from connecting to its last byte, with its retries and their waits.
    - `body`: bytes of one answer, both as sent and as unpacked.
    - `parts`: opening brackets, quotes and commas in one answer. Python needs up to 60 bytes for
      what one of them stands for, so that an answer takes less than 500 MB unless this is raised.
    - `dim`: the dimension a server may claim unasked, and the width of its answers.
    """

    seconds: float = 60.0
    body: int = 64 * 2**20
    parts: int = 4_000_000
    dim: int = 16_384

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not (math.isfinite(value) and value > 0):
                raise InputError(f"a limit {field.name} must be above 0, not {value}")


class Refused(OracleError):
    """A server that answered with an error: HTTP's number for it, and the first words of `text`."""

    def __init__(self, message: str, status: int, text: str = "") -> None:
        super().__init__(message)
        self.status, self.text = status, text


class Garbled(OracleError):
    """Something that is no answer, where another try may bring one."""


class _Passing(Exception):
    """A failure after which asking again may help: why, and after how many seconds."""

    def __init__(self, why: str, wait: float | None = None, restarting: bool = False) -> None:
        super().__init__(why)
        self.wait, self.restarting = wait, restarting


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
        self._pace = _Pace(rate)
        self._answered = False
        self._one_large = threading.Lock()  # held while a large answer is in memory
        self._secrets = _secrets(headers or {})
        usual = {"Accept-Encoding": "gzip, deflate", "Content-Type": "application/json"}
        self._pool = _pool(_address(url), trust)
        try:
            self._headers = httpx.Headers(usual | {"User-Agent": "keyhole"} | dict(headers or {}))
        except (TypeError, UnicodeEncodeError):  # its text holds the header, maybe a secret
            raise InputError("headers must be ASCII text") from None

    def close(self) -> None:
        self._pool.close()

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
        return self._tried(
            verb, url, content, lambda reply, end: self._read(reply, url, end, read, cut)
        )

    def expect_ready(self, url: str) -> None:
        """Wait until `url` says that it is ready, where the server has such a route."""

        def take(reply: httpcore.Response, _: float) -> None:
            if not 200 <= reply.status < 300 and reply.status not in _NO_SUCH_ROUTE:
                raise self._refusal(reply, url)
            self._opening(reply)  # a connection whose answer was read can be kept

        self._tried("GET", url, None, take)

    def _tried(
        self, verb: str, url: str, content: dict[str, Any] | None,
        take: Callable[[httpcore.Response, float], T],
    ) -> T:  # fmt: skip
        """What `take` makes of the reply, within the time of one request."""
        body = None if content is None else json.dumps(content, allow_nan=False).encode()
        self._pace.wait()
        end = time.monotonic() + self.limits.seconds
        tries = internal_errors = 0
        while True:
            last = tries >= self._retries
            pause = min(_FIRST_PAUSE * 2**tries, _LAST_PAUSE)
            tries += 1
            try:
                return self._once(verb, url, body, end, take)
            except Garbled as error:
                if last:
                    raise
                trouble, internal_errors = _Passing(str(error)), 0
            except Refused as error:
                internal_errors += 1
                if error.status != 500 or last or internal_errors > _INTERNAL_ERRORS:
                    raise
                trouble = _Passing("status 500")
            except _Passing as error:
                trouble, internal_errors = error, 0
                if error.restarting:
                    last, pause = False, _RESTART_PAUSE
            if last:
                raise OracleError(f"no answer from {url}: {trouble}")
            pause = max(pause, trouble.wait or 0.0)
            if time.monotonic() + pause > end:
                raise self._too_slow(url, str(trouble))
            if trouble.wait is not None:  # the server asks all its clients to wait
                self._pace.hold(pause)
            time.sleep(pause)
            self._pace.wait()

    def _once(
        self, verb: str, url: str, body: bytes | None, end: float,
        take: Callable[[httpcore.Response, float], T],
    ) -> T:  # fmt: skip
        """One try; raises Garbled, Refused or _Passing where another may help."""
        timeouts = {"timeout": {"connect": end, "read": end, "write": end}}  # see `_left`
        asked: dict[str, Any] = {
            "headers": self._headers.raw,
            "content": body,
            "extensions": timeouts,
        }
        try:
            with self._pool.stream(verb, _route(httpx.URL(url)), **asked) as reply:
                _expect_after_question(reply)
                if reply.status in _BUSY:
                    raise self._busy(reply)
                try:
                    taken = take(reply, end)
                except Garbled:
                    # An answer that was sent twice would be taken for that of the next question.
                    with suppress(*_FAILURES, OSError):
                        reply.extensions["network_stream"].close()
                    raise
                self._answered = True
                return taken
        except httpcore.TimeoutException:
            raise self._too_slow(url) from None
        except httpcore.LocalProtocolError:  # its text holds the header, maybe a secret
            raise InputError("HTTP does not allow these headers") from None
        except _NotHttp as error:
            raise OracleError(f"expected HTTP from {url}, got {self._shown(error)}") from None
        except _FAILURES as error:
            connecting = isinstance(error, httpcore.ConnectError)
            if connecting:
                _expect_trusted(error, url)
            why = self._shown(f"{type(error).__name__}: {error}")
            restarting = connecting and self._answered and self._retries > 0
            raise _Passing(why, restarting=restarting) from None

    def _busy(self, reply: httpcore.Response) -> _Passing:
        header = _header(reply, "retry-after").strip()
        wait = _seconds(header)
        asked = "" if wait is None else f" with Retry-After: {self._shown(header, 40)}"
        return _Passing(f"status {reply.status}{asked}", wait)

    def _too_slow(self, url: str, trouble: str = "") -> OracleError:
        why = f" ({trouble})" if trouble else ""
        return OracleError(
            f"no answer from {url} within {self.limits.seconds:g} s{why}: raise --endpoint timeout"
        )

    def _read(
        self, reply: httpcore.Response, url: str, end: float, read: Callable[[object], T],
        cut: Cut | None,
    ) -> T:  # fmt: skip
        if not 200 <= reply.status < 300:
            raise self._refusal(reply, url)
        alone = False
        body = bytearray()
        try:
            for piece in _body(reply, url, self.limits.body):
                body += piece
                if len(body) > _LARGE and not alone:
                    alone = self._one_large.acquire(timeout=max(0.0, end - time.monotonic()))
                    if not alone:
                        raise self._too_slow(url)
            body = self._hidden(body)
            taken = None if cut is None else cut(body)
            return read(_parsed(body, url, self.limits) if taken is None else taken)
        finally:
            if alone:
                self._one_large.release()

    def _refusal(self, reply: httpcore.Response, url: str) -> OracleError:
        status = reply.status
        if 300 <= status < 400:
            where = self._shown(_header(reply, "location") or "nowhere", 100)
            return OracleError(
                f"{url} redirects to {where} (status {status}): redirects are not followed"
            )
        opening = self._opening(reply)
        message = f"{url} answers with status {status}: {opening}"
        return Refused(message, status, opening)

    def _opening(self, reply: httpcore.Response) -> str:
        """The first words of an answer that is an error; whatever is wrong with it is ignored."""
        body = bytearray()
        with suppress(OracleError, httpcore.TimeoutException, *_FAILURES):
            for piece in _unpacked(reply.iter_stream(), reply, ""):
                body += piece
                if len(body) > 1000:
                    break
        return shown(self._hidden(body).decode(errors="replace"), 200) or "no text"

    def _hidden(self, body: bytearray) -> bytearray:
        """What a server sent, without the secrets that it was sent."""
        for secret in self._secrets:
            if secret in body:
                body = body.replace(secret, b"(secret)")
        return body

    def _shown(self, text: object, max_length: int = 200) -> str:
        return shown(self._hidden(bytearray(str(text), "utf-8", "replace")).decode(), max_length)


def as_object(data: object, url: str) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise OracleError(f"expected a JSON object from {url}, got {shown(data)}")
    return cast("dict[str, Any]", data)


def shown(text: object, max_length: int = 80) -> str:
    """What a server sent, as part of one line: no line breaks, no control characters."""
    return inert(str(text), max_length)


def _secrets(headers: Mapping[str, str]) -> list[bytes]:
    """The values of headers, and those after `Bearer`, the longest first."""
    words = [word for value in headers.values() for word in (value, *value.split())]
    long = {word.encode("utf-8", "replace") for word in words if len(word) >= _SECRET}
    return sorted(long, key=len, reverse=True)


def _expect_trusted(error: BaseException, url: str) -> None:
    """A certificate that nobody vouches for will not be better a second later."""
    cause = error.__cause__ or error.__context__  # the pool raises it again without its cause
    if isinstance(cause, ssl.SSLCertVerificationError):
        why = shown(cause.verify_message, 100)
        raise OracleError(
            f"the certificate of {url} is not trusted ({why}): give --ca FILE with its authority, "
            "or --insecure"
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


def _seconds(header: str) -> float | None:
    """What Retry-After says, as a number or as a date; None where it says neither."""
    if header.isascii() and header.isdigit():
        return float(header[:20])
    try:
        return parsedate_to_datetime(header).timestamp() - time.time()
    except (ValueError, TypeError, OverflowError):
        return None


class _Pace:
    """Turns for requests, evenly spaced; threads that share one share its rate."""

    def __init__(self, per_second: float | None) -> None:
        self._apart = 0.0 if per_second is None else 1.0 / per_second
        self._next = 0.0  # as time.monotonic() has it
        self._lock = threading.Lock()

    def wait(self) -> None:
        """Until it is this request's turn."""
        with self._lock:
            turn = max(self._next, time.monotonic())
            self._next = turn + self._apart
        time.sleep(max(0.0, turn - time.monotonic()))

    def hold(self, seconds: float) -> None:
        """Nobody asks for so long."""
        with self._lock:
            self._next = max(self._next, time.monotonic() + seconds)


# Bodies, read in the memory that `Limits` states: bounded, unpacked in small pieces, parsed.


def _body(reply: httpcore.Response, url: str, limit: int) -> Iterator[bytes]:
    """The unpacked body, or an error as soon as it is known to be longer than `limit`."""

    def too_long(what: str) -> OracleError:
        return OracleError(
            f"the answer of {url} has more than {limit:,} bytes{what}: raise Limits(body=)"
        )

    def sent() -> Iterator[bytes]:
        count = 0
        for piece in reply.iter_stream():
            count += len(piece)
            if count > limit:
                raise too_long("")
            yield piece

    announced = int(_header(reply, "content-length") or 0)  # httpcore checks that it is a number
    if announced > limit:
        raise too_long(f" (Content-Length {announced:,})")
    count = 0
    for piece in _unpacked(sent(), reply, url):
        count += len(piece)
        if count > limit:
            raise too_long(" when unpacked")
        yield piece


def _unpacked(pieces: Iterable[bytes], reply: httpcore.Response, url: str) -> Iterator[bytes]:
    """The body as it was before gzip or deflate, in small pieces whatever it expands to."""
    coding = _header(reply, "content-encoding").strip().lower()
    if coding in ("", "identity"):
        yield from pieces
        return
    if coding not in ("gzip", "x-gzip", "deflate"):
        raise OracleError(
            f"expected a body in gzip, deflate or plain from {url}, got {shown(coding)}"
        )
    unpack = None
    try:
        for piece in pieces:
            if unpack is None:  # some servers send deflate without zlib's header, whose low bits 8
                bare = coding == "deflate" and piece[:1] and piece[0] & 15 != 8
                unpack = zlib.decompressobj(-zlib.MAX_WBITS if bare else zlib.MAX_WBITS | 32)
            while piece and not unpack.eof:
                yield unpack.decompress(piece, _PIECE)
                piece = unpack.unconsumed_tail
        complete = unpack is None or unpack.eof
    except zlib.error as error:
        raise Garbled(f"expected {coding} from {url}, got {shown(error)}") from None
    if not complete:
        raise Garbled(f"the {coding} body from {url} ends too early")


def _parsed(body: bytearray, url: str, limits: Limits) -> object:
    parts = sum(body.count(mark) for mark in b'[{",')
    if parts > limits.parts:
        raise OracleError(
            f"the answer of {url} has {parts:,} brackets, quotes and commas, more than "
            f"{limits.parts:,}: raise Limits(parts=)"
        )
    # One letter beyond ASCII may make Python keep the whole text at four bytes a letter.
    if len(body) > limits.body // 4 and not body.isascii():
        raise OracleError(
            f"an answer of over {limits.body // 4:,} bytes from {url} must be ASCII: "
            "raise Limits(body=)"
        )
    opening = shown(body[:200].decode(errors="replace")) or "nothing"
    try:
        text = body.decode()
        body.clear()  # both at once are not needed
        return json.loads(text, object_pairs_hook=_unique)
    except RecursionError:
        raise Garbled(f"the JSON from {url} is nested too deeply: {opening}") from None
    except UnicodeDecodeError:
        raise Garbled(f"expected JSON in UTF-8 from {url}, got {opening}") from None
    except ValueError as error:  # without its cause, which holds the whole text
        why = shown(error, 100)
        raise Garbled(f"expected JSON from {url}, got {opening} ({why})") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) < len(pairs):
        raise ValueError("a key twice in one object")
    return data


# Connections on which a whole request ends in time: httpx's own pool (httpcore) on sockets that
# take its time-outs for moments of time.monotonic(). A time-out would begin again with every byte.


class _NotHttp(httpcore.RemoteProtocolError):
    """Bytes that do not begin as HTTP does; asking again will not help."""


def _pool(address: httpx.URL, trust: ssl.SSLContext | None) -> httpcore.ConnectionPool:
    """Such connections; proxies of the environment are used."""
    context = (trust or httpx.create_ssl_context()) if address.scheme == "https" else None
    options: dict[str, Any] = {
        "ssl_context": context, "network_backend": _Network(), "keepalive_expiry": 5.0,
    }  # fmt: skip
    proxies = urllib.request.getproxies()
    proxy = proxies.get(address.scheme) or proxies.get("all")
    if not proxy or urllib.request.proxy_bypass(address.host):
        return httpcore.ConnectionPool(**options)
    through = _proxy(proxy)
    return httpcore.HTTPProxy(_route(through.url), through.raw_auth, **options)


def _expect_after_question(reply: httpcore.Response) -> None:
    """Sent after the answer before it, maybe a copy of that, an answer belongs to no question."""
    connection = reply.extensions.get("network_stream")
    if isinstance(connection, _Stream) and not connection.was_read:
        connection.close()
        raise httpcore.RemoteProtocolError("an answer that was there before its question")


def _header(reply: httpcore.Response, name: str) -> str:
    return httpx.Headers(reply.headers).get(name, "")


def _proxy(address: str) -> httpx.Proxy:
    with suppress(ValueError, httpx.InvalidURL):
        proxy = httpx.Proxy(address if "://" in address else f"http://{address}")
        if proxy.url.scheme in ("http", "https"):
            return proxy
    # Not shown: it may hold a password.
    raise InputError("the proxy in the environment must be an http or https address")


def _route(url: httpx.URL) -> httpcore.URL:
    return httpcore.URL(
        scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path
    )


def _left(end: float | None) -> float:
    """Seconds until the moment `end`."""
    left = math.inf if end is None else end - time.monotonic()
    if left <= 0:
        raise httpcore.ReadTimeout("the time of the request is over")
    return min(left, 1e6)


class _Network(httpcore.NetworkBackend):
    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        connect = httpcore.SyncBackend().connect_tcp
        return _Stream(connect(host, port, _left(timeout), local_address, socket_options))


class _Stream(httpcore.NetworkStream):
    """A connection whose reads and writes end at one moment, and whose answers begin as HTTP."""

    _OPENING = b"HTTP/1."

    def __init__(self, inner: httpcore.NetworkStream) -> None:
        self._inner = inner
        self._opening: bytes | None = None
        self.was_read = False  # since the last question

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        data = self._inner.read(max_bytes, _left(timeout))
        self.was_read = True
        if self._opening is not None:
            # HTTP/0.9 has no head: the parser would wait for the end of a first line for ever.
            self._opening += data[:80]
            if not self._opening.startswith(self._OPENING[: len(self._opening)]):
                raise _NotHttp(self._opening.decode(errors="replace"))
            if len(self._opening) >= len(self._OPENING):
                self._opening = None
        return data

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        for start in range(0, len(buffer), _WRITTEN):  # so that a slow reader meets the end too
            self._inner.write(buffer[start : start + _WRITTEN], _left(timeout))
        self._opening, self.was_read = b"", False

    def close(self) -> None:
        # So that a thread that waits for an answer does not wait any longer.
        with suppress(OSError, AttributeError):
            self._inner.get_extra_info("socket").shutdown(socket.SHUT_RDWR)
        self._inner.close()

    def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,
    ) -> httpcore.NetworkStream:
        return _Stream(self._inner.start_tls(ssl_context, server_hostname, _left(timeout)))

    def get_extra_info(self, info: str) -> Any:
        return self._inner.get_extra_info(info)
