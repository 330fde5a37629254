"""Command lines in YAML and JSON (Compose, Kubernetes, tasks of ECS, pipelines), Dockerfiles, units
of systemd and of Podman."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
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
from keyhole.configs.finding import Unreadable, read

_COMMANDS = ("entrypoint", "command", "args")  # in the order in which they are put together
_EXPOSING = (
    "Ingress",
    "HTTPRoute",
    "GRPCRoute",
    "TCPRoute",
    "IngressRoute",
    "VirtualService",
    "Route",
)


def in_yaml(roots: list[Node], folder: Path) -> Iterator[Command]:
    """Containers with their commands, and scripts wherever a text stands.

    `folder` is where files of variables are looked for.
    """
    guarded = any(_kind(root) == "NetworkPolicy" for root in roots)
    for root in roots:
        cluster = _kind(root) != ""
        published = _published(root, roots) if cluster else None
        composed = _services(root)
        taken = set[int]()
        for node in walk(root):
            if isinstance(node, Mapping) and (node.scalar("image") or "command" in node.pairs):
                command = _container(node, folder)
                if id(node) in composed:
                    command = replace(command, local=command.published is None)
                if cluster:
                    seen = _host_port(node) or published
                    command = replace(command, cluster=True, published=seen, local=guarded)
                yield from inner_scripts(command) or [command]
                taken |= {id(part) for key in _COMMANDS for part in parts(node.pairs.get(key))}
            elif isinstance(node, Scalar) and id(node) not in taken and " " in node.text:
                yield from _script(node)


def _kind(root: Node) -> str:
    """The kind of an object of Kubernetes."""
    if not isinstance(root, Mapping) or "apiVersion" not in root.pairs:
        return ""
    kind = root.scalar("kind")
    return "" if kind is None else kind.text


def _published(root: Node, roots: list[Node]) -> Word | None:
    """The setting by which others than the cluster reach an object of Kubernetes: the type of a
    service that selects it, or something that leads to such a service."""
    labels = {name: label.text for name, label in _labels(root).items()}
    name = _name(root)
    for service in (one for one in roots if _kind(one) == "Service"):
        spec = _part(service, "spec")
        selector = _scalars(_part(service, "spec", "selector"))
        selects = selector and all(labels.get(key) == at.text for key, at in selector.items())
        if not selects and _name(service) != name:
            continue
        reach = None if spec is None else spec.scalar("type")
        if reach is not None and reach.text in OUTSIDE:
            return Word(f"type: {reach.text}", reach.line)
        if leading := _leading_to(_name(service), roots):
            return leading
    return _leading_to(name, roots)


def _leading_to(name: str, roots: list[Node]) -> Word | None:
    """An ingress or a route that names a service."""
    for root in roots:
        spec = _part(root, "spec") if _kind(root) in _EXPOSING else None
        named = [] if spec is None else [node for node in walk(spec) if isinstance(node, Scalar)]
        if isinstance(root, Mapping) and name and name in [node.text for node in named]:
            return Word(f"kind: {_kind(root)}", root.pairs["kind"].line)
    return None


def _part(root: Node, *names: str) -> Mapping | None:
    """A mapping inside another, by the names that lead to it."""
    for name in names:
        inner = root.mapping(name) if isinstance(root, Mapping) else None
        if inner is None:
            return None
        root = inner
    return root if isinstance(root, Mapping) else None


def _scalars(node: Mapping | None) -> dict[str, Scalar]:
    pairs = {} if node is None else node.pairs
    return {name: value for name, value in pairs.items() if isinstance(value, Scalar)}


def _labels(root: Node) -> dict[str, Scalar]:
    """The labels of the pods that an object makes, or its own."""
    made = _part(root, "spec", "template", "metadata", "labels")
    return _scalars(made or _part(root, "metadata", "labels"))


def _name(root: Node) -> str:
    about = _scalars(_part(root, "metadata"))
    return about["name"].text if "name" in about else ""


OUTSIDE = ("LoadBalancer", "NodePort")  # types of services that others than the cluster reach


def _host_port(node: Mapping) -> Word | None:
    """A port of the machine that a container of Kubernetes takes."""
    for part in parts(node.pairs.get("ports")):
        port = part.scalar("hostPort") if isinstance(part, Mapping) else None
        if port is not None:
            return Word(f"hostPort: {port.text}", port.line)
    return None


def _services(root: Node) -> set[int]:
    """The services of a Compose file: others reach only the ports that are published."""
    services = None if _kind(root) or not isinstance(root, Mapping) else root.mapping("services")
    return set() if services is None else {id(node) for node in services.pairs.values()}


def _container(node: Mapping, folder: Path) -> Command:
    words = [word for key in _COMMANDS for word in words_of(node.pairs.get(key))]
    ports = [port for part in parts(node.pairs.get("ports")) if (port := _port(part))]
    mounts = [part.text for part in parts(node.pairs.get("volumes")) if isinstance(part, Scalar)]
    network = node.scalar("network_mode")
    if network and network.text == "host":
        ports = [Word("network_mode: host", network.line)]
    local = on_loopback(port.text for port in ports)
    env, external_env = environment(node), "envFrom" in node.pairs
    for part in parts(node.pairs.get("env_file")):
        path = part.scalar("path") if isinstance(part, Mapping) else part
        given = None if not isinstance(path, Scalar) else _variables(folder / path.text, path.line)
        external_env |= given is None
        env = {**(given or {}), **env}
    return Command(
        tuple(words), env, node.scalar("image"), local, tuple(mounts),
        published=None if local or not ports else ports[0], external_env=external_env,
    )  # fmt: skip


def _port(node: Node) -> Word | None:
    """A published port of a Compose file, as its short form has it."""
    if isinstance(node, Scalar):
        return node
    published = node.scalar("published") if isinstance(node, Mapping) else None
    if published is None or not isinstance(node, Mapping):
        return None
    host = node.scalar("host_ip")
    return Word(f"{host.text}:{published.text}" if host else published.text, published.line)


def _variables(path: Path, line: int) -> dict[str, Word] | None:
    """A file of variables; None where it is not here, or is none."""
    try:
        source = read(path, ("=",)) if path.is_file() else None
    except (Unreadable, OSError, ValueError):
        return None
    if source is None:
        return None
    return {name: Word(word.text, line) for name, word in in_variables(source.text).items()}


def in_variables(text: str) -> dict[str, Word]:
    """What a .env file sets."""
    lines = enumerate(text.split("\n"), 1)
    words = [word for number, line in lines for word in all_words(line, number)[:2]]
    return assignments(words)


def parts(node: Node | None) -> list[Node]:
    return node.items if isinstance(node, Items) else [] if node is None else [node]


def words_of(node: Node | None) -> list[Word]:
    """The words of a list, or of a line as a shell would split it."""
    if isinstance(node, Scalar):
        return all_words(node.text.replace("\n", " "), node.line)
    return [part for part in parts(node) if isinstance(part, Scalar)]


def _script(node: Scalar) -> list[Command]:
    made = from_shell(node.text, node.line)
    if not node.folded:
        return made
    return [  # the lines of a folded text cannot be told apart any more
        replace(command, words=tuple(Word(word.text, node.line) for word in command.words))
        for command in made
    ]


def environment(
    node: Mapping, names: tuple[str, ...] = ("environment", "env", "secrets")
) -> dict[str, Word]:
    """Compose has a mapping or NAME=value, Kubernetes and ECS lists of names and values."""
    env = dict[str, Word]()
    for given in filter(None, map(node.pairs.get, names)):
        if isinstance(given, Mapping):
            pairs = [(key, at) for key, at in given.pairs.items() if isinstance(at, Scalar)]
            env |= {key: Word(value.text or "$", value.line) for key, value in pairs}
            continue
        for part in parts(given):
            if isinstance(part, Scalar):  # a name alone is taken from whoever starts it
                env |= assignments([part]) or {part.text: Word("$", part.line)}
            elif isinstance(part, Mapping) and (name := part.scalar("name")):
                value = part.scalar("value")  # or a secret, which is named elsewhere
                env[name.text] = Word("$" if value is None else value.text, name.line)
    return env


def in_dockerfile(text: str) -> Iterator[Command]:
    """What the last stage of a Dockerfile starts."""
    image: Word | None = None
    env, given = dict[str, Word](), dict[str, list[Word]]()
    for line, name, rest in _instructions(text):
        if name == "FROM":
            words = [word for word in rest.split() if not word.startswith("--")]
            image, env, given = Word(words[0] if words else "", line), {}, {}
        elif name == "ENV":
            words = all_words(rest, line)
            env |= assignments(words)
            if len(words) == 2 and "=" not in words[0].text:
                env[words[0].text] = words[1]
        elif name in ("ENTRYPOINT", "CMD"):
            listed = rest.lstrip().startswith("[")
            given[name] = quoted_items(rest, line) if listed else all_words(rest, line)
    words = (*given.get("ENTRYPOINT", ()), *given.get("CMD", ()))
    # An image that starts nothing of its own is started with options from elsewhere.
    command = Command(words, env, image, external_env=not words)
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
    """What a unit of systemd starts, with the environment that it sets; one that starts nothing
    adds to the environment of another."""
    env, started = dict[str, Word](), 0
    for line, value in _settings(text, "Environment"):
        env |= assignments(all_words(value, line))
    external_env = next(_settings(text, "EnvironmentFile"), None) is not None
    for line, value in _settings(text, "ExecStart"):
        for command in from_shell(value.lstrip("-@:+!"), line):
            started += 1
            unit = replace(command, env={**env, **command.env}, external_env=external_env)
            yield from inner_scripts(unit) or [unit]
    if not started:
        yield Command((), env)


def in_quadlet(text: str) -> Iterator[Command]:
    """What a .container unit of Podman starts."""
    image = next((Word(value.strip(), line) for line, value in _settings(text, "Image")), None)
    words = [word for line, value in _settings(text, "Exec") for word in all_words(value, line)]
    env = dict[str, Word]()
    for line, value in _settings(text, "Environment"):
        env |= assignments(all_words(value, line))
    for _, value in _settings(text, "Secret"):
        if target := re.search(r"target=(\w+)", value):
            env[target[1]] = Word("$", 1)
    ports = [Word(value.strip(), line) for line, value in _settings(text, "PublishPort")]
    outside = [port for port in ports if not on_loopback([port.text])]
    external_env = next(_settings(text, "EnvironmentFile"), None) is not None
    network = [
        Word("Network=host", line)
        for line, value in _settings(text, "Network")
        if value.strip() == "host"
    ]
    published = next(iter([*outside, *network]), None)
    command = Command(
        tuple(words), env, image, published is None, published=published, external_env=external_env
    )
    yield from inner_scripts(command) or [command]


def _settings(text: str, name: str) -> Iterator[tuple[int, str]]:
    """Each value of a setting of a unit, continued lines included, with its line."""
    pattern = rf"^{name}=((?:[^\n\\]|\\.|\\\n)*)"
    for match in re.finditer(pattern, text, re.MULTILINE):
        yield text.count("\n", 0, match.start()) + 1, match[1]


# YAML as a tree of texts with their lines: nothing is constructed, and nesting has an end.
#
# PyYAML recurses without a bound (a few thousand brackets end the process), so the depth is looked
# at first. Aliases lead to the same node, never to a copy.

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
    made = dict[int, Node]()
    try:
        levels = accumulate(
            isinstance(event, yaml.CollectionStartEvent)
            - isinstance(event, yaml.CollectionEndEvent)
            for event in yaml.parse(text, Loader=loader)
        )
        deep = any(level > DEEPEST for level in levels)
        roots = [] if deep else list(yaml.compose_all(text, Loader=loader))
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(" ".join(str(error).split())[:200]) from error
    if deep:
        raise ValueError(f"more than {DEEPEST} levels")
    return [_node(root, made) for root in roots]


def _node(given: Any, made: dict[int, Node]) -> Node:
    """Each of PyYAML's nodes once."""
    if id(given) in made:
        return made[id(given)]
    line = given.start_mark.line + 1
    if isinstance(given, yaml.ScalarNode):
        block = given.style in ("|", ">")
        made[id(given)] = Scalar(given.value, line + block, given.style != "|")
    elif isinstance(given, yaml.SequenceNode):
        made[id(given)] = items = Items(line)
        items.items.extend(_node(each, made) for each in given.value)
    else:
        made[id(given)] = mapping = Mapping(line)
        for key, each in given.value:  # a collection as a key is legal YAML and means nothing here
            name, value = getattr(key, "value", ""), _node(each, made)
            if name == "<<" and isinstance(value, Mapping):  # what stands here comes before it
                for inner, held in value.pairs.items():
                    mapping.pairs.setdefault(inner, held)
            else:
                mapping.pairs[name if isinstance(name, str) else ""] = value
    return made[id(given)]


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
