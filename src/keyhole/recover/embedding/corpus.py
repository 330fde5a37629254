"""Texts that the attacker has: which tokens they hold, and in which order, is counted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from keyhole.core.errors import InputError
from keyhole.data import read_texts


def corpus_texts(corpus: str | Path | Sequence[str]) -> list[str]:
    """The texts of a corpus, a file of them or the texts themselves; empty ones are left out."""
    texts = read_texts(corpus) if isinstance(corpus, str | Path) else corpus
    texts = [text.strip() for text in texts if text.strip()]
    if not texts:
        raise InputError(f"expected texts in the corpus, got none in {corpus}")
    return texts
