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
  would be uniform over everything, padding too. A rewrite that `empties` rows gets zeros there: the
  query contributes nothing.
- The softmax is in float32 for half-precision scores and in the scores' own precision otherwise.
  Some eager functions round float64 to float32 there, or stay in half precision.
- Models that compute attention on their own (DeBERTa, BLOOM, GPT-J) accept the setting and
  ignore it. Their first forward pass raises, because no call reached this function.
- One rewrite a model at a time. Several models may be rewritten inside each other or in threads;
  one model in two threads is refused. A copy of a model that is being rewritten is not rewritten.
- Gradient checkpointing runs layers again in the backward pass; they get the site they had.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from keyhole.core.errors import InputError
from keyhole.models.hooks import configurations, hooks
from keyhole.models.loading import transformers

NAME = "keyhole"  # of the implementation; must hold none of "eager", "sdpa", "flash", "paged"
_CLOSED = 50.0  # e⁻⁵⁰ is nothing next to 1; Swin masks with −100, the others with the minimum
_CROSS = ("cross", "encoder_attn", "encdec")  # in names of cross-attention modules
_ACTIVE: dict[nn.Module, Watch] = {}  # modules of models whose attention is rewritten now
_LOCK = threading.Lock()


@contextmanager
def rewriting(model: nn.Module, rewrite: Untouched) -> Generator[Sites]:
    """Every attention call of `model` goes through `rewrite` until the context ends."""
    _register()
    with _LOCK:
        watch = Watch(model, rewrite)
        if any(module in _ACTIVE for module in watch.names):
            raise InputError(
                "the model's attention is being rewritten already: leave that context first"
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
    cut, empty = rewrite.cut(site, shape), scores.new_zeros(1, dtype=torch.bool)
    if cut is not None:
        _check(cut, shape, site, "cut", boolean=True)
        empty = _emptied(cut, mask)
        scores = scores.masked_fill(cut & ~empty, torch.finfo(scores.dtype).min)
    weights = _softmax(scores, sinks)
    if rewrite.empties:
        weights = weights.masked_fill(empty, 0.0)
    rewrite.seen(site, weights)
    gate, bump = rewrite.gate(site, shape), rewrite.bump(site, shape)
    if gate is not None:
        _check(gate, shape, site, "gate")
        weights = weights * gate
    if bump is not None:
        _check(bump, shape, site, "bump")
        weights = weights + bump
    return weights


def _emptied(cut: Tensor, mask: Tensor | None) -> Tensor:
    """The rows in which a cut leaves nothing to attend to."""
    closed = cut if mask is None else cut | (mask < mask.amax(-1, keepdim=True) - _CLOSED)
    return closed.all(-1, keepdim=True)


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Row-wise; a sink is one more score a head, which takes its share and is then dropped."""
    dtype = torch.promote_types(scores.dtype, torch.float32)
    if sinks is None:
        return torch.softmax(scores, -1, dtype=dtype)
    extra = sinks.reshape(1, -1, 1, 1).expand(scores.shape[0], -1, scores.shape[-2], -1)
    joined = torch.cat([scores, extra.to(scores.dtype)], -1)
    return torch.softmax(joined, -1, dtype=dtype)[..., :-1]


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


# What may be done to attention, and where: the types that attacks and defences share.


@dataclass(frozen=True)
class Site:
    """One attention call inside one forward pass; (name, call) identifies it."""

    index: int  # 0, 1, 2… in the order of the calls of one forward pass
    name: str  # the module's qualified name
    call: int  # how often this module was called before in this forward pass
    kind: str  # "self" or "cross"


class Untouched:
    """What to do at each site: a rewrite that changes nothing; override what you need.

    `shape` is (batch, heads, queries, keys), and tensors broadcast to it. Vision models with
    windows (Swin) have the windows in the batch axis. With `empties`, a row that a cut empties
    contributes nothing, instead of staying as it was.
    """

    empties: bool = False

    def begin(self, inputs: Mapping[str, Any]) -> bool | None:
        """A forward pass starts, with these arguments. False: leave this one alone.

        It then runs with the implementation that the model had before, bit for bit.
        """
        del inputs

    def cut(self, site: Site, shape: torch.Size) -> Tensor | None:
        """Boolean, True: may not be attended to. The row renormalises over the rest."""
        del site, shape

    def gate(self, site: Site, shape: torch.Size) -> Tensor | None:
        """A factor on the probabilities; the row does not renormalise."""
        del site, shape

    def bump(self, site: Site, shape: torch.Size) -> Tensor | None:
        """A summand to the probabilities: zeros that want a gradient are what attacks rank by."""
        del site, shape

    def seen(self, site: Site, probabilities: Tensor) -> None:
        """The probabilities after the cut, before gate, bump and dropout; part of the graph."""
        del site, probabilities


@dataclass
class Sites:
    """The attention calls of the last forward pass, and how many passes there were."""

    calls: list[tuple[Site, torch.Size]] = field(default_factory=list[tuple[Site, torch.Size]])
    forwards: int = 0


# Forward passes of a model under a rewrite: which call of attention is which.
#
# Hooks on the model and the models inside it open and close a pass: the one that is called first
# opens it, be it the model, its base model or its encoder. They are removed, and the configurations
# restored, whatever happens.


class Watch:
    """One model under one rewrite: numbers its attention calls, forward pass by forward pass."""

    def __init__(self, model: nn.Module, rewrite: Untouched) -> None:
        self.model = model
        self.rewrite = rewrite
        self.sites = Sites()
        self.setting = _Setting(model)
        self.names = {module: name for name, module in model.named_modules()}
        self._kinds = {module: _kind(name, module) for module, name in self.names.items()}
        self._counts: dict[nn.Module, int] = {}
        self._last: dict[nn.Module, Site] = {}
        self._depth = 0
        self._alone = False
        self._thread = 0

    @contextmanager
    def hooks(self) -> Generator[None]:
        library = transformers()
        parts = [m for m in self.names if m is self.model or isinstance(m, library.PreTrainedModel)]
        with hooks(
            *((partial(m.register_forward_pre_hook, with_kwargs=True), self._enter) for m in parts),
            *((partial(m.register_forward_hook, always_call=True), self._leave) for m in parts),
        ):
            yield

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._depth += 1  # before anything can raise: `_leave` is called in any case
        if self._depth > 1:
            if self._thread != threading.get_ident():
                raise InputError("two threads use the model at once: give each its own copy")
            return
        self._thread = threading.get_ident()
        self._counts, self._last = {}, {}
        self.sites.calls = []
        self._alone = self.rewrite.begin(_named(module, args, kwargs)) is False
        if self._alone:
            self.setting.put_back()

    def _leave(self, _module: nn.Module, _args: Any, output: Any) -> None:
        self._depth -= 1
        if self._depth:
            return
        if self._alone:
            self._alone = False
            self.setting.put_ours()
            return
        if output is None:  # the pass raised an error of its own
            return
        self.sites.forwards += 1
        if not self.sites.calls:
            raise InputError(
                f"{type(self.model).__name__} computes attention on its own, not through "
                "transformers' AttentionInterface"
            )

    def site(self, module: nn.Module, shape: torch.Size) -> Site:
        if self._depth == 0:
            return self._again(module)
        count = self._counts.get(module, 0)
        site = Site(len(self.sites.calls), self.names[module], count, self._kinds[module])
        self._counts[module] = count + 1
        self._last[module] = site
        self.sites.calls.append((site, shape))
        return site

    def _again(self, module: nn.Module) -> Site:
        """The site of a call in the backward pass: ambiguous if the module was called often."""
        if self._counts.get(module) != 1:
            raise InputError(
                f"{self.names[module]} was called outside of the model's forward pass (gradient "
                f"checkpointing of a module called {self._counts.get(module, 0)} times?)"
            )
        return self._last[module]


def _kind(name: str, module: nn.Module) -> str:
    path = [*name.lower().split(".")[-2:], type(module).__name__.lower()]
    return "cross" if any(mark in part for mark in _CROSS for part in path) else "self"


def _named(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a forward pass by name, positional ones too where the names are known."""
    order = [
        name
        for name, parameter in inspect.signature(module.forward).parameters.items()
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    return {**dict(zip(order, args, strict=False)), **kwargs}


class _Setting:
    """Our implementation in every configuration of the model; what was there before returns."""

    def __init__(self, model: nn.Module) -> None:
        self.before = [(config, config._attn_implementation) for config in configurations(model)]

    def put_ours(self) -> None:
        for config, _ in self.before:
            config._attn_implementation = NAME

    def put_back(self) -> None:
        # Setting one sets those inside it too; they come later and get their own back.
        for config, old in self.before:
            config._attn_implementation = old

    def __enter__(self) -> None:
        self.put_ours()

    def __exit__(self, *_: object) -> None:
        self.put_back()
