"""Command lines in configurations: their words, their environment, and who can reach them.

`from_shell` takes the text of a script and returns its commands. A `Program` recognises
itself in a command (`options`), and its rules look for settings there (`findings`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from keyhole.configs.finding import Finding, Rule


@dataclass(frozen=True)
class Word:
    """A word of a command line, or another text, with its line in the file."""

    text: str
    line: int


@dataclass(frozen=True)
class Command:
    """The words of a command, and what is known about who can reach the process."""

    words: tuple[Word, ...]
    env: Mapping[str, Word] = field(default_factory=dict[str, Word])
    image: Word | None = None  # of the container
    local: bool = (
        False  # only this machine, or the network of its Compose file, reaches it
    )
    mounts: tuple[
        str, ...
    ] = ()  # files and folders that are mounted into the container
    container: bool = False  # the words are those of `docker run`, including the image
    published: Word | None = (
        None  # the setting that lets others reach it, where there is one
    )
    cluster: bool = False  # it runs in Kubernetes
    external_env: bool = False  # another file sets more variables, perhaps a key
    inner: bool = (
        False  # a command of `sh -c`, which may not be the one that the image is for
    )


# Commands in shell text

_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
_PREFIXES = {  # what may precede a command, with its options that take the next word
    "export": "",
    "nohup": "",
    "env": r"-\w*[uC]|--unset|--chdir",
    "exec": r"-\w*a",
    "time": r"-\w*[fo]",
    "sudo": r"-[ABbEHiKknPS]*[CDghpRrTtUu]|--(user|group|host|prompt|chdir|close-from|role|type|"
    r"chroot|other-user|command-timeout)",
}
_LOCAL_PORT = re.compile(
    r"(\$\{\w+:?-)?(127\.|localhost\b|\[::1\])"
)  # perhaps by default
_SHELLS = re.compile(r"(.*/)?(ba|da|z|k|a)?sh$")


def from_shell(text: str, line: int = 1) -> list[Command]:
    """Return the commands of a script; every assignment in it is in the environment of all."""
    commands = list[list[Word]]()
    env = dict[str, Word]()
    for words in simple_commands(text, line):
        start = 0
        prefix = ""
        while start < len(words):
            text = words[start].text
            if text in _PREFIXES:
                prefix = text
            elif prefix and text.startswith("-"):
                start += bool(re.fullmatch(_PREFIXES[prefix], text))  # its value
            elif not _ASSIGNMENT.fullmatch(text):
                break
            start += 1
        env |= assignments(words[:start])
        if start < len(words):
            commands.append(words[start:])
    return [_docker_run(words) or Command(tuple(words), env) for words in commands]


def inner_scripts(command: Command) -> list[Command]:
    """Return the commands in `sh -c "…"`; if the command is no shell, return it alone."""
    words = command.words
    if not words or not _SHELLS.match(words[0].text):
        return [command]
    inner = [
        replace(command, words=each.words, env={**command.env, **each.env}, inner=True)
        for script in words[1:]
        if " " in script.text
        for each in from_shell(script.text, script.line)
    ]
    return inner or [command]


def assignments(words: Iterable[Word]) -> dict[str, Word]:
    """Return the environment that NAME=value words set."""
    env = dict[str, Word]()
    for word in words:
        if match := _ASSIGNMENT.fullmatch(word.text):
            env[match[1]] = Word(match[2], word.line)
    return env


def on_loopback(published: Iterable[str]) -> bool:
    """Return whether ports are published, and all of them to this machine alone."""
    ports = list(published)
    return bool(ports) and all(map(_LOCAL_PORT.match, ports))


def _docker_run(words: list[Word]) -> Command | None:
    """Return the command of `docker run`, with the environment and the ports of the container."""
    texts = [word.text for word in words]
    if (
        texts[0].rpartition("/")[2] not in ("docker", "podman", "nerdctl")
        or "run" not in texts
    ):
        return None
    env = dict[str, Word]()
    ports = list[Word]()
    mounts = list[str]()
    host = list[Word]()
    for option, value in _run_options(words[texts.index("run") + 1 :]):
        if option in ("-e", "--env"):
            env |= assignments([value]) or {
                value.text: Word("$" + value.text, value.line)
            }
        elif option in ("-p", "--publish"):
            ports.append(Word(f"-p {value.text}", value.line))
        elif option in ("-v", "--volume", "--mount"):
            mounts.append(value.text)
        elif option in ("--net", "--network") and value.text == "host":
            host.append(Word(f"{option}=host", value.line))
    # With the network of the machine, the ports that are published do not matter.
    local = not host and on_loopback(port.text.removeprefix("-p ") for port in ports)
    return Command(
        tuple(words),
        env,
        local=local,
        mounts=tuple(mounts),
        container=True,
        published=next(iter([] if local else [*ports, *host]), None),
        external_env=any(text.startswith("--env-file") for text in texts),
    )


_RUN_FLAGS = {  # the options of `docker run` and `podman run` that take no value
    "--detach",
    "--disable-content-trust",
    "--env-host",
    "--help",
    "--http-proxy",
    "--init",
    "--interactive",
    "--no-healthcheck",
    "--no-hostname",
    "--no-hosts",
    "--oom-kill-disable",
    "--passwd",
    "--privileged",
    "--publish-all",
    "--quiet",
    "--read-only",
    "--read-only-tmpfs",
    "--replace",
    "--rm",
    "--rmi",
    "--rootfs",
    "--sig-proxy",
    "--tls-verify",
    "--tty",
    "--unsetenv-all",
    "--use-api-socket",
}


def _run_options(words: Iterable[Word]) -> Iterator[tuple[str, Word]]:
    """Yield the options before the image that have a value: `--x y`, `--x=y`, `-x y`, `-dxy`."""
    rest = iter(words)
    for word in rest:
        if word.text.startswith(("$", "{{")):  # more options, or the image
            continue
        if not word.text.startswith("-"):  # the image
            return
        name, attached, value = word.text.partition("=")
        if not name.startswith(
            "--"
        ):  # flags of one letter, and perhaps one that takes a value
            letters = word.text.lstrip("-").lstrip("ditPq")
            name = f"-{letters[:1]}"
            attached = letters[1:]
            value = attached.removeprefix("=")
        if name in _RUN_FLAGS or name in ("-", "-="):
            continue
        given = Word(value, word.line) if attached else next(rest, None)
        if given is not None:
            yield name, given


# Words of shell text. Nothing is expanded: variables remain as they are written.
# `shlex` of the standard library does not fit: it keeps no lines of words, raises at a
# quote that is never closed (these texts may be prose), and does not join continued
# lines.

# An escape, or text in quotes, which may lack the closing quote.
_QUOTED = re.compile(r"""\\(.|\Z)|'([^']*)'?|"((?:\\.|[^"\\])*)"?""", re.DOTALL)
_TOKENS = re.compile(
    r"""(?P<word>(?!\#|\\\n)(?:\\(?:.|\Z)|'[^']*'?|"(?:\\.|[^"\\])*"?|\$\(|[^ \t;&|()\n\\'"])+)"""
    r"|(?P<end>[;&|()\n])|\\\n|[ \t]+|\#[^\n]*",
    re.DOTALL,
)


def simple_commands(text: str, line: int = 1) -> list[list[Word]]:
    """Return the words of each command of a script whose first line has the number `line`."""
    commands: list[list[Word]] = [[]]
    for token in _TOKENS.finditer(text):
        if token["word"]:
            commands[-1].append(Word(_QUOTED.sub(_unquoted, token["word"]), line))
        elif token["end"]:
            commands.append([])
        line += token[0].count("\n")
    return [words for words in commands if words]


def all_words(text: str, line: int) -> list[Word]:
    return [word for words in simple_commands(text, line) for word in words]


def _unquoted(quoted: re.Match[str]) -> str:
    escaped, single, double = quoted.groups()
    if single is not None:
        return single
    inner = rf"\{escaped}" if double is None else double
    return re.sub(
        r"\\(.?)", lambda escape: escape[1].strip("\n"), inner, flags=re.DOTALL
    )


def quoted_items(text: str, line: int) -> list[Word]:
    """Return the strings of a list such as ["a", "b"], which Dockerfiles have."""
    return [
        Word(
            re.sub(r"\\(.)", r"\1", match[1]), line + text.count("\n", 0, match.start())
        )
        for match in re.finditer(r'"((?:[^"\\]|\\.)*)"', text, re.DOTALL)
    ]


# The programs that commands start, and the options they start them with

# These words may stand for any number of options, so no option can be called missing. A
# variable says so in a part of its name: $VLLM_ARGS and $extraArgs, but not
# $LARGE_MODEL.
_OPAQUE = re.compile(
    r"\{\{|\$[@*]|\[[@*]\]|\$\{?((\w*_)?(ARG|ARGUMENT|OPT|OPTION|FLAG|EXTRA|PARAM|PARAMETER)S?|"
    r"\w*(ARGS|OPTS|FLAGS|PARAMS))(?![A-Z])",
    re.IGNORECASE,
)
_LOOPBACK = re.compile(r"localhost$|127\.|::1$|\[::1\]$|.*\.sock$|/")
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::?-([^}]*))?\}|(\w+))")
_VARIABLES = 4  # in a word: a hostile file cannot make one of gigabytes
# Words that can precede a program that is run. After other words it is prose, or is
# installed or stopped.
_WRAPPERS = re.compile(
    r"python[\d.]*|numactl|taskset|nice|gosu|tini|dumb-init|chrt|stdbuf|timeout|env|exec|sudo|uv|uvx|"
    r"poetry|conda|srun|mpirun|torchrun|nsys|xvfb-run|if|while|until|then|do|else|!|\{"
)


@dataclass(frozen=True)
class Options:
    """The options and the environment that a program is started with."""

    program: Word
    words: tuple[Word, ...]
    command: Command
    image: Word | None = None
    own_image: bool = False  # the image is the program's own

    def option(self, *names: str, env: str = "") -> Word | None:
        """Return the value of the last such option, or of the variable that replaces it.

        An option without a value gives an empty text. An empty variable counts as not
        set.
        """
        given = self.command.env.get(env)
        given = given if given is not None and given.text else None
        for place, word in enumerate(self.words):
            name, equals, value = word.text.partition("=")
            if name.replace("_", "-") not in names or not name.startswith("-"):
                continue
            if not equals and place + 1 < len(self.words):
                following = self.words[place + 1].text
                value = following if not following.startswith("--") else ""
            given = Word(value, word.line)
        return None if given is None else self.expanded(given)

    def expanded(self, word: Word) -> Word:
        """Put in the variables that the file itself sets, or their defaults: `${HOST:-0.0.0.0}`."""

        def value(match: re.Match[str]) -> str:
            given = self.command.env.get(match[1] or match[3])
            known = "" if given is None or match[0] in given.text else given.text
            return known or match[2] or match[0]

        text = word.text
        for _ in range(2):  # a variable may be set to another one's default
            text = _VARIABLE.sub(value, text, count=_VARIABLES)
        return Word(text, word.line)

    def key(self, *names: str, env: str = "") -> Word | None:
        """Return the key that an option or a variable gives; an empty text is no key."""
        given = (self.option(*names), self.command.env.get(env))
        return next((word for word in given if word is not None and word.text), None)

    def has(self, *names: str, env: str = "") -> Word | None:
        """Return the last such flag, or the variable that sets it and does not say no."""
        given = self.command.env.get(env)
        if given is not None and given.text.lower() in (
            "",
            "0",
            "false",
            "off",
            "disabled",
        ):
            given = None
        for word in self.words:
            if word.text.partition("=")[0].replace("_", "-") in names:
                given = word
        return given

    def mounts(self, folder: str) -> bool:
        """Return whether files are mounted into this folder of the container."""
        return any(folder in mount for mount in self.command.mounts)

    @property
    def opaque(self) -> bool:
        """Whether more options may come from a shell, a template or another file."""
        file = self.option("--config", "--config-file", "--config-path")
        return (
            self.command.external_env
            or file is not None
            or any(_OPAQUE.search(word.text) for word in self.words)
        )


def reached_from_outside(host: str) -> bool:
    """Return whether other machines reach this address; a variable counts as not reached."""
    return "$" not in host and "{{" not in host and not _LOOPBACK.match(host)


# Finds the settings to which a rule applies, as they are shown.
Look = Callable[[Options], Iterable[Word]]


@dataclass(frozen=True)
class OptionRule(Rule):
    """A rule about the options or the environment of a program."""

    look: Look = lambda _: ()


@dataclass(frozen=True)
class Program:
    """A server or a store that configurations start.

    A file is parsed if it contains one of `words`. `starts` are the ways to start the
    program, the first word without its folder. `image` matches the container image of
    the program. A file of variables is the program's if it sets one of `variables`.
    """

    what: Literal["server", "store"]
    name: str
    words: tuple[str, ...]
    starts: tuple[str, ...]
    image: re.Pattern[str]
    rules: tuple[OptionRule, ...]
    variables: tuple[str, ...] = ()

    @cached_property
    def _starts(self) -> list[list[str]]:
        return [start.split() for start in self.starts]

    def findings(self, options: Options) -> tuple[Finding, ...]:
        return tuple(
            Finding(rule, setting.line, setting.text)
            for rule in self.rules
            for setting in rule.look(options)
        )

    def options(self, command: Command) -> Options | None:
        """Return what the command starts the program with, or None if it does not start it."""
        words = command.words
        image = command.image
        for place, word in enumerate(words):
            row = [
                word.text.rpartition("/")[2],
                *(w.text for w in words[place + 1 : place + 3]),
            ]
            for start in self._starts:
                if row[: len(start)] == start and _is_run(command, place, len(start)):
                    return self._started(command, word, place + len(start))
            if command.container and self._is_image(word) and word.text[0] != "-":
                return self._started(command, word, place + 1)
        if image is not None and self._is_image(image) and not command.inner:
            return self._started(command, image, 0)
        return None

    def _started(self, command: Command, program: Word, place: int) -> Options:
        image = command.image or (program if self._is_image(program) else None)
        own = image is not None and self._is_image(image)
        return Options(program, command.words[place:], command, image, own)

    def _is_image(self, word: Word) -> bool:
        return self.image.search(word.text) is not None


def _is_run(command: Command, place: int, length: int) -> bool:
    """Return whether the words at a place are run, and not written about, installed or stopped.

    A program of a single word takes options alone: other words after it make a
    sentence.
    """
    words = command.words
    first = words[0].text.rpartition("/")[2]
    after = words[place + length].text if place + length < len(words) else "-"
    runs = place == 0 or command.container or bool(_WRAPPERS.fullmatch(first))
    return runs and (length > 1 or after.startswith(("-", "$", "{{")))


# Ready-made searches for the usual settings

ANYWHERE = "0.0.0.0"  # noqa: S104


def is_on(word: Word | None) -> bool:
    return word is not None and word.text.lower() in ("true", "1", "yes", "on")


def may_be_on(word: Word | None) -> bool:
    """Return whether a setting is on, or is a variable that may turn it on."""
    return word is not None and (is_on(word) or "$" in word.text)


def flag(*names: str, env: str = "") -> Look:
    """Find each of these flags."""

    def look(options: Options) -> Iterator[Word]:
        for name in names:
            if given := options.has(name, env=env):
                yield Word(name, given.line)

    return look


def setting(
    name: str, env: str = "", applies: Callable[[str], bool] = lambda _: True
) -> Look:
    """Find an option whose value the rule applies to."""

    def look(options: Options) -> Iterator[Word]:
        given = options.option(name, env=env)
        if given and applies(given.text):
            yield Word(f"{name} {given.text}".strip(), given.line)

    return look


def unguarded(
    missing: str,
    guarded: Callable[[Options], object],
    *,
    host: str = "--host",
    env: str = "",
    default: str = ANYWHERE,
    in_own_image: str = "",
    listens: str = "the container listens at 0.0.0.0",
) -> Look:
    """Find a server that other machines reach and that is not guarded; `missing` is the guard.

    `host` and `env` set the address to listen at. Without them it is `default`, or
    `in_own_image` in the program's own image.
    """

    def look(options: Options) -> Iterator[Word]:
        command = options.command
        given = options.option(host, env=env)
        usual = in_own_image if in_own_image and options.own_image else default
        reached = reached_from_outside(given.text if given else usual)
        if command.local or options.opaque or not reached or guarded(options):
            return
        reach = Word(
            f"--host {given.text}" if given else listens,
            (given or options.program).line,
        )
        if command.cluster and command.published:
            reach = command.published
        yield Word(f"{reach.text}, {missing}", reach.line)

    return look
