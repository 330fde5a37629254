"""The command line: parse, one library call, print. JSON on stdout, people's words on stderr.

Exit codes: 0 nothing was given away, 1 something was, 2 wrong usage or input, 3 could not check.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from keyhole.console import people, progress, say
from keyhole.errors import InputError, KeyholeError

if TYPE_CHECKING:  # torch takes seconds to load: --help should not wait for it
    from keyhole.extract import Extraction
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
    AUTO = "auto"
    SINGLE_HEAD = "single-head"
    LOW_RANK = "low-rank"
    NUCLEAR_NORM = "nuclear-norm"
    TOLERANT = "tolerant"
    SIGN_ONLY = "sign-only"
    ONE_LAYER = "one-layer"
    MULTI_HEAD = "multi-head"
    ORTHOGONAL_HEADS = "orthogonal-heads"
    FULL_OUTPUT = "full-output"


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
    from keyhole.oracle.target import describe, open_surfaces
    from keyhole.results import dump, write_text

    bars: dict[str, Callable[[int], None]] = {}
    surfaces = open_surfaces(target)
    with _ready(surfaces, None, ledger) as ready, progress() as track:

        def watch(attack: str, count: int, expected: int | None) -> None:
            if attack not in bars:
                bars[attack] = track(attack, expected)
            bars[attack](count)

        found = run(ready, target=describe(target, surfaces), seed=seed, watch=watch)
    text = dump(found.to_dict())
    write_text(json_file, text)
    write_text(page, report.render(found))
    if as_json:
        typer.echo(text)
    people.print(report.table(found))
    say(f"page: {page}   findings: {json_file}")
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
    method: Annotated[
        MethodName, typer.Option(help="The attack; auto finds out from the answers.")
    ] = MethodName.AUTO,
    rank: Annotated[
        int | None, typer.Option(help="Rank of W, if known (low-rank, nuclear-norm).")
    ] = None,
    answer_error: Annotated[
        float | None, typer.Option(help="How far an answer may be off (tolerant).")
    ] = None,
    max_norm: Annotated[
        float | None, typer.Option(help="Longest token the target takes (tolerant).")
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
    from keyhole.extract.named import named
    from keyhole.oracle import Counted
    from keyhole.oracle.target import open_target
    from keyhole.results import Status, dump

    attack = named(method, rank=rank, answer_error=answer_error, max_norm=max_norm, seed=seed)
    surfaces = {"": open_target(target)}
    with _ready(surfaces, budget, ledger) as ready, progress() as track:
        show = track(method.value, attack.expected(ready[""].dim))
        result = attack(Counted(ready[""], watch=show))
    if out is not None:
        result.save(out)
    if as_json:
        typer.echo(dump(result.to_dict()))
    say(_summary(result))
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
    say(f"page: {page}")


@app.command(
    epilog="\b\nExample:\n  keyhole plant target.safetensors --dim 32 --rank 4 --seed 7",
)
def plant(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="Where to write the target.")],
    kind: Annotated[str, typer.Option(help="head, multi-head, one-layer or attention.")] = "head",
    dim: Annotated[int, typer.Option(help="Dimension of a token.")] = 64,
    rank: Annotated[int | None, typer.Option(help="Rank of every W; full if not given.")] = None,
    heads: Annotated[int, typer.Option(help="Number of heads (not for a head).")] = 1,
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
    say(f"{path}: {kind}, d = {dim}, {target.unknowns:,} unknowns")


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
    say(f"serving {target} at {url} (Ctrl-C ends it)")
    run(target, name=name, host=host, port=port)


@contextmanager
def _ready(
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


def _summary(result: Extraction) -> str:
    floor = "" if result.floor is None else f" (unknowns: {result.floor:,})"
    free = f", {result.remembered:,} of them remembered" if result.remembered else ""
    return (
        f"{result.status}: {result.reason}\n"
        f"{result.queries:,} queries{free}{floor}, {result.seconds:.2f} s\n"
        f"{result.status.advice}"
    )
