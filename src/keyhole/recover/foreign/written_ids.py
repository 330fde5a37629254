"""Token ids that stand in the file beside the numbers: nothing to attack, and all to check."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from keyhole.recover.attack import Proposal, Target
from keyhole.recover.leaks import Leak

_NOTE = "the token ids stand in the file"


@dataclass(frozen=True)
class WrittenIds:
    """Proposes the ids that were written down; the judge compares them with what leaked."""

    ids: Sequence[Sequence[int]]

    def __call__(self, target: Target, leaks: Sequence[Leak]) -> Iterator[tuple[int, Proposal]]:
        for number in range(len(leaks)):
            known = [token for token in self.ids[number] if 0 <= token < target.vocabulary]
            yield number, Proposal(known, note=_NOTE)
