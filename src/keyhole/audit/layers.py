"""Which layers of a model an audit looks at, and which it leaves out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from keyhole.core import Skip
from keyhole.core.errors import InputError
from keyhole.core.exposure import Exposure
from keyhole.models.anatomy import Anatomy, anatomy
from keyhole.models.capture import Exposure as Captured
from keyhole.recover.registry import ATTACKS, Row

Layers = Sequence[int] | Literal["all"]
_CHOSEN = ("hidden", "kv")  # the kinds of leaks whose layers --layers chooses


def layers_of(row: Row, chosen: Layers | None, parts: Anatomy) -> Sequence[int | None]:
    """The layers that are looked at: the registry's own choice, or a person's."""
    if chosen is None or row.kind not in _CHOSEN:
        return row.layers(parts)
    if chosen == "all":
        return _every_layer(row.kind, parts)
    for layer in chosen:
        Captured(row.kind, layer).block(parts)  # said before the first check: there is such one
    return list(chosen)


def _every_layer(kind: str, parts: Anatomy) -> range:
    """Counted as the exposure counts them: a causal model's cache from 0, all others from 1."""
    first = 0 if kind == "kv" and parts.causal else 1
    return range(first, first + parts.layers)


def left_out(part: str, model: Any, chosen: Layers | None) -> tuple[Skip, ...]:
    """The layers of which nothing was tried although others were: three of twelve are not all."""
    try:
        parts = anatomy(model)
    except InputError:  # said by the checks of texts
        return ()
    rows = [row for _, row in ATTACKS.rows() if row.causal == parts.causal]
    tried: dict[str, set[int]] = {}
    for row in rows:
        if not row.permuted:
            numbers = (layer for layer in layers_of(row, chosen, parts) if layer is not None)
            tried.setdefault(row.kind, set()).update(numbers)
    exposures = {row.kind: row.exposure for row in reversed(rows) if not row.permuted}
    return tuple(
        _untried(replace(exposures[kind], part=part), kind, layers, parts)
        for kind, layers in tried.items()
        if layers and not layers.issuperset(_every_layer(kind, parts))
    )


def _untried(exposure: Exposure, kind: str, tried: set[int], parts: Anatomy) -> Skip:
    every = _every_layer(kind, parts)
    missing = [layer for layer in every if layer not in tried]
    inside = sum(layer in every for layer in tried)  # hidden states of layer 0 are the embeddings
    other = f"keyhole lab capture --expose {kind}:{missing[0]}, then keyhole recover"
    how = "--layers all tries every one" if kind in _CHOSEN else f"these take longer: {other}"
    reason = f"{inside} of {parts.layers} layers were tried; {how}"
    return Skip(exposure, "none", reason, layers=tuple(missing))
