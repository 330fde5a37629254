"""What was read beside the original, where a text's length did not leak with it.

Positions alone say little then: a word that is missing would make all behind it wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher

from keyhole.core.finding import Piece
from keyhole.recover import Mark


def aligned(tokens: Sequence[tuple[str, Mark, int]], truth: Sequence[int]) -> Iterator[Piece]:
    """Tokens (as written, how far to be believed, id) marked right or wrong.

    There is a question mark for every one that is missing.
    """
    ids = [id_ for _, _, id_ in tokens]
    matcher = SequenceMatcher(None, truth, ids, autojunk=False)
    for kind, from_, to, start, end in matcher.get_opcodes():
        for place, (piece, mark, _) in enumerate(tokens[start:end], start):
            # The first token is written without a space before it, but others may be missing there.
            space = " " if place == 0 and from_ > 0 else ""
            yield Piece(f"{space}{piece}", mark.value, kind == "equal")
        for _ in range(max(0, (to - from_) - (end - start))):
            yield Piece(" ?", Mark.UNKNOWN.value, False)
