"""LMCache: where it keeps caches, how they get there, who opens them; as its code has it (0.5.6).

It is set up by a file of its own, by variables of the server that it serves, or as a server by
itself, whose adapters are pieces of JSON. Only the latter can encrypt.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

from keyhole.configs.command import Options, Program, Word, reached_from_outside
from keyhole.configs.containers import Mapping
from keyhole.configs.finding import Finding, Level, Recognised, Rule
from keyhole.core import standards

_READ = "keyhole recover MODEL FILE"

PLAIN = Rule(
    "KH-CONFIG-LMCACHE-PLAIN", "Caches are kept as they are", Level.MEDIUM,
    "keys and values of prompts are written as they are, and prompts are read back from them",
    "keep caches by LMCache's server, with an adapter whose serde is aesgcm, and the place as "
    "secret as prompts",
    _READ, standards.TEXTS_STORED,
)  # fmt: skip
REMOTE = Rule(
    "KH-CONFIG-LMCACHE-REMOTE", "Caches go over the network as they are", Level.HIGH,
    "whoever sees the traffic, or reaches the other end, reads prompts back from keys and values",
    "use rediss:// with a password, or a network of their own for both ends",
    _READ, standards.TEXTS_STORED,
)  # fmt: skip
ONE_KEY = Rule(
    "KH-CONFIG-LMCACHE-ONE-KEY", "One key opens the caches of all tenants", Level.LOW,
    "every tenant's key is derived from one master key and a salt that stands in the file's name; "
    "requests without cache_salt share one key; and the name has an unkeyed hash of the tokens, "
    "which confirms a guessed prompt",
    "set a cache_salt for each tenant in front of the server, keep the master key where no "
    "tenant's process reads it, and give tenants servers of their own where that is not enough",
    _READ, standards.TEXTS_STORED,
)  # fmt: skip
_PLAIN_WAY = re.compile(
    r"(?:redis|redis-sentinel|resp|valkey|lm)://(?:[^@/]*@)?(?P<host>\[[^\]]*\]|[^:/,]*)"
)
_ADAPTER = re.compile(
    r'"type"\s*:\s*"(?:(?P<kept>fs|fs_native|hf3fs|dax|raw_block|s3|hfbucket|nixl\w*)'
    r'|(?P<sent>resp|valkey))"'
)
_WORDS = {"local_cpu", "max_local_cpu_size", "max_local_disk_size", "remote_serde"}


def _setting(name: str, word: Word) -> Iterator[Finding]:
    """What a folder or an address of its settings opens."""
    way = _PLAIN_WAY.match(word.text)
    if way and reached_from_outside(Word(way["host"], word.line), "localhost"):
        scheme = word.text.partition("://")[0]
        yield Finding(REMOTE, word.line, f"{name} {scheme}://{way['host']}")
    elif not way and word.text.startswith("fs://" if "URL" in name.upper() else ""):
        yield Finding(PLAIN, word.line, f"{name} {word.text}")


def look_at_lmcache_variables(options: Options) -> Iterator[Finding]:
    for name in ("LMCACHE_LOCAL_DISK", "LMCACHE_REMOTE_URL"):
        if (word := options.env.get(name)) and word.text.lower() not in ("", "false", "none"):
            yield from _setting(name, word)


def _look_at_lmcache(options: Options) -> Iterator[Finding]:
    """Its server: the adapters that caches go to, each a piece of JSON."""
    yield from look_at_lmcache_variables(options)
    for name, value in itertools.pairwise(options.words):
        if name.text != "--l2-adapter":
            continue
        adapter = _ADAPTER.search(value.text)
        if '"aesgcm"' in value.text:
            yield Finding(ONE_KEY, value.line, "--l2-adapter with serde aesgcm")
        elif adapter and adapter["kept"]:
            what = f"--l2-adapter {adapter['kept']} without serde aesgcm"
            yield Finding(PLAIN, value.line, what)
        elif adapter and not re.search(r'"tls_enable"\s*:\s*true', value.text):
            yield Finding(REMOTE, value.line, f"--l2-adapter {adapter['sent']} without TLS")


def lmcache_settings(root: Mapping) -> Iterator[Recognised]:
    """LMCache's own file (LMCACHE_CONFIG_FILE): known by names that stand together there alone."""
    if not {"local_disk", "remote_url"} & set(root.pairs) or not _WORDS & set(root.pairs):
        return
    given = [(name, root.scalar(name)) for name in ("local_disk", "remote_url")]
    hits = tuple(
        hit for name, word in given
        if word and word.text.lower() not in ("", "null", "none", "false")
        for hit in _setting(name, word)
    )  # fmt: skip
    yield Recognised("server", "LMCache", root.line, hits)


LMCACHE = Program(
    "LMCache",
    "server",
    ("lmcache", "max_local_cpu_size", "remote_serde", "max_local_disk_size"),
    (("lmcache", "server"), ("-m", "lmcache.v1.multiprocess.server")),
    re.compile(r"(^|/)lmcache/(standalone|lmcache)"),
    (PLAIN, REMOTE, ONE_KEY),
    _look_at_lmcache,
)
