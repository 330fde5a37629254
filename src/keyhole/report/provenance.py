"""Where a report comes from: which version made the audit, when, and a number for it."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from hashlib import sha256
from uuid import UUID, uuid5

from keyhole.core import Audit, dump
from keyhole.report.inert import inert

_AUDITS = UUID("6f5f584f-78f0-589d-81da-408ad4faa72b")  # uuid5 of urn:keyhole:audits
_WORDS = re.compile(r"[^0-9a-z]+")


def version(audit: Audit) -> str:
    """The version of Keyhole that made the audit."""
    return inert(audit.environment.get("keyhole", "unknown"), 60)


def finished(audit: Audit) -> str | None:
    """When the audit was finished, as RFC 3339 has it; None where a file says something else."""
    try:
        moment = datetime.fromisoformat(audit.created).astimezone(UTC)
    except (ValueError, OverflowError):
        return None
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ") if moment.year >= 1000 else None


def serial(audit: Audit) -> UUID:
    """The same for the same audit, whoever makes the report."""
    return uuid5(_AUDITS, sha256(dump(audit.to_dict()).encode()).hexdigest())


def slug(text: str, longest: int = 80) -> str:
    """Letters and digits of ASCII with hyphens, and a few digits more where others were lost."""
    plain = _WORDS.sub("-", text[: 4 * longest].lower()).strip("-")[:longest].rstrip("-")
    whole = text.isascii() and len(text) <= longest
    mark = "" if plain and whole else sha256(text.encode("utf-8", "replace")).hexdigest()[:8]
    return "-".join(part for part in (plain, mark) if part)
