"""`keyhole lab`: commands for researchers, except those about planted targets (lab_targets.py)."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from keyhole.cli import options as opt
from keyhole.cli.app import command, interruptible, lab
from keyhole.cli.bars import bars
from keyhole.cli.outputs import answer, expect_new, show
from keyhole.core import exit_code
from keyhole.core.errors import InputError, expect_count
from keyhole.core.files import is_folder
from keyhole.core.options import CHECKS, DATA, OUTPUT, option, settings, types_of

if TYPE_CHECKING:
    from keyhole.core.registry import Registry
    from keyhole.data import Example

Columns = Annotated[str | None, opt.of_audit("column")]


@command(
    "keyhole lab methods",
    "keyhole lab methods low-rank",
    group=lab,
)
def methods(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="A method; by default all are listed."),
    ] = None,
    as_json: opt.Json = False,
) -> None:
    """List methods; of one, the hyperparameters that -o sets, with their defaults."""
    data: list[dict[str, Any]] = []
    lines: list[str] = []
    for package, registry in _registries().items():
        for entry in registry.values():
            if name not in (None, entry.name):
                continue
            about = entry.about
            options = _fields(entry)
            data.append(
                {
                    "command": package,
                    "name": entry.name,
                    "about": about,
                    "options": options,
                }
            )
            lines.append(f"{package} --method {entry.name}: {about}")
            for row in options if name else ():
                lines.append(
                    f"  -o {row['name']}={row['default']}  {row['help']}".rstrip()
                )
    if not data:
        raise InputError(
            f"there is no method {str(name)[:40]!r}: keyhole lab methods lists them"
        )
    answer({"methods": data}, "\n".join(lines), as_json=as_json)


def _registries() -> dict[str, Registry[Any, Any]]:
    from keyhole.disrupt.registry import ATTACKERS
    from keyhole.extract.registry import METHODS as EXTRACTIONS
    from keyhole.harden.defences import DEFENCES
    from keyhole.invert.registry import METHODS as SOLVERS
    from keyhole.recover.registry import ATTACKS

    return {
        "extract": EXTRACTIONS,
        "recover": ATTACKS,
        "invert": SOLVERS,
        "disrupt": ATTACKERS,
        "harden": DEFENCES,
    }


def _fields(entry: Any) -> list[dict[str, Any]]:
    """Return what -o sets for a method, with the defaults and the help of its fields."""
    parameters = inspect.signature(entry.make).parameters
    fields = getattr(entry.method or entry.make, "__dataclass_fields__", {})
    rows: list[dict[str, Any]] = []
    for name in opt.option_types(entry):
        if parameters[name].default is None:
            default = ""
        else:
            default = str(parameters[name].default)
        if parameters[name].default is inspect.Parameter.empty:
            default = "…"
        help_ = fields[name].metadata.get("help", "") if name in fields else ""
        rows.append({"name": name, "help": help_, "default": default})
    return rows


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
            "are those of the next token; gradient is what a client hands over for a batch of "
            "texts.",
            CHECKS,
        ),
    ],
    text: list[str] | None = option(
        None, "A text to run the model on; may be repeated.", DATA, metavar="TEXT"
    ),
    data: Path | None = option(
        None,
        "A file of texts: .txt (one a line), or .tsv, .csv, .jsonl with a column of them.",
        DATA,
        metavar="FILE",
    ),
    column: Columns = None,
    examples: opt.Examples = None,
    precision: str = option(
        "float32",
        "How the leak is rounded: float32, bfloat16, float16, int8 or int4 (both with one "
        "scale for each row); a pooled embedding also to binary, its signs.",
        CHECKS,
    ),
    noise: float = option(
        0.0,
        "How much noise to add, in standard deviations of the leak; to a gradient, in units of "
        "clip.",
        CHECKS,
    ),
    degrade: list[str] | None = option(
        None,
        "Change the leak. Hidden states: normalised (rows of length 1), permuted (rows in "
        "random order), subset:K (K rows), truncated:K (K numbers of each row). Pooled "
        "embeddings: normalised, truncated:K. Logits: log-probabilities. Hidden states, or "
        "keys and values, by a secret drawn from the number KEY: rotated:KEY. "
        "Keys and values: shielded:KEY (KV-Shield), cloaked:KEY (KV-Cloak). May be repeated.",
        CHECKS,
        metavar="FORM",
    ),
    hyperparameters: opt.MethodOptions = None,
    out: Path = option(
        Path("leak.safetensors"),
        "The file to write the leak to, or a folder for several.",
        OUTPUT,
        metavar="PATH",
    ),
    force: opt.Force = False,
    seed: opt.Seed = 0,
    device: opt.Device = "cpu",
    allow_pickle: opt.AllowPickle = False,
) -> None:
    """Save what a model leaks about a text, to try an attack on.

    For a gradient, -o sets clip (the norm that each text's gradient is clipped to),
    epsilon (the privacy that noise gives, at δ = 1e-5, instead of --noise), steps (of
    the client on its batch, whose change of the weights leaks if there are several),
    rate (its learning rate, 0.01), lora (the rank of adapters, if only they are
    trained; trained=false is their first round) and hide (parts to leave out:
    embeddings).
    """
    from keyhole.data import read_texts
    from keyhole.recover.simulate import capture as capture_leaks
    from keyhole.recover.simulate import files_of

    expect_count("--examples", examples)
    forms = degrade or []
    if not text and data is None:
        raise InputError("give texts with --text or --data")
    if expose == "gradient":
        if forms:
            raise InputError(f"--degrade {forms[0]} cannot be done to a gradient")
        expect_new(out, force=force, inputs=(data,))
        batch = _examples(text, data, column, examples)
        written = _capture_gradient(
            model,
            batch,
            out,
            hyperparameters,
            noise=noise,
            precision=precision,
            device=device,
            allow_pickle=allow_pickle,
            seed=seed,
        )
        show(written)
        return
    settings(hyperparameters, {}, f"a capture of {expose}")
    texts = list(text or []) + (
        [] if data is None else read_texts(data, column, examples)
    )
    files = files_of(out, len(texts))
    if is_folder(files[0].parent):  # otherwise the folder is made
        expect_new(*files, force=force, inputs=(data,))
    states = ", ".join([precision, *forms])
    capture_leaks(
        model,
        texts,
        expose,
        out=out,
        precision=precision,
        noise=noise,
        forms=forms,
        device=device,
        allow_pickle=allow_pickle,
        seed=seed,
        notify=lambda path, leak: show(
            f"{path}: {leak.exposure} of {leak.length or 0} tokens, {states}"
        ),
    )


def _examples(
    texts: list[str] | None,
    data: Path | None,
    column: str | None,
    limit: int | None,
) -> list[Example]:
    from keyhole.data import NO_LABEL, Example, read_examples

    given = [
        Example(f"text {n}", NO_LABEL, text) for n, text in enumerate(texts or [], 1)
    ]
    if data is None:
        return given
    return given + read_examples(data, text=column or (), limit=limit, labelled=False)


def _capture_gradient(
    model: str,
    examples: list[Example],
    out: Path,
    words: list[str] | None,
    *,
    noise: float,
    **more: Any,
) -> str:
    """Write what a client hands over for a batch of texts, and describe it in a line."""
    from keyhole.recover.gradients.recover_batch import capture_update
    from keyhole.recover.gradients.update import Protocol, epsilon_of

    types = {**types_of(Protocol, hidden=("noise",)), "hide": tuple[str, ...]}
    options = settings(words, types, "a gradient")
    hide = options.pop("hide", ())
    update = capture_update(
        model,
        examples,
        out=out,
        protocol=Protocol(noise=noise, **options),
        hide=hide,
        **more,
    )
    noisy = update.protocol.multiplier
    private = f", noise of ε = {epsilon_of(noisy):.3g}" if noisy else ""
    what = f"the {update.what} of a batch of {update.texts} texts"
    return f"{out}: {what}, {more['precision']}{private}"


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
    hyperparameters: opt.MethodOptions = None,
    seed: opt.Seed = 0,
    as_json: opt.Json = False,
) -> None:
    """Print the paper's bounds on the Hessian next to measured values, and what they assume.

    -o sets R (the paper's, 1 or more; by default the least that covers W, V, the output
    and X) and neighbours (how many neighbours of X the Hessian is compared with, 32).
    """
    from keyhole.invert.run import measure_bounds

    options = settings(hyperparameters, {"R": float, "neighbours": int}, "bounds")
    with interruptible():
        found = measure_bounds(problem, at, **options, seed=seed)
    answer(found.to_dict(), found.summary(), as_json=as_json)


@command(
    "keyhole lab certify ./my-classifier 4 -o keep=0.02 -o kind=partition --data dev.tsv "
    "--examples 2",
    group=lab,
)
def certify(
    model: opt.ModelName,
    k: Annotated[
        int, typer.Argument(metavar="K", help="How many units may be cut.")
    ] = 1,
    data: opt.Data = None,
    *,
    hyperparameters: opt.MethodOptions = None,
    seed: opt.Seed = 0,
    out: opt.Out = None,
    force: opt.Force = False,
    as_json: opt.Json = False,
    examples: opt.ExampleOptions,
) -> None:
    """Prove which answers stay the same whichever K units of attention are cut.

    It works for any classifier or multiple choice that votes over masks of its
    attention, as keyhole harden --method sattend -o emptied=true trains them. -o sets
    keep (the share of units that a mask keeps, 0.05), kind (random, or partition for a
    proof), samples (of random masks, 1000), confidence (0.999) and spare (what is never
    cut: padding, special or "first token").
    """
    from keyhole.harden.smoothing import Smoothing, certify_all

    expect_new(out, force=force, inputs=(data,))
    options = settings(
        hyperparameters, types_of(Smoothing, hidden=("seed",)), "smoothing"
    )
    way = Smoothing(**options, seed=seed)
    with interruptible(), bars("disrupt", "examples") as track:
        proofs = certify_all(model, data, k, way, **examples.keywords(), track=track)
        if out is not None:
            proofs.save(out)
    units = "one unit" if k == 1 else f"up to {k} units"
    answer(
        proofs.to_dict(),
        f"{model}: {units} of attention cut\n{proofs.summary()}",
        as_json=as_json,
    )
    raise typer.Exit(exit_code([proofs.outcome]))
