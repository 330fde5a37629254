"""Tokens as they stand in the text: what each adds to the text before it."""

from __future__ import annotations

from typing import Any


def written(tokenizer: Any, ids: list[int]) -> list[str]:
    """One piece for each token; joined they are the text, special tokens are empty."""
    pieces: list[str] = []
    before = ""
    for place in range(len(ids)):
        now = str(tokenizer.decode(ids[: place + 1], skip_special_tokens=True))
        # Half of a character, or a space before a comma that goes: then the token itself.
        kept = now.startswith(before)
        pieces.append(now[len(before) :] if kept else str(tokenizer.decode([ids[place]])))
        before = now
    return pieces
