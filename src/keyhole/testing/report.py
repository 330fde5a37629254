"""The files that all audits of a session are written to, as one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from keyhole import report
from keyhole.audit.together import together
from keyhole.files import write_text
from keyhole.results import Audit


def write(audits: Sequence[dict[str, Any]], files: Sequence[Path]) -> None:
    """FILE.json as `keyhole audit` writes it, every other as its page."""
    audit = together([Audit.from_dict(data) for data in audits], "a test session")
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.suffix == ".json":
            audit.save(file)
        else:
            write_text(file, report.render(audit))
