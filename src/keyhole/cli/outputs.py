"""The output of commands: results on stdout, messages on stderr, and reports in files.

A file or a pipe gets plain text in whole lines: no colour, and nothing cut off to fit a
screen. A character that the output's encoding lacks is escaped. Rich respects NO_COLOR.
Reports are written in any number of formats with `--output FORMAT=FILE`, where `-` is
stdout. All files are checked before any work begins.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

import typer
from rich.console import Console, RenderableType

from keyhole.cli.options import about
from keyhole.core import dump
from keyhole.core.errors import InputError
from keyhole.core.files import exists, expect_writable, is_file, write_text
from keyhole.core.options import OUTPUT
from keyhole.core.text import visible

people = Console(stderr=True)
_UNLIMITED = 2**20  # columns, more than any line has
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
    """Print a message to stderr in one line, without taking anything in it for markup."""
    people.print(
        visible(message), style=style, markup=False, highlight=False, soft_wrap=True
    )


def show(answer: RenderableType) -> None:
    """Print a result to stdout; lines are only wrapped if that is a terminal."""
    width = _UNLIMITED if not sys.stdout.isatty() else None
    plain = isinstance(answer, str)
    if plain:
        answer = visible(answer)
    console = Console(width=width, highlight=False)
    console.print(answer, markup=False, soft_wrap=plain)


def answer(
    data: dict[str, Any],
    words: RenderableType,
    *,
    as_json: bool,
) -> None:
    """Print the result of a command to stdout: as JSON, or as `words` for people."""
    if as_json:
        typer.echo(dump(data))
    else:
        show(words)


def write_in_any_locale() -> None:
    """Escape characters that the output's encoding lacks, instead of losing the result."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")


def expect_new(
    *files: Path | None, force: bool, inputs: Iterable[str | Path | None] = ()
) -> None:
    """Raise unless every file can be written; one that exists is only replaced with `force`.

    What the command reads (`inputs`, by whatever name) is never replaced. It is not for
    files that a run continues (ledgers, journals, checkpoints), which check the run.
    """
    for file in filter(None, files):
        expect_writable(file)
        if _is_any(file, inputs):
            raise InputError(f"{file} is read by this command: write to another file")
        if is_file(file) and not force:
            raise InputError(f"{file} exists: give --force to replace it")


def _is_any(file: Path, others: Iterable[str | Path | None]) -> bool:
    """Return whether a file is one of others, by whatever name."""
    return exists(file) and any(
        exists(each) and file.samefile(each) for each in filter(None, others)
    )


def with_tensor_file(out: Path | None) -> tuple[Path, ...]:
    """Return a result's JSON file, and the file of tensors next to it."""
    if out is None:
        return ()
    return out, out.with_suffix(".safetensors")


@dataclass(frozen=True)
class Outputs(Generic[_Result]):
    """The files to write in which format, and the format for stdout, if any: --json is one."""

    formats: Mapping[str, Callable[[_Result], str]]
    files: tuple[tuple[str, Path], ...] = ()
    stdout: str | None = None

    @classmethod
    def of(
        cls,
        words: Sequence[str] | None,
        formats: Mapping[str, Callable[[_Result], str]],
        *,
        force: bool,
        as_json: bool,
        defaults: Mapping[str, Path] | None = None,
        others: Sequence[Path] = (),
        baselines: Sequence[Path | None] = (),
        inputs: Sequence[str | Path | None] = (),
    ) -> Outputs[_Result]:
        """Read and check values of --output.

        `defaults` are files that are written unless another file is named for their
        format; they replace existing files. `others` are files that the command writes
        itself. `baselines` are files to compare with: none of them is ever replaced,
        because the same command would then compare its findings with themselves.
        `inputs` are other files that the command reads.
        """
        on_stdout = ["json"] * as_json
        named: list[tuple[str, Path]] = []
        for word in words or ():
            name, file = _pair(word, formats)
            if file == "-":
                on_stdout.append(name)
            else:
                named.append((name, Path(file)))
        if len(on_stdout) > 1:
            raise InputError(
                "only one result can be printed: choose among --output …=- and --json"
            )
        usual = dict(defaults or {})
        for name, _ in named:
            usual.pop(name, None)
        files = (*usual.items(), *named)
        paths = [*others, *(path for _, path in files)]
        for path in paths:
            if _is_any(path, baselines):
                raise InputError(
                    f"{path} is the baseline, which the findings would replace: copy the baseline "
                    "and name the copy, or write elsewhere with --output FORMAT=FILE"
                )
        expect_new(*usual.values(), force=True, inputs=inputs)
        expect_new(*(path for _, path in named), force=force, inputs=inputs)
        places = Counter(os.path.realpath(path) for path in paths)
        for place, count in places.items():
            if count > 1:
                raise InputError(f"two outputs go to {place}: name a file for each")
        return cls(formats, files, next(iter(on_stdout), None))

    def file(self, name: str) -> Path:
        """Return the first file in a format that has a default."""
        return next(path for written, path in self.files if written == name)

    def write(self, result: _Result) -> None:
        for name, path in self.files:
            write_text(path, self.formats[name](result))

    def report(
        self, result: _Result, words: Callable[[_Result], RenderableType]
    ) -> None:
        """Print the format for stdout, or else the words for people; then name the files."""
        if self.stdout is None:
            show(words(result))
        else:
            # As bytes, because an XML file declares UTF-8, whatever the encoding of the
            # terminal.
            text = self.formats[self.stdout](result)
            typer.echo(text.encode("utf-8", "replace"), nl=False)
        for name, path in self.files:
            say(f"{name}: {path}")


def _pair(word: str, formats: Iterable[str]) -> tuple[str, str]:
    name, equals, file = word.partition("=")
    if not equals or not file or name not in formats:
        raise InputError(
            f"--output takes FORMAT=FILE with one of {', '.join(formats)}; got {word[:80]!r}"
        )
    return name, file
