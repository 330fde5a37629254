"""Memory of queries: every paid answer is on disk before it is used.

A ledger is a SQLite file that belongs to one target. Its keys are digests of the exact bytes of
the questions. A run that is killed at any point resumes without asking twice; processes that
share a file take turns at the oracle, so the second finds the first's answers.

An address does not name a model: whoever runs the server may train it again. So a ledger keeps a
few of its questions whole (all others as digests), its witnesses, and asks them again before its
answers are used. Where one is answered otherwise, beyond what the precision of the answers
explains, the ledger begins a new generation. The old one stays in the file, as tables `answers_1`,
`witnesses_1` and so on, and nothing reads it.
"""

from __future__ import annotations

import hashlib
import itertools
import sqlite3
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import torch
from torch import Tensor

from keyhole.core.errors import InputError, KeyholeError
from keyhole.core.files import exists, expect_file, is_folder, private, unreadable, unwritable
from keyhole.core.journal import expect_same_run
from keyhole.oracle.protocol import (
    BudgetExhausted,
    Counted,
    Oracle,
    OracleError,
    ask,
    check_sequences,
    identity_of,
    layers,
)
from keyhole.oracle.token_questions import ABSENT

VERSION = "1"
_APPLICATION_ID = 0x4B45594C  # "KEYL": tells a ledger from any other SQLite file
_TURN_SECONDS = 3600.0  # how long to wait for another process's turn at the oracle
_WITNESSES = 8
_PER_TURN = 2  # so that they are of different kinds: attacks ask one kind after the other
_ROUNDINGS = 64  # sums in another order differ by so many roundings of the largest answer
_VARIABLES = 900  # below SQLite's oldest limit on parameters in one statement

Memory = dict[bytes, tuple[str, bytes]]  # key -> shape of one answer, its float64 bytes
Notice = Callable[[str], None]  # takes one line that a person should know


def ignored(line: str) -> None:
    """A notice to nobody."""


class Ledger:
    """Remembers what `inner` answered, in the file `path`.

    `asked` and `remembered` count the questions of this object: those that went to `inner` and
    those that cost nothing. `asked_again` counts those by which it was found out whether the same
    model still answers: they go past a counter and its budget, which are for what is paid.
    `answer_error` is how far an answer may be off each time; `notice` is called where another model
    answers.
    """

    def __init__(
        self,
        inner: Oracle,
        path: str | Path,
        *,
        answer_error: float = 0.0,
        notice: Notice = ignored,
    ) -> None:
        self.inner = inner
        self.path = Path(path)
        self.asked = 0
        self.remembered = 0
        self.asked_again = 0
        self._answer_error, self._notice = answer_error, notice
        self._same = not any(getattr(layer, "may_change", False) for layer in layers(inner))
        self._batch = 64  # questions per commit; grows until a commit covers about a second
        self._db = _open(self.path)
        try:
            self._claim()
        except BaseException:
            self._db.close()
            raise

    @property
    def dim(self) -> int:
        return self.inner.dim

    @property
    def identity(self) -> str:
        return identity_of(self.inner)

    def close(self) -> None:
        self._db.close()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __len__(self) -> int:
        return int(self._db.execute("SELECT count(*) FROM answers").fetchone()[0])

    def __call__(self, sequences: Tensor) -> Tensor:
        check_sequences(sequences, self.dim)
        if not self._same:
            self._look_again()
        keys = _keys(sequences)
        known = self._recall(keys)
        self.remembered += sum(key in known for key in keys)
        rows = {key: row for row, key in reversed(list(enumerate(keys))) if key not in known}
        missing = sorted(rows.items(), key=lambda item: item[1])
        try:
            while missing:
                turn, missing = missing[: self._batch], missing[self._batch :]
                known |= self._take_turn(turn, sequences)
        except BudgetExhausted as end:
            answered = list(itertools.takewhile(self._recall(keys).__contains__, keys))
            partial = _unpack(self._recall(answered), answered) if answered else None
            raise BudgetExhausted(end.budget, partial) from end
        return _unpack(known, keys)

    def _look_again(self) -> None:
        """Before the first answer is used: does the same model stand behind the address?"""
        inner = self.inner
        while isinstance(inner, Counted):
            inner = inner.inner
        with self._transaction():
            questions = witnesses(self._db)
            known = self._recall([key for key, _ in questions])
            for key, question in questions:
                again = ask(inner, question)
                self.asked_again += 1
                off = _difference(_numbers(*known[key]), again[0])
                if off > self._allowed(again):
                    count, table = len(self), self._set_aside()
                    self._notice(
                        f"another model answers at {self.identity} than {self.path} remembers: "
                        f"asked again, an answer is {off:.1e} off; the {count:,} old answers are "
                        f"kept there as {table} and not used"
                    )
                    break
        self._same = True

    def _keep_witnesses(self, asked: Sequence[tuple[bytes, Tensor]]) -> None:
        """Keep some of these questions, by key, until there are enough."""
        free = _WITNESSES - len(witnesses(self._db))
        # The last of a turn: attacks begin with questions as plain as a zero.
        for key, question in asked[-min(free, _PER_TURN) :] if free > 0 else ():
            data = question.detach().cpu().contiguous().numpy().tobytes()
            row = (key, len(question), data)
            self._db.execute("INSERT OR IGNORE INTO witnesses VALUES (?, ?, ?)", row)

    def _allowed(self, answer: Tensor) -> float:
        """How far apart answers of one model may be: by rounding, and by what is stated of them."""
        exact = torch.finfo(torch.float64).eps / 2
        stated = (getattr(layer, "precision", None) for layer in layers(self.inner))
        precision = float(next((value for value in stated if value is not None), exact))
        return _ROUNDINGS * 2 * precision * float(answer.abs().max()) + 2 * self._answer_error

    def _set_aside(self) -> str:
        """Begin a new generation; the old one is kept under another name."""
        kept = self._db.execute(
            "SELECT count(*) FROM sqlite_master WHERE name LIKE 'answers\\_%' ESCAPE '\\'"
        )
        number = int(kept.fetchone()[0]) + 1
        for table in ("answers", "witnesses"):
            self._db.execute(f"ALTER TABLE {table} RENAME TO {table}_{number}")
        self._begin()
        return f"answers_{number}"

    def _begin(self) -> None:
        """The tables of a generation, where they are missing."""
        for columns in (
            "answers (question BLOB PRIMARY KEY, shape TEXT, answer BLOB)",
            "witnesses (question BLOB PRIMARY KEY, tokens INTEGER, data BLOB)",
        ):
            self._db.execute(f"CREATE TABLE IF NOT EXISTS {columns} WITHOUT ROWID")

    def _take_turn(self, turn: list[tuple[bytes, int]], sequences: Tensor) -> Memory:
        """Ask what nobody has asked yet, store it, and only then hand it out."""
        failure: KeyholeError | None = None
        with self._transaction():
            known = self._recall([key for key, _ in turn])  # another process may have asked since
            self.remembered += len(known)
            new = [(key, row) for key, row in turn if key not in known]
            if new:
                started = time.monotonic()
                try:
                    answers = ask(self.inner, sequences[[row for _, row in new]])
                except (BudgetExhausted, OracleError) as error:
                    failure, answers = error, error.answers
                self._pace(time.monotonic() - started)
                if answers is not None:
                    stored = self._store([key for key, _ in new], answers)
                    self._keep_witnesses([(k, sequences[row]) for k, row in new if k in stored])
                    known |= stored
        if failure is not None:
            raise failure
        return known

    def _store(self, keys: list[bytes], answers: Tensor) -> Memory:
        """Keep every finite answer; NaN is not an answer, and may be asked again."""
        self.asked += len(answers)
        shape = ",".join(map(str, answers.shape[1:]))
        finite = torch.isfinite(answers).reshape(len(answers), -1).all(1).tolist()
        data = answers.cpu().contiguous().numpy()
        good = {
            key: (shape, data[row].tobytes())
            for row, (key, fine) in enumerate(zip(keys, finite, strict=False))
            if fine
        }
        rows = [(key, shape, answer) for key, (shape, answer) in good.items()]
        self._db.executemany("INSERT INTO answers VALUES (?, ?, ?)", rows)
        return good

    def _recall(self, keys: Sequence[bytes]) -> Memory:
        known: Memory = {}
        for start in range(0, len(keys), _VARIABLES):
            part = keys[start : start + _VARIABLES]
            marks = ",".join("?" * len(part))
            rows = self._db.execute(f"SELECT * FROM answers WHERE question IN ({marks})", part)
            known.update((key, (shape, answer)) for key, shape, answer in rows)
        return known

    def _pace(self, seconds: float) -> None:
        if seconds < 0.5:
            self._batch = min(self._batch * 2, 4096)
        elif seconds > 2.0:
            self._batch = max(self._batch // 2, 1)

    def _claim(self) -> None:
        """Make a new file this target's, or refuse a file that is another's."""
        mine = {
            "version": VERSION,
            "dtype": str(getattr(self.inner, "dtype", torch.float64)).removeprefix("torch."),
            "dim": str(self.dim),
            "target": self.identity,
        }
        try:
            with self._transaction():
                tables = self._db.execute("SELECT * FROM sqlite_master").fetchall()
                if not tables:
                    self._db.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
                    self._db.execute("CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT)")
                    self._db.executemany("INSERT INTO meta VALUES (?, ?)", mine.items())
                self._begin()
            theirs = dict(self._db.execute("SELECT name, value FROM meta").fetchall())
            self._db.execute("SELECT question, shape, answer FROM answers LIMIT 1").fetchall()
        except sqlite3.DatabaseError as error:
            raise unreadable("a Keyhole ledger", self.path, error) from error
        expect_same_run(self.path, mine, theirs)

    @contextmanager
    def _transaction(self) -> Generator[None]:
        # IMMEDIATE takes the write lock first: whoever holds it has the turn at the oracle.
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")


def answers_in(path: Path) -> int:
    """How many answers a ledger holds; 0 where there is none."""
    if not path.is_file():
        return 0
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as db:
            return int(db.execute("SELECT count(*) FROM answers").fetchone()[0])
    except sqlite3.DatabaseError:
        return 0


def _open(path: Path) -> sqlite3.Connection:
    if not is_folder(path.parent):
        raise InputError(f"cannot write the ledger {path}: there is no such folder")
    _expect_ledger(path)
    try:
        private(path)
        db = sqlite3.connect(path, timeout=_TURN_SECONDS, isolation_level=None)
    except (sqlite3.OperationalError, OSError, ValueError) as error:
        raise unwritable(path, error) from error
    try:
        db.execute("PRAGMA journal_mode = WAL")  # readers never wait for the one who asks
        db.execute("PRAGMA synchronous = FULL")  # a commit survives a power cut
    except sqlite3.DatabaseError as error:
        db.close()
        raise unreadable("a Keyhole ledger", path, error) from error
    return db


def _expect_ledger(path: Path) -> None:
    """Looked at without touching it: another program's file is left as it is."""
    if not exists(path) or path.stat().st_size == 0:
        return
    expect_file(path, "a Keyhole ledger")
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as db:
            # In this order: somebody else may just be making the ledger, mark and tables at once.
            tables = db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
            mark = db.execute("PRAGMA application_id").fetchone()[0]
    except sqlite3.DatabaseError as error:
        raise unreadable("a Keyhole ledger", path, error) from error
    if tables and mark != _APPLICATION_ID:
        raise InputError(f"{path} is not a Keyhole ledger but another SQLite file")


def _keys(sequences: Tensor) -> list[bytes]:
    _, n, dim = sequences.shape
    head = hashlib.blake2b(f"f8:{n}:{dim}:".encode(), digest_size=32)
    keys: list[bytes] = []
    for question in sequences.detach().cpu().contiguous().numpy():
        digest = head.copy()
        digest.update(question.data)
        keys.append(digest.digest())
    return keys


def _unpack(known: Memory, keys: Sequence[bytes]) -> Tensor:
    shapes = {known[key][0] for key in keys}
    if len(shapes) != 1:
        raise OracleError(f"expected answers of one shape, got {sorted(shapes)}")
    return _numbers(shapes.pop(), bytearray().join(known[key][1] for key in keys), len(keys))


def _numbers(shape: str, data: bytes | bytearray, *count: int) -> Tensor:
    """`count` answers of that shape; one alone has no further dimension."""
    sizes = [int(size) for size in shape.split(",") if size]
    # A clone is aligned as every tensor is: the same numbers at another alignment may be summed
    # in another order, and the next question would differ in its last bit.
    return torch.frombuffer(bytearray(data), dtype=torch.float64).reshape([*count, *sizes]).clone()


def witnesses(db: sqlite3.Connection) -> list[tuple[bytes, Tensor]]:
    """Questions that a ledger can ask again, each with its key and as a batch of one."""
    rows = db.execute("SELECT question, tokens, data FROM witnesses").fetchall()
    return [
        (key, torch.frombuffer(bytearray(data), dtype=torch.float64).reshape(1, tokens, -1))
        for key, tokens, data in rows
    ]


def _difference(stored: Tensor, again: Tensor) -> float:
    """How far two answers to one question are apart; infinitely where their shapes differ.

    What a server of a language model left out one of both times says nothing.
    """
    if stored.shape != again.shape:
        return float("inf")
    given = (stored != ABSENT) & (again != ABSENT)
    return float((stored - again).abs().where(given, 0.0).max())


def remembered(oracle: Oracle) -> int:
    """Questions that a ledger somewhere in the stack of wrappers has answered for free."""
    return sum(int(getattr(layer, "remembered", 0)) for layer in layers(oracle))


@contextmanager
def session(
    parts: Mapping[str, Oracle],
    *,
    budget: int | None = None,
    ledger: str | Path | None = None,
    answer_error: float | None = None,
    notice: Notice = ignored,
) -> Generator[dict[str, Oracle]]:
    """Each part of a target, counted; remembered too where there is a ledger.

    A ledger belongs to one part: the second has one of its own next to it, and so on.
    `answer_error` is how far an answer may be off when it is asked again, `notice` is called where
    another model answers than the ledger remembers. Connections and ledgers are closed at the end.
    """
    ready: dict[str, Oracle] = {}
    with ExitStack() as stack:
        for number, (name, part) in enumerate(parts.items()):
            if getattr(part, "may_change", False):  # an endpoint, with connections
                stack.callback(cast("Any", part).close)
            ready[name] = Counted(part, budget)
            if ledger is not None:
                path = Path(ledger)
                path = path.with_stem(f"{path.stem}-{number + 1}") if number else path
                ready[name] = stack.enter_context(
                    Ledger(ready[name], path, answer_error=answer_error or 0.0, notice=notice)
                )
        yield ready
