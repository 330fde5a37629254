"""The command line of every benchmark: options, the table on stdout, the record in a JSON file.

A benchmark is a module with a function `run(quick, option=default, …)` that yields
rows, and ends with `show.main(run)`. The parameters of `run` are its options; if a
default is a dataclass, so are its fields (several benchmarks share those). Both sides
of a ratio are measured in the same run, because absolute times vary too much between
machines and days.

`--json` writes a record that documents can quote (docs/quoted.py) once it is copied
into docs/figures/. It names its command, commit and machine, and docs/benchmarks.md
links to it.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, is_dataclass
from multiprocessing import get_context
from pathlib import Path
from types import NoneType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from keyhole.core import environment

T = TypeVar("T")


@dataclass(frozen=True)
class Row:
    """One line of the table; `met` is None if a figure is reported without a target.

    Errors, counts and exactness are promises: they hold on every machine, and a test
    fails if one is not met. Seconds and their ratios are not (`promise=False`), because
    machines vary.

    The record also keeps the raw measurements behind a row: `items`, one for each text,
    batch, seed or query, or `run`, if there is more than a list to keep (`--join` reads
    those back).
    """

    what: str
    measured: str
    target: str = ""
    met: bool | None = None
    details: str = ""
    promise: bool = True
    items: Sequence[Mapping[str, Any]] | None = None
    run: dict[str, Any] | None = None

    @property
    def cells(self) -> dict[str, Any]:
        """The row without its raw measurements."""
        return {
            name: each
            for name, each in vars(self).items()
            if name not in ("items", "run")
        }

    @property
    def raw(self) -> dict[str, Any] | None:
        """The raw measurements, as the record keeps them."""
        if self.items is None:
            return self.run
        return {"row": self.what, "items": list(self.items)}


def broken(rows: list[Row]) -> list[str]:
    """Return the promises that were not met."""
    return [
        f"{row.what}: {row.measured}"
        for row in rows
        if row.promise and row.met is False
    ]


def at_most(what: str, value: float, bound: float, details: str = "") -> Row:
    """Return the row of an error that must not exceed a bound."""
    return Row(what, f"{value:.1e}", f"<= {bound:.0e}", value <= bound, details)


def exactly(
    what: str, value: object, wanted: object, details: str = "", **raw: Any
) -> Row:
    """Return the row of a count or a word that must be `wanted`."""
    return Row(what, str(value), str(wanted), value == wanted, details, **raw)


def every(what: str, count: int, total: int, details: str = "", **raw: Any) -> Row:
    """Return the row of a count that must be the total."""
    return Row(what, f"{count} of {total}", "all", count == total, details, **raw)


def timed(function: Callable[[], T]) -> tuple[T, float]:
    """Return the result of a call and the seconds it took."""
    started = time.perf_counter()
    result = function()
    return result, time.perf_counter() - started


def spread_out(
    function: Callable[[Any], T], cases: Sequence[Any], workers: int
) -> Iterator[T]:
    """Yield the result for each case, in order, from worker processes of one thread each."""
    if workers < 2:
        yield from map(function, cases)
        return
    pool = ProcessPoolExecutor(
        workers, get_context("spawn"), torch.set_num_threads, (1,)
    )
    try:
        yield from pool.map(function, cases)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def relative(found: Tensor, truth: Tensor) -> float:
    """Return the largest error, relative to the largest entry of the planted truth."""
    return float((found - truth).abs().max() / truth.abs().max())


def main(run: Callable[..., Iterable[Row]], title: str = "") -> None:
    """Run a benchmark from the command line: its options are the parameters of `run`.

    Each row is shown and written as soon as it is known, so that a failure, Ctrl-C or
    SIGTERM loses no earlier row.
    """
    title = title or sys.modules["__main__"].__doc__ or ""
    parser = argparse.ArgumentParser(
        description=title, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="use small sizes: takes seconds"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the record")
    hints = get_type_hints(run)
    shared = dict[str, Any]()
    for name, parameter in list(inspect.signature(run).parameters.items())[1:]:
        if not is_dataclass(parameter.default):
            _add_option(parser, name, hints[name], parameter.default)
            continue
        shared[name] = parameter.default
        kinds = get_type_hints(type(parameter.default))
        for each, default in vars(parameter.default).items():
            _add_option(parser, each, kinds[each], default)
    given = vars(parser.parse_args())
    quick = given.pop("quick")
    file = given.pop("json")
    for name, options in shared.items():
        given[name] = type(options)(**{each: given.pop(each) for each in vars(options)})
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    started = time.perf_counter()
    rows = list[Row]()
    failure = None
    try:
        for row in run(quick, **given):
            rows.append(row)
            print(
                row.what,
                row.measured,
                row.details,
                sep=" | ",
                file=sys.stderr,
                flush=True,
            )
            if file:
                _write(file, title, quick, time.perf_counter() - started, rows)
    except (Exception, KeyboardInterrupt) as error:
        failure = error
    seconds = time.perf_counter() - started
    if file:
        _write(file, title, quick, seconds, rows)
    print(_table(title.splitlines()[0], rows))
    print(f"{seconds:.0f} s, commit {commit()}, {torch.get_num_threads()} threads")
    if missed := broken(rows):
        print(f"promises not met: {'; '.join(missed)}")
    if failure is not None:
        raise failure


def _write(
    file: Path, title: str, quick: bool, seconds: float, rows: list[Row]
) -> None:
    """Write the record of the rows known so far: the machine may go away at any time."""
    versions = environment()
    raw = [json.dumps(row.raw, ensure_ascii=False) for row in rows if row.raw]
    data = {
        **origin(title.splitlines()[0], command(sys.argv)),
        "quick": quick,
        "seconds": seconds,
        "versions": {name: versions[name] for name in ("keyhole", "python", "torch")},
        "rows": [row.cells for row in rows],
    }
    text = json.dumps(data, indent=2, ensure_ascii=False)
    if raw:
        lines = ",\n".join(f"    {run}" for run in raw)
        text = text.removesuffix("\n}") + f',\n  "runs": [\n{lines}\n  ]\n}}'
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text + "\n", "utf-8")


def origin(title: str, command: str) -> dict[str, str]:
    """Return the first fields of a record: its title, command, commit and machine."""
    return {
        "title": title,
        "command": command,
        "commit": commit(),
        "machine": machine(),
        "kept": "as the command wrote it",
    }


def _add_option(
    parser: argparse.ArgumentParser, name: str, kind: Any, default: Any
) -> None:
    """Add an option: a flag, one of several words, a list separated by commas, or a value."""
    flag = f"--{name.replace('_', '-')}"
    args = get_args(kind)
    usual = ",".join(map(str, default)) if isinstance(default, list) else str(default)
    if default not in (None, "", []) and len(usual) < 99:
        about = f"default: {usual}"
    else:
        about = None
    if kind is bool:
        parser.add_argument(flag, action="store_true")
    elif get_origin(kind) is Literal:
        parser.add_argument(flag, choices=args, default=default, help=about)
    elif get_origin(kind) is list and args[0] is Path:
        parser.add_argument(flag, type=Path, nargs="+", default=default, help=about)
    elif get_origin(kind) is list:
        convert = args[0]
        parser.add_argument(
            flag,
            type=lambda text: [convert(part) for part in text.split(",")],
            default=default,
            metavar=f"{name.upper().removesuffix('S')},…",
            help=about,
        )
    else:
        plain = next((part for part in args if part is not NoneType), kind)
        parser.add_argument(flag, type=plain, default=default, help=about)


def command(words: list[str]) -> str:
    """Return the command that repeats these rows from the root of the repository.

    Absolute paths are cut to their last part, and `--json` is left out.
    """
    program, *rest = words
    where = Path(program).absolute()
    inside = "peers/" if where.parent.name == "peers" else ""
    kept: list[str] = []
    for before, word in zip(["", *rest], rest, strict=False):
        if word == "--json" or before == "--json" or word.startswith("--json="):
            continue
        kept.append(Path(word).name if Path(word).is_absolute() else word)
    return " ".join(["python", f"benchmarks/{inside}{where.name}", *kept])


def _table(title: str, rows: list[Row]) -> str:
    cells = [("what", "measured", "target", "", "details")]
    marks = {True: "met", False: "NOT MET", None: ""}
    cells += [
        (row.what, row.measured, row.target, marks[row.met], row.details)
        for row in rows
    ]
    if not any(row.details for row in rows):
        cells = [line[:4] for line in cells]
    widths = [
        max(len(line[column]) for line in cells) for column in range(len(cells[0]))
    ]
    lines = [
        "| "
        + " | ".join(
            cell.ljust(width) for cell, width in zip(line, widths, strict=True)
        )
        + " |"
        for line in cells
    ]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([f"\n{title}\n", lines[0], rule, *lines[1:], ""])


def machine() -> str:
    """Return the processor, its cores, and the GPU if there is one."""
    processor = platform.processor() or platform.machine()
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
        models = [
            line.split(":")[1].strip()
            for line in lines
            if line.startswith("model name")
        ]
        processor = models[0] if models else processor
    cores = f"{processor}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"
    if torch.cuda.is_available():
        return f"{cores}, {torch.cuda.get_device_name()}"
    return cores


def commit() -> str:
    """Return the commit of the checkout; in a copy without git, KEYHOLE_COMMIT names it."""
    if given := os.environ.get("KEYHOLE_COMMIT"):
        return given
    try:
        command = ["git", "describe", "--always", "--dirty"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()
