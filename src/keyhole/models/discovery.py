"""A model's parts, found out by running it: blocks, projections, norms, positions.

No family is known by name. A few tokens go through the model, hooks write down what every module
is given and gives, and what an attack needs follows from that:

| part | how it shows |
|---|---|
| block ℓ | the innermost module that is given hidden state ℓ−1 and gives hidden state ℓ |
| final norm | what stands between the last block and the last hidden state |
| causal | with another last token the states before it stay as they are |
| attention output | the first linear map of a block whose input mixes positions |
| values | with all maps before that one at 0, what still changes other positions |
| keys | what else changes other positions |
| queries | what changes its own position alone |
| rotary positions | a token's embedding is the same at all positions, and its keys are not |

Layers are numbered as `output_hidden_states=True` numbers them: 0 is the embeddings, ℓ what block ℓ
gives, and the last one of most causal models has passed the final norm. A model that uses one block
many times (ALBERT) has that block many times in `blocks`. Of an encoder and a decoder the encoder
is meant; the decoder is a model of its own (pairs.py). What a model does not show is missing, and
`lacks` says why; the rest is read all the same.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn

from keyhole.core.errors import InputError, first_line
from keyhole.models.hooks import Wanted, eager, hooks, unhooked

_LENGTH = 6  # tokens of the texts that are run
_MOVED = 1e-5  # of a state's length: a larger change is no rounding
_TURNED = 1e-3  # of a key's length: the same for keys, which come out of a rotation
_FORGETS = 0.01  # how nearly a norm gives the same for an input of another length
_SMALL = 0.1  # numbers in place of a projection's, so small that no softmax saturates


@dataclass(frozen=True, eq=False)
class Seen:
    """The names, in one block, of its attention, of the output map, and of the norm before it.

    `projections` are, for queries, keys and values, the name of a map, how many of its numbers, and
    which where these are not all.
    """

    module: str
    output: str
    opening: str = ""
    projections: tuple[tuple[str, int, Tensor | None], ...] | None = None


@dataclass(frozen=True, eq=False, kw_only=True)
class Found:
    """What a model shows, as names and numbers.

    `closing` has for each layer the norm that its states come out of, or nothing. `cached` has for
    blocks that fill a cache, by their numbers from 1, the shapes of keys and values; `mapped` are
    the numbers of those that return maps. `tied` says that the last hidden state is what the model
    returns, `scaled` that the token table's rows are multiplied by something, `embeds` that the
    model takes embeddings for ids. `ordinary` is a token that stands for nothing special.
    """

    family: str  # as its configuration calls it, for messages
    layers: int
    width: int
    heads: int
    key_heads: int
    head_dim: int
    causal: bool
    rotary: bool
    scaled: bool
    tied: bool
    embeds: bool
    ordinary: int
    names: tuple[str, ...]
    seen: tuple[Seen | None, ...]
    closing: tuple[str, ...]
    places: tuple[str, int] | None  # the table of positions, and the number of the first one
    cached: Mapping[int, tuple[torch.Size, torch.Size]]
    mapped: frozenset[int]
    rotations: tuple[Rotation | None, ...]


@contextmanager
def _undisturbed(base: nn.Module) -> Generator[None]:
    """In eval, without gradients; modes and random numbers are afterwards as they were."""
    modes = {part: part.training for part in base.modules()}
    gpus = {weight.device for weight in base.parameters() if weight.is_cuda}
    random = torch.random.fork_rng(devices=sorted(gpus, key=str))
    with torch.inference_mode(False), torch.no_grad(), random, eager(base), unhooked(base):
        try:
            base.eval()
            yield
        finally:
            for part, training in modes.items():
                part.training = training


@dataclass(frozen=True, eq=False)
class _Call:
    """One call of the module at a path: its arguments, and what it gave."""

    name: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any

    @property
    def state(self) -> Tensor | None:
        return state_among(self.args, self.kwargs)

    @property
    def gives(self) -> Tensor | None:
        given = self.output
        if isinstance(given, dict):
            given = tuple(cast("dict[str, Any]", given).values())
        if isinstance(given, tuple | list) and given:
            given = cast("Sequence[Any]", given)[0]
        return given if isinstance(given, Tensor) else None

    @property
    def leaf(self) -> bool:
        return next(self.module.children(), None) is None


def state_among(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """The hidden states among a module's arguments."""
    given = args[0] if args else kwargs.get("hidden_states")
    return given if isinstance(given, Tensor) else None


def cache_among(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The cache among a module's arguments: models call it by several names."""
    given = (own_cache(each) for each in (*args, *kwargs.values()))
    return next((each for each in given if hasattr(each, "layers")), None)


def own_cache(cache: Any) -> Any:
    """Of a decoder's two caches the one of its own tokens."""
    return getattr(cache, "self_attention_cache", cache)


def maps_among(output: Any) -> Tensor | None:
    """The maps (b, h, n, n) among what an attention returns: scores and biases may be negative."""
    rest = cast("tuple[Any, ...]", output)[1:] if isinstance(output, tuple) else ()
    maps = [each for each in rest if isinstance(each, Tensor) and each.ndim == 4]
    return next((each for each in maps if bool((each >= 0).all())), None)


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None or one.shape != other.shape or one.dtype != other.dtype:
        return False
    return one.data_ptr() == other.data_ptr() or torch.equal(one, other)


def _moved(rows: Tensor, others: Tensor, least: float) -> bool:
    """Do rows differ by more than the rounding of their precision?"""
    least = max(least, torch.finfo(rows.dtype).eps / 8)
    rows, others = rows.float(), others.float()
    return float((rows - others).norm()) > least * float(rows.norm())


def _run(base: nn.Module, ids: Tensor, **options: Any) -> tuple[Any, list[_Call]]:
    """What the model gives, and the calls of its modules in the order in which they ended."""
    calls: list[_Call] = []
    wanted: list[Wanted] = []
    for name, module in base.named_modules():
        if name:

            def note(m: nn.Module, args: Any, kwargs: Any, output: Any, name: str = name) -> None:
                calls.append(_Call(name, m, args, kwargs, output))

            wanted.append((partial(module.register_forward_hook, with_kwargs=True), note))
    with hooks(*wanted):
        given = base(input_ids=ids, output_hidden_states=True, return_dict=True, **options)
    return given, calls


def look(base: nn.Module) -> Found:
    """What shows in runs of a text, of another one, and of a token that is repeated.

    Weights that tell no tokens apart, or are no numbers, show nothing: then a copy with random ones
    is run, which keeps its parts in the same places.
    """
    found = _shown(base)
    if found is None:
        stream, base = torch.Generator().manual_seed(0), copy.deepcopy(base)
        for weight in base.parameters():
            drawn = torch.randn(weight.shape, generator=stream) / weight.shape[-1] ** 0.5
            weight.data = (drawn if weight.ndim > 1 else torch.ones(weight.shape)).to(weight)
        found = _shown(base)
    if found is None:
        raise InputError(f"hidden states of {type(base).__name__} do not depend on the text")
    return found


def _shown(base: nn.Module) -> Found | None:
    family = str(getattr(base.config, "model_type", type(base).__name__))
    with _undisturbed(base):
        try:
            tokens = cast("Any", base).get_input_embeddings()
            text, other = _texts(base, tokens.weight)
            scaled = not torch.equal(tokens(text), tokens.weight[text])
            try:
                given, calls = _run(base, text, output_attentions=True, use_cache=False)
            except Exception:  # a model that knows no such words
                given, calls = _run(base, text)
            states: list[Tensor] = list(given.hidden_states)
            later = _run(base, other)[0].hidden_states[-1]
        except Exception as error:  # whatever a model raises that reads something else than text
            read = str(getattr(base, "main_input_name", "input_ids"))
            if read != "input_ids":
                raise InputError(f"{type(base).__name__} reads {read}, not text") from error
            raise InputError(
                f"{family} gives no hidden states of token ids alone: {first_line(error)}"
            ) from error
        if any(state.shape[:-1] != text.shape for state in states):
            raise InputError(f"{family} does not give one hidden state for each token")
        if not _moved(states[-1][:, -1], later[:, -1], _MOVED) or not later.isfinite().all():
            return None
        blocks = _blocks(calls, states)
        seen = _attentions(blocks)
        causal = not _moved(states[-1][:, :-1], later[:, :-1], _MOVED)
        maps = [
            _maps(call, inside, each) for (call, inside), each in zip(blocks, seen, strict=True)
        ]
        found = Found(
            family=family,
            layers=len(states) - 1,
            width=states[-1].shape[-1],
            **_heads(base, states[-1].shape[-1], blocks, seen, maps),
            causal=causal,
            rotary=False,
            scaled=scaled,
            tied=_same(states[-1], getattr(given, "last_hidden_state", None)),
            embeds=_embeds(base, tokens(text), states),
            ordinary=int(text[0, 0]),
            names=tuple(call.name for call, _ in blocks),
            seen=tuple(seen),
            closing=tuple(_closing(calls, state) for state in states),
            places=_places(calls),
            cached={},
            mapped=frozenset(number for number, each in enumerate(maps, 1) if each is not None),
            rotations=(None,) * len(blocks),
        )
        return _with_keys(base, found, text[:, :1].expand_as(text))


def _embeds(base: nn.Module, words: Tensor, states: list[Tensor]) -> bool:
    """Does the model give for the embeddings of a text what it gives for its ids?"""
    try:
        given = base(inputs_embeds=words, output_hidden_states=True, return_dict=True)
    except Exception:  # a model that knows no such word
        return False
    return not _moved(given.hidden_states[-1], states[-1], _TURNED)


def _texts(base: nn.Module, table: Tensor) -> tuple[Tensor, Tensor]:
    """Two texts (1, n) of ordinary tokens that differ in the last one."""
    settings = cast("dict[str, Any]", cast("Any", base.config).to_dict())
    special = [
        each for name, each in settings.items() if name.endswith(("token_id", "token_index"))
    ]
    stream = torch.Generator().manual_seed(0)
    drawn = torch.randint(len(table), (64,), generator=stream).tolist()
    ordinary = [token for token in dict.fromkeys(drawn) if token not in special]
    ids = torch.tensor([ordinary[: _LENGTH + 1]], device=table.device)
    return ids[:, :-1], torch.cat([ids[:, :-2], ids[:, -1:]], 1)


_Block = tuple[_Call, list[_Call]]  # a block's call, and those inside it


def _blocks(calls: list[_Call], states: list[Tensor]) -> list[_Block]:
    """The calls that lead from each state to the next one; none where one of them is missing."""
    found: list[_Block] = []
    after = 0
    for before, state in pairwise(states):
        goal: Tensor | None = state
        at = None
        while goal is not None and at is None:
            ends = [n for n in range(after, len(calls)) if _same(calls[n].gives, goal)]
            at = next((n for n in ends if _same(calls[n].state, before)), None)
            last = at is None and ends and state is states[-1]  # a final norm may follow
            goal = calls[ends[0]].state if last and not _same(calls[ends[0]].state, goal) else None
        if at is None:
            return []
        inside = [call for call in calls[after:at] if call.name.startswith(f"{calls[at].name}.")]
        found.append((calls[at], inside))
        after = at + 1
    return found


def _closing(calls: list[_Call], state: Tensor) -> str:
    """The norm that gave these states: a module that forgets how long its input was."""
    for call in calls:
        given = call.state
        if given is None or given.dtype != state.dtype or _same(given, state):
            continue
        if call.leaf and len(call.args) == 1 and not call.kwargs and _same(call.gives, state):
            once, again = (cast("Any", call.module)(scale * given) for scale in (10, 30))
            if not _moved(once, again, _FORGETS):
                return call.name
    return ""


def _places(calls: list[_Call]) -> tuple[str, int] | None:
    """The table that is asked for numbers in a row, and the first of them."""
    for call in calls:
        if type(call.module) is nn.Embedding and isinstance(call.args[0], Tensor):
            asked = call.args[0].reshape(-1)
            if len(asked) >= _LENGTH and bool((asked[:_LENGTH].diff() == 1).all()):
                return call.name, int(asked[0])
    return None


def _maps(block: _Call, inside: list[_Call], seen: Seen | None) -> Tensor | None:
    """The maps that a block's attention returned."""
    if seen is None:
        return None
    ended = [call for call in inside if _inside(block, call) == seen.module]
    return maps_among(ended[0].output) if ended else None


class _Mixed(Exception):
    """Raised by a hook at the first map whose input mixes positions."""


def _attentions(blocks: list[_Block]) -> list[Seen | None]:
    """The attention of each block; blocks of one class that make the same calls are alike."""
    known: dict[tuple[type, tuple[str, ...]], Seen | None] = {}
    found: list[Seen | None] = []
    for block, inside in blocks:
        key = (type(block.module), tuple(_inside(block, call) for call in inside))
        if key not in known:
            try:
                known[key] = _seen(block, inside)
            except Exception:  # a block that cannot be run by itself shows none
                known[key] = None
        found.append(known[key])
    return found


def _seen(block: _Call, inside: list[_Call]) -> Seen | None:
    state = cast("Tensor", block.state)
    maps = [call for call in inside if _is_linear(call, state)]
    stream = torch.Generator().manual_seed(0)

    def small(given: Tensor) -> Tensor:
        return (_SMALL * torch.randn(given.shape, generator=stream)).to(given)

    output, plain = _mixing(block, maps, small)
    if output is None:
        return None
    values = {name: other for name, (_, other) in _mixing(block, maps, torch.zeros_like)[1].items()}
    keys = {name: other & ~values[name] for name, (_, other) in plain.items()}
    queries = {name: own & ~keys[name] & ~values[name] for name, (own, _) in plain.items()}
    if not any(bool(rows.any()) for rows in keys.values()):  # positions are mixed without a softmax
        return None
    sources = [name for name, (own, other) in plain.items() if bool((own | other).any())]
    found = Seen(_parent(sources), output)
    three = (queries, keys, values)
    names = [[name for name, rows in each.items() if bool(rows.any())] for each in three]
    if any(len(each) != 1 for each in names):
        return found
    made = [(name, each[name].nonzero()[:, 0]) for each, (name,) in zip(three, names, strict=True)]
    given = [next(call for call in maps if _inside(block, call) == name).state for name, _ in made]
    opening = _opening(block, inside, given[0])
    (_, asking), (_, asked), (_, answering) = made
    if opening is None or not all(_same(given[0], each) for each in given[1:]):
        return found
    if len(asked) != len(answering) or len(asking) % len(asked):
        return found
    projections = tuple(
        (name, len(rows), None if len(rows) == len(values[name]) else rows) for name, rows in made
    )
    return replace(found, opening=opening, projections=projections)


def _inside(block: _Call, call: _Call) -> str:
    """The path of a module in its block."""
    return call.name.removeprefix(f"{block.name}.")


def _parent(names: list[str]) -> str:
    """The module that holds all of these: the path that they share, above each of them."""
    paths = [name.split(".")[:-1] for name in names]
    shared = [steps[0] for steps in zip(*paths, strict=False) if len(set(steps)) == 1]
    return ".".join(shared)


def _is_linear(call: _Call, state: Tensor) -> bool:
    """Does it map each position's row by a matrix?"""
    weight, given, made = getattr(call.module, "weight", None), call.state, call.gives
    if not call.leaf or not isinstance(weight, Tensor) or weight.ndim != 2:
        return False
    if given is None or made is None or not given.is_floating_point():
        return False
    count = state.shape[0] * state.shape[1]
    return given.numel() == count * given.shape[-1] and made.numel() == count * made.shape[-1]


def _mixing(
    block: _Call, maps: list[_Call], fill: Callable[[Tensor], Tensor]
) -> tuple[str | None, dict[str, tuple[Tensor, Tensor]]]:
    """The first map whose input at the last position depends on others, by what maps before gave.

    For each of those: which of its numbers, at the position itself and at others, it depends on.
    Each map gives what `fill` makes of its output instead, so that only direct ways are seen.
    """
    names = {call.module: _inside(block, call) for call in maps}
    given: dict[str, Tensor] = {}
    found: dict[str, tuple[Tensor, Tensor]] = {}
    mixed: list[str] = []

    def before(module: nn.Module, args: tuple[Any, ...]) -> None:
        row = args[0].flatten(0, -2)[-1]
        if not given or not row.requires_grad:
            return
        weights = torch.linspace(1, 2, len(row)).to(row)
        slopes = torch.autograd.grad(
            (row * weights).sum(), list(given.values()), retain_graph=True, allow_unused=True
        )
        for name, slope in zip(given, cast("tuple[Tensor | None, ...]", slopes), strict=True):
            used = torch.zeros_like(given[name]) if slope is None else slope
            used = used.flatten(0, -2) != 0
            found[name] = (used[-1].cpu(), used[:-1].any(0).cpu())
        if any(bool(other.any()) for _, other in found.values()):
            mixed.append(names[module])
            raise _Mixed

    def after(module: nn.Module, _args: Any, output: Tensor) -> Tensor:
        given[names[module]] = fill(output.detach()).requires_grad_()
        return given[names[module]]

    wanted: list[Wanted] = [(module.register_forward_pre_hook, before) for module in names]
    wanted += [(module.register_forward_hook, after) for module in names]
    with torch.enable_grad(), hooks(*wanted), suppress(_Mixed):
        block.module(*block.args, **block.kwargs)
    return (mixed[0] if mixed else None), found


def _opening(block: _Call, inside: list[_Call], given: Tensor | None) -> str | None:
    """The module between a block's input and what its maps are given: empty for none."""
    if _same(given, block.state):
        return ""
    ways = (call for call in inside if _same(call.state, block.state) and _same(call.gives, given))
    return next((_inside(block, call) for call in ways), None)


def _heads(
    base: nn.Module,
    inner: int,
    blocks: list[_Block],
    seen: list[Seen | None],
    maps: list[Tensor | None],
) -> dict[str, int]:
    """How many heads of queries and of keys, and their size: by the first attention's shapes."""
    shown = next((each for each in maps if each is not None), None)
    said = getattr(base.config, "num_attention_heads", None)
    heads = shown.shape[1] if shown is not None else said if isinstance(said, int) else 1
    key_heads = heads
    for (block, inside), each in zip(blocks, seen, strict=True):
        if each is not None:
            output = next(call for call in inside if _inside(block, call) == each.output)
            inner = output.args[0].shape[-1]
            if each.projections is not None:
                (_, queries, _), (_, keys, _), _ = each.projections
                key_heads = heads * keys // queries
            break
    return {"heads": heads, "key_heads": key_heads, "head_dim": inner // heads}


def _with_keys(base: nn.Module, found: Found, repeated: Tensor) -> Found:
    """What one token, repeated, shows of positions: its keys in the cache of a causal model."""
    try:
        given, calls = _run(base, repeated, use_cache=True)
    except Exception:  # a model that knows no such word
        given, calls = _run(base, repeated)
    embedded = given.hidden_states[0]
    still = not _moved(embedded, embedded[:, :1].expand_as(embedded), _MOVED)
    turns = [
        turn
        for call in calls
        if (turn := _turn_of(call.name, call.args, call.kwargs, call.output, _LENGTH)) is not None
    ]
    handed = {call.name for call in calls if cache_among(call.args, call.kwargs) is not None}
    layers = getattr(own_cache(getattr(given, "past_key_values", None)), "layers", ())
    keys: dict[int, Tensor] = {}
    sizes: dict[int, tuple[torch.Size, torch.Size]] = {}
    for number, (name, layer) in enumerate(zip(found.names, layers, strict=False), 1):
        each, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if not isinstance(each, Tensor) or not isinstance(values, Tensor) or name not in handed:
            continue
        if each.ndim == values.ndim == 4 and each.shape[2] == _LENGTH:
            keys[number], sizes[number] = each, (each.shape, values.shape)
    if not found.causal or not keys:
        return replace(found, rotary=still and bool(turns))
    first = keys[min(keys)]
    rotations: list[Rotation | None] = [None] * found.layers
    known: Rotation | None = None
    for number, each in keys.items():
        if still and _differ(each):
            # A model whose states differ for another reason turns keys as in its first block.
            ways = _ways_to_undo(each, turns)
            known = next((way for way, undone in ways if not _differ(undone)), known)
            rotations[number - 1] = known
    return replace(
        found,
        cached=sizes,
        rotary=still and _differ(first),
        key_heads=first.shape[1],
        head_dim=first.shape[-1],
        rotations=tuple(rotations),
    )


def _differ(keys: Tensor) -> bool:
    """Do keys (1, h, n, k) of one token change with the position?"""
    rounded = max(_TURNED, 4 * torch.finfo(keys.dtype).eps)  # cosines and sines are rounded as well
    return _moved(keys, keys[:, :, :1].expand_as(keys), rounded)


# Rotary positions, put on keys and undone, as the model itself turns them.
#
# RoFormer, arXiv 2104.09864: a cached key is `R_p k`, with `R_p` a rotation by the position `p` in
# each plane of two coordinates. So `k = R_pᵀ (R_p k)`. Models that stretch their context multiply
# the rotation by a factor, which is divided out as well.
#
# The angles come from the module that gives the model its own: one that turns numbers of positions
# into cosines and sines. Which coordinates make a plane (neighbours, or halves apart), and whether
# the first numbers of a key are turned or the last, differs between models; the way that leaves the
# keys of one repeated token the same at all positions is right.

_POSITIONS, _STATES = "its positions", "its states"  # arguments that change from call to call
_EVEN = 0.01  # of their mean: how much the squared lengths of (cos, sin) may differ


@dataclass(frozen=True, eq=False)
class Rotation:
    """The path of the module that gives angles, its arguments by place or name, and the planes.

    `angles` are the numbers that it gives for each plane, once; planes are `neighbours` or halves
    apart, among the first numbers of a key or the `last` ones.
    """

    module: str
    given: tuple[tuple[int | str, Any], ...]
    angles: slice
    neighbours: bool = False
    last: bool = False

    def turn(self, base: nn.Module, keys: Tensor, positions: Tensor) -> Tensor:
        """Keys (b, heads, n, k) as a cache holds them at positions (b, n)."""
        return self._turned(keys, *self._angles(base, keys, positions))

    def undo(self, base: nn.Module, keys: Tensor, positions: Tensor) -> Tensor:
        """Keys (b, heads, n, k) of a cache without their positions (b, n)."""
        return self.undone(keys, *self._angles(base, keys, positions))

    def undone(self, keys: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        length = cos.square() + sin.square()
        return self._turned(keys, cos / length, -sin / length)

    def _angles(self, base: nn.Module, keys: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The cosines and sines (b, 1, n, planes) that the model turns keys by."""
        now = {_POSITIONS: positions, _STATES: keys.new_zeros(1)}
        given = [(place, now.get(value, value)) for place, value in self.given]
        args = [value for place, value in given if isinstance(place, int)]
        named = {place: value for place, value in given if isinstance(place, str)}
        pair = _cos_sin(cast("Any", base.get_submodule(self.module))(*args, **named))
        cos, sin = cast("tuple[Tensor, Tensor]", pair)
        return cos[..., self.angles].unsqueeze(1), sin[..., self.angles].unsqueeze(1)

    def _turned(self, keys: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        size, axis = 2 * cos.shape[-1], -1 if self.neighbours else -2
        start = keys.shape[-1] - size if self.last else 0
        before, part, after = keys.tensor_split([start, start + size], -1)
        x, y = part.unflatten(-1, (-1, 2) if self.neighbours else (2, -1)).unbind(axis)
        turned = torch.stack([x * cos - y * sin, y * cos + x * sin], axis).flatten(-2)
        return torch.cat([before, turned, after], -1)


_Turn = tuple[Rotation, Tensor, Tensor]  # with the cosines and sines (…, 1, n, planes) it gave


def _turn_of(
    name: str, args: Sequence[Any], kwargs: dict[str, Any], output: Any, length: int
) -> _Turn | None:
    """A call of a module that turned `length` positions into cosines and sines; None for others."""
    given = [(place, _placeholder(value)) for place, value in [*enumerate(args), *kwargs.items()]]
    pair = _cos_sin(output)
    if pair is None or not any(value is _POSITIONS for _, value in given):
        return None
    cos, sin = pair
    lengths = (cos.float().square() + sin.float().square()).flatten()
    if cos.ndim not in (2, 3) or cos.shape[-2] != length or cos.shape[-1] % 2:
        return None
    if float(lengths.max() - lengths.min()) > _EVEN * float(lengths.mean()):
        return None
    half, angles = cos.shape[-1] // 2, slice(None)  # one for each plane, or each of them twice
    if torch.equal(cos[..., :half], cos[..., half:]):
        angles = slice(half)
    elif torch.equal(cos[..., ::2], cos[..., 1::2]):
        angles = slice(None, None, 2)
    rotation = Rotation(name, tuple(given), angles)
    return rotation, cos[..., angles].unsqueeze(-3), sin[..., angles].unsqueeze(-3)


def _ways_to_undo(keys: Tensor, turns: Sequence[_Turn]) -> Iterator[tuple[Rotation, Tensor]]:
    """Every way in which keys (1, heads, n, k) may have been turned, and what they were then."""
    for rotation, cos, sin in turns:
        for neighbours, last in ((False, False), (True, False), (False, True), (True, True)):
            tried = replace(rotation, neighbours=neighbours, last=last)
            if 2 * cos.shape[-1] <= keys.shape[-1]:
                yield tried, tried.undone(keys, cos, sin)


def _placeholder(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return _STATES if value.is_floating_point() else _POSITIONS


def _cos_sin(output: Any) -> tuple[Tensor, Tensor] | None:
    if isinstance(output, Tensor) and output.is_complex():
        return output.real, output.imag
    pair = cast("tuple[Any, ...]", output) if isinstance(output, tuple) else ()
    if len(pair) != 2 or not all(isinstance(each, Tensor) for each in pair):
        return None
    cos, sin = cast("tuple[Tensor, Tensor]", pair)
    return (cos, sin) if cos.is_floating_point() and cos.shape == sin.shape else None
