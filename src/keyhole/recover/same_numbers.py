"""Are these the same numbers of an encoder's vectors, though of other texts? (Mantel, 1967)

Which numbers of a vector rise and fall together follows from the encoder's weights more than from
the texts. So the correlations r_ij of its numbers i and j over some texts correlate with those over
other texts; those of another encoder do not, and neither do its own with the numbers in another
order. Orders drawn at random say how large the correlation of correlations gets by chance: the
right order must beat all of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

_ORDERS = 1_999  # drawn at random: chance alone beats them once in 2,000 times
_NUMBERS = 128  # that are looked at: enough, and quick


def same_numbers(own: Tensor, given: Tensor, seed: int = 0) -> bool:
    """Do the numbers of two sets of vectors (a, k), (b, k) belong together, one by one?"""
    if min(len(own), len(given)) < 3:
        return False  # two vectors have no correlations but 1 and -1
    ours, theirs = (_correlations(each[:, :_NUMBERS]) for each in (own, given))
    count = len(ours)
    first, second = torch.triu_indices(count, count, 1)
    theirs = _centred(theirs[first, second])
    stream = torch.Generator().manual_seed(seed)
    agreement = float(_centred(ours[first, second]) @ theirs)
    for _ in range(_ORDERS):
        order = torch.randperm(count, generator=stream)
        if float(_centred(ours[order[first], order[second]]) @ theirs) >= agreement:
            return False
    return True


def _correlations(vectors: Tensor) -> Tensor:
    return torch.corrcoef(vectors.double().T).nan_to_num(0.0)  # NaN: always the same number


def _centred(values: Tensor) -> Tensor:
    return values - values.mean()
