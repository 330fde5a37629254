"""Inference servers that configurations start: a table of rules for each program.

The options of llama.cpp are those of its README; what /slots, /props and saved slots
contain was observed on the running server. Those of vLLM, SGLang, Ollama,
text-embeddings-inference and TGI are taken from their documentation, and what vLLM's
/pooling returns from its code; they were not tried on the servers.

The last argument of each rule finds the settings to which it applies. `flag`, `setting`
and `unguarded` make the usual ones.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from keyhole.configs.command import (
    ANYWHERE,
    Look,
    OptionRule,
    Options,
    Program,
    Word,
    flag,
    reached_from_outside,
    setting,
    unguarded,
)
from keyhole.configs.finding import Level
from keyhole.configs.stores import PLAIN, REMOTE
from keyhole.core import standards

_LISTENS = "it listens at all addresses"
_NO_KEY = "A server without a key can be reached from other machines"
_VECTORS = (
    "POST /v1/embeddings returns a vector for a text; short texts are read back from it"
)
_GUARD_VECTORS = "treat embeddings as the texts: guard whatever stores them as well"
_MORE_LOGPROBS = (
    "answers with more log-probabilities give the last layer away in fewer queries"
)
_MAX_LOGPROBS = 20  # the default of vLLM


def _too_many(number: str) -> bool:
    valid = re.fullmatch(r"-1|\d+", number) is not None  # -1: no limit
    return valid and not 0 <= int(number[:9]) <= _MAX_LOGPROBS


# llama.cpp

_LLAMA_AUDIT = "keyhole audit http://HOST:8080 --model MODEL.gguf"


def _llama_embeddings(*, of_tokens: bool) -> Look:
    def look(options: Options) -> Iterator[Word]:
        embedding = options.has(
            "--embedding", "--embeddings", env="LLAMA_ARG_EMBEDDINGS"
        )
        pooling = options.option("--pooling", env="LLAMA_ARG_POOLING")
        unpooled = pooling if pooling and pooling.text == "none" else None
        if embedding and unpooled and of_tokens:
            yield Word("--pooling none", unpooled.line)
        elif embedding and not unpooled and not of_tokens:
            yield Word("--embeddings", embedding.line)

    return look


LLAMA_CPP = Program(
    "server",
    "llama.cpp",
    ("llama",),
    starts=("llama-server", "llama.cpp-server"),
    image=re.compile(r"llama\.cpp(-\w+)?:server"),
    rules=(
        OptionRule(
            "KH-CONFIG-LLAMA-SLOT-FILES",
            "Prompts can be saved to files",
            Level.HIGH,
            "POST /slots/0?action=save writes a file with the prompt's token ids, keys and values",
            "leave --slot-save-path out, or keep that folder as secret as prompts; set --api-key",
            "keyhole audit SLOT.bin --model MODEL.gguf",
            standards.TEXTS_STORED,
            setting("--slot-save-path", env="LLAMA_ARG_SLOT_SAVE_PATH"),
        ),
        OptionRule(
            "KH-CONFIG-LLAMA-TOKEN-STATES",
            "The last state of every token is returned",
            Level.HIGH,
            "POST /embeddings returns the last state of every token; texts are read back from them",
            "start it with --pooling mean, and treat the vectors as the texts; set --api-key",
            _LLAMA_AUDIT,
            standards.INPUTS_READ,
            _llama_embeddings(of_tokens=True),
        ),
        OptionRule(
            "KH-CONFIG-LLAMA-EMBEDDINGS",
            "Embeddings of texts are returned",
            Level.LOW,
            _VECTORS,
            _GUARD_VECTORS,
            "keyhole audit http://HOST:8080/v1/embeddings --model MODEL.gguf --known TEXTS.txt",
            standards.EMBEDDINGS_READ,
            _llama_embeddings(of_tokens=False),
        ),
        OptionRule(
            "KH-CONFIG-LLAMA-OPEN",
            _NO_KEY,
            Level.HIGH,
            "anyone can read the last layer from the log-probabilities that /completion returns",
            "set --api-key or --api-key-file, or listen at 127.0.0.1 behind a proxy",
            "keyhole extract http://HOST:8080 --method output-layer",
            standards.SERVER_OPEN,
            unguarded(
                "no --api-key",
                lambda options: (
                    options.key("--api-key", env="LLAMA_API_KEY")
                    or options.key("--api-key-file", env="LLAMA_ARG_API_KEY_FILE")
                ),
                env="LLAMA_ARG_HOST",
                default="127.0.0.1",
                in_own_image=ANYWHERE,
            ),
        ),
        OptionRule(
            "KH-CONFIG-LLAMA-SLOTS",
            "Clients can watch the slots of others",
            Level.LOW,
            "GET /slots shows every client the settings and token counts of the others' prompts",
            "start it with --no-slots",
            _LLAMA_AUDIT,
            standards.COUNTS_SHOWN,
            flag("--slots", env="LLAMA_ARG_ENDPOINT_SLOTS"),
        ),
        OptionRule(
            "KH-CONFIG-LLAMA-PROPS",
            "Clients can change the server's settings",
            Level.LOW,
            "POST /props changes settings of the server for all of its clients",
            "leave --props out",
            _LLAMA_AUDIT,
            standards.SERVER_OPEN,
            flag("--props", env="LLAMA_ARG_ENDPOINT_PROPS"),
        ),
        OptionRule(
            "KH-CONFIG-LLAMA-METRICS",
            "Counts of tokens and requests are published",
            Level.LOW,
            "GET /metrics shows how many tokens were read and written, and no text",
            "leave --metrics out, or let only the monitoring network reach it",
            _LLAMA_AUDIT,
            standards.COUNTS_SHOWN,
            flag("--metrics", env="LLAMA_ARG_ENDPOINT_METRICS"),
        ),
        OptionRule(
            "KH-CONFIG-LLAMA-PROMPT-LOG",
            "Prompts are written to a folder",
            Level.MEDIUM,
            "every prompt is written to this folder in plain text",
            "leave --log-prompts-dir out",
            "ls the folder: no attack is needed",
            standards.PROMPTS_LOGGED,
            setting("--log-prompts-dir"),
        ),
    ),
)

# vLLM

_VLLM_AUDIT = "keyhole audit http://HOST:8000 --model MODEL"
# Since release 0.21, /pooling does only the pooler's task, which is embed unless it is
# set. Earlier releases do what a request asks for.
_SINGLE_TASK = 21
_POOLING = {
    "--task": ("embed", "embedding", "encode")
}  # an option of releases before 0.13
_POOLING_BEFORE = {**_POOLING, "--runner": ("pooling",), "--convert": ("embed",)}


def _vllm_token_states(options: Options) -> Iterator[Word]:
    pooler = options.option("--pooler-config", "--pooler-config.task")
    if pooler and re.search(r"\btoken_embed\b", pooler.text):
        yield Word("--pooler-config task token_embed", pooler.line)
        return
    release = re.search(r":v?0\.(\d+)", options.image.text if options.image else "")
    older = release is not None and int(release[1]) < _SINGLE_TASK
    for name, tasks in (_POOLING_BEFORE if older else _POOLING).items():
        given = options.option(name)
        if given and given.text in tasks:
            yield Word(f"{name} {given.text}", given.line)
            return


def _vllm_connector(*, hidden_states: bool) -> Look:
    """Find a connector by its name; its other settings may be secrets and are not shown."""

    def look(options: Options) -> Iterator[Word]:
        given = options.option(
            "--kv-transfer-config", "--kv-transfer-config.kv-connector"
        )
        if given:
            name = re.search(r"[A-Za-z0-9]*Connector[A-Za-z0-9]*(?!_)\b", given.text)
            connector = "a connector" if name is None else name[0]
            if ("HiddenStates" in connector) == hidden_states:
                yield Word(f"--kv-transfer-config {connector}", given.line)

    return look


def _vllm_key(options: Options) -> Word | None:
    return options.key("--api-key", env="VLLM_API_KEY")


def _vllm_partial_key(options: Options) -> Iterator[Word]:
    host = options.option("--host")
    key = _vllm_key(options)
    reached = reached_from_outside(host.text if host else ANYWHERE)
    if key and reached and not options.command.local:
        listens = f"--host {host.text}" if host else _LISTENS
        yield Word(f"{listens}, with a key", key.line)


VLLM = Program(
    "server",
    "vLLM",
    ("vllm",),
    starts=(
        "vllm serve",
        "-m vllm.entrypoints.openai.api_server",
        "-m vllm.entrypoints.api_server",
    ),
    image=re.compile(
        r"vllm/vllm-\w+|"
        r"(^|/)vllm(-(openai|cpu|gpu|rocm|tpu|xpu|neuron|gaudi|hpu|arc)[\w-]*)?(:|@|$)"
    ),
    rules=(
        OptionRule(
            "KH-CONFIG-VLLM-LOGPROBS",
            "More log-probabilities than needed are allowed",
            Level.MEDIUM,
            _MORE_LOGPROBS,
            f"leave --max-logprobs at {_MAX_LOGPROBS} or below",
            "keyhole extract http://HOST:8000 --method output-layer",
            standards.WEIGHTS_COPIED,
            setting("--max-logprobs", applies=_too_many),
        ),
        OptionRule(
            "KH-CONFIG-VLLM-PROMPT-EMBEDS",
            "Prompts may be vectors",
            Level.MEDIUM,
            "clients can send vectors of their choice (prompt_embeds), as attacks on weights do",
            "leave --enable-prompt-embeds out",
            _VLLM_AUDIT,
            standards.WEIGHTS_COPIED,
            flag("--enable-prompt-embeds"),
        ),
        OptionRule(
            "KH-CONFIG-VLLM-TOKEN-STATES",
            "The last state of every token is returned",
            Level.HIGH,
            "POST /pooling returns the last state of every token, and asks for no key",
            "leave the pooler's task at embed, in vLLM 0.21 or newer; put a proxy in front that "
            "lets only /v1/embeddings through",
            "keyhole audit http://HOST:8000 --model ENCODER",
            standards.INPUTS_READ,
            _vllm_token_states,
        ),
        OptionRule(
            "KH-CONFIG-VLLM-HIDDEN-STATES",
            "Hidden states are written to files",
            Level.HIGH,
            "a file for each prompt holds its token ids in plain form, and its hidden states",
            "leave the connector for hidden states out, or keep its path as secret as prompts",
            "keyhole recover MODEL FILE.safetensors",
            standards.TEXTS_STORED,
            _vllm_connector(hidden_states=True),
        ),
        OptionRule(
            "KH-CONFIG-VLLM-KV-CACHE",
            "Keys and values leave the server",
            Level.MEDIUM,
            "keys and values of prompts go to a shared place; prompts are read back from them",
            "keep that place and the way to it secret: encrypted, and for one tenant alone",
            "keyhole recover MODEL FILE",
            standards.TEXTS_STORED,
            _vllm_connector(hidden_states=False),
        ),
        OptionRule(
            "KH-CONFIG-VLLM-PREFIX-CACHE",
            "Cached prompts are shared between clients",
            Level.LOW,
            "a prompt that somebody else sent is answered sooner: anyone who guesses it learns "
            "that it was sent, from the time, or from cached_tokens if answers have it",
            "let a proxy set a cache_salt for each tenant, which vLLM takes with a request, or "
            "start it with --no-enable-prefix-caching; leave --enable-prompt-tokens-details out",
            _VLLM_AUDIT,
            standards.COUNTS_SHOWN,
            flag("--enable-prefix-caching", "--enable-prompt-tokens-details"),
        ),
        OptionRule(
            "KH-CONFIG-VLLM-OPEN",
            _NO_KEY,
            Level.HIGH,
            "anyone can ask for log-probabilities, embeddings and token states",
            "listen at 127.0.0.1 behind a proxy that checks keys and routes; set --api-key as well",
            _VLLM_AUDIT,
            standards.SERVER_OPEN,
            unguarded(
                "no --api-key",
                lambda given: _vllm_key(given) or given.option("--uds"),
                listens=_LISTENS,
            ),
        ),
        OptionRule(
            "KH-CONFIG-VLLM-KEY-FOR-SOME-ROUTES",
            "The key guards only some routes",
            Level.LOW,
            "--api-key guards /v1 and a few other prefixes, but not /invocations and /pooling",
            "put a proxy in front that lets only the routes through that clients need",
            _VLLM_AUDIT,
            standards.SERVER_OPEN,
            _vllm_partial_key,
        ),
        PLAIN,
        REMOTE,
    ),
)

# SGLang

_SGLANG_AUDIT = "keyhole audit http://HOST:30000 --model MODEL"

SGLANG = Program(
    "server",
    "SGLang",
    ("sglang",),
    starts=("-m sglang.launch_server", "sglang serve"),
    image=re.compile(r"lmsysorg/sglang"),
    rules=(
        OptionRule(
            "KH-CONFIG-SGLANG-HIDDEN-STATES",
            "Hidden states are returned",
            Level.HIGH,
            "POST /generate returns hidden states (return_hidden_states), which give texts away",
            "leave --enable-return-hidden-states out",
            _SGLANG_AUDIT,
            standards.INPUTS_READ,
            flag("--enable-return-hidden-states"),
        ),
        OptionRule(
            "KH-CONFIG-SGLANG-EMBEDDINGS",
            "Embeddings of texts are returned",
            Level.LOW,
            _VECTORS,
            _GUARD_VECTORS,
            "keyhole audit http://HOST:30000/v1/embeddings --model MODEL --known TEXTS.txt",
            standards.EMBEDDINGS_READ,
            flag("--is-embedding"),
        ),
        OptionRule(
            "KH-CONFIG-SGLANG-OPEN",
            _NO_KEY,
            Level.HIGH,
            "anyone can ask /generate for log-probabilities, by texts or vectors (input_embeds)",
            "set --api-key, or listen at 127.0.0.1 behind a proxy that checks requests",
            _SGLANG_AUDIT,
            standards.SERVER_OPEN,
            unguarded(
                "no --api-key",
                lambda given: given.key("--api-key"),
                default="127.0.0.1",
            ),
        ),
    ),
)

# Ollama

_OLLAMA_AUDIT = (
    "keyhole audit http://HOST:11434/v1/embeddings --model MODEL --known TEXTS.txt"
)
# An address to listen at. A client's OLLAMA_HOST is the address of its server, mostly a
# name.
_ADDRESS = re.compile(r"(https?://)?(?P<host>\d+\.\d+\.\d+\.\d+|\[?::1?\]?)?(:\d+)?/?")
_OLLAMA_CLIENT = {"pull", "push", "run", "create", "list", "show", "cp", "rm", "ps"}


def _is_ollama_client(options: Options) -> bool:
    """Return whether a container of Ollama runs a command of its client, and no server."""
    texts = {word.text for word in options.words}
    in_image = options.program is options.image
    return in_image and "serve" not in texts and not texts.isdisjoint(_OLLAMA_CLIENT)


def _ollama_open(options: Options) -> Iterator[Word]:
    command = options.command
    host = options.command.env.get("OLLAMA_HOST")
    host = host and options.expanded(host)
    in_cluster = command.cluster and (not command.published or command.external_env)
    if command.local or in_cluster or _is_ollama_client(options):
        return
    address = None if host is None else _ADDRESS.fullmatch(host.text)
    if (
        host
        and host.text
        and address
        and reached_from_outside(address["host"] or ANYWHERE)
    ):
        yield Word(f"OLLAMA_HOST={host.text}", host.line)
    elif (
        host is None and command.published and options.own_image
    ):  # the image listens at 0.0.0.0
        reach = command.published
        yield Word(f"{reach.text}, and Ollama has no keys", reach.line)


def _ollama_origins(options: Options) -> Iterator[Word]:
    origins = options.command.env.get("OLLAMA_ORIGINS")
    any_origin = origins and "*" in (
        origin.strip() for origin in origins.text.split(",")
    )
    if origins and any_origin and not _is_ollama_client(options):
        yield Word(f"OLLAMA_ORIGINS={origins.text}", origins.line)


OLLAMA = Program(
    "server",
    "Ollama",
    ("ollama",),
    starts=("ollama serve",),
    image=re.compile(r"(^|/)ollama(:|@|$)"),
    rules=(
        OptionRule(
            "KH-CONFIG-OLLAMA-OPEN",
            "A server that has no keys can be reached from other machines",
            Level.HIGH,
            "anyone can ask for embeddings and log-probabilities, and replace or delete models",
            "listen or publish the port at 127.0.0.1, behind a proxy that checks keys and routes",
            _OLLAMA_AUDIT,
            standards.SERVER_OPEN,
            _ollama_open,
        ),
        OptionRule(
            "KH-CONFIG-OLLAMA-ORIGINS",
            "Any web page can ask the server",
            Level.MEDIUM,
            "a page that somebody opens on a machine that reaches the server can ask it and read "
            "the answers, even if the server listens at 127.0.0.1",
            "name the origins that need it in OLLAMA_ORIGINS",
            _OLLAMA_AUDIT,
            standards.ANY_ORIGIN,
            _ollama_origins,
        ),
    ),
    variables=("OLLAMA_HOST", "OLLAMA_ORIGINS"),
)

# text-embeddings-inference and TGI

_HUGGING_FACE_OPEN = unguarded(
    "no --api-key",
    lambda options: options.key("--api-key", env="API_KEY"),
    host="--hostname",
    env="HOSTNAME",
    listens=_LISTENS,
)
TEI = Program(
    "server",
    "text-embeddings-inference",
    ("text-embeddings", "tei"),
    starts=("text-embeddings-router",),
    image=re.compile(r"text-embeddings-inference|(^|/)tei(-gaudi)?(:|@|$)"),
    rules=(
        OptionRule(
            "KH-CONFIG-TEI-OPEN",
            _NO_KEY,
            Level.HIGH,
            "/embed_all returns a vector for every token, /embed one for a text: both reveal texts",
            "set --api-key (API_KEY), and let only the routes through that clients need",
            "keyhole audit http://HOST:8080/v1/embeddings --model ENCODER --known TEXTS.txt",
            standards.SERVER_OPEN,
            _HUGGING_FACE_OPEN,
        ),
    ),
)
TGI = Program(
    "server",
    "TGI",
    ("text-generation", "tgi"),
    starts=("text-generation-launcher",),
    image=re.compile(r"text-generation-inference|(^|/)tgi(-gaudi)?(:|@|$)"),
    rules=(
        OptionRule(
            "KH-CONFIG-TGI-OPEN",
            _NO_KEY,
            Level.HIGH,
            "anyone can ask /generate for log-probabilities of prompts (decoder_input_details) and "
            "answers (top_n_tokens)",
            "set --api-key (API_KEY), or listen at 127.0.0.1 behind a proxy that checks requests",
            "keyhole audit http://HOST:8080 --model MODEL",
            standards.SERVER_OPEN,
            _HUGGING_FACE_OPEN,
        ),
        OptionRule(
            "KH-CONFIG-TGI-LOGPROBS",
            "More log-probabilities than needed are allowed",
            Level.MEDIUM,
            _MORE_LOGPROBS,
            "leave --max-top-n-tokens at 5, its default",
            "keyhole extract http://HOST:8080 --method output-layer",
            standards.WEIGHTS_COPIED,
            setting("--max-top-n-tokens", env="MAX_TOP_N_TOKENS", applies=_too_many),
        ),
    ),
)
