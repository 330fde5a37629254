"""The options of an audit, declared once.

`keyhole.audit(target, **options)`, the flags of `keyhole audit`, the keys of a fleet file and what
the journal calls the same run are the fields of this class. How much of the machine is used
(processes, a cluster) and where results go is no part of it: it changes no finding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from os import PathLike, fspath
from typing import Any, Literal

from keyhole.core.endpoint import EndpointOptions, expect_authorized, without_password
from keyhole.core.errors import MOST, InputError, expect_count, expect_seed
from keyhole.core.exposure import RETURNS, expect_exposures, expect_returns
from keyhole.core.files import expect_file
from keyhole.core.options import CHECKS, DATA, ENDPOINT, SCALE, TARGET, option
from keyhole.target import TargetKind, kind_of

Layers = tuple[int, ...] | Literal["all"]


def _count(word: str) -> int:
    """A number, or all that there are."""
    if word == "all":
        return MOST
    try:
        return int(word)
    except ValueError:
        raise InputError(f"--texts takes a number or all, not {word[:40]!r}") from None


def _layers(word: str) -> Layers:
    """Numbers of layers, or all that there are."""
    if word == "all":
        return "all"
    try:
        return tuple(int(part) for part in word.split(","))
    except ValueError:
        raise InputError(f"--layers takes numbers (1,6,12) or all, not {word[:40]!r}") from None


@dataclass(frozen=True)
class AuditOptions:
    """What is tried with a target, and how; None is what suits the target."""

    model: str | None = option(
        None,
        "The encoder that made a store's vectors: a folder, a hub name, or demo. For a server or a "
        "leak, its model.",
        TARGET,
        metavar="MODEL",
    )
    name: str | None = option(
        None,
        "What to call the target: a baseline of that name is its own, whatever weights it has and "
        "wherever it is.",
        TARGET,
    )
    allow_pickle: bool = option(
        False,
        "Open pickled weights, which can run code: only where you trust their source.",
        TARGET,
    )
    authorized: bool = option(
        False, "State that you may test the server, which is not on this machine.", TARGET
    )
    data: str | None = option(
        None,
        "Texts to try a model with: .txt (one a line), or .tsv, .csv, .jsonl with a column "
        "sentence or text.",
        DATA,
        file=True,
    )
    column: str | None = option(None, "The column that holds the texts.", DATA)
    label: str | None = option(
        None,
        "The column that holds the right class: label, if there is one; without it, the model's "
        "own answer is taken to be right.",
        DATA,
    )
    corpus: str | None = option(
        None,
        "For embeddings and logits: texts similar to those sought (.txt, .tsv, .csv, .jsonl), "
        "whose token statistics guide the search; by default, for embeddings, a small corpus that "
        "ships with Keyhole.",
        DATA,
        file=True,
    )
    known: str | None = option(
        None,
        "Texts that are in the store, one per line: they show how its vectors are made.",
        DATA,
        file=True,
    )
    texts: int | None = option(
        None,
        "How many of the texts to read back: by default the first 3 of a model, 20 of a store "
        "chosen at random.",
        CHECKS,
        metavar="[NUMBER|all]",
        parse=_count,
    )
    flips: int = option(12, "How many of a classifier's answers to try to flip.", CHECKS)
    layers: Layers | None = option(
        None,
        "Layers to look at, such as 1,6,12, or all; by default all of a small model, of others the "
        "first, middle, last.",
        CHECKS,
        metavar="[NUMBER,…|all]",
        parse=_layers,
    )
    only: tuple[str, ...] = option(
        (),
        "Check only this: weights, inputs, text, predictions, or rules such as "
        "KH-TEXT-HIDDEN-STATES or KH-WEIGHTS-*. May be given several times.",
        CHECKS,
        metavar="[FAMILY|RULE]",
    )
    returns: tuple[str, ...] = option(
        (),
        f"What your service returns, such as labels,embeddings (of {', '.join(RETURNS)}): what is "
        "found of anything else is hypothetical and does not fail. By default, anything.",
        CHECKS,
        metavar="NAME,…",
    )
    against_defences: bool = option(
        False,
        "Also put defences in front of endpoints that score with one head, of what models leak "
        "and of stored vectors; the attack on each knows the defence.",
        CHECKS,
    )
    probe_only: bool = option(
        False, "Of a server, only find out which routes are open: a few requests each.", CHECKS
    )
    budget: int | None = option(
        None,
        "Allow an attack on a server that takes many questions, such as the one on the last layer, "
        "so many of them; --only KH-WEIGHTS-LAST-LAYER runs it as well.",
        CHECKS,
    )
    seed: int = option(0, "The seed of every random choice.", CHECKS)
    ledger: str | None = option(
        None,
        "Remember every answer of an endpoint in this file; the same command resumes from it. By "
        "default answers of a server are kept next to the findings.",
        ENDPOINT,
        file=True,
    )
    endpoint: EndpointOptions = field(default_factory=EndpointOptions)
    device: str = option("cpu", "The device to compute on: cpu or cuda.", SCALE)

    def __post_init__(self) -> None:
        """Python may give a path, or one name instead of several."""
        for each in fields(self):
            value: Any = getattr(self, each.name)
            if isinstance(value, PathLike):
                value = fspath(value)
            if each.name in ("only", "returns") and isinstance(value, str):
                value = (value,)
            elif value is None and each.name in ("only", "returns", "endpoint"):
                value = EndpointOptions() if each.name == "endpoint" else ()
            elif isinstance(value, Sequence) and not isinstance(value, str):
                value = tuple(value)
            object.__setattr__(self, each.name, value)
        expect_seed(self.seed)
        expect_count("--texts", self.texts)
        expect_count("--flips", self.flips)
        expect_count("--budget", self.budget)
        if self.probe_only and self.budget is not None:
            raise InputError("--probe-only and --budget exclude each other: give one of them")
        expect_exposures(self.only, "--only")
        names = tuple(name for word in self.returns for name in word.split(","))
        object.__setattr__(self, "returns", expect_returns(names, "--returns"))


# Options that say nothing about a kind of target; of an endpoint that is known once it answers.
_UNFIT: dict[TargetKind, tuple[str, ...]] = {
    TargetKind.STORE: ("data", "layers"),
    TargetKind.MODEL: ("model", "known"),
    TargetKind.DEMO: ("model", "known"),
    TargetKind.LEAK: ("known", "corpus"),
    TargetKind.SERVER: ("known", "corpus"),
    TargetKind.FILE: ("model", "known", "corpus", "data"),
}
_MODEL_OF = {
    TargetKind.STORE: "name the encoder that made its vectors (a folder, owner/name on the hub, or "
    "demo)",
    TargetKind.LEAK: "name the model whose states or cache it holds",
}
_ASKED = (TargetKind.SERVER, TargetKind.ENDPOINT, TargetKind.ROUTE)
_WORDS = {TargetKind.FILE: "endpoint", TargetKind.ROUTE: "endpoint"}


def fitting(name: str, place: str, options: AuditOptions) -> TargetKind:
    """What kind of target is at `place`, refused with options that do not fit it.

    Nothing is opened, so that a mistake is known at once.
    """
    kind, public = kind_of(place), without_password(name)
    if kind in (TargetKind.ATTENTION, TargetKind.BLOCK, TargetKind.UNKNOWN):
        raise InputError(
            f"there is no {public}: give a .safetensors file, a model's folder, a .gguf file, "
            "owner/name on the hub, http://host:port/v2/models/NAME, http://host:port, a saved "
            "slot or leak, a vector store (such as chroma:FOLDER) or demo"
        )
    if options.ledger is not None and kind in (TargetKind.STORE, TargetKind.MODEL):
        raise no_endpoint(kind, public)
    what = public if kind is TargetKind.DEMO else f"the {_WORDS.get(kind, kind)} {public}"
    refuse(options, what, *_UNFIT.get(kind, ()))
    if kind in _ASKED:
        expect_authorized(place, options.authorized)
    else:
        options.endpoint.expect_none(public)
    if kind in _MODEL_OF and not options.model:
        raise InputError(f"{what} needs --model: {_MODEL_OF[kind]}")
    model = place if kind is TargetKind.MODEL else options.model or ""
    named = (
        (model if model.endswith(".gguf") else None, "a GGUF file"),
        (options.data, "a file of texts"),
        (options.known, "texts"),
        (options.corpus, "a corpus"),
    )
    for file, called in named:
        if file is not None:
            expect_file(file, called)
    return kind


def refuse(options: AuditOptions, what: str, *names: str) -> None:
    """Options that say nothing about such a target."""
    for name in names:
        if getattr(options, name) not in (None, ()):
            raise InputError(f"--{name} does not apply to {what}: leave it out")


def no_endpoint(kind: TargetKind, name: str) -> InputError:
    return InputError(
        f"--ledger keeps the answers of an endpoint, and {name} is a {kind}: leave --ledger out"
    )
