"""What every wrapper that changes a target's behaviour shares."""

from __future__ import annotations

from keyhole.oracle.protocol import Oracle, identity_of


class Wrapper:
    """The inner oracle, and an identity that names the change."""

    def __init__(self, inner: Oracle, change: str) -> None:
        self.inner = inner
        self._change = change

    @property
    def dim(self) -> int:
        return self.inner.dim

    @property
    def identity(self) -> str:
        return f"{identity_of(self.inner)}|{self._change}"
