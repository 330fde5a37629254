"""A server on the loopback address that answers correctly until it is told to be hostile.

Large bodies are sent repeatedly from a small buffer. The server and its threads end
with the `with` block, which fails if a thread does not end, or if a client connected to
the neighbouring port.
"""

from __future__ import annotations

import json
import socket
import struct
import threading
import zlib
from collections.abc import Callable
from contextlib import suppress

DIM = 4
MODEL = "m"
METADATA = {
    "name": MODEL,
    "inputs": [{"name": "x", "datatype": "FP64", "shape": [-1, -1, DIM]}],
}

Behaviour = Callable[["Wire"], None]


class Wire:
    """One connection, as a behaviour sees it."""

    def __init__(self, connection: socket.socket, server: Server) -> None:
        self._connection = connection
        self._server = server
        self.next_door = f"127.0.0.1:{server.next_door}"
        self.address = server.url

    def send(self, data: bytes) -> None:
        self._connection.sendall(data)

    def flood(self, piece: bytes, count: int = 2**62) -> None:
        """Send `piece` `count` times, or until the client or the server is stopped."""
        for _ in range(count):
            if self._server.stopped.is_set():
                return
            self.send(piece)

    def drip(self, data: bytes, pause: float = 0.05) -> None:
        for byte in data:
            self.send(bytes([byte]))
            if self._server.stopped.wait(pause):
                return

    def hold(self) -> None:
        """Send nothing more, but keep the connection open."""
        self._server.stopped.wait(60)

    def reset(self) -> None:
        self._connection.setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
        )
        self._connection.close()


class Server:
    """`behave` takes over at `where`: metadata, infer (the first inference), later, or none."""

    def __init__(self, behave: Behaviour, where: str, *, reads: bool = True) -> None:
        self._behave = behave
        self._where = where
        self._reads = reads
        self.stopped = threading.Event()
        self.inferences = 0
        self._connections: list[socket.socket] = []
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Server:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._next_door = socket.create_server(("127.0.0.1", 0))
        self.next_door = self._next_door.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._start(self._accept)
        return self

    def __exit__(self, *failure: object) -> None:
        self.stopped.set()
        for connection in [self._listener, *self._connections]:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        for thread in self._threads:
            thread.join(10)
        self._next_door.settimeout(0)
        with self._next_door, suppress(BlockingIOError):
            self._next_door.accept()
            raise AssertionError("a client connected to the neighbouring port")
        assert not any(thread.is_alive() for thread in self._threads)

    def _start(self, work: Callable[..., None], *arguments: object) -> None:
        self._threads.append(threading.Thread(target=work, args=arguments, daemon=True))
        self._threads[-1].start()

    def _accept(self) -> None:
        with suppress(OSError):
            while not self.stopped.is_set():
                connection, _ = self._listener.accept()
                self._connections.append(connection)
                self._start(self._converse, connection)

    @property
    def connections(self) -> int:
        return len(self._connections)

    def _hostile(self, verb: bytes) -> bool:
        if self._where == "metadata":
            return verb == b"GET"
        return self.inferences >= {"infer": 1, "later": 2, "none": 2**62}[self._where]

    def _converse(self, connection: socket.socket) -> None:
        wire = Wire(connection, self)
        # `with connection` ends the stream, for which a client may wait.
        with suppress(OSError), connection, connection.makefile("rb") as requests:
            while head := requests.readline():
                verb = head.split()[0]
                self.inferences += verb == b"POST"
                hostile = self._hostile(verb)
                if hostile and not self._reads:
                    self._behave(wire)
                    return
                length = 0
                while (line := requests.readline().strip().lower()) != b"":
                    if line.startswith(b"content-length:"):
                        length = int(line.split(b":")[1])
                question = requests.read(length)
                if len(question) < length:
                    return  # the client gave up, maybe because of another request
                if hostile:
                    self._behave(wire)
                    return
                answer(json.dumps(METADATA if verb == b"GET" else _scores(question)))(
                    wire
                )


def _scores(question: bytes) -> dict[str, object]:
    count = json.loads(question)["inputs"][0]["shape"][0]
    return {"model_name": MODEL, "outputs": [{"shape": [count], "data": [0.5] * count}]}


def head(status: int = 200, *fields: str) -> bytes:
    return "\r\n".join([f"HTTP/1.1 {status} Of Course", *fields, "", ""]).encode(
        "latin-1"
    )


def answer(
    body: str | bytes, status: int = 200, *fields: str, coding: str = ""
) -> Behaviour:
    """Return a well-formed HTTP answer with any body."""
    content = body.encode() if isinstance(body, str) else body
    if coding:
        content = packed(content, coding)
        fields = (f"Content-Encoding: {coding}", *fields)
    return raw(head(status, *fields, f"Content-Length: {len(content)}"), content)


def raw(*pieces: bytes) -> Behaviour:
    def behave(wire: Wire) -> None:
        for piece in pieces:
            wire.send(piece)

    return behave


def packed(content: bytes, coding: str) -> bytes:
    packer = zlib.compressobj(wbits=31 if coding == "gzip" else 15)
    return packer.compress(content) + packer.flush()


def flood(
    status: int, framing: str, size: int = 2**62, opening: bytes = b'{"a": "'
) -> Behaviour:
    """Send a body of `size` bytes, framed by its length, its end, chunks, or one-byte chunks."""
    piece = b"a" * 2**16

    def behave(wire: Wire) -> None:
        if framing == "length":
            wire.send(head(status, f"Content-Length: {size}") + opening)
        elif framing == "end":
            wire.send(head(status, "Connection: close") + opening)
        else:
            wire.send(head(status, "Transfer-Encoding: chunked"))
        bytewise = b"1\r\na\r\n" * 2**12
        chunk = {"chunks": b"10000\r\n" + piece + b"\r\n", "bytewise": bytewise}.get(
            framing, piece
        )
        wire.flood(chunk, size // 2**16)

    return behave


def bomb(status: int, coding: str, megabytes: int, framing: str = "end") -> Behaviour:
    """Send a body that decompresses to megabytes of spaces, from a block of about a kilobyte."""
    packer = zlib.compressobj(9, wbits=-15)
    block = packer.compress(b" " * 2**20) + packer.flush(zlib.Z_FULL_FLUSH)
    start = {
        "gzip": b"\x1f\x8b\x08\0\0\0\0\0\0\xff",
        "deflate": b"\x78\xda",
        "bare": b"",
    }[coding]
    name = "deflate" if coding == "bare" else coding
    chunked = framing == "chunks"

    def framed(data: bytes) -> bytes:
        if chunked and data:
            return f"{len(data):x}\r\n".encode() + data + b"\r\n"
        return data

    def behave(wire: Wire) -> None:
        how = "Transfer-Encoding: chunked" if chunked else "Connection: close"
        wire.send(head(status, f"Content-Encoding: {name}", how) + framed(start))
        wire.flood(framed(block), megabytes)

    return behave


def repeated(opening: bytes, item: bytes, count: int, closing: bytes) -> Behaviour:
    """Send a body of `count` items, of which 4,096 are in memory at a time."""
    rounds, rest = divmod(count, 2**12)
    length = len(opening) + len(item) * count + len(closing)

    def behave(wire: Wire) -> None:
        wire.send(head(200, f"Content-Length: {length}") + opening)
        wire.flood(item * 2**12, rounds)
        wire.send(item * rest + closing)

    return behave


def slowly(*pieces: bytes, then: bytes = b"a") -> Behaviour:
    """Send the pieces at once, then one byte after another without an end."""

    def behave(wire: Wire) -> None:
        raw(*pieces)(wire)
        wire.drip(then * 2**14)

    return behave


def held(*pieces: bytes) -> Behaviour:
    """Send the pieces and keep the connection open."""

    def behave(wire: Wire) -> None:
        raw(*pieces)(wire)
        wire.hold()

    return behave


def redirect(status: int, target: str) -> Behaviour:
    """Redirect to `target`: {next_door} is the neighbouring port, {address} this server."""

    def behave(wire: Wire) -> None:
        where = target.format(next_door=wire.next_door, address=wire.address)
        answer("moved", status, f"Location: {where}")(wire)

    return behave


def endless(piece: bytes, opening: bytes = b"") -> Behaviour:
    """Send the same bytes without an end: interim answers, header lines, empty blocks."""

    def behave(wire: Wire) -> None:
        wire.send(opening)
        wire.flood(piece)

    return behave


def reset(wire: Wire) -> None:
    wire.reset()


def never(wire: Wire) -> None:
    wire.hold()
