"""A TARGET as people write it on a command line: a file, a server's address, or `demo`."""

from __future__ import annotations

from urllib.parse import urlsplit

from keyhole.errors import InputError
from keyhole.oracle.open_inference import OpenInference
from keyhole.oracle.protocol import Oracle
from keyhole.oracle.storage import load, plant


def open_target(name: str) -> Oracle:
    """The oracle that `name` stands for."""
    if name == "demo":
        return plant("head", dim=64, rank=8, seed=2601)
    if name.startswith(("http://", "https://")):
        base, mark, model = name.partition("/v2/models/")
        if not mark or not model:
            raise InputError(f"expected http://host:port/v2/models/NAME, got {name}")
        return OpenInference(base, model.strip("/"))
    return load(name)


def describe(name: str, oracle: Oracle) -> str:
    """What the target is, in words a report can open with."""
    kind = getattr(oracle, "kind", None)
    if name == "demo":
        return f"the planted scoring head that ships with Keyhole, d = {oracle.dim}"
    if kind:
        return f"planted {kind}, d = {oracle.dim} ({name})"
    return f"{urlsplit(name).path.rsplit('/', 1)[-1]}, d = {oracle.dim} ({name})"
