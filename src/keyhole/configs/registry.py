"""Every kind of configuration with the files that it is read from, and the check of all of them.

Besides servers and stores (servers.py, stores.py), some files open or hold what attacks
need:

- Settings of a Hugging Face model that make every pass return more than its answer.
- Model repositories of MLServer and Triton: what an endpoint returns, by the names of its outputs.
  A name is a claim and no proof: `keyhole audit` of the endpoint shows what it really
  returns.
- Files that hold what a model gave away: leaks of `keyhole lab capture`, saved slots, hidden
  states. Only the beginning of such a file is read: its magic, or a .safetensors file's
  header.

To add a server that is started by a command line, add it to PROGRAMS. To add a file of
another kind, write its rules and a function that looks for them, and add it to KINDS.
"""

from __future__ import annotations

import os
import re
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, cast

from keyhole.configs.command import Command, Options, Program, from_shell, inner_scripts
from keyhole.configs.containers import (
    in_dockerfile,
    in_quadlet,
    in_unit,
    in_variables,
    in_yaml,
)
from keyhole.configs.finding import (
    Checked,
    Finding,
    Level,
    Recognised,
    Rule,
    Skipped,
    Source,
    Unread,
    Unreadable,
    read,
)
from keyhole.configs.helm import in_helm, is_values
from keyhole.configs.servers import LLAMA_CPP, OLLAMA, SGLANG, TEI, TGI, VLLM
from keyhole.configs.stores import LMCACHE, STORES, look_at_settings
from keyhole.configs.tree import documents
from keyhole.core import standards
from keyhole.core.errors import InputError
from keyhole.core.files import SLOT_MAGIC, exists, is_file, is_folder, parse

T = TypeVar("T", Finding, Recognised)
PROGRAMS = (LLAMA_CPP, VLLM, LMCACHE, SGLANG, OLLAMA, TEI, TGI, *STORES)

# Settings of a Hugging Face model

_AUDIT_FOLDER = "keyhole audit FOLDER --data TEXTS.txt"
HIDDEN_STATES = Rule(
    "KH-CONFIG-HF-HIDDEN-STATES",
    "A model returns its hidden states",
    Level.HIGH,
    "every pass returns the hidden states of all layers; texts are read back from any of them",
    "set output_hidden_states to false, and ask for it only where it is needed",
    _AUDIT_FOLDER,
    standards.INPUTS_READ,
)
ATTENTIONS = Rule(
    "KH-CONFIG-HF-ATTENTIONS",
    "A model returns its attention maps",
    Level.HIGH,
    "every pass returns the attention maps of all layers; those of the first give the text away",
    "set output_attentions to false, and ask for it only where it is needed",
    _AUDIT_FOLDER,
    standards.INPUTS_READ,
)
SCORES = Rule(
    "KH-CONFIG-HF-SCORES",
    "Generation returns scores of the whole vocabulary",
    Level.MEDIUM,
    "generate() returns scores for every token of the vocabulary; the last layer is read from them",
    "set output_scores and output_logits to false",
    "keyhole extract FOLDER --method output-layer",
    standards.WEIGHTS_COPIED,
)
_RETURNED = {"output_hidden_states": HIDDEN_STATES, "output_attentions": ATTENTIONS}
_GENERATED = ("output_scores", "output_logits")
_MODEL_WORDS = (
    *_RETURNED,
    *_GENERATED,
    "model_type",
    "architectures",
    "transformers_version",
)


def _model_settings(source: Source) -> Iterator[Finding]:
    """Yield the settings that are on; parts of a model have settings of their own."""
    generates = _at(_json(source), "return_dict_in_generate") is True
    for match in re.finditer(r'(?<!\\)"(\w+)"\s*:\s*true\b', source.text):
        name = match[1]
        line = source.line_at(match.start())
        if name in _RETURNED:
            yield Finding(_RETURNED[name], line, f"{name}: true")
        elif name in _GENERATED and generates:
            yield Finding(SCORES, line, f"{name}: true, with return_dict_in_generate")


# Model repositories of servers

_AUDIT_ENDPOINT = "keyhole audit http://HOST:8080/v2/models/NAME --model MODEL"
_LEAVE_OUT = "leave that output out; return a score or a label"

SERVED_STATES = Rule(
    "KH-CONFIG-SERVED-STATES",
    "An endpoint returns a vector for every token",
    Level.HIGH,
    "texts are read back from hidden states of any layer",
    _LEAVE_OUT,
    _AUDIT_ENDPOINT,
    standards.INPUTS_READ,
)
SERVED_MAPS = Rule(
    "KH-CONFIG-SERVED-MAPS",
    "An endpoint returns attention maps",
    Level.HIGH,
    "texts are read back from attention maps, those of the first layer in closed form",
    _LEAVE_OUT,
    _AUDIT_ENDPOINT,
    standards.INPUTS_READ,
)
SERVED_CACHE = Rule(
    "KH-CONFIG-SERVED-CACHE",
    "An endpoint returns keys and values",
    Level.HIGH,
    "texts are read back from keys and values, those of the first layer by a table",
    "keep the cache inside the server",
    _AUDIT_ENDPOINT,
    standards.INPUTS_READ,
)
SERVED_VECTOR = Rule(
    "KH-CONFIG-SERVED-EMBEDDING",
    "An endpoint returns a vector for a text",
    Level.MEDIUM,
    "short texts are read back from their embeddings",
    "treat embeddings as the texts, wherever they are stored",
    _AUDIT_ENDPOINT,
    standards.EMBEDDINGS_READ,
)
SERVED_LOGITS = Rule(
    "KH-CONFIG-SERVED-LOGITS",
    "An endpoint returns logits",
    Level.LOW,
    "attacks on weights read them from scores of full precision",
    "return a score or a label; count queries per client",
    _AUDIT_ENDPOINT,
    standards.WEIGHTS_COPIED,
)
# The names that exporters and the libraries themselves give; the first pattern that
# matches counts.
_OUTPUTS = (
    (
        re.compile(r"(past|present)[._]?key|key_values|kv_?cache|^(past|present)\.\d"),
        SERVED_CACHE,
    ),
    (
        re.compile(r"attentions?([._]\d+|_?(maps?|probs?|weights|scores))?$"),
        SERVED_MAPS,
    ),
    (
        re.compile(r"hidden_?states?|token_?(embed|vector)|encoder_out(put)?s?$"),
        SERVED_STATES,
    ),
    (re.compile(r"embeddings?$|pooler_output|sentence_vector"), SERVED_VECTOR),
    (re.compile(r"logits|logprobs|log_probs"), SERVED_LOGITS),
)
_OUTPUT_WORDS = (
    "hidden",
    "attention",
    "key",
    "past",
    "present",
    "cache",
    "embed",
    "pool",
    "vector",
    "encoder_out",
    "logits",
    "prob",
    "feature-extraction",
    "implementation",
    "platform",
    "backend",
    "max_batch_size",
)


def _mlserver_outputs(source: Source) -> Iterator[Finding]:
    """Check model-settings.json: the outputs, and the task of the Hugging Face runtime."""
    settings = _json(source)
    outputs = _at(settings, "outputs")
    for output in cast("list[Any]", outputs) if isinstance(outputs, list) else []:
        name = _at(output, "name")
        if isinstance(name, str) and (rule := _rule_for(name)):
            yield Finding(rule, _line(source, name), f"output {name}")
    task = _at(settings, "parameters", "extra", "task")
    if task == "feature-extraction":
        yield Finding(SERVED_STATES, _line(source, task), "task feature-extraction")


def _triton_outputs(source: Source) -> Iterator[Finding]:
    """Check config.pbtxt: the names inside `output` blocks."""
    text = re.sub(r"#[^\n]*", lambda comment: " " * len(comment[0]), source.text)
    opening = re.compile(r"\boutput\s*:?\s*(?=[\[{])")
    at = 0
    while start := opening.search(text, at):
        block = _block(text, start.end())
        for match in re.finditer(r"\bname\s*:\s*[\"']([^\"'\n]*)[\"']", block):
            if rule := _rule_for(match[1]):
                line = source.line_at(start.end() + match.start())
                yield Finding(rule, line, f"output {match[1]}")
        at = start.end() + len(block)


def _rule_for(output: str) -> Rule | None:
    return next(
        (rule for pattern, rule in _OUTPUTS if pattern.search(output.lower())), None
    )


def _block(text: str, at: int) -> str:
    """Return the text from an opening bracket to the one that closes it."""
    depth = 0
    for match in re.compile(r"[\[\]{}]").finditer(text, at):
        depth += 1 if match[0] in "[{" else -1
        if depth == 0:
            return text[at : match.end()]
    return text[at:]


def _at(settings: Any, *path: str) -> Any:
    """Return the value that a path of keys leads to in parsed JSON, or None."""
    for name in path:
        if not isinstance(settings, dict):
            return None
        settings = cast("dict[str, Any]", settings).get(name)
    return settings


def _json(source: Source) -> Any:
    try:
        return parse(source.text)
    except ValueError as error:
        raise Unreadable(f"not JSON: {error}") from error


def _line(source: Source, text: str) -> int:
    return source.line_at(max(source.text.find(f'"{text}"'), 0))


# Saved leaks

_KEEP = (
    "remove it from the repository and its history, and keep it as secret as the text"
)

SAVED_LEAK = Rule(
    "KH-CONFIG-FILE-LEAK",
    "A leak of keyhole lab capture is kept here",
    Level.HIGH,
    "the text it was made from can be read back with the model",
    _KEEP,
    "keyhole recover MODEL FILE",
    standards.TEXTS_STORED,
)
SAVED_SLOT = Rule(
    "KH-CONFIG-FILE-SLOT",
    "A saved slot of llama.cpp is kept here",
    Level.HIGH,
    "it holds the prompt's token ids in plain form, and its keys and values",
    _KEEP,
    "keyhole audit FILE --model MODEL.gguf",
    standards.TEXTS_STORED,
)
SAVED_STATES = Rule(
    "KH-CONFIG-FILE-STATES",
    "Saved hidden states are kept here",
    Level.HIGH,
    "it holds a prompt's token ids in plain form, and its hidden states",
    _KEEP,
    "keyhole recover MODEL FILE",
    standards.TEXTS_STORED,
)
_MAX_HEADER = 2**20  # bytes; those of large models are about as long


def _saved(source: Source) -> Iterator[Finding]:
    try:
        with source.path.open("rb") as file:
            start = file.read(8)
            if start.startswith(SLOT_MAGIC):
                yield Finding(SAVED_SLOT, 1, "a saved slot")
            elif source.path.suffix == ".safetensors" and len(start) == 8:
                (length,) = struct.unpack("<Q", start)
                if length <= _MAX_HEADER:  # the header of a leak is short
                    yield from _tensors(file.read(length))
    except OSError as error:
        raise Unreadable(error.strerror or str(error)) from error


def _tensors(header: bytes) -> Iterator[Finding]:
    try:
        tensors: Any = parse(header.decode())
    except ValueError:  # not a .safetensors file, whatever its name
        return
    about = _at(tensors, "__metadata__")
    leak = _at(about, "leak")
    names = {"hidden_states", "token_ids"}
    if leak is not None and _at(about, "keyhole") is not None:
        yield Finding(SAVED_LEAK, 1, f"a leak of kind {str(leak)[:40]}")
    elif isinstance(tensors, dict) and {*tensors} - {"__metadata__"} == names:
        yield Finding(SAVED_STATES, 1, "hidden_states with token_ids")


FILE_RULES = (
    HIDDEN_STATES,
    ATTENTIONS,
    SCORES,
    SERVED_STATES,
    SERVED_MAPS,
    SERVED_CACHE,
    SERVED_VECTOR,
    SERVED_LOGITS,
    SAVED_LEAK,
    SAVED_SLOT,
    SAVED_STATES,
)
RULES: dict[str, Rule] = {
    rule.id: rule
    for rules in (FILE_RULES, *(program.rules for program in PROGRAMS))
    for rule in rules
}


# Commands that start programs, and the variables of such programs


def _started(commands: Iterable[Command]) -> Iterator[Recognised]:
    for command in commands:
        for program in PROGRAMS:
            if options := program.options(command):
                yield _recognised(program, options)


def _recognised(program: Program, options: Options) -> Recognised:
    hits = program.findings(options)
    return Recognised(program.what, program.name, options.program.line, hits)


def _script(source: Source) -> Iterator[Recognised]:
    for command in from_shell(source.text):
        yield from _started(inner_scripts(command))


def _yaml(source: Source) -> Iterator[Recognised]:
    try:
        roots = documents(source.text)
    except (
        ValueError
    ):  # such as a template: its lines are read as those of a shell script
        bare = re.sub(r"^[ \t]*(?:- +|[\w-]+: +)+", "", source.text, flags=re.MULTILINE)
        yield from _script(Source(source.path, bare))
        return
    yield from look_at_settings(roots)
    for root in roots:
        yield from _started(in_helm(root, source.path))
    if not is_values(source.path):
        yield from _started(in_yaml(roots, source.path.parent))


def _unit(source: Source) -> Iterator[Recognised]:
    for command in in_unit(source.text):
        yield from _started([command])
        if not command.words:  # it adds variables to another unit
            yield from _configured(command)


def _configured(command: Command) -> Iterator[Recognised]:
    """Recognise the programs whose variables are set without a command that starts them."""
    for program in PROGRAMS:
        for variable in program.variables:
            if word := command.env.get(variable):
                yield _recognised(program, Options(word, (), command))


# All kinds of files, and the check of them

_PROGRAM_WORDS = tuple(word for program in PROGRAMS for word in program.words)


@dataclass(frozen=True)
class Kind:
    """Files whose folder and name match a pattern, and what recognises something in them.

    A file is parsed if it contains one of `words`. Without `words`, it is not read as
    text. Files of a kind that mostly holds other things (`mostly_others`) are listed
    only if they are recognised.
    """

    name: str
    files: str
    look: Callable[[Source], Iterable[Recognised]]
    words: tuple[str, ...] = _PROGRAM_WORDS
    mostly_others: bool = False

    def recognised(self, path: Path) -> list[Recognised]:
        source = read(path, self.words) if self.words else Source(path)
        return [] if source is None else list(self.look(source))


def _of_model(
    name: str, look: Callable[[Source], Iterable[Finding]]
) -> Callable[[Source], Iterable[Recognised]]:
    return lambda source: [Recognised("model", name, 1, tuple(look(source)))]


KINDS: tuple[Kind, ...] = (
    Kind(
        "Hugging Face settings",
        r".*/(generation_)?config\.json",
        _of_model("Hugging Face model", _model_settings),
        _MODEL_WORDS,
    ),
    Kind(
        "MLServer model settings",
        r".*/model-settings\.json",
        _of_model("model of MLServer", _mlserver_outputs),
        _OUTPUT_WORDS,
    ),
    Kind(
        "Triton model configuration",
        r".*\.pbtxt",
        _of_model("model of Triton", _triton_outputs),
        _OUTPUT_WORDS,
    ),
    Kind(
        "Compose, Kubernetes, Helm, pipelines, settings of stores", r".*\.ya?ml", _yaml
    ),
    Kind("tasks and manifests in JSON", r".*\.json", _yaml, mostly_others=True),
    Kind("shell scripts", r".*\.(sh|bash)", _script),
    Kind(
        "Dockerfiles",
        r".*/(.*\.)?(Dockerfile|Containerfile)(\..*)?",
        lambda source: _started(in_dockerfile(source.text)),
    ),
    Kind(
        "units of systemd",
        r".*\.service|.*\.service\.d/.*\.conf|.*/override\.conf",
        _unit,
    ),
    Kind(
        "units of Podman",
        r".*\.container",
        lambda source: _started(in_quadlet(source.text)),
    ),
    Kind(
        "variables",
        r".*/(.*\.)?env(\.(?!py|js|ts|go|rs|md)\w+)*",
        lambda source: _configured(Command((), in_variables(source.text))),
    ),
    Kind(
        "leaked files",
        r".*\.(safetensors|bin|slot)",
        lambda file: (
            Recognised("saved file", hit.rule.name, 1, (hit,)) for hit in _saved(file)
        ),
        words=(),
    ),
    # Other files that configure something are searched for the names of programs alone.
    Kind(
        "other configurations",
        r".*\.(toml|ini|cfg|conf|properties|tf|tfvars|hcl|nomad|tpl|xml|"
        r"plist|jsonnet|ps1|bat)|.*/(Procfile|Makefile|Caddyfile|Justfile)",
        lambda _: (),
    ),
)
_NOT_ENTERED = {  # folders
    ".git",
    ".hg",
    ".svn",
    "node_modules",
    ".venv",
    "venv",
    "__pycache__",
    ".tox",
    ".mypy_cache",
}
MAX_FILES = 100_000  # of a folder


def kind_of(path: Path) -> Kind | None:
    tail = "/" + "/".join(path.parts[-2:])
    return next((kind for kind in KINDS if re.fullmatch(kind.files, tail)), None)


def check(paths: Sequence[str | Path], ignore: Iterable[str] = ()) -> Checked:
    """Check files, and all files of a known kind in folders; links in folders are not followed.

    The rules in `ignore` are not reported.
    """
    ignored = set(ignore)
    if unknown := sorted(ignored - set(RULES)):
        raise InputError(
            f"there is no rule {unknown[0][:80]}: choose among {', '.join(RULES)}"
        )
    if not paths:
        raise InputError("name the files or folders to look at")
    findings = list[Finding]()
    unread = list[Unread]()
    others = Counter[str]()
    recognised = list[Recognised]()
    skipped = list[Skipped]()
    looked = 0
    for path, named in _files([Path(path) for path in paths], unread):
        kind = kind_of(path)
        if kind is None:
            if named:
                unread.append(Unread(str(path), "not a configuration of a known kind"))
            else:
                others[path.suffix or path.name] += 1
            continue
        try:
            known = kind.recognised(path)
            rest = None if known else _skipped(path, kind)
        except Unreadable as error:
            known = []
            rest = Unread(str(path), str(error))
        named_program = isinstance(rest, Skipped) and rest.mentions
        if kind.mostly_others and not (known or named or named_program):
            others[path.suffix] += 1
            continue
        looked += 1
        if isinstance(rest, Unread):
            unread.append(rest)
        elif rest is not None:
            skipped.append(rest)
        recognised += _once(
            path, {(each.line, each.name, each.what): each for each in known}
        )
        hits = [
            hit for each in known for hit in each.findings if hit.rule.id not in ignored
        ]
        findings += _once(
            path, {(hit.line, hit.rule.id, hit.what): hit for hit in hits}
        )
    return Checked(
        tuple(findings),
        tuple(unread),
        looked,
        tuple(sorted(ignored)),
        tuple(recognised),
        tuple(skipped),
        dict(sorted(others.items())),
    )


def _once(path: Path, found: dict[tuple[int, str, str], T]) -> list[T]:
    """Return what was found in a file in the order of the keys, with the file's path."""
    return [replace(each, path=str(path)) for _, each in sorted(found.items())]


def _skipped(path: Path, kind: Kind) -> Skipped:
    source = read(path, _PROGRAM_WORDS) if kind.words else None
    if source is None:
        return Skipped(str(path))
    broken = False
    if path.suffix in (".yaml", ".yml"):
        try:
            documents(source.text)
        except ValueError:
            broken = True
    text = source.text.lower()
    mentions = (program.name for program in PROGRAMS if _is_mentioned(program, text))
    return Skipped(str(path), tuple(mentions), broken)


def _is_mentioned(program: Program, text: str) -> bool:
    """Return whether a text has the name of the program, or of its command, as a word."""
    commands = (start.split()[0] for start in program.starts if start[0] != "-")
    names = "|".join(map(re.escape, sorted({program.name.lower(), *commands})))
    return re.search(rf"(?<![a-z.])({names})(db)?(?![a-z])", text) is not None


def _files(paths: list[Path], unread: list[Unread]) -> Iterator[tuple[Path, bool]]:
    """Yield each file once, and whether it was named; a named file must exist."""
    seen = set[str]()
    for path in paths:
        folder = is_folder(path)
        if not folder and not is_file(path):
            if exists(path):
                reason = "it is a device or a pipe"
            else:
                reason = "there is no such file"
            shown = str(path).encode("utf-8", "replace").decode()
            raise InputError(f"cannot read {shown}: {reason}")
        for file in _inside(path, unread) if folder else [path]:
            if str(file) not in seen:
                seen.add(str(file))
                yield file, not folder


def _inside(folder: Path, unread: list[Unread]) -> Iterator[Path]:
    count = 0

    def refused(error: OSError) -> None:
        unread.append(Unread(str(error.filename), error.strerror or str(error)))

    for place, folders, names in os.walk(folder, onerror=refused):
        folders[:] = sorted(name for name in folders if name not in _NOT_ENTERED)
        for name in sorted(names):
            path = Path(place, name)
            count += 1
            if count > MAX_FILES:
                unread.append(Unread(str(folder), f"more than {MAX_FILES:,} files"))
                return
            if path.is_file() and not path.is_symlink():
                yield path
