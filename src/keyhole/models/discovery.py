"""Find the parts of a model by running it: blocks, projections, norms, positions.

No family is known by name. A few tokens are run through the model while hooks record
the arguments and the output of every module, and the parts follow from that:

| part | how it is recognised |
|---|---|
| block ℓ | the innermost module with hidden state ℓ−1 as input and hidden state ℓ as output |
| final norm | the modules between the last block and the last hidden state |
| causal | another last token leaves the states before it unchanged |
| attention output | the first linear map of a block whose input mixes positions |
| values | with all maps before that one at 0, the rows that still change other positions |
| keys | the other rows that change other positions |
| queries | the rows that change their own position alone |
| rotary positions | a token's embedding is the same at all positions, and its keys are not |

Layers are numbered as `output_hidden_states=True` numbers them: 0 is the embeddings, ℓ
the output of block ℓ, and the last one of most causal models has passed the final norm.
A model that runs one block many times (ALBERT) has that block many times in `blocks`.
For a model of an encoder and a decoder, the parts are those of the encoder; the decoder
is a model of its own (pairs.py). Parts that a model does not show are missing,
`Anatomy.lacks` gives the reason, and the others are used.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn

from keyhole.core.errors import InputError, first_line
from keyhole.core.float64 import random_stream
from keyhole.models.hooks import (
    AttentionImplementation,
    Wanted,
    evaluating,
    hooks,
    unhooked,
)
from keyhole.models.rotary import Rotation, turn_of, ways_to_undo

_LENGTH = 6  # tokens of the texts that are run
# Differences relative to a vector's length. Larger ones are no rounding errors:
_STATE_TOLERANCE = 1e-5
# Keys come out of a rotation, whose cosines and sines are rounded as well.
_KEY_TOLERANCE = 1e-3
# Between what a norm gives for an input and for a multiple of it.
_NORM_TOLERANCE = 0.01
_SMALL = 0.1  # replaces the outputs of projections: so small that no softmax saturates


@dataclass(frozen=True, eq=False)
class AttentionPaths:
    """The paths, within a block, of its attention, of the output map, and of the norm before it.

    `projections` has, for queries, keys and values, the path of a map, the number of
    its rows that are theirs, and these rows where they are not all.
    """

    module: str
    output: str
    norm: str = ""
    projections: tuple[tuple[str, int, Tensor | None], ...] | None = None


@dataclass(frozen=True, eq=False, kw_only=True)
class Structure:
    """The parts of a model, as paths of modules and numbers."""

    family: str  # the name in its configuration, for messages
    layers: int
    width: int
    heads: int
    key_heads: int
    head_dim: int
    causal: bool
    rotary: bool
    scaled: bool  # the rows of the token table are multiplied by something
    tied: bool  # the last hidden state is what the model returns
    takes_embeddings: bool  # in place of token ids
    ordinary: int  # a token without a special meaning
    block_paths: tuple[str, ...]
    attention_paths: tuple[AttentionPaths | None, ...]
    # for each layer the norm that its states come out of, or ""
    closing_paths: tuple[str, ...]
    # its path, and the number of the first position
    position_table: tuple[str, int] | None
    # keys and values, by block number from 1
    cached: Mapping[int, tuple[torch.Size, torch.Size]]
    mapped: frozenset[int]  # the numbers of the blocks that return maps
    rotations: tuple[Rotation | None, ...]


# One run of a model, with every call of its modules


@dataclass(frozen=True, eq=False)
class _Call:
    """One call of the module at a path: its arguments and its output."""

    path: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any

    @property
    def state(self) -> Tensor | None:
        return state_among(self.args, self.kwargs)

    @property
    def result(self) -> Tensor | None:
        """The output, or the first item of it."""
        output = self.output
        if isinstance(output, dict):
            output = tuple(output.values())
        if isinstance(output, tuple | list) and output:
            output = cast("Sequence[Any]", output)[0]
        return output if isinstance(output, Tensor) else None

    @property
    def is_leaf(self) -> bool:
        return next(self.module.children(), None) is None


def state_among(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """Return the hidden states among a module's arguments."""
    state = args[0] if args else kwargs.get("hidden_states")
    return state if isinstance(state, Tensor) else None


def cache_among(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the cache among a module's arguments, for which models have several names."""
    candidates = (_own_cache(value) for value in (*args, *kwargs.values()))
    return next((cache for cache in candidates if hasattr(cache, "layers")), None)


def _own_cache(cache: Any) -> Any:
    """Return, of a decoder's two caches, the one of its own tokens."""
    return getattr(cache, "self_attention_cache", cache)


def maps_among(output: Any) -> Tensor | None:
    """Return the maps (b, h, n, n) in an attention's output; scores and biases may be negative."""
    rest = output[1:] if isinstance(output, tuple) else ()
    maps = [each for each in rest if isinstance(each, Tensor) and each.ndim == 4]
    return next((each for each in maps if (each >= 0).all()), None)


def _same(first: Tensor | None, second: Tensor | None) -> bool:
    if first is None or second is None or first.dtype != second.dtype:
        return False
    if first.shape != second.shape:
        return False
    return first.data_ptr() == second.data_ptr() or torch.equal(first, second)


def _differ(
    rows: Tensor,
    others: Tensor,
    tolerance: float,
) -> bool:
    """Return whether rows differ by more than the rounding of their precision."""
    tolerance = max(tolerance, torch.finfo(rows.dtype).eps / 8)
    rows = rows.float()
    others = others.float()
    return float((rows - others).norm()) > tolerance * float(rows.norm())


def _run(base: nn.Module, ids: Tensor, **options: Any) -> tuple[Any, list[_Call]]:
    """Return the model's output, and the calls of its modules in the order in which they ended.

    A model that does not take the options is run without them.
    """
    calls: list[_Call] = []

    def note(path: str, *call: Any) -> None:
        calls.append(_Call(path, *call))

    wanted: list[Wanted] = [
        (partial(module.register_forward_hook, with_kwargs=True), partial(note, path))
        for path, module in base.named_modules()
        if path
    ]
    asked = {"output_hidden_states": True, "return_dict": True, **options}
    try:
        with hooks(*wanted):
            output = base(input_ids=ids, **asked)
    except Exception:  # a model without such arguments may raise anything
        if not options:
            raise
        return _run(base, ids)
    return output, calls


# The structure, from three runs: of a text, of another one, and of a token that is
# repeated


def structure_of(base: nn.Module) -> Structure:
    """Find the structure of a model; raise InputError if it shows none.

    Weights that are zero or no numbers tell no tokens apart. Then the structure is that
    of a copy with random weights.
    """
    found = _structure(base)
    if found is None:
        stream = random_stream(0)
        base = copy.deepcopy(base)
        for weight in base.parameters():
            drawn = torch.randn(weight.shape, generator=stream)
            if weight.ndim > 1:
                weight.data = (drawn / weight.shape[-1] ** 0.5).to(weight)
            else:
                weight.data = torch.ones_like(weight)
        found = _structure(base)
    if found is None:
        raise InputError(
            f"hidden states of {type(base).__name__} do not depend on the text"
        )
    return found


def _structure(base: nn.Module) -> Structure | None:
    family = str(getattr(base.config, "model_type", type(base).__name__))
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        evaluating(base),
        AttentionImplementation(base, "eager"),
        unhooked(base),
    ):
        try:
            tokens = cast("Any", base).get_input_embeddings()
            text, other = _texts(base, tokens.weight)
            words = tokens(text)
            scaled = not torch.equal(words, tokens.weight[text])
            output, calls = _run(base, text, output_attentions=True, use_cache=False)
            states: list[Tensor] = list(output.hidden_states)
            changed = _run(base, other)[0].hidden_states[-1]
        except Exception as error:  # a model that reads something else raises anything
            reads = str(getattr(base, "main_input_name", "input_ids"))
            reason = f"{family} gives no hidden states of token ids alone: {first_line(error)}"
            if reads != "input_ids":
                reason = f"{type(base).__name__} reads {reads}, not text"
            raise InputError(reason) from error
        if any(state.shape[:-1] != text.shape for state in states):
            raise InputError(f"{family} does not give one hidden state for each token")
        last = states[-1]
        moved = _differ(last[:, -1], changed[:, -1], _STATE_TOLERANCE)
        if not moved or not changed.isfinite().all():
            return None
        blocks = _blocks(calls, states)
        attentions = _attentions(blocks)
        maps = [
            _maps(block, paths) for block, paths in zip(blocks, attentions, strict=True)
        ]
        found = Structure(
            family=family,
            layers=len(states) - 1,
            width=last.shape[-1],
            **_heads(base, blocks, attentions, maps, last.shape[-1]),
            causal=not _differ(last[:, :-1], changed[:, :-1], _STATE_TOLERANCE),
            rotary=False,
            scaled=scaled,
            tied=_same(last, getattr(output, "last_hidden_state", None)),
            takes_embeddings=_takes_embeddings(base, words, last),
            ordinary=int(text[0, 0]),
            block_paths=tuple(block.path for block in blocks),
            attention_paths=tuple(attentions),
            closing_paths=tuple(_closing(calls, state) for state in states),
            position_table=_position_table(calls),
            cached={},
            mapped=frozenset(n for n, each in enumerate(maps, 1) if each is not None),
            rotations=(None,) * len(blocks),
        )
        return _with_keys(base, found, text[:, :1].expand_as(text))


def _texts(base: nn.Module, table: Tensor) -> tuple[Tensor, Tensor]:
    """Return two texts (1, n) of ordinary tokens that differ in the last one."""
    special = special_tokens(base.config)
    drawn = torch.randint(len(table), (64,), generator=random_stream(0)).tolist()
    ordinary = [token for token in dict.fromkeys(drawn) if token not in special]
    ids = torch.tensor([ordinary[: _LENGTH + 1]], device=table.device)
    return ids[:, :-1], torch.cat([ids[:, :-2], ids[:, -1:]], 1)


def special_tokens(config: Any) -> list[int]:
    """Return the ids of special tokens that a configuration names."""
    values = [
        value
        for name, value in config.to_dict().items()
        if name.endswith(("token_id", "token_index"))
    ]
    listed = [value if isinstance(value, list) else [value] for value in values]
    return [token for tokens in listed for token in tokens if isinstance(token, int)]


def _takes_embeddings(
    base: nn.Module,
    words: Tensor,
    last: Tensor,
) -> bool:
    """Return whether the embeddings of a text give the same last states as its ids."""
    try:
        output = base(inputs_embeds=words, output_hidden_states=True, return_dict=True)
    except Exception:  # a model without such an argument
        return False
    return not _differ(output.hidden_states[-1], last, _KEY_TOLERANCE)


@dataclass(frozen=True, eq=False)
class _Block(_Call):
    """The call of a block, and the calls inside it."""

    calls: list[_Call]

    def within(self, call: _Call) -> str:
        """Return the path of a module in this block."""
        return call.path.removeprefix(f"{self.path}.")

    def at(self, path: str) -> list[_Call]:
        """Return the calls of the module at this path in this block."""
        return [call for call in self.calls if self.within(call) == path]


def _blocks(calls: list[_Call], states: list[Tensor]) -> list[_Block]:
    """Return the calls that lead from each state to the next, or none if one of them is missing."""
    blocks: list[_Block] = []
    after = 0
    for before, state in pairwise(states):
        goal: Tensor | None = state
        at = None
        while goal is not None and at is None:
            ends = [n for n in range(after, len(calls)) if _same(calls[n].result, goal)]
            at = next((n for n in ends if _same(calls[n].state, before)), None)
            inner: Tensor | None = None
            if ends and state is states[-1]:  # a final norm may follow
                inner = calls[ends[0]].state
            goal = None if _same(inner, goal) else inner
        if at is None:
            return []
        path = calls[at].path
        inside = [call for call in calls[after:at] if call.path.startswith(f"{path}.")]
        blocks.append(_Block(**vars(calls[at]), calls=inside))
        after = at + 1
    return blocks


def _closing(calls: list[_Call], state: Tensor) -> str:
    """Return the path of the norm that gave these states: it ignores the length of its input."""
    for call in calls:
        given = call.state
        if given is None or given.dtype != state.dtype or _same(given, state):
            continue
        alone = call.is_leaf and len(call.args) == 1 and not call.kwargs
        if alone and _same(call.result, state):
            first, second = (call.module(scale * given) for scale in (10, 30))
            if not _differ(first, second, _NORM_TOLERANCE):
                return call.path
    return ""


def _position_table(calls: list[_Call]) -> tuple[str, int] | None:
    """Return the table that is asked for consecutive numbers, and the first of these."""
    for call in calls:
        if type(call.module) is nn.Embedding and isinstance(call.args[0], Tensor):
            asked = call.args[0].reshape(-1)
            if len(asked) >= _LENGTH and (asked[:_LENGTH].diff() == 1).all():
                return call.path, int(asked[0])
    return None


def _maps(block: _Block, paths: AttentionPaths | None) -> Tensor | None:
    """Return the maps that a block's attention returned."""
    if paths is None:
        return None
    return next(maps_among(call.output) for call in block.at(paths.module))


def _heads(
    base: nn.Module,
    blocks: list[_Block],
    attentions: list[AttentionPaths | None],
    maps: list[Tensor | None],
    width: int,
) -> dict[str, int]:
    """Return the numbers of query heads and key heads, and their size, by the first attention."""
    shown = next((each.shape[1] for each in maps if each is not None), None)
    heads = shown or getattr(base.config, "num_attention_heads", None)
    heads = key_heads = heads if isinstance(heads, int) else 1
    for block, paths in zip(blocks, attentions, strict=True):
        if paths is not None:
            width = block.at(paths.output)[0].args[0].shape[-1]
            if paths.projections is not None:
                (_, queries, _), (_, keys, _), _ = paths.projections
                key_heads = heads * keys // queries
            break
    return {"heads": heads, "key_heads": key_heads, "head_dim": width // heads}


# Attention: which linear maps of a block make queries, keys and values


class _Mixed(Exception):
    """Raised by a hook at the first map whose input mixes positions."""


def _attentions(blocks: list[_Block]) -> list[AttentionPaths | None]:
    """Return the attention of each block; blocks of one class with the same calls share it."""
    known: dict[tuple[type, tuple[str, ...]], AttentionPaths | None] = {}
    found: list[AttentionPaths | None] = []
    for block in blocks:
        key = (type(block.module), tuple(map(block.within, block.calls)))
        if key not in known:
            try:
                known[key] = _attention(block)
            except Exception:  # a block that cannot be run by itself
                known[key] = None
        found.append(known[key])
    return found


def _attention(block: _Block) -> AttentionPaths | None:
    maps = [
        call for call in block.calls if _is_linear(call, cast("Tensor", block.state))
    ]
    stream = random_stream(0)

    def small(output: Tensor) -> Tensor:
        return (_SMALL * torch.randn(output.shape, generator=stream)).to(output)

    output, plain = _mixing(block, maps, small)
    if output is None:
        return None
    _, zeroed = _mixing(block, maps, torch.zeros_like)
    values = {name: other for name, (_, other) in zeroed.items()}
    keys = {name: other & ~values[name] for name, (_, other) in plain.items()}
    queries = {
        name: own & ~keys[name] & ~values[name] for name, (own, _) in plain.items()
    }
    if not any(rows.any() for rows in keys.values()):  # mixed without a softmax
        return None
    sources = [name for name, (own, other) in plain.items() if (own | other).any()]
    found = AttentionPaths(_parent(sources), output)
    parts: list[tuple[str, Tensor]] = []
    inputs: list[Tensor | None] = []
    for rows in (queries, keys, values):
        names = [name for name in rows if rows[name].any()]
        if len(names) != 1:
            return found
        parts.append((names[0], rows[names[0]]))
        inputs.append(block.at(names[0])[0].state)
    norm = _path_between(block, inputs[0])
    if norm is None or not all(_same(inputs[0], each) for each in inputs[1:]):
        return found
    projections = tuple(
        (name, int(rows.sum()), None if rows.all() else rows.nonzero()[:, 0])
        for name, rows in parts
    )
    (_, queried, _), (_, keyed, _), (_, valued, _) = projections
    if keyed != valued or queried % keyed:
        return found
    return replace(found, norm=norm, projections=projections)


def _parent(names: list[str]) -> str:
    """Return the path that all of these share, above each of them."""
    paths = [name.split(".")[:-1] for name in names]
    shared = [steps[0] for steps in zip(*paths, strict=False) if len(set(steps)) == 1]
    return ".".join(shared)


def _is_linear(call: _Call, state: Tensor) -> bool:
    """Return whether a module maps each position's row by a matrix."""
    weight = getattr(call.module, "weight", None)
    given = call.state
    result = call.result
    if not call.is_leaf or not isinstance(weight, Tensor) or weight.ndim != 2:
        return False
    if given is None or result is None or not given.is_floating_point():
        return False
    count = state.shape[0] * state.shape[1]
    rows = {given.numel() / given.shape[-1], result.numel() / result.shape[-1]}
    return rows == {count}


def _mixing(
    block: _Block,
    maps: list[_Call],
    fill: Callable[[Tensor], Tensor],
) -> tuple[str | None, dict[str, tuple[Tensor, Tensor]]]:
    """Find the first map whose last input row depends on what maps before gave at other positions.

    Returns its path and, for each map before it, which of its output's numbers that row
    depends on: those at its own position, and those at others. `fill` replaces the
    output of each map, so that only direct dependence is seen.
    """
    names = {call.module: block.within(call) for call in maps}
    outputs: dict[str, Tensor] = {}
    found: dict[str, tuple[Tensor, Tensor]] = {}
    mixed: list[str] = []

    def before(module: nn.Module, args: tuple[Any, ...]) -> None:
        row = args[0].flatten(0, -2)[-1]
        if not outputs or not row.requires_grad:
            return
        weights = torch.linspace(1, 2, len(row)).to(row)
        slopes = torch.autograd.grad(
            (row * weights).sum(),
            list(outputs.values()),
            retain_graph=True,
            materialize_grads=True,
        )
        for name, slope in zip(outputs, slopes, strict=True):
            used = slope.flatten(0, -2) != 0
            found[name] = (used[-1].cpu(), used[:-1].any(0).cpu())
        if any(other.any() for _, other in found.values()):
            mixed.append(names[module])
            raise _Mixed

    def after(
        module: nn.Module,
        _args: Any,
        output: Tensor,
    ) -> Tensor:
        outputs[names[module]] = fill(output.detach()).requires_grad_()
        return outputs[names[module]]

    wanted: list[Wanted] = []
    for module in names:
        wanted.append((module.register_forward_pre_hook, before))
        wanted.append((module.register_forward_hook, after))
    with torch.enable_grad(), hooks(*wanted), suppress(_Mixed):
        block.module(*block.args, **block.kwargs)
    return (mixed[0] if mixed else None), found


def _path_between(block: _Block, state: Tensor | None) -> str | None:
    """Return the path of the module that maps the block's input to these states, "" for none."""
    if _same(state, block.state):
        return ""
    for call in block.calls:
        if _same(call.state, block.state) and _same(call.result, state):
            return block.within(call)
    return None


# The keys of a cache, and whether they are rotated


def _with_keys(
    base: nn.Module,
    found: Structure,
    repeated: Tensor,
) -> Structure:
    """Add what one repeated token shows: rotary positions, and the cache of a causal model."""
    output, calls = _run(base, repeated, use_cache=True)
    embedded = output.hidden_states[0]
    same = not _differ(embedded, embedded[:, :1].expand_as(embedded), _STATE_TOLERANCE)
    found_turns = (
        turn_of(call.path, call.args, call.kwargs, call.output, _LENGTH)
        for call in calls
    )
    turns = [turn for turn in found_turns if turn is not None]
    cached = _cached(found, output, calls)
    if not found.causal or not cached:
        return replace(found, rotary=same and bool(turns))
    rotations: list[Rotation | None] = [None] * found.layers
    known: Rotation | None = None
    for number, (keys, _) in cached.items():
        if same and _vary(keys):
            # A model whose states differ for another reason rotates keys as in its
            # first block.
            ways = ways_to_undo(keys, turns)
            known = next((way for way, undone in ways if not _vary(undone)), known)
            rotations[number - 1] = known
    first, _ = cached[min(cached)]
    return replace(
        found,
        cached={number: (k.shape, v.shape) for number, (k, v) in cached.items()},
        rotary=same and _vary(first),
        key_heads=first.shape[1],
        head_dim=first.shape[-1],
        rotations=tuple(rotations),
    )


def _cached(
    found: Structure,
    output: Any,
    calls: list[_Call],
) -> dict[int, tuple[Tensor, Tensor]]:
    """Return the cached keys and values of the blocks that were given the cache."""
    given = {
        call.path for call in calls if cache_among(call.args, call.kwargs) is not None
    }
    layers = getattr(_own_cache(getattr(output, "past_key_values", None)), "layers", ())
    cached: dict[int, tuple[Tensor, Tensor]] = {}
    blocks = zip(found.block_paths, layers, strict=False)
    for number, (path, layer) in enumerate(blocks, 1):
        pair = (getattr(layer, "keys", None), getattr(layer, "values", None))
        sizes = [part.shape for part in pair if isinstance(part, Tensor)]
        whole = [len(size) == 4 and size[2] == _LENGTH for size in sizes]
        if path in given and whole == [True, True]:
            cached[number] = cast("tuple[Tensor, Tensor]", pair)
    return cached


def _vary(keys: Tensor) -> bool:
    """Return whether keys (1, h, n, k) of one token differ between positions."""
    tolerance = max(_KEY_TOLERANCE, 4 * torch.finfo(keys.dtype).eps)
    return _differ(keys, keys[:, :, :1].expand_as(keys), tolerance)
