"""One attention function for every architecture, through which attention is cut, gated and seen.

*Unveiling Vulnerability of Self-Attention*, arXiv 2402.16470. A unit is an entry (layer, head,
query, key) of

    A = softmax(QKᵀ·scale + bias + mask)    O = A V

`cut` removes units before the softmax, so that the row renormalises; `gate` and `bump` multiply and
add to `A` after it, with gradients; `seen` is shown `A` after the cuts. `rewriting(model, rewrite)`
registers this function with transformers' `AttentionInterface`, and eager's mask with
`AttentionMaskInterface`: without the second, causal models get no mask at all and answer wrongly.
Layers are told apart by qualified module name and count of calls, because `layer_idx` is missing
in some models, repeated in others, and ALBERT calls one module many times.

- A cut never opens what the model masks (padding, the future), and never empties a row: where it
  would take the last key a query may attend to, that row is left as it was. A softmax over nothing
  would be uniform over everything, padding too.
- The softmax is in float32 for half-precision scores and in the scores' own precision otherwise.
  Some eager functions round float64 to float32 there, or stay in half precision.
- Models that compute attention on their own (DeBERTa, BLOOM, GPT-J) take the setting without a word
  and ignore it. Their first forward pass raises, because nothing came by.
- One rewrite a model at a time. Several models may be rewritten inside each other or in threads;
  one model in two threads is refused. A copy of a model that is being rewritten is not rewritten.
- Gradient checkpointing runs layers again in the backward pass; they get the site they had.
"""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from keyhole.core.errors import InputError
from keyhole.models.loading import transformers
from keyhole.models.passes import NAME, Watch
from keyhole.models.rewrite import Rewrite, Site, Sites, Untouched

__all__ = ["Rewrite", "Site", "Sites", "Untouched", "rewriting", "sites_of"]

_CLOSED = 50.0  # e⁻⁵⁰ is nothing beside 1; Swin masks with −100, the others with the minimum


@contextmanager
def rewriting(model: nn.Module, rewrite: Rewrite) -> Generator[Sites]:
    """Every attention call of `model` goes through `rewrite` until the context ends."""
    _register()
    with _LOCK:
        watch = Watch(model, rewrite)
        if any(module in _ACTIVE for module in watch.names):
            raise InputError(
                "expected a model that is not being rewritten, got one inside another rewriting"
            )
        _ACTIVE.update(dict.fromkeys(watch.names, watch))
    try:
        with watch.hooks(), watch.setting:
            yield watch.sites
    finally:
        with _LOCK:
            for module in watch.names:
                _ACTIVE.pop(module, None)


def sites_of(model: nn.Module, **inputs: Any) -> list[tuple[Site, torch.Size]]:
    """The sites of one forward pass with their shapes; raises where attention cannot be reached."""
    with rewriting(model, Untouched()) as sites, torch.no_grad():
        model(**inputs)
    return sites.calls


_ACTIVE: dict[nn.Module, Watch] = {}
_LOCK = threading.Lock()


def _register() -> None:
    library = transformers()
    if NAME not in library.AttentionInterface():
        masks = library.masking_utils
        library.AttentionInterface.register(NAME, _attend)
        library.AttentionMaskInterface.register(NAME, masks.eager_mask)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    position_bias: Tensor | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Attention as eager computes it, with the rewrite of the model that `module` belongs to."""
    if key.shape[1] != query.shape[1]:  # several heads of queries share one of keys
        key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
        value = value.repeat_interleave(query.shape[1] // value.shape[1], 1)
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if position_bias is not None:
        scores = scores + position_bias
    mask = _as_float(attention_mask, scores.dtype)
    if mask is not None:
        scores = scores + mask
    watch = _ACTIVE.get(module)
    if watch is None:
        weights = _softmax(scores, s_aux)
    else:
        weights = _rewritten(watch, watch.site(module, scores.shape), scores, mask, s_aux)
    weights = nn.functional.dropout(weights.to(value.dtype), dropout, module.training)
    return (weights @ value).transpose(1, 2).contiguous(), weights


def _rewritten(
    watch: Watch, site: Site, scores: Tensor, mask: Tensor | None, sinks: Tensor | None
) -> Tensor:
    rewrite, shape = watch.rewrite, scores.shape
    cut = rewrite.cut(site, shape)
    if cut is not None:
        _check(cut, shape, site, "cut", boolean=True)
        scores = scores.masked_fill(_leaving_a_key(cut, mask), torch.finfo(scores.dtype).min)
    weights = _softmax(scores, sinks)
    rewrite.seen(site, weights)
    gate, bump = rewrite.gate(site, shape), rewrite.bump(site, shape)
    if gate is not None:
        _check(gate, shape, site, "gate")
        weights = weights * gate
    if bump is not None:
        _check(bump, shape, site, "bump")
        weights = weights + bump
    return weights


def _leaving_a_key(cut: Tensor, mask: Tensor | None) -> Tensor:
    """The cut without the rows in which it would leave nothing to attend to."""
    closed = cut if mask is None else cut | (mask < mask.amax(-1, keepdim=True) - _CLOSED)
    return cut & ~closed.all(-1, keepdim=True)


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Row-wise; a sink is one more score a head, which takes its share and is then dropped."""
    dtype = torch.promote_types(scores.dtype, torch.float32)
    if sinks is None:
        return torch.softmax(scores, -1, dtype=dtype)
    extra = sinks.reshape(1, -1, 1, 1).expand(scores.shape[0], -1, scores.shape[-2], -1)
    together = torch.cat([scores, extra.to(scores.dtype)], -1)
    return torch.softmax(together, -1, dtype=dtype)[..., :-1]


def _as_float(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A boolean mask says True where a key may be attended to."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)


def _check(given: Tensor, shape: torch.Size, site: Site, what: str, boolean: bool = False) -> None:
    if boolean and given.dtype != torch.bool:
        raise InputError(f"expected a boolean {what} at {site.name}, got {given.dtype}")
    padded = (1,) * (len(shape) - given.ndim) + tuple(given.shape)
    fits = len(padded) == len(shape) and all(
        size in (1, whole)
        for size, whole in zip(padded, cast("tuple[int, ...]", shape), strict=True)
    )
    if not fits:
        raise InputError(
            f"expected a {what} that broadcasts to {tuple(shape)} at {site.name}, "
            f"got {tuple(given.shape)}"
        )
