"""The canonical form of several heads: what an oracle can tell about them, and nothing else.

Proposition 7.1 of *Provably Learning Attention with Queries* (arXiv 2601.16873): heads with equal W
act as one with the summed v, and a head with v = 0 is invisible. Merged and without invisible
heads, two sets of heads are the same function exactly when they agree up to order (ours; the paper
asks whether this can be decided). Proof: let heads with different W_h add up to the function 0.
Ask `[x+δ, k times ; x]` for k = 0 … H. The attention to the copies is `k/(k + e^−z_h)`,
z_h = δᵀW_hx, so

    Σ_h v_hᵀδ · k / (k + e^−z_h) = 0   for k = 1 … H.

For all x and δ but a set of measure 0 the z_h differ, the matrix 1/(k + e^−z_h) is Cauchy's and
has an inverse, and v_hᵀδ = 0; so v_h = 0. Two canonical forms of one function, one less the other,
are such heads once equal W are merged: nothing may be left. docs/papers.md says what it answers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from keyhole.core.errors import InputError
from keyhole.oracle.planted import MultiHead


def canonical(model: MultiHead, tolerance: float = 1e-12) -> MultiHead:
    """Equal heads merged, invisible ones dropped; the first of equal heads keeps its place.

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
    """What `canonical` merges and drops, in words; heads are numbered from 0."""
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
    """Are two sets of heads the same function? True exactly if their canonical forms agree.

    `tolerance` is relative to the largest entries of W and v.
    """
    return not difference(a, b, tolerance)


def difference(a: MultiHead, b: MultiHead, tolerance: float = 1e-9) -> str:
    """In what two sets of heads differ as functions; empty if they are the same."""
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
    """Heads with equal W, and for each group whether anything of it is visible."""
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
    """From 1 on all heads would be equal, and none visible."""
    if not 0 <= tolerance < 1:
        raise InputError(f"the tolerance must be at least 0 and below 1: got {tolerance}")


def _distances(a: Tensor, b: Tensor) -> Tensor:
    """The largest difference of entries, for all pairs."""
    return torch.cdist(a.flatten(1), b.flatten(1), p=torch.inf)


def _stacked(model: MultiHead) -> tuple[Tensor, Tensor]:
    return torch.stack(list(model.W)), torch.stack(list(model.v))
