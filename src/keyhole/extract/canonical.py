"""Canonical forms of heads and of blocks: what an oracle shows of them, and nothing else.

Proposition 7.1 of *Provably Learning Attention with Queries* (arXiv 2601.16873): heads with equal W
act as one with the summed v, and a head with v = 0 is invisible. Merged and without invisible
heads, two sets of heads are the same function exactly when they agree up to order (ours; the paper
asks whether this can be decided). Proof: let heads with different W_h add up to the function 0.
Ask `[x+δ, k times ; x]` for k = 0 … H. The attention to the copies is `k/(k + e^−z_h)`,
z_h = δᵀW_hx, so

    Σ_h v_hᵀδ · k / (k + e^−z_h) = 0   for k = 1 … H.

For all x and δ but a set of measure 0 the z_h differ, the matrix 1/(k + e^−z_h) is Cauchy's and has
an inverse, and v_hᵀδ = 0; so v_h = 0. Two canonical forms of one function, one less the other, are
such heads once equal W are merged, so nothing is left. docs/papers.md says which question of the
paper this answers.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from keyhole.core.errors import InputError
from keyhole.oracle.block import Block, Blocks
from keyhole.oracle.planted import MultiHead
from keyhole.oracle.sub_layer import rotated


def canonical(model: MultiHead, tolerance: float = 1e-12) -> MultiHead:
    """Merge equal heads and drop invisible ones; the first of equal heads keeps its place.

    `tolerance` is relative to the largest entry of any W (for equality) or of any v (for zero). If
    every head is invisible one head of zeros is kept, since a model has at least one.
    """
    W, v = _stacked(model)
    groups, seen = _groups(model, tolerance)
    kept = [group for group, visible in zip(groups, seen, strict=True) if visible]
    if not kept:
        return MultiHead([torch.zeros_like(W[0])], [torch.zeros_like(v[0])])
    return MultiHead([W[group[0]] for group in kept], [v[group].sum(0) for group in kept])


def remarks(model: MultiHead, tolerance: float = 1e-12) -> tuple[str, ...]:
    """Say what `canonical` merges and drops; heads are numbered from 0."""
    words: list[str] = []
    for group, visible in zip(*_groups(model, tolerance), strict=True):
        names = ", ".join(str(head) for head in group)
        if not visible:
            what = f"heads {names} cancel" if len(group) > 1 else f"head {names} is invisible"
            words.append(f"{what}: their v adds up to 0" if len(group) > 1 else f"{what}: v = 0")
        elif len(group) > 1:
            words.append(f"heads {names} act as one: equal W")
    return tuple(words)


def same_function(a: MultiHead, b: MultiHead, tolerance: float = 1e-9) -> bool:
    """Return whether two sets of heads are the same function: whether their canonical forms agree.

    `tolerance` is relative to the largest entries of W and v.
    """
    return not difference(a, b, tolerance)


def difference(a: MultiHead, b: MultiHead, tolerance: float = 1e-9) -> str:
    """Say how two sets of heads differ as functions; return "" if they are the same."""
    _expect_tolerance(tolerance)
    if a.dim != b.dim:
        return f"d = {a.dim} against d = {b.dim}"
    (W, v), (W2, v2) = _stacked(canonical(a, tolerance)), _stacked(canonical(b, tolerance))
    if len(W) != len(W2):
        return f"{len(W)} against {len(W2)} heads in canonical form"
    # Canonical heads differ in W, so each has at most one partner.
    partner = _distances(W, W2).argmin(1)
    if len(partner.unique()) < len(W):
        return "heads of one have no partner in the other"
    for name, first, other in (("W", W, W2[partner]), ("v", v, v2[partner])):
        apart, largest = (first - other).abs().max(), max(first.abs().max(), other.abs().max())
        if float(apart) > tolerance * float(largest):
            return f"{name} differs by {float(apart / largest):.1e} of its largest entry"
    return ""


def _groups(model: MultiHead, tolerance: float) -> tuple[list[list[int]], list[bool]]:
    """Group heads with equal W, and say of each group whether it is visible."""
    _expect_tolerance(tolerance)
    W, v = _stacked(model)
    equal = _distances(W, W) <= tolerance * float(W.abs().max())
    groups: list[list[int]] = []
    for head in range(len(W)):
        home = next((group for group in groups if bool(equal[group[0], head])), None)
        if home is None:
            groups.append([head])
        else:
            home.append(head)
    limit = tolerance * float(v.abs().max())
    return groups, [float(v[group].sum(0).abs().max()) > limit for group in groups]


def _expect_tolerance(tolerance: float) -> None:
    """Raise InputError unless 0 <= tolerance < 1: from 1 on all heads are equal and invisible."""
    if not 0 <= tolerance < 1:
        raise InputError(f"the tolerance must be at least 0 and below 1: got {tolerance}")


def _distances(a: Tensor, b: Tensor) -> Tensor:
    """Return the largest difference of entries, for all pairs."""
    return torch.cdist(a.flatten(1), b.flatten(1), p=torch.inf)


def _stacked(model: MultiHead) -> tuple[Tensor, Tensor]:
    return torch.stack(list(model.W)), torch.stack(list(model.v))


# Blocks. One function has many parameters (block.py, sub_layer.py and blocks/post_norm.py say which
# and why). What all of them have in common is compared number by number:
#
#     of each head     Q_h R_m K_gᵀ for some m, q_h K_gᵀ and V_g O_h; heads in any order. Of a
#                      position bias, the weights of equal tokens: a number added to all biases
#                      does not show
#     of each unit     its row, bias, gate and column of C; units in any order, those of ReLU and
#                      the gates of length 1
#     b and biases     without norms b is moved into a and c, before LayerNorms its mean into c
#     means            what a norm takes away is left out: of rows behind a LayerNorm, of O, b, C
#                      and c where norms are behind the sums, and there D has the mean square 1
#
# Stacked blocks are compared one by one; before LayerNorms, the means of biases are moved into the
# c of the last block.

_PLACES = (0, 1, 5)  # at which rotary positions are compared
_DISTANCES = 256  # over which a bias of positions is


def canonical_block(block: Block) -> Block:
    """Return the same function with its free parameters fixed, except those inside heads."""
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
    """Return the largest difference of each part of two blocks, relative to its largest number."""
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
    sizes = {
        name: max(float(part.abs().max()) for part in both) or 1.0
        for name, both in parts.items() if both[1].numel()
    }  # fmt: skip
    # A bias may be 0: its errors are relative to the matrix it belongs to.
    beside = {"qK": "QK", "a": "A", "g": "G", "b": "VO", "c": "C", "e": "E"}
    return {
        name: float((parts[name][0] - parts[name][1]).abs().max())
        / max(size, sizes.get(beside.get(name, name), 0.0))
        for name, size in sizes.items()
    }


def difference_of_blocks(
    first: Block | Blocks, second: Block | Blocks, tolerance: float = 1e-9
) -> str:
    """Say how two blocks differ as functions; return "" if they are the same."""
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
        block.Q @ _keys_at(block, K, place).mT
        for place in _PLACES[: None if block.sub_layer.rotary else 1]
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


def _keys_at(block: Block, keys: Tensor, place: int) -> Tensor:
    if not place:
        return keys
    each = len(block.Q) // len(block.K)
    return rotated(keys, place * block.frequencies.repeat_interleave(each, 0)[:, None])
