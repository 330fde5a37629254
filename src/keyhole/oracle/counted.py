"""Counting, in one wrapper around the oracle; a budget is the same count with an end."""

from __future__ import annotations

from torch import Tensor

from keyhole.core.errors import InputError
from keyhole.core.progress import Progress, silent
from keyhole.oracle.protocol import BudgetExhausted, Oracle, ask, identity_of


class Counted:
    """Counts every sequence that reaches `inner`; past `budget` it raises BudgetExhausted.

    A batch that overruns the budget is asked up to its end, and the answers travel with the
    exception: what was paid for is not thrown away.

    `progress` is told the count after every batch.

    `Ledger(Counted(o))` counts what was paid, since remembered answers never reach the counter;
    `Counted(Ledger(o))` counts what was asked.
    """

    def __init__(
        self,
        inner: Oracle,
        budget: int | None = None,
        progress: Progress = silent,
    ) -> None:
        if budget is not None and budget < 0:
            raise InputError(f"expected a budget of 0 queries or more, got {budget}")
        self.inner = inner
        self.budget = budget
        self.queries = 0
        self._progress = progress

    @property
    def dim(self) -> int:
        return self.inner.dim

    @property
    def identity(self) -> str:
        return identity_of(self.inner)

    def __call__(self, sequences: Tensor) -> Tensor:
        left = len(sequences) if self.budget is None else self.budget - self.queries
        if self.budget is not None and left < len(sequences):
            raise BudgetExhausted(self.budget, self._put(sequences[:left]) if left else None)
        return self._put(sequences)

    def _put(self, sequences: Tensor) -> Tensor:
        self.queries += len(sequences)  # before the call: a question that fails was still asked
        try:
            return ask(self.inner, sequences)
        except BudgetExhausted as end:  # a budget further in: the rest never left this machine
            self.queries -= len(sequences) - (0 if end.answers is None else len(end.answers))
            raise
        finally:
            self._progress(self.queries)
