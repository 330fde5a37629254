"""Every attack that applies to a target, judged, collected as findings.

`keyhole.audit("demo")` runs one: the package itself can be called, and is `audit` of run.py then.
`keyhole.audit.fleet("fleet.toml")` audits many targets.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from keyhole.audit.fleet_file import Member, read_fleet
from keyhole.audit.fleets import fleet
from keyhole.audit.given import Data, Stored
from keyhole.audit.opening import Opening
from keyhole.audit.run import audit
from keyhole.audit.stores import StoreTarget
from keyhole.audit.targets import Target, open_target
from keyhole.audit.texts import TextTarget
from keyhole.core import Audit

__all__ = [
    "Audit", "Data", "Member", "Opening", "StoreTarget", "Stored", "Target", "TextTarget", "audit",
    "fleet", "open_target", "read_fleet",
]  # fmt: skip


class _Audit(ModuleType):
    """A module that can be called (the language reference, "Customizing module attribute access"):
    `keyhole.audit` is the name of the package and of what it does.
    """

    __call__ = staticmethod(audit)


module: Any = sys.modules[__name__]
module.__class__ = _Audit
del module
