"""Whether the model behind an address is still the one that a ledger remembers.

An address does not name a model: whoever runs the server may train it again. So a ledger keeps a
few of its questions whole (all others as digests) and asks them again before its answers are used.
Where one is answered otherwise, beyond what the precision of the answers explains, the ledger
begins a new generation. The old one stays in the file, as tables `answers_1`, `witnesses_1` and so
on, and nothing reads it.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from keyhole.oracle.counted import Counted
from keyhole.oracle.protocol import Oracle
from keyhole.oracle.token_questions import ABSENT

_WITNESSES = 8
_PER_TURN = 2  # so that they are of different kinds: attacks ask one kind after the other
_ROUNDINGS = 64  # sums in another order differ by so many roundings of the largest answer


@dataclass(frozen=True)
class Aside:
    """What was put aside: the table, and how many answers are in it."""

    table: str
    answers: int


def begin(db: sqlite3.Connection) -> None:
    """The tables of a generation without answers."""
    db.execute(
        "CREATE TABLE answers (question BLOB PRIMARY KEY, shape TEXT, answer BLOB) WITHOUT ROWID"
    )
    _begin_witnesses(db)


def _begin_witnesses(db: sqlite3.Connection) -> None:
    db.execute(
        "CREATE TABLE IF NOT EXISTS witnesses (question BLOB PRIMARY KEY, tokens INTEGER, "
        "data BLOB) WITHOUT ROWID"
    )


def remember(db: sqlite3.Connection, asked: Sequence[tuple[bytes, Tensor]]) -> None:
    """Keep some of these questions, by key, until there are enough."""
    _begin_witnesses(db)  # ledgers that were made before have none
    room = _WITNESSES - int(db.execute("SELECT count(*) FROM witnesses").fetchone()[0])
    # The last of a turn: attacks begin with questions as plain as a zero.
    for key, question in asked[-min(room, _PER_TURN) :] if room > 0 else ():
        data = question.detach().cpu().contiguous().numpy().tobytes()
        db.execute("INSERT OR IGNORE INTO witnesses VALUES (?, ?, ?)", (key, len(question), data))


def witnesses(db: sqlite3.Connection) -> list[tuple[bytes, Tensor]]:
    """Questions that can be asked again, each with its key and as a batch of one."""
    try:
        rows = db.execute("SELECT question, tokens, data FROM witnesses").fetchall()
    except sqlite3.OperationalError:  # a ledger that was made before there were any
        return []
    return [
        (key, torch.frombuffer(bytearray(data), dtype=torch.float64).reshape(1, tokens, -1))
        for key, tokens, data in rows
    ]


def difference(stored: Tensor, again: Tensor) -> float:
    """How far two answers to one question are apart; infinitely where their shapes differ.

    What a server of a language model did not say one of both times tells nothing.
    """
    if stored.shape != again.shape:
        return float("inf")
    said = (stored != ABSENT) & (again != ABSENT)
    return float((stored - again).abs().where(said, 0.0).max())


def allowed(oracle: Oracle, answer: Tensor, answer_error: float) -> float:
    """How far apart answers of one model may be: by rounding, and by what is stated of them."""
    precision = float(_of_any_layer(oracle, "precision", torch.finfo(torch.float64).eps / 2))
    return _ROUNDINGS * 2 * precision * float(answer.abs().max()) + 2 * answer_error


def set_aside(db: sqlite3.Connection) -> Aside:
    """Begin a new generation; the old one is kept under another name."""
    count = int(db.execute("SELECT count(*) FROM answers").fetchone()[0])
    kept = db.execute(
        "SELECT count(*) FROM sqlite_master WHERE name LIKE 'answers\\_%' ESCAPE '\\'"
    )
    number = int(kept.fetchone()[0]) + 1
    for table in ("answers", "witnesses"):
        db.execute(f"ALTER TABLE {table} RENAME TO {table}_{number}")
    begin(db)
    return Aside(f"answers_{number}", count)


def may_change(oracle: Oracle) -> bool:
    """Is it, or is it around, an address behind which another model may stand tomorrow?"""
    return bool(_of_any_layer(oracle, "may_change", False))


def _of_any_layer(oracle: Oracle, name: str, default: object) -> Any:
    layer: Any = oracle
    while layer is not None:
        if hasattr(layer, name):
            return getattr(layer, name)
        layer = getattr(layer, "inner", None)
    return default


def beneath(oracle: Oracle) -> Oracle:
    """The oracle without counters around it."""
    while isinstance(oracle, Counted):
        oracle = oracle.inner
    return oracle
