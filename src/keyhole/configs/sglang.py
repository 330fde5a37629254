"""SGLang's server: what its command line opens, as its documentation has it (not tried on it)."""

from __future__ import annotations

import re
from collections.abc import Iterator

from keyhole.configs.command import Options, Program, reached_from_outside
from keyhole.configs.finding import Hit, Level, Rule

_AUDIT = "keyhole audit http://HOST:30000 --model MODEL"

HIDDEN_STATES = Rule(
    "KH-CONFIG-SGLANG-HIDDEN-STATES", "Hidden states are returned", Level.HIGH,
    "POST /generate with return_hidden_states returns them, and texts are read back from them",
    "leave --enable-return-hidden-states out", _AUDIT,
)  # fmt: skip
EMBEDDINGS = Rule(
    "KH-CONFIG-SGLANG-EMBEDDINGS", "Embeddings of texts are returned", Level.LOW,
    "POST /v1/embeddings returns a vector for a text, from which short texts are read back",
    "treat embeddings as the texts: guard whoever keeps them as well",
    "keyhole audit http://HOST:30000/v1/embeddings --model MODEL --known TEXTS.txt",
)  # fmt: skip
OPEN = Rule(
    "KH-CONFIG-SGLANG-OPEN", "A server without a key listens beyond this machine", Level.HIGH,
    "whoever reaches the address may ask /generate for log-probabilities, by texts or by vectors "
    "(input_embeds)",
    "set --api-key, or listen at 127.0.0.1 behind a proxy that checks requests", _AUDIT,
)  # fmt: skip


def look(options: Options) -> Iterator[Hit]:
    if given := options.has("--enable-return-hidden-states"):
        yield Hit(HIDDEN_STATES, given.line, "--enable-return-hidden-states")
    if given := options.has("--is-embedding"):
        yield Hit(EMBEDDINGS, given.line, "--is-embedding")
    host = options.option("--host")
    closed = options.option("--api-key") or options.local or options.opaque
    if host and reached_from_outside(host, "127.0.0.1") and not closed:
        yield Hit(OPEN, host.line, f"--host {host.text}, no --api-key")


PROGRAM = Program(
    "SGLang",
    ("sglang",),
    (("-m", "sglang.launch_server"), ("sglang", "serve")),
    re.compile(r"lmsysorg/sglang"),
    (HIDDEN_STATES, EMBEDDINGS, OPEN),
    look,
)
