"""The judge of orders: rows that leaked in no order are compared as a set.

What the model gives for a text has an order; the rows that leaked are put into the one that fits it
best (an assignment of least misfit), and are judged there like any others. The text's own order is
believed only if no other one does as well: two tokens that are neighbours, or next but one, change
places, all in between is reversed, or shuffled, the model is run on that, and the leak is assigned
anew. Its misfit must be larger by what a rival of any token must exceed (rivals.py). Two rows that
are alike leave open which is which; that is no doubt about the text, if their tokens are the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

from keyhole.recover.attack import Target
from keyhole.recover.leaks import HiddenStates
from keyhole.recover.rivals import exposed_rows
from keyhole.recover.search.row_order import assigned

_AT_ONCE = 4096  # tokens in one pass
_SHORT = 64  # tokens: of a longer text only neighbours are exchanged


def in_best_order(leak: HiddenStates, given: Tensor) -> HiddenStates | None:
    """The leak with its rows where they fit what the model gives, (n, f), best.

    None where the rows have an order of their own.
    """
    if not leak.permuted:
        return None
    return leak.ordered(assigned(_misfits(given, leak.values.to(given), torch.ones(()).to(given))))


def open_places(
    target: Target, leak: HiddenStates, text: Tensor, sigma: Tensor, enough: float
) -> tuple[Tensor, int]:
    """The positions (n,) whose tokens might stand in another order, and the passes that took.

    `leak` is in the text's order, `sigma` (n, f) the error of its numbers.
    """
    rivals = _rival_orders(len(text)).to(text.device)
    rivals = rivals[(text[rivals] != text).any(-1)]
    leaked = leak.values.to(text.device)
    unsettled = torch.zeros_like(text, dtype=torch.bool)
    if not len(rivals):  # a single token, or the same one throughout
        return unsettled, 0
    own = _least(_misfits(exposed_rows(target, leak, text[None])[0], leaked, sigma))
    for part in rivals.split(max(1, _AT_ONCE // len(text))):
        for order, given in zip(part, exposed_rows(target, leak, text[part]), strict=True):
            if not _least(_misfits(given, leaked, sigma)) - own > enough:
                unsettled |= text[order] != text
    return unsettled, len(rivals) + 1


def _rival_orders(length: int) -> Tensor:
    """Other orders (k, n) of n tokens; the first and the last one stay where they are in some."""
    same = torch.arange(length)
    orders = [same.flip(0), torch.cat([same[:1], same[1:-1].flip(0), same[1:][-1:]])]
    orders.append(torch.randperm(length, generator=torch.Generator().manual_seed(0)))
    for distance in (1, 2) if length <= _SHORT else (1,):
        for place in range(length - distance):
            swapped = same.clone()
            swapped[[place, place + distance]] = same[[place + distance, place]]
            orders.append(swapped)
    return torch.stack(orders)


def _misfits(given: Tensor, leaked: Tensor, sigma: Tensor) -> Tensor:
    """Sums of squares (rows, positions) in units of the leak's error; NaN for what did not leak."""
    weights = sigma.expand_as(leaked).square().reciprocal()
    far = (weights * leaked.square()).sum(-1, keepdim=True)
    return far - 2 * (weights * leaked) @ given.T + weights @ given.square().T


def _least(misfits: Tensor) -> float:
    order = assigned(misfits).to(misfits.device)
    return float(misfits[order, torch.arange(len(order), device=order.device)].nansum())
