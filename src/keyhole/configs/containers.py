"""Command lines in YAML (Compose, Kubernetes, pipelines), Dockerfiles and units of systemd."""

from __future__ import annotations

import re
from collections.abc import Iterator

from keyhole.configs.command import Command, assignments, from_shell, inner_scripts, on_loopback
from keyhole.configs.words import Word, quoted_items, simple_commands
from keyhole.configs.yaml_tree import Items, Mapping, Node, Scalar, walk

_COMMANDS = ("entrypoint", "command", "args")  # in the order in which they are put together


def in_yaml(root: Node) -> Iterator[Command]:
    """Containers with what they are told, and scripts wherever a text stands."""
    told = set[int]()
    for node in walk(root):
        if isinstance(node, Mapping) and (node.scalar("image") or "command" in node.pairs):
            yield from _container(node)
            told |= {id(part) for key in _COMMANDS for part in _parts(node.pairs.get(key))}
        elif isinstance(node, Scalar) and id(node) not in told and " " in node.text:
            yield from _script(node)


def _container(node: Mapping) -> Iterator[Command]:
    words = [word for key in _COMMANDS for word in _words(node.pairs.get(key))]
    image = node.scalar("image")
    ports = [part.text for part in _parts(node.pairs.get("ports")) if isinstance(part, Scalar)]
    mounts = [part.text for part in _parts(node.pairs.get("volumes")) if isinstance(part, Scalar)]
    command = Command(
        tuple(words), _environment(node), None if image is None else Word(image.text, image.line),
        on_loopback(ports), tuple(mounts),
    )  # fmt: skip
    yield from inner_scripts(command) or [command]


def _parts(node: Node | None) -> list[Node]:
    return node.items if isinstance(node, Items) else [] if node is None else [node]


def _words(node: Node | None) -> list[Word]:
    """The words of a list, or of a line as a shell would split it."""
    if isinstance(node, Scalar):
        lines = simple_commands(node.text.replace("\n", " "), node.line)
        return [word for words in lines for word in words]
    return [Word(part.text, part.line) for part in _parts(node) if isinstance(part, Scalar)]


def _script(node: Scalar) -> list[Command]:
    made = from_shell(node.text, node.line)
    if not node.folded:
        return made
    return [  # the lines of a folded text cannot be told apart any more
        Command(
            tuple(Word(word.text, node.line) for word in command.words), command.env,
            local=command.local, mounts=command.mounts, container=command.container,
        )
        for command in made
    ]  # fmt: skip


def _environment(node: Mapping) -> dict[str, Word]:
    """Compose has a mapping or NAME=value, Kubernetes a list of names and values."""
    env = dict[str, Word]()
    given = node.pairs.get("environment", node.pairs.get("env"))
    if isinstance(given, Mapping):
        pairs = [(key, value) for key, value in given.pairs.items() if isinstance(value, Scalar)]
        env |= {key: Word(value.text or "$", value.line) for key, value in pairs}
    for part in _parts(given):
        if isinstance(part, Scalar):  # a name alone is taken from whoever starts it
            word = Word(part.text, part.line)
            env |= assignments([word]) or {part.text: Word("$", part.line)}
        elif isinstance(part, Mapping) and (name := part.scalar("name")):
            value = part.scalar("value")  # or a secret, which is named elsewhere
            env[name.text] = Word("$" if value is None else value.text, name.line)
    return env


def in_dockerfile(text: str) -> Iterator[Command]:
    """What the last stage of a Dockerfile starts."""
    image: Word | None = None
    env, parts = dict[str, Word](), dict[str, list[Word]]()
    for line, name, rest in _instructions(text):
        if name == "FROM":
            words = [word for word in rest.split() if not word.startswith("--")]
            image, env, parts = Word(words[0] if words else "", line), {}, {}
        elif name == "ENV":
            words = [word for words in simple_commands(rest, line) for word in words]
            env |= assignments(words)
            if len(words) == 2 and "=" not in words[0].text:
                env[words[0].text] = words[1]
        elif name in ("ENTRYPOINT", "CMD"):
            listed = rest.lstrip().startswith("[")
            parts[name] = (
                quoted_items(rest, line) if listed
                else [word for words in simple_commands(rest, line) for word in words]
            )  # fmt: skip
    command = Command((*parts.get("ENTRYPOINT", ()), *parts.get("CMD", ())), env, image)
    yield from inner_scripts(command) or [command]


def _instructions(text: str) -> Iterator[tuple[int, str, str]]:
    """Line, name and the rest of each instruction, continued lines included."""
    pattern = re.compile(
        r"^[ \t]*([A-Za-z]+)[ \t]+((?:[^\n\\]|\\.|\\\n)*)", re.MULTILINE | re.DOTALL
    )
    at = 0
    while match := pattern.search(text, at):
        yield text.count("\n", 0, match.start(1)) + 1, match[1].upper(), match[2]
        at = max(match.end(), at + 1)


def in_unit(text: str) -> Iterator[Command]:
    """What a unit of systemd starts, with the environment that it sets."""
    env = dict[str, Word]()
    for match in re.finditer(r"^Environment=(.*)$", text, re.MULTILINE):
        line = text.count("\n", 0, match.start()) + 1
        env |= assignments(word for words in simple_commands(match[1], line) for word in words)
    for match in re.finditer(r"^ExecStart=[-@:+!]*((?:[^\n\\]|\\.|\\\n)*)", text, re.MULTILINE):
        line = text.count("\n", 0, match.start()) + 1
        for command in from_shell(match[1], line):
            yield from inner_scripts(command) or [
                Command(
                    command.words, {**env, **command.env}, local=command.local,
                    mounts=command.mounts, container=command.container,
                )
            ]  # fmt: skip
