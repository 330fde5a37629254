"""Every kind of configuration, with the files that it is read from.

To add one, write its rules and a function that looks for them, and add a line here: a server that
is started by a command line joins PROGRAMS, a file of its own joins KINDS.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from keyhole.configs import hugging_face, leaked_files, llama_cpp, served_outputs, sglang, vllm
from keyhole.configs.command import Command, from_shell, inner_scripts
from keyhole.configs.containers import in_dockerfile, in_unit, in_yaml
from keyhole.configs.finding import Hit, Rule
from keyhole.configs.program import Program
from keyhole.configs.source import Source, read
from keyhole.configs.stores import CHROMA, QDRANT, look_at_settings
from keyhole.configs.yaml_tree import documents

PROGRAMS: tuple[Program, ...] = (
    llama_cpp.PROGRAM, vllm.PROGRAM, sglang.PROGRAM, CHROMA, QDRANT,
)  # fmt: skip
_PROGRAM_WORDS = tuple(word for program in PROGRAMS for word in program.words)


@dataclass(frozen=True)
class Kind:
    """Files of some names, and what looks for rules in them."""

    name: str
    files: re.Pattern[str]  # their names, without folders
    look: Callable[[Path], Iterator[Hit]]


def _text(
    look: Callable[[Source], Iterable[Hit]], words: tuple[str, ...]
) -> Callable[[Path], Iterator[Hit]]:
    """A look at the text of a file that has one of `words` in it."""

    def looked(path: Path) -> Iterator[Hit]:
        source = read(path, words)
        if source is not None:
            yield from look(source)

    return looked


def _started(commands: Iterable[Command]) -> Iterator[Hit]:
    for command in commands:
        for program in PROGRAMS:
            options = program.options(command)
            if options is not None:
                yield from program.look(options)


def _script(source: Source) -> Iterator[Hit]:
    for command in from_shell(source.text):
        yield from _started(inner_scripts(command) or [command])


def _yaml(source: Source) -> Iterator[Hit]:
    try:
        roots = documents(source.text)
    except ValueError:  # a template, say: what its lines hold is read as a shell would
        bare = re.sub(r"^[ \t]*(?:- +|[\w-]+: +)+", "", source.text, flags=re.MULTILINE)
        yield from _script(Source(source.path, bare))
        return
    for root in roots:
        yield from look_at_settings(root)
        yield from _started(in_yaml(root))


KINDS: tuple[Kind, ...] = (
    Kind(
        "Hugging Face settings",
        re.compile(r"(generation_)?config\.json"),
        _text(hugging_face.look, hugging_face.WORDS),
    ),
    Kind(
        "MLServer model settings",
        re.compile(r"model-settings\.json"),
        _text(served_outputs.look_at_mlserver, served_outputs.WORDS),
    ),
    Kind(
        "Triton model configuration",
        re.compile(r".*\.pbtxt"),
        _text(served_outputs.look_at_triton, served_outputs.WORDS),
    ),
    Kind(
        "Compose, Kubernetes, pipelines, settings of stores",
        re.compile(r".*\.ya?ml"),
        _text(_yaml, _PROGRAM_WORDS),
    ),
    Kind("shell scripts", re.compile(r".*\.(sh|bash)"), _text(_script, _PROGRAM_WORDS)),
    Kind(
        "Dockerfiles",
        re.compile(r"(.*\.)?(Dockerfile|Containerfile)(\..*)?"),
        _text(lambda source: _started(in_dockerfile(source.text)), _PROGRAM_WORDS),
    ),
    Kind(
        "units of systemd",
        re.compile(r".*\.service"),
        _text(lambda source: _started(in_unit(source.text)), _PROGRAM_WORDS),
    ),
    Kind("leaked files", re.compile(r".*\.(safetensors|bin|slot)"), leaked_files.look),
)
RULES: dict[str, Rule] = {
    rule.id: rule
    for rules in (
        hugging_face.RULES,
        served_outputs.RULES,
        leaked_files.RULES,
        *(program.rules for program in PROGRAMS),
    )
    for rule in rules
}


def kind_of(path: Path) -> Kind | None:
    return next((kind for kind in KINDS if kind.files.fullmatch(path.name)), None)
