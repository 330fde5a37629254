"""Targets of an audit: a `Target` is open and consists of parts, which make its checks.

The parts are endpoints (endpoints.py), models with texts (`ModelPart`), vector stores
(stores.py), leaks (texts.py), servers of language models and endpoints that take texts
(servers.py).

A `NamedTarget` is a name with options, small enough to be sent to another process. Its
`open` is the one place where a name becomes a target; keyhole/target.py tells the kind
of a name.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch

from keyhole.audit import defences, flips, gradients, texts
from keyhole.audit.check import Check, Part, skipped_check
from keyhole.audit.endpoints import EndpointPart
from keyhole.audit.options import AuditOptions, expect_fitting, no_endpoint, refuse
from keyhole.audit.servers import AnswersTarget, ServerTarget
from keyhole.audit.stores import StoreTarget, quick
from keyhole.audit.texts import LeakTarget, TextTarget
from keyhole.core import Skip
from keyhole.core.endpoint import expect_authorized, without_password
from keyhole.core.errors import InputError, MissingExtra
from keyhole.core.exposure import NOT_CHECKED, Exposure
from keyhole.core.files import exists, expect_file
from keyhole.core.journal import digest
from keyhole.core.machine import device_of, expect_device, largest_matrix
from keyhole.data import Example, read_examples, read_texts
from keyhole.endpoints import demo_endpoints, describe, open_endpoint, server_and_model
from keyhole.models import Loaded, demo
from keyhole.models.anatomy import anatomy
from keyhole.models.loading import class_names, head_of, identity, load_model, task_of
from keyhole.models.pairs import behind, decoder_of, encoder_of, is_pair
from keyhole.oracle import Oracle
from keyhole.oracle.ledger import Notice, ignored, session
from keyhole.oracle.open_inference import TakesTexts
from keyhole.oracle.probe import Server
from keyhole.recover.embeddings.counts import SHIPPED, corpus_texts
from keyhole.recover.embeddings.reader import CountedReader
from keyhole.recover.run import open_leaks
from keyhole.stores import address_of, open_store
from keyhole.target import TargetKind

TEXTS_OF_A_MODEL = 3
TEXTS_OF_A_STORE = 20
DECODER = "decoder"  # the name of the second part of an encoder-decoder model
_RANDOM_STATES = 16  # that stand for those of an encoder of sounds or images
Auditable = Oracle | Mapping[str, Oracle] | TextTarget | StoreTarget


@dataclass(frozen=True, eq=False)
class ModelPart(Part):
    """A model with texts: the texts are read back, and its predictions are flipped."""

    name: str
    target: TextTarget

    @property
    def identity(self) -> str:
        return identity(self.target.loaded.model, head=True)

    @property
    def size(self) -> int:
        return largest_matrix(self.target.loaded.model)

    @property
    def settings(self) -> dict[str, Any]:
        target = self.target
        hardened = filter(None, (target.hardened,))
        examples = [asdict(example) for example in target.examples]
        return {
            "hardened model": [identity(each.model, head=True) for each in hardened],
            "layers": str(target.layers),
            "precisions": list(target.precisions),
            "texts": len(target.texts),
            "examples": len(examples),
            "data": digest(list(target.texts), list(target.notes), examples),
            "corpus": digest(corpus_texts(target.corpus or SHIPPED)),
            "device": next(target.loaded.model.parameters()).device.type,
        }

    def checks(self, options: AuditOptions) -> list[Check]:
        model = self.target.loaded.model
        states = self.target.encoder
        checks: list[Check] = []
        families = [texts.checks]
        try:
            if states is None:
                anatomy(model)
                families.append(gradients.checks)
            else:
                with behind(model, states):
                    anatomy(model)
        except InputError as error:  # the model reads more than text
            exposure = Exposure("KH-TEXT-OTHER", part=self.name)
            checks.append(skipped_check(Skip(exposure, "none", str(error))))
            families.clear()
        if states is None:
            families.append(flips.checks)
            if options.against_defences and not checks:
                families.append(defences.model_checks)
        for family in families:
            checks += family(self.name, self.target, options.seed)
        return checks


def _model_parts(subject: TextTarget) -> tuple[ModelPart, ...]:
    """Return a part for the model, and for an encoder-decoder model one for the decoder.

    The decoder is run with the encoder's states of the first text, or with random
    states if the encoder does not read text: the attacker has them, whatever they are.
    """
    part = ModelPart("", subject)
    model = subject.loaded.model
    if not is_pair(model):
        return (part,)
    encoder: Any = encoder_of(model)
    try:
        parts = anatomy(model)
        ids = subject.loaded.tokenizer(subject.texts[0])["input_ids"]
        given = torch.tensor([ids[: parts.max_length]], device=parts.device)
        with torch.no_grad():
            states = encoder(input_ids=given).last_hidden_state[0]
    except InputError:
        width = int(encoder.config.hidden_size)
        stream = torch.Generator().manual_seed(0)
        states = torch.randn(_RANDOM_STATES, width, generator=stream)
    loaded = replace(subject.loaded, model=decoder_of(model))
    decoder = replace(
        subject, loaded=loaded, encoder=states, examples=(), hardened=None
    )
    return part, ModelPart(DECODER, decoder)


@dataclass(frozen=True)
class Target:
    """An open target: its parts, and as `skips` those that could not be opened."""

    name: str
    parts: tuple[Part, ...] = ()
    skips: tuple[Skip, ...] = ()

    @property
    def size(self) -> int:
        return max((part.size for part in self.parts), default=0)

    @property
    def identity(self) -> str:
        """A string that two targets share only if they are the same."""
        return "; ".join(part.identity for part in self.parts)

    @property
    def endpoints(self) -> dict[str, Oracle]:
        return {
            part.name: part.oracle
            for part in self.parts
            if isinstance(part, EndpointPart)
        }

    @property
    def models(self) -> dict[str, TextTarget]:
        return {
            part.name: part.target for part in self.parts if isinstance(part, ModelPart)
        }

    @property
    def store(self) -> StoreTarget | None:
        stores = (part for part in self.parts if isinstance(part, StoreTarget))
        return next(stores, None)

    @property
    def servers(self) -> list[ServerTarget]:
        return [part for part in self.parts if isinstance(part, ServerTarget)]

    @property
    def has_server(self) -> bool:
        """Whether a part is a server, whose answers are worth keeping."""
        oracles = self.endpoints.values()
        changing = (getattr(oracle, "may_change", False) for oracle in oracles)
        return bool(self.servers) or any(changing)

    @contextmanager
    def ready(
        self, ledger: str | Path | None = None, notice: Notice = ignored
    ) -> Generator[Target]:
        """Yield the target with its queries counted, and kept in the ledger if there is one."""
        if ledger is not None and not self.endpoints and not self.servers:
            kind = TargetKind.STORE if self.store else TargetKind.MODEL
            raise no_endpoint(kind, self.name)
        with session(self.endpoints, ledger=ledger, notice=notice) as wrapped:

            def ready(part: Part) -> Part:
                if isinstance(part, ServerTarget):
                    return replace(part, ledger=ledger)
                if isinstance(part, EndpointPart):
                    return replace(part, oracle=wrapped[part.name])
                return part

            yield replace(self, parts=tuple(map(ready, self.parts)))


def target_of(target: Auditable | Target) -> Target:
    """Return as a target what has no name to open: an oracle, several, or a model with texts."""
    if isinstance(target, Target):
        return target
    if isinstance(target, StoreTarget):
        return Target(target.name, (target,))
    if isinstance(target, TextTarget):
        return Target(target.loaded.name, _model_parts(target))
    if not isinstance(target, Mapping):
        target = {"": target}
    for each in target.values():
        if not callable(each) or not hasattr(each, "dim"):
            raise InputError(
                "expected a target of keyhole audit, a model or an oracle (a callable with .dim), "
                f"got {type(each).__name__}"
            )
    return Target("", tuple(EndpointPart(*each) for each in target.items()))


@dataclass(frozen=True)
class NamedTarget:
    """A target by its name and options, which any process can open.

    A relative name starts at `folder`; findings show the name as it was given.
    """

    name: str = field(repr=False)  # an address may hold a password
    options: AuditOptions = field(default_factory=AuditOptions)
    folder: str | None = None

    @property
    def local_only(self) -> bool:
        """Whether it has a ledger, or an address with secrets, which stay on this machine."""
        return self.options.ledger is not None or "://" in self.name

    def anywhere(self) -> NamedTarget:
        """Return the same target for a process that runs in another folder."""
        folder = self.folder or str(Path.cwd())
        return replace(self, folder=folder, options=absolute(self.options, folder))

    @property
    def place(self) -> str:
        """The name as any process of this machine can open it."""
        if "://" in self.name or self.folder is None:
            return self.name
        whole = Path(self.folder, self.name)
        if exists(whole):
            return str(whole)
        kind, _, path = self.name.partition(":")
        if path and exists(Path(self.folder, path)):
            return f"{kind}:{Path(self.folder, path)}"
        return self.name

    def on(self, worker: int) -> NamedTarget:
        """Return the same target on the device of a worker, given by its number."""
        device = device_of(self.options.device, worker)
        return replace(self, options=replace(self.options, device=device))

    def fingerprint(self) -> str:
        """Return a digest that changes with the target's files, from their sizes and times."""
        files: list[Path] = []
        if "://" not in self.name:
            files = _files(self.place) or _files(self.place.partition(":")[2])
        for option in _FILE_OPTIONS:
            files += _files(getattr(self.options, option))
        times = [
            (str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files
        ]
        return digest(self.name, repr(self), times)

    def open(self) -> Target:
        options = self.options
        public = without_password(self.name)
        expect_device(options.device)
        match expect_fitting(self.name, self.place, options):
            case TargetKind.SERVER:
                return self._open_server(f"the server {public}")
            case TargetKind.ENDPOINT | TargetKind.ROUTE:
                return self._open_remote_endpoint(public)
            case TargetKind.LEAK:
                return self._open_leak()
            case TargetKind.STORE:
                return self._open_store()
            case TargetKind.MODEL:
                return self._open_model()
            case TargetKind.DEMO:
                return self._open_demo()
            case _:
                oracle = open_endpoint(self.place)
                return Target(describe(self.name, oracle), (EndpointPart("", oracle),))

    def _with_texts(
        self,
        loaded: Loaded,
        examples: Sequence[Example] = (),
        about: str = "",
        hardened: Loaded | None = None,
    ) -> TextTarget:
        """Return a model with the texts of --data, also as examples if it is a classifier.

        Without --data: with the texts that ship with Keyhole, and the given examples.
        """
        options = self.options
        texts = self._texts()
        notes = demo.NOTES
        if options.data is not None:
            examples = ()
            about = ""
            notes = ()
            if head_of(loaded.model) == "classification":
                examples = read_examples(
                    options.data,
                    text=options.column or (),
                    label=options.label or "label",
                    names=class_names(loaded.model.config),
                    limit=options.flips,
                    labelled=options.label is not None,
                )
        return TextTarget(
            loaded,
            texts,
            options.layers,
            examples=examples,
            hardened=hardened,
            about=about,
            notes=notes,
            corpus=corpus_file(options.corpus),
        )

    def _texts(self) -> list[str]:
        options = self.options
        count = options.texts or TEXTS_OF_A_MODEL
        if options.data is None:
            return list(demo.TEXTS[:count])
        return read_texts(options.data, options.column, count)

    @property
    def _loading(self) -> dict[str, Any]:
        """The options for loading any model."""
        return {
            "device": self.options.device,
            "allow_pickle": self.options.allow_pickle,
        }

    def _open_model(self) -> Target:
        task = task_of(self.place)
        if task == "choice":
            task = "base"
        loaded = load_model(self.place, task=task, **self._loading)
        loaded = replace(loaded, name=self.name)
        return Target(self.name, _model_parts(self._with_texts(loaded)))

    def _open_demo(self) -> Target:
        """Open the planted endpoints, and the classifier that ships with a hardened version."""
        name = "the planted endpoints and the classifier that ship with Keyhole"
        endpoints = tuple(EndpointPart(*each) for each in demo_endpoints().items())
        device = self.options.device
        try:
            loaded = demo.load_demo("classification", device)
        except MissingExtra as missing:
            exposure = Exposure(NOT_CHECKED, "demo")
            skip = Skip(
                exposure, "–", str(missing), unchecked=True, extra=missing.extra
            )
            return Target(name, endpoints, (skip,))
        hardened = demo.load_demo("classification", device, hardened=True)
        examples = demo.EXAMPLES[: self.options.flips]
        subject = self._with_texts(loaded, examples, demo.ABOUT, hardened)
        return Target(name, (*endpoints, ModelPart(loaded.name, subject)))

    def _open_server(self, what: str) -> Target:
        """Open a server of a language model; its answers are read with the weights of --model."""
        options = self.options
        loaded = self._given_model()
        server = Server.at(self.place, options.endpoint.only_connecting(what))
        skips: list[Skip] = []
        if loaded is None:
            reason = "give --model to read it back"
            skips.append(Skip(Exposure(NOT_CHECKED, "routes"), "none", reason))
        name = f"{server.kind or 'a server'} at {server.url}"
        part = ServerTarget(
            name,
            server,
            loaded,
            self._texts(),
            options.probe_only,
            options.budget,
            options.only,
        )
        return Target(name, (part,), tuple(skips))

    def _open_remote_endpoint(self, public: str) -> Target:
        """Open an endpoint that takes vectors, or one that takes texts."""
        options = self.options
        what = f"the endpoint {public}"
        try:
            oracle = open_endpoint(
                self.place, options=options.endpoint, authorized=options.authorized
            )
        except TakesTexts as end:
            base, model = server_and_model(self.place)
            refuse(options, what, "known", "corpus", "against_defences")
            part = AnswersTarget(
                base, model, options.endpoint, self._given_model(), self._texts()
            )
            return Target(f"{model}, which takes {end.what} ({public})", (part,))
        refuse(options, what, "model", "known", "corpus", "data", "column")
        return Target(
            describe(self.name, oracle), (EndpointPart("", oracle, observed=True),)
        )

    def _given_model(self) -> Loaded | None:
        """Load the model of --model with its head; None if none is given."""
        name = self.options.model
        if name is None:
            return None
        return demo.open_model(name, None, **self._loading)

    def _open_leak(self) -> Target:
        """Open a saved slot or leak, to be read with the weights of --model."""
        model = cast("str", self.options.model)
        loaded, opened = open_leaks(model, self.place, **self._loading)
        file = Path(self.name).name
        leaks = [
            replace(leak, name=f"{file}{leak.name.removeprefix(self.place)}")
            for leak in opened
        ]
        return Target(self.name, (LeakTarget(self.name, loaded, leaks),))

    def _open_store(self) -> Target:
        """Open a vector store, to be read with the encoder of --model."""
        options = self.options
        if address := address_of(self.place):
            expect_authorized(address, options.authorized)
        known: list[str] = []
        if options.known is not None:
            known = read_texts(options.known)
        encoder = cast("str", options.model)
        with open_store(self.place, known, shown=self.name) as store:
            subject = StoreTarget.of(
                store,
                demo.open_model(encoder, **self._loading),
                texts=options.texts or TEXTS_OF_A_STORE,
                known=known,
                seed=options.seed,
            )
        method = CountedReader(corpus_file(options.corpus) or SHIPPED)
        subject = replace(subject, method=quick(method, subject.loaded))
        return Target(f"{store.name}, read with {subject.loaded.name}", (subject,))


def open_target(name: str, options: AuditOptions | None = None, **more: Any) -> Target:
    """Open the target of this name; options may also be given as keywords."""
    return NamedTarget(name, options or AuditOptions(**more)).open()


# A model may also be a name on the hub.
_FILE_OPTIONS = ("model", "data", "known", "corpus")


def absolute(options: AuditOptions, folder: str | Path) -> AuditOptions:
    """Return the options with absolute paths of the files that exist in `folder`."""
    changed: dict[str, Any] = {}
    for option in _FILE_OPTIONS:
        path = Path(folder, getattr(options, option) or "")
        if path != Path(folder) and exists(path):
            changed[option] = str(path)
    return replace(options, **changed)


def _files(name: str | None) -> list[Path]:
    """Return a file, or all files of a folder; none if there is nothing of this name."""
    path = Path(name or "")
    if not name or not exists(path):
        return []
    if path.is_dir():
        return sorted(file for file in path.rglob("*") if file.is_file())
    return [path]


def corpus_file(file: str | None) -> Path | None:
    """Return the absolute path of a corpus, which must exist."""
    if file is None:
        return None
    expect_file(file, "a corpus")
    return Path(file).absolute()
