"""The answer of a command, as JSON or in words."""

from __future__ import annotations

from typing import Any

import typer
from rich.console import RenderableType

from keyhole.cli.console import show
from keyhole.core import dump


def answer(data: dict[str, Any], words: RenderableType, *, as_json: bool) -> None:
    """What the command was asked for, on stdout: JSON alone, or `words` for people."""
    if as_json:
        typer.echo(dump(data))
    else:
        show(words)
