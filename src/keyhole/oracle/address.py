"""Addresses as people write them, without what must not be written down, and who may ask there.

`http://user:password@host/…` is an address and a secret in one. `parted` takes them apart: what
stands in identities, ledgers, findings and error messages is the address alone.
"""

from __future__ import annotations

import base64
import ipaddress
from contextlib import suppress
from urllib.parse import unquote, urlsplit

from keyhole.core.errors import InputError


def names_address(name: str) -> bool:
    return name.lower().startswith(("http://", "https://"))


def without_password(name: str) -> str:
    """The same with nothing before the host: what may be shown."""
    scheme, mark, rest = name.partition("://")
    host, slash, path = rest.partition("/")
    if "@" in path and "@" not in host and not host.rpartition(":")[2].isdigit() and ":" in host:
        host, slash, path = rest.rpartition("@")[2].partition("/")  # a password with a slash in it
    return f"{scheme}{mark}{host.rpartition('@')[2]}{slash}{path}" if mark else name


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


def expect_authorized(url: str, authorized: bool) -> None:
    """Refuse to ask somebody else's machine unless one may."""
    try:
        host = urlsplit(url).hostname or ""
    except ValueError:
        public = without_password(url)
        raise InputError(f"expected a URL such as http://localhost:8080, got {public}") from None
    here = host == "localhost"
    with suppress(ValueError):
        here = ipaddress.ip_address(host).is_loopback
    if not here and not authorized:
        raise InputError(
            f"expected --authorized to ask {host}, which is not this machine, got none: give it "
            "if you may test that server"
        )
