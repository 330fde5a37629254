"""JSON from anybody's file: what Python's parser lets pass, or dies of, is a ValueError here.

NaN and infinity are no JSON, an object that holds a key twice means nobody knows what, and nesting
has an end.
"""

from __future__ import annotations

import json
from typing import Any


def parse(text: str) -> Any:
    """What `text` says, or a ValueError that says what is wrong with it."""
    try:
        return json.loads(text, parse_constant=_refuse, object_pairs_hook=_once)
    except RecursionError:
        raise ValueError("nesting without end") from None


def _refuse(name: str) -> Any:
    raise ValueError(f"{name}, which is no JSON")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in data if names.count(name) > 1)
        raise ValueError(f"{twice[:40]!r} twice in one object")
    return data
