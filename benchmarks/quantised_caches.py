"""KV caches quantised as real programs do it: are texts read and verified, and none falsely?

`--kinds` selects:

    fp8 e4m3  transformers' cache of 8-bit floats, with a scale for each tensor
    fp8 e5m2  8-bit floats without a scale
    KIVI 4    groups of 4 bits from their least to their largest number (arXiv 2402.02750): a
              channel of keys over 32 tokens, 32 numbers of a token's values
    KIVI 2    the same with 2 bits

`--models` are folders or .gguf files of causal models; `--texts` texts, DREAM's turns
cut to 32 tokens, are read from the first layer's cache and from those at a quarter and
half of the layers. `--quick` reads a Llama with random weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import show
import subjects
from keyhole.models import Loaded, anatomy, load_model
from keyhole.recover import KeyValues
from show import Row

LENGTH = 32  # tokens: KIVI's groups of keys
KINDS = {"fp8 e4m3": 0, "fp8 e5m2": 0, "KIVI 4": 4, "KIVI 2": 2}  # bits of a group


def run(
    quick: bool,
    data: Path = subjects.DATA,
    device: str = subjects.DEVICE,
    models: list[Path] = [],  # noqa: B006 - read, never changed
    texts: int = 5,
    kinds: list[str] = list(KINDS),  # noqa: B006
) -> Iterator[Row]:
    if quick:
        ids = subjects.tiny_texts(1, LENGTH, framed=False)
        yield from of_model("random llama", subjects.tiny("llama"), ids, kinds[:3])
        return
    for name in models:
        loaded = load_model(name, device=device)
        words = subjects.encoded(loaded, subjects.turns(data, "dev"))
        ids = list(torch.cat(words)[: texts * LENGTH].view(texts, LENGTH))
        yield from of_model(Path(name).name, loaded, ids, kinds)


def of_model(
    name: str, loaded: Loaded, ids: list[Tensor], kinds: list[str]
) -> Iterator[Row]:
    layers = anatomy(loaded.model).layers
    for layer in sorted({0, layers // 4, layers // 2}):
        for kind in kinds:
            leaks = [leaked(loaded, text, kind, layer) for text in ids]
            yield row(
                f"{name}, {kind}, kv:{layer} of {layers}",
                *subjects.read(loaded, ids, leaks),
            )


@torch.no_grad()
def leaked(loaded: Loaded, text: Tensor, kind: str, layer: int) -> KeyValues:
    """Return the numbers of a text that such a cache gives back to the model."""
    import transformers

    base = anatomy(loaded.model).base
    text = text.to(anatomy(loaded.model).device)
    if kind == "fp8 e4m3":
        cache = transformers.QuantizedCache("fp8", base.config)
        base(input_ids=text[None], past_key_values=cache)
        width = anatomy(loaded.model).head_dim
        more = torch.zeros(
            1, anatomy(loaded.model).key_heads, 1, width, device=text.device
        )
        keys, values = cache.update(
            more, more, layer
        )  # returns everything kept, and these
        return KeyValues(keys[:, :, :-1].cpu(), values[:, :, :-1].cpu(), layer=layer)
    kept = transformers.DynamicCache()
    base(input_ids=text[None], past_key_values=kept)
    keys, values = (
        each.cpu() for each in (kept.layers[layer].keys, kept.layers[layer].values)
    )
    if bits := KINDS[kind]:
        by_channel = grouped(keys.transpose(-1, -2), bits).transpose(-1, -2)
        return KeyValues(by_channel, grouped(values, bits), layer=layer)
    return KeyValues(
        *(each.to(torch.float8_e5m2) for each in (keys, values)), layer=layer
    )


def grouped(numbers: Tensor, bits: int) -> Tensor:
    """Round groups of 32 along the last axis to even steps between their extremes."""
    groups = numbers.unflatten(-1, (-1, min(LENGTH, numbers.shape[-1])))
    least = groups.amin(-1, keepdim=True)
    most = groups.amax(-1, keepdim=True)
    step = ((most - least) / (2**bits - 1)).clamp(min=1e-12)
    return (((groups - least) / step).round() * step + least).flatten(-2)


def row(what: str, items: list[dict[str, Any]], seconds: float) -> Row:
    right = sum(item["right"] for item in items)
    tokens = sum(item["tokens"] for item in items)
    details = f"{right} of {tokens} tokens right; error {items[0]['precision'] or 0:.2f} of the "
    details += f"standard deviation; {seconds:.1f} s"
    return subjects.verified(what, items, details, promise=False)


if __name__ == "__main__":
    show.main(run)
