"""Servers and stores that configurations start, and what their settings open.

llama.cpp's options are those of its own README; what /slots, /props and saved slots hold was looked
up on the running server. Those of vLLM, SGLang, Ollama, text-embeddings-inference and TGI are as
their documentation has them, what vLLM's /pooling returns as its code has it, not tried on the
servers. Chroma, Qdrant, Weaviate and Milvus ask nobody for a key unless they are configured to.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from keyhole.configs.command import Options, Program, Word, reached_from_outside
from keyhole.configs.containers import Mapping, Node, Scalar, walk
from keyhole.configs.finding import Finding, Level, Recognised, Rule
from keyhole.configs.helm import in_cluster_only, inside
from keyhole.configs.lmcache import LMCACHE, lmcache_settings, look_at_lmcache_variables
from keyhole.core import standards

_ANYWHERE = "0.0.0.0"  # noqa: S104
_YES = ("true", "1", "yes", "on")


def _without_key(
    options: Options, rule: Rule, host: Word | None, default: str, missing: str, listens: str = ""
) -> Iterator[Finding]:
    """A server that other machines reach, and that asks for no key; `missing` names the key."""
    command = options.command
    if command.local or options.opaque or not reached_from_outside(host, default):
        return
    where = f"--host {host.text}" if host else listens or "the container listens at 0.0.0.0"
    line = host.line if host else options.program.line
    if command.cluster and command.published:  # which says more than where the container listens
        where, line = command.published.text, command.published.line
    yield Finding(rule, line, f"{where}, {missing}")


def _mounted(options: Options, folder: str) -> bool:
    """Whether settings of its own are put into the container."""
    return any(folder in at for at in options.command.mounts)


def _in_own_image(options: Options, program: Program) -> bool:
    return options.image is not None and bool(program.image.search(options.image.text))


# llama.cpp

_LLAMA_AUDIT = "keyhole audit http://HOST:8080 --model MODEL.gguf"

LLAMA_SLOT_FILES = Rule(
    "KH-CONFIG-LLAMA-SLOT-FILES", "Prompts can be saved to files", Level.HIGH,
    "POST /slots/0?action=save writes a file with the prompt's token ids, keys and values",
    "leave --slot-save-path out, or keep that folder as secret as prompts; set --api-key",
    "keyhole audit SLOT.bin --model MODEL.gguf",
    standards.TEXTS_STORED,
)  # fmt: skip
LLAMA_TOKEN_STATES = Rule(
    "KH-CONFIG-LLAMA-TOKEN-STATES", "The last state of every token is returned", Level.HIGH,
    "POST /embeddings returns the last state of every token, from which texts are read back",
    "start it with --pooling mean, and treat the vectors as the texts; set --api-key", _LLAMA_AUDIT,
    standards.INPUTS_READ,
)  # fmt: skip
LLAMA_EMBEDDINGS = Rule(
    "KH-CONFIG-LLAMA-EMBEDDINGS", "Embeddings of texts are returned", Level.LOW,
    "POST /v1/embeddings returns a vector for a text, from which short texts are read back",
    "treat embeddings as the texts: guard whoever keeps them as well",
    "keyhole audit http://HOST:8080/v1/embeddings --model MODEL.gguf --known TEXTS.txt",
    standards.EMBEDDINGS_READ,
)  # fmt: skip
LLAMA_OPEN = Rule(
    "KH-CONFIG-LLAMA-OPEN", "A server without a key listens beyond this machine", Level.HIGH,
    "whoever reaches the address may ask /completion for log-probabilities of the whole "
    "vocabulary, from which the last layer of the model is read",
    "set --api-key or --api-key-file, or listen at 127.0.0.1 behind a proxy that checks requests",
    "keyhole extract http://HOST:8080 --method output-layer",
    standards.SERVER_OPEN,
)  # fmt: skip
LLAMA_SLOTS = Rule(
    "KH-CONFIG-LLAMA-SLOTS", "The slots of other clients can be watched", Level.LOW,
    "GET /slots tells every client how many tokens the others' prompts have, and their settings",
    "start it with --no-slots", _LLAMA_AUDIT,
    standards.COUNTS_SHOWN,
)  # fmt: skip
LLAMA_PROPS = Rule(
    "KH-CONFIG-LLAMA-PROPS", "Clients may change the server's settings", Level.LOW,
    "POST /props changes settings of the server for all of its clients",
    "leave --props out", _LLAMA_AUDIT,
    standards.SERVER_OPEN,
)  # fmt: skip
LLAMA_METRICS = Rule(
    "KH-CONFIG-LLAMA-METRICS", "Counts of tokens and requests are published", Level.LOW,
    "GET /metrics tells how many tokens were read and written, and no text",
    "leave --metrics out, or let only the monitoring network reach it", _LLAMA_AUDIT,
    standards.COUNTS_SHOWN,
)  # fmt: skip
LLAMA_PROMPT_LOG = Rule(
    "KH-CONFIG-LLAMA-PROMPT-LOG", "Prompts are written to a folder", Level.MEDIUM,
    "every prompt is written there in the clear",
    "leave --log-prompts-dir out", "ls the folder: no attack is needed",
    standards.PROMPTS_LOGGED,
)  # fmt: skip


def _look_at_llama_cpp(options: Options) -> Iterator[Finding]:
    if path := options.option("--slot-save-path", env="LLAMA_ARG_SLOT_SAVE_PATH"):
        yield Finding(LLAMA_SLOT_FILES, path.line, f"--slot-save-path {path.text}".strip())
    if folder := options.option("--log-prompts-dir"):
        yield Finding(LLAMA_PROMPT_LOG, folder.line, f"--log-prompts-dir {folder.text}".strip())
    embedding = options.has("--embedding", "--embeddings", env="LLAMA_ARG_EMBEDDINGS")
    pooling = options.option("--pooling", env="LLAMA_ARG_POOLING")
    if embedding and pooling and pooling.text == "none":
        yield Finding(LLAMA_TOKEN_STATES, pooling.line, "--pooling none")
    elif embedding:
        yield Finding(LLAMA_EMBEDDINGS, embedding.line, "--embeddings")
    for flag, env, rule in (
        ("--slots", "LLAMA_ARG_ENDPOINT_SLOTS", LLAMA_SLOTS),
        ("--props", "LLAMA_ARG_ENDPOINT_PROPS", LLAMA_PROPS),
        ("--metrics", "LLAMA_ARG_ENDPOINT_METRICS", LLAMA_METRICS),
    ):
        if given := options.has(flag, env=env):
            yield Finding(rule, given.line, flag)
    host = options.option("--host", env="LLAMA_ARG_HOST")
    key = options.option("--api-key", env="LLAMA_API_KEY")
    if not (key or options.option("--api-key-file", env="LLAMA_ARG_API_KEY_FILE")):
        # Its containers set LLAMA_ARG_HOST=0.0.0.0; started by itself it listens at 127.0.0.1.
        default = _ANYWHERE if _in_own_image(options, LLAMA_CPP) else "127.0.0.1"
        yield from _without_key(options, LLAMA_OPEN, host, default, "no --api-key")


LLAMA_CPP = Program(
    "llama.cpp",
    "server",
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
# Since 0.21 /pooling does the pooler's task alone, embed unless set; before, what a request asks.
_ONE_TASK = 21
_POOLING = {"--task": ("embed", "embedding", "encode")}  # an option of releases before 0.13
_POOLING_BEFORE = {**_POOLING, "--runner": ("pooling",), "--convert": ("embed",)}

VLLM_LOGPROBS = Rule(
    "KH-CONFIG-VLLM-LOGPROBS", "More log-probabilities than needed are allowed", Level.MEDIUM,
    "the more log-probabilities an answer holds, the fewer answers give the last layer away",
    f"leave --max-logprobs at {_CAP} or below",
    "keyhole extract http://HOST:8000 --method output-layer",
    standards.WEIGHTS_COPIED,
)  # fmt: skip
VLLM_PROMPT_EMBEDS = Rule(
    "KH-CONFIG-VLLM-PROMPT-EMBEDS", "Prompts may be vectors", Level.MEDIUM,
    "clients may ask by vectors of their choice (prompt_embeds), as attacks on weights do",
    "leave --enable-prompt-embeds out", _VLLM_AUDIT,
    standards.WEIGHTS_COPIED,
)  # fmt: skip
VLLM_TOKEN_STATES = Rule(
    "KH-CONFIG-VLLM-TOKEN-STATES", "The last state of every token is returned", Level.HIGH,
    "POST /pooling returns every token's last state, and no key guards it",
    "leave the pooler's task at embed, in vLLM 0.21 or newer; put a proxy in front that lets "
    "/v1/embeddings through alone",
    "keyhole audit http://HOST:8000 --model ENCODER",
    standards.INPUTS_READ,
)  # fmt: skip
VLLM_HIDDEN_STATES = Rule(
    "KH-CONFIG-VLLM-HIDDEN-STATES", "Hidden states are written to files", Level.HIGH,
    "a file for each prompt holds its token ids in the clear, and its hidden states",
    "leave the connector for hidden states out, or keep its path as secret as prompts",
    "keyhole recover MODEL FILE.safetensors",
    standards.TEXTS_STORED,
)  # fmt: skip
VLLM_KV_FILES = Rule(
    "KH-CONFIG-VLLM-KV-CACHE", "Keys and values leave the server", Level.MEDIUM,
    "keys and values of prompts go to a shared place, and prompts are read back from them",
    "keep that place, and the way there, as secret as prompts: encrypted, and for one tenant",
    "keyhole recover MODEL FILE",
    standards.TEXTS_STORED,
)  # fmt: skip
VLLM_PREFIX_CACHE = Rule(
    "KH-CONFIG-VLLM-PREFIX-CACHE", "Cached prompts are shared between clients", Level.LOW,
    "a prompt that somebody else sent is answered sooner: whoever guesses it sees that it was "
    "sent, by time, or by cached_tokens where answers have it",
    "let a proxy set a cache_salt for each tenant, which vLLM takes with a request, or start it "
    "with --no-enable-prefix-caching; leave --enable-prompt-tokens-details out",
    _VLLM_AUDIT,
    standards.COUNTS_SHOWN,
)  # fmt: skip
VLLM_OPEN = Rule(
    "KH-CONFIG-VLLM-OPEN", "A server without a key listens beyond this machine", Level.HIGH,
    "whoever reaches the address may ask for log-probabilities, embeddings and token states",
    "listen at 127.0.0.1 behind a proxy that checks keys and routes, and set --api-key as well",
    _VLLM_AUDIT,
    standards.SERVER_OPEN,
)  # fmt: skip
VLLM_KEY_FOR_SOME = Rule(
    "KH-CONFIG-VLLM-KEY-FOR-SOME-ROUTES", "The key guards some routes alone", Level.LOW,
    "--api-key guards /v1 and a few more prefixes: /invocations and /pooling answer without it",
    "put a proxy in front that lets only the routes through that clients need", _VLLM_AUDIT,
    standards.SERVER_OPEN,
)  # fmt: skip


def _look_at_vllm(options: Options) -> Iterator[Finding]:
    yield from _vllm_answers(options)
    if transfer := options.option("--kv-transfer-config", "--kv-transfer-config.kv-connector"):
        # Its name alone is shown: other settings of a connector may be secrets.
        name = re.search(r"[A-Za-z0-9]*Connector[A-Za-z0-9]*(?!_)\b", transfer.text)
        connector = "a connector" if name is None else name[0]
        rule = VLLM_HIDDEN_STATES if "HiddenStates" in connector else VLLM_KV_FILES
        yield Finding(rule, transfer.line, f"--kv-transfer-config {connector}")
    yield from look_at_lmcache_variables(options)
    for flag in ("--enable-prefix-caching", "--enable-prompt-tokens-details"):
        if given := options.has(flag):
            yield Finding(VLLM_PREFIX_CACHE, given.line, flag)
    host, listens = options.option("--host"), "it listens at all addresses"
    key = options.option("--api-key", env="VLLM_API_KEY")
    if key is None:
        yield from _without_key(options, VLLM_OPEN, host, _ANYWHERE, "no --api-key", listens)
    elif not options.command.local and reached_from_outside(host, _ANYWHERE):
        where = f"--host {host.text}" if host else listens
        yield Finding(VLLM_KEY_FOR_SOME, key.line, f"{where}, with a key")


def _vllm_answers(options: Options) -> Iterator[Finding]:
    most = options.option("--max-logprobs")
    if most and re.fullmatch(r"-1|\d+", most.text) and not 0 <= int(most.text[:9]) <= _CAP:
        yield Finding(VLLM_LOGPROBS, most.line, f"--max-logprobs {most.text}")
    if given := options.has("--enable-prompt-embeds"):
        yield Finding(VLLM_PROMPT_EMBEDS, given.line, "--enable-prompt-embeds")
    pooler = options.option("--pooler-config", "--pooler-config.task")
    if pooler and re.search(r"\btoken_embed\b", pooler.text):
        yield Finding(VLLM_TOKEN_STATES, pooler.line, "--pooler-config task token_embed")
        return
    release = re.search(r":v?0\.(\d+)", options.image.text if options.image else "")
    older = release is not None and int(release[1]) < _ONE_TASK
    for name, values in (_POOLING_BEFORE if older else _POOLING).items():
        value = options.option(name)
        if value and value.text in values:
            yield Finding(VLLM_TOKEN_STATES, value.line, f"{name} {value.text}")
            return


VLLM = Program(
    "vLLM",
    "server",
    ("vllm",),
    (
        ("vllm", "serve"),
        ("-m", "vllm.entrypoints.openai.api_server"),
        ("-m", "vllm.entrypoints.api_server"),
    ),
    re.compile(r"vllm/vllm-\w+|(^|/)vllm(-(openai|cpu|gpu|rocm|tpu|xpu|neuron|gaudi|hpu|arc)[\w-]*)?(:|@|$)"),
    (
        VLLM_LOGPROBS, VLLM_PROMPT_EMBEDS, VLLM_TOKEN_STATES, VLLM_HIDDEN_STATES, VLLM_KV_FILES,
        VLLM_PREFIX_CACHE, VLLM_OPEN, VLLM_KEY_FOR_SOME,
    ),
    _look_at_vllm,
)  # fmt: skip

# SGLang

_SGLANG_AUDIT = "keyhole audit http://HOST:30000 --model MODEL"

SGLANG_HIDDEN_STATES = Rule(
    "KH-CONFIG-SGLANG-HIDDEN-STATES", "Hidden states are returned", Level.HIGH,
    "POST /generate with return_hidden_states returns them, and texts are read back from them",
    "leave --enable-return-hidden-states out", _SGLANG_AUDIT,
    standards.INPUTS_READ,
)  # fmt: skip
SGLANG_EMBEDDINGS = Rule(
    "KH-CONFIG-SGLANG-EMBEDDINGS", "Embeddings of texts are returned", Level.LOW,
    "POST /v1/embeddings returns a vector for a text, from which short texts are read back",
    "treat embeddings as the texts: guard whoever keeps them as well",
    "keyhole audit http://HOST:30000/v1/embeddings --model MODEL --known TEXTS.txt",
    standards.EMBEDDINGS_READ,
)  # fmt: skip
SGLANG_OPEN = Rule(
    "KH-CONFIG-SGLANG-OPEN", "A server without a key listens beyond this machine", Level.HIGH,
    "whoever reaches the address may ask /generate for log-probabilities, by texts or by vectors "
    "(input_embeds)",
    "set --api-key, or listen at 127.0.0.1 behind a proxy that checks requests", _SGLANG_AUDIT,
    standards.SERVER_OPEN,
)  # fmt: skip


def _look_at_sglang(options: Options) -> Iterator[Finding]:
    if given := options.has("--enable-return-hidden-states"):
        yield Finding(SGLANG_HIDDEN_STATES, given.line, "--enable-return-hidden-states")
    if given := options.has("--is-embedding"):
        yield Finding(SGLANG_EMBEDDINGS, given.line, "--is-embedding")
    if not options.option("--api-key"):
        host = options.option("--host")
        yield from _without_key(options, SGLANG_OPEN, host, "127.0.0.1", "no --api-key")


SGLANG = Program(
    "SGLang",
    "server",
    ("sglang",),
    (("-m", "sglang.launch_server"), ("sglang", "serve")),
    re.compile(r"lmsysorg/sglang"),
    (SGLANG_HIDDEN_STATES, SGLANG_EMBEDDINGS, SGLANG_OPEN),
    _look_at_sglang,
)

# Ollama

OLLAMA_OPEN = Rule(
    "KH-CONFIG-OLLAMA-OPEN", "A server that has no keys listens beyond this machine", Level.HIGH,
    "whoever reaches the address may ask for embeddings and log-probabilities, and replace or "
    "delete models: Ollama asks nobody for a key",
    "listen at 127.0.0.1, or publish the port there, behind a proxy that checks keys and routes",
    "keyhole audit http://HOST:11434/v1/embeddings --model MODEL --known TEXTS.txt",
    standards.SERVER_OPEN,
)  # fmt: skip
OLLAMA_ORIGINS = Rule(
    "KH-CONFIG-OLLAMA-ORIGINS", "Any web page may ask the server", Level.MEDIUM,
    "a page that somebody opens on a machine that reaches the server may ask it and read the "
    "answers, also where it listens at 127.0.0.1",
    "name the origins that need it in OLLAMA_ORIGINS",
    "keyhole audit http://HOST:11434/v1/embeddings --model MODEL --known TEXTS.txt",
    standards.ANY_ORIGIN,
)  # fmt: skip
# An address to listen at; a client's OLLAMA_HOST is that of its server, mostly a name.
_ADDRESS = re.compile(r"(https?://)?(?P<host>\d+\.\d+\.\d+\.\d+|\[?::1?\]?)?(:\d+)?/?")
_OLLAMA_CLIENT = {"pull", "push", "run", "create", "list", "show", "cp", "rm", "ps"}


def _look_at_ollama(options: Options) -> Iterator[Finding]:
    texts = {word.text for word in options.words}
    if texts & _OLLAMA_CLIENT and "serve" not in texts and options.program is options.image:
        return
    yield from _look_at_ollama_variables(options)
    command, host = options.command, options.env.get("OLLAMA_HOST")
    if command.local or (command.cluster and (not command.published or command.external_env)):
        return
    if host is None and command.published and _in_own_image(options, OLLAMA):
        where = command.published  # its image sets OLLAMA_HOST=0.0.0.0
        yield Finding(OLLAMA_OPEN, where.line, f"{where.text}, and Ollama has no keys")


def _look_at_ollama_variables(options: Options) -> Iterator[Finding]:
    """What OLLAMA_HOST and OLLAMA_ORIGINS open, wherever they are set."""
    command, origins = options.command, options.env.get("OLLAMA_ORIGINS")
    if origins and "*" in (part.strip() for part in origins.text.split(",")):
        yield Finding(OLLAMA_ORIGINS, origins.line, f"OLLAMA_ORIGINS={origins.text}")
    host = options.env.get("OLLAMA_HOST")
    address = None if host is None else _ADDRESS.fullmatch(host.text)
    inside = command.local or (command.cluster and (not command.published or command.external_env))
    if host is None or address is None or inside:
        return
    if reached_from_outside(Word(address["host"] or _ANYWHERE, host.line), _ANYWHERE):
        yield Finding(OLLAMA_OPEN, host.line, f"OLLAMA_HOST={host.text}")


OLLAMA = Program(
    "Ollama",
    "server",
    ("ollama",),
    (("ollama", "serve"),),
    re.compile(r"(^|/)ollama(:|@|$)"),
    (OLLAMA_OPEN, OLLAMA_ORIGINS),
    _look_at_ollama,
)

# text-embeddings-inference and TGI

TEI_OPEN = Rule(
    "KH-CONFIG-TEI-OPEN", "A server without a key listens beyond this machine", Level.HIGH,
    "POST /embed_all returns a vector for every token and POST /embed one for a text, from both of "
    "which texts are read back",
    "set --api-key (API_KEY), and let only the routes through that clients need",
    "keyhole audit http://HOST:8080/v1/embeddings --model ENCODER --known TEXTS.txt",
    standards.SERVER_OPEN,
)  # fmt: skip
TGI_OPEN = Rule(
    "KH-CONFIG-TGI-OPEN", "A server without a key listens beyond this machine", Level.HIGH,
    "whoever reaches the address may ask /generate for log-probabilities of prompts and answers "
    "(decoder_input_details, top_n_tokens)",
    "set --api-key (API_KEY), or listen at 127.0.0.1 behind a proxy that checks requests",
    "keyhole audit http://HOST:8080 --model MODEL",
    standards.SERVER_OPEN,
)  # fmt: skip
TGI_LOGPROBS = Rule(
    "KH-CONFIG-TGI-LOGPROBS", "More log-probabilities than needed are allowed", Level.MEDIUM,
    "the more log-probabilities an answer holds, the fewer answers give the last layer away",
    "leave --max-top-n-tokens at 5, its default",
    "keyhole extract http://HOST:8080 --method output-layer",
    standards.WEIGHTS_COPIED,
)  # fmt: skip


def _look_at_tei(options: Options, rule: Rule = TEI_OPEN) -> Iterator[Finding]:
    if not options.option("--api-key", env="API_KEY"):
        host = options.option("--hostname", env="HOSTNAME")
        yield from _without_key(
            options, rule, host, _ANYWHERE, "no --api-key", "it listens at all addresses"
        )


def _look_at_tgi(options: Options) -> Iterator[Finding]:
    most = options.option("--max-top-n-tokens", env="MAX_TOP_N_TOKENS")
    if most and most.text.isdecimal() and int(most.text[:9]) > _CAP:
        yield Finding(TGI_LOGPROBS, most.line, f"--max-top-n-tokens {most.text}")
    yield from _look_at_tei(options, TGI_OPEN)


TEI = Program(
    "text-embeddings-inference",
    "server",
    ("text-embeddings", "tei"),
    (("text-embeddings-router",),),
    re.compile(r"text-embeddings-inference|(^|/)tei(-gaudi)?(:|@|$)"),
    (TEI_OPEN,),
    _look_at_tei,
)
TGI = Program(
    "TGI",
    "server",
    ("text-generation", "tgi"),
    (("text-generation-launcher",),),
    re.compile(r"text-generation-inference|(^|/)tgi(-gaudi)?(:|@|$)"),
    (TGI_OPEN, TGI_LOGPROBS),
    _look_at_tgi,
)

# Stores

CHROMA_OPEN = Rule(
    "KH-CONFIG-CHROMA-OPEN", "A store without authentication listens beyond this machine",
    Level.HIGH,
    "whoever reaches the address reads all embeddings, and with the encoder many of their texts",
    "listen at 127.0.0.1, or put a proxy in front that checks keys (Chroma has none of its own "
    "since 1.0)",
    "keyhole audit chroma:FOLDER --model ENCODER",
    standards.STORE_OPEN,
)  # fmt: skip
CHROMA_RESET = Rule(
    "KH-CONFIG-CHROMA-RESET", "Clients may delete everything", Level.MEDIUM,
    "POST /reset deletes all collections: who can read a store should not be able to replace it",
    "set allow_reset to false (ALLOW_RESET), which is the default",
    "keyhole audit chroma:FOLDER --model ENCODER",
    standards.STORE_OPEN,
)  # fmt: skip
QDRANT_OPEN = Rule(
    "KH-CONFIG-QDRANT-OPEN", "A store without a key listens beyond this machine", Level.HIGH,
    "whoever reaches the address reads all embeddings, and with the encoder many of their texts",
    "set service.api_key (QDRANT__SERVICE__API_KEY) and TLS, or listen at 127.0.0.1",
    "keyhole audit qdrant:FOLDER --model ENCODER",
    standards.STORE_OPEN,
)  # fmt: skip


def _look_at_chroma(options: Options) -> Iterator[Finding]:
    reset = options.env.get("ALLOW_RESET") or options.env.get("CHROMA_ALLOW_RESET")
    if reset and reset.text.lower() in _YES:
        yield Finding(CHROMA_RESET, reset.line, f"ALLOW_RESET={reset.text}")
    if not any(name.startswith("CHROMA_SERVER_AUTH") for name in options.env):
        host = options.option("--host")
        default = _ANYWHERE if _in_own_image(options, CHROMA) else "localhost"
        yield from _without_key(options, CHROMA_OPEN, host, default, "no authentication")


def _look_at_qdrant(options: Options) -> Iterator[Finding]:
    host = options.env.get("QDRANT__SERVICE__HOST")
    key = options.env.get("QDRANT__SERVICE__API_KEY")
    # A configuration of its own may hold the key: then it is looked at by itself.
    own = options.option("--config-path") or _mounted(options, "/qdrant/config")
    if not (key or own):
        yield from _without_key(
            options, QDRANT_OPEN, host, _ANYWHERE, "no QDRANT__SERVICE__API_KEY"
        )


WEAVIATE_OPEN = Rule(
    "KH-CONFIG-WEAVIATE-OPEN", "A store lets everybody in", Level.HIGH,
    "whoever reaches the address reads all embeddings, and with the encoder many of their texts",
    "set AUTHENTICATION_ANONYMOUS_ACCESS_ENABLED to false and AUTHENTICATION_APIKEY_ENABLED to "
    "true, or listen at 127.0.0.1",
    "keyhole audit weaviate:http://HOST:8080 --model ENCODER",
    standards.STORE_OPEN,
)  # fmt: skip
MILVUS_OPEN = Rule(
    "KH-CONFIG-MILVUS-OPEN", "A store lets everybody in", Level.HIGH,
    "whoever reaches the address reads all embeddings, and with the encoder many of their texts",
    "set common.security.authorizationEnabled to true and change root's password, or listen at "
    "127.0.0.1",
    "keyhole audit milvus:http://HOST:19530 --model ENCODER",
    standards.STORE_OPEN,
)  # fmt: skip
_ANONYMOUS = "AUTHENTICATION_ANONYMOUS_ACCESS_ENABLED"
_WEAVIATE_LOGINS = (
    "AUTHENTICATION_APIKEY_ENABLED", "AUTHENTICATION_OIDC_ENABLED",
    "AUTHENTICATION_DB_USERS_ENABLED",
)  # fmt: skip
_RIGHTS = ("RBAC", "ADMINLIST")


def _look_at_weaviate(options: Options) -> Iterator[Finding]:
    """Where no login is configured, it lets everybody in."""
    anonymous = options.env.get(_ANONYMOUS)
    login = [name for name in _WEAVIATE_LOGINS if _on(options.env.get(name))]
    if anonymous is None and not login and not options.option("--config-file"):
        host = options.option("--host")
        yield from _without_key(options, WEAVIATE_OPEN, host, _ANYWHERE, "no authentication")
    elif not options.command.local:
        yield from _look_at_weaviate_variables(options)


def _look_at_weaviate_variables(options: Options) -> Iterator[Finding]:
    anonymous = options.env.get(_ANONYMOUS)
    # A list of rights may leave none to somebody without a name.
    limited = any(_on(options.env.get(f"AUTHORIZATION_{name}_ENABLED")) for name in _RIGHTS)
    if anonymous and anonymous.text.lower() in _YES and not limited:
        yield Finding(WEAVIATE_OPEN, anonymous.line, f"{_ANONYMOUS}={anonymous.text}")


def _on(word: Word | None) -> bool:
    return word is not None and (word.text.lower() in _YES or "$" in word.text)


def _look_at_milvus(options: Options) -> Iterator[Finding]:
    # It takes common.security.authorizationEnabled in any case, with dots or underscores.
    plain = {re.sub(r"[._]", "", name).lower(): word for name, word in options.env.items()}
    asks = plain.get("commonsecurityauthorizationenabled")
    # A configuration of its own may hold the setting: then it is looked at by itself.
    if not _on(asks) and not _mounted(options, "/milvus/configs"):
        yield from _without_key(options, MILVUS_OPEN, None, _ANYWHERE, "authorization is not on")


def look_at_settings(roots: list[Node]) -> Iterator[Recognised]:
    """Configuration files of stores' own, known by what stands in them, also inside other files."""
    for root in roots:
        if isinstance(root, Mapping):
            yield from _own_settings(root)
            yield from lmcache_settings(root)
        for node in walk(root):
            if isinstance(node, Mapping):
                yield from _weaviate_settings(node)
                yield from _milvus_settings(node)
                for name, text in node.pairs.items():
                    if isinstance(text, Scalar) and name.endswith((".yaml", ".yml")):
                        yield from look_at_settings(inside(text))


def _own_settings(root: Mapping) -> Iterator[Recognised]:
    reset = root.scalar("allow_reset")
    if reset and reset.text.lower() in _YES:
        hit = Finding(CHROMA_RESET, reset.line, "allow_reset: true")
        yield Recognised("store", "Chroma", reset.line, (hit,))
    service, storage = root.mapping("service"), root.mapping("storage")
    if service and storage and "storage_path" in storage.pairs:
        host, key = service.scalar("host"), service.scalar("api_key")
        hits = ()
        if reached_from_outside(host, _ANYWHERE) and not (key and key.text):
            line = host.line if host else service.line
            hits = (Finding(QDRANT_OPEN, line, "service without api_key"),)
        yield Recognised("store", "Qdrant", service.line, hits)


def _weaviate_settings(node: Mapping) -> Iterator[Recognised]:
    logins = node.mapping("authentication")
    anonymous = None if logins is None else logins.mapping("anonymous_access")
    if logins is None or anonymous is None:
        return
    enabled, rights = anonymous.scalar("enabled"), node.mapping("authorization")
    lists = [] if rights is None else [rights.mapping("admin_list"), rights.mapping("rbac")]
    limited = any(part is not None and _on(part.scalar("enabled")) for part in lists)
    hits = ()
    if enabled and enabled.text.lower() in _YES and not limited and not in_cluster_only(node):
        hits = (Finding(WEAVIATE_OPEN, enabled.line, "anonymous_access.enabled: true"),)
    yield Recognised("store", "Weaviate", anonymous.line, hits)


def _milvus_settings(node: Mapping) -> Iterator[Recognised]:
    security = node.mapping("security")
    asks = None if security is None else security.scalar("authorizationEnabled")
    if asks is not None:
        off = Finding(MILVUS_OPEN, asks.line, f"authorizationEnabled: {asks.text}")
        hits = () if _on(asks) or "{{" in asks.text else (off,)
        yield Recognised("store", "Milvus", asks.line, hits)


CHROMA = Program(
    "Chroma",
    "store",
    ("chroma", "allow_reset"),
    (("chroma", "run"),),
    re.compile(r"chromadb/chroma|chroma-core/chroma"),
    (CHROMA_OPEN, CHROMA_RESET),
    _look_at_chroma,
)
QDRANT = Program(
    "Qdrant",
    "store",
    ("qdrant", "storage_path"),
    (("qdrant",),),
    re.compile(r"qdrant/qdrant"),
    (QDRANT_OPEN,),
    _look_at_qdrant,
)
WEAVIATE = Program(
    "Weaviate",
    "store",
    ("weaviate", _ANONYMOUS, "anonymous_access"),
    (("weaviate",),),
    re.compile(r"(^|/)weaviate(:|@|$)"),
    (WEAVIATE_OPEN,),
    _look_at_weaviate,
)
MILVUS = Program(
    "Milvus",
    "store",
    ("milvus", "authorizationEnabled"),
    (("milvus", "run"),),
    re.compile(r"(^|/)milvus(:|@|$)"),
    (MILVUS_OPEN,),
    _look_at_milvus,
)
PROGRAMS = (LLAMA_CPP, VLLM, LMCACHE, SGLANG, OLLAMA, TEI, TGI, CHROMA, QDRANT, WEAVIATE, MILVUS)
# Variables that tell which program a file of variables is for.
VARIABLES: dict[str, tuple[Program, Callable[[Options], Iterator[Finding]]]] = {
    "OLLAMA_HOST": (OLLAMA, _look_at_ollama_variables),
    "OLLAMA_ORIGINS": (OLLAMA, _look_at_ollama_variables),
    _ANONYMOUS: (WEAVIATE, _look_at_weaviate_variables),
    "LMCACHE_LOCAL_DISK": (LMCACHE, look_at_lmcache_variables),
    "LMCACHE_REMOTE_URL": (LMCACHE, look_at_lmcache_variables),
}
