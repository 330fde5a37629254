"""vLLM's server: what its command line opens, as its documentation has it (not tried on it)."""

from __future__ import annotations

import re
from collections.abc import Iterator

from keyhole.configs.command import Options, Program, reached_from_outside
from keyhole.configs.finding import Hit, Level, Rule

_AUDIT = "keyhole audit http://HOST:8000 --model MODEL"
_CAP = 20  # log-probabilities that it allows if nothing is said

LOGPROBS = Rule(
    "KH-CONFIG-VLLM-LOGPROBS", "More log-probabilities than needed are allowed", Level.MEDIUM,
    "the more log-probabilities an answer holds, the fewer answers give the last layer away",
    f"leave --max-logprobs at {_CAP} or below",
    "keyhole extract http://HOST:8000 --method output-layer",
)  # fmt: skip
PROMPT_EMBEDS = Rule(
    "KH-CONFIG-VLLM-PROMPT-EMBEDS", "Prompts may be vectors", Level.MEDIUM,
    "clients may ask by vectors of their choice (prompt_embeds), as attacks on weights do",
    "leave --enable-prompt-embeds out", _AUDIT,
)  # fmt: skip
TOKEN_STATES = Rule(
    "KH-CONFIG-VLLM-TOKEN-STATES", "The last state of every token is returned", Level.HIGH,
    "POST /pooling with task token_embed returns every token's last state, and no key guards it",
    "put a proxy in front that lets /v1/embeddings through alone",
    "keyhole audit http://HOST:8000 --model ENCODER",
)  # fmt: skip
HIDDEN_STATES = Rule(
    "KH-CONFIG-VLLM-HIDDEN-STATES", "Hidden states are written to files", Level.HIGH,
    "a file for each prompt holds its token ids in the clear, and its hidden states",
    "leave the connector for hidden states out, or keep its path as secret as prompts",
    "keyhole recover MODEL FILE.safetensors",
)  # fmt: skip
KV_FILES = Rule(
    "KH-CONFIG-VLLM-KV-CACHE", "Keys and values leave the server", Level.MEDIUM,
    "keys and values of prompts go to a shared place, and prompts are read back from them",
    "keep that place, and the way there, as secret as prompts: encrypted, and for one tenant",
    "keyhole recover MODEL FILE",
)  # fmt: skip
OPEN = Rule(
    "KH-CONFIG-VLLM-OPEN", "A server without a key listens beyond this machine", Level.HIGH,
    "whoever reaches the address may ask for log-probabilities, embeddings and token states",
    "listen at 127.0.0.1 behind a proxy that checks keys and routes, and set --api-key as well",
    _AUDIT,
)  # fmt: skip
KEY_FOR_SOME = Rule(
    "KH-CONFIG-VLLM-KEY-FOR-SOME-ROUTES", "The key guards some routes alone", Level.LOW,
    "--api-key guards /v1 and a few more prefixes: /invocations and /pooling answer without it",
    "put a proxy in front that lets only the routes through that clients need", _AUDIT,
)  # fmt: skip

_POOLING = {"embed", "embedding", "encode", "token_embed", "token-embed"}


def look(options: Options) -> Iterator[Hit]:
    yield from _answers(options)
    if transfer := options.option("--kv-transfer-config", "--kv-transfer-config.kv-connector"):
        # Its name alone is shown: other settings of a connector may be secrets.
        name = re.search(r"[A-Za-z0-9]*Connector[A-Za-z0-9]*(?!_)\b", transfer.text)
        connector = "a connector" if name is None else name[0]
        rule = HIDDEN_STATES if "HiddenStates" in connector else KV_FILES
        yield Hit(rule, transfer.line, f"--kv-transfer-config {connector}")
    host = options.option("--host")
    if options.local or not reached_from_outside(host, "0.0.0.0"):  # noqa: S104
        return
    where = f"--host {host.text}" if host else "it listens at all addresses"
    line = host.line if host else options.program.line
    if key := options.option("--api-key", env="VLLM_API_KEY"):
        yield Hit(KEY_FOR_SOME, key.line, f"{where}, with a key")
    elif not options.opaque:
        yield Hit(OPEN, line, f"{where}, no --api-key")


def _answers(options: Options) -> Iterator[Hit]:
    most = options.option("--max-logprobs")
    if most and re.fullmatch(r"-1|\d+", most.text) and not 0 <= int(most.text[:9]) <= _CAP:
        yield Hit(LOGPROBS, most.line, f"--max-logprobs {most.text}")
    if given := options.has("--enable-prompt-embeds"):
        yield Hit(PROMPT_EMBEDS, given.line, "--enable-prompt-embeds")
    for name in ("--task", "--runner", "--convert"):
        value = options.option(name)
        if value and (value.text in _POOLING or (name, value.text) == ("--runner", "pooling")):
            yield Hit(TOKEN_STATES, value.line, f"{name} {value.text}")
            return


PROGRAM = Program(
    "vLLM",
    ("vllm",),
    (
        ("vllm", "serve"),
        ("-m", "vllm.entrypoints.openai.api_server"),
        ("-m", "vllm.entrypoints.api_server"),
    ),
    re.compile(r"vllm/vllm-\w+"),
    (LOGPROBS, PROMPT_EMBEDS, TOKEN_STATES, HIDDEN_STATES, KV_FILES, OPEN, KEY_FOR_SOME),
    look,
)
