"""`keyhole lab`: what researchers use."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from keyhole.cli import options as opt
from keyhole.cli.app import Group, add, command, examples_of, interruptible
from keyhole.cli.bars import bars
from keyhole.cli.outputs import and_tensors, answer, expect_new, say, show
from keyhole.core import dump, exit_code
from keyhole.core.errors import InputError, MissingExtra, expect_count
from keyhole.core.files import is_folder, write_text
from keyhole.core.options import CHECKS, DATA, OUTPUT, TARGET, settings, types_of

if TYPE_CHECKING:
    from keyhole.core.progress import Progress
    from keyhole.core.registry import Registry
    from keyhole.data import Example
    from keyhole.oracle import MultiHead

lab = add(
    "lab",
    cls=Group,
    no_args_is_help=True,
    help="Plant, capture, measure and prove: what researchers use.",
    epilog=examples_of("keyhole lab plant target.safetensors -o dim=8", "keyhole lab methods"),
)

Columns = Annotated[str | None, opt.declared("column")]


@lab.callback()
def about_lab() -> None:
    """Plant, capture, measure and prove: what researchers use."""


# Targets of known weights, to try attacks on.

_TYPES: dict[str, Any] = {
    "dim": int, "rank": int, "heads": int, "width": int, "tokens": int, "layers": int,
    "scale": float, "every_token": bool, "causal": bool, "residual": bool, "maps": bool,
    "bases": Path, "sign_only": bool, "decimals": int, "noise": float, "max_norm": float,
}  # fmt: skip
_ANSWERS = ("sign_only", "decimals", "noise", "max_norm")  # what is done to a target's answers
# What each kind takes: an option of another kind is refused.
_TAKES = {
    "head": ("dim", "rank", "scale", *_ANSWERS),
    "multi-head": ("dim", "rank", "heads", "scale", *_ANSWERS),
    "one-layer": ("dim", "rank", "heads", "width", "scale", *_ANSWERS),
    "relu": ("dim", "width", "scale", *_ANSWERS),
    "attention": ("dim", "rank", "heads", "scale", "every_token", "causal", *_ANSWERS),
    "orthogonal-heads": ("dim", "heads", "scale", "bases", *_ANSWERS),
    "inversion": ("dim", "tokens", "scale", "heads", "residual", "causal", "maps", "layers"),
}
_SERVED = {
    "sign_only": bool, "decimals": int, "noise": float, "fresh_noise": float, "max_norm": float,
    "min_tokens": int, "max_tokens": int, "usual_norm": float,
}  # fmt: skip
_RATIONS = {"client_budget": int, "client_rate": float}
Heads = Annotated[
    Path, typer.Argument(metavar="FILE", help="A target, or the weights that extract --out saved.")
]
Tolerance = Annotated[
    float, opt.about("What counts as equal, relative to the largest entry.", CHECKS)
]  # fmt: skip


@command(
    "keyhole lab plant target.safetensors -o dim=32 -o rank=4 --seed 7",
    "keyhole lab plant rounded.safetensors -o dim=8 -o decimals=3 -o max_norm=10",
    "keyhole lab plant subspaces.safetensors --kind orthogonal-heads -o dim=16 -o heads=4 "
    "-o bases=bases.safetensors",
    "keyhole lab plant problem.safetensors --kind inversion -o dim=8 -o tokens=6 -o scale=0.3",
    group=lab,
)
def plant(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="Where to write the target.")],
    kind: Annotated[
        str, opt.about(f"What to plant: {', '.join(_TAKES)}.", TARGET, metavar="NAME")
    ] = "head",
    option: opt.MethodOptions = None,
    force: opt.Force = False,
    seed: opt.Seed = 0,
) -> None:
    """Plant a target of known weights, or a layer's output, to try an attack on.

    Every kind takes dim (64) and scale (1 gives a W of norm about 2). head,
    multi-head, one-layer and attention take rank; all but head and relu heads; one-layer and relu
    width (32); attention every_token and causal; orthogonal-heads bases, the file to write their
    bases to. inversion takes tokens (8), residual, causal, maps (they leak too) and layers (a
    stack, of which only the last output is known). Answers may be changed by sign_only, decimals,
    noise and max_norm.
    """
    if kind not in _TAKES:
        raise InputError(f"there is no kind {kind[:40]!r}: choose among {', '.join(_TAKES)}")
    types = {name: _TYPES[name] for name in _TAKES[kind]}
    options: dict[str, Any] = {"dim": 64, "scale": 1.0} | settings(option or (), types, kind)
    bases = options.pop("bases", None)
    expect_new(path, bases, force=force)
    if kind == "inversion":
        show(_plant_inversion(path, options, seed))
        return
    from keyhole import oracle
    from keyhole.core.files import write_tensors

    changed = {name: options.pop(name) for name in _ANSWERS if name in options}
    degradation = oracle.Degradation(**changed, seed=seed)
    if kind == "orthogonal-heads":
        target, subspaces = oracle.plant_orthogonal(**{"heads": 1, **options}, seed=seed)
        if bases is not None:
            write_tensors(bases, {f"basis {n}": basis for n, basis in enumerate(subspaces)}, {})
    else:
        target = oracle.plant(kind, **options, seed=seed)
    oracle.save(target, path, degradation)
    done = f"; {degradation}" if degradation else ""
    show(f"{path}: {kind}, d = {options['dim']}, {target.unknowns:,} unknowns{done}")


def _plant_inversion(path: Path, options: dict[str, Any], seed: int) -> str:
    """A layer's output, or with `layers` that of a stack; what was planted."""
    from dataclasses import replace

    from keyhole import invert
    from keyhole.lab import stacks

    tokens, layers = options.pop("tokens", 8), options.pop("layers", None)
    maps = options.pop("maps", False)
    expect_count("tokens", tokens)
    if layers is not None:
        if maps or "heads" in options:
            raise InputError("a stack of layers takes neither maps nor heads")
        dim = options["dim"]
        stacks.plant(layers, tokens, **options, seed=seed)[0].save(path)
        return f"{path}: the output of {layers} layers for {tokens} secret tokens, d = {dim}"
    problem, secret = invert.plant(tokens, **options, seed=seed)
    if maps:
        problem = replace(problem, maps=problem.maps_of(secret))
    problem.save(path)
    return f"{path}: the output of {tokens} secret tokens, d = {problem.dim}"


@command(
    "keyhole lab plant target.safetensors",
    "keyhole lab serve target.safetensors --port 8080 --name head",
    "keyhole lab serve target.safetensors --port 8081 --name rounded -o decimals=3",
    "keyhole lab serve target.safetensors --port 8082 -o min_tokens=3 -o client_budget=1000",
    "keyhole extract http://127.0.0.1:8080/v2/models/head",
    group=lab,
)
def serve(
    target: Annotated[
        Path, typer.Argument(metavar="FILE", help="A target written by keyhole lab plant.")
    ],
    name: Annotated[str, opt.about("The model's name on the server.", TARGET)] = "target",
    port: Annotated[int, opt.about("The port to listen on, at 127.0.0.1.", TARGET)] = 8080,
    option: opt.MethodOptions = None,
    seed: opt.Seed = 0,
    as_json: opt.Json = False,
) -> None:
    """Put a planted target behind a real inference server (MLServer).

    -o changes its answers: sign_only, decimals, noise (the same each time for a question),
    fresh_noise (anew each time), max_norm (longer tokens are shortened); refuses questions:
    min_tokens, max_tokens, usual_norm (of honest clients' tokens); and rations each address:
    client_budget (queries in all), client_rate (queries a second).
    """
    from keyhole.oracle.defences import Degradation

    options = settings(option or (), _SERVED | _RATIONS, "serve")
    rations = {name: options.pop(name, None) for name in _RATIONS}
    degradation = Degradation(**options, seed=seed)
    try:
        from keyhole.lab.server import serve as run
    except ModuleNotFoundError as missing:
        raise MissingExtra(
            "serve needs MLServer, which is not installed and takes Python 3.12 or older", "serve"
        ) from missing
    url = f"http://127.0.0.1:{port}/v2/models/{name}"

    def begun() -> None:
        done = f", {degradation}" if degradation else ""
        done += "".join(f", {name} {value:g}" for name, value in rations.items() if value)
        if as_json:
            typer.echo(dump({"url": url}))
        else:
            comma = "," if done else ""
            show(f"serving {target}{done}{comma} at {url} (Ctrl-C ends it)")
        sys.stdout.flush()

    run(target, name=name, port=port, degradation=degradation, **rations, begun=begun)


@command(
    "keyhole lab plant heads.safetensors --kind multi-head -o dim=6 -o heads=3",
    "keyhole lab canonical heads.safetensors --out merged.safetensors",
    group=lab,
)
def canonical(
    file: Heads,
    out: Annotated[
        Path | None, opt.about("Write the canonical heads here.", OUTPUT, metavar="FILE")
    ] = None,
    tolerance: Tolerance = 1e-12,
    force: opt.Force = False,
    as_json: opt.Json = False,
) -> None:
    """Reduce heads to what answers can show: equal W merged, invisible heads dropped."""
    from keyhole.extract.canonical import canonical as reduce
    from keyhole.extract.canonical import remarks as remarks_on
    from keyhole.oracle import save

    expect_new(out, force=force)
    model = _read_heads(file)
    reduced, remarks = reduce(model, tolerance), remarks_on(model, tolerance)
    if out is not None:
        save(reduced, out)
    words = f"{len(model.W)} heads, {len(reduced.W)} in canonical form, d = {model.dim}"
    data = {"heads": len(model.W), "canonical": len(reduced.W), "remarks": remarks}
    answer(data, "\n".join([words, *remarks]), as_json=as_json)


@command(
    "keyhole lab plant heads.safetensors --kind multi-head -o dim=6 -o heads=3",
    "keyhole extract heads.safetensors --out found.json",
    "keyhole lab same heads.safetensors found.safetensors --tolerance 1e-8",
    group=lab,
)
def same(
    first: Heads, second: Heads, tolerance: Tolerance = 1e-9, as_json: opt.Json = False
) -> None:
    """Tell whether two sets of heads are one function: exit code 0 if they are, 1 if not."""
    from keyhole.extract.canonical import difference

    apart = difference(_read_heads(first), _read_heads(second), tolerance)
    words = f"not the same function: {apart}" if apart else "the same function"
    data = {"same": not apart, "difference": apart, "tolerance": tolerance}
    answer(data, words, as_json=as_json)
    raise typer.Exit(1 if apart else 0)


def _read_heads(file: Path) -> MultiHead:
    """The heads in a file; one alone is a set of one."""
    from keyhole.oracle import Head, MultiHead, load_plain

    target, degradation = load_plain(file)
    if degradation:
        raise InputError(f"{file} holds heads that answer with {degradation}; give plain heads")
    if isinstance(target, Head):
        return MultiHead([target.W], [target.v])
    if not isinstance(target, MultiHead):
        raise InputError(f"{file} holds {target.kind}, not heads: give a head or several")
    return target


# What models leak, and what can be measured or proved.


@command(
    "keyhole lab methods",
    "keyhole lab methods low-rank",
    group=lab,
)
def methods(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="A method; by default all are listed.")
    ] = None,
    as_json: opt.Json = False,
) -> None:
    """List methods; of one, the hyperparameters that -o sets, with their defaults."""
    found = [
        (command, entry)
        for command, registry in _registries().items()
        for entry in registry.values()
        if name in (None, entry.name)
    ]
    if not found:
        raise InputError(f"there is no method {str(name)[:40]!r}: keyhole lab methods lists them")
    data: list[dict[str, Any]] = [
        {"command": command, "name": entry.name, "about": entry.about, "options": _fields(entry)}
        for command, entry in found
    ]
    lines: list[str] = []
    for row in data:
        lines.append(f"{row['command']} --method {row['name']}: {row['about']}")
        if name is not None:
            lines += [f"  -o {part['name']}={part['default']}  {part['help']}".rstrip()
                      for part in row["options"]]  # fmt: skip
    answer({"methods": data}, "\n".join(lines), as_json=as_json)


def _registries() -> dict[str, Registry[Any, Any]]:
    from keyhole.disrupt.registry import ATTACKERS
    from keyhole.extract.registry import METHODS as EXTRACTIONS
    from keyhole.harden.defences import DEFENCES
    from keyhole.invert.registry import METHODS as SOLVERS
    from keyhole.lab.certificates import METHODS as CERTIFICATES
    from keyhole.lab.stacks import METHODS as STACKS
    from keyhole.recover.registry import ATTACKS

    return {
        "extract": EXTRACTIONS, "recover": ATTACKS, "invert": SOLVERS, "lab stacks": STACKS,
        "disrupt": ATTACKERS, "harden": DEFENCES, "lab certify": CERTIFICATES,
    }  # fmt: skip


def _fields(entry: Any) -> list[dict[str, Any]]:
    """What -o sets of a method, with the help of its fields where they have any."""
    parameters = inspect.signature(entry.make).parameters
    helps = {
        name: field.metadata.get("help", "")
        for name, field in getattr(entry.method or entry.make, "__dataclass_fields__", {}).items()
    }
    return [
        {
            "name": name, "help": helps.get(name, ""),
            "default": "…" if (default := parameters[name].default) is inspect.Parameter.empty
            else "" if default is None else str(default),
        }
        for name in opt.option_types(entry)
    ]  # fmt: skip


@command(
    'keyhole lab capture demo --text "a secret of mine" --expose hidden:3 --out leak.safetensors',
    "keyhole lab capture ./my-model --data texts.txt --expose kv:1 --precision int8 --out leaks",
    'keyhole lab capture demo --text "one text" --text "another one" --expose gradient '
    "--out gradients.safetensors",
    'keyhole lab capture demo --text "in any order" --expose hidden:1 --degrade permuted '
    "--out rows.safetensors",
    group=lab,
)
def capture(
    model: opt.ModelName,
    expose: Annotated[
        str,
        opt.about(
            "What leaks, and of which layer: hidden:3, kv:0, maps:1, attention:1 or pooled; logits "
            "are those of the next token, logits:4 those of the first 4 tokens after the text; "
            "gradient is what a client hands over for a batch of texts.",
            CHECKS,
        ),
    ],
    text: Annotated[
        list[str] | None,
        opt.about("A text to run the model on; may be repeated.", DATA, metavar="TEXT"),
    ] = None,
    data: Annotated[
        Path | None,
        opt.about(
            "A file of texts: .txt (one a line), or .tsv, .csv, .jsonl with a column of them.",
            DATA,
            metavar="FILE",
        ),
    ] = None,
    column: Columns = None,
    examples: opt.Examples = None,
    precision: Annotated[
        str,
        opt.about(
            "How the leak is rounded: float32, bfloat16, float16, int8 or int4 (both with one "
            "scale for each row); a pooled embedding also to binary, its signs.",
            CHECKS,
        ),
    ] = "float32",
    noise: Annotated[
        float,
        opt.about(
            "How much noise to add, in standard deviations of the leak; to a gradient, in units of "
            "clip.",
            CHECKS,
        ),
    ] = 0.0,
    degrade: Annotated[
        list[str] | None,
        opt.about(
            "Change the leak. Hidden states: normalised (rows of length 1), permuted (rows in "
            "random order), subset:K (K rows), truncated:K (K numbers of each row). Pooled "
            "embeddings: normalised, truncated:K. Logits: log-probabilities. Hidden states, or "
            "keys and values, by a secret drawn from the number KEY: rotated:KEY, scrambled:KEY (a "
            "linear map, tokens of a block permuted), mixed:KEY (tokens of a block also mixed). "
            "May be repeated.",
            CHECKS,
            metavar="FORM",
        ),
    ] = None,
    option: opt.MethodOptions = None,
    out: Annotated[
        Path,
        opt.about(
            "The file to write the leak to, or a folder for several.", OUTPUT, metavar="PATH"
        ),
    ] = Path("leak.safetensors"),
    force: opt.Force = False,
    seed: opt.Seed = 0,
    device: opt.Device = "cpu",
    allow_pickle: opt.AllowPickle = False,
) -> None:
    """Write down what a model leaks about a text, to try an attack on.

    For a gradient, -o sets clip (the norm that each text's gradient is clipped to), steps (of the
    client on its batch; with several the change of its weights leaks), rate (its learning rate,
    0.01) and hide (parts to leave out: embeddings).
    """
    from keyhole.data import read_texts
    from keyhole.recover.simulate import UNFINISHED, files_of
    from keyhole.recover.simulate import capture as capture_leaks

    expect_count("--examples", examples)
    forms = degrade or []
    if not text and data is None:
        raise InputError("give texts with --text or --data")
    if expose == "gradient":
        if forms:
            raise InputError(f"--degrade {forms[0]} cannot be done to a gradient")
        expect_new(out, force=force)
        batch = _examples(text, data, column, examples)
        written = _capture_gradient(
            model, batch, out, option or [], noise=noise, precision=precision, device=device,
            allow_pickle=allow_pickle, seed=seed,
        )  # fmt: skip
        show(written)
        return
    settings(option or (), {}, f"a capture of {expose}")
    texts = list(text or []) + ([] if data is None else read_texts(data, column, examples))
    files = files_of(out, len(texts))
    begun = len(files) > 1 and (out / UNFINISHED).exists()  # then its own leaks may be there
    if is_folder(files[0].parent) and not begun:  # a folder that is not there yet is made
        expect_new(*files, force=force)
    with interruptible(lambda: _kept(out / UNFINISHED, "leaks", out)):
        states = ", ".join([precision, *forms])
        capture_leaks(
            model, texts, expose, out=out, precision=precision, noise=noise, forms=forms,
            device=device, allow_pickle=allow_pickle, force=force, seed=seed,
            notify=lambda path, leak: show(
                f"{path}: {leak.exposure} of {leak.length or 0} tokens, {states}"
            ),
        )  # fmt: skip


def _examples(
    texts: list[str] | None, data: Path | None, column: str | None, limit: int | None
) -> list[Example]:
    """The batch of a client: its texts, with their classes where the file has them."""
    from keyhole.data import NO_LABEL, Example, read_examples

    given = [Example(f"text {n}", NO_LABEL, text) for n, text in enumerate(texts or [], 1)]
    if data is None:
        return given
    return given + read_examples(data, text=column or (), limit=limit, labelled=False)


def _capture_gradient(
    model: str, examples: list[Example], out: Path, words: list[str], *, noise: float, **more: Any
) -> str:
    """What a client hands over for a batch of texts; what was written."""
    from keyhole.recover.gradients.recover_batch import capture_update
    from keyhole.recover.gradients.update import Protocol

    types = {**types_of(Protocol, hidden=("noise",)), "hide": tuple[str, ...]}
    options = settings(words, types, "a gradient")
    hide = options.pop("hide", ())
    update = capture_update(
        model, examples, out=out, protocol=Protocol(noise=noise, **options), hide=hide, **more
    )
    return f"{out}: the {update.what} of a batch of {update.texts} texts, {more['precision']}"


def _kept(journal: Path, what: str, where: Path | None = None) -> str:
    """What a stopped run has behind it."""
    from keyhole.core.journal import records_in

    records = records_in(journal)
    return (
        f"{records} {what} are in {where or journal}: the same command resumes" if records else ""
    )


@command(
    "keyhole lab corpus ./language-model --texts 20 --out drawn.txt",
    'keyhole lab corpus ./language-model --text "The film" --text "This movie" --texts 20 '
    "--out reviews.txt",
    group=lab,
)
def corpus(
    model: opt.ModelName,
    texts: Annotated[int, opt.about("How many sentences to draw.", CHECKS)] = 10_000,
    text: Annotated[
        list[str] | None,
        opt.about(
            "Words that sentences begin with; may be repeated. By default the first words of "
            "sentences of the corpus that ships with Keyhole.",
            CHECKS,
            metavar="WORDS",
        ),
    ] = None,
    max_length: Annotated[int, opt.about("The most tokens of a sentence.", CHECKS)] = 40,
    out: Annotated[
        Path, opt.about("The file to write them to, one a line.", OUTPUT, metavar="FILE")
    ] = Path("corpus.txt"),
    force: opt.Force = False,
    seed: opt.Seed = 0,
    device: opt.Device = "cpu",
    allow_pickle: opt.AllowPickle = False,
) -> None:
    """Draw sentences from a language model, to read embeddings with as a --corpus."""
    from keyhole.recover.embeddings.drawn import draw_texts

    expect_count("--texts", texts)
    expect_count("--max-length", max_length)
    journal = out.with_name(f"{out.name}.journal")
    expect_new(out, force=force)
    with interruptible(lambda: _kept(journal, "batches")), bars("corpus", "texts") as track:
        lines = draw_texts(
            model, texts, begins=text or (), max_length=max_length, device=device,
            allow_pickle=allow_pickle, journal=journal, seed=seed, track=track,
        )  # fmt: skip
        write_text(out, "".join(f"{line}\n" for line in lines))
    journal.unlink(missing_ok=True)
    short = "" if len(lines) == texts else f" (of {texts:,}: nothing new came after those)"
    show(f"{out}: {len(lines):,} sentences{short}")


@command(
    "keyhole lab plant layer.safetensors --kind inversion -o dim=4 -o tokens=3 -o scale=0.3",
    "keyhole invert layer.safetensors -o starts=32 --out input.json",
    "keyhole lab bounds layer.safetensors input.safetensors",
    group=lab,
)
def bounds(
    problem: opt.ProblemFile,
    at: Annotated[
        Path,
        typer.Argument(
            metavar="INPUT",
            help="A .safetensors file with the input X to measure at, such as the one that "
            "keyhole invert --out writes.",
        ),
    ],
    option: opt.MethodOptions = None,
    seed: opt.Seed = 0,
    as_json: opt.Json = False,
) -> None:
    """Print the paper's bounds on the Hessian next to measured values, and what they assume.

    -o sets R (the paper's, 1 or more; by default the least that covers W, V, the output and X) and
    neighbours (how many neighbours of X the Hessian is compared with, 32).
    """
    from keyhole.invert.run import measure_bounds

    options = settings(option or (), {"R": float, "neighbours": int}, "bounds")
    with interruptible():
        found = measure_bounds(problem, at, **options, seed=seed)
    answer(found.to_dict(), found.summary(), as_json=as_json)


@command(
    "keyhole lab plant stack.safetensors --kind inversion -o layers=2 -o residual=true "
    "-o dim=4 -o tokens=5",
    "keyhole lab stacks stack.safetensors --out first.json",
    group=lab,
)
def stacks(
    stack: Annotated[
        Path,
        typer.Argument(
            metavar="STACK",
            help="A .safetensors file with 1.W, 1.V, 2.W, 2.V, … and the last output B.",
        ),
    ],
    method: opt.Method = None,
    option: opt.MethodOptions = None,
    seed: opt.Seed = 0,
    device: opt.Device = "cpu",
    out: opt.Out = None,
    force: opt.Force = False,
    as_json: opt.Json = False,
) -> None:
    """Read the input of several layers back from their weights and the last output.

    With --out every finished search is kept in FILE.journal until the result is saved, and the
    same command resumes.
    """
    from keyhole.lab.stacks import METHODS, Stack, run

    expect_new(*and_tensors(out), force=force)
    name = method or "peel"
    options = opt.method_options(METHODS, name, option)
    journal = None if out is None else out.with_name(f"{out.name}.journal")
    kept = interruptible(lambda: "" if journal is None else _kept(journal, "finished searches"))
    with kept, bars("invert layers", each=False) as track:
        asked = Stack.load(stack)

        def begun(name: str, total: int | None = None) -> Progress:
            """When the search begins: a refusal comes before it, as the only line."""
            say(f"{stack}: {len(asked.layers)} layers, {len(asked.B)} tokens")
            return track(name, total)

        result = run(
            asked, name, **options, device=device, seed=seed, journal=journal, force=force,
            track=begun, resuming=lambda done: say(f"resuming: {done} searches are done"),
        )  # fmt: skip
        if out is not None:
            result.save(out)
    if journal is not None:
        journal.unlink(missing_ok=True)
    answer(result.to_dict(), result.summary(), as_json=as_json)
    raise typer.Exit(exit_code([result.status]))


@command(
    "keyhole lab certify ./my-classifier 1 --data dev.tsv --examples 2",
    "keyhole lab certify ./my-classifier 4 --method smoothing -o keep=0.02 -o kind=partition "
    "--data dev.tsv --examples 2",
    group=lab,
)
def certify(
    model: opt.ModelName,
    k: Annotated[int, typer.Argument(metavar="K", help="How many units may be cut.")] = 1,
    data: opt.Data = None,
    *,
    method: opt.Method = None,
    option: opt.MethodOptions = None,
    seed: opt.Seed = 0,
    out: opt.Out = None,
    force: opt.Force = False,
    as_json: opt.Json = False,
    examples: opt.ExampleOptions,
) -> None:
    """Prove which answers stay the same whichever K units of attention are cut.

    bounds (the default): of a BERT classifier as it is, exactly for 1 unit, by a bound for more.
    smoothing: of any classifier or multiple choice that votes over random masks of its attention,
    as keyhole harden --method sattend -o emptied=true trains them.
    """
    from keyhole.lab.certificates import METHODS, certify_all

    expect_new(out, force=force)
    name = method or "bounds"
    options = opt.method_options(METHODS, name, option)
    with interruptible(), bars("disrupt", "examples") as track:
        proofs = certify_all(
            model, data, k, method=name, **options, **examples.keywords(), seed=seed, track=track
        )
        if out is not None:
            proofs.save(out)
    units = "one unit" if k == 1 else f"up to {k} units"
    answer(
        proofs.to_dict(), f"{model}: {units} of attention cut\n{proofs.summary()}", as_json=as_json
    )
    raise typer.Exit(exit_code([proofs.outcome]))


@command(
    "keyhole lab cost head -o width=64 -o rank=8 -o exposure=scores -o rate=50 -o price=0.01",
    "keyhole lab cost layer -o width=576 -o exposure=log-probabilities -o vocabulary=49152",
    "keyhole lab cost text -o tokens=12 -o texts=100000 -o price=2.5",
    group=lab,
)
def cost(
    what: Annotated[
        str, typer.Argument(metavar="[head|layer|text]", help="What the attack would take.")
    ],
    option: opt.MethodOptions = None,
    as_json: opt.Json = False,
) -> None:
    """Tell what an attack would cost: queries, tokens, hours and money.

    head takes width, rank, exposure (scores, rounded, signs, vectors) and accuracy; layer width,
    heads, exposure (vectors, checkpoint, log-probabilities), vocabulary and top; both the prices
    rate (queries a second, 10), price (of a query), token_price (of a million tokens) and daily (a
    client's budget of queries, 1000). text takes tokens, exposure, processor (gpu or cpu), texts,
    price (of an hour) and seconds (for a thousand passes, if not as measured).
    """
    from keyhole.lab import cost as costs

    bill = costs.bill(what, option or ())
    answer(bill.to_dict(), bill.summary(), as_json=as_json)
