"""Addresses without their passwords, and machines that need an authorization."""

from __future__ import annotations

import base64

import pytest

from keyhole.core.endpoint import expect_authorized, without_password
from keyhole.core.errors import InputError
from keyhole.oracle.http import split_password


@pytest.mark.parametrize(
    ("given", "public"),
    [
        ("http://h:80/v2/models/m", "http://h:80/v2/models/m"),
        ("http://h:80/v2/models/m@1", "http://h:80/v2/models/m@1"),
        ("http://me:pass@h:80/v2/models/m@1", "http://h:80/v2/models/m@1"),
        ("https://me@h/x", "https://h/x"),
        ("http://me:p@ss@h/x", "http://h/x"),
        ("http://me:pa/ss@h/x", "http://h/x"),
        ("http://me:pass@[::1]:80/x", "http://[::1]:80/x"),
        ("folder/a@b", "folder/a@b"),
    ],
)
def test_addresses_are_shown_without_passwords(given, public):
    assert without_password(given) == public


def test_the_password_becomes_a_header():
    assert split_password("http://h/x") == ("http://h/x", {})
    public, headers = split_password("http://me%40work:p%2Fss@h/x")
    assert public == "http://h/x"
    kind, pair = headers["Authorization"].split()
    assert (kind, base64.b64decode(pair)) == ("Basic", b"me@work:p/ss")


@pytest.mark.parametrize(
    "host", ["localhost", "127.0.0.1", "127.8.9.1:99", "[::1]:80", "u:p@[::1]"]
)
def test_this_machine_needs_no_authorization(host):
    expect_authorized(f"http://{host}/x", authorized=False)


@pytest.mark.parametrize(
    "host",
    [
        "example.org",
        "10.0.0.1",
        "localhost.example.org",
        "u:localhost@10.0.0.1",
        "0.0.0.0",
    ],
)
def test_other_machines_need_authorization(host):
    with pytest.raises(InputError, match="is another machine: give --authorized"):
        expect_authorized(f"http://{host}/x", authorized=False)
    expect_authorized(f"http://{host}/x", authorized=True)


def test_an_incomplete_address_is_refused():
    with pytest.raises(InputError, match="expected a URL such as"):
        expect_authorized("http://[::1/x", authorized=True)
