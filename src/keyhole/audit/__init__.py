"""`keyhole.audit(TARGET)`: every attack that applies to a target, judged, collected as findings."""

from keyhole.audit.run import audit
from keyhole.results import Audit

__all__ = ["Audit", "audit"]
