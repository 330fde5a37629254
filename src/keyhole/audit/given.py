"""What is given with a target: texts for a model, an encoder and what is known for a store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from keyhole.core.errors import InputError
from keyhole.core.files import expect_file
from keyhole.data import Example, read_examples, read_texts
from keyhole.models import Loaded
from keyhole.models.loading import class_names, head_of
from keyhole.recover.embeddings.reader import CountedReader

TEXTS_OF_A_MODEL = 3
TEXTS_OF_A_STORE = 20


@dataclass(frozen=True)
class Data:
    """Which part of a file a model is tried with, and which columns hold what."""

    file: str | Path
    texts: int = TEXTS_OF_A_MODEL
    flips: int = 12
    column: str | None = None
    label: str | None = None  # None: `label`, if there is such a column

    def read(self, loaded: Loaded) -> tuple[list[str], list[Example]]:
        """Texts to read back, and examples to flip where the model is a classifier."""
        texts = read_texts(self.file, self.column, self.texts)
        if head_of(loaded.model) != "classification":
            return texts, []
        return texts, read_examples(
            self.file, text=self.column or (), label=self.label or "label",
            names=class_names(loaded.model.config), limit=self.flips,
            labelled=self.label is not None,
        )  # fmt: skip


@dataclass(frozen=True)
class Stored:
    """How a vector store is read: with which encoder, how many of its vectors, what is known.

    `model` may name several encoders, of which the one that made the vectors is found out. `corpus`
    is a file of texts that is counted, by default the one that ships.
    """

    model: str | Sequence[str] | None = None
    texts: int = TEXTS_OF_A_STORE
    known: str | Path | None = None
    seed: int = 0
    corpus: str | Path | None = None

    def expect_none(self, name: str, *, corpus: bool) -> None:
        """Refuse what is for a store alone, where the target is none; a model takes a corpus."""
        options = {"--model": self.model, "--known": self.known}
        for option, value in options.items():
            if value:
                raise InputError(f"expected {option} with a vector store, got {name}")
        if self.corpus is not None and not corpus:
            raise InputError(f"expected --corpus with a vector store or a model, got {name}")

    def method(self) -> CountedReader:
        """The attack: it counts the corpus, or the one that ships."""
        if self.corpus is None:
            return CountedReader()
        return CountedReader(corpus_file(self.corpus))


def corpus_file(file: str | Path) -> Path:
    """The file of a corpus, which is there, as other processes find it."""
    expect_file(file, "a corpus")
    return Path(file).absolute()
