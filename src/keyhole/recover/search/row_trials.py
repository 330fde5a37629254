"""Tokens tried at many positions in one pass, each judged by the row of its own position.

A wrong token shows most in its own row: once most of a text is right, putting the right one in
takes that row's residual to nearly nothing, whatever is still wrong elsewhere. So candidates need
not be tried one position at a time (substitution.py, which costs a pass for each candidate at each
position). Positions are dealt to a few groups, neighbours to different ones; a pass puts one
candidate at every position of a group, and each is judged by its own row. What won is put in, the
largest gain first, as far as the whole text fits better.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from keyhole.recover.search.substitution import Tried

_WON = 0.5  # of a row's squared residual, or less, must be left for a candidate to count

Misfits = Callable[[Tensor], Tensor]


def try_rows(
    misfits: Misfits, ids: Tensor, places: Tensor, candidates: Tensor, together: int
) -> Tried:
    """Improve `ids` (n,) at `places` (m,) with `candidates` (m, k), so many `together` in a pass.

    `misfits` gives the squared residual of each row, (b, n), for texts (b, n).
    """
    before = misfits(ids[None])[0]
    order = places.argsort()
    places, candidates = places[order], candidates[order]
    own = torch.full(candidates.shape, torch.inf, dtype=before.dtype, device=ids.device)
    groups = -(-len(places) // together)
    for group in range(groups):
        chosen = torch.arange(group, len(places), groups, device=ids.device)
        texts = ids.repeat(candidates.shape[1], 1)
        texts[:, places[chosen]] = candidates[chosen].T
        own[chosen] = misfits(texts)[:, places[chosen]].T
    spent = 1 + groups * candidates.shape[1]
    least, winner = own.min(1)
    gain = before[places] - least
    won = (least < _WON * before[places]).nonzero().flatten()
    won = won[gain[won].argsort(descending=True)]
    if len(won) == 0:
        return Tried(ids, float(before.sum()), spent)
    prefixes = ids.repeat(len(won), 1)
    for number, place in enumerate(won.tolist()):
        prefixes[number:, places[place]] = candidates[place, winner[place]]
    joint = misfits(prefixes).sum(-1)
    best = int(joint.argmin())
    if joint[best] >= before.sum():
        return Tried(ids, float(before.sum()), spent + len(won))
    return Tried(prefixes[best], float(joint[best]), spent + len(won))
