"""`keyhole check-config`: parse, one library call, print."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from keyhole.cli.answers import answer
from keyhole.cli.app import Force, Json, app
from keyhole.cli.outputs import Outputs, output_option
from keyhole.configs import Checked, Level, check
from keyhole.core.errors import InputError
from keyhole.report.configurations import CONFIG_FORMATS


def _level(name: str | Level) -> Level:
    if isinstance(name, Level):
        return name
    if name.upper() not in Level.__members__:
        words = ", ".join(str(level) for level in Level)
        raise InputError(f"expected --fail-on among {words}, got {name[:80]}")
    return Level[name.upper()]


def _at(least: Level, render: Callable[[Checked, Level], str]) -> Callable[[Checked], str]:
    return lambda checked: render(checked, least)


@app.command(
    "check-config",
    epilog="\b\nExample:\n  keyhole check-config . --fail-on high\n"
    "  keyhole check-config . --output sarif-github=keyhole.sarif",
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
    outputs: Annotated[list[str] | None, output_option(CONFIG_FORMATS)] = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Look for settings that open what attacks need; nothing is run.

    Each finding has its line, what it opens, what closes it, and the command that tries it for
    real. Exit codes: 0 nothing of the level, 1 something is opened, 2 wrong input, 3 a file could
    not be read.
    """
    formats = {name: _at(fail_on, render) for name, render in CONFIG_FORMATS.items()}
    wanted = Outputs.of(outputs, (), formats, force=force, as_json=as_json)
    checked = check(paths, ignore or ())
    wanted.write(checked)
    if not wanted.printed(checked):
        answer(checked.to_dict(fail_on), "\n".join(checked.lines()), as_json=as_json)
    raise typer.Exit(checked.exit_code(fail_on))
