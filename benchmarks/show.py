"""What every benchmark does with its rows: print a table, write JSON, say what fell short.

A benchmark is a module with `run(quick, option=default, …)` that yields rows and, at its end,
`show.main(run)`: the parameters of `run` are its options, and where a default is a dataclass, its
fields are: options that several benchmarks share. Both sides of a ratio are measured in the
same run: machines are noisy, absolute times mean little.

What `--json` writes is a record as documents quote it (docs/quoted.py): copied into docs/figures/
it stands there with its command, commit and machine, and docs/benchmarks.md shows it.
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, is_dataclass, replace
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
    """One line of the table; `met` is None where a figure is only reported.

    Errors, counts and exactness are promises: they hold on every machine, and a test fails where
    one is not met. Seconds and ratios of them are none (`promise=False`): machines are noisy.
    `run` is all that was measured, kept with the table: a benchmark's `--join` makes one table of
    many files from it, and anybody can count again.
    """

    what: str
    measured: str
    target: str = ""
    met: bool | None = None
    details: str = ""
    promise: bool = True
    run: dict[str, Any] | None = None


def itemised(row: Row, items: Sequence[dict[str, Any]]) -> Row:
    """The row with what was measured of each text, batch, seed or question."""
    return replace(row, run={"row": row.what, "items": list(items)})


def broken(rows: list[Row]) -> list[str]:
    """The promises that were not met."""
    return [f"{row.what}: {row.measured}" for row in rows if row.promise and row.met is False]


def at_most(what: str, value: float, bound: float, details: str = "") -> Row:
    """An error that must not exceed a bound."""
    return Row(what, f"{value:.1e}", f"<= {bound:.0e}", value <= bound, details)


def exactly(what: str, value: object, wanted: object, details: str = "") -> Row:
    """A count or a word that must be this one."""
    return Row(what, str(value), str(wanted), value == wanted, details)


def every(what: str, count: int, total: int, details: str = "") -> Row:
    """How many out of how many; it must be all."""
    return Row(what, f"{count} of {total}", "all", count == total, details)


def timed(function: Callable[[], T]) -> tuple[T, float]:
    """What a call gives, and its seconds."""
    started = time.perf_counter()
    result = function()
    return result, time.perf_counter() - started


def spread_out(function: Callable[[Any], T], cases: Sequence[Any], workers: int) -> Iterator[T]:
    """What a function gives for each case, in their order, by so many processes of one thread."""
    if workers < 2:
        yield from map(function, cases)
        return
    pool = ProcessPoolExecutor(workers, get_context("spawn"), torch.set_num_threads, (1,))
    try:
        yield from pool.map(function, cases)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def relative(found: Tensor, truth: Tensor) -> float:
    """The largest error, relative to the largest entry of the planted truth."""
    return float((found - truth).abs().max() / truth.abs().max())


def main(run: Callable[..., Iterable[Row]], title: str = "") -> None:
    """Run a benchmark from the command line: its options are the parameters of `run`.

    Each row is shown and written as soon as it is known: a failure, Ctrl-C or SIGTERM keeps the
    rows before it.
    """
    title = title or sys.modules["__main__"].__doc__ or ""
    parser = argparse.ArgumentParser(
        description=title, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="small sizes, seconds: for the tests")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows and the machine")
    hints, shared = get_type_hints(run), dict[str, Any]()
    for name, parameter in list(inspect.signature(run).parameters.items())[1:]:
        if not is_dataclass(parameter.default):
            _add_option(parser, name, hints[name], parameter.default)
            continue
        shared[name] = parameter.default
        kinds = get_type_hints(type(parameter.default))
        for each, default in vars(parameter.default).items():
            _add_option(parser, each, kinds[each], default)
    given = vars(parser.parse_args())
    quick, file = given.pop("quick"), given.pop("json")
    for name, options in shared.items():
        given[name] = type(options)(**{each: given.pop(each) for each in vars(options)})
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    started, rows, failure = time.perf_counter(), list[Row](), None
    try:
        for row in run(quick, **given):
            rows.append(row)
            print(row.what, row.measured, row.details, sep=" | ", file=sys.stderr, flush=True)
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


def _write(file: Path, title: str, quick: bool, seconds: float, rows: list[Row]) -> None:
    """The record of what is known so far: a machine may go away at any time."""
    versions = environment()
    data = {
        "title": title.splitlines()[0],
        "command": command(sys.argv),
        "commit": commit(),
        "machine": machine(),
        "kept": "as the command wrote it",
        "quick": quick,
        "seconds": seconds,
        "versions": {name: versions[name] for name in ("keyhole", "python", "torch")},
        "rows": [
            {name: value for name, value in vars(row).items() if name != "run"} for row in rows
        ],
    }
    text = json.dumps(data, indent=2, ensure_ascii=False)
    if runs := [json.dumps(row.run, ensure_ascii=False) for row in rows if row.run]:
        lines = ",\n".join(f"    {run}" for run in runs)
        text = text.removesuffix("\n}") + f',\n  "runs": [\n{lines}\n  ]\n}}'
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text + "\n", "utf-8")


def _add_option(parser: argparse.ArgumentParser, name: str, kind: Any, default: Any) -> None:
    """An option of a benchmark: a flag, one of several words, a list with commas, or a value."""
    flag, args = f"--{name.replace('_', '-')}", get_args(kind)
    if kind is bool:
        parser.add_argument(flag, action="store_true")
    elif get_origin(kind) is Literal:
        parser.add_argument(flag, choices=args, default=default)
    elif get_origin(kind) is list and args[0] is Path:
        parser.add_argument(flag, type=Path, nargs="+", default=default)
    elif get_origin(kind) is list:
        convert = args[0]
        parser.add_argument(
            flag, type=lambda text: [convert(part) for part in text.split(",")], default=default
        )
    else:
        plain = next((part for part in args if part is not NoneType), kind)
        parser.add_argument(flag, type=plain, default=default)


def command(words: list[str]) -> str:
    """What to type for the same rows, from the root of the repository: folders of this machine
    by their last name, and not where the rows were written.
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
    cells += [(row.what, row.measured, row.target, marks[row.met], row.details) for row in rows]
    if not any(row.details for row in rows):
        cells = [line[:4] for line in cells]
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    lines = [
        "| "
        + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        + " |"
        for line in cells
    ]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([f"\n{title}\n", lines[0], rule, *lines[1:], ""])


def machine() -> str:
    """The processor, its cores, and the GPU if there is one."""
    processor = platform.processor() or platform.machine()
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
        models = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
        processor = models[0] if models else processor
    cores = f"{processor}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"
    return f"{cores}, {torch.cuda.get_device_name()}" if torch.cuda.is_available() else cores


def commit() -> str:
    """The checkout's; KEYHOLE_COMMIT says it where only a copy of the files is there."""
    if given := os.environ.get("KEYHOLE_COMMIT"):
        return given
    try:
        command = ["git", "describe", "--always", "--dirty"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()
