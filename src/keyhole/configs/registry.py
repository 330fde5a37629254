"""Every kind of configuration with the files that it is read from, and the check of all of them.

Besides servers and stores (servers.py) these are files that open, or hold, what attacks need:

- Settings of a Hugging Face model that make every pass return more than its answer.
- Model repositories of MLServer and Triton: what an endpoint returns, by the names of its outputs.
  A name is a claim and no proof: `keyhole audit` of the endpoint tells what really comes back.
- Files that hold what a model gave away: leaks of `keyhole lab capture`, saved slots, hidden
  states. Only the beginning of such a file is read: its magic, or a .safetensors file's header.

To add one, write its rules and a function that looks for them: a server that is started by a
command line joins PROGRAMS (servers.py), a file of its own joins KINDS. Nothing is run.
"""

from __future__ import annotations

import os
import re
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from keyhole.configs.command import Command, Options, Program, from_shell, inner_scripts
from keyhole.configs.containers import (
    documents,
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
from keyhole.configs.servers import PROGRAMS, VARIABLES, look_at_settings
from keyhole.core import standards
from keyhole.core.errors import InputError
from keyhole.core.files import SLOT_MAGIC, exists, is_file, is_folder, parse

# Settings of a Hugging Face model

HIDDEN_STATES = Rule(
    "KH-CONFIG-HF-HIDDEN-STATES", "A model returns its hidden states", Level.HIGH,
    "every pass returns the hidden states of all layers; texts are read back from any of them",
    "set output_hidden_states to false, and ask for it where it is needed",
    "keyhole audit FOLDER --data TEXTS.txt",
    standards.INPUTS_READ,
)  # fmt: skip
ATTENTIONS = Rule(
    "KH-CONFIG-HF-ATTENTIONS", "A model returns its attention maps", Level.HIGH,
    "every pass returns the attention maps of all layers; those of the first give the text away",
    "set output_attentions to false, and ask for it where it is needed",
    "keyhole audit FOLDER --data TEXTS.txt",
    standards.INPUTS_READ,
)  # fmt: skip
SCORES = Rule(
    "KH-CONFIG-HF-SCORES", "Generation returns scores of the whole vocabulary", Level.MEDIUM,
    "generate() returns scores for every token of the vocabulary; the last layer is read from them",
    "set output_scores and output_logits to false",
    "keyhole extract FOLDER --method output-layer",
    standards.WEIGHTS_COPIED,
)  # fmt: skip
SETTINGS = ("output_hidden_states", "output_attentions", "output_scores", "output_logits")
MODEL_WORDS = (*SETTINGS, "model_type", "architectures", "transformers_version")  # of its files
_RETURNED = {"output_hidden_states": HIDDEN_STATES, "output_attentions": ATTENTIONS}


def look_at_model(source: Source) -> Iterator[Recognised]:
    yield Recognised("model", "Hugging Face model", 1, tuple(_returned(source)))


def _returned(source: Source) -> Iterator[Finding]:
    """Settings that are on, wherever they stand: parts of a model have settings of their own."""
    settings = _json(source)
    on = set(_names_that_are_on(settings))
    generates = _at(settings, "return_dict_in_generate") is True
    for match in re.finditer(r'"(\w+)"\s*:\s*true\b', source.text):
        name, line = match[1], source.line_at(match.start())
        if name in on and name in _RETURNED:
            yield Finding(_RETURNED[name], line, f"{name}: true")
        elif name in on and name in SETTINGS and generates:
            yield Finding(SCORES, line, f"{name}: true, with return_dict_in_generate")


def _names_that_are_on(settings: Any) -> Iterator[str]:
    waiting = [settings]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            named = cast("dict[str, Any]", value)
            yield from (name for name, inner in named.items() if inner is True)
            waiting += named.values()
        elif isinstance(value, list):
            waiting += cast("list[Any]", value)


# Model repositories of servers

_ENDPOINT_AUDIT = "keyhole audit http://HOST:8080/v2/models/NAME --model MODEL"
_SCORE = "return a score or a label"

SERVED_STATES = Rule(
    "KH-CONFIG-SERVED-STATES", "An endpoint returns a vector for every token", Level.HIGH,
    "texts are read back from hidden states of any layer",
    f"leave that output out; {_SCORE}", _ENDPOINT_AUDIT,
    standards.INPUTS_READ,
)  # fmt: skip
SERVED_MAPS = Rule(
    "KH-CONFIG-SERVED-MAPS", "An endpoint returns attention maps", Level.HIGH,
    "texts are read back from attention maps, those of the first layer in closed form",
    f"leave that output out; {_SCORE}", _ENDPOINT_AUDIT,
    standards.INPUTS_READ,
)  # fmt: skip
SERVED_CACHE = Rule(
    "KH-CONFIG-SERVED-CACHE", "An endpoint returns keys and values", Level.HIGH,
    "texts are read back from keys and values, those of the first layer by a table",
    "keep the cache inside the server", _ENDPOINT_AUDIT,
    standards.INPUTS_READ,
)  # fmt: skip
SERVED_VECTOR = Rule(
    "KH-CONFIG-SERVED-EMBEDDING", "An endpoint returns a vector for a text", Level.MEDIUM,
    "short texts are read back from their embeddings",
    "treat embeddings as the texts, wherever they are kept", _ENDPOINT_AUDIT,
    standards.EMBEDDINGS_READ,
)  # fmt: skip
SERVED_LOGITS = Rule(
    "KH-CONFIG-SERVED-LOGITS", "An endpoint returns logits", Level.LOW,
    "scores of full precision are what attacks on weights read",
    f"{_SCORE}; count queries per client", _ENDPOINT_AUDIT,
    standards.WEIGHTS_COPIED,
)  # fmt: skip
# By the names that exporters and the libraries themselves give; the first that matches counts.
_NAMES = (
    (re.compile(r"(past|present)[._]?key|key_values|kv_?cache|^(past|present)\.\d"), SERVED_CACHE),
    (re.compile(r"attentions?([._]\d+|_?(maps?|probs?|weights|scores))?$"), SERVED_MAPS),
    (re.compile(r"hidden_?states?|token_?(embed|vector)|encoder_out(put)?s?$"), SERVED_STATES),
    (re.compile(r"embeddings?$|pooler_output|sentence_vector"), SERVED_VECTOR),
    (re.compile(r"logits|logprobs|log_probs"), SERVED_LOGITS),
)
OUTPUT_WORDS = (
    "hidden", "attention", "key", "past", "present", "cache", "embed", "pool", "vector",
    "encoder_out", "logits", "prob", "feature-extraction", "implementation", "platform", "backend",
    "max_batch_size",
)  # fmt: skip


def look_at_mlserver(source: Source) -> Iterator[Recognised]:
    yield Recognised("model", "model of MLServer", 1, tuple(_mlserver_outputs(source)))


def _mlserver_outputs(source: Source) -> Iterator[Finding]:
    """model-settings.json: the outputs it lists, and the task of the Hugging Face runtime."""
    settings = _json(source)
    outputs = _at(settings, "outputs")
    for output in cast("list[Any]", outputs) if isinstance(outputs, list) else []:
        name = _at(output, "name")
        if isinstance(name, str) and (rule := _rule_for(name)):
            yield Finding(rule, _line(source, name), f"output {name}")
    task = _at(settings, "parameters", "extra", "task")
    if task == "feature-extraction":
        yield Finding(SERVED_STATES, _line(source, task), "task feature-extraction")


def look_at_triton(source: Source) -> Iterator[Recognised]:
    yield Recognised("model", "model of Triton", 1, tuple(_triton_outputs(source)))


def _triton_outputs(source: Source) -> Iterator[Finding]:
    """config.pbtxt: the names inside `output` blocks."""
    text = re.sub(r"#[^\n]*", lambda match: " " * len(match[0]), source.text)
    opening, at = re.compile(r"\boutput\s*:?\s*(?=[\[{])"), 0
    while start := opening.search(text, at):
        block = _block(text, start.end())
        for match in re.finditer(r"\bname\s*:\s*[\"']([^\"'\n]*)[\"']", block):
            if rule := _rule_for(match[1]):
                line = source.line_at(start.end() + match.start())
                yield Finding(rule, line, f"output {match[1]}")
        at = start.end() + len(block)


def _rule_for(name: str) -> Rule | None:
    """What an output of this name gives away."""
    return next((rule for pattern, rule in _NAMES if pattern.search(name.lower())), None)


def _block(text: str, at: int) -> str:
    """From an opening bracket to the one that closes it."""
    depth = 0
    for match in re.compile(r"[\[\]{}]").finditer(text, at):
        depth += 1 if match[0] in "[{" else -1
        if depth == 0:
            return text[at : match.end()]
    return text[at:]


def _at(settings: Any, *names: str) -> Any:
    for name in names:
        if not isinstance(settings, dict):
            return None
        settings = cast("dict[str, Any]", settings).get(name)
    return settings


def _line(source: Source, text: str) -> int:
    place = source.text.find(f'"{text}"')
    return source.line_at(max(place, 0))


# Saved leaks

_KEEP = "take it out of the repository and its history, and keep it as secret as the text"

SAVED_LEAK = Rule(
    "KH-CONFIG-FILE-LEAK", "A leak of keyhole lab capture is kept here", Level.HIGH,
    "the text it was made from can be read back with the model",
    _KEEP, "keyhole recover MODEL FILE",
    standards.TEXTS_STORED,
)  # fmt: skip
SAVED_SLOT = Rule(
    "KH-CONFIG-FILE-SLOT", "A saved slot of llama.cpp is kept here", Level.HIGH,
    "it holds the prompt's token ids as they are, and its keys and values",
    _KEEP, "keyhole audit FILE --model MODEL.gguf",
    standards.TEXTS_STORED,
)  # fmt: skip
SAVED_STATES = Rule(
    "KH-CONFIG-FILE-STATES", "Saved hidden states are kept here", Level.HIGH,
    "it holds a prompt's token ids as they are, and its hidden states",
    _KEEP, "keyhole recover MODEL FILE",
    standards.TEXTS_STORED,
)  # fmt: skip
_HEADER = 2**20  # bytes of a header that is read: those of large models are about as long


def look_at_saved(path: Path) -> Iterator[Recognised]:
    for hit in _saved(path):
        yield Recognised("saved file", hit.rule.name, 1, (hit,))


def _saved(path: Path) -> Iterator[Finding]:
    try:
        with path.open("rb") as file:
            start = file.read(8)
            if start.startswith(SLOT_MAGIC):
                yield Finding(SAVED_SLOT, 1, "a saved slot")
            elif path.suffix == ".safetensors" and len(start) == 8:
                (length,) = struct.unpack("<Q", start)
                # A leak's header is short: one that is longer belongs to a model.
                if length <= _HEADER:
                    yield from _of_tensors(file.read(length))
    except OSError as error:
        raise Unreadable(error.strerror or str(error)) from error


def _of_tensors(header: bytes) -> Iterator[Finding]:
    try:
        parsed: Any = parse(header.decode())
    except ValueError:  # no .safetensors file, whatever it is called
        return
    if not isinstance(parsed, dict):
        return
    tensors = cast("dict[str, Any]", parsed)
    leak = _at(tensors, "__metadata__", "leak")
    if leak is not None and _at(tensors, "__metadata__", "keyhole") is not None:
        yield Finding(SAVED_LEAK, 1, f"a leak of kind {str(leak)[:40]}")
    elif set(tensors) - {"__metadata__"} == {"hidden_states", "token_ids"}:
        yield Finding(SAVED_STATES, 1, "hidden_states with token_ids")


FILE_RULES = (
    HIDDEN_STATES, ATTENTIONS, SCORES, SERVED_STATES, SERVED_MAPS, SERVED_CACHE, SERVED_VECTOR,
    SERVED_LOGITS, SAVED_LEAK, SAVED_SLOT, SAVED_STATES,
)  # fmt: skip


def _json(source: Source) -> Any:
    try:
        return parse(source.text)
    except ValueError as error:
        raise Unreadable(f"not JSON: {error}") from error


# All kinds of files, and the check of them

_PROGRAM_WORDS = tuple(word for program in PROGRAMS for word in program.words)


@dataclass(frozen=True)
class Kind:
    """Files of some names, and what recognises something in them."""

    name: str
    files: re.Pattern[str]  # their names, with the folder they are in
    look: Callable[[Path], Iterator[Recognised]]
    mostly_others: bool = False  # most such files configure other things: those are only counted


def _text(
    look: Callable[[Source], Iterable[Recognised]], words: tuple[str, ...]
) -> Callable[[Path], Iterator[Recognised]]:
    """`look` for a path: the file is read, and passed on if it has one of `words` in it."""

    def looked(path: Path) -> Iterator[Recognised]:
        source = read(path, words)
        if source is not None:
            yield from look(source)

    return looked


def _started(commands: Iterable[Command]) -> Iterator[Recognised]:
    for command in commands:
        for program in PROGRAMS:
            options = program.options(command)
            if options is not None:
                hits = tuple(program.look(options))
                yield Recognised(program.what, program.name, options.program.line, hits)


def _script(source: Source) -> Iterator[Recognised]:
    for command in from_shell(source.text):
        yield from _started(inner_scripts(command) or [command])


def _yaml(source: Source) -> Iterator[Recognised]:
    try:
        roots = documents(source.text)
    except ValueError:  # such as a template: its lines are read as those of a shell script
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
            yield from _variables_of(command)


def _variables(source: Source) -> Iterator[Recognised]:
    yield from _variables_of(Command((), in_variables(source.text)))


def _variables_of(command: Command) -> Iterator[Recognised]:
    """Programs whose variables are set, without the line that starts them."""
    for variable, (program, look) in VARIABLES.items():
        if word := command.env.get(variable):
            hits = tuple(look(Options(word, (), command)))
            yield Recognised(program.what, program.name, word.line, hits)


def _kind(
    name: str, pattern: str, look: Callable[[Source], Iterable[Recognised]],
    words: tuple[str, ...] = _PROGRAM_WORDS, *, mostly_others: bool = False,
) -> Kind:  # fmt: skip
    return Kind(name, re.compile(pattern), _text(look, words), mostly_others)


KINDS: tuple[Kind, ...] = (
    _kind(
        "Hugging Face settings", r".*/(generation_)?config\.json", look_at_model,
        MODEL_WORDS,
    ),
    _kind(
        "MLServer model settings", r".*/model-settings\.json", look_at_mlserver,
        OUTPUT_WORDS,
    ),
    _kind(
        "Triton model configuration", r".*\.pbtxt", look_at_triton, OUTPUT_WORDS
    ),
    _kind("Compose, Kubernetes, Helm, pipelines, settings of stores", r".*\.ya?ml", _yaml),
    _kind("tasks and manifests in JSON", r".*\.json", _yaml, mostly_others=True),
    _kind("shell scripts", r".*\.(sh|bash)", _script),
    _kind(
        "Dockerfiles", r".*/(.*\.)?(Dockerfile|Containerfile)(\..*)?",
        lambda source: _started(in_dockerfile(source.text)),
    ),
    _kind("units of systemd", r".*\.service|.*\.service\.d/.*\.conf|.*/override\.conf", _unit),
    _kind(
        "units of Podman", r".*\.container", lambda source: _started(in_quadlet(source.text))
    ),
    _kind("variables", r".*/(.*\.)?env(\.(?!py|js|ts|go|rs|md)\w+)*", _variables),
    Kind("leaked files", re.compile(r".*\.(safetensors|bin|slot)"), look_at_saved),
    # What else configures something: it is read for names of programs alone.
    _kind(
        "other configurations", r".*\.(toml|ini|cfg|conf|properties|tf|tfvars|hcl|nomad|tpl|xml|"
        r"plist|jsonnet|ps1|bat)|.*/(Procfile|Makefile|Caddyfile|Justfile)", lambda _: (),
    ),
)  # fmt: skip
RULES: dict[str, Rule] = {
    rule.id: rule
    for rules in (FILE_RULES, *(program.rules for program in PROGRAMS))
    for rule in rules
}


def kind_of(path: Path) -> Kind | None:
    tail = "/" + "/".join(path.parts[-2:])
    return next((kind for kind in KINDS if kind.files.fullmatch(tail)), None)


_NOT_ENTERED = {  # folders
    ".git", ".hg", ".svn", "node_modules", ".venv", "venv", "__pycache__", ".tox", ".mypy_cache",
}  # fmt: skip
MOST = 100_000  # files of a folder


def check(paths: Sequence[str | Path], ignore: Iterable[str] = ()) -> Checked:
    """Look at files, and at all files of a known kind in folders; links in folders stay unfollowed.

    `ignore` are rules that are not reported.
    """
    ignored = set(ignore)
    if unknown := sorted(ignored - set(RULES)):
        raise InputError(f"there is no rule {unknown[0][:80]}: choose among {', '.join(RULES)}")
    if not paths:
        raise InputError("name the files or folders to look at")
    findings, unread, others = list[Finding](), list[Unread](), Counter[str]()
    recognised, skipped, looked = list[Recognised](), list[Skipped](), 0
    for path, named in _files([Path(path) for path in paths], unread):
        kind = kind_of(path)
        if kind is None:
            if named:
                unread.append(Unread(str(path), "not a configuration of a known kind"))
            else:
                others[path.suffix or path.name] += 1
            continue
        try:
            known = list(kind.look(path))
            skip = Skipped(str(path)) if known else _skipped(path)
        except Unreadable as error:
            if kind.mostly_others and not named:
                others[path.suffix] += 1
                continue
            looked += 1
            unread.append(Unread(str(path), str(error)))
            continue
        if kind.mostly_others and not (known or skip.mentions or named):
            others[path.suffix] += 1
            continue
        looked += 1
        if not known:
            skipped.append(skip)
        parts = {(each.line, each.name, each.what): each for each in known}
        recognised += [replace(each, path=str(path)) for _, each in sorted(parts.items())]
        found = {(f.line, f.rule.id, f.what): f for each in known for f in each.findings}
        findings += [
            replace(finding, path=str(path))
            for _, finding in sorted(found.items())
            if finding.rule.id not in ignored
        ]
    return Checked(
        tuple(findings), tuple(unread), looked, tuple(sorted(ignored)), tuple(recognised),
        tuple(skipped), dict(sorted(others.items())),
    )  # fmt: skip


def _skipped(path: Path) -> Skipped:
    """A file in which nothing was recognised, with the programs whose names stand in it."""
    source = read(path, _PROGRAM_WORDS) if path.suffix not in _BINARY else None
    if source is None:
        return Skipped(str(path))
    text, broken = source.text.lower(), False
    if path.suffix in (".yaml", ".yml"):
        try:
            documents(source.text)
        except ValueError:
            broken = True
    mentions = tuple(program.name for program in PROGRAMS if _name_of(program).search(text))
    return Skipped(str(path), mentions, broken)


def _name_of(program: Program) -> re.Pattern[str]:
    """The program's name, or that of its command, as a word."""
    names = {program.name.lower(), *(start[0] for start in program.starts if start[0] != "-m")}
    return re.compile(rf"(?<![a-z.])({'|'.join(map(re.escape, sorted(names)))})(db)?(?![a-z])")


_BINARY = (".safetensors", ".bin", ".slot")


def _files(paths: list[Path], unread: list[Unread]) -> Iterator[tuple[Path, bool]]:
    """Each file once, and whether it was named; what is named must be there."""
    seen = set[str]()
    for path in paths:
        folder = is_folder(path)
        if not folder and not is_file(path):
            reason = "it is a device or a pipe" if exists(path) else "there is no such file"
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
            if count > MOST:
                unread.append(Unread(str(folder), f"more than {MOST:,} files"))
                return
            if path.is_file() and not path.is_symlink():
                yield path
