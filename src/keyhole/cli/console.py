"""What people see: what a command was asked for on stdout, what goes on meanwhile on stderr.

A file or a pipe gets plain text in whole lines: no colour, nothing cut off to fit a screen. Where
the output's encoding lacks a sign, its ASCII form is written. NO_COLOR is respected (Rich does).
"""

from __future__ import annotations

import codecs
import sys
from typing import Any

import typer
from rich.console import Console, RenderableType

from keyhole.core import dump
from keyhole.core.text import visible

people = Console(stderr=True)
_WHOLE = 2**20  # columns: no line is as long
_ASCII = {
    "–": "-", "—": "-", "−": "-", "…": "...", "→": "->", "×": "x", "²": "^2", "³": "^3",
    "≤": "<=", "≥": ">=", "‘": "'", "’": "'", "“": '"', "”": '"', "·": "*", "√": "sqrt ",
}  # fmt: skip


def say(message: str, style: str | None = None) -> None:
    """What goes on, on stderr: one line stays one line, and nothing in it is taken for markup."""
    people.print(visible(message), style=style, markup=False, highlight=False, soft_wrap=True)


def show(answer: RenderableType) -> None:
    """What the command was asked for, on stdout; whole lines where that is not a terminal."""
    plain = isinstance(answer, str)
    # A screen's lines are wrapped; in a file that would cut rows in two.
    console = Console(width=None if sys.stdout.isatty() else _WHOLE, highlight=False)
    console.print(visible(answer) if plain else answer, markup=False, soft_wrap=plain)


def answer(data: dict[str, Any], words: RenderableType, *, as_json: bool) -> None:
    """What the command was asked for, on stdout: JSON alone, or `words` for people."""
    if as_json:
        typer.echo(dump(data))
    else:
        show(words)


def _in_ascii(error: UnicodeError) -> tuple[str | bytes, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    missing = error.object[error.start : error.end]
    signs = (_ASCII.get(sign) or ascii(sign)[1:-1] for sign in missing)
    return "".join(signs), error.end


def write_in_any_locale() -> None:
    """A sign that the output's encoding lacks is no reason to lose a result."""
    codecs.register_error("keyhole", _in_ascii)
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="keyhole")
