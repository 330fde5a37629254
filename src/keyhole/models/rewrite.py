"""What may be done to attention, and where: the types that attacks and defences share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Site:
    """One attention call inside one forward pass; (name, call) identifies it."""

    index: int  # 0, 1, 2… in the order of the calls of one forward pass
    name: str  # the module's qualified name
    call: int  # how often this module was called before in this forward pass
    kind: str  # "self" or "cross"


class Rewrite(Protocol):
    """What to do at each site; `shape` is (batch, heads, queries, keys), tensors broadcast to it.

    Vision models with windows (Swin) have the windows in the batch axis.
    """

    def begin(self, inputs: Mapping[str, Any]) -> bool | None:
        """A forward pass starts, with these arguments. False: leave this one alone.

        It then runs with the implementation that the model had before, bit for bit.
        """
        ...

    def cut(self, site: Site, shape: torch.Size) -> Tensor | None:
        """Boolean, True: may not be attended to. The row renormalises over the rest."""
        ...

    def gate(self, site: Site, shape: torch.Size) -> Tensor | None:
        """A factor on the probabilities; the row does not renormalise."""
        ...

    def bump(self, site: Site, shape: torch.Size) -> Tensor | None:
        """A summand to the probabilities: zeros that want a gradient are what attacks rank by."""
        ...

    def seen(self, site: Site, probabilities: Tensor) -> None:
        """The probabilities after the cut, before gate, bump and dropout; part of the graph."""
        ...


class Untouched:
    """A rewrite that changes nothing; override what you need."""

    def begin(self, inputs: Mapping[str, Any]) -> bool | None:
        del inputs

    def cut(self, site: Site, shape: torch.Size) -> Tensor | None:
        del site, shape

    def gate(self, site: Site, shape: torch.Size) -> Tensor | None:
        del site, shape

    def bump(self, site: Site, shape: torch.Size) -> Tensor | None:
        del site, shape

    def seen(self, site: Site, probabilities: Tensor) -> None:
        del site, probabilities


@dataclass
class Sites:
    """What came by: the calls of the last forward pass, and how many passes there were."""

    calls: list[tuple[Site, torch.Size]] = field(default_factory=list[tuple[Site, torch.Size]])
    forwards: int = 0
