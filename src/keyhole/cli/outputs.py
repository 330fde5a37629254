"""Results in any format, as many as are asked for: `--output FORMAT=FILE`, `-` for stdout."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

import typer

from keyhole.cli.app import expect_folder, expect_new
from keyhole.cli.console import say
from keyhole.core.errors import InputError
from keyhole.core.files import write_text
from keyhole.report.formats import FORMATS


def output_option(formats: Iterable[str], more: str = "") -> Any:
    """`--output`, with the formats that it takes; `more` is said of them."""
    return typer.Option(
        "--output",
        metavar="FORMAT=FILE",
        help=f"Also write the report as one of {', '.join(formats)}{more}; - is stdout. May be "
        "given several times.",
    )


_Result = TypeVar("_Result")
OutputFiles = Annotated[list[str] | None, output_option(FORMATS)]


@dataclass(frozen=True)
class Outputs(Generic[_Result]):
    """What to write and where; `stdout` is the format that goes there, if one does."""

    formats: Mapping[str, Callable[[_Result], str]]
    files: tuple[tuple[str, Path], ...] = ()
    stdout: str | None = None

    @classmethod
    def of(
        cls, words: Sequence[str] | None, others: Sequence[Path],
        formats: Mapping[str, Callable[[_Result], str]], *, force: bool, as_json: bool,
    ) -> Outputs[_Result]:  # fmt: skip
        """What was asked for, checked before any work; `others` are files written besides."""
        pairs = [_pair(word, formats) for word in words or ()]
        on_stdout = [name for name, file in pairs if file == "-"]
        if len(on_stdout) + as_json > 1:
            raise InputError("expected one thing to print, got several: --output …=- and --json")
        files = tuple((name, Path(file)) for name, file in pairs if file != "-")
        places = [path.absolute() for path in (*others, *(path for _, path in files))]
        twice = next((path for path in places if places.count(path) > 1), None)
        if twice is not None:
            raise InputError(f"expected a file for each output, got {twice} twice")
        paths = [path for _, path in files]
        expect_folder(*paths)
        expect_new(*paths, force=force)
        return cls(formats, files, on_stdout[0] if on_stdout else None)

    @property
    def asked(self) -> frozenset[str]:
        """The names of all formats that were asked for."""
        return frozenset(name for name, _ in self.files) | {self.stdout or ""}

    def write(self, result: _Result) -> None:
        """Every file; what goes to stdout is `printed`."""
        for name, path in self.files:
            write_text(path, self.formats[name](result))
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
            f"expected --output as FORMAT=FILE with one of {', '.join(formats)}, got {word[:80]!r}"
        )
    return name, file
