"""YAML as a tree of texts with their lines: nothing is constructed, and nesting has an end.

The tree is built from the parser's events, because building it in PyYAML recurses without a bound
(a few thousand brackets end the process). Aliases lead to the same node, never to a copy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml

DEEPEST = 64


@dataclass(frozen=True, eq=False)
class Scalar:
    text: str
    line: int  # of its first character: for a block of lines, the first of them
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
        here = waiting.pop()
        if id(here) in seen:
            continue
        seen.add(id(here))
        yield here
        if isinstance(here, Items):
            waiting += reversed(here.items)
        elif isinstance(here, Mapping):
            waiting += reversed(here.pairs.values())


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
            raise yaml.YAMLError(f"expected at most {DEEPEST} levels, got more")
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
