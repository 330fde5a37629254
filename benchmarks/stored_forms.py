"""The forms that stores keep a vector in, and the vectors they are tried on."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

import subjects
from keyhole import invert
from keyhole.models import Exposure, Loaded
from keyhole.recover import Pooled
from keyhole.recover.attack import Target
from keyhole.recover.embeddings.edits import Vectors

WAY = Exposure("pooled")
Change = Callable[[Pooled], Pooled]


def fitting(loaded: Loaded, sentences: Sequence[str], count: int) -> list[list[int]]:
    encoded = loaded.tokenizer(list(dict.fromkeys(sentences)))["input_ids"]
    chosen = [ids for ids in encoded if 4 <= len(ids) - 2 <= 32]
    random.Random(0).shuffle(chosen)
    return chosen[:count]


def sentences(loaded: Loaded, data: Path, count: int) -> tuple[list[list[int]], list[list[int]]]:
    """`count` sentences of SST-2 to be judged, and some thousand others that an attacker has."""
    secrets = fitting(loaded, subjects.sst2(data)[: 8 * count], count)
    return secrets, fitting(loaded, subjects.sst2(data, 20_000)[1000:], 4608)


def vectors_of(target: Target, lists: list[list[int]], way: Exposure = WAY) -> Tensor:
    """The vectors (texts, d) of token lists, special tokens around them."""
    vectors = Vectors(target, way, lists[0])
    return vectors([vectors.inside(ids) for ids in lists])


def changes(
    known: Tensor, blocks: Sequence[int], codes: int, widths: Sequence[int]
) -> dict[str, Change]:
    """Each form that a store may keep a vector in; stated is what cannot be seen in it."""
    floating = {name: partial(rounded, name) for name in ("float32", "float16", "bfloat16")}
    low, high = known.amin(0).cpu(), known.amax(0).cpu()
    books = {count: codebook(known, count, codes) for count in blocks}
    return {
        **floating,
        "8 bits, a scale for each vector": partial(rounded, "int8"),
        "8 bits, a range for each dimension (stated)": partial(in_ranges, low, high),
        "4 bits, a scale for each vector": partial(rounded, "int4"),
        "1 bit (signs)": partial(rounded, "binary"),
        **{
            f"product quantisation, {count} codes of {codes} (codebook known)": partial(
                in_codes, book
            )
            for count, book in books.items()
        },
        **{f"the first {k} numbers, normalised": partial(cut, k) for k in widths},
        f"the first {widths[-1]} numbers, 8 bits": lambda leak: rounded(
            "int8", cut(widths[-1], leak)
        ),
        **{f"noise of {share:.0%}, stated": noisy(share, True) for share in (0.01, 0.05, 0.1)},
        **{f"noise of {share:.0%}, not stated": noisy(share, False) for share in (0.01, 0.05, 0.1)},
    }


def rounded(name: str, leak: Pooled) -> Pooled:
    """As the library does it; what was done is not stated: it has to be seen from the numbers."""
    return replace(invert.degrade(leak, name), precision=None)


def in_ranges(low: Tensor, high: Tensor, leak: Pooled) -> Pooled:
    """256 levels between the least and the largest of each dimension."""
    steps = (high - low) / 255
    levels = ((leak.values - low) / steps).round().clamp(0, 255)
    return replace(leak, values=low + levels * steps, steps=steps, ends=torch.stack([low, high]))


def in_codes(book: Tensor, leak: Pooled) -> Pooled:
    blocks = leak.values.unflatten(0, (len(book), -1))
    codes = torch.cdist(blocks[:, None], book)[:, 0].argmin(-1)
    return replace(leak, values=book[torch.arange(len(book)), codes].flatten(), codebook=book)


def codebook(vectors: Tensor, blocks: int, codes: int, rounds: int = 25) -> Tensor:
    """Centroids (blocks, codes, numbers) by Lloyd's algorithm, as product quantisation has them."""
    points = vectors.double().unflatten(1, (blocks, -1)).transpose(0, 1)
    book = points[:, :codes].clone()
    for _ in range(rounds):
        nearest = torch.cdist(points, book).argmin(-1)
        sums = torch.zeros_like(book).scatter_add_(1, nearest[..., None].expand_as(points), points)
        counts = torch.zeros_like(book[..., 0]).scatter_add_(
            1, nearest, torch.ones_like(nearest, dtype=book.dtype)
        )
        book = torch.where(counts[..., None] > 0, sums / counts.clamp(min=1)[..., None], book)
    return book.float().cpu()


def cut(width: int, leak: Pooled) -> Pooled:
    return replace(invert.degrade(leak, forms=[f"truncated:{width}", "normalised"]), precision=None)


def noisy(share: float, stated: bool) -> Change:
    stream = torch.Generator().manual_seed(0)

    def change(leak: Pooled) -> Pooled:
        loud = replace(invert.degrade(leak, noise=share, seed=stream), precision=None)
        return replace(loud, noise=share * float(leak.values.std())) if stated else loud

    return change
