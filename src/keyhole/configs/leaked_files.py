"""Files that hold what a model gave away: leaks of `keyhole lab capture`, slots, hidden states.

Only the beginning of a file is read: its magic, or the header of a .safetensors file.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from keyhole.configs.finding import Hit, Level, Rule, Unreadable
from keyhole.core.files import parse

_KEEP = "take it out of the repository and its history, and keep it as secret as the text"

LEAK = Rule(
    "KH-CONFIG-FILE-LEAK", "A leak of keyhole lab capture is kept here", Level.HIGH,
    "the text it was made from can be read back with the model",
    _KEEP, "keyhole recover MODEL FILE",
)  # fmt: skip
SLOT = Rule(
    "KH-CONFIG-FILE-SLOT", "A saved slot of llama.cpp is kept here", Level.HIGH,
    "it holds the prompt's token ids as they are, and its keys and values",
    _KEEP, "keyhole audit FILE --model MODEL.gguf",
)  # fmt: skip
STATES = Rule(
    "KH-CONFIG-FILE-STATES", "Saved hidden states are kept here", Level.HIGH,
    "it holds a prompt's token ids as they are, and its hidden states",
    _KEEP, "keyhole recover MODEL FILE",
)  # fmt: skip
RULES = (LEAK, SLOT, STATES)
SLOT_MAGIC = b"qsgg"  # as recover/files/llama_slot.py has it; a test compares
_HEADER = 2**20  # bytes of a header that is read: those of large models are about as long


def look(path: Path) -> Iterator[Hit]:
    try:
        with path.open("rb") as file:
            start = file.read(8)
            if start.startswith(SLOT_MAGIC):
                yield Hit(SLOT, 1, "a saved slot")
            elif path.suffix == ".safetensors" and len(start) == 8:
                (length,) = struct.unpack("<Q", start)
                # A leak's header is short: one that is longer belongs to a model.
                if length <= _HEADER:
                    yield from _of_tensors(file.read(length))
    except OSError as error:
        raise Unreadable(error.strerror or str(error)) from error


def _of_tensors(header: bytes) -> Iterator[Hit]:
    try:
        parsed: Any = parse(header.decode())
    except ValueError:  # no .safetensors file, whatever it is called
        return
    if not isinstance(parsed, dict):
        return
    tensors = cast("dict[str, Any]", parsed)
    about = tensors.get("__metadata__")
    if isinstance(about, dict) and {"keyhole", "leak"} <= set(cast("dict[str, Any]", about)):
        yield Hit(LEAK, 1, f"a leak of kind {str(cast('dict[str, Any]', about)['leak'])[:40]}")
    elif set(tensors) - {"__metadata__"} == {"hidden_states", "token_ids"}:
        yield Hit(STATES, 1, "hidden_states with token_ids")
