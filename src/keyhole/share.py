"""How much of a whole a sample of it vouches for, exactly.

Of N things n are drawn without replacement, and k of them are hits. The interval holds every number
K of hits in the whole under which neither so few nor so many hits had a chance of (1 − c)/2 or
less: Clopper and Pearson's (1934), with the hypergeometric distribution in place of the binomial,
which it becomes as N grows. Where all are drawn it is k alone. Whole numbers throughout: nothing is
rounded.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from fractions import Fraction

from keyhole.errors import InputError

CONFIDENCE = Fraction(19, 20)


def hits_in_all(
    hits: int, drawn: int, population: int, confidence: Fraction = CONFIDENCE
) -> tuple[int, int]:
    """The least and the most hits there may be in all, by those among the drawn."""
    if not 0 <= hits <= drawn <= population or drawn < 1 or not 0 < confidence < 1:
        raise InputError(
            f"expected hits among the drawn and those among all, got {hits}, {drawn}, {population}"
        )
    tail = (1 - confidence) / 2
    least = _least(hits, drawn, population, tail)
    return least, population - _least(drawn - hits, drawn, population, tail)


def _least(hits: int, drawn: int, population: int, tail: Fraction) -> int:
    """The smallest K under which `hits` or more have a better chance than `tail`.

    That chance grows with K, so it is found by bisection.
    """
    limit = tail * math.comb(population, drawn)
    possible = range(hits, population - (drawn - hits) + 1)
    return possible[
        bisect_left(possible, True, key=lambda K: _are_more(limit, hits, drawn, population, K))
    ]


def _are_more(limit: Fraction, hits: int, drawn: int, population: int, K: int) -> bool:
    """Is Σ_{x ≥ hits} C(K, x) C(N − K, n − x) > limit? So many samples have as many hits or more.

    Terms rise to the mode and fall from there, each by a smaller factor than the one before it, so
    what is left is at most a geometric series: most of a long sum need not be added up.
    """
    others = population - K
    lowest, most = max(hits, drawn - others), min(drawn, K)
    if lowest > most:
        return False
    mode = (drawn + 1) * (K + 1) // (population + 2)
    start = min(max(lowest, mode), most)
    first = math.comb(K, start) * math.comb(others, drawn - start)

    def up(x: int) -> tuple[int, int]:
        """The factor from the term of x to the next, as a fraction."""
        return (K - x) * (drawn - x), (x + 1) * (others - drawn + x + 1)

    total, term = 0, first
    for x in range(start, most + 1):
        total += term
        if total > limit:
            return True
        gain, loss = up(x)
        term = term * gain // loss  # nothing is left over
        gain, loss = up(x + 1)
        falls = start == lowest and gain < loss
        if falls and total * (loss - gain) + term * loss <= limit * (loss - gain):
            return False
    term = first
    for x in range(start - 1, lowest - 1, -1):
        gain, loss = up(x)
        term = term * loss // gain
        total += term
        if total > limit:
            return True
    return False
