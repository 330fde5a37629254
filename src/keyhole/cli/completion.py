"""What the Tab key completes, from a table: commands load torch, for which nobody would wait.

`keyhole --install-completion` has bash, zsh or fish ask here. The table, completion.json, holds the
options of every command and what values they take; it is made with the references of docs/, and a
test compares it with the commands. Where it has nothing to say, the shell completes names of files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import typer.core

Options = Mapping[str, Sequence[str] | None]  # what an option's values may be; None is a flag


@cache
def table() -> Mapping[str, Options]:
    """The options of each command, and of each command of a group, by name."""
    return json.loads(Path(__file__).with_name("completion.json").read_text("utf-8"))


class Completing(typer.core.TyperCommand):
    """Stands for a command while a line is completed; it takes whatever was typed."""

    def __init__(self, name: str) -> None:
        anything = {"ignore_unknown_options": True, "allow_extra_args": True}
        super().__init__(name, context_settings=anything, add_help_option=False)

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        words = proposals(str(self.name), ctx.args, incomplete)
        return [SimpleNamespace(value=word, help=None, type="plain") for word in words]


def proposals(name: str, before: Sequence[str], incomplete: str) -> list[str]:
    """What may stand in place of `incomplete`, after the words `before` it; else a file's name."""
    typed = [word for word in before if word != "="]  # bash has --option=value as three words
    inner = {known.partition(" ")[2]: known for known in table() if known.startswith(f"{name} ")}
    chosen = next((word for word in typed if word in inner), None)
    meant = [inner[chosen]] if chosen else list(inner.values()) or [name]
    options = [table()[command] for command in meant]
    values = [given[typed[-1]] for given in options if typed and typed[-1] in given]
    if any(value is not None for value in values):
        words = [word for value in values for word in value or ()]
    elif incomplete.startswith("-"):
        words = [option for given in options for option in given]
    else:
        words = [] if chosen else list(inner)
    return [word for word in dict.fromkeys(words) if word.startswith(incomplete)]
