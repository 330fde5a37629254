"""llama.cpp's server: what its command line opens. The options are those of its own README; what
/slots, /props and saved slots hold was looked up on the running server."""

from __future__ import annotations

import re
from collections.abc import Iterator

from keyhole.configs.command import Options, Program, reached_from_outside
from keyhole.configs.finding import Hit, Level, Rule

_AUDIT = "keyhole audit http://HOST:8080 --model MODEL.gguf"

SLOT_FILES = Rule(
    "KH-CONFIG-LLAMA-SLOT-FILES", "Prompts can be saved to files", Level.HIGH,
    "POST /slots/0?action=save writes a file with the prompt's token ids, keys and values",
    "leave --slot-save-path out, or keep that folder as secret as prompts; set --api-key",
    "keyhole audit SLOT.bin --model MODEL.gguf",
)  # fmt: skip
TOKEN_STATES = Rule(
    "KH-CONFIG-LLAMA-TOKEN-STATES", "The last state of every token is returned", Level.HIGH,
    "POST /embeddings returns the last state of every token, from which texts are read back",
    "start it with --pooling mean, and treat the vectors as the texts; set --api-key", _AUDIT,
)  # fmt: skip
EMBEDDINGS = Rule(
    "KH-CONFIG-LLAMA-EMBEDDINGS", "Embeddings of texts are returned", Level.LOW,
    "POST /v1/embeddings returns a vector for a text, from which short texts are read back",
    "treat embeddings as the texts: guard whoever keeps them as well",
    "keyhole audit http://HOST:8080/v1/embeddings --model MODEL.gguf --known TEXTS.txt",
)  # fmt: skip
OPEN = Rule(
    "KH-CONFIG-LLAMA-OPEN", "A server without a key listens beyond this machine", Level.HIGH,
    "whoever reaches the address may ask /completion for log-probabilities of the whole "
    "vocabulary, from which the last layer of the model is read",
    "set --api-key or --api-key-file, or listen at 127.0.0.1 behind a proxy that checks requests",
    "keyhole extract http://HOST:8080 --method output-layer",
)  # fmt: skip
SLOTS = Rule(
    "KH-CONFIG-LLAMA-SLOTS", "The slots of other clients can be watched", Level.LOW,
    "GET /slots tells every client how many tokens the others' prompts have, and their settings",
    "start it with --no-slots", _AUDIT,
)  # fmt: skip
PROPS = Rule(
    "KH-CONFIG-LLAMA-PROPS", "Clients may change the server's settings", Level.LOW,
    "POST /props changes settings of the server for all of its clients",
    "leave --props out", _AUDIT,
)  # fmt: skip
METRICS = Rule(
    "KH-CONFIG-LLAMA-METRICS", "Counts of tokens and requests are published", Level.LOW,
    "GET /metrics tells how many tokens were read and written, and no text",
    "leave --metrics out, or let only the monitoring network reach it", _AUDIT,
)  # fmt: skip
PROMPT_LOG = Rule(
    "KH-CONFIG-LLAMA-PROMPT-LOG", "Prompts are written to a folder", Level.MEDIUM,
    "every prompt is written there in the clear",
    "leave --log-prompts-dir out", "ls the folder: no attack is needed",
)  # fmt: skip


def look(options: Options) -> Iterator[Hit]:
    if path := options.option("--slot-save-path", env="LLAMA_ARG_SLOT_SAVE_PATH"):
        yield Hit(SLOT_FILES, path.line, f"--slot-save-path {path.text}".strip())
    if folder := options.option("--log-prompts-dir"):
        yield Hit(PROMPT_LOG, folder.line, f"--log-prompts-dir {folder.text}".strip())
    embedding = options.has("--embedding", "--embeddings", env="LLAMA_ARG_EMBEDDINGS")
    pooling = options.option("--pooling", env="LLAMA_ARG_POOLING")
    if embedding and pooling and pooling.text == "none":
        yield Hit(TOKEN_STATES, pooling.line, "--pooling none")
    elif embedding:
        yield Hit(EMBEDDINGS, embedding.line, "--embeddings")
    for flag, env, rule in (
        ("--slots", "LLAMA_ARG_ENDPOINT_SLOTS", SLOTS),
        ("--props", "LLAMA_ARG_ENDPOINT_PROPS", PROPS),
        ("--metrics", "LLAMA_ARG_ENDPOINT_METRICS", METRICS),
    ):
        if given := options.has(flag, env=env):
            yield Hit(rule, given.line, flag)
    host = options.option("--host", env="LLAMA_ARG_HOST")
    key = options.option("--api-key", env="LLAMA_API_KEY")
    key = key or options.option("--api-key-file", env="LLAMA_ARG_API_KEY_FILE")
    # Its containers set LLAMA_ARG_HOST=0.0.0.0; started by itself it listens at 127.0.0.1.
    in_container = options.image is not None and bool(PROGRAM.image.search(options.image.text))
    outside = reached_from_outside(host, "0.0.0.0" if in_container else "127.0.0.1")  # noqa: S104
    if outside and not (key or options.local or options.opaque):
        where = f"--host {host.text}" if host else "the container listens at 0.0.0.0"
        yield Hit(OPEN, host.line if host else options.program.line, f"{where}, no --api-key")


PROGRAM = Program(
    "llama.cpp",
    ("llama",),
    (("llama-server",), ("llama.cpp-server",)),
    re.compile(r"llama\.cpp(-\w+)?:server"),
    (SLOT_FILES, TOKEN_STATES, EMBEDDINGS, OPEN, SLOTS, PROPS, METRICS, PROMPT_LOG),
    look,
)
