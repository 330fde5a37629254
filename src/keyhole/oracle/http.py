"""JSON over HTTP from a server that nobody vouches for.

Whatever it sends (gigabytes, bombs, nothing, garbage, one byte a minute) ends as one line, in the
memory and time that `Limits` states. Redirects are never followed: no answer comes from another
address than the one that was asked.

httpx reads a body whole and unpacks it without a bound, so both are done here, in small pieces.
"""

from __future__ import annotations

import json
import math
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, fields
from email.utils import parsedate_to_datetime
from typing import Any, cast

import httpcore
import httpx

from keyhole.errors import InputError
from keyhole.oracle.protocol import OracleError
from keyhole.oracle.transport import NotHttp, Transport, moments

_PASSING = frozenset({429, 502, 503, 504})
_FAILURES = (httpcore.NetworkError, httpcore.ProtocolError, httpx.TransportError)
_PIECE = 2**14
Cut = Callable[[bytearray], object | None]  # takes what is needed out of a long body


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
                raise InputError(f"expected a limit {field.name} above 0, got {value}")


class Refused(OracleError):
    """A server that answered with an error; `status` is HTTP's number for it."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Http:
    """Asks for JSON and takes nothing else. Keeps its connections until closed."""

    def __init__(
        self, url: str, limits: Limits, *, retries: int, headers: dict[str, str] | None = None
    ) -> None:
        self.limits = limits
        self._retries = retries
        accept = {"Accept-Encoding": "gzip, deflate"}
        transport = Transport(_address(url))
        try:
            self._client = httpx.Client(transport=transport, headers=accept | (headers or {}))
        except (TypeError, UnicodeEncodeError):  # its text holds the header, maybe a secret
            raise InputError("expected headers as ASCII text, got something else") from None

    def close(self) -> None:
        self._client.close()

    def request(self, verb: str, url: str, content: dict[str, Any] | None = None) -> dict[str, Any]:
        """The JSON object that `url` answers with. Passing failures are tried again."""
        data = self.ask(verb, url, content)
        if not isinstance(data, dict):
            raise OracleError(f"expected a JSON object from {url}, got {shown(data)}")
        return cast("dict[str, Any]", data)

    def ask(
        self, verb: str, url: str, content: dict[str, Any] | None = None, cut: Cut | None = None
    ) -> object:
        """The same, be it an object, a list or anything else that JSON can say.

        `cut` may take what it needs out of the body; where it gives None, all of it is parsed.
        """
        end = time.monotonic() + self.limits.seconds
        trouble = ""
        for attempt in range(self._retries + 1):
            pause = min(0.5 * 2**attempt, 8.0)
            try:
                with self._stream(verb, url, content, end) as reply:
                    if reply.status_code not in _PASSING:
                        return self._read(reply, url, cut)
                    trouble, pause = _passing(reply, pause)
            except httpcore.TimeoutException:
                raise self._too_slow(url, "none in time") from None
            except httpcore.LocalProtocolError:  # its text holds the header, maybe a secret
                raise InputError("expected headers that HTTP allows, got others") from None
            except NotHttp as error:
                raise OracleError(f"expected HTTP from {url}, got {shown(error)}") from None
            except _FAILURES as error:
                trouble = shown(f"{type(error).__name__}: {error}", 200)
            if attempt == self._retries:
                break
            if time.monotonic() + pause > end:
                raise self._too_slow(url, trouble)
            time.sleep(pause)
        raise OracleError(f"expected an answer from {url}, got {trouble}")

    def _stream(
        self, verb: str, url: str, content: dict[str, Any] | None, end: float
    ) -> AbstractContextManager[httpx.Response]:
        return self._client.stream(verb, url, json=content, extensions={"timeout": moments(end)})

    def _too_slow(self, url: str, trouble: str) -> OracleError:
        seconds = f"{self.limits.seconds:g} s"
        return OracleError(
            f"expected an answer from {url} within {seconds}, got {trouble}: raise timeout="
        )

    def _read(self, reply: httpx.Response, url: str, cut: Cut | None) -> object:
        status = reply.status_code
        if 300 <= status < 400:
            where = shown(reply.headers.get("location", "nowhere"), 100)
            raise OracleError(
                f"expected an answer from {url}, got {status}, a redirect to {where}: "
                "redirects are not followed"
            )
        if not reply.is_success:
            opening = _opening(reply)
            raise Refused(f"expected an answer from {url}, got {status}: {opening}", status)
        body = _body(reply, url, self.limits.body)
        taken = None if cut is None else cut(body)
        return _parsed(body, url, self.limits) if taken is None else taken


def _address(url: str) -> httpx.URL:
    """The address, if a socket can be asked for it."""
    with suppress(httpx.InvalidURL, UnicodeError):
        address = httpx.URL(url)
        address.raw_host.decode().encode("idna")  # as the resolver will
        whole = not any(letter.isspace() for letter in url)
        if address.host and whole and 0 < (address.port or 80) < 2**16:
            return address
    raise InputError(f"expected a URL such as http://localhost:8080, got {shown(url, 200)}")


def shown(text: object, longest: int = 80) -> str:
    """What a server said, as part of one line: no line breaks, no control characters."""
    line = " ".join(str(text)[: 4 * longest].split())
    safe = "".join(letter if letter.isprintable() else "�" for letter in line)
    return safe if len(safe) <= longest else f"{safe[:longest]}…"


def _passing(reply: httpx.Response, pause: float) -> tuple[str, float]:
    """Why to ask again, and in how many seconds."""
    trouble, header = f"status {reply.status_code}", reply.headers.get("retry-after", "").strip()
    if header.isascii() and header.isdigit():
        asked = float(header[:20])
    else:
        try:
            asked = parsedate_to_datetime(header).timestamp() - time.time()
        except (ValueError, TypeError, OverflowError):
            return trouble, pause
    return f"{trouble} with Retry-After: {shown(header, 40)}", max(pause, asked)


def _body(reply: httpx.Response, url: str, limit: int) -> bytearray:
    """The whole body, unpacked, or an error as soon as it is known to be longer than `limit`."""
    body = bytearray()
    announced = int(reply.headers.get("content-length", 0))  # httpcore checks that it is a number
    if announced > limit:
        raise OracleError(
            f"expected at most {limit:,} bytes from {url}, got Content-Length {announced:,}: "
            "raise Limits(body=)"
        )
    for piece in _unpacked(_counted(reply, url, limit), reply, url):
        body += piece
        if len(body) > limit:
            raise OracleError(
                f"expected at most {limit:,} bytes from {url}, got more when unpacked: "
                "raise Limits(body=)"
            )
    return body


def _counted(reply: httpx.Response, url: str, limit: int) -> Iterator[bytes]:
    count = 0
    for piece in reply.iter_raw():
        count += len(piece)
        if count > limit:
            raise OracleError(
                f"expected at most {limit:,} bytes from {url}, got more: raise Limits(body=)"
            )
        yield piece


def _unpacked(pieces: Iterable[bytes], reply: httpx.Response, url: str) -> Iterator[bytes]:
    """The body as it was before gzip or deflate, in small pieces whatever it expands to."""
    coding = reply.headers.get("content-encoding", "identity").strip().lower()
    if coding == "identity":
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
        raise OracleError(f"expected {coding} from {url}, got {shown(error)}") from None
    if not complete:
        raise OracleError(f"expected a whole {coding} body from {url}, got only its beginning")


def _opening(reply: httpx.Response) -> str:
    """The first words of an answer that is an error; whatever is wrong with it does not matter."""
    body = bytearray()
    with suppress(OracleError, httpcore.TimeoutException, *_FAILURES):
        for piece in _unpacked(reply.iter_raw(), reply, ""):
            body += piece
            if len(body) > 1000:
                break
    return shown(body[:1000].decode(errors="replace"), 200) or "no text"


def _parsed(body: bytearray, url: str, limits: Limits) -> object:
    parts = sum(body.count(mark) for mark in b'[{",')
    if parts > limits.parts:
        raise OracleError(
            f"expected at most {limits.parts:,} brackets, quotes and commas from {url}, "
            f"got {parts:,}: raise Limits(parts=)"
        )
    # One letter beyond ASCII may make Python keep the whole text at four bytes a letter.
    if len(body) > limits.body // 4 and not body.isascii():
        raise OracleError(
            f"expected ASCII in an answer of over {limits.body // 4:,} bytes from {url}, "
            "got other characters: raise Limits(body=)"
        )
    opening = shown(body[:200].decode(errors="replace")) or "nothing"
    try:
        text = body.decode()
        body.clear()  # both at once are not needed
        data: object = json.loads(text, object_pairs_hook=_unique)
    except RecursionError:
        raise OracleError(f"expected JSON from {url}, got nesting without end: {opening}") from None
    except UnicodeDecodeError:
        raise OracleError(f"expected JSON in UTF-8 from {url}, got {opening}") from None
    except ValueError as error:  # without its cause, which holds the whole text
        why = shown(error, 100)
        raise OracleError(f"expected JSON from {url}, got {opening} ({why})") from None
    return data


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) < len(pairs):
        raise ValueError("a key twice in one object")
    return data
