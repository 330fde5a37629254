"""Texts from the embeddings that a vector store keeps: how many of them can be read exactly.

A sample of the vectors, chosen at random, is read back with the encoder's weights and nothing else.
Where the store still has the texts, the audit compares with them; where it does not, a text counts
as read if running the encoder on it gives the vector again (recover/judge.py). From the share of
the sample follows an interval for all (share.py).
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import partial
from typing import Any

from torch import Tensor

from keyhole.audit.check import Check, Checked
from keyhole.errors import InputError
from keyhole.models import demo
from keyhole.models.anatomy import anatomy
from keyhole.models.loading import Loaded
from keyhole.progress import Track
from keyhole.recover import Mark, Pooled, TextRecovery
from keyhole.recover.attack import Attack
from keyhole.recover.originals import Original
from keyhole.recover.pieces import unknown_token, written
from keyhole.recover.pooling import (
    Pooling,
    from_known,
    from_settings,
    from_statistics,
    from_texts,
)
from keyhole.recover.recover_text import recovering
from keyhole.recover.simulate import LONGEST
from keyhole.results import Estimate, Finding, Readings, Status
from keyhole.results.readings import Piece, Reading
from keyhole.stores import Store

EXPOSURE = "stored embedding"
_REMEDY = (
    "Guard stored embeddings like the texts themselves: the same access, encryption and retention; "
    "deleting a text means deleting its vector."
)
_WITNESSES = 8  # texts with known vectors that the pooling is found out by
_MANY = 256  # vectors whose statistics stand for the store's


@dataclass(frozen=True, eq=False)
class StoreTarget:
    """A sample of a store's vectors, and the encoder to read them with; the store is closed again.

    `texts` are those that the store still has of the sample, None where it has none. `method` is
    the attack, by default the one that reads pooled embeddings (recover/registry.py).
    """

    name: str
    identity: str
    count: int
    loaded: Loaded
    rows: tuple[int, ...]
    vectors: Tensor
    texts: tuple[str | None, ...]
    pooling: Pooling
    note: str = ""
    method: Attack | None = None

    @classmethod
    def of(
        cls, store: Store, loaded: Loaded, *, texts: int, known: Sequence[str] = (), seed: int = 0
    ) -> StoreTarget:
        """Sample an open store, and find out how its vectors were made."""
        width = anatomy(loaded.model).width
        if store.dim != width:
            raise InputError(
                f"expected vectors of {width} numbers, as {loaded.name} makes them, got "
                f"{store.dim} in {store.name}: give the encoder that made them with --model"
            )
        rows = sample(store.count, texts, seed)
        vectors = store.read(rows)
        kept = [None] * len(rows) if store.texts is None else store.texts(rows)
        return cls(
            store.name, f"{store.identity}; {loaded.name} {loaded.identity}", store.count, loaded,
            tuple(rows), vectors, tuple(kept), _pooling(store, loaded, vectors, kept, known),
            store.note,
        )  # fmt: skip


def sample(count: int, texts: int, seed: int) -> list[int]:
    """So many of the rows, each as likely as any other, in ascending order."""
    return sorted(random.Random(seed).sample(range(count), min(texts, count)))  # noqa: S311


def _pooling(
    store: Store,
    loaded: Loaded,
    vectors: Tensor,
    texts: Sequence[str | None],
    known: Sequence[str],
) -> Pooling:
    """By texts whose vectors are known, by what the encoder says of itself, or by statistics."""
    encoder = (loaded.model, loaded.tokenizer)
    pairs = [(row, text) for row, text in enumerate(texts) if text and text.strip()][:_WITNESSES]
    if pairs:
        rows = [row for row, _ in pairs]
        return from_texts(*encoder, [text for _, text in pairs], vectors[rows])
    if known:
        return from_known(*encoder, known[:_WITNESSES], store.batches())
    many = store.read(sample(store.count, _MANY, 0))
    declared = from_settings(loaded.name, many)
    if declared is not None:
        return declared
    ordinary = [*demo.TEXTS, *(example.text for example in demo.EXAMPLES)]
    return from_statistics(*encoder, ordinary, many)


def checks(surface: str, target: StoreTarget) -> list[Check]:
    return [Check(EXPOSURE, partial(_check, surface, target))]


def _check(surface: str, target: StoreTarget, track: Track) -> Checked:
    started = time.perf_counter()
    pooling = target.pooling
    if pooling.error is not None and not pooling.sure:
        reason = f"{pooling.reason}: was it another encoder?"
        return Checked((_finding(surface, Status.MISMATCH, reason, started),))
    recoveries = _recover(target, track)
    readings = tuple(
        _reading(target.loaded, row, text, recovery)
        for row, text, recovery in zip(target.rows, target.texts, recoveries, strict=True)
    )
    cell = Readings("pooled", anatomy(target.loaded.model).layers, "as stored", readings)
    estimate = Estimate.of(cell.exact, len(readings), target.count)
    status = _status(cell, recoveries)
    reason = "; ".join(part for part in (str(estimate), pooling.reason, target.note) if part)
    if status in (Status.MISMATCH, Status.NOT_APPLICABLE):
        return Checked((_finding(surface, status, f"{recoveries[0].reason}; {reason}", started),))
    attack = recoveries[0].method
    return Checked(
        (_finding(surface, status, reason, started, len(readings), attack, cell, estimate),)
    )


def _finding(
    surface: str,
    status: Status,
    reason: str,
    started: float,
    vectors: int = 0,
    attack: str = "",
    cell: Readings | None = None,
    estimate: Estimate | None = None,
) -> Finding:
    return Finding(
        surface=surface,
        exposure=EXPOSURE,
        attack=attack,
        status=status,
        reason=reason,
        remedy=_REMEDY,
        error=None,
        queries=vectors,
        seconds=time.perf_counter() - started,
        known=0.0 if cell is None else cell.known,
        sought="text",
        texts=() if cell is None else (cell,),
        estimate=estimate,
    )


def _recover(target: StoreTarget, track: Track) -> list[TextRecovery]:
    leaks = [
        Pooled(vector, pooling=target.pooling.name, normalised=target.pooling.normalised)
        for vector in target.vectors
    ]
    progress = track(EXPOSURE, total=len(leaks))
    recoveries: dict[int, TextRecovery] = {}
    model, tokenizer = target.loaded.model, target.loaded.tokenizer
    for number, recovery in recovering(model, tokenizer, leaks, method=target.method):
        recoveries[number] = recovery
        progress(len(recoveries))
    return [recoveries[number] for number in range(len(leaks))]


def _status(cell: Readings, recoveries: Sequence[TextRecovery]) -> Status:
    for status in (Status.MISMATCH, Status.NOT_APPLICABLE):
        if all(recovery.status is status for recovery in recoveries):
            return status
    if cell.exact == len(cell.readings):
        return Status.RECOVERED
    partly = cell.exact or any(recovery.status is Status.INEXACT for recovery in recoveries)
    return Status.INEXACT if partly or cell.known >= 0.5 else Status.UNSOLVED


def _reading(loaded: Loaded, row: int, text: str | None, recovery: TextRecovery) -> Reading:
    """What was read of one vector, beside the store's own text where it has one."""
    tokenizer = loaded.tokenizer
    special = set(tokenizer.all_special_ids) - {unknown_token(tokenizer)}
    if text is None or not text.strip():
        pieces = tuple(
            Piece(piece, mark.value, None)
            for piece, mark, id_ in _tokens(tokenizer, recovery)
            if id_ not in special
        )
        note = f"vector {row}: the store has no text of it"
        return Reading("", pieces, recovery.status is Status.RECOVERED, recovery.verified, note)
    original = Original.of(tokenizer, text, min(LONGEST, anatomy(loaded.model).longest))
    truth = [id_ for id_ in original.ids if id_ not in special]
    tokens = [token for token in _tokens(tokenizer, recovery) if token[2] not in special]
    exact = original.is_exactly(tokenizer, recovery.ids)
    note = "; ".join(original.notes)
    pieces = tuple(_aligned(tokens, truth))
    return Reading(original.text, pieces, exact, recovery.verified, note)


def _tokens(tokenizer: Any, recovery: TextRecovery) -> list[tuple[str, Mark, int]]:
    pieces = written(tokenizer, recovery.ids)
    return list(zip(pieces, recovery.marks, recovery.ids, strict=True))


def _aligned(tokens: Sequence[tuple[str, Mark, int]], truth: Sequence[int]) -> Iterator[Piece]:
    """Tokens marked right or wrong, with a question mark for every one that is missing.

    A text's length does not leak with its embedding, so positions alone say little.
    """
    ids = [id_ for _, _, id_ in tokens]
    matcher = SequenceMatcher(None, truth, ids, autojunk=False)
    for kind, from_, to, start, end in matcher.get_opcodes():
        for piece, mark, _ in tokens[start:end]:
            yield Piece(piece, mark.value, kind == "equal")
        for _ in range(max(0, (to - from_) - (end - start))):
            yield Piece(" ?", Mark.UNKNOWN.value, False)
