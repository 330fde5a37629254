"""What all commands share: the application, exit codes, options, and how a command ends.

What a command was asked for goes to stdout, in words for people or, with --json, as JSON; what goes
on meanwhile (progress, warnings, where files were written, errors) goes to stderr. Exit codes: 0
nothing was given away, 1 something was, 2 wrong usage or input, 3 could not check (failures.py says
how a command ends then).
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
import typer.core
import typer.main

from keyhole.cli.completion import Completing
from keyhole.cli.console import say, write_in_any_locale
from keyhole.cli.described import described
from keyhole.cli.failures import INTERRUPTED, forget_output, said
from keyhole.core.errors import InputError
from keyhole.core.files import expect_writable, is_file, is_folder
from keyhole.version import __version__

if TYPE_CHECKING:  # torch takes seconds to load: --help should not wait for it
    from keyhole.core.registry import Registry

# What `keyhole --help` lists; each command is the module of its name. The first line of its own
# help is the same (a test compares them).
COMMANDS = {
    "audit": "Try every attack that applies, and report what the target gives away.",
    "extract": "Read the weights back from black-box answers.",
    "invert": "Read inputs back: of one attention layer, or the text of a model.",
    "capture": "Write down what a model leaks about a text, to try an attack on.",
    "corpus": "Draw sentences from a language model, to read embeddings with as a --corpus.",
    "disrupt": "Flip predictions by cutting a small share of attention, the text left alone.",
    "harden": "Train a model against the attack on attention, and measure whether it helped.",
    "canonical": "Reduce heads to what answers can show: equal W merged, invisible heads dropped.",
    "same": "Tell whether two sets of heads are one function: exit code 0 if they are, 1 if not.",
    "report": "Make the page again from the findings, or the report in another format.",
    "policy": "Judge findings by what a team has decided.",
    "cost": "Tell what an attack would cost: queries, tokens, hours and money.",
    "check-config": "Look for settings that open what attacks need; nothing is run.",
    "plant": "Plant a target of known weights, or a layer's output, to try an attack on.",
    "serve": "Put a planted target behind a real inference server (MLServer).",
}


# What people type wrong: Typer shows it by itself. The class has no public name of its own.
_Usage = cast("type[Exception]", typer.BadParameter.__base__)


class _OnDemand(typer.core.TyperGroup):
    """Imports a command when it is called: torch takes seconds to load, help should not wait.

    What `--help` says, and what the Tab key completes, is in tables (described.py, completion.py).

    Whatever a command raises ends here, so that it ends alike in a shell, a test and a notebook.
    """

    def invoke(self, ctx: Any) -> Any:
        try:
            try:
                return super().invoke(ctx)
            finally:
                _flush()
        except (typer.Exit, typer.Abort, _Usage):
            raise
        except BaseException as error:
            raise typer.Exit(said(error, debug=ctx.params["debug"])) from None

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002
        about = COMMANDS.get(cmd_name)
        if about is None:
            return None
        return typer.core.TyperCommand(cmd_name, help=about, short_help=about)  # not cut off

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] in COMMANDS and ctx.resilient_parsing:  # Tab was pressed
            return args[0], Completing(args[0]), args[1:]
        if args and args[0] in COMMANDS:
            if (stand_in := described(args[0], args[1:])) is not None:
                return stand_in.name, stand_in, ["--help"]
            return args[0], command(args[0]), args[1:]
        self.commands = {name: self.get_command(ctx, name) for name in COMMANDS}  # to suggest from
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=_OnDemand,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def command(name: str) -> Any:
    """The command itself, imported."""
    importlib.import_module(f"keyhole.cli.{name.replace('-', '_')}")
    registered: Any = typer.main.get_command(app)
    return registered.commands[name]


def name_in(registry: Registry[Any, Any], help: str) -> Any:  # noqa: A002 - as Typer calls it
    """An option whose values are the names in a registry, shown in help and checked."""

    def named(name: str) -> str:
        return registry[name.encode("utf-8", "replace").decode()].name  # an error must be text

    return typer.Option(parser=named, metavar=f"[{'|'.join(registry)}]", help=help)


ModelName = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="A folder, a .gguf file, a hub name, or demo."),
]
AllowPickle = Annotated[
    bool,
    typer.Option(
        "--allow-pickle",
        help="Open pickled weights, which can run code: only where you trust their source.",
    ),
]
TextColumn = Annotated[
    list[str] | None,
    typer.Option(help="The column that holds the text; give it twice for a pair of texts."),
]
Label = Annotated[str, typer.Option(help="The column that holds the right class.")]
Classes = Annotated[
    str | None,
    typer.Option(help="Names of the classes, such as no,yes, where the model does not name them."),
]
Longest = Annotated[int, typer.Option(help="Cut texts off after this many tokens.")]
Device = Annotated[str, typer.Option(help="The device to compute on: cpu or cuda.")]
Seed = Annotated[int, typer.Option(help="The seed of every random choice.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON instead of text.")]
Force = Annotated[bool, typer.Option("--force", help="Replace existing files.")]
CorpusFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="For embeddings and logits: texts similar to those sought (.txt, .tsv, .csv, .jsonl), "
        "whose token statistics guide the search; by default, for embeddings, a small corpus that "
        "ships with Keyhole.",
    ),
]
SignOnly = Annotated[
    bool, typer.Option("--sign-only", help="Answer with 1 where the score is positive, else 0.")
]
Decimals = Annotated[
    int | None, typer.Option(help="Round answers to so many digits after the point.")
]
Noise = Annotated[
    float | None,
    typer.Option(help="Let answers be off by up to this, the same each time for a question."),
]
ClippedAt = Annotated[
    float | None, typer.Option("--max-norm", help="Shorten longer tokens to this norm.")
]
Processes = Annotated[
    int, typer.Option(help="Work in this many processes; 0 is this one, as a GPU wants.")
]
DaskAddress = Annotated[
    str | None,
    typer.Option(
        "--dask", metavar="ADDRESS", help="Work on a Dask cluster, such as tcp://host:8786."
    ),
]
LedgerFile = Annotated[
    Path | None,
    typer.Option(
        "--ledger",
        metavar="FILE",
        help="Remember every answer in this file; the same command resumes from it.",
    ),
]


def main() -> None:
    """Run a command; whatever goes wrong is one line and an exit code."""
    write_in_any_locale()
    app(prog_name="keyhole")


def _flush() -> None:
    """Here, where a full disk or a closed pipe can still be said in one line."""
    try:
        if sys.stdout is not None:  # pyright: ignore[reportUnnecessaryComparison]
            sys.stdout.flush()
    except OSError:
        forget_output()
        raise


def _version(asked: bool) -> None:
    if asked:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[
        bool,
        typer.Option(
            "--debug", envvar="KEYHOLE_DEBUG", help="Show the traceback when something goes wrong."
        ),
    ] = False,
) -> None:
    """What a Transformer's attention gives away, before someone else finds out."""
    del version, debug  # read where they are used: by their callback, and where a command ends


@contextmanager
def interruptible(kept: Callable[[], str] = str) -> Generator[None]:
    """Ctrl-C is one line, which says what is kept, and exit code 130."""
    try:
        yield
    except KeyboardInterrupt:
        what = kept()
        say(f"keyhole: stopped{'; ' if what else ''}{what}", style="yellow")
        raise typer.Exit(INTERRUPTED) from None


def expect_folder(*files: Path | None) -> None:
    """Said before hours of work, not after: what is to be written has a folder to be written in."""
    for file in files:
        if file is not None:
            expect_writable(file)


def and_tensors(out: Path | None) -> tuple[Path, ...]:
    """A result's JSON file and the file of tensors that is saved beside it."""
    return () if out is None else (out, out.with_suffix(".safetensors"))


def expect_new(*files: Path | None, force: bool) -> None:
    """Said before hours of work too: nothing that is there is overwritten unless `force` says so.

    Files that are to be continued (ledgers, journals, checkpoints) know their run themselves.
    """
    for file in files:
        if file is not None and is_folder(file):
            raise InputError(f"expected a file to write, got {file}: it is a folder")
        if file is not None and is_file(file) and not force:
            raise InputError(
                f"expected a new file, got {file}, which exists: give --force to replace it"
            )
