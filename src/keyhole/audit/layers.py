"""Which layers of a model an audit looks at, and which it leaves out."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any, Literal

from keyhole.core import Skip
from keyhole.core.errors import InputError
from keyhole.models.anatomy import Anatomy, anatomy
from keyhole.models.capture import Exposure
from keyhole.recover.registry import ATTACKS, Line

Layers = Sequence[int] | Literal["all"]
_CHOSEN = ("hidden", "kv")  # the kinds of leaks whose layers --layers chooses


def layers_of(line: Line, chosen: Layers | None, parts: Anatomy) -> Sequence[int | None]:
    """The layers that are looked at: the registry's own choice, or a person's."""
    if chosen is None or line.kind not in _CHOSEN:
        return line.layers(parts)
    if chosen == "all":
        return _every_layer(line.kind, parts)
    for layer in chosen:
        Exposure(line.kind, layer).block(parts)  # said before the first check: there is such one
    return list(chosen)


def _every_layer(kind: str, parts: Anatomy) -> range:
    """Counted as the exposure counts them: a causal model's cache from 0, all others from 1."""
    first = 0 if kind == "kv" and parts.causal else 1
    return range(first, first + parts.layers)


def left_out(surface: str, model: Any, chosen: Layers | None) -> tuple[Skip, ...]:
    """The layers of which nothing was tried although others were: three of twelve are not all."""
    try:
        parts = anatomy(model)
    except InputError:  # said by the checks of texts
        return ()
    lines = [line for _, line in ATTACKS.lines() if line.causal == parts.causal]
    tried: dict[str, set[int]] = {}
    for line in lines:
        if not line.permuted:
            numbers = (layer for layer in layers_of(line, chosen, parts) if layer is not None)
            tried.setdefault(line.kind, set()).update(numbers)
    names = {line.kind: line.exposure for line in reversed(lines) if not line.permuted}
    return tuple(
        _untried(names[kind], kind, layers, parts, surface)
        for kind, layers in tried.items()
        if layers and not layers.issuperset(_every_layer(kind, parts))
    )


def _untried(exposure: str, kind: str, tried: set[int], parts: Anatomy, surface: str) -> Skip:
    every = _every_layer(kind, parts)
    missing = [layer for layer in every if layer not in tried]
    inside = sum(layer in every for layer in tried)  # hidden states of layer 0 are the embeddings
    other = f"keyhole lab capture --expose {kind}:{missing[0]}, then keyhole recover"
    how = "--layers all tries every one" if kind in _CHOSEN else f"these take longer: {other}"
    layers = f"layer{'' if len(missing) == 1 else 's'} {spans(missing)}"
    return Skip(
        f"{exposure} of {layers}{f', {surface}' if surface else ''}", "none",
        f"{inside} of {parts.layers} layers were tried; {how}",
    )  # fmt: skip


def spans(numbers: Sequence[int]) -> str:
    """Numbers in order as people write them: 2–5, 7–11."""
    parts: list[str] = []
    for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        row = [number for _, number in run]
        parts.append(f"{row[0]}–{row[-1]}" if len(row) > 1 else str(row[0]))
    return ", ".join(parts)
