"""Commands that containers, units and pipelines start.

Each `in_…` function takes the text or the nodes of a file and yields its commands
(command.py).

These are Compose files, Kubernetes manifests, tasks of ECS and pipelines in YAML and
JSON, and Dockerfiles, units of systemd and units of Podman.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

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
from keyhole.configs.tree import Items, Mapping, Node, Scalar, walk

_COMMANDS = ("entrypoint", "command", "args")  # in the order in which they are joined
OUTSIDE = (
    "LoadBalancer",
    "NodePort",
)  # types of services that clients outside the cluster reach
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
    """Yield the commands of containers, and those in every other text that may be a script.

    Files of variables are looked for in `folder`.
    """
    roots = [each for root in roots for each in _objects(root)]
    for root in roots:
        cluster = _kind(root) != ""
        guarded = isinstance(root, Mapping) and any(
            _guards(policy, root) for policy in roots
        )
        if isinstance(root, Mapping) and cluster:
            published = _published(root, roots)
        else:
            published = None
        if isinstance(root, Mapping) and not cluster:
            services = root.mapping("services")
        else:
            services = None
        if services is None:
            composed = set[int]()
        else:
            composed = set(map(id, services.pairs.values()))
        used = set[int]()
        for node in walk(root):
            if isinstance(node, Mapping) and (
                node.scalar("image") or "command" in node.pairs
            ):
                command = _container(node, folder, services)
                if id(node) in composed:  # others reach the published ports alone
                    command = replace(command, local=command.published is None)
                if cluster:
                    reach = _host_port(node) or published
                    command = replace(
                        command, cluster=True, published=reach, local=guarded
                    )
                yield from inner_scripts(command)
                used |= {id(part) for key in _COMMANDS for part in node.listed(key)}
            elif isinstance(node, Scalar) and id(node) not in used and " " in node.text:
                yield from _script(node)


def _objects(root: Node) -> list[Node]:
    """Return the objects of a `kind: List`, or anything else as it is."""
    if isinstance(root, Mapping) and _kind(root) == "List":
        return root.listed("items")
    return [root]


# Kubernetes: which setting lets clients outside the cluster reach a container


def _kind(root: Node) -> str:
    """Return the kind of a Kubernetes object; an empty text for everything else."""
    if not isinstance(root, Mapping) or "apiVersion" not in root.pairs:
        return ""
    return _text(root, "kind")


def _text(root: Mapping, *path: str) -> str:
    node = root.scalar(*path)
    return "" if node is None else node.text


def _labels(root: Mapping) -> dict[str, Scalar]:
    """Return the labels of the pods of an object."""
    labels = root.scalars("spec", "template", "metadata", "labels")
    return labels or root.scalars("metadata", "labels")


def _guards(policy: Node, root: Mapping) -> bool:
    """Return whether an object is a policy that limits who reaches the pods of another one.

    If pods have no labels in the file, as where an operator makes them, any policy may
    select them.
    """
    if not isinstance(policy, Mapping) or _kind(policy) != "NetworkPolicy":
        return False
    spec = policy.mapping("spec") or Mapping(policy.line)
    types = [
        part.text for part in spec.listed("policyTypes") if isinstance(part, Scalar)
    ]
    labels = {key: value.text for key, value in _labels(root).items()}
    wanted = spec.scalars("podSelector", "matchLabels").items()
    selector = spec.mapping("podSelector") or Mapping(policy.line)
    if types and "Ingress" not in types:
        return False
    if not labels and _kind(root) != "Pod":
        return True
    return all(labels.get(key) == value.text for key, value in wanted) and all(
        _matches(each, labels) for each in selector.listed("matchExpressions")
    )


def _matches(expression: Node, labels: dict[str, str]) -> bool:
    """Return whether labels meet an expression: a key that is or is not there, or its values."""
    if not isinstance(expression, Mapping):
        return False
    label = labels.get(_text(expression, "key"))
    operator = _text(expression, "operator")
    values = [
        part.text for part in expression.listed("values") if isinstance(part, Scalar)
    ]
    if operator.endswith("In"):
        return (label in values) == (operator == "In")
    return (label is not None) == (operator == "Exists")


def _published(root: Mapping, roots: list[Node]) -> Word | None:
    """Return the type of a service that selects the object, or what leads to such a service."""
    labels = _labels(root)
    name = _text(root, "metadata", "name")
    for service in roots:
        if not isinstance(service, Mapping) or _kind(service) != "Service":
            continue
        selector = service.scalars("spec", "selector").items()
        selects = selector and all(
            key in labels and labels[key].text == value.text for key, value in selector
        )
        own_name = _text(service, "metadata", "name")
        if not selects and own_name != name:
            continue
        reach = service.scalar("spec", "type")
        if reach is not None and reach.text in OUTSIDE:
            return Word(f"type: {reach.text}", reach.line)
        if leading := _leading_to(own_name, roots):
            return leading
    return _leading_to(name, roots)


def _leading_to(name: str, roots: list[Node]) -> Word | None:
    """Return the kind of an ingress or a route that names a service."""
    for root in roots:
        if name and isinstance(root, Mapping) and _kind(root) in _EXPOSING:
            spec = root.mapping("spec")
            nodes = [] if spec is None else walk(spec)
            if any(isinstance(node, Scalar) and node.text == name for node in nodes):
                return Word(f"kind: {_kind(root)}", root.pairs["kind"].line)
    return None


def _host_port(node: Mapping) -> Word | None:
    """Return a port of the machine that a container of Kubernetes takes."""
    for part in node.listed("ports"):
        if isinstance(part, Mapping) and (port := part.scalar("hostPort")):
            return Word(f"hostPort: {port.text}", port.line)
    return None


# Containers: what they run, with which variables and published ports


def _container(node: Mapping, folder: Path, services: Mapping | None) -> Command:
    words = [word for key in _COMMANDS for word in words_of(node.pairs.get(key))]
    ports = _reach(node, services)
    mounts = [part.text for part in node.listed("volumes") if isinstance(part, Scalar)]
    local = on_loopback(port.text for port in ports)
    env = environment(node)
    external_env = "envFrom" in node.pairs
    for part in node.listed("env_file"):
        path = part.scalar("path") if isinstance(part, Mapping) else part
        if isinstance(path, Scalar):
            given = _variables(folder / path.text, path.line)
        else:
            given = None
        external_env |= given is None
        env = {**(given or {}), **env}
    return Command(
        tuple(words),
        env,
        node.scalar("image"),
        local,
        tuple(mounts),
        published=None if local or not ports else ports[0],
        external_env=external_env,
    )


def _reach(node: Mapping, services: Mapping | None) -> list[Word]:
    """Return the published ports, or the setting that gives a container the machine's network.

    Of a container in the network of another one (of Compose's `services`), these are
    the other's.
    """
    network = node.scalar("network_mode")
    seen = set[str]()
    while (
        services
        and network
        and network.text.startswith("service:")
        and network.text not in seen
    ):
        seen.add(network.text)
        node = services.mapping(network.text.removeprefix("service:")) or node
        network = node.scalar("network_mode")
    if network and network.text == "host":
        return [Word("network_mode: host", network.line)]
    return list(_ports(node))


def _ports(node: Mapping) -> Iterator[Word]:
    """Yield the published ports of a Compose file in the short form."""
    for port in node.listed("ports"):
        if isinstance(port, Scalar):
            yield port
        elif isinstance(port, Mapping) and (published := port.scalar("published")):
            host = port.scalar("host_ip")
            yield Word(
                f"{host.text}:{published.text}" if host else published.text,
                published.line,
            )


def _variables(path: Path, line: int) -> dict[str, Word] | None:
    """Read a file of variables, all of them at `line`; None if there is no such file."""
    try:
        source = read(path, ("=",)) if path.is_file() else None
    except (Unreadable, OSError, ValueError):
        return None
    if source is None:
        return None
    return {
        name: Word(word.text, line) for name, word in in_variables(source.text).items()
    }


def in_variables(text: str) -> dict[str, Word]:
    """Return the environment that a .env file sets."""
    lines = enumerate(text.split("\n"), 1)
    return assignments(
        word for number, line in lines for word in all_words(line, number)[:2]
    )


def words_of(node: Node | None) -> list[Word]:
    """Return the words of a list, or of a text as a shell would split it."""
    if isinstance(node, Scalar):
        return all_words(node.text.replace("\n", " "), node.line)
    items = node.items if isinstance(node, Items) else []
    return [item for item in items if isinstance(item, Scalar)]


def _script(node: Scalar) -> list[Command]:
    commands = from_shell(node.text, node.line)
    if not node.folded:
        return commands
    return [  # a folded text has lost its lines
        replace(
            command, words=tuple(Word(word.text, node.line) for word in command.words)
        )
        for command in commands
    ]


def environment(
    node: Mapping, names: tuple[str, ...] = ("environment", "env", "secrets")
) -> dict[str, Word]:
    """Return the environment of a container.

    Compose has a mapping or NAME=value words, Kubernetes and ECS have lists of names
    and values. A value that the file does not hold, such as a secret or what Compose
    takes from its own environment (null), is given as "$".
    """
    env = dict[str, Word]()
    for name in names:
        for key, value in node.scalars(name).items():
            env[key] = Word("$" if value.null else value.text, value.line)
        items = [] if node.mapping(name) else node.listed(name)
        for item in items:
            if isinstance(item, Scalar):
                env |= assignments([item]) or {item.text: Word("$", item.line)}
            elif isinstance(item, Mapping) and (key := item.scalar("name")):
                value = item.scalar("value")
                if value is None:
                    text = "$"
                elif value.null:
                    text = ""
                else:
                    text = value.text
                env[key.text] = Word(text, key.line)
    return env


# Dockerfiles


def in_dockerfile(text: str) -> Iterator[Command]:
    """Yield what the last stage of a Dockerfile starts."""
    image: Word | None = None
    env = dict[str, Word]()
    given = dict[str, list[Command]]()
    stages = dict[
        str, tuple[Word, dict[str, Word], dict[str, list[Command]]]
    ]()  # by their names
    for line, name, rest in _instructions(text):
        if name == "FROM":
            words = [word for word in rest.split() if not word.startswith("--")]
            start = words[0] if words else ""
            image, env, given = stages.get(start.lower(), (Word(start, line), {}, {}))
            env = {**env}
            given = {**given}
            if len(words) == 3 and words[1].lower() == "as":
                stages[words[2].lower()] = (image, env, given)
        elif name == "ENV":
            words = all_words(rest, line)
            env |= assignments(words)
            if len(words) == 2 and "=" not in words[0].text:
                env[words[0].text] = words[1]
        elif name in ("ENTRYPOINT", "CMD"):
            listed = rest.lstrip().startswith("[")
            if listed:
                given[name] = [Command(tuple(quoted_items(rest, line)))]
            else:
                given[name] = from_shell(rest, line)
    script = given.get("ENTRYPOINT") or given.get("CMD", [])
    if len(script) > 1:  # a line of a shell
        for each in script:
            command = replace(each, env={**env, **each.env}, image=image, inner=True)
            yield from inner_scripts(command)
        return
    started = [each for name in ("ENTRYPOINT", "CMD") for each in given.get(name, ())]
    words = tuple(word for each in started for word in each.words)
    env = {**env, **{name: word for each in started for name, word in each.env.items()}}
    # An image without a command of its own gets its options from whoever starts it.
    yield from inner_scripts(Command(words, env, image, external_env=not words))


def _instructions(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield the line, the name and the rest of each instruction, with continued lines."""
    pattern = r"^[ \t]*([A-Za-z]+)[ \t]+((?:[^\n\\]|\\.)*)"
    for match in re.finditer(pattern, text, re.MULTILINE | re.DOTALL):
        yield text.count("\n", 0, match.start(1)) + 1, match[1].upper(), match[2]


# Units


def in_unit(text: str) -> Iterator[Command]:
    """Yield what a unit of systemd starts.

    A unit that starts nothing adds variables to another one: it gives a command without
    words.
    """
    env, external_env = _unit_environment(text)
    started = [
        replace(command, env={**env, **command.env}, external_env=external_env)
        for value in _settings(text, "ExecStart")
        for command in from_shell(value.text.lstrip("-@:+!"), value.line)
    ]
    if not started:
        yield Command((), env)
    for command in started:
        yield from inner_scripts(command)


def in_quadlet(text: str) -> Iterator[Command]:
    """Yield what a .container unit of Podman starts."""
    image = next((Word(v.text.strip(), v.line) for v in _settings(text, "Image")), None)
    words = [
        word for v in _settings(text, "Exec") for word in all_words(v.text, v.line)
    ]
    env, external_env = _unit_environment(text)
    for secret in _settings(text, "Secret"):
        if target := re.search(r"target=(\w+)", secret.text):
            env[target[1]] = Word("$", 1)
    ports = [
        Word(port.text.strip(), port.line) for port in _settings(text, "PublishPort")
    ]
    published = [port for port in ports if not on_loopback([port.text])]
    published += [
        Word("Network=host", network.line)
        for network in _settings(text, "Network")
        if network.text.strip() == "host"
    ]
    command = Command(
        tuple(words),
        env,
        image,
        not published,
        published=next(iter(published), None),
        external_env=external_env,
    )
    yield from inner_scripts(command)


def _unit_environment(text: str) -> tuple[dict[str, Word], bool]:
    """Return the variables that a unit sets, and whether it takes more from a file."""
    values = _settings(text, "Environment")
    env = assignments(
        word for value in values for word in all_words(value.text, value.line)
    )
    return env, any(_settings(text, "EnvironmentFile"))


def _settings(text: str, name: str) -> Iterator[Word]:
    """Yield each value of a setting of a unit, with continued lines."""
    pattern = rf"^{name}[ \t]*=[ \t]*((?:[^\n\\]|\\.|\\\n)*)"
    for match in re.finditer(pattern, text, re.MULTILINE):
        yield Word(match[1], text.count("\n", 0, match.start()) + 1)
