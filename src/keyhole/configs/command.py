"""Command lines as configurations write them: words, environments, who reaches what they start."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from keyhole.configs.finding import Finding, Rule

_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
# Words that stand for any number of options: what is missing may be in them.
_OPAQUE = re.compile(r"\{\{|\$[@*]|\[[@*]\]|\$\{?\w*(ARG|OPT|FLAG|EXTRA|PARAM)", re.IGNORECASE)
_LOOPBACK = re.compile(r"localhost$|127\.|::1$|\[::1\]$|.*\.sock$|/")
_SHELLS = re.compile(r"(.*/)?(ba|da|z|k|a)?sh$")


@dataclass(frozen=True)
class Word:
    text: str
    line: int


@dataclass(frozen=True)
class Command:
    """Words of a process, and what is known of who reaches it."""

    words: tuple[Word, ...]
    env: Mapping[str, Word] = field(default_factory=dict[str, Word])
    image: Word | None = None  # the container's
    local: bool = False  # only this machine, or the network of its Compose file, reaches it
    mounts: tuple[str, ...] = ()  # folders and files that are put into the container
    container: bool = False  # the words are those of `docker run`, the image among them
    published: Word | None = None  # the setting by which others reach it, where one is seen
    cluster: bool = False  # it runs in Kubernetes
    external_env: bool = False  # another file sets more variables: a missing key is not reported
    inner: bool = False  # a line of `sh -c`: the image's own program may be another line


@dataclass(frozen=True)
class Options:
    """What a program is started with: its options and its environment."""

    program: Word
    words: tuple[Word, ...]
    command: Command
    image: Word | None = None

    @property
    def env(self) -> Mapping[str, Word]:
        return self.command.env

    def option(self, *names: str, env: str = "") -> Word | None:
        """The value of the last such option, or of the variable that stands for it.

        An option that has no value gives an empty one, on its line.
        """
        given: Word | None = self.env.get(env)
        for place, word in enumerate(self.words):
            name, equals, value = word.text.partition("=")
            if name.replace("_", "-") not in names or not name.startswith("-"):
                continue
            if not equals and place + 1 < len(self.words):
                following = self.words[place + 1].text
                value = following if not following.startswith("--") else ""
            given = Word(value, word.line)
        return given

    def has(self, *names: str, env: str = "") -> Word | None:
        """Whether an option without a value is given; a variable must not say no."""
        given = self.env.get(env)
        if given is not None and given.text.lower() in ("", "0", "false", "off", "disabled"):
            given = None
        for word in self.words:
            if word.text.partition("=")[0].replace("_", "-") in names:
                given = word
        return given

    @property
    def opaque(self) -> bool:
        """Whether more options may come from a shell, a template or another file."""
        return self.command.external_env or any(_OPAQUE.search(word.text) for word in self.words)


def reached_from_outside(host: Word | None, default: str) -> bool:
    """Whether an address to listen at is more than this machine; one that a variable holds may be
    anything, and is not claimed to be."""
    address = default if host is None else host.text
    return "$" not in address and "{{" not in address and not _LOOPBACK.match(address)


def from_shell(text: str, line: int = 1) -> list[Command]:
    """The commands of a script; what it assigns anywhere is in the environment of all of them."""
    made, env = list[list[Word]](), dict[str, Word]()
    for words in simple_commands(text, line):
        rest = _without_assignments(words, env)
        if rest:
            made.append(rest)
    return [_contained(words, env) for words in made]


def inner_scripts(command: Command) -> list[Command]:
    """What `sh -c "…"` runs, if the command is that."""
    words = command.words
    if not words or not _SHELLS.match(words[0].text):
        return []
    scripts = [word for word in words[1:] if " " in word.text]
    return [
        replace(command, words=inner.words, env={**command.env, **inner.env}, inner=True)
        for word in scripts
        for inner in from_shell(word.text, word.line)
    ]


def assignments(words: Iterable[Word]) -> dict[str, Word]:
    """NAME=value words as an environment."""
    env = dict[str, Word]()
    for word in words:
        if match := _ASSIGNMENT.fullmatch(word.text):
            env[match[1]] = Word(match[2], word.line)
    return env


def on_loopback(published: Iterable[str]) -> bool:
    """Whether ports are published, and all of them to this machine alone."""
    ports = list(published)
    return bool(ports) and all(port.startswith(("127.", "localhost:", "[::1]:")) for port in ports)


def _without_assignments(words: list[Word], env: dict[str, Word]) -> list[Word]:
    start = 0
    while start < len(words) and (
        words[start].text in ("export", "env", "exec", "sudo", "nohup", "time")
        or _ASSIGNMENT.fullmatch(words[start].text)
    ):
        start += 1
    env |= assignments(words[:start])
    return words[start:]


def _contained(words: list[Word], env: Mapping[str, Word]) -> Command:
    """A command; of `docker run` the container's environment, ports and what follows the image."""
    texts = [word.text for word in words]
    if texts[0].rpartition("/")[2] not in ("docker", "podman", "nerdctl") or "run" not in texts:
        return Command(tuple(words), env)
    given, ports, mounts = dict[str, Word](), list[Word](), list[str]()
    for option, value in itertools.pairwise(words):
        if option.text in ("-e", "--env"):
            given |= assignments([value]) or {value.text: Word("$" + value.text, value.line)}
        elif option.text in ("-p", "--publish"):
            ports.append(Word(f"-p {value.text}", value.line))
        elif option.text in ("-v", "--volume", "--mount"):
            mounts.append(value.text)
    host = [word for word in words if word.text in ("--net=host", "--network=host")]
    local = on_loopback(port.text.removeprefix("-p ") for port in ports)
    return Command(
        tuple(words), given, local=local, mounts=tuple(mounts), container=True,
        published=next(iter([] if local else [*ports, *host]), None),
        external_env=any(word.text.startswith("--env-file") for word in words),
    )  # fmt: skip


# Shell text as simple commands of words; nothing is expanded: variables stay as they are written.
# `shlex` of the standard library does not fit: it keeps no lines of words, ends at a quote that is
# never closed (these texts may be prose), and does not join continued lines.

# An escape, or text in quotes; the last of them may be open.
_QUOTED = re.compile(r"""\\(.|\Z)|'([^']*)'?|"((?:\\.|[^"\\])*)"?""", re.DOTALL)
_TOKENS = re.compile(
    r"""(?P<word>(?!\#|\\\n)(?:\\(?:.|\Z)|'[^']*'?|"(?:\\.|[^"\\])*"?|\$\(|[^ \t;&|()\n\\'"])+)"""
    r"|(?P<end>[;&|()\n])|\\\n|[ \t]+|\#[^\n]*",
    re.DOTALL,
)


def simple_commands(text: str, line: int = 1) -> list[list[Word]]:
    """The words of each command of a script; `line` is that of the text's first line."""
    commands: list[list[Word]] = [[]]
    for token in _TOKENS.finditer(text):
        if token["word"]:
            commands[-1].append(Word(_QUOTED.sub(_plain, token["word"]), line))
        elif token["end"]:
            commands.append([])
        line += token[0].count("\n")
    return [words for words in commands if words]


def all_words(text: str, line: int) -> list[Word]:
    """The words of a script, of all its commands."""
    return [word for words in simple_commands(text, line) for word in words]


def _plain(quoted: re.Match[str]) -> str:
    """What an escape or a text in quotes stands for."""
    escaped, single, double = quoted.groups()
    if single is not None:
        return single
    inner = rf"\{escaped}" if double is None else double
    return re.sub(r"\\(.?)", lambda escape: escape[1].strip("\n"), inner, flags=re.DOTALL)


def quoted_items(text: str, line: int) -> list[Word]:
    """The strings of a list such as ["a", "b"], as Dockerfiles have them."""
    return [
        Word(re.sub(r"\\(.)", r"\1", match[1]), line + text.count("\n", 0, match.start()))
        for match in re.finditer(r'"((?:[^"\\]|\\.)*)"', text, re.DOTALL)
    ]


# What may stand before a program that is run; other words are prose, or install or stop it.
_WRAPPERS = re.compile(
    r"python[\d.]*|numactl|taskset|nice|gosu|tini|dumb-init|chrt|stdbuf|timeout|env|exec|sudo|uv|uvx|"
    r"poetry|conda|srun|mpirun|torchrun|nsys|xvfb-run|if|while|until|then|do|else|!|\{"
)


@dataclass(frozen=True)
class Program:
    """A server that configurations start: how it is recognised, and what looks at its options.

    `starts` are the ways to start it, as words in a row, the first without its folder; `image`
    matches the container image whose own program it is; `words` are in every such file.
    """

    name: str
    what: Literal["server", "store"]
    words: tuple[str, ...]
    starts: tuple[tuple[str, ...], ...]
    image: re.Pattern[str]
    rules: tuple[Rule, ...]
    look: Callable[[Options], Iterator[Finding]]

    def options(self, command: Command) -> Options | None:
        """What the command starts the program with, if it does."""
        words = command.words
        for place, word in enumerate(words):
            found = (
                word.text.rpartition("/")[2],
                *(more.text for more in words[place + 1 : place + 3]),
            )
            for start in self.starts:
                if found[: len(start)] == start and _is_run(command, place, len(start)):
                    return self._started(command, word, place + len(start))
            if command.container and self.image.search(word.text) and word.text[0] != "-":
                return self._started(command, word, place + 1)
        own = command.image is not None and self.image.search(command.image.text)
        if command.image is not None and own and not command.inner:
            return self._started(command, command.image, 0)
        return None

    def _started(self, command: Command, program: Word, place: int) -> Options:
        image = command.image or (program if self.image.search(program.text) else None)
        return Options(program, command.words[place:], command, image)


def _is_run(command: Command, place: int, length: int) -> bool:
    """Whether the words at a place are run, and not written about, installed or stopped.

    A program of one word takes options alone: other words after it make a sentence.
    """
    words = command.words
    first = words[0].text.rpartition("/")[2]
    after = words[place + length].text if place + length < len(words) else "-"
    runs = place == 0 or command.container or bool(_WRAPPERS.fullmatch(first))
    return runs and (length > 1 or after.startswith(("-", "$", "{{")))
