"""Run every attack that applies to a target, and collect the results as findings.

`keyhole.audit("demo")` audits one target: the package can be called, and calls `audit`
in run.py. `keyhole.audit.fleet("fleet.toml")` audits many.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from keyhole.audit.options import AuditOptions

if TYPE_CHECKING:
    from keyhole.audit.fleets import Member, fleet, read_fleet
    from keyhole.audit.run import audit
    from keyhole.audit.stores import StoreTarget
    from keyhole.audit.target import NamedTarget, Target, open_target
    from keyhole.audit.texts import TextTarget
    from keyhole.core import Audit

__all__ = [
    "Audit",
    "AuditOptions",
    "Member",
    "NamedTarget",
    "StoreTarget",
    "Target",
    "TextTarget",
    "audit",
    "fleet",
    "open_target",
    "read_fleet",
]

# The module of each name. It is imported on demand: all of these load torch,
# AuditOptions does not.
_MODULES = {
    "Audit": "core",
    "Member": "audit.fleets",
    "NamedTarget": "audit.target",
    "StoreTarget": "audit.stores",
    "Target": "audit.target",
    "TextTarget": "audit.texts",
    "audit": "audit.run",
    "fleet": "audit.fleets",
    "open_target": "audit.target",
    "read_fleet": "audit.fleets",
}


class _Audit(ModuleType):
    """A module that can be called, so that `keyhole.audit` is both the package and the function.

    See "Customizing module attribute access" in Python's language reference.
    """

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self.__getattr__("audit")(*args, **options)

    def __getattr__(self, name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"keyhole.{_MODULES[name]}"), name)


module: Any = sys.modules[__name__]
module.__class__ = _Audit
del module
