"""A target opened for an audit: its parts, each of which says what is to be checked of it.

`NamedTarget` is a target not opened yet, small enough to be sent to another process. Its `open` is
the one place where a name becomes parts (keyhole/target.py says of which kind): endpoints, whose
weights and inputs are sought; models, whose texts are read back and whose predictions are flipped;
stores, leaks, servers and endpoints that take texts.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch

from keyhole.audit import defences, flips, gradients, texts
from keyhole.audit.check import Check, Part, nothing_to_try
from keyhole.audit.endpoints import EndpointPart
from keyhole.audit.options import AuditOptions, fitting, no_endpoint, refuse
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
DECODER = "decoder"  # the name of that part of an encoder and a decoder
_DRAWN = 16  # states that stand for an encoder's of sounds or images


@dataclass(frozen=True, eq=False)
class ModelPart(Part):
    """A model with texts, which are read back, and whose predictions are flipped."""

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
        target, hardened = self.target, self.target.hardened
        examples = [asdict(example) for example in target.examples]
        return {
            "weights": identity(target.loaded.model, head=True),
            "hardened model": None if hardened is None else identity(hardened.model, head=True),
            "layers": target.layers if target.layers in (None, "all") else list(target.layers),
            "precisions": list(target.precisions),
            "texts": len(target.texts),
            "examples": len(examples),
            "data": digest(list(target.texts), list(target.notes), examples),
            "corpus": digest(corpus_texts(target.corpus or SHIPPED)),
            "device": next(target.loaded.model.parameters()).device.type,
        }

    def checks(self, seed: int, *, against_defences: bool = False) -> list[Check]:
        model, states = self.target.loaded.model, self.target.encoder
        alone = states is None
        try:
            with nullcontext() if states is None else behind(model, states):
                anatomy(model)
        except InputError as error:  # a model that does not read text alone
            skip = Skip(Exposure("KH-TEXT-OTHER", part=self.name), "none", str(error))
            others = flips.checks(self.name, self.target, seed) if alone else []
            return [nothing_to_try(skip), *others]
        families = [texts.checks, *([gradients.checks, flips.checks] if alone else [])]
        families += [defences.model_checks] if against_defences and alone else []
        return [check for family in families for check in family(self.name, self.target, seed)]


def _models(subject: TextTarget) -> tuple[ModelPart, ...]:
    """The model; of an encoder and a decoder the decoder besides, behind states of the encoder.

    These are its states of the first text, or drawn ones where it reads something else than text:
    whatever they are, an attacker who has them reads the decoder's text.
    """
    whole, model = ModelPart("", subject), subject.loaded.model
    if not is_pair(model):
        return (whole,)
    encoder = encoder_of(model)
    try:
        parts = anatomy(model)
        ids = subject.loaded.tokenizer(subject.texts[0])["input_ids"][: parts.max_length]
        with torch.no_grad():
            given = encoder(input_ids=torch.tensor([ids], device=parts.device))
        states = given.last_hidden_state[0]
    except InputError:
        width = int(cast("Any", encoder).config.hidden_size)
        states = torch.randn(_DRAWN, width, generator=torch.Generator().manual_seed(0))
    loaded = replace(subject.loaded, model=decoder_of(model))
    behind_it = replace(subject, loaded=loaded, encoder=states, examples=(), hardened=None)
    return whole, ModelPart(DECODER, behind_it)


@dataclass(frozen=True)
class Target:
    """What a target consists of; `skips` are parts that could not be opened."""

    name: str
    parts: tuple[Part, ...] = ()
    skips: tuple[Skip, ...] = ()

    @property
    def size(self) -> int:
        return max((part.size for part in self.parts), default=0)

    @property
    def identity(self) -> str:
        """What two targets share only if they are the same."""
        return "; ".join(part.identity for part in self.parts)

    @property
    def endpoints(self) -> dict[str, Oracle]:
        return {part.name: part.oracle for part in self.parts if isinstance(part, EndpointPart)}

    @property
    def models(self) -> dict[str, TextTarget]:
        return {part.name: part.target for part in self.parts if isinstance(part, ModelPart)}

    @property
    def store(self) -> StoreTarget | None:
        return next((part for part in self.parts if isinstance(part, StoreTarget)), None)

    @property
    def is_asked(self) -> bool:
        """Is it a server, whose answers are worth keeping?"""
        return any(
            isinstance(part, ServerTarget)
            or (isinstance(part, EndpointPart) and getattr(part.oracle, "may_change", False))
            for part in self.parts
        )

    @contextmanager
    def ready(
        self, ledger: str | Path | None = None, notice: Notice = ignored
    ) -> Generator[Target]:
        """The same with its endpoints counted, and remembered where there is a ledger."""
        servers = [part for part in self.parts if isinstance(part, ServerTarget)]
        if ledger is not None and not self.endpoints and not servers:
            kind = TargetKind.STORE if self.store else TargetKind.MODEL
            raise no_endpoint(kind, self.name)
        with session(self.endpoints, ledger=ledger, notice=notice) as asked:

            def ready(part: Part) -> Part:
                if isinstance(part, ServerTarget):
                    return replace(part, ledger=ledger)
                if isinstance(part, EndpointPart):
                    return replace(part, oracle=asked[part.name])
                return part

            yield replace(self, parts=tuple(map(ready, self.parts)))


def target_of(
    target: Oracle | Mapping[str, Oracle] | TextTarget | StoreTarget | Target, name: str = ""
) -> Target:
    """An oracle, several by name, or a model with its texts, as a target without a file."""
    if isinstance(target, Target):
        return target
    if isinstance(target, StoreTarget):
        return Target(name or target.name, (target,))
    if isinstance(target, TextTarget):
        return Target(name or target.loaded.name, _models(target))
    endpoints = target if isinstance(target, Mapping) else {"": target}
    for each in endpoints.values():
        if not callable(each) or not hasattr(each, "dim"):
            raise InputError(
                "expected a target of keyhole audit, a model or an oracle (a callable with .dim), "
                f"got {type(each).__name__}"
            )
    return Target(name, tuple(EndpointPart(*each) for each in endpoints.items()))


@dataclass(frozen=True)
class NamedTarget:
    """A target by its name and options: any process can open it.

    `folder` is where a relative name begins; findings name the target as it was given.
    """

    name: str = field(repr=False)  # an address may hold a password
    options: AuditOptions = field(default_factory=AuditOptions)
    folder: str | None = None

    @property
    def local_only(self) -> bool:
        """Its ledger of paid answers, and the secrets of an address, do not leave this machine."""
        return self.options.ledger is not None or "://" in self.name

    def anywhere(self) -> NamedTarget:
        """The same for a process that runs in another folder."""
        folder = self.folder or str(Path.cwd())
        return replace(self, folder=folder, options=absolute(self.options, folder))

    @property
    def place(self) -> str:
        """The target as any process of this machine finds it."""
        if "://" in self.name or self.folder is None:
            return self.name
        for kind, mark, path in (("", "", self.name), self.name.partition(":")):
            if path and exists(Path(self.folder, path)):
                return f"{kind}{mark}{Path(self.folder, path)}"
        return self.name

    def on(self, worker: int) -> NamedTarget:
        """The same on the device of the worker of that number."""
        device = device_of(self.options.device, worker)
        return replace(self, options=replace(self.options, device=device))

    def fingerprint(self) -> str:
        """What tells that a target's files were not touched, without reading all of them."""
        options = self.options
        named = (options.model, options.data, options.known, options.corpus)
        files = [*self._own_files(), *(file for name in named if name for file in _files(name))]
        times = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
        return digest(self.name, repr(self), times)

    @property
    def size(self) -> int:
        """The bytes of its files: the best guess at what it costs before anything is known."""
        return sum(file.stat().st_size for file in self._own_files())

    def _own_files(self) -> list[Path]:
        if "://" in self.name:
            return []
        return _files(self.place) or _files(self.place.partition(":")[2])

    def open(self) -> Target:
        options, public = self.options, without_password(self.name)
        expect_device(options.device)
        kind = fitting(self.name, self.place, options)
        if kind is TargetKind.SERVER:
            return self._server(f"the server {public}")
        if kind in (TargetKind.ENDPOINT, TargetKind.ROUTE):
            return self._endpoint(f"the endpoint {public}")
        if kind is TargetKind.LEAK:
            return self._leak()
        if kind is TargetKind.STORE:
            return self._store()
        if kind is TargetKind.MODEL:
            return self._model()
        if kind is TargetKind.DEMO:
            return self._demo()
        oracle = open_endpoint(self.place)
        return Target(describe(self.name, oracle), (EndpointPart("", oracle),))

    def _subject(
        self, loaded: Loaded, examples: Sequence[Example] = (), about: str = "",
        hardened: Loaded | None = None,
    ) -> TextTarget:  # fmt: skip
        """A model with the texts of --data, which a classifier's examples come from, too.

        Without --data: with the texts that ship, and the given examples.
        """
        options, texts, notes = self.options, self._texts(), demo.NOTES
        if options.data is not None:
            examples, about, notes = (), "", ()
            if head_of(loaded.model) == "classification":
                examples = read_examples(
                    options.data, text=options.column or (), label=options.label or "label",
                    names=class_names(loaded.model.config), limit=options.flips,
                    labelled=options.label is not None,
                )  # fmt: skip
        return TextTarget(
            loaded, texts, options.layers, examples=examples, hardened=hardened, about=about,
            notes=notes, corpus=corpus_file(options.corpus),
        )  # fmt: skip

    def _texts(self) -> list[str]:
        options = self.options
        if options.data is None:
            return list(demo.TEXTS)
        return read_texts(options.data, options.column, options.texts or TEXTS_OF_A_MODEL)

    @property
    def _loading(self) -> dict[str, Any]:
        """How every model is opened."""
        return {"device": self.options.device, "allow_pickle": self.options.allow_pickle}

    def _model(self) -> Target:
        task = task_of(self.place)
        head = "base" if task == "choice" else task
        loaded = load_model(self.place, task=head, **self._loading)
        return Target(self.name, _models(self._subject(replace(loaded, name=self.name))))

    def _demo(self) -> Target:
        """The planted endpoints, and the classifier that ships with its hardened version."""
        name = "the planted endpoints and the classifier that ship with Keyhole"
        endpoints = tuple(EndpointPart(*each) for each in demo_endpoints().items())
        device = self.options.device
        try:
            loaded = demo.load_demo("classification", device)
        except MissingExtra as missing:
            exposure = Exposure(NOT_CHECKED, "demo")
            skip = Skip(exposure, "–", str(missing), unchecked=True, extra=missing.extra)
            return Target(name, endpoints, (skip,))
        hardened = demo.has_hardened() and demo.load_demo("classification", device, hardened=True)
        subject = self._subject(loaded, demo.EXAMPLES, demo.ABOUT, hardened or None)
        return Target(name, (*endpoints, ModelPart(loaded.name, subject)))

    def _server(self, what: str) -> Target:
        """A server of a language model; with the weights of --model its answers are read."""
        loaded = self._weights()
        server = Server.at(self.place, self.options.endpoint.only_connecting(what))
        reason = "give --model to read it back"
        skips = () if loaded else (Skip(Exposure(NOT_CHECKED, "routes"), "none", reason),)
        name = f"{server.kind or 'a server'} at {server.url}"
        options = self.options
        part = ServerTarget(
            name, server, loaded, self._texts(), options.probe_only, options.budget, options.only
        )
        return Target(name, (part,), skips)

    def _endpoint(self, what: str) -> Target:
        """An endpoint that takes vectors, or one that takes texts."""
        options, public = self.options, without_password(self.name)
        try:
            oracle = open_endpoint(
                self.place, options=options.endpoint, authorized=options.authorized
            )
        except TakesTexts as end:
            base, model = server_and_model(self.place)
            refuse(options, what, "known", "corpus")
            part = AnswersTarget(base, model, options.endpoint, self._weights(), self._texts())
            return Target(f"{model}, which takes {end.what} ({public})", (part,))
        refuse(options, what, "model", "known", "corpus", "data")
        return Target(describe(self.name, oracle), (EndpointPart("", oracle, observed=True),))

    def _weights(self) -> Loaded | None:
        """The model of --model, with its head; None where none is given."""
        name = self.options.model
        if name is None:
            return None
        task = task_of(demo.folder_of(name))
        return demo.open_model(name, task=task, **self._loading)

    def _leak(self) -> Target:
        """A saved slot or leak, read with the weights of --model."""
        model = cast("str", self.options.model)
        loaded, opened = open_leaks(model, self.place, **self._loading)
        leaks = [
            replace(leak, name=f"{Path(self.name).name}{leak.name.removeprefix(self.place)}")
            for leak in opened
        ]
        return Target(self.name, (LeakTarget(self.name, loaded, leaks),))

    def _store(self) -> Target:
        options = self.options
        if address := address_of(self.place):
            expect_authorized(address, options.authorized)
        corpus = corpus_file(options.corpus)
        method = CountedReader() if corpus is None else CountedReader(corpus)
        known = [] if options.known is None else read_texts(options.known)
        encoder = cast("str", options.model)
        with open_store(self.place, known, shown=self.name) as store:
            subject = StoreTarget.of(
                store, demo.open_model(encoder, **self._loading),
                texts=options.texts or TEXTS_OF_A_STORE, known=known, seed=options.seed,
            )  # fmt: skip
        subject = replace(subject, method=quick(method, subject.loaded))
        return Target(f"{store.name}, read with {subject.loaded.name}", (subject,))


def open_target(name: str, options: AuditOptions | None = None, **more: Any) -> Target:
    """What `name` stands for; options also as keywords."""
    return NamedTarget(name, AuditOptions(**more) if options is None else options).open()


def absolute(options: AuditOptions, folder: str | Path) -> AuditOptions:
    """The options with files by their whole names; a name on the hub stays as it is."""

    def found(name: str) -> str:
        return str(Path(folder, name)) if exists(Path(folder, name)) else name

    named = {name: getattr(options, name) for name in ("model", "known", "corpus", "data")}
    return replace(options, **{name: found(file) for name, file in named.items() if file})


def _files(name: str) -> list[Path]:
    path = Path(name)
    if not name or not exists(path):
        return []
    return sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]


def corpus_file(file: str | None) -> Path | None:
    """The file of a corpus, as other processes find it."""
    if file is None:
        return None
    expect_file(file, "a corpus")
    return Path(file).absolute()
