"""An audit that is made once, whoever asks for it: the tests of a session and its workers."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

from keyhole.audit.run import audit
from keyhole.core import Audit, dump
from keyhole.core.files import parse
from keyhole.core.journal import digest
from keyhole.testing.record import tell

_PATIENCE = 24 * 3600.0  # seconds that a worker waits for another's audit of the same target


class Once:
    """`keyhole.audit` that remembers: by name in files of `folder`, and what has none by itself."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[Any, tuple[object, Audit]] = {}

    def __call__(self, target: Any, **options: Any) -> Audit:
        settings = repr(sorted(options.items()))
        if isinstance(target, Path):
            target = str(target)
        key = (target if isinstance(target, str) else id(target), settings)
        if key not in self._made:
            name = digest([target, settings]) if isinstance(target, str) else None
            made = _told(target, options) if name is None else self._shared(target, options, name)
            self._made[key] = target, made  # the target is held, so that its id stays its own
        return self._made[key][1]

    def _shared(self, target: str, options: dict[str, Any], name: str) -> Audit:
        """Read what another worker wrote, or make it while the others wait.

        SQLite's lock ends with the process that holds it, however that ends.
        """
        file = self._folder / f"keyhole-audit-{name}.sqlite"
        with closing(sqlite3.connect(file, timeout=_PATIENCE, isolation_level=None)) as base:
            base.execute("BEGIN EXCLUSIVE")
            base.execute("CREATE TABLE IF NOT EXISTS audits (audit TEXT NOT NULL)")
            row = base.execute("SELECT audit FROM audits").fetchone()
            if row is not None:
                return Audit.from_dict(parse(row[0]))
            made = _told(target, options)
            base.execute("INSERT INTO audits VALUES (?)", [dump(made.to_dict())])
            base.execute("COMMIT")
        return made


def _told(target: Any, options: dict[str, Any]) -> Audit:
    """Told by the process that makes it alone, so that its findings are counted once."""
    made = audit(target, **options)
    tell(made)
    return made
