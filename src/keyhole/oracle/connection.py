"""Addresses as people write them, and the connection to one that options describe.

`http://user:password@host/…` is an address and a secret in one. `parted` takes them apart: what
stands in identities, ledgers, findings and error messages is the address alone.
"""

from __future__ import annotations

import base64
import ssl
from collections.abc import Mapping
from dataclasses import replace
from urllib.parse import unquote, urlsplit

from keyhole.core.endpoint import EndpointOptions, authorizes, without_password
from keyhole.core.errors import InputError
from keyhole.core.files import expect_file
from keyhole.oracle.http import Http, Limits


def connected(
    options: EndpointOptions,
    url: str,
    *,
    limits: Limits | None = None,
    retries: int = 8,
    key: bool = True,
    headers: Mapping[str, str] | None = None,
) -> Http:
    """A connection to `url`; without `key` no secret is sent but those in `url` and `headers`.

    `headers` take precedence over the environment.
    """
    limits = limits or Limits()
    if options.timeout is not None:
        limits = replace(limits, seconds=options.timeout)
    public, password = parted(url)
    if password and authorizes(options.headers or {}):
        raise InputError(
            "the address holds a password and --header Authorization another: give one of them"
        )
    more = password | dict(headers or {})
    values = options.secrets() if key else {}
    if authorizes(more):
        values.pop("Authorization", None)  # the environment's key is a default
    values |= more
    return Http(
        public, limits, retries=retries, headers=values, rate=options.rate, trust=_trust(options)
    )


def _trust(options: EndpointOptions) -> ssl.SSLContext | None:
    """Whose certificates count; None for those of the usual authorities."""
    if options.insecure:
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        return context
    if options.ca is None:
        return None
    expect_file(options.ca, "a file of certificates")
    try:
        return ssl.create_default_context(cafile=str(options.ca))
    except (ssl.SSLError, OSError, ValueError) as error:
        raise InputError(f"cannot read PEM certificates from {options.ca}: {error}") from error


def parted(url: str) -> tuple[str, dict[str, str]]:
    """The address, and the header that carries the user and the password it was written with."""
    public = without_password(url)
    if public == url:
        return url, {}
    try:
        user, password = urlsplit(url).username or "", urlsplit(url).password or ""
    except ValueError:
        return public, {}
    pair = f"{unquote(user)}:{unquote(password)}".encode()
    return public, {"Authorization": f"Basic {base64.b64encode(pair).decode()}"}
