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
    every = math.comb(population, drawn)
    possible = range(hits, population - (drawn - hits) + 1)
    return possible[
        bisect_left(
            possible, True, key=lambda K: _at_least(hits, drawn, population, K) > tail * every
        )
    ]


def _at_least(hits: int, drawn: int, population: int, K: int) -> int:
    """Σ_{x ≥ hits} C(K, x) C(N − K, n − x): how many of the C(N, n) samples have as many hits."""
    others = population - K
    first = max(hits, drawn - others)
    term = math.comb(K, first) * math.comb(others, drawn - first)
    total = 0
    for x in range(first, min(drawn, K) + 1):
        total += term
        # The next term from this one; the division leaves nothing over.
        term = term * (K - x) * (drawn - x) // ((x + 1) * (others - drawn + x + 1))
    return total
