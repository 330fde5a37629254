"""What a server sent, read in the memory that `Limits` states: bounded, unpacked, parsed.

httpx reads a body whole and unpacks it without a bound, so both are done here, in small pieces.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any

import httpcore
import httpx

from keyhole.core.errors import InputError
from keyhole.oracle.protocol import OracleError

FAILURES = (httpcore.NetworkError, httpcore.ProtocolError, httpx.TransportError)
_PIECE = 2**14


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


class Garbled(OracleError):
    """Something that is no answer, where another try may bring one."""


def shown(text: object, longest: int = 80) -> str:
    """What a server said, as part of one line: no line breaks, no control characters."""
    line = " ".join(str(text)[: 4 * longest].split())
    safe = "".join(letter if letter.isprintable() else "�" for letter in line)
    return safe if len(safe) <= longest else f"{safe[:longest]}…"


def body_of(reply: httpx.Response, url: str, limit: int, grown: Callable[[int], None]) -> bytearray:
    """The whole body, unpacked, or an error as soon as it is known to be longer than `limit`.

    `grown` is told how long it is so far.
    """
    body = bytearray()
    announced = int(reply.headers.get("content-length", 0))  # httpcore checks that it is a number
    if announced > limit:
        raise OracleError(
            f"expected at most {limit:,} bytes from {url}, got Content-Length {announced:,}: "
            "raise Limits(body=)"
        )
    for piece in _unpacked(_counted(reply, url, limit), reply, url):
        body += piece
        grown(len(body))
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
        raise Garbled(f"expected {coding} from {url}, got {shown(error)}") from None
    if not complete:
        raise Garbled(f"expected a whole {coding} body from {url}, got only its beginning")


def opening_of(reply: httpx.Response, hidden: Callable[[bytearray], bytearray]) -> str:
    """The first words of an answer that is an error; whatever is wrong with it does not matter.

    `hidden` takes secrets out, before anything is cut off in their middle.
    """
    body = bytearray()
    with suppress(OracleError, httpcore.TimeoutException, *FAILURES):
        for piece in _unpacked(reply.iter_raw(), reply, ""):
            body += piece
            if len(body) > 1000:
                break
    return shown(hidden(body).decode(errors="replace"), 200) or "no text"


def parsed(body: bytearray, url: str, limits: Limits) -> object:
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
        raise Garbled(f"expected JSON from {url}, got nesting without end: {opening}") from None
    except UnicodeDecodeError:
        raise Garbled(f"expected JSON in UTF-8 from {url}, got {opening}") from None
    except ValueError as error:  # without its cause, which holds the whole text
        why = shown(error, 100)
        raise Garbled(f"expected JSON from {url}, got {opening} ({why})") from None
    return data


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) < len(pairs):
        raise ValueError("a key twice in one object")
    return data
