"""A memory of answers: every answer that was paid for is on disk before it is used.

A ledger is a SQLite file that belongs to one target. Its keys are digests of the exact
bytes of the questions. A run that is killed at any point resumes without asking a
question twice. Processes that share a file take turns at the oracle, so each finds the
answers of the others.

A server may load another model under the same address. So a ledger stores a few of its
questions whole (the others only as digests): its witnesses. It asks them again before
it uses its answers. If an answer differs by more than its precision explains, the
ledger begins a new generation. The old one is kept in the file, as tables `answers_1`,
`witnesses_1` and so on, and is not read.
"""

from __future__ import annotations

import hashlib
import itertools
import sqlite3
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from keyhole.core.errors import InputError, KeyholeError
from keyhole.core.files import (
    exists,
    expect_file,
    is_folder,
    private,
    reading,
    unreadable,
    unwritable,
)
from keyhole.core.journal import expect_same_run
from keyhole.oracle.protocol import (
    BudgetExhausted,
    Counted,
    Oracle,
    OracleError,
    Wrapper,
    ask,
    check_sequences,
    layers,
    stated,
)
from keyhole.oracle.token_questions import ABSENT

VERSION = "1"
_WHAT = "a Keyhole ledger"
_APPLICATION_ID = 0x4B45594C  # "KEYL": tells a ledger from other SQLite files
_MAX_WAIT = 3600.0  # seconds to wait for another process to end its turn at the oracle
_MAX_WITNESSES = 8
# few, so that witnesses of several stages of an attack are stored
_WITNESSES_PER_TURN = 2
_MAX_ROUNDINGS = 64  # rounding errors by which sums in another order may differ
_MAX_VARIABLES = 900  # the oldest limit of SQLite on parameters in a statement is 999
_TABLES = {
    "answers": "question BLOB PRIMARY KEY, shape TEXT, answer BLOB",
    "witnesses": "question BLOB PRIMARY KEY, tokens INTEGER, data BLOB",
}

Memory = dict[bytes, tuple[str, bytes]]  # key -> shape of one answer, its float64 bytes
Notice = Callable[[str], None]  # takes one line that the user should know


def ignored(line: str) -> None:
    """A Notice that does nothing."""


class Ledger(Wrapper):
    """Remembers the answers of `inner` in the file `path`.

    `asked` counts the answers that `inner` gave, `remembered` the questions that needed
    none. `asked_again` counts witnesses: they are asked past `Counted`, so that they
    cost a resumed run no budget. `answer_error` is how far an answer may be off each
    time it is asked. `notice` is called if another model answers.
    """

    def __init__(
        self,
        inner: Oracle,
        path: str | Path,
        *,
        answer_error: float = 0.0,
        notice: Notice = ignored,
    ) -> None:
        super().__init__(inner)
        self.path = Path(path)
        self.asked = 0
        self.remembered = 0
        self.asked_again = 0
        self._answer_error = answer_error
        self._notice = notice
        self._is_checked = not any(
            getattr(layer, "may_change", False) for layer in layers(inner)
        )
        self._batch = 64  # questions per commit; grows until one covers about a second
        self._db = _open(self.path)
        try:
            self._claim()
        except BaseException:
            self._db.close()
            raise

    def close(self) -> None:
        self._db.close()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    def __len__(self) -> int:
        return int(self._db.execute("SELECT count(*) FROM answers").fetchone()[0])

    def __call__(self, sequences: Tensor) -> Tensor:
        check_sequences(sequences, self.dim)
        if not self._is_checked:
            self._ask_witnesses()
        keys = _keys(sequences)
        known = self._recall(keys)
        self.remembered += sum(key in known for key in keys)
        rows: dict[bytes, int] = {}  # the first row of each question that is not known
        for row, key in enumerate(keys):
            if key not in known:
                rows.setdefault(key, row)
        missing = list(rows.items())
        try:
            while missing:
                turn = missing[: self._batch]
                missing = missing[self._batch :]
                known |= self._take_turn(turn, sequences)
        except BudgetExhausted as end:  # attacks go on with fewer answers
            known = self._recall(keys)
            answered = list(itertools.takewhile(known.__contains__, keys))
            answers = _unpack(known, answered) if answered else None
            raise BudgetExhausted(end.budget, answers) from end
        return _unpack(known, keys)

    def _ask_witnesses(self) -> None:
        """Begin a new generation if the model at the address is not the one of the answers."""
        inner = self.inner
        while isinstance(inner, Counted):
            inner = inner.inner
        with self._transaction():
            witnesses = self._db.execute(
                "SELECT question, tokens, data FROM witnesses"
            ).fetchall()
            known = self._recall([key for key, _, _ in witnesses])
            for key, tokens, data in witnesses:
                again = ask(inner, _tensor(data, 1, tokens, -1))
                self.asked_again += 1
                difference = _difference(_unpack(known, [key]), again)
                if difference > self._tolerance(again):
                    count = len(self)
                    table = self._set_aside()
                    self._notice(
                        f"another model answers at {self.identity} than {self.path} remembers: "
                        f"asked again, an answer is {difference:.1e} off; the {count:,} old answers"
                        f" are kept there as {table} and not used"
                    )
                    break
        self._is_checked = True

    def _tolerance(self, answer: Tensor) -> float:
        """Return how far two answers of one model may differ, by rounding and by stated errors."""
        exact = torch.finfo(torch.float64).eps / 2
        precision = float(stated(self.inner, "precision") or exact)
        largest = float(answer.abs().where(answer != ABSENT, 0.0).max())
        rounding = 2 * precision * largest
        return _MAX_ROUNDINGS * rounding + 2 * self._answer_error

    def _set_aside(self) -> str:
        """Rename the tables and begin a new generation; return the name of the old answers."""
        kept = self._db.execute(
            "SELECT count(*) FROM sqlite_master WHERE name LIKE 'answers\\_%' ESCAPE '\\'"
        )
        number = int(kept.fetchone()[0]) + 1
        for table in _TABLES:
            self._db.execute(f"ALTER TABLE {table} RENAME TO {table}_{number}")
        self._create_tables()
        return f"answers_{number}"

    def _create_tables(self) -> None:
        for table, columns in _TABLES.items():
            self._db.execute(
                f"CREATE TABLE IF NOT EXISTS {table} ({columns}) WITHOUT ROWID"
            )

    def _take_turn(self, turn: list[tuple[bytes, int]], sequences: Tensor) -> Memory:
        """Ask the questions that no process has asked yet, and store their answers."""
        failure: KeyholeError | None = None
        with self._transaction():
            # Another process may have asked since.
            known = self._recall([key for key, _ in turn])
            self.remembered += len(known)
            new = [(key, row) for key, row in turn if key not in known]
            if new:
                started = time.monotonic()
                try:
                    answers = ask(self.inner, sequences[[row for _, row in new]])
                except (BudgetExhausted, OracleError) as error:
                    failure = error
                    answers = error.answers
                self._adjust_batch(time.monotonic() - started)
                if answers is not None:
                    stored = self._store([key for key, _ in new], answers)
                    self._store_witnesses(
                        [(k, sequences[row]) for k, row in new if k in stored]
                    )
                    known |= stored
        if failure is not None:
            raise failure
        return known

    def _store(self, keys: list[bytes], answers: Tensor) -> Memory:
        """Store every finite answer; NaN marks one that an error left out, to be asked again."""
        self.asked += len(answers)
        shape = ",".join(map(str, answers.shape[1:]))
        is_finite = torch.isfinite(answers).reshape(len(answers), -1).all(1).tolist()
        data = answers.cpu().contiguous().numpy()
        # A failure leaves fewer answers than keys.
        stored = {
            key: (shape, answer.tobytes())
            for key, fine, answer in zip(keys, is_finite, data, strict=False)
            if fine
        }
        rows = [(key, shape, answer) for key, (shape, answer) in stored.items()]
        self._db.executemany("INSERT INTO answers VALUES (?, ?, ?)", rows)
        return stored

    def _store_witnesses(self, asked: Sequence[tuple[bytes, Tensor]]) -> None:
        """Store the last of these questions (n, d) whole, until there are enough witnesses.

        The first ones tell less: attacks begin with questions as plain as a zero.
        """
        count = int(self._db.execute("SELECT count(*) FROM witnesses").fetchone()[0])
        wanted = min(_MAX_WITNESSES - count, _WITNESSES_PER_TURN)
        for key, question in asked[-wanted:] if wanted > 0 else ():
            data = question.detach().cpu().contiguous().numpy().tobytes()
            row = (key, len(question), data)
            self._db.execute("INSERT OR IGNORE INTO witnesses VALUES (?, ?, ?)", row)

    def _recall(self, keys: Sequence[bytes]) -> Memory:
        known: Memory = {}
        for start in range(0, len(keys), _MAX_VARIABLES):
            part = keys[start : start + _MAX_VARIABLES]
            marks = ",".join("?" * len(part))
            rows = self._db.execute(
                f"SELECT * FROM answers WHERE question IN ({marks})", part
            )
            known.update((key, (shape, answer)) for key, shape, answer in rows)
        return known

    def _adjust_batch(self, seconds: float) -> None:
        if seconds < 0.5:
            self._batch = min(self._batch * 2, 4096)
        elif seconds > 2.0:
            self._batch = max(self._batch // 2, 1)

    def _claim(self) -> None:
        """Write the target into a new file; refuse the file of another target."""
        mine = {
            "version": VERSION,
            "dtype": str(getattr(self.inner, "dtype", torch.float64)).removeprefix(
                "torch."
            ),
            "dim": str(self.dim),
            "target": self.identity,
        }
        ask = self._db.execute
        with reading(_WHAT, self.path, sqlite3.DatabaseError):
            with self._transaction():
                if not ask("SELECT * FROM sqlite_master").fetchall():
                    ask(f"PRAGMA application_id = {_APPLICATION_ID}")
                    ask("CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT)")
                    self._db.executemany("INSERT INTO meta VALUES (?, ?)", mine.items())
                self._create_tables()
            theirs = dict(ask("SELECT name, value FROM meta").fetchall())
            # Fails if the table is none of ours.
            ask("SELECT question, shape, answer FROM answers LIMIT 1").fetchall()
        expect_same_run(self.path, mine, theirs)

    @contextmanager
    def _transaction(self) -> Generator[None]:
        # IMMEDIATE takes the write lock first: the process that holds it has the turn.
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")


def answers_in(path: Path) -> int:
    """Return how many answers a ledger holds; 0 if there is no ledger."""
    if not path.is_file():
        return 0
    try:
        with closing(_read_only(path)) as db:
            return int(db.execute("SELECT count(*) FROM answers").fetchone()[0])
    except sqlite3.DatabaseError:
        return 0


def _open(path: Path) -> sqlite3.Connection:
    if not is_folder(path.parent):
        raise InputError(f"cannot write the ledger {path}: there is no such folder")
    _expect_ledger(path)
    try:
        private(path)
        db = sqlite3.connect(path, timeout=_MAX_WAIT, isolation_level=None)
    except (sqlite3.OperationalError, OSError, ValueError) as error:
        raise unwritable(path, error) from error
    try:
        # readers need not wait for the turn to end
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")  # a commit survives a power cut
    except sqlite3.DatabaseError as error:
        db.close()
        raise unreadable(_WHAT, path, error) from error
    return db


def _expect_ledger(path: Path) -> None:
    """Refuse the file of another program, without changing it."""
    if not exists(path) or path.stat().st_size == 0:
        return
    expect_file(path, _WHAT)
    with (
        reading(_WHAT, path, sqlite3.DatabaseError),
        closing(_read_only(path)) as db,
    ):
        # In this order: another process may be creating the ledger, tables and id at
        # once.
        tables = db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        application = db.execute("PRAGMA application_id").fetchone()[0]
    if tables and application != _APPLICATION_ID:
        raise InputError(f"{path} is not a Keyhole ledger but another SQLite file")


def _read_only(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)


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
    sizes = [int(size) for size in shapes.pop().split(",") if size]
    return _tensor(b"".join(known[key][1] for key in keys), len(keys), *sizes)


def _tensor(data: bytes, *sizes: int) -> Tensor:
    # A clone is aligned as every tensor is: the same numbers at another alignment may
    # be summed in another order, and the next question would differ in its last bit.
    return torch.frombuffer(bytearray(data), dtype=torch.float64).reshape(sizes).clone()


def _difference(stored: Tensor, again: Tensor) -> float:
    """Return how far two answers to one question differ; infinity if their shapes do.

    What a server of a language model left out of either answer is not compared. If both
    answers hold numbers, but of no common token, other tokens were sampled: that is
    infinity, too.
    """
    if stored.shape != again.shape:
        return float("inf")
    either = [answer != ABSENT for answer in (stored, again)]
    both = either[0] & either[1]
    if (either[0].any() & either[1].any()) and not both.any():
        return float("inf")
    return float((stored - again).abs().where(both, 0.0).max())


def remembered(oracle: Oracle) -> int:
    """Return how many questions the ledgers in a stack of wrappers have answered."""
    return sum(int(getattr(layer, "remembered", 0)) for layer in layers(oracle))


@contextmanager
def session(
    parts: Mapping[str, Oracle],
    *,
    budget: int | None = None,
    ledger: str | Path | None = None,
    answer_error: float = 0.0,
    notice: Notice = ignored,
) -> Generator[dict[str, Oracle]]:
    """Count the queries of each part of a target, and remember its answers if `ledger` is given.

    A ledger belongs to one part: the second part gets a file of its own next to the
    first, and so on. `answer_error` and `notice` are those of Ledger. Connections and
    ledgers are closed at the end of the block.
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
                    Ledger(ready[name], path, answer_error=answer_error, notice=notice)
                )
        yield ready
