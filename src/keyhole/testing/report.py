"""The files that all audits of a session are written to, as one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from keyhole.assess import assess
from keyhole.core import Audit
from keyhole.core.audit import combined
from keyhole.core.files import write_text
from keyhole.report.formats import FORMATS


def write(audits: Sequence[dict[str, Any]], files: Sequence[tuple[str, Path]]) -> None:
    """Each file in its format, as `keyhole audit --output` writes it."""
    audit = combined([Audit.from_dict(data) for data in audits], "a test session")
    for name, file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, FORMATS[name](assess(audit)))
