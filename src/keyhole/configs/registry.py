"""Every kind of configuration with the files that it is read from, and the check of all of them.

To add one, write its rules and a function that looks for them: a server that is started by a
command line joins PROGRAMS (servers.py), a file of its own joins KINDS. Nothing is run.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from keyhole.configs import files
from keyhole.configs.command import Command, from_shell, inner_scripts
from keyhole.configs.containers import documents, in_dockerfile, in_unit, in_yaml
from keyhole.configs.finding import Checked, Finding, Hit, Rule, Source, Unread, Unreadable, read
from keyhole.configs.servers import PROGRAMS, look_at_settings
from keyhole.core.errors import InputError
from keyhole.core.files import exists, is_file, is_folder

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


def _kind(
    name: str, pattern: str, look: Callable[[Source], Iterable[Hit]],
    words: tuple[str, ...] = _PROGRAM_WORDS,
) -> Kind:  # fmt: skip
    return Kind(name, re.compile(pattern), _text(look, words))


KINDS: tuple[Kind, ...] = (
    _kind(
        "Hugging Face settings", r"(generation_)?config\.json", files.look_at_model, files.SETTINGS
    ),
    _kind(
        "MLServer model settings", r"model-settings\.json", files.look_at_mlserver,
        files.OUTPUT_WORDS,
    ),
    _kind(
        "Triton model configuration", r".*\.pbtxt", files.look_at_triton, files.OUTPUT_WORDS
    ),
    _kind("Compose, Kubernetes, pipelines, settings of stores", r".*\.ya?ml", _yaml),
    _kind("shell scripts", r".*\.(sh|bash)", _script),
    _kind(
        "Dockerfiles", r"(.*\.)?(Dockerfile|Containerfile)(\..*)?",
        lambda source: _started(in_dockerfile(source.text)),
    ),
    _kind(
        "units of systemd", r".*\.service", lambda source: _started(in_unit(source.text))
    ),
    Kind("leaked files", re.compile(r".*\.(safetensors|bin|slot)"), files.look_at_saved),
)  # fmt: skip
RULES: dict[str, Rule] = {
    rule.id: rule
    for rules in (files.RULES, *(program.rules for program in PROGRAMS))
    for rule in rules
}


def kind_of(path: Path) -> Kind | None:
    return next((kind for kind in KINDS if kind.files.fullmatch(path.name)), None)


_ASIDE = {
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
    findings, unread, looked = list[Finding](), list[Unread](), 0
    for path, named in _files([Path(path) for path in paths], unread):
        kind = kind_of(path)
        if kind is None:
            if named:
                unread.append(Unread(str(path), "not a configuration of a known kind"))
            continue
        looked += 1
        try:
            hits = {(hit.line, hit.rule.id, hit.what): hit for hit in kind.look(path)}
        except Unreadable as error:
            unread.append(Unread(str(path), str(error)))
            continue
        findings += [
            Finding(hit.rule, str(path), hit.line, hit.what)
            for _, hit in sorted(hits.items())
            if hit.rule.id not in ignored
        ]
    return Checked(tuple(findings), tuple(unread), looked, tuple(sorted(ignored)))


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
        folders[:] = sorted(name for name in folders if name not in _ASIDE)
        for name in sorted(names):
            path = Path(place, name)
            count += 1
            if count > MOST:
                unread.append(Unread(str(folder), f"more than {MOST:,} files"))
                return
            if kind_of(path) is not None and path.is_file() and not path.is_symlink():
                yield path
