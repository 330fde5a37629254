"""The table of hostile servers: their behaviour, by route, status and encoding."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

from hostile import (
    DIM,
    METADATA,
    MODEL,
    Behaviour,
    answer,
    bomb,
    endless,
    flood,
    head,
    held,
    never,
    packed,
    raw,
    redirect,
    repeated,
    reset,
    slowly,
)

WHERE = ("metadata", "infer", "later")
GIGABYTES_5 = 5 * 2**30
YEAR = 365 * 24 * 3600


@dataclass(frozen=True)
class Case:
    name: str
    where: str
    behave: Behaviour
    match: str
    timeout: float = 20.0
    retries: int = 0
    reads: bool = True

    def __str__(self) -> str:
        return f"{self.name}-{self.where}"


def cases() -> list[Case]:
    return [
        *_sizes(),
        *_bombs(),
        *_times(),
        *_wires(),
        *_answers(),
        *_texts(),
        *_models(),
        *_outputs(),
    ]


def _sizes() -> Iterator[Case]:
    framings = (("length", GIGABYTES_5), ("chunks", GIGABYTES_5), ("end", GIGABYTES_5))
    endless_ones = (("length", 10**19), ("chunks", 2**62), ("end", 2**62))
    for where in WHERE:
        for status in (200, 404, 500, 503):
            if status == 200:
                match = "more than 67,108,864 bytes"
            else:
                match = f"status {status}"
            for framing, size in framings + endless_ones:
                name = f"{'5 GB' if size == GIGABYTES_5 else 'endless'} by {framing}, {status}"
                yield Case(name, where, flood(status, framing, size), match)
        yield Case(
            "a byte a chunk", where, flood(200, "bytewise"), "within 2 s", timeout=2.0
        )


def _bombs() -> Iterator[Case]:
    for where in WHERE:
        for coding in ("gzip", "deflate", "bare"):
            for framing in ("end", "chunks"):
                for status in (200, 500):
                    if status == 200:
                        match = "bytes when unpacked"
                    else:
                        match = "status 500: no text"
                    behave = bomb(status, coding, 5120, framing)
                    yield Case(
                        f"{coding} bomb by {framing}, {status}", where, behave, match
                    )
        for coding in ("gzip, gzip", "br", "zstd", "gzip, identity", "rot13\x1b[31m"):
            behave = answer(packed(b"{}", "gzip"), 200, f"Content-Encoding: {coding}")
            yield Case(
                f"coding {coding[:14]!r}",
                where,
                behave,
                "expected a body in gzip, deflate|HTTP",
            )
        for coding in ("gzip", "deflate"):
            whole = packed(json.dumps(METADATA).encode(), coding)
            field = f"Content-Encoding: {coding}"
            yield Case(
                f"{coding} cut", where, answer(whole[:-6], 200, field), "ends too early"
            )
            bad = answer(whole[:12] + b"\xff" * 20, 200, field)
            yield Case(
                f"{coding} damaged", where, bad, f"expected {coding}|ends too early"
            )
        text = answer("{}", 200, "Content-Encoding: gzip")
        yield Case("text called gzip", where, text, "expected gzip")
        empty = endless(
            b"\0\0\0\xff\xff" * 2**12,
            head(200, "Content-Encoding: deflate") + b"\x78\xda",
        )
        yield Case(
            "endless empty deflate blocks", where, empty, "more than 67,108,864 bytes"
        )


def _times() -> Iterator[Case]:
    chunked = head(200, "Transfer-Encoding: chunked")
    behaviours: dict[str, Behaviour] = {
        "silence": never,
        "half a status line": held(b"HTTP/1.1 20"),
        "half a head": held(b"HTTP/1.1 200 OK\r\nContent-Type: appl"),
        "half a body": held(head(200, "Content-Length: 50"), b'{"name": '),
        "half a chunk": held(chunked, b"20\r\n{"),
        "a dripping status line": slowly(b"HTTP/1.1 200 "),
        "dripping headers": slowly(b"HTTP/1.1 200 OK\r\n", then=b"a: b\r\n"),
        "a dripping body": slowly(head(200, "Content-Length: 100000"), b'{"name": "'),
        "dripping chunks": slowly(chunked, then=b"1\r\na\r\n"),
        "a dripping chunk size": slowly(chunked, then=b"0"),
        "dripping spaces": slowly(head(200, "Connection: close"), then=b" "),
        "endless interim answers": endless(b"HTTP/1.1 103 Early Hints\r\n\r\n" * 100),
    }
    for where in WHERE:
        for name, behave in behaviours.items():
            match = "no answer from .* within 1 s: raise --endpoint timeout"
            if name == "a dripping chunk size":
                match += "|illegal chunk"
            yield Case(name, where, behave, match, timeout=1.0)
        if where != "metadata":  # whose request fits into the kernel's buffers
            yield Case(
                "a question unread",
                where,
                never,
                "within 1 s",
                timeout=1.0,
                reads=False,
            )
        failing = slowly(head(500, "Connection: close"))
        yield Case("a dripping error", where, failing, "status 500: a+", timeout=1.0)
        silent = held(head(404, "Content-Length: 9"))
        yield Case(
            "an error without text", where, silent, "status 404: no text", timeout=1.0
        )


def _wires() -> Iterator[Case]:
    failed = (
        "no answer from .*: (RemoteProtocolError|ReadError|WriteError|ConnectError)"
    )
    not_http = "expected HTTP from"
    behaviours: dict[str, tuple[Behaviour, str]] = {
        "HTTP/0.9": (raw(b"<html>hello</html>\n"), not_http),
        "HTTP/0.9, held open": (held(b"<html>hello"), not_http),
        "HTTP/0.9, JSON": (held(json.dumps(METADATA).encode()), not_http),
        "HTTP/0.9, endless": (endless(b"a" * 2**16), not_http),
        "HTTP/2": (held(b"\0\0\x12\x04\0\0\0\0\0" + b"\0" * 18), not_http),
        "TLS": (held(b"\x15\x03\x01\0\x02\x02\x46"), not_http),
        "SSH": (held(b"SSH-2.0-OpenSSH_9.6\r\n"), not_http),
        "zeros": (endless(b"\0" * 2**16), not_http),
        "terminal codes": (held(b"\x1b]0;owned\x07\x1b[2J"), not_http),
        "H, then other things": (held(b"HTT", b"Q/1.1 200 OK\r\n\r\n"), not_http),
        "HTTP/9.9": (raw(b"HTTP/9.9 200 OK\r\n\r\n{}"), not_http),
        "HTTP/x": (raw(b"HTTP/x 200 OK\r\n\r\n{}"), not_http),
        "status 99": (raw(b"HTTP/1.1 099 No\r\n\r\n"), failed),
        "status abc": (raw(b"HTTP/1.1 abc No\r\n\r\n"), failed),
        "status 99999": (raw(b"HTTP/1.1 99999 No\r\n\r\n"), failed),
        "close at once": (raw(), failed),
        "reset": (reset, failed),
        "close in the head": (raw(b"HTTP/1.1 200 OK\r\nA: b\r\n"), failed),
        "close in the body": (raw(head(200, "Content-Length: 99"), b"{"), failed),
        "close in a chunk": (
            raw(head(200, "Transfer-Encoding: chunked"), b"9\r\n{"),
            failed,
        ),
        "length too short": (
            raw(head(200, "Content-Length: 9"), b'{"name": "m"}'),
            "expected JSON",
        ),
        "length negative": (raw(head(200, "Content-Length: -1"), b"{}"), failed),
        "length a word": (raw(head(200, "Content-Length: two"), b"{}"), failed),
        "length of 5,000 digits": (
            raw(head(200, "Content-Length: " + "9" * 5000)),
            failed,
        ),
        "two lengths": (
            raw(head(200, "Content-Length: 2", "Content-Length: 3"), b"{}"),
            failed,
        ),
        "chunk size a word": (
            raw(head(200, "Transfer-Encoding: chunked"), b"zz\r\n{}"),
            failed,
        ),
        "chunk size negative": (
            raw(head(200, "Transfer-Encoding: chunked"), b"-2\r\n{}"),
            failed,
        ),
        "chunk size huge": (
            raw(head(200, "Transfer-Encoding: chunked"), b"f" * 40),
            failed,
        ),
        "coding of transfer unknown": (
            raw(head(200, "Transfer-Encoding: rot13"), b"{}"),
            failed,
        ),
        "an endless header": (endless(b"a" * 2**16, b"HTTP/1.1 200 OK\r\nA: "), failed),
        "endless headers": (
            endless(b"a: b\r\n" * 2**12, b"HTTP/1.1 200 OK\r\n"),
            failed,
        ),
        "endless trailers": (
            endless(
                b"a: b\r\n" * 2**12, head(200, "Transfer-Encoding: chunked") + b"0\r\n"
            ),
            failed,
        ),
        "NUL in a header": (raw(b"HTTP/1.1 200 OK\r\nA: \0\r\n\r\n{}"), failed),
        "no colon in a header": (raw(b"HTTP/1.1 200 OK\r\nA b\r\n\r\n{}"), failed),
        "switching protocols": (
            held(head(101, "Upgrade: chat", "Connection: Upgrade")),
            failed,
        ),
    }
    for where in WHERE:
        for name, (behave, match) in behaviours.items():
            yield Case(name, where, behave, match)
        yield Case("close, tried again", where, raw(), failed, retries=1)


def _answers() -> Iterator[Case]:
    targets = {
        "next door": "http://{next_door}/v2/models/m",
        "next door, by scheme": "//{next_door}/v2/models/m",
        "itself": "{address}/v2/models/m",
        "a file": "file:///etc/passwd",
        "https": "https://{next_door}/",
        "nonsense": "http://[::1:::/\x01",
        "a long line": "http://{next_door}/" + "a" * 60_000,
    }
    for where in WHERE:
        for number, (name, target) in enumerate(targets.items()):
            status = (301, 302, 303, 307, 308)[number % 5]
            match = rf"redirects to .* \(status {status}\).*not followed|: RemoteProtocolError"
            yield Case(f"redirect to {name}", where, redirect(status, target), match)
        yield Case(
            "redirect to nowhere", where, answer("", 302), "redirects to nowhere"
        )
        yield Case("300", where, answer("", 300), "redirects to .*status 300")
        yield Case("204", where, raw(head(204)), "expected JSON from .*, got nothing")
        cookies = answer(
            "{}", 404, *[f"Set-Cookie: a{i}={'b' * 900}" for i in range(90)]
        )
        yield Case("cookies", where, cookies, "status 404")
        coded = answer("\x1b]0;owned\x07\x1b[2J\r\nsecond line\u2028third", 403)
        yield Case(
            "terminal codes in an error", where, coded, "status 403: .*second line"
        )
        for status in (429, 503):
            for wait in (str(YEAR), "9" * 4000, "Fri, 31 Dec 9999 23:59:59 GMT"):
                behave = answer("later", status, f"Retry-After: {wait}")
                match = rf"within 20 s \(status {status} with Retry-After"
                yield Case(
                    f"{status}, wait {wait[:9]}", where, behave, match, retries=4
                )
        for wait in (
            "-5",
            "soon",
            "0",
            "Thu, 01 Jan 1970 00:00:00 GMT",
            "\u0663",
            "Fri, 31 Dec 99999",
        ):
            field = f"Retry-After: {wait}".encode().decode("latin-1")
            behave = answer("later", 503, field)
            yield Case(
                f"wait {wait}",
                where,
                behave,
                "no answer from .*: status 503",
                retries=1,
            )


def _texts() -> Iterator[Case]:
    json_wanted = "expected JSON from"
    bodies: dict[str, tuple[bytes, str]] = {
        "nothing": (b"", "got nothing"),
        "words": (b"it works!", json_wanted),
        "half an object": (json.dumps(METADATA).encode()[:-9], json_wanted),
        "two objects": (b"{}{}", json_wanted),
        "not UTF-8": (b'{"name": "\xff\xfe"}', "expected JSON in UTF-8"),
        "UTF-16": (json.dumps(METADATA).encode("utf-16"), "expected JSON"),
        "100,000 lists deep": (b"[" * 10**5 + b"]" * 10**5, "nested too deeply"),
        "100,000 lists deep, open": (b"[" * 10**5, "nested too deeply"),
        "100,000 objects deep": (
            b'{"a":' * 10**5 + b"1" + b"}" * 10**5,
            "nested too deeply",
        ),
        "a key twice": (b'{"name": "m", "name": "n"}', "a key twice"),
        "a key twice, deep": (
            b'{"inputs": [{"shape": [4], "shape": [5]}]}',
            "a key twice",
        ),
        "a list": (b"[1, 2]", "expected a JSON object"),
        "a number": (b"1", "expected a JSON object"),
        "a string": (b'"m"', "expected a JSON object"),
        "null": (b"null", "expected a JSON object"),
        "NaN": (b"NaN", "expected a JSON object"),
        "5,000 digits": (b'{"a": ' + b"9" * 5000 + b"}", json_wanted),
        "tabs and escapes": (b'{"a": "\t\x1b[31m"}', json_wanted),
    }
    for where in WHERE:
        for name, (body, match) in bodies.items():
            for coding in ("", "gzip", "deflate") if len(body) < 10**4 else ("gzip",):
                behave = answer(body, coding=coding)
                yield Case(f"JSON: {name}, {coding or 'plain'}", where, behave, match)
        yield from _crowds(where)


def _crowds(where: str) -> Iterator[Case]:
    """Bodies below 64 MiB whose contents hardly fit into memory, or do not."""
    too_many = "brackets, quotes and commas, more than 4,000,000"
    items = {
        "lists": (b"[],", 2),
        "objects": (b'{"b":0},', 4),
        "strings": (b'"bc",', 3),
        "integers": (b"-6,", 1),
        "fractions": (b"0.5,", 1),
    }
    refused = "expected (a list of inputs|outputs with shape)"
    for name, (item, parts) in items.items():
        count = 4_000_000 // parts
        above = repeated(b'{"inputs": {"a": [', item, count + 1, b"0]}}")
        yield Case(f"JSON: too many {name}", where, above, too_many)
        below = repeated(b'{"inputs": {"a": [', item, count - 8, b"0]}}")
        yield Case(f"JSON: as many {name} as allowed", where, below, refused)
    emoji = "😀".encode()
    wide = repeated(b'{"a": "', emoji, 5_000_000, b'"}')
    yield Case("JSON: 20 MB beyond ASCII", where, wide, "must be ASCII")
    narrow = repeated(b'{"inputs": 1, "a": "' + emoji, b"a", 16_000_000, b'"}')
    yield Case("JSON: 16 MB with an emoji", where, narrow, refused)
    spaces = repeated(b'{"inputs": 1', b" ", 67_000_000, b"}")
    yield Case("JSON: 67 MB of spaces", where, spaces, refused)


def _models() -> Iterator[Case]:
    limit = "above the limit of 16,384"
    shape = "expected the shape of an input"
    dim = "has no dimension"
    shapes: dict[str, tuple[object, str]] = {
        "16,385": ([-1, -1, 16_385], limit),
        "20,000": ([-1, -1, 20_000], limit),
        "10^6": ([-1, -1, 10**6], limit),
        "10^18": ([-1, -1, 10**18], limit),
        "10^400": ([-1, -1, 10**400], limit),
        "0": ([-1, -1, 0], dim),
        "-1": ([-1, -1, -1], dim),
        "-5": ([-1, -1, -5], shape),
        "a string": ([-1, -1, "4"], shape),
        "a fraction": ([-1, -1, 4.5], shape),
        "a float": ([-1, -1, 4.0], shape),
        "true": ([-1, -1, True], shape),
        "null": ([-1, -1, None], shape),
        "NaN": ([-1, -1, float("nan")], shape),
        "a list": ([-1, -1, [4]], shape),
        "no list": (4, shape),
        "an object": ({"0": 4}, shape),
        "empty": ([], dim),
    }
    for name, (value, match) in shapes.items():
        body = METADATA | {"inputs": [{"name": "x", "shape": value}]}
        yield Case(f"dimension {name}", "metadata", answer(json.dumps(body)), match)
    wrong_input = "expected a list of inputs"
    wrong_name = "expected the name of an input"
    inputs: dict[str, tuple[object, str]] = {
        "a string": ("x", wrong_input),
        "an object": ({"name": "x", "shape": [DIM]}, wrong_input),
        "a list of strings": (["x"], wrong_input),
        "a list of lists": ([[]], wrong_input),
        "a number": (7, wrong_input),
        "named null": ([{"name": None, "shape": [DIM]}], wrong_name),
        "named 7": ([{"name": 7, "shape": [DIM]}], wrong_name),
        "named with a surrogate": ([{"name": "\ud800", "shape": [DIM]}], wrong_name),
        "named with a line break": ([{"name": "a\nb", "shape": [DIM]}], wrong_name),
        "named at length": ([{"name": "a" * 10**6, "shape": [DIM]}], wrong_name),
    }
    for name, (value, match) in inputs.items():
        body = json.dumps(METADATA | {"inputs": value})
        yield Case(f"inputs: {name}", "metadata", answer(body), match)
    for name in ("other", "", 7, ["m"], {"m": 1}, True, "M\x1b[31m", "m" * 10**6):
        body = json.dumps(METADATA | {"name": name})
        yield Case(
            f"model {str(name)[:9]!r}",
            "metadata",
            answer(body),
            f"answers for model .*, not {MODEL}",
        )


def _outputs() -> Iterator[Case]:
    # Each request asks 2 sequences of 3 tokens.
    outputs = "expected outputs with shape"
    shape = "expected answers of one shape"
    numbers = "numbers"
    replies: dict[str, tuple[object, str]] = {
        "none": ({}, outputs),
        "null": ({"outputs": None}, outputs),
        "empty": ({"outputs": []}, outputs),
        "a string": ({"outputs": "0.5"}, outputs),
        "strings": ({"outputs": ["0.5"]}, outputs),
        "no shape": ({"outputs": [{"data": [1, 2]}]}, outputs),
        "no data": ({"outputs": [{"shape": [2]}]}, outputs),
        "a list for a datatype": (
            {"outputs": [{"datatype": [], "shape": [2]}]},
            outputs,
        ),
        "an error": ({"error": "no\x1b[31m"}, outputs),
        "another model": (
            {"model_name": "n", "outputs": []},
            f"answers for model .*, not {MODEL}",
        ),
    }
    tensors: dict[str, tuple[object, object, str]] = {
        "one answer": ([1], [0.5], shape),
        "three answers": ([3], [0.5] * 3, shape),
        "no answers": ([0], [], shape),
        "no dimensions": ([], [0.5], shape),
        "four dimensions": ([2, 3, 1, 1], [0.5] * 6, shape),
        "another length": ([2, 4, 1], [0.5] * 8, shape),
        "width 0": ([2, 0], [], shape),
        "negative": ([-2], [0.5] * 2, shape),
        "width -1": ([2, -1], [0.5] * 2, shape),
        "10^18 answers": ([10**18], [0.5] * 2, shape),
        "width 10^18": (
            [2, 10**18],
            [0.5] * 2,
            "numbers wide, above the limit of 16,384",
        ),
        "width 20,000": (
            [2, 20_000],
            [0.5] * 40_000,
            "numbers wide, above the limit of 16,384",
        ),
        "a string": ("2", [0.5] * 2, shape),
        "of strings": (["2"], [0.5] * 2, shape),
        "of floats": ([2.0], [0.5] * 2, shape),
        "null": (None, [0.5] * 2, shape),
        "too few numbers": ([2, 3], [0.5] * 5, numbers),
        "too many numbers": ([2], [0.5] * 10**6, numbers),
        "strings for numbers": ([2], ["0.5", "1"], numbers),
        "a string among numbers": ([2], [0.5, "1"], numbers),
        "null for a number": ([2], [0.5, None], numbers),
        "objects for numbers": ([2], [{}, {}], numbers),
        "a string for data": ([2], "ab", numbers),
        "an object for data": ([2], {"0": 1, "1": 2}, numbers),
        "ragged lists": ([2], [[0.5], 0.5], numbers),
        "lists of unequal length": ([2, 2], [[1, 2], [3]], numbers),
        "400 digits": ([2], [10**400, 1], numbers),
        "NaN": ([2], [float("nan"), 0.5], "NaN or infinity in"),
        "infinity": ([2], [float("inf"), 0.5], "NaN or infinity in"),
    }
    for name, (sizes, data, match) in tensors.items():
        replies[f"shape {name}"] = (
            {"outputs": [{"shape": sizes, "data": data}]},
            match,
        )
    for where in ("infer", "later"):
        for name, (reply, match) in replies.items():
            yield Case(f"outputs: {name}", where, answer(json.dumps(reply)), match)
        for name, item, count in (
            ("1e999", b"1e999,", 2),
            ("deep data", b"[" * 900, 0),
        ):
            data = item * count + b"1" if count else item + b"1" + b"]" * 900
            body = b'{"outputs": [{"shape": [3], "data": [' + data + b"]}]}"
            yield Case(
                f"outputs: {name}", where, answer(body), "expected answers of one shape"
            )
        deep = (
            b'{"outputs": [{"shape": [2], "data": '
            + b"[" * 900
            + b"1"
            + b"]" * 900
            + b"}]}"
        )
        yield Case("outputs: 900 lists deep", where, answer(deep), numbers)
        items = repeated(
            b'{"outputs": [{"shape": [2], "data": [', b"0.25,", 3_999_000, b"1]}]}"
        )
        yield Case("outputs: 4,000,000 numbers", where, items, numbers)
        nested = repeated(
            b'{"outputs": [{"shape": [2], "data": [', b"[1],", 1_999_000, b"[1]]}]}"
        )
        yield Case("outputs: 2,000,000 lists", where, nested, numbers)
    other = json.dumps({"outputs": [{"shape": [2, 3], "data": [0.5] * 6}]})
    yield Case("outputs: another shape than before", "later", answer(other), shape)
