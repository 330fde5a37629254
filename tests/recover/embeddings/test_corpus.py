"""The corpus that ships: recorded results depend on it, and it must not hold the demo's texts."""

from __future__ import annotations

import hashlib
import re

from keyhole.models import demo
from keyhole.recover.embeddings.counts import SHIPPED

DIGEST = "7c1f4110ebd7c3c9a7ab07516b429423c2f19222dfff65808bc306e49f843be6"


def test_the_corpus_does_not_change_unnoticed():
    """What is read with it changes too: measure the records again before updating the digest."""
    assert hashlib.sha256(SHIPPED.read_bytes()).hexdigest() == DIGEST


def test_the_corpus_has_no_three_words_in_a_row_of_a_demo_text():
    secret = {run for text in (*demo.TEXTS, *demo.NOTES) for run in runs(text)}
    lines = SHIPPED.read_text("utf-8").splitlines()
    assert len(lines) == len(set(lines)) > 1_000
    assert not [line for line in lines if runs(line) & secret]


def runs(text: str) -> set[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    return set(zip(words, words[1:], words[2:], strict=False))
