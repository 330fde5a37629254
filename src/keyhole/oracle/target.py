"""A TARGET as people write it on a command line: a file, a server's address, or `demo`."""

from __future__ import annotations

from urllib.parse import urlsplit

from keyhole.errors import InputError
from keyhole.oracle.http import Limits
from keyhole.oracle.open_inference import OpenInference
from keyhole.oracle.protocol import Oracle
from keyhole.oracle.storage import load, plant

DEMO = "demo"


def demo() -> dict[str, Oracle]:
    """The target that ships with Keyhole: one planted endpoint for every kind of answer."""
    seed = 2601
    return {
        "the scoring head": plant("head", dim=64, rank=8, seed=seed),
        "the scorer with four heads": plant("multi-head", dim=32, heads=4, rank=8, seed=seed),
        "the one-layer Transformer": plant("one-layer", dim=16, width=32, seed=seed),
        "the attention layer, last token": plant("attention", dim=64, seed=seed),
        "the attention layer, every token": plant(
            "attention", dim=64, every_token=True, causal=True, seed=seed
        ),
        "the attention layer, every token, no mask": plant(
            "attention", dim=16, every_token=True, seed=seed
        ),
    }


def open_target(name: str, limits: Limits | None = None) -> Oracle:
    """The oracle that `name` stands for; of the demo, its scoring head.

    `limits` bounds what a server may cost; a file and the demo need none.
    """
    if name == DEMO:
        return demo()["the scoring head"]
    if name.startswith(("http://", "https://")):
        base, mark, model = name.partition("/v2/models/")
        if not mark or not model:
            raise InputError(f"expected http://host:port/v2/models/NAME, got {name}")
        return OpenInference(base, model.strip("/"), limits=limits)
    return load(name)


def open_surfaces(name: str, limits: Limits | None = None) -> dict[str, Oracle]:
    """Every endpoint of the target, by name; one alone has none."""
    return demo() if name == DEMO else {"": open_target(name, limits)}


def describe(name: str, surfaces: dict[str, Oracle]) -> str:
    """What the target is, in words a report can open with."""
    if name == DEMO:
        return "the planted endpoints and the classifier that ship with Keyhole"
    if not surfaces:
        return name
    oracle = surfaces[""]
    layer, kind = oracle, None
    while kind is None and layer is not None:  # behind degraded answers
        layer, kind = getattr(layer, "inner", None), getattr(layer, "kind", None)
    if kind:
        return f"planted {kind}, d = {oracle.dim} ({name})"
    return f"{urlsplit(name).path.rsplit('/', 1)[-1]}, d = {oracle.dim} ({name})"
