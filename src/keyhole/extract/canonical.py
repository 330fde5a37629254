"""Canonical forms of heads and of blocks: what an oracle shows of them, and nothing else.

Proposition 7.1 of *Provably Learning Attention with Queries* (arXiv 2601.16873): heads
with equal W act as one with the summed v, and a head with v = 0 is invisible. Merged
and without invisible heads, two sets of heads are the same function exactly when they
agree up to order (ours; the paper asks whether this can be decided). Proof: let heads
with different W_h add up to the function 0. Ask `[x+δ, k times ; x]` for k = 0 … H. The
attention to the copies is `k/(k + e^−z_h)`, z_h = δᵀW_hx, so

    Σ_h v_hᵀδ · k / (k + e^−z_h) = 0   for k = 1 … H.

For all x and δ but a set of measure 0 the z_h differ, the matrix 1/(k + e^−z_h) is
Cauchy's and has an inverse, and v_hᵀδ = 0; so v_h = 0. Now let two canonical forms be
the same function. Then the heads of one, and those of the other with −v, add up to 0.
Merge those with equal W: what is left has different W, so all its v are 0, and every
head has an equal one in the other form. docs/papers.md says which question of the paper
this answers.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from keyhole.core.errors import InputError, expect_number
from keyhole.core.float64 import EPSILON
from keyhole.extract.bilinear import max_abs
from keyhole.oracle.block import Block, Blocks
from keyhole.oracle.planted import MultiHead
from keyhole.oracle.sub_layer import rotated


def canonical(model: MultiHead, tolerance: float = 1e-12) -> MultiHead:
    """Merge equal heads and drop invisible ones; the first of equal heads keeps its place.

    `tolerance` is relative to the largest entry of any W (for equality) or of any v
    (for zero). If every head is invisible one head of zeros is kept, since a model has
    at least one.
    """
    W, v = _stacked(model)
    shown = [group for group, visible in _groups(model, tolerance) if visible]
    if not shown:
        return MultiHead([torch.zeros_like(W[0])], [torch.zeros_like(v[0])])
    return MultiHead(
        [W[group[0]] for group in shown], [v[group].sum(0) for group in shown]
    )


def remarks(model: MultiHead, tolerance: float = 1e-12) -> tuple[str, ...]:
    """Say what `canonical` merges and drops; heads are numbered from 0."""
    words: list[str] = []
    for group, visible in _groups(model, tolerance):
        names = ", ".join(str(head) for head in group)
        several = len(group) > 1
        if visible and several:
            words.append(f"heads {names} act as one: equal W")
        elif several:
            words.append(f"heads {names} cancel: their v adds up to 0")
        elif not visible:
            words.append(f"head {names} is invisible: v = 0")
    return tuple(words)


def same_function(
    a: MultiHead,
    b: MultiHead,
    tolerance: float = 1e-9,
) -> bool:
    """Return whether two sets of heads are the same function: whether their canonical forms agree.

    `tolerance` is relative to the largest entries of W and v.
    """
    return not difference(a, b, tolerance)


def difference(
    a: MultiHead,
    b: MultiHead,
    tolerance: float = 1e-9,
) -> str:
    """Say how two sets of heads differ as functions; return "" if they are the same."""
    expect_number("tolerance", tolerance, least=0, below=1)  # from 1 on, all is equal
    if a.dim != b.dim:
        return f"d = {a.dim} against d = {b.dim}"
    W, v = _stacked(canonical(a, tolerance))
    W2, v2 = _stacked(canonical(b, tolerance))
    if len(W) != len(W2):
        return f"{len(W)} against {len(W2)} heads in canonical form"
    # Canonical heads differ in W, so each has at most one partner.
    partner = _distances(W, W2).argmin(1)
    if len(partner.unique()) < len(W):
        return "heads of one have no partner in the other"
    for name, first, second in (("W", W, W2[partner]), ("v", v, v2[partner])):
        largest = max(max_abs(first), max_abs(second))
        error = max_abs(first - second)
        if error > tolerance * largest:
            return f"{name} differs by {error / largest:.1e} of its largest entry"
    return ""


def _groups(model: MultiHead, tolerance: float) -> list[tuple[list[int], bool]]:
    """Group heads with equal W, and say of each group whether it is visible."""
    expect_number("tolerance", tolerance, least=0, below=1)  # from 1 on, all is equal
    W, v = _stacked(model)
    equal = _distances(W, W) <= tolerance * max_abs(W)
    groups: dict[int, list[int]] = {}
    for head in range(len(W)):
        first = next((each for each in groups if equal[each, head]), head)
        groups.setdefault(first, []).append(head)
    limit = tolerance * max_abs(v)
    return [(group, max_abs(v[group].sum(0)) > limit) for group in groups.values()]


def _distances(a: Tensor, b: Tensor) -> Tensor:
    """Return the largest difference of entries, for all pairs."""
    return torch.cdist(a.flatten(1), b.flatten(1), p=torch.inf)


def _stacked(model: MultiHead) -> tuple[Tensor, Tensor]:
    return torch.stack(list(model.W)), torch.stack(list(model.v))


# Blocks. A block (oracle/block.py) can be changed without changing its function.
# `canonical_block` removes these freedoms:
#
#     a ReLU unit times s > 0, C's column by 1/s    → rows of A have length 1
#     a ReLU unit without a row or gate             → its constant moves into c
#     a gate times s ≠ 0, C's column by 1/s         → rows of (G, g): length 1, largest entry > 0
#     no norms: b is a shift of h                   → b = 0, moved into a, g and c
#     norm "layer": the mean of a token is ignored  → rows of A, G, columns of Q, K, V: mean 0
#         so b's mean is seen in the answer only    → it moves into c
#     norm "behind": the norms ignore the means of  → O, b, C, c and rows of A and G have mean 0
#         both sums, and the second one its scale   → mean(D²) = 1, sum(D) ≥ 0
#
# In stacked blocks with LayerNorms, the means of all c move into that of the last
# block.
#
# `compared` removes the rest. Heads and units may have any order, so partners are
# matched. Inside a head only products show: Q_h R_m K_gᵀ, q_h R_m K_gᵀ and V_g O_h,
# where R_m is the rotation at distance m and g the key group of h. A number added to
# all biases of positions does not show, so their softmax is compared. Heads or units
# that could be merged, or that do not show, are not looked for: blocks that differ only
# in those are said to differ.

# Where Q_h and K_g have rank k, distances 0 and 1 determine all others: with M_m = Q_h
# R_m K_gᵀ, M_{m+1} = M_1 M_0⁺ M_m. At distance 5 slow rotations show more.
_DISTANCES = (0, 1, 5)


def canonical_block(block: Block) -> Block:
    """Return the same function with its free parameters fixed, except those inside heads."""
    lengths = block.A.norm(dim=1)
    if block.norm in ("layer", "behind"):
        block = replace(block, A=_centred(block.A), G=_centred(block.G))
    if block.norm == "layer":
        mean = block.b.mean()
        shift = mean * block.w.sum() if block.scores else mean
        block = replace(
            block,
            Q=_centred(block.Q, -2),
            K=_centred(block.K, -2),
            V=_centred(block.V, -2),
            b=block.b - mean,
            c=block.c + shift,
        )
    if block.norm == "behind":
        sign = -1.0 if block.D.sum() < 0 else 1.0
        scale = sign * (float(block.D.square().mean().sqrt()) or 1.0)
        block = replace(
            block,
            O=_centred(block.O),
            b=_centred(block.b),
            C=_centred(block.C, 0) / scale,
            c=_centred(block.c) / scale,
            D=block.D / scale,
            E=block.E * sign,
            epsilon_behind=block.epsilon_behind / scale**2,
        )
    if block.norm == "none":
        shift = block.w @ block.b if block.scores else block.b
        block = replace(
            block,
            a=block.a + block.A @ block.b,
            g=block.g + block.G @ block.b,
            b=torch.zeros_like(block.b),
            c=block.c + shift,
        )
    if len(block.G):
        gates = torch.cat([block.G, block.g[:, None]], 1)
        largest = gates.gather(1, gates.abs().argmax(1, keepdim=True))[:, 0]
        length = gates.norm(dim=1).copysign(largest)
        length[largest == 0] = 1
        block = replace(
            block, G=block.G / length[:, None], g=block.g / length, C=block.C * length
        )
    if block.activation != "relu":
        return block
    length = block.A.norm(dim=1)
    constant = length <= 16 * EPSILON * lengths
    length[constant] = 1
    block = replace(
        block, A=block.A / length[:, None], a=block.a / length, C=block.C * length
    )
    if len(block.G):
        return block
    shows = (~constant).double()
    return replace(
        block,
        A=block.A * shows[:, None],
        a=block.a * shows,
        C=block.C * shows,
        c=block.c + block.C[:, constant] @ block.a[constant].relu(),
    )


def _each(blocks: Block | Blocks) -> list[Block]:
    if isinstance(blocks, Block):
        return [canonical_block(blocks)]
    *lower, top = (canonical_block(block) for block in blocks.blocks)
    if blocks.norm != "layer" or not lower:
        return [*lower, top]
    mean = torch.stack([block.c.mean() for block in lower]).sum()
    lower = [replace(block, c=_centred(block.c)) for block in lower]
    return [*lower, replace(top, c=top.c + mean)]


def compared(first: Block | Blocks, second: Block | Blocks) -> dict[str, float]:
    """Return the largest difference of each part of two blocks, relative to its largest number.

    An ε is added to the mean square of a token, so its difference is relative to 1.
    """
    ones = _each(first)
    others = _each(second)
    if len(ones) != len(others):
        raise InputError(
            f"there are {len(ones)} blocks in one, and {len(others)} in the other"
        )
    errors: dict[str, float] = {}
    for pair in zip(ones, others, strict=True):
        for name, error in _compared(*pair).items():
            errors[name] = max(error, errors.get(name, 0.0))
    return errors


def _settings(block: Block) -> dict[str, object]:
    """Return what must be equal in equal blocks; a causal mask shows only in answers of tokens."""
    return {
        "dim": block.dim,
        "norm": block.norm,
        "activation": block.activation,
        "heads": len(block.Q),
        "units": len(block.A),
        "gates": len(block.G),
        "scores": block.scores,
        "every_token": block.every_token,
        "causal": block.causal and block.every_token,
        "rotary positions": bool(block.frequencies.any()),
        "bias of positions": len(block.places) > 0,
    }


def _compared(first: Block, second: Block) -> dict[str, float]:
    """Compare two canonical blocks."""
    settings = _settings(second)
    for name, value in _settings(first).items():
        if value != settings[name]:
            raise InputError(
                f"the blocks differ in {name}: {value} and {settings[name]}"
            )
    reach = max(first.places.shape[1], second.places.shape[1])
    pairs = {
        **_matched(_heads(first, reach), _heads(second, reach)),
        **_matched(_units(first), _units(second)),
        **{name: (getattr(first, name), getattr(second, name)) for name in "bcDEew"},
    }
    sizes = {
        name: max(max_abs(part) for part in pair) or 1.0
        for name, pair in pairs.items()
        if pair[0].numel()
    }
    # A bias may be 0: its errors are relative to the matrix it belongs to.
    beside = {"qK": "QK", "a": "A", "g": "G", "b": "VO", "c": "C", "e": "E"}
    errors: dict[str, float] = {}
    for name, size in sizes.items():
        one, other = pairs[name]
        size = max(size, sizes.get(beside.get(name, name), 0.0))
        errors[name] = max_abs(one - other) / size
    if first.norm != "none":
        for name in ("epsilon", "epsilon_behind"):
            one = getattr(first, name)
            other = getattr(second, name)
            errors[name] = abs(one - other) / max(1.0, one, other)
    return errors


def difference_of_blocks(
    first: Block | Blocks,
    second: Block | Blocks,
    tolerance: float = 1e-9,
) -> str:
    """Say how two blocks differ as functions; return "" if they are the same."""
    expect_number("tolerance", tolerance, least=0, below=1)  # from 1 on, all is equal
    try:
        errors = compared(first, second)
    except InputError as error:
        return str(error)
    name = max(errors, key=lambda each: errors[each])
    if errors[name] <= tolerance:
        return ""
    return f"{name} differs by {errors[name]:.1e}, relatively"


def _centred(values: Tensor, dim: int = -1) -> Tensor:
    return values - values.mean(dim, keepdim=True)


def _matched(
    first: dict[str, Tensor], second: dict[str, Tensor]
) -> dict[str, tuple[Tensor, Tensor]]:
    """Pair the parts of heads, or of units, of two blocks: partners are those that differ least."""
    # products of matrices would lose half of the digits
    exact = "donot_use_mm_for_euclid_dist"
    cost = torch.zeros(())
    for name, part in first.items():
        if part.numel():
            other = second[name].flatten(1)
            apart = torch.cdist(part.flatten(1), other, compute_mode=exact)
            cost = cost + apart / (max_abs(part) or 1.0)
    _, partners = linear_sum_assignment(cost.numpy())
    return {name: (part, second[name][partners]) for name, part in first.items()}


def _units(block: Block) -> dict[str, Tensor]:
    gates = {"G": block.G, "g": block.g[:, None]} if len(block.G) else {}
    return {"A": block.A, "a": block.a[:, None], **gates, "C": block.C.mT}


def _heads(block: Block, reach: int) -> dict[str, Tensor]:
    """Return what shows of each head, with a bias of positions at `reach` distances."""
    shared = len(block.Q) // len(block.K)
    K = block.K.repeat_interleave(shared, 0)
    V = block.V.repeat_interleave(shared, 0)
    turns = block.frequencies.repeat_interleave(shared, 0)[:, None]
    keys = [K]
    if turns.any():
        keys = [rotated(K, distance * turns) for distance in _DISTANCES]
    parts = {
        "QK": torch.cat([block.Q @ each.mT for each in keys], 2),
        "qK": torch.cat([block.q[:, None] @ each.mT for each in keys], 2),
        "VO": V @ block.O,
    }
    if len(block.places):
        distances = torch.arange(reach).clamp(max=block.places.shape[1] - 1)
        parts["places"] = block.places[:, distances].softmax(1)
    return parts
