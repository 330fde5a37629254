"""A client for JSON over HTTP that does not trust the server.

`Http.ask` takes an address and a JSON body, and returns what the server answers,
parsed.

Whatever a server sends (gigabytes, zip bombs, garbage, nothing, one byte a minute), a
request ends in an answer or in a one-line error, within the memory and time that
`Limits` states. Redirects are not followed. Secrets that were sent are removed from all
that the server sends.

The client uses httpcore, the transport of httpx, directly. httpx would limit the time
between two bytes and not the time of a request (here `_Stream` does), would read and
decompress bodies without a limit (here `_body`), and its retries know neither a
deadline nor Retry-After (here `Http.ask`).
"""

from __future__ import annotations

import base64
import itertools
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
from dataclasses import dataclass, fields, replace
from email.utils import parsedate_to_datetime
from functools import partial
from typing import Any, TypeVar, cast
from urllib.parse import unquote, urlsplit

import httpcore
import httpx

from keyhole.core.endpoint import EndpointOptions, authorizes, without_password
from keyhole.core.errors import InputError, expect_number
from keyhole.core.files import expect_file, unique_keys
from keyhole.core.text import inert
from keyhole.oracle.protocol import OracleError

_BUSY_STATUSES = frozenset({429, 502, 503, 504})
_NO_SUCH_ROUTE = (404, 405, 501)
# seconds between attempts; each pause doubles the last one
_FIRST_PAUSE = 0.1
_MAX_PAUSE = 2.0
# seconds between attempts to connect to a server that answered before
_RESTART_PAUSE = 1.0
_MAX_INTERNAL_ERRORS = 3  # statuses 500 in a row that are retried
_LARGE = 2**20  # bytes; of the answers that are larger, only one at a time is in memory
_DECOMPRESSED_BYTES = 2**14  # per step of decompression
# per write, so that the deadline also ends a request that is read slowly
_WRITTEN_BYTES = 2**16
_MIN_SECRET = 8  # characters; a shorter word may occur in any answer
_FAILURES = (httpcore.NetworkError, httpcore.ProtocolError)
FastParse = Callable[[bytearray], object | None]

T = TypeVar("T")


@dataclass(frozen=True)
class Limits:
    """Bounds on what a server may cost; an error names the one that a server exceeds.

    - `seconds`: one request, from connecting to the last byte, with its retries and their pauses.
    - `body`: bytes of one answer, both as sent and as decompressed.
    - `parts`: opening brackets, quotes and commas in one answer. Python needs up to 60 bytes for
      what each of them stands for, so the default keeps an answer below 500 MB of
      memory.
    - `dim`: the dimension that a server may state by itself, and the width of its answers.
    """

    seconds: float = 60.0
    body: int = 64 * 2**20
    parts: int = 4_000_000
    dim: int = 16_384

    def __post_init__(self) -> None:
        for field in fields(self):
            expect_number(f"a limit {field.name}", getattr(self, field.name), above=0)


class Refused(OracleError):
    """The server answered with the error `status`; `text` is the beginning of its answer."""

    def __init__(
        self,
        message: str,
        status: int,
        text: str = "",
    ) -> None:
        super().__init__(message)
        self.status = status
        self.text = text


class Garbled(OracleError):
    """The server sent something that is not an answer; another attempt may bring one."""


class _Transient(Exception):
    """An attempt failed, and another one may succeed.

    `wait` is the number of seconds that the server asked for. `restarting` says that
    nothing listens at the address of a server that answered before.
    """

    def __init__(
        self,
        why: str,
        wait: float | None = None,
        restarting: bool = False,
    ) -> None:
        super().__init__(why)
        self.wait = wait
        self.restarting = restarting


class Http:
    """Sends requests to one server and reads JSON answers. Keeps its connections until closed.

    A user and a password in `url` are sent as a header. So are the secrets of
    `options`, such as KEYHOLE_API_KEY, unless `key` is False. `headers` are sent too,
    and take precedence.

    Transient failures (no connection, the statuses 429, 500 and 502 to 504, garbled
    answers) are retried `retries` times, with growing pauses. A server that answered
    before and then stopped listening is retried until the time of the request is over.
    """

    def __init__(
        self,
        url: str,
        options: EndpointOptions,
        *,
        retries: int,
        limits: Limits | None = None,
        key: bool = True,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        limits = limits or Limits()
        seconds = limits.seconds if options.timeout is None else options.timeout
        self.limits = replace(limits, seconds=seconds)
        self._retries = retries
        self._rate_limit = _RateLimit(options.rate)
        self._answered = self._closed = False
        self._large_answer = threading.Lock()  # held while a large answer is in memory
        public, password = split_password(url)
        if password and authorizes(options.headers or {}):
            raise InputError(
                "the address holds a password and --header Authorization another: give one of them"
            )
        sent = password | dict(headers or {})
        secrets = options.secrets() if key else {}
        if authorizes(sent):
            secrets.pop("Authorization", None)
        sent = secrets | sent
        # The values of headers and the words in them (as after `Bearer`), longest
        # first.
        words = [word for value in sent.values() for word in (value, *value.split())]
        secret = {
            word.encode("utf-8", "replace")
            for word in words
            if len(word) >= _MIN_SECRET
        }
        self._secrets = sorted(secret, key=len, reverse=True)
        usual = {
            "Accept-Encoding": "gzip, deflate",
            "Content-Type": "application/json",
            "User-Agent": "keyhole",
        }
        self._pool = _connection_pool(_address(public), options)
        try:
            self._headers = httpx.Headers(usual | sent)
        except (TypeError, UnicodeEncodeError):  # its message may quote a secret
            raise InputError("headers must be ASCII text") from None

    def close(self) -> None:
        """End all connections; threads that wait for an answer make no further attempts."""
        self._closed = True
        self._pool.close()

    def request(
        self,
        verb: str,
        url: str,
        content: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return the JSON object that `url` answers with."""
        return self.ask(verb, url, content, lambda data: as_object(data, url))

    def ask(
        self,
        verb: str,
        url: str,
        content: dict[str, Any] | None = None,
        read: Callable[[object], T] = lambda data: cast("T", data),
        fast_parse: FastParse | None = None,
    ) -> T:
        """Return what `read` makes of the JSON that `url` answers with.

        If `read` raises Garbled, the request is sent again on another connection.
        `fast_parse` may take what it needs out of the body; if it returns None, the
        body is parsed as JSON.
        """
        body: bytes | None = None
        if content is not None:
            body = json.dumps(content, allow_nan=False).encode()
        self._rate_limit.wait()
        deadline = time.monotonic() + self.limits.seconds
        handle = partial(
            self._read, url=url, deadline=deadline, read=read, fast_parse=fast_parse
        )
        internal_errors = 0
        for attempt in itertools.count():
            if self._closed:
                break
            is_last = attempt >= self._retries
            try:
                return self._attempt(verb, url, body, deadline, handle)
            except Garbled as error:
                if is_last:
                    raise
                trouble = _Transient(str(error))
                internal_errors = 0
            except Refused as error:
                internal_errors += 1
                hopeless = is_last or internal_errors > _MAX_INTERNAL_ERRORS
                if error.status != 500 or hopeless:
                    raise
                trouble = _Transient("status 500")
            except _Transient as failure:
                if is_last and not failure.restarting:
                    raise OracleError(f"no answer from {url}: {failure}") from None
                trouble = failure
                internal_errors = 0
            self._wait_to_retry(url, trouble, attempt, deadline)
        raise OracleError(f"no answer from {url}: the connection was closed")

    def _wait_to_retry(
        self,
        url: str,
        trouble: _Transient,
        attempt: int,
        deadline: float,
    ) -> None:
        """Sleep until the next attempt; raise if that would be after the deadline."""
        pause = min(_FIRST_PAUSE * 2 ** min(attempt, 10), _MAX_PAUSE)
        if trouble.restarting:
            pause = _RESTART_PAUSE
        pause = max(pause, trouble.wait or 0.0)
        if time.monotonic() + pause > deadline:
            raise self._too_slow(url, str(trouble))
        if trouble.wait is not None:  # the server asks all its clients to wait
            self._rate_limit.hold(pause)
        time.sleep(pause)
        self._rate_limit.wait()

    def expect_ready(self, url: str) -> None:
        """Wait until `url` answers that the server is ready, if the server has such a route."""
        try:
            self.ask("GET", url, fast_parse=lambda _: ())  # the body need not be JSON
        except Refused as error:
            if error.status not in _NO_SUCH_ROUTE:
                raise

    def _attempt(
        self,
        verb: str,
        url: str,
        body: bytes | None,
        deadline: float,
        handle: Callable[[httpcore.Response], T],
    ) -> T:
        """Send the request once, and return what `handle` makes of the response.

        Raise Garbled, _Transient, or Refused with status 500, if another attempt may
        succeed.
        """
        timeouts = dict.fromkeys(
            ("connect", "read", "write"), deadline
        )  # see `_Stream`
        try:
            with self._pool.stream(
                verb,
                str(httpx.URL(url)),
                headers=self._headers.raw,
                content=body,
                extensions={"timeout": timeouts},
            ) as reply:
                _expect_after_request(reply)
                if reply.status in _BUSY_STATUSES:
                    raise self._busy(reply)
                try:
                    result = handle(reply)
                except Garbled:
                    # A second copy of this answer would be read as the answer to the
                    # next request.
                    with suppress(*_FAILURES, OSError):
                        reply.extensions["network_stream"].close()
                    raise
                self._answered = True
                return result
        except httpcore.TimeoutException:
            raise self._too_slow(url) from None
        except httpcore.LocalProtocolError:  # its message may quote a secret
            raise InputError("HTTP does not allow these headers") from None
        except _NotHttp as error:
            raise OracleError(
                f"expected HTTP from {url}, got {self._excerpt(error)}"
            ) from None
        except _FAILURES as error:
            connecting = isinstance(error, httpcore.ConnectError)
            if connecting:
                _expect_trusted(error, url)
            why = self._excerpt(f"{type(error).__name__}: {error}")
            restarting = connecting and self._answered and self._retries > 0
            raise _Transient(why, restarting=restarting) from None

    def _busy(self, reply: httpcore.Response) -> _Transient:
        header = _header(reply, "retry-after").strip()
        wait = _retry_after(header)
        asked = ""
        if wait is not None:
            asked = f" with Retry-After: {self._excerpt(header, 40)}"
        return _Transient(f"status {reply.status}{asked}", wait)

    def _too_slow(self, url: str, trouble: str = "") -> OracleError:
        why = f" ({trouble})" if trouble else ""
        return OracleError(
            f"no answer from {url} within {self.limits.seconds:g} s{why}: raise --endpoint timeout"
        )

    def _read(
        self,
        reply: httpcore.Response,
        url: str,
        deadline: float,
        read: Callable[[object], T],
        fast_parse: FastParse | None,
    ) -> T:
        """Return what `read` makes of a response, whose memory and time are bounded."""
        if not 200 <= reply.status < 300:
            raise self._refusal(reply, url)
        is_large = False
        body = bytearray()
        try:
            for piece in _body(reply, url, self.limits.body):
                body += piece
                if len(body) > _LARGE and not is_large:
                    left = max(0.0, deadline - time.monotonic())
                    is_large = self._large_answer.acquire(timeout=left)
                    if not is_large:
                        raise self._too_slow(url)
            body = self._redacted(body)
            taken = None if fast_parse is None else fast_parse(body)
            return read(_parsed(body, url, self.limits) if taken is None else taken)
        finally:
            if is_large:
                self._large_answer.release()

    def _refusal(self, reply: httpcore.Response, url: str) -> OracleError:
        status = reply.status
        if 300 <= status < 400:
            target = self._excerpt(_header(reply, "location") or "nowhere", 100)
            return OracleError(
                f"{url} redirects to {target} (status {status}): redirects are not followed"
            )
        text = self._first_words(reply)
        return Refused(f"{url} answers with status {status}: {text}", status, text)

    def _first_words(self, reply: httpcore.Response) -> str:
        """Return the beginning of an answer, and ignore errors in it."""
        body = bytearray()
        with suppress(OracleError, httpcore.TimeoutException, *_FAILURES):
            for piece in _decompressed(reply.iter_stream(), reply, ""):
                body += piece
                if len(body) > 1000:
                    break
        return self._excerpt(body.decode(errors="replace").strip()) or "no text"

    def _redacted(self, body: bytearray) -> bytearray:
        for secret in self._secrets:
            if secret in body:
                body = body.replace(secret, b"(secret)")
        return body

    def _excerpt(self, text: object, max_length: int = 200) -> str:
        """Return what a server sent as part of a line, without secrets."""
        body = bytearray(str(text), "utf-8", "replace")
        return shown(self._redacted(body).decode(), max_length)


def as_object(data: object, url: str) -> dict[str, Any]:
    """Return `data` if it is a JSON object."""
    if not isinstance(data, dict):
        raise OracleError(f"expected a JSON object from {url}, got {shown(data)}")
    return data


def shown(text: object, max_length: int = 80) -> str:
    """Return what a server sent as part of a line: no line breaks, no control characters."""
    return inert(str(text), max_length)


def split_password(url: str) -> tuple[str, dict[str, str]]:
    """Return an address without its user and password, and the header that carries these.

    Identities, ledgers, findings and errors show only the address.
    """
    public = without_password(url)
    if public == url:
        return url, {}
    try:
        user = urlsplit(url).username or ""
        password = urlsplit(url).password or ""
    except ValueError:
        return public, {}
    pair = f"{unquote(user)}:{unquote(password)}".encode()
    return public, {"Authorization": f"Basic {base64.b64encode(pair).decode()}"}


def _expect_trusted(error: BaseException, url: str) -> None:
    """Raise if TLS failed: another attempt would fail in the same way."""
    # The pool raises it again without its cause.
    cause = error.__cause__ or error.__context__
    if isinstance(cause, ssl.SSLCertVerificationError):
        why = shown(cause.verify_message, 100)
        raise OracleError(
            f"the certificate of {url} is not trusted ({why}): give --ca FILE with its authority, "
            "or --insecure"
        ) from None
    if isinstance(cause, ssl.SSLError):
        raise OracleError(
            f"expected TLS from {url}, got {shown(cause.reason or cause, 100)}"
        )


def _address(url: str) -> httpx.URL:
    """Return the address if a socket can connect to it."""
    with suppress(httpx.InvalidURL, UnicodeError):
        address = httpx.URL(url)
        address.raw_host.decode().encode("idna")  # as the resolver will
        has_space = any(letter.isspace() for letter in url)
        if address.host and not has_space and 0 < (address.port or 80) < 2**16:
            return address
    raise InputError(
        f"expected a URL such as http://localhost:8080, got {shown(url, 200)}"
    )


def _retry_after(header: str) -> float | None:
    """Return the seconds that Retry-After states, as a number or as a date; None if it does not."""
    if header.isascii() and header.isdigit():
        return float(header[:20])
    try:
        return parsedate_to_datetime(header).timestamp() - time.time()
    except (ValueError, TypeError, OverflowError):
        return None


class _RateLimit:
    """Spaces requests evenly, at most `per_second` a second over all threads that share it."""

    def __init__(self, per_second: float | None) -> None:
        self._interval = 0.0 if per_second is None else 1.0 / per_second
        self._next = 0.0  # time.monotonic() of the next free turn
        self._lock = threading.Lock()

    def wait(self) -> None:
        """Sleep until it is this request's turn."""
        with self._lock:
            turn = max(self._next, time.monotonic())
            self._next = turn + self._interval
        time.sleep(max(0.0, turn - time.monotonic()))

    def hold(self, seconds: float) -> None:
        """Give no turn for this many seconds."""
        with self._lock:
            self._next = max(self._next, time.monotonic() + seconds)


# Bodies, read in the memory that `Limits` states: bounded, decompressed in small
# pieces, parsed.


def _body(
    reply: httpcore.Response,
    url: str,
    limit: int,
) -> Iterator[bytes]:
    """Yield the decompressed body; raise as soon as it is known to be longer than `limit`."""

    def bounded(pieces: Iterable[bytes], how: str) -> Iterator[bytes]:
        count = 0
        for piece in pieces:
            count += len(piece)
            if count > limit:
                raise too_long(how)
            yield piece

    def too_long(how: str) -> OracleError:
        return OracleError(
            f"the answer of {url} has more than {limit:,} bytes{how}: raise Limits(body=)"
        )

    # httpcore checks that it is a number.
    announced = int(_header(reply, "content-length") or 0)
    if announced > limit:
        raise too_long(f" (Content-Length {announced:,})")
    sent = bounded(reply.iter_stream(), "")
    return bounded(_decompressed(sent, reply, url), " when unpacked")


def _decompressed(
    pieces: Iterable[bytes],
    reply: httpcore.Response,
    url: str,
) -> Iterator[bytes]:
    """Yield the body before gzip or deflate, in pieces that are small even for a zip bomb."""
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
            if unpack is None:
                # Some servers send deflate without the header of zlib, whose low four
                # bits are 8.
                bare = coding == "deflate" and piece[:1] and piece[0] & 15 != 8
                bits = -zlib.MAX_WBITS if bare else zlib.MAX_WBITS | 32
                unpack = zlib.decompressobj(bits)
            while piece and not unpack.eof:
                yield unpack.decompress(piece, _DECOMPRESSED_BYTES)
                piece = unpack.unconsumed_tail
    except zlib.error as error:
        raise Garbled(f"expected {coding} from {url}, got {shown(error)}") from None
    if unpack is not None and not unpack.eof:
        raise Garbled(f"the {coding} body from {url} ends too early")


def _parsed(
    body: bytearray,
    url: str,
    limits: Limits,
) -> object:
    """Return the JSON of a body, and clear the body; refuse one that would take too much memory."""
    parts = sum(body.count(mark) for mark in b'[{",')
    if parts > limits.parts:
        raise OracleError(
            f"the answer of {url} has {parts:,} brackets, quotes and commas, more than "
            f"{limits.parts:,}: raise Limits(parts=)"
        )
    # One character beyond ASCII may make Python store the whole text at four bytes a
    # character.
    if len(body) > limits.body // 4 and not body.isascii():
        raise OracleError(
            f"an answer of over {limits.body // 4:,} bytes from {url} must be ASCII: "
            "raise Limits(body=)"
        )
    opening = shown(body[:200].decode(errors="replace")) or "nothing"
    try:
        text = body.decode()
        body.clear()  # the text alone is needed, and both may be large
        return json.loads(text, object_pairs_hook=unique_keys)
    except RecursionError:
        raise Garbled(f"the JSON from {url} is nested too deeply: {opening}") from None
    except UnicodeDecodeError:
        raise Garbled(f"expected JSON in UTF-8 from {url}, got {opening}") from None
    except ValueError as error:  # not raised from it: it holds the whole text
        why = shown(error, 100)
        raise Garbled(f"expected JSON from {url}, got {opening} ({why})") from None


# Connections whose requests end at a deadline. httpcore applies a timeout to each read
# and write, so that it would begin again with every byte. Here the timeout is the
# deadline itself, a moment of time.monotonic(), and `_Stream` computes what is left
# until then.


class _NotHttp(httpcore.RemoteProtocolError):
    """The answer does not begin as HTTP does; another attempt will not help."""


def _connection_pool(
    address: httpx.URL, options: EndpointOptions
) -> httpcore.ConnectionPool:
    """Return a pool of such connections, through the environment's proxy if there is one."""
    secure = address.scheme == "https" or options.ca is not None
    settings: dict[str, Any] = {
        "ssl_context": _ssl_context(options) if secure else None,
        "network_backend": _Network(),
        "keepalive_expiry": 5.0,
    }
    proxies = urllib.request.getproxies()
    proxy = proxies.get(address.scheme) or proxies.get("all")
    if not proxy or urllib.request.proxy_bypass(address.host):
        return httpcore.ConnectionPool(**settings)
    with suppress(ValueError, httpx.InvalidURL):
        through = httpx.Proxy(proxy if "://" in proxy else f"http://{proxy}")
        if through.url.scheme in ("http", "https"):
            return httpcore.HTTPProxy(str(through.url), through.raw_auth, **settings)
    # The address is not shown, since it may hold a password.
    raise InputError("the proxy in the environment must be an http or https address")


def _ssl_context(options: EndpointOptions) -> ssl.SSLContext:
    """Return the context that decides which certificates are trusted."""
    if options.insecure:
        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        return context
    if options.ca is None:
        return httpx.create_ssl_context()
    expect_file(options.ca, "a file of certificates")
    try:
        return ssl.create_default_context(cafile=options.ca)
    except (ssl.SSLError, OSError, ValueError) as error:
        raise InputError(
            f"cannot read PEM certificates from {options.ca}: {error}"
        ) from error


def _expect_after_request(reply: httpcore.Response) -> None:
    """Refuse an answer that was sent before its request.

    A server that sends an answer twice leaves the copy on the connection. It would be
    read as the answer to the next request.
    """
    connection = reply.extensions.get("network_stream")
    if isinstance(connection, _Stream) and not connection.was_read:
        connection.close()
        raise httpcore.RemoteProtocolError(
            "an answer that was there before its question"
        )


def _header(reply: httpcore.Response, name: str) -> str:
    return httpx.Headers(reply.headers).get(name, "")


def _seconds_left(deadline: float | None) -> float:
    left = math.inf if deadline is None else deadline - time.monotonic()
    if left <= 0:
        raise httpcore.ReadTimeout("the time of the request is over")
    return min(left, 1e6)


class _Network(httpcore.NetworkBackend):
    """Opens connections as `_Stream`; `timeout` is a deadline here too."""

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        connect = httpcore.SyncBackend().connect_tcp
        return _Stream(
            connect(host, port, _seconds_left(timeout), local_address, socket_options)
        )


class _Stream(httpcore.NetworkStream):
    """A connection whose timeouts are deadlines, and whose answers must begin as HTTP does."""

    _OPENING = b"HTTP/1."

    def __init__(self, inner: httpcore.NetworkStream) -> None:
        self._inner = inner
        # the first bytes of an answer, until they are checked
        self._opening: bytes | None = None
        self.was_read = False  # since the last write

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        data = self._inner.read(max_bytes, _seconds_left(timeout))
        self.was_read = True
        if self._opening is not None:
            # HTTP/0.9 has no head: the parser would wait forever for the end of a first
            # line.
            self._opening += data[:80]
            if not self._opening.startswith(self._OPENING[: len(self._opening)]):
                raise _NotHttp(self._opening.decode(errors="replace"))
            if len(self._opening) >= len(self._OPENING):
                self._opening = None
        return data

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        for start in range(0, len(buffer), _WRITTEN_BYTES):
            self._inner.write(
                buffer[start : start + _WRITTEN_BYTES], _seconds_left(timeout)
            )
        self._opening = b""
        self.was_read = False

    def close(self) -> None:
        # Shut down first: that wakes a thread that waits for an answer.
        with suppress(OSError, AttributeError):
            self._inner.get_extra_info("socket").shutdown(socket.SHUT_RDWR)
        self._inner.close()

    def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,
    ) -> httpcore.NetworkStream:
        return _Stream(
            self._inner.start_tls(ssl_context, server_hostname, _seconds_left(timeout))
        )

    def get_extra_info(self, info: str) -> Any:
        return self._inner.get_extra_info(info)
