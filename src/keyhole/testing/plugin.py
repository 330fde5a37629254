"""The pytest plugin: the fixture `keyhole_audit`.

pytest loads it in every run, so it imports neither torch nor a module of Keyhole that
does.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from keyhole.core import Audit


@pytest.fixture(scope="session")
def keyhole_audit() -> Callable[..., Audit]:
    """`keyhole.audit`, run only once per session for the same target and options."""
    from keyhole.audit.run import audit

    # With what the key names, so that ids stay unique.
    audits: dict[Any, tuple[Any, ...]] = {}

    def audit_once(target: Any, **options: Any) -> Audit:
        name = id(target)
        if isinstance(target, str | Path):
            target = name = str(target)
        key = (name, repr(sorted(options.items())))
        if key not in audits:
            audits[key] = audit(target, **options), target, options
        return audits[key][0]

    return audit_once
