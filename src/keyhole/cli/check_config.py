"""`keyhole check-config`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from keyhole.cli import options as opt
from keyhole.cli.app import command
from keyhole.cli.outputs import OutputFiles, Outputs
from keyhole.core.options import CHECKS, OUTPUT, option

if TYPE_CHECKING:
    from collections.abc import Callable

    from keyhole.configs import Checked


@command(
    "keyhole check-config . --fail-on high",
    "keyhole check-config . --output sarif-github=keyhole.sarif",
    name="check-config",
)
def check_config(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="PATH",
            help="Files and folders: settings of models, of inference servers and of stores, "
            "Compose files, manifests, values of Helm charts, Dockerfiles, units, variables, shell "
            "scripts.",
        ),
    ],
    fail_on: Literal["low", "medium", "high"] = option(
        "medium",
        "The least level that ends with exit code 1; others are only shown.",
        OUTPUT,
    ),
    ignore: list[str] | None = option(
        None,
        "A rule not to report; may be given several times.",
        CHECKS,
        metavar="RULE",
    ),
    outputs: OutputFiles = None,
    force: opt.Force = False,
    as_json: opt.Json = False,
) -> None:
    """Look in configurations for settings that open what attacks need; nothing is started.

    Each finding has its line, what it opens, what closes it, and the command that tries
    it for real. Exit codes: 0 nothing of the level or above, 1 something is opened, 2
    wrong input, 3 a file could not be read.
    """
    from keyhole.configs import Level, check
    from keyhole.report.configurations import CONFIG_FORMATS, as_text

    least = Level[fail_on.upper()]

    def at_least(render: Callable[[Checked, Level], str]) -> Callable[[Checked], str]:
        return lambda checked: render(checked, least)

    formats = {name: at_least(render) for name, render in CONFIG_FORMATS.items()}
    wanted = Outputs.of(outputs, formats, force=force, as_json=as_json)
    checked = check(paths, ignore or ())
    wanted.write(checked)
    wanted.report(checked, as_text)
    raise typer.Exit(checked.exit_code(least))
