"""A target by its name and options: small enough to be sent, so that any process can open it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, overload

from keyhole.audit.given import TEXTS_OF_A_MODEL, TEXTS_OF_A_STORE, Data, Stored
from keyhole.audit.targets import Target, open_target
from keyhole.core.endpoint import EndpointOptions
from keyhole.core.errors import InputError, expect_count, expect_seed
from keyhole.core.exposure import expect_exposures
from keyhole.core.files import exists
from keyhole.core.journal import digest
from keyhole.core.machine import device_of, expect_device
from keyhole.models.loading import names_model
from keyhole.stores import names_store


@dataclass(frozen=True)
class Opening:
    """What is opened, how, and what is tried with it: the options of `keyhole audit`.

    `folder` is where a relative name begins; findings name the target as it was given.
    """

    target: str = field(repr=False)  # an address may hold a password
    model: tuple[str, ...] = ()
    known: str | None = None
    corpus: str | None = None
    data: str | None = None
    texts: int | None = None
    flips: int = 12
    column: str | None = None
    label: str | None = None
    layers: tuple[int, ...] | Literal["all"] | None = None
    device: str = "cpu"
    ledger: str | None = None
    authorized: bool = False
    endpoint: EndpointOptions = field(default_factory=EndpointOptions)
    against_defences: bool = False
    seed: int = 0
    only: tuple[str, ...] = ()
    folder: str | None = None

    def expect_valid(self) -> None:
        """Numbers in their ranges; what is there is found out when it is opened."""
        expect_seed(self.seed)
        expect_count("--texts", self.texts)
        expect_count("--flips", self.flips)
        expect_exposures(self.only, "--only")

    @property
    def stays(self) -> bool:
        """Must the process that people talk to, or one beside it, do this itself?

        It holds the ledger of what was paid for, and the secrets that an address needs.
        """
        return self.ledger is not None or "://" in self.target

    def anywhere(self) -> Opening:
        """The same for a process that runs in another folder."""
        here = self.folder or str(Path.cwd())
        return replace(
            self,
            folder=here,
            model=tuple(_absolute(here, name) for name in self.model),
            known=_absolute(here, self.known),
            corpus=_absolute(here, self.corpus),
            data=_absolute(here, self.data),
        )

    @property
    def place(self) -> str:
        """The target as any process of this machine finds it."""
        if "://" in self.target:
            return self.target
        for kind, mark, path in (("", "", self.target), self.target.partition(":")):
            if path and exists(self._inside(path)):
                return f"{kind}{mark}{self._inside(path)}"
        return self.target

    def _inside(self, path: str) -> str:
        return path if self.folder is None else str(Path(self.folder, path))

    def shown(self, text: str) -> str:
        """A text that names the target as it was given."""
        return text if self.place == self.target else text.replace(self.place, self.target)

    def open(self, worker: int = 0) -> Target:
        """The target itself, on the device of the worker of that number."""
        self.expect_valid()
        device = device_of(self.device, worker)
        expect_device(device)
        name = self.place
        if self.ledger is not None and (names_store(name) or names_model(name)):
            kind = "vector store" if names_store(name) else "model"
            raise no_endpoint(f"the {kind} {self.target}")
        data = None
        if self.data is not None:
            texts = self.texts or TEXTS_OF_A_MODEL
            data = Data(self.data, texts, self.flips, self.column, self.label)
        stored = Stored(
            self.model or None, self.texts or TEXTS_OF_A_STORE, self.known, self.seed, self.corpus
        )
        target = open_target(
            name, data=data, layers=self.layers, device=device, stored=stored,
            authorized=self.authorized, endpoint=self.endpoint,
        )  # fmt: skip
        if self.ledger is not None and not target.surfaces:
            kind = "vector store" if target.stores else "model"
            raise no_endpoint(f"the {kind} {self.shown(target.name)}")
        return target

    def fingerprint(self) -> str:
        """What tells that a target's files were not touched, without reading all of them."""
        named = (*self.model, self.data, self.known, self.corpus)
        files = [*self._own_files(), *(file for name in named if name for file in _files(name))]
        times = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
        return digest(self.target, repr(self), times)

    @property
    def size(self) -> int:
        """The bytes of its files: the best guess at what it costs before anything is known."""
        return sum(file.stat().st_size for file in self._own_files())

    def _own_files(self) -> list[Path]:
        if "://" in self.target:
            return []
        return _files(self.place) or _files(self.place.partition(":")[2])


@overload
def _absolute(folder: str, name: str) -> str: ...
@overload
def _absolute(folder: str, name: str | None) -> str | None: ...
def _absolute(folder: str, name: str | None) -> str | None:
    """A file by its whole name; what is no file, such as a name on the hub, as it is."""
    return str(Path(folder, name)) if name and exists(Path(folder, name)) else name


def _files(name: str) -> list[Path]:
    path = Path(name)
    if not name or not exists(path):
        return []
    return sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]


def no_endpoint(what: str) -> InputError:
    return InputError(
        f"expected --ledger with an endpoint, whose answers it keeps, got {what}: "
        "leave --ledger out"
    )
