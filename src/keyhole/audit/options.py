"""The options of an audit, declared once as the fields of `AuditOptions`.

The keywords of `keyhole.audit`, the flags of `keyhole audit` and the keys of a fleet
file are all derived from them. How many processes an audit uses, and where its results
go, are not options here, because they change no finding.
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


def _parse_count(word: str) -> int:
    if word == "all":
        return MOST
    try:
        return int(word)
    except ValueError:
        raise InputError(f"--texts takes a number or all, not {word[:40]!r}") from None


def _parse_layers(word: str) -> Layers:
    if word == "all":
        return "all"
    try:
        return tuple(int(part) for part in word.split(","))
    except ValueError:
        raise InputError(
            f"--layers takes numbers (1,6,12) or all, not {word[:40]!r}"
        ) from None


@dataclass(frozen=True)
class AuditOptions:
    """What an audit tries, and how; None leaves the choice to the kind of target."""

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
        False,
        "State that you may test the server, which is not on this machine.",
        TARGET,
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
        parse=_parse_count,
    )
    flips: int = option(
        12, "How many of a classifier's answers to try to flip.", CHECKS
    )
    layers: Layers | None = option(
        None,
        "Layers to look at, such as 1,6,12, or all; by default all of a small model, of others the "
        "first, middle, last.",
        CHECKS,
        metavar="[NUMBER,…|all]",
        parse=_parse_layers,
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
        False,
        "Of a server, only find out which routes are open: a few requests each.",
        CHECKS,
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
        """Accept what callers in Python give: paths, lists, one name for several, None."""
        for each in fields(self):
            value: Any = getattr(self, each.name)
            if isinstance(value, PathLike):
                value = fspath(value)
            if each.name == "endpoint":
                value = value or EndpointOptions()
            elif each.name in ("only", "returns"):
                value = value or ()
                if isinstance(value, str):
                    value = (value,)
            if isinstance(value, Sequence) and not isinstance(value, str):
                value = tuple(value)
            object.__setattr__(self, each.name, value)
        expect_seed(self.seed)
        expect_count("--texts", self.texts)
        expect_count("--flips", self.flips)
        expect_count("--budget", self.budget)
        if self.probe_only and self.budget is not None:
            raise InputError(
                "--probe-only and --budget exclude each other: give one of them"
            )
        expect_exposures(self.only, "--only")
        names = tuple(name for word in self.returns for name in word.split(","))
        object.__setattr__(self, "returns", expect_returns(names, "--returns"))


# Options that do not apply to a kind of target. For an endpoint most depend on what it
# takes, so they are checked once the endpoint has answered.
_OF_TEXTS = ("data", "column", "label")
_OF_SERVERS = ("probe_only", "budget")
_INAPPLICABLE: dict[TargetKind, tuple[str, ...]] = {
    TargetKind.STORE: (*_OF_TEXTS, "layers", *_OF_SERVERS),
    TargetKind.MODEL: ("model", "known", *_OF_SERVERS),
    TargetKind.DEMO: ("model", "known", *_OF_SERVERS),
    TargetKind.LEAK: (
        *_OF_TEXTS,
        "known",
        "corpus",
        "layers",
        "against_defences",
        *_OF_SERVERS,
    ),
    TargetKind.SERVER: ("known", "corpus", "layers", "label", "against_defences"),
    TargetKind.FILE: (*_OF_TEXTS, "model", "known", "corpus", "layers", *_OF_SERVERS),
    TargetKind.ENDPOINT: ("layers", "label", *_OF_SERVERS),
    TargetKind.ROUTE: ("layers", "label", *_OF_SERVERS),
}
_NEEDS_MODEL = {
    TargetKind.STORE: "name the encoder that made its vectors (a folder, owner/name on the hub, or "
    "demo)",
    TargetKind.LEAK: "name the model whose states or cache it holds",
}
_REMOTE = (TargetKind.SERVER, TargetKind.ENDPOINT, TargetKind.ROUTE)
_WORDS = {TargetKind.FILE: "endpoint", TargetKind.ROUTE: "endpoint"}


def expect_fitting(
    name: str,
    place: str,
    options: AuditOptions,
) -> TargetKind:
    """Return the kind of the target at `place`, or raise if options do not fit it.

    Nothing is opened and torch is not loaded, so a mistake shows at once.
    """
    kind = kind_of(place)
    public = without_password(name)
    if kind in (TargetKind.ATTENTION, TargetKind.BLOCK, TargetKind.UNKNOWN):
        raise InputError(
            f"there is no {public}: give a .safetensors file, a model's folder, a .gguf file, "
            "owner/name on the hub, http://host:port/v2/models/NAME, http://host:port, a saved "
            "slot or leak, a vector store (such as chroma:FOLDER) or demo"
        )
    if options.ledger is not None and kind in (TargetKind.STORE, TargetKind.MODEL):
        raise no_endpoint(kind, public)
    what = f"the {_WORDS.get(kind, kind)} {public}"
    if kind is TargetKind.DEMO:
        what = public
    refuse(options, what, *_INAPPLICABLE[kind])
    if kind in _REMOTE:
        expect_authorized(place, options.authorized)
    else:
        options.endpoint.expect_none(public)
    if kind in _NEEDS_MODEL and not options.model:
        raise InputError(f"{what} needs --model: {_NEEDS_MODEL[kind]}")
    model = options.model or ""
    if kind is TargetKind.MODEL:
        model = place
    if model.endswith(".gguf"):
        expect_file(model, "a GGUF file")
    files = {
        options.data: "a file of texts",
        options.known: "texts",
        options.corpus: "a corpus",
    }
    for file, content in files.items():
        if file is not None:
            expect_file(file, content)
    return kind


def refuse(options: AuditOptions, what: str, *names: str) -> None:
    """Raise if one of these options is set: they do not apply to the target `what`."""
    for name in names:
        if getattr(options, name) not in (None, (), False):
            raise InputError(
                f"--{name.replace('_', '-')} does not apply to {what}: leave it out"
            )


def no_endpoint(kind: TargetKind, name: str) -> InputError:
    """Return the error that --ledger does not apply to a target that is no endpoint."""
    return InputError(
        f"--ledger keeps the answers of an endpoint, and {name} is a {kind}: leave --ledger out"
    )
