"""JSON as every result is written, and one line for what cannot be read."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from typing import Any, cast

from keyhole.errors import InputError
from keyhole.files import read_text
from keyhole.strict_json import parse
from keyhole.version import __version__

FORMAT = 1


def environment() -> dict[str, str]:
    """What a stranger needs to know to make the same figures."""
    import torch  # takes seconds to load: what is read from a file brings its own

    return {
        "keyhole": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "cpus": str(os.cpu_count()),
        "threads": str(torch.get_num_threads()),
    }


def dump(data: dict[str, Any]) -> str:
    return json.dumps(data, indent=2, allow_nan=False)


def read(path: str | Path) -> dict[str, Any]:
    """A JSON object written by `dump`, or one clear line."""
    text = read_text(path, "a JSON file")
    try:
        data: object = parse(text)
    except ValueError as error:
        raise InputError(f"expected a JSON file, got {path}: {error}") from error
    if not isinstance(data, dict):
        raise InputError(f"expected a Keyhole JSON file, got {path}")
    data = cast("dict[str, Any]", data)
    expect_format(data.get("format"), f" in {path}")
    return data


def expect_format(version: object, where: str = "") -> None:
    if version != FORMAT or isinstance(version, bool):
        raise InputError(f"expected format {FORMAT}{where}, got {str(version)[:40]}")
