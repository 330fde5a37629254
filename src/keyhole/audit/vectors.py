"""A few of a store's vectors read back: one check of an audit, in this process or in another.

Where the store still has the texts, what was read is compared with them; where it does not, a text
counts as read if running the encoder on it gives the vector again (recover/layers/judge.py).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from keyhole.audit.aligned import aligned
from keyhole.audit.check import Checked
from keyhole.core import Estimate, Finding, Readings, Status
from keyhole.core.errors import InputError
from keyhole.core.exposure import Exposure
from keyhole.core.finding import Piece, Reading
from keyhole.core.machine import device_of
from keyhole.core.progress import Track, untracked
from keyhole.models.anatomy import anatomy
from keyhole.models.capture import capture
from keyhole.models.demo import open_model
from keyhole.models.loading import Loaded, kept_open
from keyhole.recover import Mark, Pooled, TextRecovery
from keyhole.recover.attack import Attack, Counts, Target
from keyhole.recover.embeddings.pooling import Pooling
from keyhole.recover.originals import Original
from keyhole.recover.pieces import unknown_token, written
from keyhole.recover.run import recovering
from keyhole.report import words

EXPOSURE = Exposure("KH-TEXT-EMBEDDING", "stored")
_REMEDY = (
    "Guard stored embeddings like the texts themselves: the same access, encryption and retention; "
    "deleting a text means deleting its vector."
)
_SAME = (Status.MISMATCH, Status.NOT_APPLICABLE, Status.NOT_IDENTIFIABLE)  # of all, or of none
_PARTLY = 0.5  # of the tokens: what is called nearly recovered


@dataclass(frozen=True, eq=False)
class Part:
    """A few vectors of a store and how they were made: all that is needed but the encoder.

    `longest` is after how many tokens the encoder cuts a text off.
    """

    exposure: Exposure
    rows: tuple[int, ...]
    vectors: Tensor
    texts: tuple[str | None, ...]
    pooling: Pooling
    longest: int
    cells: Mapping[str, Any] = field(default_factory=dict[str, Any])
    method: Attack | None = None


def read(loaded: Loaded, part: Part, track: Track) -> Checked:
    """Read all vectors of a part, and say what became of each."""
    started = time.perf_counter()
    recoveries = _recover(loaded, part, track)
    readings = tuple(
        _reading(loaded, part, place, recovery) for place, recovery in enumerate(recoveries)
    )
    cell = Readings("pooled", anatomy(loaded.model).layers, "as stored", readings)
    made = finding(
        part.exposure, status_of(cell, [recovery.status for recovery in recoveries]),
        recoveries[0].reason, attack=recoveries[0].method, cell=cell,
        seconds=time.perf_counter() - started,
    )  # fmt: skip
    return Checked((made,))


@dataclass(frozen=True)
class Source:
    """Where a worker finds the encoder, which is not sent."""

    encoder: str
    identity: str
    device: str = "cpu"


def read_elsewhere(source: Source, part: Part, worker: int = 0) -> Checked:
    """What a worker does: open the encoder, once a process, and read."""
    source = replace(source, device=device_of(source.device, worker))
    with kept_open(source, lambda _: _opened(source, part)) as (loaded, method):
        return read(loaded, replace(part, method=method), untracked)


def _opened(source: Source, part: Part) -> tuple[Loaded, Attack | None]:
    loaded, method = open_model(source.encoder, device=source.device), part.method
    if loaded.identity != source.identity:
        raise InputError(
            f"expected the encoder {source.identity} at {source.encoder} on every worker, got "
            f"{loaded.identity}"
        )
    if isinstance(method, Counts):
        attacked = Target.of(loaded.model, loaded.tokenizer)
        method = method.ready(attacked, part.pooling.exposure)
    return loaded, method


def finding(
    exposure: Exposure,
    status: Status,
    reason: str,
    *,
    attack: str = "",
    cell: Readings | None = None,
    estimate: Estimate | None = None,
    seconds: float = 0.0,
) -> Finding:
    return Finding(
        exposure=exposure,
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


def status_of(cell: Readings, statuses: Sequence[Status]) -> Status:
    """What became of all texts; `statuses` are those of each, or of some of them together."""
    if len(set(statuses)) == 1 and statuses[0] in _SAME:
        return statuses[0]
    if cell.exact == len(cell.readings):
        return Status.RECOVERED
    partly = cell.exact or Status.INEXACT in statuses or cell.known >= _PARTLY
    return Status.INEXACT if partly else Status.BUDGET


def _recover(loaded: Loaded, part: Part, track: Track) -> list[TextRecovery]:
    pooling = part.pooling
    leaks = [
        Pooled(
            vector, pooling=pooling.name, normalised=pooling.normalised, width=pooling.width,
            unit=pooling.unit, **part.cells,
        )
        for vector in part.vectors
    ]  # fmt: skip
    progress = track(words.exposure(part.exposure), total=len(leaks))
    recoveries: dict[int, TextRecovery] = {}
    for number, recovery in recovering(
        loaded.model, loaded.tokenizer, leaks, method=part.method, track=track
    ):
        recoveries[number] = recovery
        progress(len(recoveries))
    return [recoveries[number] for number in range(len(leaks))]


def _reading(loaded: Loaded, part: Part, place: int, recovery: TextRecovery) -> Reading:
    """What was read of one vector, beside the store's own text where it has one."""
    tokenizer, text = loaded.tokenizer, part.texts[place]
    special = set(tokenizer.all_special_ids) - {unknown_token(tokenizer)}
    tokens = [token for token in _tokens(tokenizer, recovery) if token[2] not in special]
    near = _similarity(loaded, part, place, recovery)
    if text is None or not text.strip():
        return Reading(
            original="",
            pieces=tuple(Piece(piece, mark.value, None) for piece, mark, _ in tokens),
            exact=recovery.status is Status.RECOVERED,
            verified=recovery.verified,
            note=f"vector {part.rows[place]}: the store has no text of it",
            tokens=len(tokens),
            similarity=near,
        )
    original = Original.of(tokenizer, text, part.longest)
    truth = [id_ for id_ in original.ids if id_ not in special]
    return Reading(
        original=original.text,
        pieces=tuple(aligned(tokens, truth)),
        exact=original.is_exactly(tokenizer, recovery.ids),
        verified=recovery.verified,
        note="; ".join(original.notes),
        tokens=len(truth),
        overlap=_overlap([id_ for _, _, id_ in tokens], truth),
        similarity=near,
    )


def _similarity(loaded: Loaded, part: Part, place: int, recovery: TextRecovery) -> float | None:
    """The cosine of a vector with that of the text that was read; None where none was."""
    if not recovery.ids:
        return None
    ids = torch.tensor([recovery.ids], device=anatomy(loaded.model).device)
    with torch.no_grad():
        made = capture(loaded.model, part.pooling.exposure, ids=ids)["values"][0].cpu().double()
    return float(torch.cosine_similarity(made, part.vectors[place].cpu().double(), dim=0))


def _overlap(ids: Sequence[int], truth: Sequence[int]) -> float:
    """F1 of the tokens as bags: twice those in common, over all of both."""
    common = (Counter(ids) & Counter(truth)).total()
    return 2 * common / max(1, len(ids) + len(truth))


def _tokens(tokenizer: Any, recovery: TextRecovery) -> list[tuple[str, Mark, int]]:
    pieces = written(tokenizer, recovery.ids)
    return list(zip(pieces, recovery.marks, recovery.ids, strict=True))
