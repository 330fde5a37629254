"""What TARGET means: a file, an address, a model, a store or `demo`, opened for the audit.

An endpoint is an oracle whose weights and inputs are sought, a model one whose texts are read back
and whose predictions are flipped, a store one whose embeddings are read back. `open_target` is the
one place where a name becomes any of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from keyhole.audit.answers import AnswersTarget
from keyhole.audit.encoders import likeliest
from keyhole.audit.given import Data, Stored, corpus_file
from keyhole.audit.layers import Layers
from keyhole.audit.leaks import LeakTarget
from keyhole.audit.servers import ServerTarget
from keyhole.audit.stores import StoreTarget
from keyhole.audit.texts import TextTarget
from keyhole.core import Skip
from keyhole.core.endpoint import EndpointOptions
from keyhole.core.errors import InputError, MissingExtra
from keyhole.core.exposure import NOT_CHECKED, Exposure
from keyhole.core.files import exists
from keyhole.core.machine import largest_matrix
from keyhole.data import read_texts
from keyhole.models import Loaded, demo
from keyhole.models.loading import load_model, names_model, task_of
from keyhole.oracle import Oracle, identity_of
from keyhole.oracle.connection import expect_authorized, names_address, without_password
from keyhole.oracle.open_inference import TakesTexts
from keyhole.oracle.probe import Server, names_server
from keyhole.oracle.target import DEMO, describe, open_surfaces, parts_of
from keyhole.recover.files.sources import names_leak
from keyhole.recover.run import open_leaks
from keyhole.stores import Store, names_store, open_store


@dataclass(frozen=True)
class Target:
    """What a target consists of, by name; one endpoint alone needs none."""

    name: str
    surfaces: Mapping[str, Oracle] = field(default_factory=dict[str, Oracle])
    models: Mapping[str, TextTarget] = field(default_factory=dict[str, TextTarget])
    stores: Mapping[str, StoreTarget] = field(default_factory=dict[str, StoreTarget])
    leaks: Mapping[str, LeakTarget] = field(default_factory=dict[str, LeakTarget])
    servers: Mapping[str, ServerTarget] = field(default_factory=dict[str, ServerTarget])
    answers: Mapping[str, AnswersTarget] = field(default_factory=dict[str, AnswersTarget])
    skips: tuple[Skip, ...] = ()  # parts that could not be opened

    @property
    def largest_matrix(self) -> int:
        """How many numbers the largest matrix has that attacks on it multiply by."""
        parts = (*self.models.values(), *self.stores.values(), *self.leaks.values())
        answering = (*self.servers.values(), *self.answers.values())
        loaded = [part.loaded for part in parts]
        loaded += [part.loaded for part in answering if part.loaded is not None]
        sizes = [largest_matrix(model.model) for model in loaded]
        return max([*sizes, *(oracle.dim**2 for oracle in self.surfaces.values())], default=0)

    @property
    def identity(self) -> str:
        """A name that two targets share only if they are the same."""
        named = [identity_of(oracle) for oracle in self.surfaces.values()]
        loaded = [model.loaded for model in self.models.values()]
        named += [f"{model.name} {model.identity}" for model in loaded]
        named += [store.identity for store in self.stores.values()]
        parts = (*self.leaks.values(), *self.servers.values(), *self.answers.values())
        named += [part.identity for part in parts]
        return "; ".join(named)


def target_of(target: Oracle | Mapping[str, Oracle] | TextTarget | StoreTarget | Target) -> Target:
    """An oracle, several by name, or a model with its texts, as a target without a file."""
    if isinstance(target, Target):
        return target
    if isinstance(target, StoreTarget):
        return Target(target.name, stores={target.name: target})
    if isinstance(target, TextTarget):
        return Target(target.loaded.name, models={"": target})
    surfaces = target if isinstance(target, Mapping) else {"": target}
    return Target("", surfaces=surfaces)


def open_target(
    name: str,
    *,
    data: Data | None = None,
    layers: Layers | None = None,
    device: str = "cpu",
    stored: Stored | None = None,
    authorized: bool = False,
    endpoint: EndpointOptions | None = None,
) -> Target:
    """What `name` stands for; `data` and `layers` say what a model is tried with.

    `authorized`: a server that is not this machine may be asked; `endpoint`: how.
    """
    endpoint = endpoint or EndpointOptions()
    if names_server(name):
        expect_authorized(name, authorized)
        shown = without_password(name)
        return _server(
            name, data, stored or Stored(), device, endpoint.only_connecting(f"the server {shown}")
        )
    if names_address(name) and not names_store(name):
        return _endpoint(name, data, stored or Stored(), device, endpoint, authorized)
    endpoint.expect_none(without_password(name))
    if names_address(name):  # a server of embeddings
        expect_authorized(name, authorized)
    if names_leak(name):
        return _leak(name, stored or Stored(), device)
    if names_store(name):
        if data is not None or layers is not None:
            raise InputError(
                f"expected --data and --layers with a model, got the vector store {name}"
            )
        return _store(name, stored or Stored(), device)
    corpus = None
    if stored is not None:
        stored.expect_none(name, corpus=name == DEMO or names_model(name))
        corpus = None if stored.corpus is None else corpus_file(stored.corpus)
    if names_model(name):
        return _model(name, data, layers, device, corpus)
    if name == DEMO:
        return _demo(data, layers, device, corpus)
    if data is not None:
        raise InputError(f"expected --data with a model, got the endpoint {name}")
    if "://" not in name and not exists(name):
        raise InputError(
            "expected a .safetensors file, a model's folder, a .gguf file, owner/name on the hub, "
            "http://host:port/v2/models/NAME, http://host:port, a saved slot or leak, a vector "
            "store (such as chroma:FOLDER) or demo, got "
            f"{name}: no such file or folder"
        )
    surfaces = open_surfaces(name)
    return Target(describe(name, surfaces), surfaces)


def _model(
    name: str, data: Data | None, layers: Layers | None, device: str, corpus: Path | None
) -> Target:
    task = task_of(name)
    loaded = load_model(name, task="base" if task == "choice" else task, device=device)
    # Without data: the texts that ship. Their classes are the shipped classifier's alone.
    texts, examples = (list(demo.TEXTS), []) if data is None else data.read(loaded)
    notes = demo.NOTES if data is None else ()
    subject = TextTarget(loaded, texts, layers, examples=examples, notes=notes, corpus=corpus)
    return Target(name, models={loaded.name: subject})


def _server(
    name: str, data: Data | None, stored: Stored, device: str, endpoint: EndpointOptions
) -> Target:
    """A server of a language model; with the weights of --model its answers are read."""
    loaded = _weights(stored, f"the server {without_password(name)}", device)
    texts = _texts(data)
    server = Server.at(name, endpoint)
    skips = (
        ()
        if loaded
        else (Skip(Exposure(NOT_CHECKED, "routes"), "none", "give --model to read it back"),)
    )
    words = f"{server.kind or 'a server'} at {server.url}"
    return Target(words, servers={words: ServerTarget(server, loaded, texts)}, skips=skips)


def _weights(stored: Stored, what: str, device: str) -> Loaded | None:
    """The model of --model, with its head; None where none is given."""
    model = _one_model(stored, what)
    if model is None:
        return None
    return demo.open_model(model, task=task_of(demo.folder_of(model)), device=device)


def _texts(data: Data | None) -> list[str]:
    """What is sent to a server."""
    if data is None:
        return list(demo.TEXTS)
    return read_texts(data.file, data.column, data.texts)


def _endpoint(
    name: str, data: Data | None, stored: Stored, device: str, options: EndpointOptions,
    authorized: bool,
) -> Target:  # fmt: skip
    """An endpoint that takes vectors, or one that takes texts."""
    public = without_password(name)
    try:
        surfaces = open_surfaces(name, options, authorized=authorized)
    except TakesTexts as end:
        loaded = _weights(stored, f"the endpoint {public}", device)
        base, model = parts_of(name)
        words = f"{model}, which takes {end.what} ({public})"
        return Target(
            words, answers={"": AnswersTarget(base, model, options, loaded, _texts(data))}
        )
    stored.expect_none(public, corpus=False)
    if data is not None:
        raise InputError(f"expected --data with a model, got the endpoint {public}")
    return Target(describe(name, surfaces), surfaces)


def _leak(name: str, stored: Stored, device: str) -> Target:
    """A saved slot or leak, read with the weights of --model."""
    model = _one_model(stored, f"the leak {name}")
    if model is None:
        raise InputError(
            f"expected --model with {name}, got none: name the model whose states or cache it holds"
        )
    loaded, leaks = open_leaks(model, name, device=device)
    return Target(name, leaks={name: LeakTarget(name, loaded, leaks)})


def _one_model(stored: Stored, what: str) -> str | None:
    replace(stored, model=None).expect_none(what, corpus=False)
    models = [stored.model] if isinstance(stored.model, str) else list(stored.model or ())
    if len(models) > 1:
        raise InputError(f"expected one --model for {what}, got {len(models)}")
    return models[0] if models else None


def _store(name: str, stored: Stored, device: str) -> Target:
    if not stored.model:
        raise InputError(
            f"expected --model with the vector store {name}, got none: name the encoder that made "
            "its vectors (a folder, owner/name on the hub, or demo)"
        )
    method = stored.method()
    known = [] if stored.known is None else read_texts(stored.known)
    encoders = [stored.model] if isinstance(stored.model, str) else list(stored.model)
    with open_store(name, known) as store:
        subject = likeliest(_candidates(store, encoders, stored, known, device))
    subject = replace(subject, method=method)
    return Target(f"{store.name}, read with {subject.loaded.name}", stores={store.name: subject})


def _candidates(
    store: Store, encoders: Sequence[str], stored: Stored, known: Sequence[str], device: str
) -> list[StoreTarget]:
    """The store as each encoder would have made it; one of another width is no candidate."""
    made: list[StoreTarget] = []
    refused: list[InputError] = []
    for encoder in encoders:
        loaded = demo.open_model(encoder, device=device)
        try:
            subject = StoreTarget.of(
                store, loaded, texts=stored.texts, known=known, seed=stored.seed
            )
        except InputError as error:
            refused.append(error)
            continue
        name = str(Path(encoder).absolute()) if exists(encoder) else encoder
        made.append(replace(subject, encoder=name))
    if not made:
        raise refused[0]
    return made


def _demo(data: Data | None, layers: Layers | None, device: str, corpus: Path | None) -> Target:
    """The planted endpoints, and the classifier that ships beside its hardened version."""
    surfaces = open_surfaces(DEMO)
    name = describe(DEMO, surfaces)
    try:
        loaded = demo.load_demo("classification", device)
    except MissingExtra as missing:
        exposure = Exposure(NOT_CHECKED, "demo")
        skip = Skip(exposure, "–", str(missing), unchecked=True, extra=missing.extra)
        return Target(name, surfaces, skips=(skip,))
    twin = demo.load_demo("classification", device, hardened=True) if demo.has_hardened() else None
    texts, examples, about = list(demo.TEXTS), list(demo.EXAMPLES), demo.ABOUT
    notes = demo.NOTES
    if data is not None:
        (texts, examples), about, notes = data.read(loaded), "", ()
    subject = TextTarget(
        loaded, texts, layers, examples=examples, twin=twin, about=about, notes=notes, corpus=corpus
    )
    return Target(name, surfaces, {loaded.name: subject})
