"""Every kind of configuration with the files that it is read from, and the check of all of them.

To add one, write its rules and a function that looks for them: a server that is started by a
command line joins PROGRAMS (servers.py), a file of its own joins KINDS. Nothing is run.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from keyhole.configs import files
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
from keyhole.core.errors import InputError
from keyhole.core.files import exists, is_file, is_folder

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
        "Hugging Face settings", r".*/(generation_)?config\.json", files.look_at_model,
        files.MODEL_WORDS,
    ),
    _kind(
        "MLServer model settings", r".*/model-settings\.json", files.look_at_mlserver,
        files.OUTPUT_WORDS,
    ),
    _kind(
        "Triton model configuration", r".*\.pbtxt", files.look_at_triton, files.OUTPUT_WORDS
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
    Kind("leaked files", re.compile(r".*\.(safetensors|bin|slot)"), files.look_at_saved),
    # What else configures something: it is read for names of programs alone.
    _kind(
        "other configurations", r".*\.(toml|ini|cfg|conf|properties|tf|tfvars|hcl|nomad|tpl|xml|"
        r"plist|jsonnet|ps1|bat)|.*/(Procfile|Makefile|Caddyfile|Justfile)", lambda _: (),
    ),
)  # fmt: skip
RULES: dict[str, Rule] = {
    rule.id: rule
    for rules in (files.RULES, *(program.rules for program in PROGRAMS))
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
