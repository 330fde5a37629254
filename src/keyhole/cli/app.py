"""The application, and how a command ends.

What a command was asked for goes to stdout, in words for people or, with --json, as JSON; progress,
warnings, names of written files and errors go to stderr. Exit codes: 0 nothing was given away, 1
something was, 2 wrong usage or input, 3 could not check. Whatever goes wrong is one line: 2 is for
what the caller gave, 3 for what the machine or a server did, and for faults of Keyhole itself, of
which `--debug` shows the traceback.
"""

from __future__ import annotations

import errno
import importlib
import logging
import os
import sys
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import cache
from typing import Annotated, Any, cast

import typer
import typer.core
import typer.main

from keyhole.cli.options import with_options
from keyhole.cli.outputs import say, write_in_any_locale
from keyhole.core.errors import InputError, KeyholeError, missing_extra
from keyhole.version import __version__

USAGE, FAILURE, INTERRUPTED = 2, 3, 130  # 0, 1 and 3 follow from statuses: core/status.py
CLOSED = 141  # nobody reads what is printed: what a shell reports of programs that SIGPIPE ends
_MAX_LETTERS = 1000  # of a message; what people gave may be longer
_NO_MEMORY = ("can't allocate memory", "not enough memory", "out of memory")

# What people type wrong. The class has no public name of its own.
_Usage = cast("type[typer.BadParameter]", typer.BadParameter.__base__)

ORDER = (
    "audit", "extract", "recover", "invert", "disrupt", "harden", "report", "check-config",
    "policy", "lab",
)  # fmt: skip
_MODULES = {"lab": ("lab", "lab_targets")}  # of the others, the one of their name
_COMMANDS: dict[str, typer.Typer] = {}


class _PlainFlags:
    """Help without a type after a flag, which takes no value."""

    def get_params(self, ctx: Any) -> list[Any]:
        given: list[Any] = super().get_params(ctx)  # pyright: ignore
        for parameter in given:
            if getattr(parameter, "is_flag", False):
                parameter.metavar = ""
        return given


class Command(_PlainFlags, typer.core.TyperCommand):
    """A command of Keyhole."""


class Group(_PlainFlags, typer.core.TyperGroup):
    """A group of commands."""


class _Root(Group):
    """Whatever a command raises ends here, alike in a shell, a test and a notebook."""

    def main(self, *args: Any, **given: Any) -> Any:
        try:
            code = super().main(*args, **given, standalone_mode=False)
        except _Usage as error:
            if problem := error.format_message():  # nothing where the help was printed instead
                path = "keyhole" if error.ctx is None else error.ctx.command_path
                stop = "" if problem.endswith((".", "?", ")")) else "."
                hint = f"See '{path} --help'."
                say(f"keyhole: {_in_one_line(problem)}{stop} {hint}", style="bold red")
            code = USAGE
        raise SystemExit(code)

    def invoke(self, ctx: Any) -> Any:
        try:
            try:
                return super().invoke(ctx)
            finally:
                _flush()
        except (typer.Exit, typer.Abort, _Usage):
            raise
        except BaseException as error:
            failure = missing_extra(error) or error
            raise typer.Exit(report_failure(failure, debug=ctx.params["debug"])) from None

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002
        return list(ORDER)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Loaded when it is asked for: nobody waits for the others."""
        for name in (cmd_name,) if cmd_name in ORDER else ORDER:  # to one that is misspelt, all
            if name not in self.commands:
                for module in _MODULES.get(name, (name.replace("-", "_"),)):
                    importlib.import_module(f"keyhole.cli.{module}")
                self.commands[name] = typer.main.get_command(_COMMANDS[name])
        return super().get_command(ctx, cmd_name)


app = typer.Typer(
    cls=_Root, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode="rich"
)


def command(
    *examples: str, name: str | None = None, group: typer.Typer | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a command, whose help ends with examples that run as they stand."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        into = add(name or function.__name__.replace("_", "-")) if group is None else group
        registered = into.command(name, cls=Command, epilog=examples_of(*examples))
        return registered(with_options(function))

    return register


def add(name: str, **about: Any) -> typer.Typer:
    """A command, or a group of them, at the top."""
    made = typer.Typer(name=name, add_completion=False, rich_markup_mode="rich", **about)
    _COMMANDS[name] = made
    return made


def examples_of(*lines: str) -> str:
    return "\n".join(["Example:", *(f"  {line}" for line in lines)])


lab = add(
    "lab",
    cls=Group,
    no_args_is_help=True,
    help="Plant, capture, measure and prove: what researchers use.",
    epilog=examples_of("keyhole lab plant target.safetensors -o dim=8", "keyhole lab methods"),
)


@lab.callback()
def about_lab() -> None:
    """Plant, capture, measure and prove: what researchers use."""


class _Console(logging.Handler):
    """Prints what the library logs, such as the memory that a model takes."""

    def emit(self, record: logging.LogRecord) -> None:
        say(record.getMessage())


_CONSOLE = _Console()


def main() -> None:
    """Run a command; whatever goes wrong is one line and an exit code."""
    write_in_any_locale()
    log = logging.getLogger("keyhole")
    log.setLevel(logging.INFO)
    log.addHandler(_CONSOLE)
    command_line()(prog_name="keyhole")


@cache
def command_line() -> Any:
    """Every command, each made of its options once: that takes as long as many a command."""
    return typer.main.get_command(app)


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


def report_failure(error: BaseException, debug: bool = False) -> int:
    """What went wrong, in one line; the exit code."""
    if debug:
        traceback.print_exception(error)
    if _caused_by(error, KeyboardInterrupt):
        say("keyhole: stopped", style="yellow")
        return INTERRUPTED
    if _caused_by(error, BrokenPipeError):
        forget_output()
        return CLOSED
    say(f"keyhole: {_in_one_line(_message(error, debug))}", style="bold red")
    return USAGE if isinstance(error, InputError) else FAILURE


def _out_of_memory(error: BaseException) -> bool:
    text = str(error).lower()
    return isinstance(error, MemoryError) or any(sign in text for sign in _NO_MEMORY)


def _message(error: BaseException, debug: bool) -> str:
    text = str(error)
    if isinstance(error, KeyholeError):
        return text
    if _out_of_memory(error):
        return "out of memory: try smaller sizes, or fewer at a time"
    if isinstance(error, OSError):
        place = "" if error.filename is None else f" ({error.filename})"
        what = error.strerror or text
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return f"could not write{place}: {what}"
        return f"the system refused{place}: {what}"
    hint = "" if debug else "; run again with --debug"
    return f"internal error: {type(error).__name__}: {text}{hint}"


def _in_one_line(text: str) -> str:
    """What a terminal can show, whatever people or a library wrote."""
    line = " ".join(text.split())
    safe = "".join(letter if letter.isprintable() else "�" for letter in line)
    half = _MAX_LETTERS // 2
    return safe if len(safe) <= _MAX_LETTERS else f"{safe[:half]} … {safe[-half:]}"


def _caused_by(error: BaseException | None, kind: type[BaseException]) -> bool:
    """Is it this at bottom? Libraries that are stopped, by Ctrl-C say, may call it another name."""
    while error is not None:
        if isinstance(error, kind):
            return True
        error = error.__cause__ or error.__context__
    return False


def _flush() -> None:
    """Now, while a full disk or a closed pipe can still be reported in one line."""
    try:
        if sys.stdout is not None:  # pyright: ignore[reportUnnecessaryComparison]
            sys.stdout.flush()
    except OSError:
        forget_output()
        raise


def forget_output() -> None:
    """What is left to print goes nowhere: Python would try once more, and complain, as it ends."""
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
    except (OSError, ValueError):  # a stdout that is no file, as in tests
        pass
