"""What all commands share: the application, exit codes, options, and how a command ends.

JSON goes to stdout, people's words to stderr. Exit codes: 0 nothing was given away, 1 something
was, 2 wrong usage or input, 3 could not check.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from keyhole.console import say
from keyhole.errors import InputError, KeyholeError

if TYPE_CHECKING:  # torch takes seconds to load: --help should not wait for it
    from keyhole.oracle import Oracle

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
CLEAN, FINDINGS, USAGE, FAILURE, INTERRUPTED = 0, 1, 2, 3, 130

Target = Annotated[
    str,
    typer.Argument(
        metavar="TARGET",
        help="A .safetensors file, http://host:port/v2/models/NAME, or demo.",
    ),
]
ModelName = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="A folder, a .gguf file, a hub name, or demo."),
]
AllowPickle = Annotated[
    bool,
    typer.Option("--allow-pickle", help="Open pickled weights, which can run code: trust them?"),
]
TextColumn = Annotated[
    list[str] | None, typer.Option(help="The text's column; twice for a pair of texts.")
]
Label = Annotated[str, typer.Option(help="The column of the right classes.")]
Classes = Annotated[
    str | None, typer.Option(help="Names of the classes, such as no,yes, if not the model's.")
]
Longest = Annotated[int, typer.Option(help="Tokens of a text, where it is cut off.")]
Device = Annotated[str, typer.Option(help="cpu or cuda.")]
Seed = Annotated[int, typer.Option(help="Seed of every random choice.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]
LedgerFile = Annotated[
    Path | None,
    typer.Option(
        "--ledger",
        metavar="FILE",
        help="Remember every answer in this file; the same command resumes from it.",
    ),
]


def model_path(model: str) -> str:
    """Where a MODEL is found: `demo` is the classifier in the box."""
    from keyhole.models.box import FOLDER
    from keyhole.oracle.target import DEMO

    return str(FOLDER) if model == DEMO else model


def main() -> None:
    """Run a command; whatever goes wrong in a foreseen way is one line and an exit code."""
    try:
        app()
    except InputError as error:
        _fail(str(error), USAGE)
    except KeyholeError as error:
        _fail(str(error), FAILURE)


def _fail(message: str, code: int) -> None:
    say(f"keyhole: {message}", style="bold red")
    raise SystemExit(code)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(importlib.metadata.version("keyhole"))
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """What a Transformer's attention gives away, before someone else finds out."""


@contextmanager
def ready_surfaces(
    surfaces: dict[str, Oracle], budget: int | None, ledger: Path | None
) -> Generator[dict[str, Oracle]]:
    """Each surface with a counter that knows the budget, and a ledger around it if there is one."""
    from keyhole.oracle import Counted, Ledger, OpenInference

    ready: dict[str, Oracle] = {}
    ledgers: list[Ledger] = []
    with ExitStack() as stack:
        for number, (name, surface) in enumerate(surfaces.items()):
            if isinstance(surface, OpenInference):
                stack.callback(surface.close)
            ready[name] = Counted(surface, budget)
            if ledger is not None:  # a file belongs to one surface
                path = ledger.with_stem(f"{ledger.stem}-{number + 1}") if number else ledger
                ledgers.append(stack.enter_context(Ledger(ready[name], path)))
                ready[name] = ledgers[-1]
        try:
            yield ready
        except KeyboardInterrupt:
            kept = sum(len(one) for one in ledgers)
            told = f"; {kept:,} answers are in {ledger}: the same command resumes" if ledger else ""
            say(f"keyhole: stopped{told}", style="yellow")
            raise typer.Exit(INTERRUPTED) from None


def expect_folder(*files: Path | None) -> None:
    """Said before hours of work, not after: what is to be written has a folder to be written in."""
    for file in files:
        if file is not None and not file.absolute().parent.is_dir():
            raise InputError(f"expected a file to write, got {file}: there is no such folder")
