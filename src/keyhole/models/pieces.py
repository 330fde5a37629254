"""The text of each token: what it adds to the text before it.

A text is decoded without the tokenizer's special tokens, but with the unknown token,
which shows that something was there. Tokenizers that work on bytes may split a
character between tokens; it is written at the token that completes it, and bytes that
never form a character as `\\xNN`.
"""

from __future__ import annotations

import re
from typing import Any

_BROKEN = "\ufffd"  # what a decoder writes for bytes that form no character (yet)
_MAX_BYTES = 4  # bytes of a character, and so tokens
_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
# How byte-level tokenizers write bytes: themselves if they print, else from U+0100 on.
_BYTES = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(256 + number): byte for number, byte in enumerate(_OTHERS)
}


def written(tokenizer: Any, ids: list[int]) -> list[str]:
    """Return one piece for each token; joined they are the text, and special tokens are empty."""
    pieces: list[str] = []
    before = ""
    start = 0
    while start < len(ids):
        end = start + 1
        text = _decode(tokenizer, ids[: start + 1])
        while text.endswith(_BROKEN) and end < min(start + _MAX_BYTES, len(ids)):
            end, text = end + 1, _decode(tokenizer, ids[: end + 1])
        added = text.removeprefix(before)
        if _BROKEN in added:
            pieces.append(_spelled(tokenizer, ids[start]))
            end = start + 1
            text = _decode(tokenizer, ids[: start + 1])
        else:
            pieces += [""] * (end - start - 1)
            # A comma may remove the space before it: then the piece is the token
            # itself.
            kept = text.startswith(before)
            pieces.append(added if kept else _decode(tokenizer, [ids[end - 1]]))
        before = text
        start = end
    return pieces


def decoded(tokenizer: Any, ids: list[int]) -> str:
    """Return the text of ids, without special tokens and without broken characters."""
    text = _decode(tokenizer, ids)
    return "".join(written(tokenizer, ids)) if _BROKEN in text else text


def labels(tokenizer: Any, ids: list[int]) -> list[str]:
    """Return a word to show for each token by itself: none is empty, and no bytes are broken.

    The space before a word is left out. White space, special tokens and parts of a
    character are shown by name: `\\n`, `[SEP]`, `\\xc3`. So is a part of a word that
    the tokenizer marks: `##s`.
    """
    shown: list[str] = []
    for piece, id_ in zip(written(tokenizer, ids), ids, strict=True):
        name = str(tokenizer.convert_ids_to_tokens(id_))
        if name == f"##{piece}":
            shown.append(name)
            continue
        blank = "".join(ascii(letter)[1:-1] for letter in piece).replace(" ", "␣")
        shown.append(piece.strip() or blank or _spelled(tokenizer, id_) or name)
    return shown


def unknown_token(tokenizer: Any) -> int | None:
    """Return the id for text that has no token, or None where it has another meaning as well."""
    unknown = getattr(tokenizer, "unk_token_id", None)
    others = ("bos", "eos", "pad", "cls", "sep", "mask")  # GPT-2's is its end of text
    taken = [getattr(tokenizer, f"{name}_token_id", None) for name in others]
    return None if unknown is None or unknown in taken else int(unknown)


def _decode(tokenizer: Any, ids: list[int]) -> str:
    unknown = unknown_token(tokenizer)
    if unknown is None or unknown not in ids:
        return str(tokenizer.decode(ids, skip_special_tokens=True))
    special = set(tokenizer.all_special_ids) - {unknown}
    shown = [id_ for id_ in ids if id_ not in special]
    return str(tokenizer.decode(shown, skip_special_tokens=False))


def _spelled(tokenizer: Any, id_: int) -> str:
    """Return a token by itself, with `\\xNN` for bytes that form no character."""
    text = _decode(tokenizer, [id_])
    if _BROKEN not in text:
        return text
    token = str(tokenizer.convert_ids_to_tokens(id_))
    if byte := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", token):
        return f"\\x{byte[1].lower()}"
    if all(letter in _BYTES for letter in token):
        spelled = bytes(_BYTES[letter] for letter in token)
        return spelled.decode("utf-8", "backslashreplace")
    return text
