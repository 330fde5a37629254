"""What people may say about an endpoint: one object for every command that asks one.

Secrets are named, not given: a header's value stands in an environment variable, which no list of
processes shows. It is read when a request is made and kept nowhere else.
"""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path

from keyhole.core.errors import InputError, expect_count, expect_number
from keyhole.core.files import expect_file
from keyhole.oracle.address import parted
from keyhole.oracle.http import Http, Limits

KEY = "KEYHOLE_API_KEY"
_HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_DAY = 86_400.0


@dataclass(frozen=True)
class EndpointOptions:
    """How a server is reached and asked; what is None is as the server states it.

    - `headers`: names of headers, each with the environment variable that holds its value. Without
      an Authorization among them, KEYHOLE_API_KEY, if it is set, is sent as the bearer token.
    - `ca`: a file of certificates to trust instead of the usual ones; `insecure` trusts any.
    - `batch`: the most sequences in one request; `rate`: the most requests a second.
    - `timeout`: seconds for one request with its retries.
    - `dim`: the width of a token; `input` and `output`: the tensors to ask and to read, by name.
    - `positive`: the label that counts as 1, where answers are words.
    """

    headers: Mapping[str, str] | None = None
    ca: str | Path | None = None
    insecure: bool = False
    batch: int | None = None
    rate: float | None = None
    timeout: float | None = None
    dim: int | None = None
    input: str | None = None
    output: str | None = None
    positive: str | None = None

    def __post_init__(self) -> None:
        expect_count("--batch", self.batch)
        expect_count("--dim", self.dim)
        expect_number("--rate", self.rate, above=0)
        expect_number("--timeout", self.timeout, above=0)
        if self.timeout is not None and self.timeout > _DAY:
            raise InputError(f"expected --timeout of at most a day, got {self.timeout:g} s")
        if self.ca is not None and self.insecure:
            raise InputError("expected --ca or --insecure, got both")
        self.secrets()

    @property
    def given(self) -> list[str]:
        """The names of what was said, as the command line has them."""
        plain = EndpointOptions()
        changed = [
            field.name
            for field in fields(self)
            if getattr(self, field.name) != getattr(plain, field.name)
        ]
        names = {"headers": "--header", "input": "--input-tensor", "output": "--output-tensor"}
        return [names.get(name, f"--{name}") for name in changed]

    @property
    def chosen(self) -> str:
        """What tells two targets at one address apart, to be written behind it."""
        names = ("input", "output", "positive")
        values = [f"{name}={getattr(self, name)}" for name in names if getattr(self, name)]
        return f" {', '.join(values)}" if values else ""

    def expect_none(self, target: str) -> None:
        """Refuse what is for endpoints alone, where the target is none."""
        if self.given:
            raise InputError(f"expected {self.given[0]} with an endpoint, got {target}")

    def only_connecting(self, target: str) -> EndpointOptions:
        """The same, if it says how a server is reached and not what is asked of a tensor."""
        rest = replace(self, headers=None, ca=None, insecure=False, rate=None, timeout=None)
        rest.expect_none(f"{target}, which has no tensors")
        return self

    def secrets(self) -> dict[str, str]:
        """The headers, with their values."""
        values: dict[str, str] = {}
        for name, variable in (self.headers or {}).items():
            if not _HEADER.fullmatch(name):
                raise InputError(f"expected --header NAME=VARIABLE, got the name {name!r}")
            value = os.environ.get(variable) if variable and "\0" not in variable else None
            if not value:  # its name is not shown: somebody may have given the secret itself
                raise InputError(
                    f"expected --header {name}=VARIABLE with an environment variable that holds "
                    "the value, got none of that name: export it first"
                )
            values[name] = value
        key = os.environ.get(KEY)
        if key and not _authorizes(values):
            values["Authorization"] = f"Bearer {key}"
        return values

    def http(
        self,
        url: str,
        *,
        limits: Limits | None = None,
        retries: int = 8,
        key: bool = True,
        headers: Mapping[str, str] | None = None,
    ) -> Http:
        """A connection to `url`; without `key` no secret is sent but what stands in `url` itself.

        `headers` are values that come before those of the environment.
        """
        limits = limits or Limits()
        if self.timeout is not None:
            limits = replace(limits, seconds=self.timeout)
        public, password = parted(url)
        if password and _authorizes(self.headers or {}):
            raise InputError(
                "expected a password in the address or --header Authorization, got both"
            )
        more = password | dict(headers or {})
        values = self.secrets() if key else {}
        if _authorizes(more):
            values.pop("Authorization", None)  # the environment's key is for who says nothing
        values |= more
        return Http(
            public, limits, retries=retries, headers=values, rate=self.rate, trust=self.trust()
        )

    def trust(self) -> ssl.SSLContext | None:
        """Whose certificates count; None for those of the usual authorities."""
        if self.insecure:
            context = ssl.create_default_context()
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            return context
        if self.ca is None:
            return None
        expect_file(self.ca, "a file of certificates")
        try:
            return ssl.create_default_context(cafile=str(self.ca))
        except (ssl.SSLError, OSError, ValueError) as error:
            raise InputError(f"expected certificates in PEM in {self.ca}, got {error}") from error


def _authorizes(headers: Mapping[str, str]) -> bool:
    return "authorization" in (name.lower() for name in headers)


def headers_of(words: list[str] | None) -> dict[str, str] | None:
    """`NAME=VARIABLE` as the command line has it, one or more."""
    pairs: dict[str, str] = {}
    for word in words or ():
        name, mark, variable = word.partition("=")
        if not mark or not name or not variable:
            # Not shown: somebody may have given the secret itself.
            raise InputError(
                "expected --header NAME=VARIABLE with the name of an environment variable, got "
                "something else"
            )
        if name.lower() in (other.lower() for other in pairs):
            raise InputError(f"expected each --header once, got {name} twice")
        pairs[name] = variable
    return pairs or None
