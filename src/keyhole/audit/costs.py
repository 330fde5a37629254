"""What checks cost, learnt as they are made: the time that is left, and what to begin with.

A check of a target costs about what that kind of check costs on average, times what this target's
checks cost against the average. A target of which nothing is known costs what others do, by size.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from functools import cache

_NUMBER = re.compile(r"\d+")


@cache
def kind_of(check: str) -> str:
    """The same check of two targets, or of two layers, is of one kind."""
    return _NUMBER.sub("#", check)


class Costs:
    """Seconds of checks by their kind and target; `sizes` are the bytes of each target."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self._sizes = sizes
        self._kinds: dict[str, tuple[float, int]] = defaultdict(lambda: (0.0, 0))
        self._spent: dict[str, list[tuple[str, float]]] = defaultdict(list)

    def learn(self, target: str, check: str, seconds: float) -> None:
        kind = kind_of(check)
        total, count = self._kinds[kind]
        self._kinds[kind] = total + seconds, count + 1
        self._spent[target].append((kind, seconds))

    @property
    def known(self) -> bool:
        return bool(self._spent)

    def of_check(self, target: str, check: str) -> float:
        """The seconds that a check will take, as far as anybody can tell."""
        return self._mean(kind_of(check)) * self._pace(target)

    def of_target(self, target: str) -> float:
        """The seconds of a target that was not opened yet, or its size where nothing is known."""
        size = self._sizes.get(target, 0)
        if not self._spent:
            return float(size)
        spent = [sum(seconds for _, seconds in made) for made in self._spent.values()]
        sizes = [self._sizes.get(name, 0) for name in self._spent]
        usual = sum(sizes) / len(sizes)
        return sum(spent) / len(spent) * (size / usual if usual and size else 1.0)

    def _mean(self, kind: str) -> float:
        total, count = self._kinds.get(kind, (0.0, 0))
        if count:
            return total / count
        seconds = [each for made in self._spent.values() for _, each in made]
        return sum(seconds) / len(seconds) if seconds else 1.0

    def _pace(self, target: str) -> float:
        made = self._spent.get(target, [])
        usual = sum(self._mean(kind) for kind, _ in made)
        return sum(seconds for _, seconds in made) / usual if usual else 1.0
