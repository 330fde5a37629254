"""Where a finding is: of a target the endpoint, of that the layer, of that the exposure; of a
setting its file and its line.

A model is no file with lines, so the place is logical; but code scanning shows nothing without a
physical one. That is the target where its name is a path inside the repository, and otherwise
`keyhole/` with the target's name: no file, but the same from run to run.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any
from urllib.parse import quote

from keyhole.core.exposure import Exposure
from keyhole.report import words
from keyhole.report.inert import inert
from keyhole.report.provenance import slug

_PATH = re.compile(r"(?:\./)?((?:[\w-][\w.-]*/)*[\w-][\w.-]*)/?", re.ASCII)


def in_file(path: str, line: int) -> dict[str, Any]:
    """A line of a file."""
    where = {"artifactLocation": {"uri": _uri(path)}, "region": {"startLine": line}}
    return {"physicalLocation": where}


def _uri(path: str) -> str:
    """A file below this folder by its place in it, any other by its whole name."""
    plain = Path(os.path.normpath(path))
    if plain.is_absolute() or plain.parts[:1] == (os.pardir,):
        return Path(os.path.abspath(plain)).as_uri()  # noqa: PTH100 - resolves no links
    return quote(os.fsencode(plain.as_posix()))


class Places:
    """The logical locations of a run, each once; a result names its own by index."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.slug = slug(target)
        self.all: list[dict[str, Any]] = []
        self._known: dict[tuple[str, str], int] = {}

    def of(self, exposure: Exposure) -> dict[str, Any]:
        """A location: the target, the endpoint where it has several, the layer, the exposure."""
        steps = [("target", self.target)]
        steps += [("endpoint", inert(exposure.part))] if exposure.part else []
        steps += [] if exposure.layer is None else [("layer", f"layer {exposure.layer}")]
        steps.append(("exposure", inert(words.exposure(exposure))))
        names: list[str] = []
        parent: int | None = None
        logical: list[dict[str, Any]] = []
        for kind, name in steps:
            names.append(name)
            parent = self._index(kind, name, " / ".join(names), parent)
            logical.append({**self.all[parent], "index": parent})
        return {
            "physicalLocation": {
                "artifactLocation": {"uri": self.uri},
                "region": {"startLine": 1},
            },
            "logicalLocations": logical,
        }

    @property
    def uri(self) -> str:
        path = _PATH.fullmatch(self.target)
        inside = path is not None and ("/" in self.target or "." in self.target)
        return quote(path[1]) if inside and path is not None else f"keyhole/{self.slug}"

    def _index(self, kind: str, name: str, full: str, parent: int | None) -> int:
        key = (kind, full)
        if key not in self._known:
            self._known[key] = len(self.all)
            above = {} if parent is None else {"parentIndex": parent}
            self.all.append({"name": name, "fullyQualifiedName": full, "kind": kind, **above})
        return self._known[key]
