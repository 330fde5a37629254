"""Figures that only runs can tell: measured.json, each with where it is from."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any


@dataclass(frozen=True)
class Figure:
    """One measurement: its numbers by name, and how to make it again."""

    values: dict[str, Any]
    command: str
    commit: str
    machine: str
    document: str

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    @property
    def source(self) -> str:
        return f"{self.document}, {self.command} ({self.machine}; commit {self.commit})"


@cache
def figures(name: str) -> tuple[Figure, ...]:
    """The measurements under a name, in the order of the file."""
    content = resources.files("keyhole.cost").joinpath("measured.json").read_text("utf-8")
    entries: list[dict[str, Any]] = json.loads(content)[name]
    about = ("command", "commit", "machine", "document")
    return tuple(
        Figure(
            {key: value for key, value in entry.items() if key not in about},
            *(entry[key] for key in about),
        )
        for entry in entries
    )
