"""Secrets in front of a leak, undone by somebody who had texts of his own leaked with them.

Whoever uses the server as well has texts that he knows, X, and their leaks. What follows:

- A rotation: rows are pairs, X R = Y, and rotation.py undoes it from k rows that span k dimensions.
- A map with the tokens of a block exchanged, Y = P X M. Sums do not see an order: the rows of a
  block add up to 1ᵀY = 1ᵀX M, so every known block is one pair of sums, and k blocks give M. What
  is left are rows in no order. Hidden states are then read as such (attacks/unordered.py). An
  encoder's keys and values give the hidden states below them by least squares
  (attacks/key_values.py). A decoder's first layer is looked up: values tell the token; keys, which
  are rotated by position, where it stands.

With tokens mixed as well (S P X M) neither rows nor their sums are pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from keyhole.core import Status, Unsuccessful
from keyhole.core.errors import InputError
from keyhole.models.capture import Exposure, capture
from keyhole.recover.attack import Target
from keyhole.recover.attacks.key_values import attention_inputs
from keyhole.recover.leaks import HiddenStates, KeyValues, Leak
from keyhole.recover.rotation import undo_linear, undo_rotation
from keyhole.recover.scrambled import blocks, matrices_of, with_matrices
from keyhole.recover.search.row_order import assigned

_AT_ONCE = 4096  # tokens of the vocabulary in one pass
_ELSEWHERE = 1e30  # the cost of a place in another block
_SPANNED = 1e-6  # of the largest singular value: less is rounding of float32
_OUTSIDE = 1e-6  # of the squares of a leak, outside of what is known

Pairs = Sequence[tuple[Leak, Leak]]  # of a known text: its leak as it would be, and as it is


def unrotated(known: Pairs, leaks: Sequence[Leak]) -> list[Leak]:
    """Leaks behind a rotation as they were."""
    pairs = _rows(known, sums=False)
    _expect_spanned([stored for _, stored in pairs], leaks, "rows")
    found = [undo_rotation(plain, stored) for plain, stored in pairs]
    return _multiplied(leaks, [alignment.stored @ alignment.own.T for alignment in found])


def unscrambled(known: Pairs, leaks: Sequence[Leak]) -> list[Leak]:
    """Leaks behind a map as they were, but for the order of tokens in a block."""
    pairs = _rows(known, sums=True)
    _expect_spanned([stored for _, stored in pairs], leaks, "sums of blocks")
    return _multiplied(leaks, [undo_linear(plain, stored) for plain, stored in pairs])


def _expect_spanned(stored: Sequence[Tensor], leaks: Sequence[Leak], what: str) -> None:
    """What is solved for is known on what was seen: the leaks must lie in it, nearly.

    Rows need not span all dimensions: those of a layer normalisation leave one out.
    """
    for place, rows in enumerate(stored):
        _, sizes, directions = torch.linalg.svd(rows, full_matrices=False)
        seen = directions[sizes > _SPANNED * sizes[0]]
        for leak in leaks:
            given = matrices_of(leak)[place].double()
            inside = (given @ seen.mT).square().sum() / given.square().sum()
            if 1 - float(inside) > _OUTSIDE:
                raise Unsuccessful(
                    Status.UNSOLVED,
                    f"the {what} of known texts span {len(seen)} of {rows.shape[1]} dimensions",
                )


def _rows(known: Pairs, sums: bool) -> list[tuple[Tensor, Tensor]]:
    """For each matrix of a leak all known rows (m, k), or sums over blocks, and those stored."""
    if not known:
        raise InputError("expected known texts, got none")

    def rows(leak: Leak) -> list[Tensor]:
        matrices = [matrix.double() for matrix in matrices_of(leak)]
        if not sums:
            return matrices
        parts = blocks(len(matrices[0]))
        return [torch.stack([matrix[part].sum(0) for part in parts]) for matrix in matrices]

    each = [(rows(plain), rows(stored)) for plain, stored in known]
    count = len(each[0][0])
    return [
        (torch.cat([plain[place] for plain, _ in each]),
         torch.cat([stored[place] for _, stored in each]))
        for place in range(count)
    ]  # fmt: skip


def _multiplied(leaks: Sequence[Leak], back: list[Tensor]) -> list[Leak]:
    return [
        with_matrices(leak, [m.double() @ b for m, b in zip(matrices_of(leak), back, strict=True)])
        for leak in leaks
    ]


def in_no_order(target: Target, leak: Leak) -> Leak:
    """Unscrambled rows as a leak that an attack reads."""
    if isinstance(leak, HiddenStates):
        return replace(leak, permuted=True)
    if not isinstance(leak, KeyValues):
        raise Unsuccessful(Status.NOT_APPLICABLE, f"no attack here orders {leak.exposure}")
    number = leak.exposure.block(target.parts)
    if not target.parts.causal:
        below = attention_inputs(target, leak, number).cpu()
        return HiddenStates(below, number - 1, normalised=False, permuted=True, model=leak.model)
    if number > 1:
        raise Unsuccessful(
            Status.NOT_APPLICABLE, "the order of a causal model's rows is read at its first layer"
        )
    return _ordered(target, leak)


@torch.no_grad()
def _ordered(target: Target, leak: KeyValues) -> KeyValues:
    """First-layer keys and values in their order: tokens by their values, places by their keys."""
    tokens = _tokens_by_values(target, leak.values.transpose(0, 1).flatten(1))
    length = len(tokens)
    keys = leak.keys.transpose(0, 1).flatten(1)
    costs = torch.full((length, length), _ELSEWHERE)
    rows = torch.arange(length)
    for shift in range(length):  # so that every token comes to stand at every place
        moved = tokens.roll(shift)[None].to(target.parts.device)
        given = capture(target.model, leak.exposure, ids=moved)["keys"][0].cpu()
        there = (rows + shift) % length
        costs[rows, there] = (given.transpose(0, 1).flatten(1)[there] - keys).square().sum(-1)
    for part in blocks(length):
        outside = torch.ones(length, dtype=torch.bool)
        outside[part] = False
        costs[part, outside] = _ELSEWHERE
    order = assigned(costs)
    return replace(leak, keys=leak.keys[:, order], values=leak.values[:, order])


def _tokens_by_values(target: Target, rows: Tensor) -> Tensor:
    """The token (n,) whose own values of the first layer are nearest to each row (n, f)."""
    best = torch.full((len(rows),), torch.inf)
    tokens = torch.zeros(len(rows), dtype=torch.long)
    for part in torch.arange(target.vocabulary, device=target.parts.device).split(_AT_ONCE):
        given = capture(target.model, Exposure("kv", 0), ids=part[:, None])["values"]
        table = given[:, :, 0].flatten(1).cpu()
        far, nearest = torch.cdist(rows, table).min(1)
        closer = far < best
        tokens = torch.where(closer, part.cpu()[nearest], tokens)
        best = torch.minimum(best, far)
    return tokens
