"""Vector stores: Chroma and Qdrant, whose servers ask nobody for a key unless they are told to."""

from __future__ import annotations

import re
from collections.abc import Iterator

from keyhole.configs.command import Options, Program, Word, reached_from_outside
from keyhole.configs.containers import Mapping, Node
from keyhole.configs.finding import Hit, Level, Rule

CHROMA_OPEN = Rule(
    "KH-CONFIG-CHROMA-OPEN", "A store without authentication listens beyond this machine",
    Level.HIGH,
    "whoever reaches the address reads all embeddings, and with the encoder many of their texts",
    "listen at 127.0.0.1, or put a proxy in front that checks keys (Chroma has none of its own "
    "since 1.0)",
    "keyhole audit chroma:FOLDER --model ENCODER",
)  # fmt: skip
CHROMA_RESET = Rule(
    "KH-CONFIG-CHROMA-RESET", "Clients may delete everything", Level.MEDIUM,
    "POST /reset deletes all collections: who can read a store should not be able to replace it",
    "set allow_reset to false (ALLOW_RESET), which is the default",
    "keyhole audit chroma:FOLDER --model ENCODER",
)  # fmt: skip
QDRANT_OPEN = Rule(
    "KH-CONFIG-QDRANT-OPEN", "A store without a key listens beyond this machine", Level.HIGH,
    "whoever reaches the address reads all embeddings, and with the encoder many of their texts",
    "set service.api_key (QDRANT__SERVICE__API_KEY) and TLS, or listen at 127.0.0.1",
    "keyhole audit qdrant:FOLDER --model ENCODER",
)  # fmt: skip
_YES = ("true", "1", "yes", "on")


def look_at_chroma(options: Options) -> Iterator[Hit]:
    reset = options.env.get("ALLOW_RESET") or options.env.get("CHROMA_ALLOW_RESET")
    if reset and reset.text.lower() in _YES:
        yield Hit(CHROMA_RESET, reset.line, f"ALLOW_RESET={reset.text}")
    host = options.option("--host")
    guarded = any(name.startswith("CHROMA_SERVER_AUTH") for name in options.env)
    default = "0.0.0.0" if _is_image(options.image, CHROMA) else "localhost"  # noqa: S104
    if reached_from_outside(host, default) and not (guarded or options.local or options.opaque):
        where = f"--host {host.text}" if host else "the container listens at 0.0.0.0"
        line = host.line if host else options.program.line
        yield Hit(CHROMA_OPEN, line, f"{where}, no authentication")


def look_at_qdrant(options: Options) -> Iterator[Hit]:
    host = options.env.get("QDRANT__SERVICE__HOST")
    key = options.env.get("QDRANT__SERVICE__API_KEY")
    # A configuration of its own may hold the key: then it is looked at by itself.
    own = options.option("--config-path") or any("/qdrant/config" in at for at in options.mounts)
    if not (key or own or options.local or options.opaque) and reached_from_outside(
        host,
        "0.0.0.0",  # noqa: S104 - what it listens at if nothing is said
    ):
        yield Hit(QDRANT_OPEN, options.program.line, "no QDRANT__SERVICE__API_KEY")


def look_at_settings(root: Node) -> Iterator[Hit]:
    """Their own configuration files, known by what stands in them."""
    if not isinstance(root, Mapping):
        return
    reset = root.scalar("allow_reset")
    if reset and reset.text.lower() in _YES:
        yield Hit(CHROMA_RESET, reset.line, "allow_reset: true")
    service, storage = root.mapping("service"), root.mapping("storage")
    if service and storage and "storage_path" in storage.pairs:
        host, key = service.scalar("host"), service.scalar("api_key")
        place = None if host is None else Word(host.text, host.line)
        if reached_from_outside(place, "0.0.0.0") and not (key and key.text):  # noqa: S104
            line = host.line if host else service.line
            yield Hit(QDRANT_OPEN, line, "service without api_key")


def _is_image(image: Word | None, program: Program) -> bool:
    return image is not None and bool(program.image.search(image.text))


CHROMA = Program(
    "Chroma",
    ("chroma", "allow_reset"),
    (("chroma", "run"),),
    re.compile(r"chromadb/chroma|chroma-core/chroma"),
    (CHROMA_OPEN, CHROMA_RESET),
    look_at_chroma,
)
QDRANT = Program(
    "Qdrant",
    ("qdrant", "storage_path"),
    (("qdrant",),),
    re.compile(r"qdrant/qdrant"),
    (QDRANT_OPEN,),
    look_at_qdrant,
)
