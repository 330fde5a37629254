"""Options of an endpoint, the same for Python, fleet files and every command that sends requests.

Secrets are never given directly. An option names the environment variable that holds a
header's value, because the command line of a process is visible to others. The value is
read when a request is made, and is stored nowhere.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from urllib.parse import urlsplit

from keyhole.core.errors import InputError, expect_count, expect_number
from keyhole.core.options import ENDPOINT, option

KEY = "KEYHOLE_API_KEY"
_HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_DAY = 86_400.0


def headers_of(words: Sequence[str]) -> dict[str, str] | None:
    """Read headers given as `NAME=VARIABLE`."""
    pairs: dict[str, str] = {}
    for word in words:
        name, mark, variable = word.partition("=")
        if not mark or not name or not variable:
            # The word is not shown, because somebody may have given the secret itself.
            raise InputError(
                "--header takes NAME=VARIABLE, with the name of an environment variable that holds "
                "the value"
            )
        if name.lower() in (other.lower() for other in pairs):
            raise InputError(f"the header {name} was given twice")
        pairs[name] = variable
    return pairs or None


@dataclass(frozen=True)
class EndpointOptions:
    """Options for requests to a server; where a value is None, the server's own applies.

    - `headers`: names of headers, each with the environment variable that holds its value. If none
      of them is Authorization, KEYHOLE_API_KEY, if it is set, is sent as the bearer
      token.
    - `batch`: the most sequences in one request.
    - `timeout`: the deadline of one request with its retries in seconds, 60 by default.
    - `dim`: the width of a token.
    - `input`, `output`: the names of the tensors to send and to read.
    - `positive`: the label that counts as 1, if answers are words.

    On the command line, options without a flag of their own are set as `--endpoint
    name=value`.
    """

    headers: Mapping[str, str] | None = None
    ca: str | None = option(
        None,
        "Certificates (PEM) to trust instead of the usual ones.",
        ENDPOINT,
        file=True,
    )
    insecure: bool = option(False, "Trust any certificate of an endpoint.", ENDPOINT)
    batch: int | None = None
    rate: float | None = option(
        None,
        "Send an endpoint at most this many requests a second.",
        ENDPOINT,
        metavar="PER_SECOND",
    )
    timeout: float | None = None
    dim: int | None = None
    input: str | None = None
    output: str | None = None
    positive: str | None = None

    def __post_init__(self) -> None:
        expect_count("batch", self.batch)
        expect_count("dim", self.dim)
        expect_number("--rate", self.rate, above=0)
        expect_number("timeout", self.timeout, above=0)
        if self.timeout is not None and self.timeout > _DAY:
            raise InputError(
                f"the timeout must not exceed a day; it is {self.timeout:g} s"
            )
        if self.ca is not None and self.insecure:
            raise InputError("--ca and --insecure exclude each other: give one of them")
        if self.ca is not None:
            object.__setattr__(self, "ca", str(self.ca))
        self.secrets()

    @property
    def given(self) -> list[str]:
        """The options that were set, as the command line calls them."""
        flags = {
            "headers": "--header",
            "ca": "--ca",
            "insecure": "--insecure",
            "rate": "--rate",
        }
        changed = [
            field.name
            for field in fields(self)
            if getattr(self, field.name) != field.default
        ]
        return [flags.get(name, f"--endpoint {name}") for name in changed]

    @property
    def chosen(self) -> str:
        """The options that tell two targets at one address apart, as a suffix of the address."""
        names = ("input", "output", "positive")
        values = [
            f"{name}={getattr(self, name)}" for name in names if getattr(self, name)
        ]
        return f" {', '.join(values)}" if values else ""

    def expect_none(self, target: str) -> None:
        """Raise if any of these options was set although the target is no endpoint."""
        if self.given:
            raise InputError(
                f"{self.given[0]} is for endpoints, and {target} is no endpoint"
            )

    def only_connecting(self, target: str) -> EndpointOptions:
        """Return self, or raise if options about tensors were set: this target has none."""
        rest = replace(
            self, headers=None, ca=None, insecure=False, rate=None, timeout=None
        )
        if rest.given:
            raise InputError(
                f"{rest.given[0]} is for endpoints with tensors, and {target} has none"
            )
        return self

    def secrets(self) -> dict[str, str]:
        """Return the headers with their values."""
        values: dict[str, str] = {}
        for name, variable in (self.headers or {}).items():
            if not _HEADER.fullmatch(name):
                raise InputError(
                    f"--header takes NAME=VARIABLE; {name!r} is no header's name"
                )
            value = os.environ.get(variable)
            if not value:
                # The name is not shown: somebody may have given the secret itself.
                raise InputError(
                    f"--header {name}=VARIABLE names an environment variable that is not set: "
                    "export it first"
                )
            values[name] = value
        key = os.environ.get(KEY)
        if key and not authorizes(values):
            values["Authorization"] = f"Bearer {key}"
        return values


def authorizes(headers: Mapping[str, str]) -> bool:
    return "authorization" in (name.lower() for name in headers)


def names_address(name: str) -> bool:
    return name.lower().startswith(("http://", "https://"))


def without_password(name: str) -> str:
    """Return an address without its user name and password, so that it may be shown."""
    scheme, mark, rest = name.partition("://")
    host, slash, path = rest.partition("/")
    if (
        "@" in path
        and "@" not in host
        and not host.rpartition(":")[2].isdigit()
        and ":" in host
    ):
        host, slash, path = rest.rpartition("@")[2].partition(
            "/"
        )  # the password has a slash
    return f"{scheme}{mark}{host.rpartition('@')[2]}{slash}{path}" if mark else name


def expect_authorized(url: str, authorized: bool) -> None:
    """Raise if an address is on another machine, unless the caller may test that one."""
    try:
        host = urlsplit(url).hostname or ""
    except ValueError:
        public = without_password(url)
        raise InputError(
            f"expected a URL such as http://localhost:8080, got {public}"
        ) from None
    this_machine = host == "localhost"
    with suppress(ValueError):
        this_machine = ipaddress.ip_address(host).is_loopback
    if not this_machine and not authorized:
        raise InputError(
            f"{host} is another machine: give --authorized if you may test that server"
        )
