"""Which layers rows may come from: how likely they are beside rows of ordinary texts.

Every layer has its own means and spreads. With μ and σ those of each number over rows of ordinary
texts at a layer, rows x are as likely as −Σ log σ − Σ (x − μ)²/2σ² says. That only orders the
layers to try: a layer is taken if a text read at it is verified, and not before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from keyhole.models import demo
from keyhole.models.capture import Exposure, capture
from keyhole.recover.attack import Target
from keyhole.recover.foreign.section import Section

_FLOOR = 1e-6  # of the largest spread: a number that hardly varies decides nothing by itself
_TEXTS = (*demo.TEXTS, *(example.text for example in demo.EXAMPLES[::2]))


@torch.no_grad()
def likely_layers(target: Target, section: Section) -> list[int]:
    """All layers that such a section may be of, the likeliest first."""
    parts = target.parts
    from_zero = section.kind == "hidden" or (section.kind == "kv" and parts.causal)
    layers = list(
        range(0 if from_zero else 1, parts.layers + (section.kind == "hidden" or not from_zero))
    )
    if section.kind == "maps":  # as wide as the text is long: there is nothing to compare by
        return layers
    seen = _compared(_rows({name: tensor.float() for name, tensor in section.tensors.items()}))
    alone = seen.shape[1] == 1  # … and then the first position is compared with first ones
    texts = [target.tokenizer(text)["input_ids"][: parts.max_length] for text in _TEXTS]
    own = [_at_layers(target, section.kind, layers, ids) for ids in texts]
    likelihoods = [
        _likelihood(
            seen,
            torch.cat([_compared(rows[:, : 1 if alone else None]).flatten(0, 1) for rows in each]),
        )
        for each in zip(*own, strict=True)
    ]
    return [layers[at] for at in torch.tensor(likelihoods).argsort(descending=True).tolist()]


def _compared(rows: Tensor) -> Tensor:
    """Without the first position, which is unlike all others, where there are others."""
    return rows[:, 1:] if rows.shape[1] > 1 else rows


def _at_layers(
    target: Target, kind: str, layers: Sequence[int], ids: Sequence[int]
) -> list[Tensor]:
    """Rows (1, n, numbers) of a text at every layer: in one pass where the library gives all."""
    text = torch.tensor([ids], device=target.parts.device)
    base = cast("Any", target.parts.base)
    if kind == "hidden":
        return list(base(input_ids=text, output_hidden_states=True).hidden_states)
    if kind == "kv" and target.parts.causal:
        cache = base(input_ids=text, use_cache=True).past_key_values
        return [_rows({"keys": layer.keys, "values": layer.values}) for layer in cache.layers]
    return [_rows(capture(target.model, Exposure(kind, layer), ids=text)) for layer in layers]


def _likelihood(seen: Tensor, own: Tensor) -> float:
    own, rows = own.double().cpu()[:, : seen.shape[-1]], seen.double().flatten(0, 1)
    rows = rows[rows.isfinite().all(-1)]
    spread = own.std(0)
    spread = spread.clamp(min=_FLOOR * max(float(spread.max()), 1e-30))
    strength = ((rows - own.mean(0)) / spread).square() / 2 + spread.log()
    return -float(strength.mean(-1).median())


def _rows(tensors: dict[str, Tensor]) -> Tensor:
    """(texts, positions, numbers), as leaks have them."""
    if "keys" not in tensors:
        return tensors["values"]
    both = torch.cat([tensors["keys"], tensors["values"]], -1)
    return both.transpose(-3, -2).flatten(-2)
