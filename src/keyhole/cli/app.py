"""The application with its commands, and the handling of errors and exit codes.

Results go to stdout, as text or with --json as JSON. Progress, warnings, names of
written files and errors go to stderr. Exit codes: 0 nothing was given away, 1 something
was, 2 wrong usage or input, 3 could not check. An error is one line: with code 2 if the
caller can correct it, with code 3 if it is due to the machine, a server or Keyhole
itself. `--debug` shows the traceback.
"""

from __future__ import annotations

import errno
import importlib
import inspect
import logging
import os
import re
import sys
import traceback
from collections.abc import Callable, Generator, Iterable
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

# the others follow from statuses (core/status.py)
USAGE = 2
FAILURE = 3
INTERRUPTED = 130
# the reader closed the pipe; shells report this code for programs ended by SIGPIPE
CLOSED = 141
_MAX_LENGTH = 1000  # characters of an error message, which may quote what people gave
_NO_MEMORY = ("can't allocate memory", "not enough memory", "out of memory")
# Within a paragraph; lists end lines with ; or :
_LINE_BREAK = re.compile(r"(?<![;:\n])\n(?!\n)")

# The error for wrong usage, whose class Typer does not export.
_UsageError = cast("type[typer.BadParameter]", typer.BadParameter.__base__)

ORDER = (
    "audit",
    "extract",
    "recover",
    "invert",
    "disrupt",
    "harden",
    "report",
    "policy",
    "lab",
)
# Any other command is in the module of its name.
_MODULES = {"lab": ("lab", "lab_targets")}
_COMMANDS: dict[str, typer.Typer] = {}


class Command(typer.core.TyperCommand):
    """A command of Keyhole."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _plain_flags(super().get_params(ctx))


class Group(typer.core.TyperGroup):
    """A group of commands."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _plain_flags(super().get_params(ctx))


def _plain_flags(parameters: Iterable[Any]) -> list[Any]:
    """Show no type after a flag in the help, because a flag takes no value."""
    given = list(parameters)
    for parameter in given:
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
    return given


class _Root(Group):
    """The root group, which turns every exception of a command into a message and an exit code."""

    def main(self, *args: Any, **given: Any) -> Any:
        try:
            code = super().main(*args, **given, standalone_mode=False)
        except _UsageError as error:
            problem = _in_one_line(error.format_message())
            if problem:  # empty if the help was printed instead
                path = getattr(error.ctx, "command_path", "keyhole")
                if not problem.endswith((".", "?", ")")):
                    problem += "."
                say(f"keyhole: {problem} See '{path} --help'.", style="bold red")
            code = USAGE
        except OSError as error:  # while the root's help or the version is printed
            code = report_failure(error)
            forget_output()
        raise SystemExit(code)

    def invoke(self, ctx: Any) -> Any:
        try:
            try:
                return super().invoke(ctx)
            finally:
                _flush()
        except (typer.Exit, typer.Abort, _UsageError):
            raise
        except BaseException as error:
            failure = missing_extra(error) or error
            raise typer.Exit(
                report_failure(failure, debug=ctx.params["debug"])
            ) from None

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002
        return list(ORDER)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command, whose module is loaded now.

        If the name is misspelt, all commands are loaded, so that Click can suggest one.
        """
        names = (cmd_name,) if cmd_name in ORDER else ORDER
        for name in names:
            if name not in self.commands:
                for module in _MODULES.get(name, (name.replace("-", "_"),)):
                    importlib.import_module(f"keyhole.cli.{module}")
                self.commands[name] = typer.main.get_command(_COMMANDS[name])
        return super().get_command(ctx, cmd_name)


app = typer.Typer(
    cls=_Root,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def command(
    *examples: str, name: str | None = None, group: typer.Typer | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a command, whose help ends with examples that can be run unchanged."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        into = group or add(name or function.__name__.replace("_", "-"))
        about = _LINE_BREAK.sub(" ", inspect.getdoc(function) or "")
        registered = into.command(
            name, cls=Command, help=about, epilog=examples_of(*examples)
        )
        return registered(with_options(function))

    return register


def add(name: str, **about: Any) -> typer.Typer:
    """Add a command, or a group of commands, to the application."""
    made = typer.Typer(
        name=name, add_completion=False, rich_markup_mode="rich", **about
    )
    _COMMANDS[name] = made
    return made


def examples_of(*lines: str) -> str:
    return "\n".join(["Example:", *(f"  {line}" for line in lines)])


lab = add(
    "lab",
    cls=Group,
    no_args_is_help=True,
    help="Plant, capture, measure and prove: what researchers use.",
    epilog=examples_of(
        "keyhole lab plant target.safetensors -o dim=8", "keyhole lab methods"
    ),
)


class _StderrHandler(logging.Handler):
    """Prints what the library logs, such as the memory that a model takes."""

    def emit(self, record: logging.LogRecord) -> None:
        say(record.getMessage())


_HANDLER = _StderrHandler()


def main() -> None:
    write_in_any_locale()
    log = logging.getLogger("keyhole")
    log.setLevel(logging.INFO)
    log.addHandler(_HANDLER)
    command_line()(prog_name="keyhole")


@cache
def command_line() -> Any:
    """Return the application as a Click command; cached, because building it takes long."""
    return typer.main.get_command(app)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Print the version."
        ),
    ] = False,
    debug: Annotated[
        bool,
        typer.Option(
            "--debug",
            envvar="KEYHOLE_DEBUG",
            help="Show the traceback when something goes wrong.",
        ),
    ] = False,
) -> None:
    """What a Transformer's attention gives away, before someone else finds out."""
    del version, debug  # read by the callback of --version and by _Root.invoke


@contextmanager
def interruptible(kept: Callable[[], str] = str) -> Generator[None]:
    """End on Ctrl-C with exit code 130 and a line that says what is `kept`."""
    try:
        yield
    except KeyboardInterrupt:
        words = filter(None, ("keyhole: stopped", kept()))
        say("; ".join(words), style="yellow")
        raise typer.Exit(INTERRUPTED) from None


def report_failure(error: BaseException, debug: bool = False) -> int:
    """Print an error in one line, and return the exit code."""
    if debug:
        traceback.print_exception(error)
    if _caused_by(error, KeyboardInterrupt):
        say("keyhole: stopped", style="yellow")
        return INTERRUPTED
    if _caused_by(error, BrokenPipeError):
        forget_output()
        return CLOSED
    say(f"keyhole: {_in_one_line(_message(error, debug))}", style="bold red")
    if isinstance(error, InputError):
        return USAGE
    return FAILURE


def _message(error: BaseException, debug: bool) -> str:
    text = str(error)
    if isinstance(error, KeyholeError):
        return text
    if isinstance(error, MemoryError) or any(
        words in text.lower() for words in _NO_MEMORY
    ):
        return "out of memory: try smaller sizes, or fewer at a time"
    if isinstance(error, OSError):
        what = "the system refused"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            what = "could not write"
        if error.filename is not None:
            what += f" ({error.filename})"
        return f"{what}: {error.strerror or text}"
    problem = f"internal error: {type(error).__name__}: {text}"
    if debug:
        return problem
    return f"{problem}; run again with --debug"


def _in_one_line(text: str) -> str:
    """Return a message in one line of printable characters."""
    line = " ".join(text.split())
    for letter in set(line):
        if not letter.isprintable():
            line = line.replace(letter, "�")
    half = _MAX_LENGTH // 2
    if len(line) > _MAX_LENGTH:
        return f"{line[:half]} … {line[-half:]}"
    return line


def _caused_by(error: BaseException | None, kind: type[BaseException]) -> bool:
    """Return whether an error has this cause: libraries may raise their own error on Ctrl-C."""
    while error is not None:
        if isinstance(error, kind):
            return True
        error = error.__cause__ or error.__context__
    return False


def _flush() -> None:
    """Flush stdout while a full disk or a closed pipe can still be reported in one line."""
    try:
        if sys.__stdout__ is not None:  # None if keyhole is started with stdout closed
            sys.stdout.flush()
    except OSError:
        forget_output()
        raise


def forget_output() -> None:
    """Discard what is left to print, because Python would try again at exit, and complain."""
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
    except (OSError, ValueError):  # stdout is no file, as in tests
        pass
