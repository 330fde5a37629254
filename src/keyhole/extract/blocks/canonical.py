"""Two blocks compared in what an oracle can tell about them.

The same function has many parameters (block.py, sub_layer.py, behind.py say which and why). What
all of them share is compared instead, number by number:

    of each head     Q_h R_m K_gᵀ for some m, q_h K_gᵀ and V_g O_h; heads in any order. A bias of
                     positions by the weights of equal tokens: a number added to all is not seen
    of each unit     its row, bias, gate and column of C; units in any order, those of ReLU and the
                     gates of length 1
    b and biases     without norms b is moved into a and c, before LayerNorms its mean into c
    means            what a norm takes away is left out: of rows behind a LayerNorm, of O, b, C and
                     c where norms are behind the sums, and there D has the mean square 1

Of blocks on top of each other each is compared with its own; before LayerNorms, means of biases are
moved into the c of the last.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from keyhole.core.errors import InputError
from keyhole.oracle.block import Block, Blocks

_PLACES = (0, 1, 5)  # at which rotary positions are compared
_DISTANCES = 256  # over which a bias of positions is


def canonical_block(block: Block) -> Block:
    """The same function with the parameters that are free chosen, but for those inside heads."""
    given = block
    if block.norm in ("layer", "behind"):
        block = replace(block, A=_centred(block.A), G=_centred(block.G))
    if block.norm == "layer":
        Q, K, V = (_centred(part.mT).mT.contiguous() for part in (block.Q, block.K, block.V))
        shift = block.b.mean()  # seen behind both sums, but not by the second norm
        block = replace(block, Q=Q, K=K, V=V, b=block.b - shift,
                        c=block.c + shift * (block.w.sum() if block.scores else 1))  # fmt: skip
    if block.norm == "behind":
        size = block.D.square().mean().sqrt() * block.D.sum().sign()
        turn = size.sign()
        block = replace(
            block, O=_centred(block.O), b=_centred(block.b),
            C=_centred(block.C.mT).mT.contiguous() / size, c=_centred(block.c) / size,
            D=block.D / size, E=block.E * turn,
            epsilon_behind=block.epsilon_behind / float(size) ** 2,
        )  # fmt: skip
    if block.norm == "none":
        a, g = block.a + block.A @ block.b, block.g + block.G @ block.b
        moved = block.w @ block.b if block.scores else block.b
        block = replace(block, a=a, g=g, c=block.c + moved, b=torch.zeros_like(block.b))
    if len(block.G):
        length = torch.cat([block.G, block.g[:, None]], 1).norm(dim=1)
        sign = torch.gather(block.G, 1, block.G.abs().argmax(1, keepdim=True))[:, 0].sign()
        length = length * sign
        block = replace(block, G=block.G / length[:, None], g=block.g / length, C=block.C * length)
    elif block.activation == "relu":
        length = block.A.norm(dim=1)
        block = replace(block, A=block.A / length[:, None], a=block.a / length, C=block.C * length)
    order = torch.argsort(block.A @ torch.linspace(1, 2, given.dim, dtype=torch.float64))
    parts = {name: getattr(block, name)[order] for name in ("A", "a")}
    if len(block.G):
        parts |= {name: getattr(block, name)[order] for name in ("G", "g")}
    return replace(block, **parts, C=block.C[:, order].contiguous())


def _each(blocks: Block | Blocks) -> list[Block]:
    if isinstance(blocks, Block):
        return [blocks]
    *lower, top = (canonical_block(block) for block in blocks.blocks)
    if blocks.norm != "layer":
        return [*lower, top]
    shift = torch.stack([block.c.mean() for block in lower]).sum() if lower else 0.0
    lower = [replace(block, c=_centred(block.c)) for block in lower]
    return [*lower, replace(top, c=top.c + shift)]


def compared(one: Block | Blocks, two: Block | Blocks) -> dict[str, float]:
    """The largest difference of each part of two blocks, relative to its largest number."""
    ours, theirs = _each(one), _each(two)
    if len(ours) != len(theirs):
        raise InputError(f"there are {len(ours)} blocks in one, and {len(theirs)} in the other")
    parts = [_compared(*pair) for pair in zip(ours, theirs, strict=True)]
    return {name: max(part[name] for part in parts) for name in parts[0]}


def _compared(first: Block, second: Block) -> dict[str, float]:
    for name in ("dim", "norm", "activation"):
        ours, theirs = getattr(first, name), getattr(second, name)
        if ours != theirs:
            raise InputError(f"the blocks differ in {name}: {ours} and {theirs}")
    shapes = [(len(each.Q), len(each.A), len(each.G)) for each in (first, second)]
    if shapes[0] != shapes[1]:
        raise InputError(f"the blocks differ in heads, units and gates: {shapes[0]}, {shapes[1]}")
    if len(first.places) != len(second.places):
        raise InputError("one block has a bias of positions, and the other has none")
    one, two = canonical_block(first), canonical_block(second)
    ours, theirs = (torch.cat([each.A, each.a[:, None]], 1) for each in (one, two))
    units = torch.cdist(ours, theirs).argmin(1)
    forms, others = _heads(one), _heads(two)
    likeness = torch.stack([
        torch.cdist(forms[name].flatten(1), others[name].flatten(1)) / forms[name].abs().max()
        for name in ("VO", "QK")
    ])  # fmt: skip
    heads = likeness.sum(0).argmin(1)
    if len(heads.unique()) < len(heads) or len(units.unique()) < len(units):
        raise InputError("heads or units of one block have no partner of their own in the other")
    parts = {name: (others[name][heads], form) for name, form in forms.items()}
    of_units = ("A", "a", "G", "g") if len(one.G) else ("A", "a")
    parts |= {name: (getattr(two, name)[units], getattr(one, name)) for name in of_units}
    parts["C"] = two.C[:, units], one.C
    parts |= {
        name: (getattr(two, name), getattr(one, name)) for name in ("b", "c", "D", "E", "e", "w")
    }
    sizes = {name: _size(*both) for name, both in parts.items() if both[1].numel()}
    # A bias may be 0: its errors are those of the matrix beside it.
    beside = {"qK": "QK", "a": "A", "g": "G", "b": "VO", "c": "C", "e": "E"}
    return {
        name: float((parts[name][0] - parts[name][1]).abs().max())
        / max(size, sizes.get(beside.get(name, name), 0.0))
        for name, size in sizes.items()
    }


def difference(first: Block | Blocks, second: Block | Blocks, tolerance: float = 1e-9) -> str:
    """In what two blocks differ as functions; empty if they are the same."""
    try:
        errors = compared(first, second)
    except InputError as error:
        return str(error)
    name = max(errors, key=lambda each: errors[each])
    return "" if errors[name] <= tolerance else f"{name} differs by {errors[name]:.1e}, relatively"


def _centred(rows: Tensor) -> Tensor:
    return rows - rows.mean(-1, keepdim=True)


def _heads(block: Block) -> dict[str, Tensor]:
    each = len(block.Q) // len(block.K)
    K, V = (part.repeat_interleave(each, 0) for part in (block.K, block.V))
    forms = [
        block.Q @ _turned(block, K, place).mT for place in _PLACES[: None if _turns(block) else 1]
    ]
    parts = {
        "QK": torch.cat(forms, 2),
        "qK": torch.cat([block.q[:, None] @ K.mT], 2),
        "VO": V @ block.O,
    }
    if len(block.places):
        last = block.places.shape[1] - 1
        parts["places"] = block.places[:, torch.arange(_DISTANCES).clamp(max=last)].softmax(1)
    return parts


def _turns(block: Block) -> bool:
    return block.frequencies.shape[1] > 0


def _turned(block: Block, keys: Tensor, place: int) -> Tensor:
    if not place:
        return keys
    each = len(block.Q) // len(block.K)
    angles = place * block.frequencies.repeat_interleave(each, 0)[:, None]
    cos, sin = angles.cos(), angles.sin()
    x, y = keys.chunk(2, -1)
    return torch.cat([x * cos - y * sin, x * sin + y * cos], -1)


def _size(*parts: Tensor) -> float:
    return max(float(part.abs().max()) for part in parts) or 1.0
