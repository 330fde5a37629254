"""Connections to a server that nobody vouches for: each request ends in time.

httpx bounds the time between two bytes, so that a server can drip for ever. This is httpx's own
pool (httpcore) on sockets that know the moment when the whole request must end: write
`extensions={"timeout": moments(end)}` with a request, where `end` is a time.monotonic().
"""

from __future__ import annotations

import math
import socket
import ssl
import time
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any, cast

import httpcore
import httpx

from keyhole.core.errors import InputError

_PIECE = 2**16  # bytes written at once
_OPENING = b"HTTP/1."


def moments(end: float) -> dict[str, float]:
    """The time-outs of a request that must be over at `end`, as `_left` reads them."""
    return {"connect": end, "read": end, "write": end}


class NotHttp(httpcore.RemoteProtocolError):
    """Bytes that do not begin as HTTP does; asking again will not help."""


class Transport(httpx.BaseTransport):
    """httpx on a pool of connections that end in time; proxies of the environment are used.

    `trust` says whose certificates count, by default those of the usual authorities.
    """

    def __init__(self, address: httpx.URL, trust: ssl.SSLContext | None = None) -> None:
        context = (trust or httpx.create_ssl_context()) if address.scheme == "https" else None
        proxies = urllib.request.getproxies()
        proxy = proxies.get(address.scheme) or proxies.get("all")
        if not proxy or urllib.request.proxy_bypass(address.host):
            self._pool = httpcore.ConnectionPool(
                ssl_context=context, network_backend=_Network(), keepalive_expiry=5.0
            )
            return
        route = _proxy(proxy)
        self._pool = httpcore.HTTPProxy(
            proxy_url=_route(route.url),
            proxy_auth=route.raw_auth,
            ssl_context=context,
            network_backend=_Network(),
            keepalive_expiry=5.0,
        )

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        reply = self._pool.handle_request(
            httpcore.Request(
                method=request.method,
                url=_route(request.url),
                headers=request.headers.raw,
                content=cast("Iterable[bytes]", request.stream),
                extensions=request.extensions,
            )
        )
        connection = reply.extensions.get("network_stream")
        if isinstance(connection, _Stream) and not connection.heard:
            # Sent after the answer before it, maybe a copy of that: it belongs to no question.
            reply.close()
            connection.close()
            raise httpcore.RemoteProtocolError("an answer that was there before its question")
        body = _Body(cast("Any", reply.stream))
        return httpx.Response(
            reply.status, headers=reply.headers, stream=body, extensions=reply.extensions
        )

    def close(self) -> None:
        self._pool.close()


def _proxy(address: str) -> httpx.Proxy:
    with suppress(ValueError, httpx.InvalidURL):
        proxy = httpx.Proxy(address if "://" in address else f"http://{address}")
        if proxy.url.scheme in ("http", "https"):
            return proxy
    # Not shown: it may hold a password.
    raise InputError("expected an http or https proxy in the environment, got something else")


def _route(url: httpx.URL) -> httpcore.URL:
    return httpcore.URL(
        scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path
    )


class _Body(httpx.SyncByteStream):
    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __iter__(self) -> Iterator[bytes]:
        yield from self._stream

    def close(self) -> None:
        self._stream.close()


def _left(end: float | None) -> float:
    """Seconds until `end`: what httpcore hands down as time-outs are moments here.

    A time-out would begin again with every byte; a moment does not.
    """
    left = math.inf if end is None else end - time.monotonic()
    if left <= 0:
        raise httpcore.ReadTimeout("the time of the request is over")
    return min(left, 1e6)


class _Network(httpcore.NetworkBackend):
    def __init__(self) -> None:
        self._sockets = httpcore.SyncBackend()

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        left = _left(timeout)
        return _Stream(self._sockets.connect_tcp(host, port, left, local_address, socket_options))


class _Stream(httpcore.NetworkStream):
    """A connection whose reads and writes end together, and whose answers begin as HTTP."""

    def __init__(self, inner: httpcore.NetworkStream) -> None:
        self._inner = inner
        self._opening: bytes | None = None
        self.heard = False  # anything since the last question

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        data = self._inner.read(max_bytes, _left(timeout))
        self.heard = True
        if self._opening is not None:
            # HTTP/0.9 has no head: the parser would wait for the end of a first line for ever.
            self._opening += data[:80]
            if not self._opening.startswith(_OPENING[: len(self._opening)]):
                raise NotHttp(self._opening.decode(errors="replace"))
            if len(self._opening) >= len(_OPENING):
                self._opening = None
        return data

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        for start in range(0, len(buffer), _PIECE):  # so that a slow reader meets the end too
            self._inner.write(buffer[start : start + _PIECE], _left(timeout))
        self._opening, self.heard = b"", False

    def close(self) -> None:
        # So that a thread that waits for an answer here does not wait any longer.
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
