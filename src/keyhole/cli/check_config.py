"""`keyhole check-config`: parse, one library call, print."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from keyhole.cli.app import Json, app
from keyhole.cli.console import show
from keyhole.configs import Level, check
from keyhole.errors import InputError


def _level(name: str | Level) -> Level:
    if isinstance(name, Level):
        return name
    if name.upper() not in Level.__members__:
        words = ", ".join(str(level) for level in Level)
        raise InputError(f"expected --fail-on among {words}, got {name[:80]}")
    return Level[name.upper()]


@app.command(
    "check-config",
    epilog="\b\nExample:\n  keyhole check-config . --fail-on high",
)
def check_config(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="PATH...",
            help="Files, or folders with all that is in them: settings of models, of inference "
            "servers and of stores, Compose files, manifests, Dockerfiles, units, shell scripts.",
        ),
    ],
    fail_on: Annotated[
        Level,
        typer.Option(
            parser=_level,
            metavar="[low|medium|high]",
            help="The least level that ends with exit code 1; others are shown alone.",
        ),
    ] = Level.MEDIUM,
    ignore: Annotated[
        list[str] | None,
        typer.Option(metavar="RULE", help="A rule not to report; may be given several times."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Look for settings that open what attacks need; nothing is run.

    Each finding has its line, what it opens, what closes it, and the command that tries it for
    real. Exit codes: 0 nothing of the level, 1 something is opened, 2 wrong input, 3 a file could
    not be read.
    """
    checked = check(paths, ignore or ())
    if as_json:
        typer.echo(json.dumps(checked.to_dict(fail_on), indent=2))
    else:
        show("\n".join(checked.lines()))
    raise typer.Exit(checked.exit_code(fail_on))
