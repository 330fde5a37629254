"""Is a verified text always the input? Corrupted and mismatched leaks of MiniLM.

`--leaks` leaks are corrupted, or come from another text, layer or model (subjects.py:
`--encoder`, `--data`). Verifying a text that was not the input is false. (In keys of
layer 1 each row depends on one token only: if they are spliced from two texts, the
spliced text is the input.) `--quick` takes a model with random weights.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import show
import subjects
from keyhole.data import read_texts
from keyhole.models import Exposure, Loaded, anatomy
from keyhole.recover import CachedKeys, EncoderMaps, EncoderStates, TokenSearch
from keyhole.recover.attack import Attack
from keyhole.recover.leaks import Leak
from show import Row
from subjects import leak_of

# How many of 20 leaks are of each exposure.
SHARES = {
    "hidden:1": 3,
    "hidden:2": 2,
    "hidden:3": 4,
    "hidden:4": 2,
    "hidden:6": 4,
    "kv:1": 3,
    "kv:3": 1,
    "maps:1": 1,
}


def run(
    quick: bool,
    data: Path = subjects.DATA,
    encoder: Path | None = None,
    device: str = subjects.DEVICE,
    leaks: int = 1000,
) -> Iterator[Row]:
    if quick:
        tiny = subjects.tiny("bert")
        ids = subjects.tiny_texts(12, 8, framed=True)
        few = [(Exposure("hidden", 1), range(9)), (Exposure("maps", 1), range(2))]
        yield from false_claims(Subject.of(tiny, ids), few)
        return
    loaded = subjects.minilm(encoder, device)
    ids = subjects.encoded(loaded, read_texts(data / "sst2" / "dev.tsv", limit=100))
    plan = [
        (Exposure.parse(name), range(-(-leaks * share // 20)))
        for name, share in SHARES.items()
    ]
    yield from false_claims(Subject.of(loaded, ids), plan)


ROWS = (
    "swap_row",
    "splice",
    "shuffle_rows",
    "shuffle_columns",
    "mix",
    "shift",
    "noise",
    "other_layer",
    "other_model",
)
MAPS = ROWS[4:]  # attention maps have no row of numbers for each position


def changed(kind: str, a: Tensor, b: Tensor, stream: torch.Generator) -> Tensor:
    """Corrupt the leak of one text, by itself or with that of another text, layer or model."""
    match kind:
        case "swap_row":
            place = torch.randint(1, len(a), (1,), generator=stream)
            return a.index_copy(0, place, b[place])
        case "splice":
            place = int(torch.randint(1, len(a), (1,), generator=stream))
            return torch.cat([a[:place], b[place:]])
        case "shuffle_rows":
            return a[torch.randperm(len(a), generator=stream)]
        case "shuffle_columns":
            return a[:, torch.randperm(a.shape[1], generator=stream)]
        case "mix":
            return 0.6 * a + 0.4 * b
        case "shift":
            return a + 0.3 * a.std() * torch.randn(a.shape[1], generator=stream)
        case "noise":
            return a + a.std() * torch.randn(a.shape, generator=stream)
        case _:  # another layer's, another model's
            return b


@dataclass(frozen=True, eq=False)
class Subject:
    """A model, a model of the same shape with other weights, and texts."""

    loaded: Loaded
    other: Loaded
    texts: list[Tensor]

    @classmethod
    def of(cls, loaded: Loaded, texts: list[Tensor], share: float = 0.1) -> Subject:
        """Make the other model: its weights differ by `share` of their size, as if fine-tuned."""
        model = copy.deepcopy(loaded.model)
        stream = torch.Generator().manual_seed(0)
        for weight in model.parameters():
            drawn = torch.randn(weight.shape, generator=stream).to(weight)
            weight.data += share * weight.data.square().mean().sqrt() * drawn
        return cls(loaded, replace(loaded, model=model), texts)

    def mismatch(self, exposure: Exposure, number: int) -> tuple[str, Leak, Tensor]:
        """Return how a leak was corrupted, the leak, and the text that it is the leak of."""
        kinds = MAPS if exposure.kind == "maps" else ROWS
        kind = kinds[number % len(kinds)]
        first, second = self._pair(number, same=exposure.kind == "maps")
        a, b = (leak_of(self.loaded, ids, exposure) for ids in (first, second))
        if kind == "other_layer":
            last = anatomy(self.loaded.model).layers
            layer = exposure.layer
            other = replace(exposure, layer=layer + 1 if layer < last else layer - 1)
            b = leak_of(self.loaded, first, other)
        elif kind == "other_model":
            b = leak_of(self.other, first, exposure)
        values = {}
        for name in a.tensors:
            rows = [_rows(leak.tensors[name]) for leak in (a, b)]
            n = min(map(len, rows))
            stream = torch.Generator().manual_seed(
                number
            )  # keys and values change alike
            new = changed(kind, rows[0][:n], rows[1][:n], stream)
            values[name] = _back(new, a.tensors[name], exposure.kind == "maps")
        leak = replace(a, **values)
        truth = first[: leak.length]
        if str(exposure) == "kv:1" and kind in ("swap_row", "splice"):
            # Each row depends on one token: this is exactly the leak of the spliced
            # text.
            stream = torch.Generator().manual_seed(number)
            truth = changed(kind, truth, second[: leak.length], stream)
        return kind, leak, truth

    def _pair(self, number: int, same: bool) -> tuple[Tensor, Tensor]:
        """Return two texts, of the same length for maps, which cannot be mixed otherwise."""
        first = self.texts[number % len(self.texts)]
        after = (number + 1 + number // len(ROWS)) % len(self.texts)
        second = self.texts[after]
        if same and len(first) != len(second):
            middle = first[1:-1]
            second = torch.cat([first[:1], middle.flip(0), first[-1:]])
        return first, second


def _rows(tensor: Tensor) -> Tensor:
    """Return rows (positions, numbers) of a leaked tensor, whose heads come first."""
    return tensor.transpose(0, 1).flatten(1) if tensor.ndim == 3 else tensor


def _back(rows: Tensor, like: Tensor, maps: bool) -> Tensor:
    """Return rows in the shape of the leak; the rows of maps are normalised again."""
    if like.ndim == 2:
        return rows
    back = rows.unflatten(1, (like.shape[0], like.shape[2])).transpose(0, 1)
    if maps:
        back = back[..., : len(rows)].clamp(min=1e-9)
        back = back / back.sum(-1, keepdim=True)
    return back.contiguous()


def _attack(exposure: Exposure) -> Attack:
    """Return a short search: only the judge is tested."""
    states = EncoderStates(rounds=1)
    return {
        "hidden": states,
        "kv": CachedKeys(encoder=states),
        "maps": EncoderMaps(
            deeper=TokenSearch(rounds=1, passes=15, candidates=4, sweeps=1)
        ),
    }[exposure.kind]


def false_claims(subject: Subject, plan: list[tuple[Exposure, range]]) -> Iterator[Row]:
    """Yield a row for each exposure, and one for all."""
    every: list[dict[str, Any]] = []
    for exposure, numbers in plan:
        made = [subject.mismatch(exposure, number) for number in numbers]
        kinds, leaks, truths = zip(*made, strict=True)
        read, seconds = subjects.read(subject.loaded, truths, leaks, _attack(exposure))
        items = [{"kind": kind, **item} for kind, item in zip(kinds, read, strict=True)]
        verified = Counter(item["kind"] for item in items if item["verified"])
        named = (
            ", ".join(f"{kind} {count}" for kind, count in verified.items()) or "none"
        )
        yield show.exactly(
            f"{exposure}, {len(items)} corrupted or mismatched leaks: falsely verified",
            subjects.claims(items)[1],
            0,
            f"verified: {named}; {seconds / len(items):.2f} s per leak",
            items=items,
        )
        every += items
    right, false = subjects.claims(every)
    details = f"{right + false} verified, {right} of them the right text"
    what = f"falsely verified of {len(every)} corrupted or mismatched leaks"
    yield show.exactly(what, false, 0, details)


if __name__ == "__main__":
    show.main(run)
