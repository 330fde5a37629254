"""Command lines in YAML (Compose, Kubernetes, pipelines), Dockerfiles and units of systemd."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import yaml

from keyhole.configs.command import (
    Command,
    Word,
    all_words,
    assignments,
    from_shell,
    inner_scripts,
    on_loopback,
    quoted_items,
)

_COMMANDS = ("entrypoint", "command", "args")  # in the order in which they are put together


def in_yaml(root: Node) -> Iterator[Command]:
    """Containers with their commands, and scripts wherever a text stands."""
    taken = set[int]()
    for node in walk(root):
        if isinstance(node, Mapping) and (node.scalar("image") or "command" in node.pairs):
            yield from _container(node)
            taken |= {id(part) for key in _COMMANDS for part in _parts(node.pairs.get(key))}
        elif isinstance(node, Scalar) and id(node) not in taken and " " in node.text:
            yield from _script(node)


def _container(node: Mapping) -> Iterator[Command]:
    words = [word for key in _COMMANDS for word in _words(node.pairs.get(key))]
    ports = [part.text for part in _parts(node.pairs.get("ports")) if isinstance(part, Scalar)]
    mounts = [part.text for part in _parts(node.pairs.get("volumes")) if isinstance(part, Scalar)]
    command = Command(
        tuple(words), _environment(node), node.scalar("image"), on_loopback(ports), tuple(mounts),
    )  # fmt: skip
    yield from inner_scripts(command) or [command]


def _parts(node: Node | None) -> list[Node]:
    return node.items if isinstance(node, Items) else [] if node is None else [node]


def _words(node: Node | None) -> list[Word]:
    """The words of a list, or of a line as a shell would split it."""
    if isinstance(node, Scalar):
        return all_words(node.text.replace("\n", " "), node.line)
    return [part for part in _parts(node) if isinstance(part, Scalar)]


def _script(node: Scalar) -> list[Command]:
    made = from_shell(node.text, node.line)
    if not node.folded:
        return made
    return [  # the lines of a folded text cannot be told apart any more
        replace(command, words=tuple(Word(word.text, node.line) for word in command.words))
        for command in made
    ]


def _environment(node: Mapping) -> dict[str, Word]:
    """Compose has a mapping or NAME=value, Kubernetes a list of names and values."""
    env = dict[str, Word]()
    given = node.pairs.get("environment", node.pairs.get("env"))
    if isinstance(given, Mapping):
        pairs = [(key, value) for key, value in given.pairs.items() if isinstance(value, Scalar)]
        env |= {key: Word(value.text or "$", value.line) for key, value in pairs}
    for part in _parts(given):
        if isinstance(part, Scalar):  # a name alone is taken from whoever starts it
            env |= assignments([part]) or {part.text: Word("$", part.line)}
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
            words = all_words(rest, line)
            env |= assignments(words)
            if len(words) == 2 and "=" not in words[0].text:
                env[words[0].text] = words[1]
        elif name in ("ENTRYPOINT", "CMD"):
            listed = rest.lstrip().startswith("[")
            parts[name] = quoted_items(rest, line) if listed else all_words(rest, line)
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
        env |= assignments(all_words(match[1], line))
    for match in re.finditer(r"^ExecStart=[-@:+!]*((?:[^\n\\]|\\.|\\\n)*)", text, re.MULTILINE):
        line = text.count("\n", 0, match.start()) + 1
        for command in from_shell(match[1], line):
            started = replace(command, env={**env, **command.env})
            yield from inner_scripts(command) or [started]


# YAML as a tree of texts with their lines: nothing is constructed, and nesting has an end.
#
# The tree is built from the parser's events, because building it in PyYAML recurses without a bound
# (a few thousand brackets end the process). Aliases lead to the same node, never to a copy.

DEEPEST = 64


@dataclass(frozen=True, eq=False)
class Scalar(Word):  # its line is that of its first character: in a block, the first of the lines
    folded: bool = False  # whether its lines were joined


@dataclass(frozen=True, eq=False)
class Items:
    line: int
    items: list[Node] = field(default_factory=list["Node"])


@dataclass(frozen=True, eq=False)
class Mapping:
    line: int
    pairs: dict[str, Node] = field(default_factory=dict[str, "Node"])

    def scalar(self, key: str) -> Scalar | None:
        value = self.pairs.get(key)
        return value if isinstance(value, Scalar) else None

    def mapping(self, key: str) -> Mapping | None:
        value = self.pairs.get(key)
        return value if isinstance(value, Mapping) else None


Node = Scalar | Items | Mapping


def documents(text: str) -> list[Node]:
    """The documents of a file, or a ValueError that says why there are none."""
    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    builder = _Builder()
    try:
        for event in yaml.parse(text, Loader=loader):
            builder.take(event)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(" ".join(str(error).split())[:200]) from error
    return builder.roots


def walk(node: Node) -> Iterator[Node]:
    """A node and all below it, each once."""
    seen, waiting = set[int](), [node]
    while waiting:
        node = waiting.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        yield node
        if isinstance(node, Items):
            waiting += reversed(node.items)
        elif isinstance(node, Mapping):
            waiting += reversed(node.pairs.values())


class _Builder:
    """Takes events one by one; `open` are the collections that are not complete yet."""

    def __init__(self) -> None:
        self.roots: list[Node] = []
        self.open: list[Items | Mapping] = []
        self.keys: list[Scalar | None] = []  # the key that waits for its value, for each of them
        self.anchors: dict[str, Node] = {}

    def take(self, event: Any) -> None:
        if isinstance(event, yaml.DocumentStartEvent):
            self.anchors = {}
        elif isinstance(event, yaml.AliasEvent):
            line = event.start_mark.line + 1
            self._place(self.anchors.get(event.anchor, Scalar("", line)))
        elif isinstance(event, yaml.ScalarEvent):
            block = event.style in ("|", ">")
            line = event.start_mark.line + (2 if block else 1)
            self._add(event, Scalar(event.value, line, event.style != "|"))
        elif isinstance(event, yaml.SequenceStartEvent):
            self._enter(event, Items(event.start_mark.line + 1))
        elif isinstance(event, yaml.MappingStartEvent):
            self._enter(event, Mapping(event.start_mark.line + 1))
        elif isinstance(event, yaml.CollectionEndEvent):
            self.open.pop()
            self.keys.pop()

    def _enter(self, event: Any, node: Items | Mapping) -> None:
        if len(self.open) >= DEEPEST:
            raise yaml.YAMLError(f"more than {DEEPEST} levels")
        self._add(event, node)
        self.open.append(node)
        self.keys.append(None)

    def _add(self, event: Any, node: Node) -> None:
        if event.anchor:
            self.anchors[event.anchor] = node
        self._place(node)

    def _place(self, node: Node) -> None:
        if not self.open:
            self.roots.append(node)
            return
        around = self.open[-1]
        if isinstance(around, Items):
            around.items.append(node)
        elif self.keys[-1] is None:
            # A collection as a key is legal YAML and means nothing here.
            self.keys[-1] = node if isinstance(node, Scalar) else Scalar("", node.line)
        else:
            key, self.keys[-1] = self.keys[-1].text, None
            if key == "<<" and isinstance(node, Mapping):  # what stands here comes before it
                for name, value in node.pairs.items():
                    around.pairs.setdefault(name, value)
            else:
                around.pairs[key] = node
