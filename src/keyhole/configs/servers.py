"""Servers that configurations start, and what their command lines open.

llama.cpp's options are those of its own README; what /slots, /props and saved slots hold was looked
up on the running server. vLLM's and SGLang's are as their documentation has them, not tried on the
servers. Chroma and Qdrant ask nobody for a key unless they are configured to.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from keyhole.configs.command import Options, Program, Word, reached_from_outside
from keyhole.configs.containers import Mapping, Node
from keyhole.configs.finding import Hit, Level, Rule

_ANYWHERE = "0.0.0.0"  # noqa: S104
_YES = ("true", "1", "yes", "on")


def _without_key(
    options: Options, rule: Rule, host: Word | None, default: str, missing: str, listens: str = ""
) -> Iterator[Hit]:
    """A server that other machines reach, and that asks for no key; `missing` names the key."""
    if options.local or options.opaque or not reached_from_outside(host, default):
        return
    where = f"--host {host.text}" if host else listens or "the container listens at 0.0.0.0"
    yield Hit(rule, host.line if host else options.program.line, f"{where}, {missing}")


def _in_own_image(options: Options, program: Program) -> bool:
    return options.image is not None and bool(program.image.search(options.image.text))


# llama.cpp

_LLAMA_AUDIT = "keyhole audit http://HOST:8080 --model MODEL.gguf"

LLAMA_SLOT_FILES = Rule(
    "KH-CONFIG-LLAMA-SLOT-FILES", "Prompts can be saved to files", Level.HIGH,
    "POST /slots/0?action=save writes a file with the prompt's token ids, keys and values",
    "leave --slot-save-path out, or keep that folder as secret as prompts; set --api-key",
    "keyhole audit SLOT.bin --model MODEL.gguf",
)  # fmt: skip
LLAMA_TOKEN_STATES = Rule(
    "KH-CONFIG-LLAMA-TOKEN-STATES", "The last state of every token is returned", Level.HIGH,
    "POST /embeddings returns the last state of every token, from which texts are read back",
    "start it with --pooling mean, and treat the vectors as the texts; set --api-key", _LLAMA_AUDIT,
)  # fmt: skip
LLAMA_EMBEDDINGS = Rule(
    "KH-CONFIG-LLAMA-EMBEDDINGS", "Embeddings of texts are returned", Level.LOW,
    "POST /v1/embeddings returns a vector for a text, from which short texts are read back",
    "treat embeddings as the texts: guard whoever keeps them as well",
    "keyhole audit http://HOST:8080/v1/embeddings --model MODEL.gguf --known TEXTS.txt",
)  # fmt: skip
LLAMA_OPEN = Rule(
    "KH-CONFIG-LLAMA-OPEN", "A server without a key listens beyond this machine", Level.HIGH,
    "whoever reaches the address may ask /completion for log-probabilities of the whole "
    "vocabulary, from which the last layer of the model is read",
    "set --api-key or --api-key-file, or listen at 127.0.0.1 behind a proxy that checks requests",
    "keyhole extract http://HOST:8080 --method output-layer",
)  # fmt: skip
LLAMA_SLOTS = Rule(
    "KH-CONFIG-LLAMA-SLOTS", "The slots of other clients can be watched", Level.LOW,
    "GET /slots tells every client how many tokens the others' prompts have, and their settings",
    "start it with --no-slots", _LLAMA_AUDIT,
)  # fmt: skip
LLAMA_PROPS = Rule(
    "KH-CONFIG-LLAMA-PROPS", "Clients may change the server's settings", Level.LOW,
    "POST /props changes settings of the server for all of its clients",
    "leave --props out", _LLAMA_AUDIT,
)  # fmt: skip
LLAMA_METRICS = Rule(
    "KH-CONFIG-LLAMA-METRICS", "Counts of tokens and requests are published", Level.LOW,
    "GET /metrics tells how many tokens were read and written, and no text",
    "leave --metrics out, or let only the monitoring network reach it", _LLAMA_AUDIT,
)  # fmt: skip
LLAMA_PROMPT_LOG = Rule(
    "KH-CONFIG-LLAMA-PROMPT-LOG", "Prompts are written to a folder", Level.MEDIUM,
    "every prompt is written there in the clear",
    "leave --log-prompts-dir out", "ls the folder: no attack is needed",
)  # fmt: skip


def _look_at_llama_cpp(options: Options) -> Iterator[Hit]:
    if path := options.option("--slot-save-path", env="LLAMA_ARG_SLOT_SAVE_PATH"):
        yield Hit(LLAMA_SLOT_FILES, path.line, f"--slot-save-path {path.text}".strip())
    if folder := options.option("--log-prompts-dir"):
        yield Hit(LLAMA_PROMPT_LOG, folder.line, f"--log-prompts-dir {folder.text}".strip())
    embedding = options.has("--embedding", "--embeddings", env="LLAMA_ARG_EMBEDDINGS")
    pooling = options.option("--pooling", env="LLAMA_ARG_POOLING")
    if embedding and pooling and pooling.text == "none":
        yield Hit(LLAMA_TOKEN_STATES, pooling.line, "--pooling none")
    elif embedding:
        yield Hit(LLAMA_EMBEDDINGS, embedding.line, "--embeddings")
    for flag, env, rule in (
        ("--slots", "LLAMA_ARG_ENDPOINT_SLOTS", LLAMA_SLOTS),
        ("--props", "LLAMA_ARG_ENDPOINT_PROPS", LLAMA_PROPS),
        ("--metrics", "LLAMA_ARG_ENDPOINT_METRICS", LLAMA_METRICS),
    ):
        if given := options.has(flag, env=env):
            yield Hit(rule, given.line, flag)
    host = options.option("--host", env="LLAMA_ARG_HOST")
    key = options.option("--api-key", env="LLAMA_API_KEY")
    if not (key or options.option("--api-key-file", env="LLAMA_ARG_API_KEY_FILE")):
        # Its containers set LLAMA_ARG_HOST=0.0.0.0; started by itself it listens at 127.0.0.1.
        default = _ANYWHERE if _in_own_image(options, LLAMA_CPP) else "127.0.0.1"
        yield from _without_key(options, LLAMA_OPEN, host, default, "no --api-key")


LLAMA_CPP = Program(
    "llama.cpp",
    ("llama",),
    (("llama-server",), ("llama.cpp-server",)),
    re.compile(r"llama\.cpp(-\w+)?:server"),
    (
        LLAMA_SLOT_FILES, LLAMA_TOKEN_STATES, LLAMA_EMBEDDINGS, LLAMA_OPEN, LLAMA_SLOTS,
        LLAMA_PROPS, LLAMA_METRICS, LLAMA_PROMPT_LOG,
    ),
    _look_at_llama_cpp,
)  # fmt: skip

# vLLM

_VLLM_AUDIT = "keyhole audit http://HOST:8000 --model MODEL"
_CAP = 20  # log-probabilities that it allows by default
_POOLING = {"embed", "embedding", "encode", "token_embed", "token-embed"}

VLLM_LOGPROBS = Rule(
    "KH-CONFIG-VLLM-LOGPROBS", "More log-probabilities than needed are allowed", Level.MEDIUM,
    "the more log-probabilities an answer holds, the fewer answers give the last layer away",
    f"leave --max-logprobs at {_CAP} or below",
    "keyhole extract http://HOST:8000 --method output-layer",
)  # fmt: skip
VLLM_PROMPT_EMBEDS = Rule(
    "KH-CONFIG-VLLM-PROMPT-EMBEDS", "Prompts may be vectors", Level.MEDIUM,
    "clients may ask by vectors of their choice (prompt_embeds), as attacks on weights do",
    "leave --enable-prompt-embeds out", _VLLM_AUDIT,
)  # fmt: skip
VLLM_TOKEN_STATES = Rule(
    "KH-CONFIG-VLLM-TOKEN-STATES", "The last state of every token is returned", Level.HIGH,
    "POST /pooling with task token_embed returns every token's last state, and no key guards it",
    "put a proxy in front that lets /v1/embeddings through alone",
    "keyhole audit http://HOST:8000 --model ENCODER",
)  # fmt: skip
VLLM_HIDDEN_STATES = Rule(
    "KH-CONFIG-VLLM-HIDDEN-STATES", "Hidden states are written to files", Level.HIGH,
    "a file for each prompt holds its token ids in the clear, and its hidden states",
    "leave the connector for hidden states out, or keep its path as secret as prompts",
    "keyhole recover MODEL FILE.safetensors",
)  # fmt: skip
VLLM_KV_FILES = Rule(
    "KH-CONFIG-VLLM-KV-CACHE", "Keys and values leave the server", Level.MEDIUM,
    "keys and values of prompts go to a shared place, and prompts are read back from them",
    "keep that place, and the way there, as secret as prompts: encrypted, and for one tenant",
    "keyhole recover MODEL FILE",
)  # fmt: skip
VLLM_OPEN = Rule(
    "KH-CONFIG-VLLM-OPEN", "A server without a key listens beyond this machine", Level.HIGH,
    "whoever reaches the address may ask for log-probabilities, embeddings and token states",
    "listen at 127.0.0.1 behind a proxy that checks keys and routes, and set --api-key as well",
    _VLLM_AUDIT,
)  # fmt: skip
VLLM_KEY_FOR_SOME = Rule(
    "KH-CONFIG-VLLM-KEY-FOR-SOME-ROUTES", "The key guards some routes alone", Level.LOW,
    "--api-key guards /v1 and a few more prefixes: /invocations and /pooling answer without it",
    "put a proxy in front that lets only the routes through that clients need", _VLLM_AUDIT,
)  # fmt: skip


def _look_at_vllm(options: Options) -> Iterator[Hit]:
    yield from _vllm_answers(options)
    if transfer := options.option("--kv-transfer-config", "--kv-transfer-config.kv-connector"):
        # Its name alone is shown: other settings of a connector may be secrets.
        name = re.search(r"[A-Za-z0-9]*Connector[A-Za-z0-9]*(?!_)\b", transfer.text)
        connector = "a connector" if name is None else name[0]
        rule = VLLM_HIDDEN_STATES if "HiddenStates" in connector else VLLM_KV_FILES
        yield Hit(rule, transfer.line, f"--kv-transfer-config {connector}")
    host, listens = options.option("--host"), "it listens at all addresses"
    key = options.option("--api-key", env="VLLM_API_KEY")
    if key is None:
        yield from _without_key(options, VLLM_OPEN, host, _ANYWHERE, "no --api-key", listens)
    elif not options.local and reached_from_outside(host, _ANYWHERE):
        where = f"--host {host.text}" if host else listens
        yield Hit(VLLM_KEY_FOR_SOME, key.line, f"{where}, with a key")


def _vllm_answers(options: Options) -> Iterator[Hit]:
    most = options.option("--max-logprobs")
    if most and re.fullmatch(r"-1|\d+", most.text) and not 0 <= int(most.text[:9]) <= _CAP:
        yield Hit(VLLM_LOGPROBS, most.line, f"--max-logprobs {most.text}")
    if given := options.has("--enable-prompt-embeds"):
        yield Hit(VLLM_PROMPT_EMBEDS, given.line, "--enable-prompt-embeds")
    for name in ("--task", "--runner", "--convert"):
        value = options.option(name)
        if value and (value.text in _POOLING or (name, value.text) == ("--runner", "pooling")):
            yield Hit(VLLM_TOKEN_STATES, value.line, f"{name} {value.text}")
            return


VLLM = Program(
    "vLLM",
    ("vllm",),
    (
        ("vllm", "serve"),
        ("-m", "vllm.entrypoints.openai.api_server"),
        ("-m", "vllm.entrypoints.api_server"),
    ),
    re.compile(r"vllm/vllm-\w+"),
    (
        VLLM_LOGPROBS, VLLM_PROMPT_EMBEDS, VLLM_TOKEN_STATES, VLLM_HIDDEN_STATES, VLLM_KV_FILES,
        VLLM_OPEN, VLLM_KEY_FOR_SOME,
    ),
    _look_at_vllm,
)  # fmt: skip

# SGLang

_SGLANG_AUDIT = "keyhole audit http://HOST:30000 --model MODEL"

SGLANG_HIDDEN_STATES = Rule(
    "KH-CONFIG-SGLANG-HIDDEN-STATES", "Hidden states are returned", Level.HIGH,
    "POST /generate with return_hidden_states returns them, and texts are read back from them",
    "leave --enable-return-hidden-states out", _SGLANG_AUDIT,
)  # fmt: skip
SGLANG_EMBEDDINGS = Rule(
    "KH-CONFIG-SGLANG-EMBEDDINGS", "Embeddings of texts are returned", Level.LOW,
    "POST /v1/embeddings returns a vector for a text, from which short texts are read back",
    "treat embeddings as the texts: guard whoever keeps them as well",
    "keyhole audit http://HOST:30000/v1/embeddings --model MODEL --known TEXTS.txt",
)  # fmt: skip
SGLANG_OPEN = Rule(
    "KH-CONFIG-SGLANG-OPEN", "A server without a key listens beyond this machine", Level.HIGH,
    "whoever reaches the address may ask /generate for log-probabilities, by texts or by vectors "
    "(input_embeds)",
    "set --api-key, or listen at 127.0.0.1 behind a proxy that checks requests", _SGLANG_AUDIT,
)  # fmt: skip


def _look_at_sglang(options: Options) -> Iterator[Hit]:
    if given := options.has("--enable-return-hidden-states"):
        yield Hit(SGLANG_HIDDEN_STATES, given.line, "--enable-return-hidden-states")
    if given := options.has("--is-embedding"):
        yield Hit(SGLANG_EMBEDDINGS, given.line, "--is-embedding")
    if not options.option("--api-key"):
        host = options.option("--host")
        yield from _without_key(options, SGLANG_OPEN, host, "127.0.0.1", "no --api-key")


SGLANG = Program(
    "SGLang",
    ("sglang",),
    (("-m", "sglang.launch_server"), ("sglang", "serve")),
    re.compile(r"lmsysorg/sglang"),
    (SGLANG_HIDDEN_STATES, SGLANG_EMBEDDINGS, SGLANG_OPEN),
    _look_at_sglang,
)

# Chroma and Qdrant

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


def _look_at_chroma(options: Options) -> Iterator[Hit]:
    reset = options.env.get("ALLOW_RESET") or options.env.get("CHROMA_ALLOW_RESET")
    if reset and reset.text.lower() in _YES:
        yield Hit(CHROMA_RESET, reset.line, f"ALLOW_RESET={reset.text}")
    if not any(name.startswith("CHROMA_SERVER_AUTH") for name in options.env):
        host = options.option("--host")
        default = _ANYWHERE if _in_own_image(options, CHROMA) else "localhost"
        yield from _without_key(options, CHROMA_OPEN, host, default, "no authentication")


def _look_at_qdrant(options: Options) -> Iterator[Hit]:
    host = options.env.get("QDRANT__SERVICE__HOST")
    key = options.env.get("QDRANT__SERVICE__API_KEY")
    # A configuration of its own may hold the key: then it is looked at by itself.
    own = options.option("--config-path") or any("/qdrant/config" in at for at in options.mounts)
    guarded = key or own or options.local or options.opaque
    if not guarded and reached_from_outside(host, _ANYWHERE):
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
        if reached_from_outside(host, _ANYWHERE) and not (key and key.text):
            line = host.line if host else service.line
            yield Hit(QDRANT_OPEN, line, "service without api_key")


CHROMA = Program(
    "Chroma",
    ("chroma", "allow_reset"),
    (("chroma", "run"),),
    re.compile(r"chromadb/chroma|chroma-core/chroma"),
    (CHROMA_OPEN, CHROMA_RESET),
    _look_at_chroma,
)
QDRANT = Program(
    "Qdrant",
    ("qdrant", "storage_path"),
    (("qdrant",),),
    re.compile(r"qdrant/qdrant"),
    (QDRANT_OPEN,),
    _look_at_qdrant,
)
PROGRAMS = (LLAMA_CPP, VLLM, SGLANG, CHROMA, QDRANT)
