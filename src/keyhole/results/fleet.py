"""What audits of many targets found, side by side."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Self

from keyhole.results.audit import Audit
from keyhole.results.json import environment
from keyhole.results.result import Result
from keyhole.results.typed import restored

if TYPE_CHECKING:  # torch takes seconds to load: reports are made without it
    from torch import Tensor


@dataclass(frozen=True, repr=False)
class Fleet(Result):
    """The audit of each target by the name that its row has; `seconds` is all of it together."""

    audits: dict[str, Audit]
    seconds: float = 0.0
    environment: dict[str, str] = field(default_factory=environment)

    kind: ClassVar[str] = "fleet"

    @property
    def exit_code(self) -> int:
        """As of one audit: 1 something was given away, 3 something could not be checked, else 0."""
        codes = {audit.exit_code for audit in self.audits.values()}
        return next((code for code in (1, 3) if code in codes), 0)

    def summary(self) -> str:
        counts = Counter(audit.exit_code for audit in self.audits.values())
        lines = [
            f"{len(self.audits)} targets: {counts[1]} give something away, {counts[3]} could not "
            f"be checked, {counts[0]} give nothing away; {self.seconds:.1f} s"
        ]
        for name, audit in self.audits.items():
            lines.append(f"  {name}: {audit.exposed} of {len(audit.attacks)} exposures")
        return "\n".join(lines)

    def contents(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def restore(cls, data: dict[str, Any], tensors: Mapping[str, Tensor]) -> Self:  # noqa: ARG003
        return restored(cls, data, more=True)
