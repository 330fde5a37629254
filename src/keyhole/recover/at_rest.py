"""A leak's file encrypted at rest: what that closes, and what it does not.

Without the key the bytes of a file are as good as random, and no attack here reads any of them. The
length of a file stays what it was, and a cache's length is its text's. Whoever has the key, reads
memory, or is answered by the server itself meets no encryption at all.

The cipher is a stand-in made of the standard library (SHAKE-256 of key and nonce as a stream): for
files that matter, use a reviewed one with authentication, such as AES-GCM.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from keyhole.core.errors import InputError

_LEAST = 16  # bytes of a key and of a nonce


def encrypted(data: bytes, key: bytes, nonce: bytes) -> bytes:
    """The same number of bytes; once more with the same key and nonce, it is undone."""
    if min(len(key), len(nonce)) < _LEAST:
        raise InputError(f"expected a key and a nonce of {_LEAST} bytes or more, got fewer")
    stream = hashlib.shake_256(len(key).to_bytes(8, "little") + key + nonce).digest(len(data))
    return (int.from_bytes(data, "little") ^ int.from_bytes(stream, "little")).to_bytes(
        len(data), "little"
    )


def tokens_by_size(known: Sequence[tuple[int, int]], size: int) -> int:
    """How many tokens a file of `size` bytes holds, from the (tokens, bytes) of one's own files."""
    tokens, sizes = torch.tensor(known, dtype=torch.float64).T
    if len(tokens.unique()) < 2:
        raise InputError("expected own files of two lengths or more, got one")
    system = torch.stack([sizes, torch.ones_like(sizes)], 1)
    slope, start = torch.linalg.lstsq(system, tokens[:, None]).solution[:, 0].tolist()
    return round(slope * size + start)
