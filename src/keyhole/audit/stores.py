"""Texts from the embeddings that a vector store keeps: how many of them can be read exactly.

A sample of the vectors, chosen at random, is read back with the encoder's weights and nothing else.
Where the store still has the texts, the audit compares with them; where it does not, a text counts
as read if running the encoder on it gives the vector again (recover/judge.py). From the share of
the sample follows an interval for all (share.py).
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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
from keyhole.recover.recover_text import LEARN_MORE, NOT_ARRIVED, recovering
from keyhole.recover.simulate import LONGEST
from keyhole.results import Estimate, Finding, Readings, Status
from keyhole.results.readings import Piece, Reading
from keyhole.stores import Store

EXPOSURE = "stored embedding"
_REMEDY = (
    "Guard stored embeddings like the texts themselves: the same access, encryption and retention; "
    "deleting a text means deleting its vector."
)
_SAME = (Status.MISMATCH, Status.NOT_APPLICABLE, Status.NOT_IDENTIFIABLE)  # of all, or of none
_NO_SHARE = (Status.MISMATCH, Status.NOT_APPLICABLE, Status.BUDGET)  # can be told of the rest
_PARTLY = 0.5  # of the tokens: what is called nearly recovered
_AT_ONCE = 8  # vectors that one check reads
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
    """One for a few vectors each, so that an audit that is stopped keeps what it has read."""
    pooling, count = target.pooling, len(target.rows)
    if pooling.error is not None and not pooling.sure:
        reason = f"{pooling.reason}: was it another encoder?"
        finding = _finding(surface, Status.MISMATCH, reason)
        return [Check(EXPOSURE, lambda _: Checked((finding,)))]
    return [
        Check(
            f"{EXPOSURE} {start + 1}–{min(start + _AT_ONCE, count)} of {count}",
            partial(_check, surface, target, range(start, min(start + _AT_ONCE, count))),
        )
        for start in range(0, count, _AT_ONCE)
    ]


def _check(surface: str, target: StoreTarget, places: range, track: Track) -> Checked:
    started = time.perf_counter()
    recoveries = _recover(target, places, track)
    readings = tuple(
        _reading(target.loaded, target.rows[place], target.texts[place], recovery)
        for place, recovery in zip(places, recoveries, strict=True)
    )
    cell = Readings("pooled", anatomy(target.loaded.model).layers, "as stored", readings)
    finding = _finding(
        surface, _status(cell, [recovery.status for recovery in recoveries]), recoveries[0].reason,
        attack=recoveries[0].method, cell=cell, seconds=time.perf_counter() - started,
    )  # fmt: skip
    return Checked((finding,))


def whole(stores: Mapping[str, StoreTarget], findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """The findings with those about a few vectors each put together, one for a store."""
    parts = {name: [part for part in findings if _is_part(part, name)] for name in stores}
    others = [
        finding for finding in findings if not any(finding in part for part in parts.values())
    ]
    made = [_together(stores[name], part) for name, part in parts.items() if part]
    return (*others, *made)


def _is_part(finding: Finding, surface: str) -> bool:
    return finding.surface == surface and finding.exposure == EXPOSURE and bool(finding.texts)


def _together(target: StoreTarget, parts: Sequence[Finding]) -> Finding:
    first = parts[0].texts[0]
    readings = tuple(reading for part in parts for reading in part.texts[0].readings)
    cell = replace(first, readings=readings)
    status = _status(cell, [part.status for part in parts])
    estimate, about = None, parts[0].reason
    if status is Status.BUDGET:
        about = f"none of the {len(readings)} texts tried was read: {NOT_ARRIVED}; {LEARN_MORE}"
    if status not in _NO_SHARE:
        estimate = Estimate.of(cell.exact, len(readings), target.count)
        about = str(estimate)
    reason = "; ".join(part for part in (about, target.pooling.reason, target.note) if part)
    return _finding(
        parts[0].surface, status, reason, attack=parts[0].attack, cell=cell, estimate=estimate,
        seconds=sum(part.seconds for part in parts),
    )  # fmt: skip


def _finding(
    surface: str,
    status: Status,
    reason: str,
    *,
    attack: str = "",
    cell: Readings | None = None,
    estimate: Estimate | None = None,
    seconds: float = 0.0,
) -> Finding:
    return Finding(
        surface=surface,
        exposure=EXPOSURE,
        attack=attack,
        status=status,
        reason=reason,
        remedy=_REMEDY,
        error=None,
        queries=0 if cell is None else len(cell.readings),
        seconds=seconds,
        known=0.0 if cell is None else cell.known,
        sought="text",
        texts=() if cell is None else (cell,),
        estimate=estimate,
    )


def _recover(target: StoreTarget, places: range, track: Track) -> list[TextRecovery]:
    pooling = target.pooling
    leaks = [
        Pooled(target.vectors[place], pooling=pooling.name, normalised=pooling.normalised)
        for place in places
    ]
    progress = track(EXPOSURE, total=len(leaks))
    recoveries: dict[int, TextRecovery] = {}
    model, tokenizer = target.loaded.model, target.loaded.tokenizer
    for number, recovery in recovering(model, tokenizer, leaks, method=target.method):
        recoveries[number] = recovery
        progress(len(recoveries))
    return [recoveries[number] for number in range(len(leaks))]


def _status(cell: Readings, statuses: Sequence[Status]) -> Status:
    """What became of all texts; `statuses` are those of each, or of some of them together."""
    if len(set(statuses)) == 1 and statuses[0] in _SAME:
        return statuses[0]
    if cell.exact == len(cell.readings):
        return Status.RECOVERED
    partly = cell.exact or Status.INEXACT in statuses or cell.known >= _PARTLY
    return Status.INEXACT if partly else Status.BUDGET


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
