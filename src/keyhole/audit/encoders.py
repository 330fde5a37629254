"""Which encoder made a store's vectors? Of several, the one that explains them best.

With texts whose vectors are known, it is the one that gives these vectors, to rounding: no other
does. Without, it is a guess: the one whose vectors' mean points most where the store's points.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from keyhole.audit.stores import ORDINARY, StoreTarget
from keyhole.recover.embeddings.pooling import from_statistics


def likeliest(candidates: Sequence[StoreTarget]) -> StoreTarget:
    """The candidate whose encoder fits, with the others in its reason; alone, as it is."""
    if len(candidates) == 1:
        return candidates[0]
    if all(candidate.pooling.error is not None for candidate in candidates):
        return _by_known_texts(candidates)
    return _by_statistics(candidates)


def _by_known_texts(candidates: Sequence[StoreTarget]) -> StoreTarget:
    errors = {candidate: candidate.pooling.error or 0.0 for candidate in candidates}
    best, *others = sorted(errors, key=lambda candidate: errors[candidate])
    rest = ", ".join(f"{other.loaded.name} is {errors[other]:.1e} off" for other in others)
    words = f"none of {len(candidates)} encoders made them: {rest}"
    if best.pooling.sure:
        words = f"of {len(candidates)} encoders {best.loaded.name} made them: {rest}"
    return _saying(best, words)


def _by_statistics(candidates: Sequence[StoreTarget]) -> StoreTarget:
    likeness = {candidate: _likeness(candidate) for candidate in candidates}
    order = sorted(likeness, key=lambda candidate: -likeness[candidate])
    ranking = ", ".join(f"{each.loaded.name} {likeness[each]:.2f}" for each in order)
    return _saying(
        order[0],
        f"of {len(candidates)} encoders {order[0].loaded.name} is likeliest, which is a guess: the "
        f"cosine of the mean of their vectors with the store's is {ranking}; --known makes sure",
    )


def _likeness(candidate: StoreTarget) -> float:
    known = candidate.pooling.likeness
    if known is None:  # its folder says how it pools, and nobody looked at the vectors
        loaded = candidate.loaded
        guess = from_statistics(
            loaded.model, loaded.tokenizer, ORDINARY, candidate.vectors, candidate.pooling.width
        )
        known = guess.likeness
    return 0.0 if known is None else known


def _saying(target: StoreTarget, words: str) -> StoreTarget:
    pooling = target.pooling
    return replace(target, pooling=replace(pooling, reason=f"{pooling.reason}; {words}"))
