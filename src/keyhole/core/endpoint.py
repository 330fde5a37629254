"""How an endpoint is reached and asked: one class for Python, fleets and every command that asks.

Secrets are named, not given: a header's value stands in an environment variable, which no list of
processes shows. It is read when a request is made and kept nowhere else.
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
    """`NAME=VARIABLE` as the command line has it, one or more."""
    pairs: dict[str, str] = {}
    for word in words:
        name, mark, variable = word.partition("=")
        if not mark or not name or not variable:
            # Not shown: somebody may have given the secret itself.
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
    """How a server is reached and asked; what is None is as the server states it.

    - `headers`: names of headers, each with the environment variable that holds its value. Without
      an Authorization among them, KEYHOLE_API_KEY, if it is set, is sent as the bearer token.
    - `batch`: the most sequences in one request; `timeout`: seconds for one request with its
      retries, 60 by default.
    - `dim`: the width of a token; `input` and `output`: the tensors to ask and to read, by name.
    - `positive`: the label that counts as 1, where answers are words.

    What has no flag of its own is set as `--endpoint name=value`.
    """

    headers: Mapping[str, str] | None = None
    ca: str | None = option(
        None, "Certificates (PEM) to trust instead of the usual ones.", ENDPOINT, file=True
    )
    insecure: bool = option(False, "Trust any certificate of an endpoint.", ENDPOINT)
    batch: int | None = None
    rate: float | None = option(
        None, "Send an endpoint at most this many requests a second.", ENDPOINT,
        metavar="PER_SECOND",
    )  # fmt: skip
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
            raise InputError(f"the timeout must not exceed a day; it is {self.timeout:g} s")
        if self.ca is not None and self.insecure:
            raise InputError("--ca and --insecure exclude each other: give one of them")
        object.__setattr__(self, "ca", None if self.ca is None else str(self.ca))
        self.secrets()

    @property
    def given(self) -> list[str]:
        """The names of what was set, as the command line has them."""
        flags = {"headers": "--header", "ca": "--ca", "insecure": "--insecure", "rate": "--rate"}
        changed = [
            field.name for field in fields(self) if getattr(self, field.name) != field.default
        ]
        return [flags.get(name, f"--endpoint {name}") for name in changed]

    @property
    def chosen(self) -> str:
        """What tells two targets at one address apart, to be written behind it."""
        names = ("input", "output", "positive")
        values = [f"{name}={getattr(self, name)}" for name in names if getattr(self, name)]
        return f" {', '.join(values)}" if values else ""

    def expect_none(self, target: str) -> None:
        """Refuse what is for endpoints alone, where the target is none."""
        if self.given:
            raise InputError(f"{self.given[0]} is for an endpoint, and {target} is none")

    def only_connecting(self, target: str) -> EndpointOptions:
        """The same, if it only says how a server is reached: other endpoints have no tensors."""
        rest = replace(self, headers=None, ca=None, insecure=False, rate=None, timeout=None)
        if rest.given:
            raise InputError(
                f"{rest.given[0]} is for an endpoint with tensors, and {target} has none"
            )
        return self

    def secrets(self) -> dict[str, str]:
        """The headers, with their values."""
        values: dict[str, str] = {}
        for name, variable in (self.headers or {}).items():
            if not _HEADER.fullmatch(name):
                raise InputError(f"--header takes NAME=VARIABLE; {name!r} is no header's name")
            value = os.environ.get(variable) if variable and "\0" not in variable else None
            if not value:  # its name is not shown: somebody may have given the secret itself
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
    """The same with nothing before the host: what may be shown."""
    scheme, mark, rest = name.partition("://")
    host, slash, path = rest.partition("/")
    if "@" in path and "@" not in host and not host.rpartition(":")[2].isdigit() and ":" in host:
        host, slash, path = rest.rpartition("@")[2].partition("/")  # a password with a slash in it
    return f"{scheme}{mark}{host.rpartition('@')[2]}{slash}{path}" if mark else name


def expect_authorized(url: str, authorized: bool) -> None:
    """Refuse to ask somebody else's machine unless one may."""
    try:
        host = urlsplit(url).hostname or ""
    except ValueError:
        public = without_password(url)
        raise InputError(f"expected a URL such as http://localhost:8080, got {public}") from None
    this_machine = host == "localhost"
    with suppress(ValueError):
        this_machine = ipaddress.ip_address(host).is_loopback
    if not this_machine and not authorized:
        raise InputError(
            f"{host} is another machine: give --authorized if you may test that server"
        )
