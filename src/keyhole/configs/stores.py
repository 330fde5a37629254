"""Stores of vectors and of caches: rules for the commands that start them, and for their own files.

Chroma, Qdrant, Weaviate and Milvus ask for no key unless they are configured to.

LMCache keeps the caches of servers, as in its code (0.5.6). It is configured by a file
of its own, by variables of the server that it serves, or as a server by itself, whose
adapters are pieces of JSON. Only the latter can encrypt. Its rules say where caches are
kept, how they get there and who opens them.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

from keyhole.configs.command import (
    ANYWHERE,
    Look,
    OptionRule,
    Options,
    Program,
    Word,
    is_on,
    may_be_on,
    reached_from_outside,
    unguarded,
)
from keyhole.configs.finding import Finding, Level, Recognised
from keyhole.configs.helm import in_cluster_only, inside
from keyhole.configs.tree import Mapping, Node, Scalar, walk
from keyhole.core import standards

# Vector stores

_CHROMA_AUDIT = "keyhole audit chroma:FOLDER --model ENCODER"
_EMBEDDINGS = "anyone can read all embeddings, and many of their texts with the encoder"
_ANONYMOUS = "AUTHENTICATION_ANONYMOUS_ACCESS_ENABLED"


def _chroma_reset(options: Options) -> Iterator[Word]:
    env = options.command.env
    reset = env.get("ALLOW_RESET") or env.get("CHROMA_ALLOW_RESET")
    if reset and is_on(reset):
        yield Word(f"ALLOW_RESET={reset.text}", reset.line)


def _may_have(options: Options, *variables: str) -> bool:
    return any(
        may_be_on(options.command.env.get(f"{name}_ENABLED")) for name in variables
    )


_weaviate_without_login = unguarded(
    "no authentication",
    lambda options: _may_have(
        options,
        "AUTHENTICATION_APIKEY",
        "AUTHENTICATION_OIDC",
        "AUTHENTICATION_DB_USERS",
    ),
)


def _weaviate_open(options: Options) -> Iterator[Word]:
    """Weaviate lets everybody in if anonymous access is on, or if no login is configured."""
    anonymous = options.command.env.get(_ANONYMOUS)
    # A list of rights may leave none to a client without a name.
    limited = _may_have(options, "AUTHORIZATION_RBAC", "AUTHORIZATION_ADMINLIST")
    if anonymous is None:
        yield from _weaviate_without_login(options)
    elif is_on(anonymous) and not limited and not options.command.local:
        yield Word(f"{_ANONYMOUS}={anonymous.text}", anonymous.line)


def _milvus_guarded(options: Options) -> bool:
    """Return whether authorization is on, or a mounted configuration file may turn it on.

    Milvus takes common.security.authorizationEnabled in any case, with dots or
    underscores.
    """
    env = {
        re.sub(r"[._]", "", name).lower(): word
        for name, word in options.command.env.items()
    }
    required = may_be_on(env.get("commonsecurityauthorizationenabled"))
    return required or options.mounts("/milvus/configs")


CHROMA_RESET = OptionRule(
    "KH-CONFIG-CHROMA-RESET",
    "Clients can delete everything",
    Level.MEDIUM,
    "POST /reset deletes all collections: clients that read a store should not be able to empty it",
    "set allow_reset to false (ALLOW_RESET), which is the default",
    _CHROMA_AUDIT,
    standards.STORE_OPEN,
    _chroma_reset,
)
QDRANT_OPEN = OptionRule(
    "KH-CONFIG-QDRANT-OPEN",
    "A store without a key can be reached from other machines",
    Level.HIGH,
    _EMBEDDINGS,
    "set service.api_key (QDRANT__SERVICE__API_KEY) and TLS, or listen at 127.0.0.1",
    "keyhole audit qdrant:FOLDER --model ENCODER",
    standards.STORE_OPEN,
    unguarded(
        "no QDRANT__SERVICE__API_KEY",
        # A configuration file may hold the key, and is checked by itself.
        lambda options: (
            options.key(env="QDRANT__SERVICE__API_KEY")
            or options.mounts("/qdrant/config")
        ),
        host="",
        env="QDRANT__SERVICE__HOST",
    ),
)
WEAVIATE_OPEN = OptionRule(
    "KH-CONFIG-WEAVIATE-OPEN",
    "A store lets everybody in",
    Level.HIGH,
    _EMBEDDINGS,
    "set AUTHENTICATION_ANONYMOUS_ACCESS_ENABLED to false and AUTHENTICATION_APIKEY_ENABLED to "
    "true, or listen at 127.0.0.1",
    "keyhole audit weaviate:http://HOST:8080 --model ENCODER",
    standards.STORE_OPEN,
    _weaviate_open,
)
MILVUS_OPEN = OptionRule(
    "KH-CONFIG-MILVUS-OPEN",
    "A store lets everybody in",
    Level.HIGH,
    _EMBEDDINGS,
    "set common.security.authorizationEnabled and change root's password, or listen at 127.0.0.1",
    "keyhole audit milvus:http://HOST:19530 --model ENCODER",
    standards.STORE_OPEN,
    unguarded("authorization is not on", _milvus_guarded, host=""),
)
CHROMA = Program(
    "store",
    "Chroma",
    ("chroma", "allow_reset"),
    starts=("chroma run",),
    image=re.compile(r"chromadb/chroma|chroma-core/chroma"),
    rules=(
        OptionRule(
            "KH-CONFIG-CHROMA-OPEN",
            "A store without authentication can be reached from other machines",
            Level.HIGH,
            _EMBEDDINGS,
            "listen at 127.0.0.1, or put a proxy in front that checks keys (Chroma has none of its "
            "own since 1.0)",
            _CHROMA_AUDIT,
            standards.STORE_OPEN,
            unguarded(
                "no authentication",
                lambda options: any(
                    name.startswith("CHROMA_SERVER_AUTH") and word.text
                    for name, word in options.command.env.items()
                ),
                default="localhost",
                in_own_image=ANYWHERE,
            ),
        ),
        CHROMA_RESET,
    ),
)
QDRANT = Program(
    "store",
    "Qdrant",
    ("qdrant", "storage_path"),
    starts=("qdrant",),
    image=re.compile(r"qdrant/qdrant"),
    rules=(QDRANT_OPEN,),
)
WEAVIATE = Program(
    "store",
    "Weaviate",
    ("weaviate", _ANONYMOUS, "anonymous_access"),
    starts=("weaviate",),
    image=re.compile(r"(^|/)weaviate(:|@|$)"),
    rules=(WEAVIATE_OPEN,),
    variables=(_ANONYMOUS,),
)
MILVUS = Program(
    "store",
    "Milvus",
    ("milvus", "authorizationEnabled"),
    starts=("milvus run",),
    image=re.compile(r"(^|/)milvus(:|@|$)"),
    rules=(MILVUS_OPEN,),
)
STORES = (CHROMA, QDRANT, WEAVIATE, MILVUS)

# LMCache

_READ = "keyhole recover MODEL FILE"
_NOT_SET = ("", "null", "none", "false")
_VARIABLES = ("LMCACHE_LOCAL_DISK", "LMCACHE_REMOTE_URL")
_SETTINGS = ("local_disk", "remote_url")
_OTHER_SETTINGS = (
    "local_cpu",
    "max_local_cpu_size",
    "max_local_disk_size",
    "remote_serde",
)
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
    "KH-CONFIG-LMCACHE-PLAIN",
    "Caches are kept unencrypted",
    Level.MEDIUM,
    "keys and values of prompts are stored unencrypted, and prompts are read back from them",
    "keep caches by LMCache's server, with an adapter whose serde is aesgcm, and the place as "
    "secret as prompts",
    _READ,
    standards.TEXTS_STORED,
    _places(sent=False),
)
REMOTE = OptionRule(
    "KH-CONFIG-LMCACHE-REMOTE",
    "Caches are sent over the network unencrypted",
    Level.HIGH,
    "anyone who sees the traffic or reaches the other end reads prompts back from keys and values",
    "use rediss:// with a password, or a network that only the two ends are on",
    _READ,
    standards.TEXTS_STORED,
    _places(sent=True),
)
ONE_KEY = OptionRule(
    "KH-CONFIG-LMCACHE-ONE-KEY",
    "One key opens the caches of all tenants",
    Level.LOW,
    "every tenant's key is derived from one master key and a salt that is in the file's name; "
    "requests without cache_salt share one key; and the name has an unkeyed hash of the tokens, "
    "which confirms a guessed prompt",
    "set a cache_salt for each tenant in front of the server, keep the master key where no "
    "tenant's process reads it, and give tenants servers of their own where that is not enough",
    _READ,
    standards.TEXTS_STORED,
    lambda options: [
        Word("--l2-adapter with serde aesgcm", given.line)
        for given in _adapters(options)
        if _encrypts(given)
    ],
)
LMCACHE = Program(
    "server",
    "LMCache",
    ("lmcache", "max_local_cpu_size", "remote_serde", "max_local_disk_size"),
    starts=("lmcache server", "-m lmcache.v1.multiprocess.server"),
    image=re.compile(r"(^|/)lmcache/(standalone|lmcache)"),
    rules=(PLAIN, REMOTE, ONE_KEY),
    variables=_VARIABLES,
)


# Configuration files, recognised by what they contain


def look_at_settings(roots: list[Node]) -> Iterator[Recognised]:
    """Recognise configuration files of stores and of LMCache, also inside other files."""
    for root in roots:
        if isinstance(root, Mapping):
            yield from _chroma_settings(root)
            yield from _qdrant_settings(root)
            yield from _lmcache_settings(root)
        for node in walk(root):
            if isinstance(node, Mapping):
                yield from _weaviate_settings(node)
                yield from _milvus_settings(node)
                for name, text in node.pairs.items():
                    if isinstance(text, Scalar) and name.endswith((".yaml", ".yml")):
                        yield from look_at_settings(inside(text))


def _chroma_settings(root: Mapping) -> Iterator[Recognised]:
    reset = root.scalar("allow_reset")
    if reset and is_on(reset):
        hit = Finding(CHROMA_RESET, reset.line, "allow_reset: true")
        yield Recognised("store", "Chroma", reset.line, (hit,))


def _qdrant_settings(root: Mapping) -> Iterator[Recognised]:
    service = root.mapping("service")
    if service is None or root.at("storage", "storage_path") is None:
        return
    host = service.scalar("host")
    key = service.scalar("api_key")
    hits = ()
    if reached_from_outside(host.text if host else ANYWHERE) and not (key and key.text):
        hits = (
            Finding(QDRANT_OPEN, (host or service).line, "service without api_key"),
        )
    yield Recognised("store", "Qdrant", service.line, hits)


def _weaviate_settings(node: Mapping) -> Iterator[Recognised]:
    anonymous = node.mapping("authentication", "anonymous_access")
    if anonymous is None:
        return
    enabled = anonymous.scalar("enabled")
    rights = ("admin_list", "rbac")
    limited = any(
        may_be_on(node.scalar("authorization", name, "enabled")) for name in rights
    )
    hits = ()
    if enabled and is_on(enabled) and not limited and not in_cluster_only(node):
        hits = (Finding(WEAVIATE_OPEN, enabled.line, "anonymous_access.enabled: true"),)
    yield Recognised("store", "Weaviate", anonymous.line, hits)


def _milvus_settings(node: Mapping) -> Iterator[Recognised]:
    required = node.scalar("security", "authorizationEnabled")
    if required is not None:
        off = Finding(
            MILVUS_OPEN, required.line, f"authorizationEnabled: {required.text}"
        )
        on = may_be_on(required) or "{{" in required.text
        yield Recognised("store", "Milvus", required.line, () if on else (off,))


def _lmcache_settings(root: Mapping) -> Iterator[Recognised]:
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
