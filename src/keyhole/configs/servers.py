"""Inference servers and vector stores that configurations start: a table of rules for each program.

The options of llama.cpp are those of its README; what /slots, /props and saved slots contain was
observed on the running server. Those of vLLM, SGLang, Ollama, text-embeddings-inference and TGI are
taken from their documentation, and what vLLM's /pooling returns from its code; they were not tried
on the servers. Chroma, Qdrant, Weaviate and Milvus ask for no key unless they are configured to.

The last argument of each rule finds the settings to which it applies. `_flag`, `_value` and `_open`
make the usual ones.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from keyhole.configs.command import Look, OptionRule, Options, Program, Word, reached_from_outside
from keyhole.configs.finding import Finding, Level, Recognised
from keyhole.configs.helm import in_cluster_only, inside
from keyhole.configs.lmcache import LMCACHE, PLAIN, REMOTE, lmcache_settings
from keyhole.configs.tree import Mapping, Node, Scalar, walk
from keyhole.core import standards

_ANYWHERE = "0.0.0.0"  # noqa: S104
_LISTENS = "it listens at all addresses"


def _is_on(word: Word | None) -> bool:
    return word is not None and word.text.lower() in ("true", "1", "yes", "on")


def _may_be_on(word: Word | None) -> bool:
    """Return whether a setting is on, or is a variable that may turn it on."""
    return word is not None and (_is_on(word) or "$" in word.text)


def _flag(*names: str, env: str = "") -> Look:
    """Find each of these flags."""

    def look(options: Options) -> Iterator[Word]:
        for name in names:
            if given := options.has(name, env=env):
                yield Word(name, given.line)

    return look


def _value(name: str, env: str = "", applies: Callable[[str], bool] = lambda _: True) -> Look:
    """Find an option whose value the rule applies to."""

    def look(options: Options) -> Iterator[Word]:
        given = options.option(name, env=env)
        if given and applies(given.text):
            yield Word(f"{name} {given.text}".strip(), given.line)

    return look


def _open(
    missing: str, guarded: Callable[[Options], object], *, host: str = "--host", env: str = "",
    default: str = _ANYWHERE, in_own_image: str = "",
    listens: str = "the container listens at 0.0.0.0",
) -> Look:  # fmt: skip
    """Find a server that other machines reach and that is not guarded; `missing` is the guard.

    `host` and `env` set the address to listen at. Without them it is `default`, or `in_own_image`
    in the program's own image.
    """

    def look(options: Options) -> Iterator[Word]:
        command, given = options.command, options.option(host, env=env)
        usual = in_own_image if in_own_image and options.own_image else default
        reached = reached_from_outside(given.text if given else usual)
        if command.local or options.opaque or not reached or guarded(options):
            return
        reach = Word(f"--host {given.text}" if given else listens, (given or options.program).line)
        if command.cluster and command.published:
            reach = command.published
        yield Word(f"{reach.text}, {missing}", reach.line)

    return look


_NO_KEY = "A server without a key can be reached from other machines"
_VECTORS = "POST /v1/embeddings returns a vector for a text; short texts are read back from it"
_GUARD_VECTORS = "treat embeddings as the texts: guard whatever stores them as well"
_MORE_LOGPROBS = "answers with more log-probabilities give the last layer away in fewer queries"
_MAX_LOGPROBS = 20  # the default of vLLM


def _too_many(number: str) -> bool:
    valid = re.fullmatch(r"-1|\d+", number) is not None  # -1: no limit
    return valid and not 0 <= int(number[:9]) <= _MAX_LOGPROBS


# llama.cpp

_LLAMA_AUDIT = "keyhole audit http://HOST:8080 --model MODEL.gguf"


def _llama_embeddings(*, of_tokens: bool) -> Look:
    def look(options: Options) -> Iterator[Word]:
        embedding = options.has("--embedding", "--embeddings", env="LLAMA_ARG_EMBEDDINGS")
        pooling = options.option("--pooling", env="LLAMA_ARG_POOLING")
        unpooled = pooling if pooling and pooling.text == "none" else None
        if embedding and unpooled and of_tokens:
            yield Word("--pooling none", unpooled.line)
        elif embedding and not unpooled and not of_tokens:
            yield Word("--embeddings", embedding.line)

    return look


LLAMA_CPP = Program(
    "server", "llama.cpp", ("llama",),
    starts=("llama-server", "llama.cpp-server"),
    image=re.compile(r"llama\.cpp(-\w+)?:server"),
    rules=(
        OptionRule(
            "KH-CONFIG-LLAMA-SLOT-FILES", "Prompts can be saved to files", Level.HIGH,
            "POST /slots/0?action=save writes a file with the prompt's token ids, keys and values",
            "leave --slot-save-path out, or keep that folder as secret as prompts; set --api-key",
            "keyhole audit SLOT.bin --model MODEL.gguf", standards.TEXTS_STORED,
            _value("--slot-save-path", env="LLAMA_ARG_SLOT_SAVE_PATH"),
        ),
        OptionRule(
            "KH-CONFIG-LLAMA-TOKEN-STATES", "The last state of every token is returned", Level.HIGH,
            "POST /embeddings returns the last state of every token; texts are read back from them",
            "start it with --pooling mean, and treat the vectors as the texts; set --api-key",
            _LLAMA_AUDIT, standards.INPUTS_READ, _llama_embeddings(of_tokens=True),
        ),
        OptionRule(
            "KH-CONFIG-LLAMA-EMBEDDINGS", "Embeddings of texts are returned", Level.LOW,
            _VECTORS, _GUARD_VECTORS,
            "keyhole audit http://HOST:8080/v1/embeddings --model MODEL.gguf --known TEXTS.txt",
            standards.EMBEDDINGS_READ, _llama_embeddings(of_tokens=False),
        ),
        OptionRule(
            "KH-CONFIG-LLAMA-OPEN", _NO_KEY, Level.HIGH,
            "anyone can read the last layer from the log-probabilities that /completion returns",
            "set --api-key or --api-key-file, or listen at 127.0.0.1 behind a proxy",
            "keyhole extract http://HOST:8080 --method output-layer", standards.SERVER_OPEN,
            _open(
                "no --api-key",
                lambda options: options.key("--api-key", env="LLAMA_API_KEY")
                or options.key("--api-key-file", env="LLAMA_ARG_API_KEY_FILE"),
                env="LLAMA_ARG_HOST", default="127.0.0.1", in_own_image=_ANYWHERE,
            ),
        ),
        OptionRule(
            "KH-CONFIG-LLAMA-SLOTS", "Clients can watch the slots of others", Level.LOW,
            "GET /slots shows every client the settings and token counts of the others' prompts",
            "start it with --no-slots",
            _LLAMA_AUDIT, standards.COUNTS_SHOWN, _flag("--slots", env="LLAMA_ARG_ENDPOINT_SLOTS"),
        ),
        OptionRule(
            "KH-CONFIG-LLAMA-PROPS", "Clients can change the server's settings", Level.LOW,
            "POST /props changes settings of the server for all of its clients",
            "leave --props out",
            _LLAMA_AUDIT, standards.SERVER_OPEN, _flag("--props", env="LLAMA_ARG_ENDPOINT_PROPS"),
        ),
        OptionRule(
            "KH-CONFIG-LLAMA-METRICS", "Counts of tokens and requests are published", Level.LOW,
            "GET /metrics shows how many tokens were read and written, and no text",
            "leave --metrics out, or let only the monitoring network reach it", _LLAMA_AUDIT,
            standards.COUNTS_SHOWN, _flag("--metrics", env="LLAMA_ARG_ENDPOINT_METRICS"),
        ),
        OptionRule(
            "KH-CONFIG-LLAMA-PROMPT-LOG", "Prompts are written to a folder", Level.MEDIUM,
            "every prompt is written to this folder in plain text", "leave --log-prompts-dir out",
            "ls the folder: no attack is needed", standards.PROMPTS_LOGGED,
            _value("--log-prompts-dir"),
        ),
    ),
)  # fmt: skip

# vLLM

_VLLM_AUDIT = "keyhole audit http://HOST:8000 --model MODEL"
# Since release 0.21, /pooling does only the pooler's task, which is embed unless it is set. Earlier
# releases do what a request asks for.
_SINGLE_TASK = 21
_POOLING = {"--task": ("embed", "embedding", "encode")}  # an option of releases before 0.13
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
        given = options.option("--kv-transfer-config", "--kv-transfer-config.kv-connector")
        if given:
            name = re.search(r"[A-Za-z0-9]*Connector[A-Za-z0-9]*(?!_)\b", given.text)
            connector = "a connector" if name is None else name[0]
            if ("HiddenStates" in connector) == hidden_states:
                yield Word(f"--kv-transfer-config {connector}", given.line)

    return look


def _vllm_key(options: Options) -> Word | None:
    return options.key("--api-key", env="VLLM_API_KEY")


def _vllm_partial_key(options: Options) -> Iterator[Word]:
    host, key = options.option("--host"), _vllm_key(options)
    reached = reached_from_outside(host.text if host else _ANYWHERE)
    if key and reached and not options.command.local:
        listens = f"--host {host.text}" if host else _LISTENS
        yield Word(f"{listens}, with a key", key.line)


VLLM = Program(
    "server", "vLLM", ("vllm",),
    starts=(
        "vllm serve", "-m vllm.entrypoints.openai.api_server", "-m vllm.entrypoints.api_server",
    ),
    image=re.compile(
        r"vllm/vllm-\w+|"
        r"(^|/)vllm(-(openai|cpu|gpu|rocm|tpu|xpu|neuron|gaudi|hpu|arc)[\w-]*)?(:|@|$)"
    ),
    rules=(
        OptionRule(
            "KH-CONFIG-VLLM-LOGPROBS", "More log-probabilities than needed are allowed",
            Level.MEDIUM, _MORE_LOGPROBS, f"leave --max-logprobs at {_MAX_LOGPROBS} or below",
            "keyhole extract http://HOST:8000 --method output-layer", standards.WEIGHTS_COPIED,
            _value("--max-logprobs", applies=_too_many),
        ),
        OptionRule(
            "KH-CONFIG-VLLM-PROMPT-EMBEDS", "Prompts may be vectors", Level.MEDIUM,
            "clients can send vectors of their choice (prompt_embeds), as attacks on weights do",
            "leave --enable-prompt-embeds out",
            _VLLM_AUDIT, standards.WEIGHTS_COPIED, _flag("--enable-prompt-embeds"),
        ),
        OptionRule(
            "KH-CONFIG-VLLM-TOKEN-STATES", "The last state of every token is returned", Level.HIGH,
            "POST /pooling returns the last state of every token, and asks for no key",
            "leave the pooler's task at embed, in vLLM 0.21 or newer; put a proxy in front that "
            "lets only /v1/embeddings through",
            "keyhole audit http://HOST:8000 --model ENCODER", standards.INPUTS_READ,
            _vllm_token_states,
        ),
        OptionRule(
            "KH-CONFIG-VLLM-HIDDEN-STATES", "Hidden states are written to files", Level.HIGH,
            "a file for each prompt holds its token ids in plain form, and its hidden states",
            "leave the connector for hidden states out, or keep its path as secret as prompts",
            "keyhole recover MODEL FILE.safetensors", standards.TEXTS_STORED,
            _vllm_connector(hidden_states=True),
        ),
        OptionRule(
            "KH-CONFIG-VLLM-KV-CACHE", "Keys and values leave the server", Level.MEDIUM,
            "keys and values of prompts go to a shared place; prompts are read back from them",
            "keep that place and the way to it secret: encrypted, and for one tenant alone",
            "keyhole recover MODEL FILE", standards.TEXTS_STORED,
            _vllm_connector(hidden_states=False),
        ),
        OptionRule(
            "KH-CONFIG-VLLM-PREFIX-CACHE", "Cached prompts are shared between clients", Level.LOW,
            "a prompt that somebody else sent is answered sooner: anyone who guesses it learns "
            "that it was sent, from the time, or from cached_tokens if answers have it",
            "let a proxy set a cache_salt for each tenant, which vLLM takes with a request, or "
            "start it with --no-enable-prefix-caching; leave --enable-prompt-tokens-details out",
            _VLLM_AUDIT, standards.COUNTS_SHOWN,
            _flag("--enable-prefix-caching", "--enable-prompt-tokens-details"),
        ),
        OptionRule(
            "KH-CONFIG-VLLM-OPEN", _NO_KEY, Level.HIGH,
            "anyone can ask for log-probabilities, embeddings and token states",
            "listen at 127.0.0.1 behind a proxy that checks keys and routes; set --api-key as well",
            _VLLM_AUDIT, standards.SERVER_OPEN,
            _open("no --api-key", _vllm_key, listens=_LISTENS),
        ),
        OptionRule(
            "KH-CONFIG-VLLM-KEY-FOR-SOME-ROUTES", "The key guards only some routes", Level.LOW,
            "--api-key guards /v1 and a few other prefixes, but not /invocations and /pooling",
            "put a proxy in front that lets only the routes through that clients need",
            _VLLM_AUDIT, standards.SERVER_OPEN, _vllm_partial_key,
        ),
        PLAIN,
        REMOTE,
    ),
)  # fmt: skip

# SGLang

_SGLANG_AUDIT = "keyhole audit http://HOST:30000 --model MODEL"

SGLANG = Program(
    "server", "SGLang", ("sglang",),
    starts=("-m sglang.launch_server", "sglang serve"),
    image=re.compile(r"lmsysorg/sglang"),
    rules=(
        OptionRule(
            "KH-CONFIG-SGLANG-HIDDEN-STATES", "Hidden states are returned", Level.HIGH,
            "POST /generate returns hidden states (return_hidden_states), which give texts away",
            "leave --enable-return-hidden-states out",
            _SGLANG_AUDIT, standards.INPUTS_READ, _flag("--enable-return-hidden-states"),
        ),
        OptionRule(
            "KH-CONFIG-SGLANG-EMBEDDINGS", "Embeddings of texts are returned", Level.LOW,
            _VECTORS, _GUARD_VECTORS,
            "keyhole audit http://HOST:30000/v1/embeddings --model MODEL --known TEXTS.txt",
            standards.EMBEDDINGS_READ, _flag("--is-embedding"),
        ),
        OptionRule(
            "KH-CONFIG-SGLANG-OPEN", _NO_KEY, Level.HIGH,
            "anyone can ask /generate for log-probabilities, by texts or vectors (input_embeds)",
            "set --api-key, or listen at 127.0.0.1 behind a proxy that checks requests",
            _SGLANG_AUDIT, standards.SERVER_OPEN,
            _open("no --api-key", lambda given: given.key("--api-key"), default="127.0.0.1"),
        ),
    ),
)  # fmt: skip

# Ollama

_OLLAMA_AUDIT = "keyhole audit http://HOST:11434/v1/embeddings --model MODEL --known TEXTS.txt"
# An address to listen at. A client's OLLAMA_HOST is the address of its server, mostly a name.
_ADDRESS = re.compile(r"(https?://)?(?P<host>\d+\.\d+\.\d+\.\d+|\[?::1?\]?)?(:\d+)?/?")
_OLLAMA_CLIENT = {"pull", "push", "run", "create", "list", "show", "cp", "rm", "ps"}


def _is_ollama_client(options: Options) -> bool:
    """Return whether a container of Ollama runs a command of its client, and no server."""
    texts = {word.text for word in options.words}
    in_image = options.program is options.image
    return in_image and "serve" not in texts and not texts.isdisjoint(_OLLAMA_CLIENT)


def _ollama_open(options: Options) -> Iterator[Word]:
    command, host = options.command, options.command.env.get("OLLAMA_HOST")
    in_cluster = command.cluster and (not command.published or command.external_env)
    if command.local or in_cluster or _is_ollama_client(options):
        return
    address = None if host is None else _ADDRESS.fullmatch(host.text)
    if host and host.text and address and reached_from_outside(address["host"] or _ANYWHERE):
        yield Word(f"OLLAMA_HOST={host.text}", host.line)
    elif host is None and command.published and options.own_image:  # the image listens at 0.0.0.0
        reach = command.published
        yield Word(f"{reach.text}, and Ollama has no keys", reach.line)


def _ollama_origins(options: Options) -> Iterator[Word]:
    origins = options.command.env.get("OLLAMA_ORIGINS")
    any_origin = origins and "*" in (origin.strip() for origin in origins.text.split(","))
    if origins and any_origin and not _is_ollama_client(options):
        yield Word(f"OLLAMA_ORIGINS={origins.text}", origins.line)


OLLAMA = Program(
    "server", "Ollama", ("ollama",),
    starts=("ollama serve",),
    image=re.compile(r"(^|/)ollama(:|@|$)"),
    rules=(
        OptionRule(
            "KH-CONFIG-OLLAMA-OPEN", "A server that has no keys can be reached from other machines",
            Level.HIGH,
            "anyone can ask for embeddings and log-probabilities, and replace or delete models",
            "listen or publish the port at 127.0.0.1, behind a proxy that checks keys and routes",
            _OLLAMA_AUDIT, standards.SERVER_OPEN, _ollama_open,
        ),
        OptionRule(
            "KH-CONFIG-OLLAMA-ORIGINS", "Any web page can ask the server", Level.MEDIUM,
            "a page that somebody opens on a machine that reaches the server can ask it and read "
            "the answers, even if the server listens at 127.0.0.1",
            "name the origins that need it in OLLAMA_ORIGINS",
            _OLLAMA_AUDIT, standards.ANY_ORIGIN, _ollama_origins,
        ),
    ),
    variables=("OLLAMA_HOST", "OLLAMA_ORIGINS"),
)  # fmt: skip

# text-embeddings-inference and TGI

_HUGGING_FACE_OPEN = _open(
    "no --api-key", lambda options: options.key("--api-key", env="API_KEY"),
    host="--hostname", env="HOSTNAME", listens=_LISTENS,
)  # fmt: skip
TEI = Program(
    "server", "text-embeddings-inference", ("text-embeddings", "tei"),
    starts=("text-embeddings-router",),
    image=re.compile(r"text-embeddings-inference|(^|/)tei(-gaudi)?(:|@|$)"),
    rules=(
        OptionRule(
            "KH-CONFIG-TEI-OPEN", _NO_KEY, Level.HIGH,
            "/embed_all returns a vector for every token, /embed one for a text: both reveal texts",
            "set --api-key (API_KEY), and let only the routes through that clients need",
            "keyhole audit http://HOST:8080/v1/embeddings --model ENCODER --known TEXTS.txt",
            standards.SERVER_OPEN, _HUGGING_FACE_OPEN,
        ),
    ),
)  # fmt: skip
TGI = Program(
    "server", "TGI", ("text-generation", "tgi"),
    starts=("text-generation-launcher",),
    image=re.compile(r"text-generation-inference|(^|/)tgi(-gaudi)?(:|@|$)"),
    rules=(
        OptionRule(
            "KH-CONFIG-TGI-OPEN", _NO_KEY, Level.HIGH,
            "anyone can ask /generate for log-probabilities of prompts (decoder_input_details) and "
            "answers (top_n_tokens)",
            "set --api-key (API_KEY), or listen at 127.0.0.1 behind a proxy that checks requests",
            "keyhole audit http://HOST:8080 --model MODEL",
            standards.SERVER_OPEN, _HUGGING_FACE_OPEN,
        ),
        OptionRule(
            "KH-CONFIG-TGI-LOGPROBS", "More log-probabilities than needed are allowed",
            Level.MEDIUM, _MORE_LOGPROBS, "leave --max-top-n-tokens at 5, its default",
            "keyhole extract http://HOST:8080 --method output-layer", standards.WEIGHTS_COPIED,
            _value("--max-top-n-tokens", env="MAX_TOP_N_TOKENS", applies=_too_many),
        ),
    ),
)  # fmt: skip

# Stores

_CHROMA_AUDIT = "keyhole audit chroma:FOLDER --model ENCODER"
_EMBEDDINGS = "anyone can read all embeddings, and many of their texts with the encoder"
_ANONYMOUS = "AUTHENTICATION_ANONYMOUS_ACCESS_ENABLED"


def _chroma_reset(options: Options) -> Iterator[Word]:
    env = options.command.env
    reset = env.get("ALLOW_RESET") or env.get("CHROMA_ALLOW_RESET")
    if reset and _is_on(reset):
        yield Word(f"ALLOW_RESET={reset.text}", reset.line)


def _may_have(options: Options, *variables: str) -> bool:
    return any(_may_be_on(options.command.env.get(f"{name}_ENABLED")) for name in variables)


_weaviate_without_login = _open(
    "no authentication",
    lambda options: (
        options.option("--config-file")
        or _may_have(
            options, "AUTHENTICATION_APIKEY", "AUTHENTICATION_OIDC", "AUTHENTICATION_DB_USERS"
        )
    ),
)


def _weaviate_open(options: Options) -> Iterator[Word]:
    """Weaviate lets everybody in if anonymous access is on, or if no login is configured."""
    anonymous = options.command.env.get(_ANONYMOUS)
    # A list of rights may leave none to a client without a name.
    limited = _may_have(options, "AUTHORIZATION_RBAC", "AUTHORIZATION_ADMINLIST")
    if anonymous is None:
        yield from _weaviate_without_login(options)
    elif _is_on(anonymous) and not limited and not options.command.local:
        yield Word(f"{_ANONYMOUS}={anonymous.text}", anonymous.line)


def _milvus_guarded(options: Options) -> bool:
    """Return whether authorization is on, or a mounted configuration file may turn it on.

    Milvus takes common.security.authorizationEnabled in any case, with dots or underscores.
    """
    env = {re.sub(r"[._]", "", name).lower(): word for name, word in options.command.env.items()}
    required = _may_be_on(env.get("commonsecurityauthorizationenabled"))
    return required or options.mounts("/milvus/configs")


CHROMA_RESET = OptionRule(
    "KH-CONFIG-CHROMA-RESET", "Clients can delete everything", Level.MEDIUM,
    "POST /reset deletes all collections: clients that read a store should not be able to empty it",
    "set allow_reset to false (ALLOW_RESET), which is the default",
    _CHROMA_AUDIT, standards.STORE_OPEN, _chroma_reset,
)  # fmt: skip
QDRANT_OPEN = OptionRule(
    "KH-CONFIG-QDRANT-OPEN", "A store without a key can be reached from other machines", Level.HIGH,
    _EMBEDDINGS,
    "set service.api_key (QDRANT__SERVICE__API_KEY) and TLS, or listen at 127.0.0.1",
    "keyhole audit qdrant:FOLDER --model ENCODER", standards.STORE_OPEN,
    _open(
        "no QDRANT__SERVICE__API_KEY",
        # A configuration file may hold the key, and is checked by itself.
        lambda options: options.key(env="QDRANT__SERVICE__API_KEY")
        or options.option("--config-path") or options.mounts("/qdrant/config"),
        host="", env="QDRANT__SERVICE__HOST",
    ),
)  # fmt: skip
WEAVIATE_OPEN = OptionRule(
    "KH-CONFIG-WEAVIATE-OPEN", "A store lets everybody in", Level.HIGH, _EMBEDDINGS,
    "set AUTHENTICATION_ANONYMOUS_ACCESS_ENABLED to false and AUTHENTICATION_APIKEY_ENABLED to "
    "true, or listen at 127.0.0.1",
    "keyhole audit weaviate:http://HOST:8080 --model ENCODER", standards.STORE_OPEN, _weaviate_open,
)  # fmt: skip
MILVUS_OPEN = OptionRule(
    "KH-CONFIG-MILVUS-OPEN", "A store lets everybody in", Level.HIGH, _EMBEDDINGS,
    "set common.security.authorizationEnabled and change root's password, or listen at 127.0.0.1",
    "keyhole audit milvus:http://HOST:19530 --model ENCODER", standards.STORE_OPEN,
    _open("authorization is not on", _milvus_guarded, host=""),
)  # fmt: skip
CHROMA = Program(
    "store", "Chroma", ("chroma", "allow_reset"),
    starts=("chroma run",),
    image=re.compile(r"chromadb/chroma|chroma-core/chroma"),
    rules=(
        OptionRule(
            "KH-CONFIG-CHROMA-OPEN",
            "A store without authentication can be reached from other machines", Level.HIGH,
            _EMBEDDINGS,
            "listen at 127.0.0.1, or put a proxy in front that checks keys (Chroma has none of its "
            "own since 1.0)",
            _CHROMA_AUDIT, standards.STORE_OPEN,
            _open(
                "no authentication",
                lambda options: any(
                    name.startswith("CHROMA_SERVER_AUTH") and word.text
                    for name, word in options.command.env.items()
                ),
                default="localhost", in_own_image=_ANYWHERE,
            ),
        ),
        CHROMA_RESET,
    ),
)  # fmt: skip
QDRANT = Program(
    "store", "Qdrant", ("qdrant", "storage_path"),
    starts=("qdrant",), image=re.compile(r"qdrant/qdrant"), rules=(QDRANT_OPEN,),
)  # fmt: skip
WEAVIATE = Program(
    "store", "Weaviate", ("weaviate", _ANONYMOUS, "anonymous_access"),
    starts=("weaviate",), image=re.compile(r"(^|/)weaviate(:|@|$)"), rules=(WEAVIATE_OPEN,),
    variables=(_ANONYMOUS,),
)  # fmt: skip
MILVUS = Program(
    "store", "Milvus", ("milvus", "authorizationEnabled"),
    starts=("milvus run",), image=re.compile(r"(^|/)milvus(:|@|$)"), rules=(MILVUS_OPEN,),
)  # fmt: skip
PROGRAMS = (LLAMA_CPP, VLLM, LMCACHE, SGLANG, OLLAMA, TEI, TGI, CHROMA, QDRANT, WEAVIATE, MILVUS)


# Configuration files of the stores, recognised by what they contain


def look_at_settings(roots: list[Node]) -> Iterator[Recognised]:
    """Recognise configuration files of stores and of LMCache, also inside other files."""
    for root in roots:
        if isinstance(root, Mapping):
            yield from _chroma_settings(root)
            yield from _qdrant_settings(root)
            yield from lmcache_settings(root)
        for node in walk(root):
            if isinstance(node, Mapping):
                yield from _weaviate_settings(node)
                yield from _milvus_settings(node)
                for name, text in node.pairs.items():
                    if isinstance(text, Scalar) and name.endswith((".yaml", ".yml")):
                        yield from look_at_settings(inside(text))


def _chroma_settings(root: Mapping) -> Iterator[Recognised]:
    reset = root.scalar("allow_reset")
    if reset and _is_on(reset):
        hit = Finding(CHROMA_RESET, reset.line, "allow_reset: true")
        yield Recognised("store", "Chroma", reset.line, (hit,))


def _qdrant_settings(root: Mapping) -> Iterator[Recognised]:
    service = root.mapping("service")
    if service is None or root.at("storage", "storage_path") is None:
        return
    host, key = service.scalar("host"), service.scalar("api_key")
    hits = ()
    if reached_from_outside(host.text if host else _ANYWHERE) and not (key and key.text):
        hits = (Finding(QDRANT_OPEN, (host or service).line, "service without api_key"),)
    yield Recognised("store", "Qdrant", service.line, hits)


def _weaviate_settings(node: Mapping) -> Iterator[Recognised]:
    anonymous = node.mapping("authentication", "anonymous_access")
    if anonymous is None:
        return
    enabled = anonymous.scalar("enabled")
    rights = ("admin_list", "rbac")
    limited = any(_may_be_on(node.scalar("authorization", name, "enabled")) for name in rights)
    hits = ()
    if enabled and _is_on(enabled) and not limited and not in_cluster_only(node):
        hits = (Finding(WEAVIATE_OPEN, enabled.line, "anonymous_access.enabled: true"),)
    yield Recognised("store", "Weaviate", anonymous.line, hits)


def _milvus_settings(node: Mapping) -> Iterator[Recognised]:
    required = node.scalar("security", "authorizationEnabled")
    if required is not None:
        off = Finding(MILVUS_OPEN, required.line, f"authorizationEnabled: {required.text}")
        on = _may_be_on(required) or "{{" in required.text
        yield Recognised("store", "Milvus", required.line, () if on else (off,))
