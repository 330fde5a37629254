"""One attention function for every architecture, which cuts, scales and shows attention.

*Unveiling Vulnerability of Self-Attention*, arXiv 2402.16470. A unit is an entry
(layer, head, query, key) of

    A = softmax(QKᵀ·scale + bias + mask)    O = A V

`cut` removes units before the softmax, so that the row renormalises. `gate` and `bump`
multiply and add to `A` after it, with gradients. `seen` receives `A` after the cuts.
`rewriting(model, rewrite)` registers this function with transformers'
`AttentionInterface`, and the mask of its "eager" implementation with
`AttentionMaskInterface`: without that, causal models get no mask at all and answer
wrongly. Layers are identified by module name and count of calls: `layer_idx` is missing
in some models, repeated in others, and ALBERT calls one module many times.

- A cut never opens what the model masks (padding, the future), and never empties a row: where it
  would remove the last key that a query may attend to, that row is left as it was. A
  softmax over nothing would be uniform over everything, including padding. If the
  rewrite sets `empties`, such a row is zero instead.
- The softmax is in float32 for half-precision scores and in the scores' own precision otherwise.
  Some eager functions round float64 to float32 there, or stay in half precision.
- Models that compute attention on their own (DeBERTa, BLOOM, GPT-J) accept any implementation and
  ignore it. Their first forward pass raises InputError, because no call reached this
  function.
- A model has one rewrite at a time. Several models may be rewritten inside each other or in
  threads; one model in two threads is refused. A copy of a model that is being
  rewritten is not rewritten.
- Gradient checkpointing runs layers again in the backward pass; each call keeps its `Site`.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from keyhole.core.errors import InputError
from keyhole.models.hooks import AttentionImplementation, Wanted, hooks
from keyhole.models.loading import transformers

# transformers looks for words in names, such as "flash" and "sdpa": none is here
NAME = "keyhole"
# a key masked this far below the row's largest is closed: e⁻⁵⁰ ≈ 0, Swin adds −100
_CLOSED = 50.0
_CROSS = ("cross", "encoder_attn", "encdec")  # in names of cross-attention modules


# What may be done to attention, and where


@dataclass(frozen=True)
class Site:
    """One attention call inside one forward pass; (name, call) identifies it."""

    index: int  # among the calls of one forward pass, from 0
    name: str  # the module's qualified name
    call: int  # how often this module was called before in this forward pass
    kind: str  # "self" or "cross"


class Untouched:
    """The base class of all rewrites, which changes nothing: override what you need.

    `shape` is (batch, heads, queries, keys), and tensors broadcast to it. Vision models
    with windows (Swin) have the windows in the batch axis. The order is masked, cut,
    softmax, seen, gate, bump. With `empties`, a row that a cut empties becomes zero,
    instead of staying as it was.
    """

    empties: bool = False

    def begin(self, inputs: Mapping[str, Any]) -> bool | None:
        """Called when a forward pass starts, with its arguments.

        If it returns False, the model runs this pass without the rewrite, bit for bit.
        """

    def masked(self, site: Site, mask: Tensor | None) -> None:
        """Called before the cut with what the model's own mask adds to the scores, if it has one.

        The mask broadcasts to `shape`.
        """

    def cut(self, site: Site, shape: torch.Size) -> Tensor | None:
        """Return True for each key that may not be attended to; the row renormalises."""

    def gate(self, site: Site, shape: torch.Size) -> Tensor | None:
        """Return a factor on the probabilities; the row does not renormalise."""

    def bump(self, site: Site, shape: torch.Size) -> Tensor | None:
        """Return what is added to the probabilities: zeros, if only the gradient is wanted.

        Attacks rank units by that gradient.
        """

    def seen(self, site: Site, probabilities: Tensor) -> None:
        """Called with the probabilities between cut and gate; they are part of the graph."""


@dataclass
class Sites:
    """The attention calls of the last forward pass, and how many passes there were."""

    calls: list[tuple[Site, torch.Size]] = field(default_factory=list[Any])
    forwards: int = 0


@contextmanager
def rewriting(model: nn.Module, rewrite: Untouched) -> Generator[Sites]:
    """Send every attention call of `model` through `rewrite` until the context ends."""
    library = transformers()
    if NAME not in library.AttentionInterface():
        library.AttentionInterface.register(NAME, _attend)
        library.AttentionMaskInterface.register(NAME, library.masking_utils.eager_mask)
    with _LOCK:
        watch = _Watch(model, rewrite)
        if any(module in _ACTIVE for module in watch.names):
            raise InputError(
                "the model's attention is being rewritten already: leave that context first"
            )
        _ACTIVE.update(dict.fromkeys(watch.names, watch))
    try:
        with hooks(*watch.hooks()), watch.setting:
            yield watch.sites
    finally:
        with _LOCK:
            for module in watch.names:
                _ACTIVE.pop(module, None)


# The forward passes of a model, in which attention calls are numbered


class _Watch:
    """One model under one rewrite; it numbers the attention calls of each forward pass.

    A pass starts and ends with whichever of the model, its base model or its encoder is
    called first: all of them have hooks.
    """

    def __init__(self, model: nn.Module, rewrite: Untouched) -> None:
        self.model = model
        self.rewrite = rewrite
        self.sites = Sites()
        self.setting = AttentionImplementation(model, NAME)
        self.names = {module: name for name, module in model.named_modules()}
        self._counts: dict[nn.Module, int] = {}  # calls of each module in this pass
        self._latest: dict[nn.Module, Site] = {}
        # how many calls of hooked modules are going on, inside each other
        self._depth = 0
        self._skipped = False  # the rewrite leaves this pass alone
        self._thread = 0

    def hooks(self) -> Iterator[Wanted]:
        library = transformers()
        for module in self.names:
            if module is self.model or isinstance(module, library.PreTrainedModel):
                before = partial(module.register_forward_pre_hook, with_kwargs=True)
                yield before, self._enter
                after = partial(module.register_forward_hook, always_call=True)
                yield after, self._leave

    def _enter(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self._depth += 1  # before anything can raise: `_leave` is called in any case
        if self._depth > 1:
            if self._thread != threading.get_ident():
                raise InputError(
                    "two threads use the model at once: give each its own copy"
                )
            return
        self._thread = threading.get_ident()
        self._counts = {}
        self._latest = {}
        self.sites.calls = []
        self._skipped = self.rewrite.begin(_named(module, args, kwargs)) is False
        if self._skipped:
            # back to the model's own implementation, until `_leave`
            self.setting.__exit__()

    def _leave(
        self,
        _module: nn.Module,
        _args: Any,
        output: Any,
    ) -> None:
        self._depth -= 1
        if self._depth:
            return
        if self._skipped:
            self._skipped = False
            self.setting.__enter__()
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
        """Return the site of the attention call that is going on in `module`."""
        count = self._counts.get(module, 0)
        if self._depth == 0:  # gradient checkpointing runs the layer again
            if count != 1:  # which of its calls is run again cannot be told
                raise InputError(
                    f"{self.names[module]} was called outside of the model's forward pass "
                    f"(gradient checkpointing of a module called {count} times?)"
                )
            return self._latest[module]
        kind = _kind(self.names[module], module)
        site = Site(len(self.sites.calls), self.names[module], count, kind)
        self._counts[module] = count + 1
        self._latest[module] = site
        self.sites.calls.append((site, shape))
        return site


def _kind(name: str, module: nn.Module) -> str:
    path = [*name.lower().split(".")[-2:], type(module).__name__.lower()]
    return "cross" if any(mark in part for mark in _CROSS for part in path) else "self"


def _named(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> dict[str, Any]:
    """Return the arguments of a forward pass by name, also positional ones with known names."""
    return {**inspect.signature(module.forward).bind_partial(*args).arguments, **kwargs}


# modules of models whose attention is being rewritten
_ACTIVE: dict[nn.Module, _Watch] = {}
_LOCK = threading.Lock()


# The attention function


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
    """Compute attention as eager does, with the rewrite of the model that `module` belongs to."""
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
        site = watch.site(module, scores.shape)
        weights = _rewritten(watch.rewrite, site, scores, mask, s_aux)
    weights = nn.functional.dropout(weights.to(value.dtype), dropout, module.training)
    return (weights @ value).transpose(1, 2).contiguous(), weights


def _rewritten(
    rewrite: Untouched,
    site: Site,
    scores: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None,
) -> Tensor:
    """Return the probabilities: softmax of the scores, changed as the rewrite says."""
    shape = scores.shape
    empty = scores.new_zeros(1, dtype=torch.bool)
    rewrite.masked(site, mask)
    cut = _expect("cut", rewrite.cut(site, shape), site, shape)
    if cut is not None:
        closed = cut
        if mask is not None:
            closed = cut | (mask < mask.amax(-1, keepdim=True) - _CLOSED)
        empty = closed.all(-1, keepdim=True)
        scores = scores.masked_fill(cut & ~empty, torch.finfo(scores.dtype).min)
    weights = _softmax(scores, sinks)
    if rewrite.empties:
        weights = weights.masked_fill(empty, 0.0)
    rewrite.seen(site, weights)
    gate = _expect("gate", rewrite.gate(site, shape), site, shape)
    bump = _expect("bump", rewrite.bump(site, shape), site, shape)
    if gate is not None:
        weights = weights * gate
    return weights if bump is None else weights + bump


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Return the softmax over keys.

    A sink (`s_aux` of gpt-oss) is one more score of each head, whose probability is
    dropped.
    """
    dtype = torch.promote_types(scores.dtype, torch.float32)
    if sinks is None:
        return torch.softmax(scores, -1, dtype=dtype)
    extra = sinks.reshape(1, -1, 1, 1).expand(scores.shape[0], -1, scores.shape[-2], -1)
    joined = torch.cat([scores, extra.to(scores.dtype)], -1)
    return torch.softmax(joined, -1, dtype=dtype)[..., :-1]


def _as_float(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Convert a boolean mask, which is True where a key may be attended to."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill(
        ~mask, torch.finfo(dtype).min
    )


def _expect(
    what: str,
    given: Tensor | None,
    site: Site,
    shape: torch.Size,
) -> Tensor | None:
    """Return what a rewrite gave; raise InputError if it does not fit the scores."""
    if given is None:
        return None
    if what == "cut" and given.dtype != torch.bool:
        raise InputError(f"expected a boolean cut at {site.name}, got {given.dtype}")
    try:
        fits = torch.broadcast_shapes(given.shape, shape) == shape
    except RuntimeError:
        fits = False
    if not fits:
        raise InputError(
            f"expected a {what} that broadcasts to {tuple(shape)} at {site.name}, "
            f"got {tuple(given.shape)}"
        )
    return given
