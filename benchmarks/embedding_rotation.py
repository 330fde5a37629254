"""Vectors behind a secret rotation or linear map of which some pairs are known: what comes back.

Sentences of SST-2 of 4 to 32 tokens on all-MiniLM-L6-v2. From so many known pairs (a text and its
stored vector) the map is undone, and the true text of other vectors is given to the judge: how many
are verified. `--texts` of them in each row. `--quick` takes a random-weight model.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

import show
import subjects
from keyhole.models import Loaded
from keyhole.recover import Pooled
from keyhole.recover.attack import Target
from keyhole.recover.embeddings.edits import Vectors
from keyhole.recover.embeddings.judge import judge_vector
from keyhole.recover.secrets import undo_linear, undo_rotation
from show import Row
from stored_forms import WAY, rounded, sentences, vectors_of


@dataclass(frozen=True, eq=False)
class Setting:
    """A model, the texts behind the map, and those whose pairs are known."""

    loaded: Loaded
    secrets: list[list[int]]
    others: list[list[int]]
    pairs: tuple[int, ...] = (16, 32, 64, 128, 256, 383, 384, 512, 1024, 4096)

    @property
    def target(self) -> Target:
        return Target.of(self.loaded.model, self.loaded.tokenizer)


def run(
    quick: bool,
    data: Path = subjects.DATA,
    encoder: Path | None = None,
    device: str = subjects.DEVICE,
    texts: int = 20,
) -> Iterator[Row]:
    if quick:
        ids = [text.tolist() for text in subjects.tiny_texts(60, 6, framed=True)]
        setting = Setting(subjects.tiny("bert"), ids[:1], ids[1:], (48,))
    else:
        loaded = replace(subjects.minilm(encoder, device), name="all-MiniLM-L6-v2")
        setting = Setting(loaded, *sentences(loaded, data, texts))
    known = vectors_of(setting.target, setting.others)
    runs = [Vectors(setting.target, WAY, ids) for ids in setting.secrets]
    for count in setting.pairs:
        yield from secret_rows(setting, known, count, runs)


def secret_rows(setting: Setting, known: Tensor, count: int, runs: list[Vectors]) -> Iterator[Row]:
    """`count` known pairs, of which a tenth is held back to measure how exact the rest makes it."""
    stream = torch.Generator().manual_seed(1)
    d = known.shape[1]
    gaussian = torch.randn(d, d, generator=stream, dtype=torch.float64)
    rotation = torch.linalg.qr(gaussian).Q
    count = min(count, 10 * len(known) // 11)
    known = known[: count + max(8, count // 10)].double().cpu()
    secret = vectors_of(setting.target, setting.secrets).double().cpu()
    for name, matrix, change in (
        ("a secret rotation", rotation, partial(rounded, "float32")),
        ("a secret rotation, 8 bits", rotation, partial(rounded, "int8")),
        ("a secret linear map", gaussian, partial(rounded, "float32")),
    ):
        stored = [change(Pooled(v, normalised=False)).values for v in (known @ matrix).float()]
        hidden = [change(Pooled(v, normalised=False)).values for v in (secret @ matrix).float()]
        yield secret_row(
            setting, name, known, torch.stack(stored), torch.stack(hidden), secret, count, runs
        )


def secret_row(
    setting: Setting, name: str, known: Tensor, stored: Tensor, hidden: Tensor, secret: Tensor,
    count: int, runs: list[Vectors],
) -> Row:  # fmt: skip
    held = slice(count, None)
    seen: Tensor | None = None
    if name == "a secret linear map":
        back = undo_linear(known[:count], stored[:count])
        undone, numbers, check = hidden.double() @ back, None, stored[held].double() @ back
        off = check - known[held]
    else:
        pairs = undo_rotation(known[:count], stored[:count])
        undone, numbers, seen = pairs.undo(hidden), pairs.numbers(hidden), pairs.own
        off = pairs.numbers(stored[held]) - known[held] @ pairs.own
    values = undone if numbers is None else numbers
    noise = float(off.square().mean().sqrt())
    verified = 0
    for row, ids in enumerate(setting.secrets):
        leak = Pooled(values[row].float(), noise=noise)
        vectors = runs[row].of_part(WAY, seen)
        verified += judge_vector(setting.target, leak, ids, vectors).verified
    cosines = torch.cosine_similarity(undone, secret).tolist()
    return Row(
        f"{setting.loaded.name}, {name}, {count} pairs known",
        f"cosine {statistics.median(cosines):.6f}; {verified} of {len(hidden)} texts verified",
        details=f"{values.shape[1]} numbers, each off by {noise / float(known.std()):.1e} of its "
        "spread, measured on pairs held back",
    )


if __name__ == "__main__":
    show.main(run)
