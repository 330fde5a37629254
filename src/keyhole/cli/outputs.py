"""What a command gives: its answer on stdout, what goes on meanwhile on stderr, reports in files.

A file or a pipe gets plain text in whole lines: no colour, nothing cut off to fit a screen. Where
the output's encoding lacks a sign, its number is written. NO_COLOR is respected (Rich does).
Files are named and checked before any work begins; reports come in any format, as many as are asked
for: `--output FORMAT=FILE`, `-` for stdout.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

import typer
from rich.console import Console, RenderableType

from keyhole.cli.options import about
from keyhole.core import dump
from keyhole.core.errors import InputError
from keyhole.core.files import expect_writable, is_file, write_text
from keyhole.core.options import OUTPUT
from keyhole.core.text import visible

people = Console(stderr=True)
_WHOLE = 2**20  # columns: no line is as long
OutputFiles = Annotated[
    list[str] | None,
    about(
        "Write the report as html, json, sarif, markdown or junit; - is stdout. May be given "
        "several times.",
        OUTPUT,
        "--output",
        metavar="FORMAT=FILE",
    ),
]
_Result = TypeVar("_Result")


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


def write_in_any_locale() -> None:
    """A sign that the output's encoding lacks is no reason to lose a result."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")


def expect_new(*files: Path | None, force: bool) -> None:
    """Every file has a folder to be written in, and replaces nothing unless `force` says so.

    Files that are to be continued (ledgers, journals, checkpoints) know their run themselves.
    """
    for file in filter(None, files):
        expect_writable(file)
        if is_file(file) and not force:
            raise InputError(f"{file} exists: give --force to replace it")


def and_tensors(out: Path | None) -> tuple[Path, ...]:
    """A result's JSON file and the file of tensors that is saved next to it."""
    return () if out is None else (out, out.with_suffix(".safetensors"))


@dataclass(frozen=True)
class Outputs(Generic[_Result]):
    """What to write and where; `stdout` is the format that goes there, if one does."""

    formats: Mapping[str, Callable[[_Result], str]]
    files: tuple[tuple[str, Path], ...] = ()
    stdout: str | None = None

    @classmethod
    def of(
        cls, words: Sequence[str] | None, formats: Mapping[str, Callable[[_Result], str]], *,
        force: bool, as_json: bool, defaults: Mapping[str, Path] | None = None,
        others: Sequence[Path] = (),
    ) -> Outputs[_Result]:  # fmt: skip
        """What was asked for, checked before any work.

        `defaults` are the files of formats that are always written, over what is there; `others`
        are files that the command writes itself.
        """
        pairs = [_pair(word, formats) for word in words or ()]
        on_stdout = [name for name, file in pairs if file == "-"]
        if len(on_stdout) + as_json > 1:
            raise InputError("only one result can be printed: choose among --output …=- and --json")
        named = [(name, Path(file)) for name, file in pairs if file != "-"]
        taken = {name for name, _ in named}
        first = [item for item in (defaults or {}).items() if item[0] not in taken]
        files = (*first, *named)
        places = [path.absolute() for path in (*others, *(path for _, path in files))]
        twice = next((path for path in places if places.count(path) > 1), None)
        if twice is not None:
            raise InputError(f"two outputs go to {twice}: name a file for each")
        expect_new(*(path for _, path in first), force=True)
        expect_new(*(path for _, path in named), force=force)
        return cls(formats, files, on_stdout[0] if on_stdout else None)

    def file(self, name: str) -> Path:
        """The first file in a format that is always written."""
        return next(path for written, path in self.files if written == name)

    @property
    def asked(self) -> frozenset[str]:
        """The names of all formats that were asked for."""
        return frozenset(name for name, _ in self.files) | {self.stdout or ""}

    def write(self, result: _Result) -> None:
        """Every file; what goes to stdout is `printed`."""
        for name, path in self.files:
            write_text(path, self.formats[name](result))

    def report(self) -> None:
        """Where everything was written."""
        for name, path in self.files:
            say(f"{name}: {path}")

    def printed(self, result: _Result) -> bool:
        """Print what was asked for on stdout; was anything?"""
        if self.stdout is None:
            return False
        # The bytes that the file would have: an XML file says itself that it is UTF-8.
        typer.echo(self.formats[self.stdout](result).encode("utf-8", "replace"), nl=False)
        return True


def _pair(word: str, formats: Iterable[str]) -> tuple[str, str]:
    name, equals, file = word.partition("=")
    if not equals or not file or name not in formats:
        raise InputError(
            f"--output takes FORMAT=FILE with one of {', '.join(formats)}; got {word[:80]!r}"
        )
    return name, file
