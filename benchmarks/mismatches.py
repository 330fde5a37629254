"""Leaks that are not what they say, and how often the judge falls for one.

A claim is false if a verified text was not the input. (Keys of layer 1 hold one token a row;
spliced from two texts they are the leak of the spliced text, which then is the input.) A leak is
made from its number alone, so a run in slices sees the same leaks as a run of all.
"""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from keyhole import invert
from keyhole.models import Exposure, Loaded, anatomy
from keyhole.recover import CachedKeys, EncoderMaps, EncoderStates, PooledEmbedding, TokenSearch
from keyhole.recover.attack import Attack
from keyhole.recover.leaks import Leak
from show import Row
from subjects import leak_of

Change = Callable[[Tensor, Tensor, torch.Generator], Tensor]
_SHORT = TokenSearch(rounds=1, passes=15, candidates=4, sweeps=1)


def _place(rows: Tensor, stream: torch.Generator) -> int:
    return int(torch.randint(1, len(rows), (1,), generator=stream))


def swap_row(a: Tensor, b: Tensor, stream: torch.Generator) -> Tensor:
    a, i = a.clone(), _place(a, stream)
    a[i] = b[i]
    return a


def splice(a: Tensor, b: Tensor, stream: torch.Generator) -> Tensor:
    i = _place(a, stream)
    return torch.cat([a[:i], b[i:]])


def shuffle_rows(a: Tensor, _b: Tensor, stream: torch.Generator) -> Tensor:
    return a[torch.randperm(len(a), generator=stream)]


def shuffle_columns(a: Tensor, _b: Tensor, stream: torch.Generator) -> Tensor:
    return a[:, torch.randperm(a.shape[1], generator=stream)]


def mix(a: Tensor, b: Tensor, _stream: torch.Generator) -> Tensor:
    return 0.6 * a + 0.4 * b


def shift(a: Tensor, _b: Tensor, stream: torch.Generator) -> Tensor:
    return a + 0.3 * a.std() * torch.randn(a.shape[1], generator=stream)


def noise(a: Tensor, _b: Tensor, stream: torch.Generator) -> Tensor:
    return a + a.std() * torch.randn(a.shape, generator=stream)


def other_layer(_a: Tensor, b: Tensor, _stream: torch.Generator) -> Tensor:
    return b


def other_model(_a: Tensor, b: Tensor, _stream: torch.Generator) -> Tensor:
    return b


# What leaked with a row of numbers for each position; and maps, which are no such rows.
ROWS: tuple[Change, ...] = (
    swap_row, splice, shuffle_rows, shuffle_columns, mix, shift, noise, other_layer, other_model,
)  # fmt: skip
WHOLE: tuple[Change, ...] = (mix, shift, noise, other_layer, other_model)


@dataclass(frozen=True, eq=False)
class Mismatch:
    kind: str
    leak: Leak
    truth: list[int]


@dataclass(frozen=True, eq=False)
class Subject:
    """A model, a model of the same shape with other weights, and texts."""

    loaded: Loaded
    other: Loaded
    texts: list[Tensor]

    @classmethod
    def of(cls, loaded: Loaded, texts: list[Tensor], share: float = 0.1) -> Subject:
        """The other model's weights differ by `share` of their own size, as after fine-tuning."""
        model = copy.deepcopy(loaded.model)
        stream = torch.Generator().manual_seed(0)
        for weight in model.parameters():
            drawn = torch.randn(weight.shape, generator=stream).to(weight)
            weight.data += share * weight.data.square().mean().sqrt() * drawn
        return cls(loaded, replace(loaded, model=model), texts)

    def mismatch(self, exposure: Exposure, number: int) -> Mismatch:
        kinds = ROWS if exposure.kind in ("hidden", "kv") else WHOLE
        change = kinds[number % len(kinds)]
        first, second = self._pair(number, same=exposure.kind == "maps")
        a, b = (leak_of(self.loaded, ids, exposure) for ids in (first, second))
        if change is other_layer and exposure.kind != "pooled":
            b = leak_of(self.loaded, first, self._elsewhere(exposure))
        elif change is other_model:
            b = leak_of(self.other, first, exposure)
        values = {}
        for name in a.names:
            rows = [_rows(one.tensors[name]) for one in (a, b)]
            n = min(len(one) for one in rows)
            stream = torch.Generator().manual_seed(number)  # keys and values change alike
            changed = change(rows[0][:n], rows[1][:n], stream)
            maps = n if exposure.kind == "maps" else None
            values[name] = _back(changed, a.tensors[name], maps)
        leak = replace(a, **values)
        truth = first[: leak.length]
        if str(exposure) == "kv:1" and change in (swap_row, splice):
            # Each row is one token's there: the leak is, to the last digit, that of a spliced text.
            stream = torch.Generator().manual_seed(number)
            truth = change(truth, second[: leak.length], stream)
        return Mismatch(change.__name__, leak, truth.tolist())

    def _pair(self, number: int, same: bool) -> tuple[Tensor, Tensor]:
        """Two texts; maps of texts of different lengths cannot be laid over each other."""
        first = self.texts[number % len(self.texts)]
        after = (number + 1 + number // len(ROWS)) % len(self.texts)
        second = self.texts[after]
        if same and len(first) != len(second):
            middle = first[1:-1]
            second = torch.cat([first[:1], middle.flip(0), first[-1:]])
        return first, second

    def _elsewhere(self, exposure: Exposure) -> Exposure:
        last = anatomy(self.loaded.model).layers
        layer = exposure.layer
        return replace(exposure, layer=layer + 1 if layer < last else layer - 1)


def _rows(tensor: Tensor) -> Tensor:
    """(positions, numbers) of a leaked tensor; a pooled embedding is one row, maps are one too."""
    if tensor.ndim == 3:
        return tensor.transpose(0, 1).flatten(1)
    return tensor if tensor.ndim == 2 else tensor[None]


def _back(rows: Tensor, like: Tensor, maps: int | None) -> Tensor:
    """As it leaked; `maps` positions of maps are probabilities again."""
    if like.ndim == 3:
        back = rows.unflatten(1, (like.shape[0], like.shape[2])).transpose(0, 1)
        if maps is not None:
            back = back[..., :maps].clamp(min=1e-9)
            back = back / back.sum(-1, keepdim=True)
        return back.contiguous()
    return rows if like.ndim == 2 else rows[0]


def _attack(exposure: Exposure) -> Attack:
    """Short searches: what matters here is the judge."""
    states = EncoderStates(rounds=1)
    return {
        "hidden": states,
        "kv": CachedKeys(encoder=states),
        "maps": EncoderMaps(deeper=_SHORT),
        "pooled": PooledEmbedding(_SHORT),
    }[exposure.kind]


def false_claims(subject: Subject, plan: list[tuple[Exposure, range]]) -> Iterator[Row]:
    """A row for each exposure, and one for all."""
    made, claims, wrong = 0, 0, 0
    for exposure, numbers in plan:
        started = time.perf_counter()
        given = [subject.mismatch(exposure, number) for number in numbers]
        leaks = [one.leak for one in given]
        model, words = subject.loaded.model, subject.loaded.tokenizer
        found = invert.recover_texts(model, words, leaks, method=_attack(exposure))
        verified: Counter[str] = Counter()
        false: Counter[str] = Counter()
        for one, result in zip(given, found, strict=True):
            verified[one.kind] += result.verified
            false[one.kind] += result.verified and result.ids != one.truth
        made, claims, wrong = made + len(given), claims + verified.total(), wrong + false.total()
        seconds = (time.perf_counter() - started) / max(1, len(given))
        yield Row(
            f"{exposure}, {len(given)} corrupted or mismatched leaks: falsely verified",
            str(false.total()), "0", false.total() == 0,
            f"the right text verified: {_told(verified - false)}; false: {_told(false)}; "
            f"{seconds:.2f} s a leak",
        )  # fmt: skip
    details = f"{claims} verified, of which the text was right in {claims - wrong}"
    what = f"false 'verified' in {made} corrupted or mismatched leaks"
    yield Row(what, str(wrong), "0", wrong == 0, details)


def _told(counts: Counter[str]) -> str:
    return ", ".join(f"{kind} {count}" for kind, count in counts.items() if count) or "none"
