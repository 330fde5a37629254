"""YAML and JSON as a tree of texts with line numbers.

`documents` takes the text of a file and returns its nodes, in which rules look for
settings.

No Python object is constructed from the file, and the depth is bounded: PyYAML recurses
without a limit, so a few thousand brackets would end the process. An alias leads to the
node it names, never to a copy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import yaml

from keyhole.configs.command import Word

MAX_DEPTH = 64
_NULL = "tag:yaml.org,2002:null"


@dataclass(frozen=True, eq=False)
class Scalar(Word):
    """A text that is not a collection; a block (`|` or `>`) has the line of its first content."""

    folded: bool = (
        False  # whether YAML joined the lines of the file, so that theirs are not known
    )
    null: bool = False


@dataclass(frozen=True, eq=False)
class Items:
    """A list."""

    line: int
    items: list[Node] = field(default_factory=list["Node"])


@dataclass(frozen=True, eq=False)
class Mapping:
    """Nodes by their keys; a path of keys leads through mappings inside each other."""

    line: int
    pairs: dict[str, Node] = field(default_factory=dict[str, "Node"])

    def at(self, *path: str) -> Node | None:
        """Return the node that a path of keys leads to."""
        node: Node | None = self
        for key in path:
            node = node.pairs.get(key) if isinstance(node, Mapping) else None
        return node

    def scalar(self, *path: str) -> Scalar | None:
        node = self.at(*path)
        return node if isinstance(node, Scalar) else None

    def mapping(self, *path: str) -> Mapping | None:
        node = self.at(*path)
        return node if isinstance(node, Mapping) else None

    def scalars(self, *path: str) -> dict[str, Scalar]:
        """Return the texts in a mapping below this one, by their keys."""
        node = self.mapping(*path)
        pairs = {} if node is None else node.pairs
        return {key: value for key, value in pairs.items() if isinstance(value, Scalar)}

    def listed(self, key: str) -> list[Node]:
        """Return the items of a list, or a value that is no list as the only item."""
        node = self.pairs.get(key)
        if isinstance(node, Items):
            return node.items
        if node is None:
            return []
        return [node]


Node = Scalar | Items | Mapping


def documents(text: str) -> list[Node]:
    """Return the documents of a file; raise ValueError if it is not valid YAML or too deep."""
    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        depths = accumulate(  # +1 where a list or mapping starts, −1 where one ends
            isinstance(event, yaml.CollectionStartEvent)
            - isinstance(event, yaml.CollectionEndEvent)
            for event in yaml.parse(text, Loader=loader)
        )
        too_deep = any(depth > MAX_DEPTH for depth in depths)
        roots = [] if too_deep else list(yaml.compose_all(text, Loader=loader))
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(" ".join(str(error).split())[:200]) from error
    if too_deep:
        raise ValueError(f"more than {MAX_DEPTH} levels")
    known = dict[int, Node]()
    return [_node(root, known) for root in roots]


def _node(source: Any, known: dict[int, Node]) -> Node:
    """Convert one of PyYAML's nodes; `known` has those that were converted, by identity."""
    if id(source) in known:
        return known[id(source)]
    line = source.start_mark.line + 1
    if isinstance(source, yaml.ScalarNode):
        first = line + 1 if source.style in ("|", ">") else line
        known[id(source)] = Scalar(
            source.value, first, folded=source.style != "|", null=source.tag == _NULL
        )
    elif isinstance(source, yaml.SequenceNode):
        known[id(source)] = items = Items(line)
        items.items.extend(_node(item, known) for item in source.value)
    else:
        known[id(source)] = mapping = Mapping(line)
        for key, item in source.value:
            name = getattr(key, "value", "")
            value = _node(item, known)
            merged = value.items if isinstance(value, Items) else [value]
            merged = [
                part for part in dict.fromkeys(merged) if isinstance(part, Mapping)
            ]
            if (
                name == "<<" and merged
            ):  # own keys take precedence, then those of the first
                for part in merged:
                    for inner, inherited in part.pairs.items():
                        mapping.pairs.setdefault(inner, inherited)
            else:  # a collection as a key is legal YAML, and no program here reads one
                mapping.pairs[name if isinstance(name, str) else ""] = value
    return known[id(source)]


def walk(node: Node) -> Iterator[Node]:
    """Yield a node and all nodes below it, each once."""
    seen = set[int]()
    waiting = [node]
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
