"""The command line: parse, one library call, print. JSON on stdout, people's words on stderr.

Exit codes: 0 nothing was given away, 1 something was, 2 wrong usage or input, 3 could not check.
"""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from keyhole.errors import InputError, KeyholeError

if TYPE_CHECKING:  # torch takes seconds to load: --help should not wait for it
    from keyhole.extract import Extraction, Method
    from keyhole.oracle import Oracle

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
people = Console(stderr=True)

CLEAN, FINDINGS, USAGE, FAILURE, INTERRUPTED = 0, 1, 2, 3, 130

Target = Annotated[
    str,
    typer.Argument(
        metavar="TARGET",
        help="A .safetensors file, http://host:port/v2/models/NAME, or demo.",
    ),
]
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


class MethodName(StrEnum):
    SINGLE_HEAD = "single-head"
    LOW_RANK = "low-rank"
    NUCLEAR_NORM = "nuclear-norm"


def main() -> None:
    """Run a command; whatever goes wrong in a foreseen way is one line and an exit code."""
    try:
        app()
    except InputError as error:
        _fail(str(error), USAGE)
    except KeyholeError as error:
        _fail(str(error), FAILURE)


def _fail(message: str, code: int) -> None:
    _say(f"keyhole: {message}", style="bold red")
    raise SystemExit(code)


def _say(message: str, style: str | None = None) -> None:
    """One line stays one line, and nothing in it is taken for markup."""
    people.print(message, style=style, markup=False, highlight=False, soft_wrap=True)


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


@app.command(epilog="\b\nExample:\n  keyhole audit demo --json-file audit.json --page audit.html")
def audit(
    target: Target,
    page: Annotated[Path, typer.Option(metavar="FILE", help="The page for people.")] = Path(
        "keyhole-report.html"
    ),
    json_file: Annotated[
        Path, typer.Option(metavar="FILE", help="The findings for a pipeline.")
    ] = Path("keyhole-report.json"),
    ledger: LedgerFile = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Try every attack that applies, and report what the target gives away."""
    from keyhole import report
    from keyhole.audit import audit as run
    from keyhole.oracle.target import describe
    from keyhole.results import dump, write_text

    bars: dict[str, Callable[[int], None]] = {}
    with _opened(target, None, ledger) as oracle, _progress() as track:

        def watch(attack: str, count: int, expected: int | None) -> None:
            if attack not in bars:
                bars[attack] = track(attack, expected)
            bars[attack](count)

        found = run(oracle, target=describe(target, oracle), seed=seed, watch=watch)
    text = dump(found.to_dict())
    write_text(json_file, text)
    write_text(page, report.render(found))
    if as_json:
        typer.echo(text)
    people.print(report.table(found))
    _say(f"page: {page}   findings: {json_file}")
    if found.failed:
        raise typer.Exit(FAILURE)
    raise typer.Exit(FINDINGS if found.exposed else CLEAN)


@app.command(
    epilog="\b\nExample:\n"
    "  keyhole plant target.safetensors --dim 32 --rank 4\n"
    "  keyhole extract target.safetensors --method low-rank --ledger run.db --json",
)
def extract(
    target: Target,
    method: Annotated[MethodName, typer.Option(help="The attack.")] = MethodName.SINGLE_HEAD,
    rank: Annotated[
        int | None, typer.Option(help="Rank of W, if known (low-rank, nuclear-norm).")
    ] = None,
    budget: Annotated[int | None, typer.Option(help="Ask at most this many queries.")] = None,
    ledger: LedgerFile = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Save the result as JSON, the weights beside it."),
    ] = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Read the weights back from black-box answers."""
    from keyhole.results import Status, dump

    attack = _method(method, rank, seed)
    with _opened(target, budget, ledger) as oracle, _progress() as track:
        show = track(method.value, attack.expected(oracle.dim))
        from keyhole.oracle import Counted

        result = attack(Counted(oracle, watch=show))
    if out is not None:
        result.save(out)
    if as_json:
        typer.echo(dump(result.to_dict()))
    _say(_summary(result))
    if result.status is Status.ORACLE_FAILED:
        raise typer.Exit(FAILURE)
    found = result.status in (Status.RECOVERED, Status.INEXACT)
    raise typer.Exit(FINDINGS if found else CLEAN)


@app.command(
    epilog="\b\nExample:\n"
    "  keyhole audit demo\n"
    "  keyhole report keyhole-report.json --page again.html",
)
def report(
    findings: Annotated[
        Path, typer.Argument(metavar="AUDIT.json", help="Written by keyhole audit.")
    ],
    page: Annotated[Path, typer.Option(metavar="FILE", help="The page for people.")] = Path(
        "keyhole-report.html"
    ),
    as_json: Json = False,
) -> None:
    """Make the page again from the findings."""
    from keyhole import report as reports
    from keyhole.audit import Audit
    from keyhole.results import dump, read, write_text

    found = Audit.from_dict(read(findings))
    write_text(page, reports.render(found))
    if as_json:
        typer.echo(dump(found.to_dict()))
    people.print(reports.table(found))
    _say(f"page: {page}")


@app.command(
    epilog="\b\nExample:\n  keyhole plant target.safetensors --dim 32 --rank 4 --seed 7",
)
def plant(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="Where to write the target.")],
    kind: Annotated[str, typer.Option(help="head, multi-head, one-layer or attention.")] = "head",
    dim: Annotated[int, typer.Option(help="Dimension of a token.")] = 64,
    rank: Annotated[int | None, typer.Option(help="Rank of every W; full if not given.")] = None,
    heads: Annotated[int, typer.Option(help="Number of heads (multi-head, attention).")] = 1,
    width: Annotated[int, typer.Option(help="Hidden units (one-layer).")] = 32,
    scale: Annotated[float, typer.Option(help="Scale of W; 1 gives a norm of about 2.")] = 1.0,
    every_token: Annotated[
        bool, typer.Option("--every-token", help="Answer for every token (attention).")
    ] = False,
    causal: Annotated[bool, typer.Option("--causal", help="Causal mask (attention).")] = False,
    seed: Seed = 0,
) -> None:
    """Plant a target of known weights, to rehearse an attack on."""
    from keyhole import oracle

    target = oracle.plant(
        kind, dim=dim, rank=rank, heads=heads, width=width, scale=scale,
        every_token=every_token, causal=causal, seed=seed,
    )  # fmt: skip
    oracle.save(target, path)
    _say(f"{path}: {kind}, d = {dim}, {target.unknowns:,} unknowns")


@app.command(
    epilog="\b\nExample:\n"
    "  keyhole plant target.safetensors\n"
    "  keyhole serve target.safetensors --port 8080 --name head\n"
    "  keyhole extract http://127.0.0.1:8080/v2/models/head",
)
def serve(
    target: Annotated[Path, typer.Argument(metavar="FILE", help="A planted target.")],
    name: Annotated[str, typer.Option(help="The model's name on the server.")] = "target",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8080,
    as_json: Json = False,
) -> None:
    """Put a planted target behind a real inference server (MLServer), to rehearse on."""
    try:
        from keyhole.oracle.server import serve as run
    except ModuleNotFoundError as missing:
        raise InputError(
            "expected MLServer for serve, got none: pip install 'keyhole[serve]'"
        ) from missing
    url = f"http://{host}:{port}/v2/models/{name}"
    if as_json:
        from keyhole.results import dump

        typer.echo(dump({"url": url}))
    _say(f"serving {target} at {url} (Ctrl-C ends it)")
    run(target, name=name, host=host, port=port)


def _method(name: MethodName, rank: int | None, seed: int) -> Method:
    from keyhole import extract as methods

    match name:
        case MethodName.SINGLE_HEAD:
            return methods.SingleHead(seed=seed)
        case MethodName.LOW_RANK:
            return methods.LowRank(rank=rank, seed=seed)
        case MethodName.NUCLEAR_NORM:
            if rank is None:
                raise InputError("expected --rank for nuclear-norm, got none")
            return methods.NuclearNorm(rank=rank, seed=seed)


@contextmanager
def _opened(target: str, budget: int | None, ledger: Path | None) -> Generator[Oracle]:
    """The target with a counter that knows the budget, and a ledger around it if there is one."""
    from keyhole.oracle import Counted, Ledger, OpenInference
    from keyhole.oracle.target import open_target

    with ExitStack() as stack:
        opened = open_target(target)
        if isinstance(opened, OpenInference):
            stack.callback(opened.close)
        oracle: Oracle = Counted(opened, budget)
        if ledger is not None:
            oracle = stack.enter_context(Ledger(oracle, ledger))
        try:
            yield oracle
        except KeyboardInterrupt:
            kept = (
                f"; {len(oracle):,} answers are in {ledger}" if isinstance(oracle, Ledger) else ""
            )
            again = ": the same command resumes" if kept else ""
            _say(f"keyhole: stopped{kept}{again}", style="yellow")
            raise typer.Exit(INTERRUPTED) from None


class _Rate(TextColumn):
    """Queries per second since the attack began."""

    def __init__(self) -> None:
        super().__init__("")

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{speed:,.0f}/s", style="progress.data.speed")


@contextmanager
def _progress() -> Generator[Callable[[str, int | None], Callable[[int], None]]]:
    """Bars on stderr, with queries done, rate and time left; silent where nobody looks."""
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("queries"),
        _Rate(),
        TimeRemainingColumn(),
        console=people,
        transient=True,
        disable=not people.is_terminal or bool(os.environ.get("KEYHOLE_NO_PROGRESS")),
    )

    def track(name: str, expected: int | None) -> Callable[[int], None]:
        task: TaskID = bar.add_task(name, total=expected)
        return lambda count: bar.update(task, completed=count)

    with bar:
        yield track


def _summary(result: Extraction) -> str:
    floor = "" if result.floor is None else f" (unknowns: {result.floor:,})"
    free = f", {result.remembered:,} of them remembered" if result.remembered else ""
    return (
        f"{result.status}: {result.reason}\n"
        f"{result.queries:,} queries{free}{floor}, {result.seconds:.2f} s\n"
        f"{result.status.advice}"
    )
