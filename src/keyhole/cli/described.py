"""What `keyhole COMMAND --help` says, from a table: commands load torch, nobody should wait for it.

The table, help.json, holds the usage, the words, the arguments and the options of every command as
it says them itself; it is made with the references of docs/, and a test compares it with the
commands. Lines are broken here, for the width of the terminal, by what breaks those of a command.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import typer.core


@cache
def table() -> Mapping[str, Mapping[str, Any]]:
    """What each command says, by its name; that of a group also under the name of the group."""
    return json.loads(Path(__file__).with_name("help.json").read_text("utf-8"))


def entry_of(command: Any, title: str) -> dict[str, Any]:
    """What a command says of itself, as the table holds it."""
    context = command.context_class(command, info_name=title)
    records = [(p.param_type_name, p.get_help_record(context)) for p in command.get_params(context)]
    return {
        "help": command.help,
        "epilog": command.epilog,
        "usage": command.collect_usage_pieces(context),
        **{
            title: [record for kind, record in records if kind == name and record is not None]
            for title, name in (("Arguments", "argument"), ("Options", "option"))
        },
        "Commands": list(getattr(command, "commands", ())),
    }


def described(name: str, words: Sequence[str]) -> Any:
    """What stands for a command where `words` ask for its help; None where they do not."""
    before = words[: words.index("--")] if "--" in words else words
    if "--help" not in before or f"keyhole.cli.{name.replace('-', '_')}" in sys.modules:
        return None  # a command that is loaded speaks for itself
    if not table()[name]["Commands"]:
        return Described(name)
    inner = f"{name} {before[0]}"
    if before[0] == "--help" or inner in table():
        return DescribedGroup(name) if before[0] == "--help" else Described(inner)
    return None  # the group knows what it makes of other words


class _FromTable:
    """Says what the table holds, in the layout of a command."""

    name: str | None

    @property
    def entry(self) -> Mapping[str, Any]:
        return table()[str(self.name)]

    def collect_usage_pieces(self, ctx: Any) -> list[str]:  # noqa: ARG002
        return list(self.entry["usage"])

    def format_options(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002
        for title in ("Arguments", "Options"):
            if rows := self.entry[title]:
                with formatter.section(title):
                    formatter.write_dl([(first, second) for first, second in rows])


class Described(_FromTable, typer.core.TyperCommand):
    """Stands for a command while its help is shown."""

    def __init__(self, name: str) -> None:
        entry = table()[name]
        super().__init__(
            name, help=entry["help"], epilog=entry["epilog"], rich_markup_mode=None
        )  # fmt: skip


class DescribedGroup(_FromTable, typer.core.TyperGroup):
    """The same for a group of commands, which are listed."""

    def __init__(self, name: str) -> None:
        entry = table()[name]
        inner = {part: Described(f"{name} {part}") for part in entry["Commands"]}
        super().__init__(
            name=name, help=entry["help"], epilog=entry["epilog"], commands=dict(inner),
            rich_markup_mode=None,
        )  # fmt: skip

    def format_options(self, ctx: Any, formatter: Any) -> None:
        super().format_options(ctx, formatter)
        self.format_commands(ctx, formatter)
