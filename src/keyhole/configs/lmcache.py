"""LMCache: where it keeps caches, how they get there and who opens them, as in its code (0.5.6).

It is configured by a file of its own, by variables of the server that it serves, or as a server by
itself, whose adapters are pieces of JSON. Only the latter can encrypt.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

from keyhole.configs.command import Look, OptionRule, Options, Program, Word, reached_from_outside
from keyhole.configs.finding import Finding, Level, Recognised
from keyhole.configs.tree import Mapping
from keyhole.core import standards

_READ = "keyhole recover MODEL FILE"
_NOT_SET = ("", "null", "none", "false")
_VARIABLES = ("LMCACHE_LOCAL_DISK", "LMCACHE_REMOTE_URL")
_SETTINGS = ("local_disk", "remote_url")
_OTHER_SETTINGS = ("local_cpu", "max_local_cpu_size", "max_local_disk_size", "remote_serde")
_PLAIN_ADDRESS = re.compile(
    r"(?P<scheme>redis|redis-sentinel|resp|valkey|lm)://(?:[^@/]*@)?(?P<host>\[[^\]]*\]|[^:/,]*)"
)
_ADAPTER = re.compile(
    r'"type"\s*:\s*"(?:(?P<kept>fs|fs_native|hf3fs|dax|raw_block|s3|hfbucket|nixl\w*)'
    r'|(?P<sent>resp|valkey))"'
)


def _place(name: str, given: Word, *, sent: bool) -> Iterator[Word]:
    """Yield a place to which caches are sent unencrypted, or where they are kept unencrypted."""
    address = _PLAIN_ADDRESS.match(given.text)
    if given.text.lower() in _NOT_SET:
        return
    if sent and address and reached_from_outside(address["host"]):
        yield Word(f"{name} {address['scheme']}://{address['host']}", given.line)
    folder = "fs://" if name.upper().endswith("URL") else ""
    if not sent and not address and given.text.startswith(folder):
        yield Word(f"{name} {given.text}", given.line)


def _places(*, sent: bool) -> Look:
    def look(options: Options) -> Iterator[Word]:
        for name in _VARIABLES:
            if given := options.command.env.get(name):
                yield from _place(name, given, sent=sent)
        for given in _adapters(options):
            adapter = _ADAPTER.search(given.text)
            if adapter is None or _encrypts(given):
                continue
            if not sent and (kind := adapter["kept"]):
                yield Word(f"--l2-adapter {kind} without serde aesgcm", given.line)
            tls = re.search(r'"tls_enable"\s*:\s*true', given.text)
            if sent and (kind := adapter["sent"]) and not tls:
                yield Word(f"--l2-adapter {kind} without TLS", given.line)

    return look


def _adapters(options: Options) -> list[Word]:
    pairs = itertools.pairwise(options.words)
    return [value for name, value in pairs if name.text == "--l2-adapter"]


def _encrypts(adapter: Word) -> bool:
    return '"aesgcm"' in adapter.text


PLAIN = OptionRule(
    "KH-CONFIG-LMCACHE-PLAIN", "Caches are kept unencrypted", Level.MEDIUM,
    "keys and values of prompts are stored unencrypted, and prompts are read back from them",
    "keep caches by LMCache's server, with an adapter whose serde is aesgcm, and the place as "
    "secret as prompts",
    _READ, standards.TEXTS_STORED, _places(sent=False),
)  # fmt: skip
REMOTE = OptionRule(
    "KH-CONFIG-LMCACHE-REMOTE", "Caches are sent over the network unencrypted", Level.HIGH,
    "anyone who sees the traffic or reaches the other end reads prompts back from keys and values",
    "use rediss:// with a password, or a network that only the two ends are on",
    _READ, standards.TEXTS_STORED, _places(sent=True),
)  # fmt: skip
ONE_KEY = OptionRule(
    "KH-CONFIG-LMCACHE-ONE-KEY", "One key opens the caches of all tenants", Level.LOW,
    "every tenant's key is derived from one master key and a salt that is in the file's name; "
    "requests without cache_salt share one key; and the name has an unkeyed hash of the tokens, "
    "which confirms a guessed prompt",
    "set a cache_salt for each tenant in front of the server, keep the master key where no "
    "tenant's process reads it, and give tenants servers of their own where that is not enough",
    _READ, standards.TEXTS_STORED,
    lambda options: [
        Word("--l2-adapter with serde aesgcm", given.line)
        for given in _adapters(options) if _encrypts(given)
    ],
)  # fmt: skip
LMCACHE = Program(
    "server", "LMCache", ("lmcache", "max_local_cpu_size", "remote_serde", "max_local_disk_size"),
    starts=("lmcache server", "-m lmcache.v1.multiprocess.server"),
    image=re.compile(r"(^|/)lmcache/(standalone|lmcache)"),
    rules=(PLAIN, REMOTE, ONE_KEY),
    variables=_VARIABLES,
)  # fmt: skip


def lmcache_settings(root: Mapping) -> Iterator[Recognised]:
    """Recognise LMCache's own file (LMCACHE_CONFIG_FILE) by settings that no other program has."""
    names = root.pairs.keys()
    if names.isdisjoint(_SETTINGS) or names.isdisjoint(_OTHER_SETTINGS):
        return
    hits = tuple(
        Finding(rule, place.line, place.text)
        for rule, sent in ((PLAIN, False), (REMOTE, True))
        for name in _SETTINGS
        if (given := root.scalar(name))
        for place in _place(name, given, sent=sent)
    )
    yield Recognised("server", "LMCache", root.line, hits)
