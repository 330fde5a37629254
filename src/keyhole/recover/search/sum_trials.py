"""The last wrong tokens of a text, several at once, by what each change does alone (ours).

A trial at one position is judged by what is left of the residual (row_trials.py). Where two tokens
near each other are wrong, neither right one by itself takes much of it away, and a wrong one may
take more. But what changes at different positions do to the leaked rows nearly adds up
(embedding/sums.py): so every candidate is run once, alone; sets of them whose effects add up to
what is missing are found without the model, and the best of those are run.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from keyhole.recover.embeddings.sums import Effects, Sets
from keyhole.recover.search.substitution import Tried

_WIDTH = 32  # of the beam over sets
_DEPTH = 4  # tokens of a set, at most
_RUN = 16  # sets that are run

Missing = Callable[[Tensor], Tensor]


def try_sums(missing: Missing, ids: Tensor, places: Tensor, candidates: Tensor) -> Tried:
    """Improve `ids` (n,) at `places` (m,) with `candidates` (m, k).

    `missing` gives what texts (b, n) leave unexplained, (b, numbers).
    """
    m, k = candidates.shape
    off = missing(ids[None])[0]
    singles = ids.repeat(m * k, 1)
    slots = torch.arange(m, device=ids.device).repeat_interleave(k)
    singles[torch.arange(m * k, device=ids.device), places[slots]] = candidates.flatten()
    left = missing(singles)
    moves = off - left
    effects = Effects(moves[None], moves.square().sum(-1)[None], slots, m)
    depth = min(_DEPTH, m)
    sets = effects.grown(Sets.none(off[None]), _WIDTH, depth, _RUN)[0] if depth > 1 else None
    texts, losses, spent = singles, left.square().sum(-1), 1 + m * k
    if sets is not None:
        sets = sets[(sets >= 0).any(-1)]
        several = ids.repeat(len(sets), 1)
        for changes in sets.unbind(1):
            rows = (changes >= 0).nonzero().flatten()
            several[rows, places[slots[changes[rows]]]] = candidates.flatten()[changes[rows]]
        texts = torch.cat([texts, several])
        losses = torch.cat([losses, missing(several).square().sum(-1)])
        spent += len(several)
    best, before = int(losses.argmin()), float(off.square().sum())
    if float(losses[best]) >= before:
        return Tried(ids, before, spent)
    return Tried(texts[best], float(losses[best]), spent)
