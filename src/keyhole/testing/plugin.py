"""The plugin that pytest loads: the fixture `keyhole_audit`.

It is loaded in every run of pytest, so it imports neither torch nor anything of Keyhole that does.
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
    """`keyhole_audit(target, **options)` is `keyhole.audit`, run once a session for each target."""
    from keyhole.audit.run import audit

    made: dict[Any, tuple[Any, Audit]] = {}  # targets are held, so that an id stays their own

    def audited(target: Any, **options: Any) -> Audit:
        target = str(target) if isinstance(target, Path) else target
        key = target if isinstance(target, str) else id(target), repr(sorted(options.items()))
        if key not in made:
            made[key] = target, audit(target, **options)
        return made[key][1]

    return audited
