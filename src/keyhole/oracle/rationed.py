"""A server that counts what each client asks: a budget, a rate, or both.

Who a client is, is what the server can see of it: over HTTP its address. A thief with k addresses
has k budgets and k times the rate.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from keyhole.bounds import expect_count, expect_number
from keyhole.oracle.http import Refused
from keyhole.oracle.protocol import Oracle, ask
from keyhole.oracle.wrapper import Wrapper

_SPENT = 403
_TOO_FAST = 429


class TooFast(Refused):
    """Come back in `wait` seconds."""

    def __init__(self, rate: float, wait: float) -> None:
        super().__init__(
            f"expected at most {rate:g} queries a second, got more: wait {wait:.3g} s", _TOO_FAST
        )
        self.wait = wait


@dataclass
class _Account:
    queries: int = 0
    free_at: float = 0.0  # when nothing is owed to the rate any more


class Rationed(Wrapper):
    """Each client may ask `budget` queries in all, and `rate` of them a second.

    A batch that exceeds the budget is refused as a whole. A batch is answered when nothing is owed;
    a batch of m queries then owes m / `rate` seconds, so batches of any size are held to the rate.
    """

    def __init__(
        self,
        inner: Oracle,
        budget: int | None = None,
        rate: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        expect_count("a client's budget", budget, 0)
        expect_number("a client's rate", rate, above=0)
        super().__init__(inner, "rationed")
        self.budget, self.rate = budget, rate
        self._clock = clock
        self._accounts: dict[str, _Account] = {}

    @property
    def identity(self) -> str:  # rations change no answer
        return super().identity.removesuffix("|rationed")

    def __call__(self, sequences: Tensor, client: str = "") -> Tensor:
        account = self._accounts.setdefault(client, _Account())
        count, now = len(sequences), self._clock()
        if self.budget is not None and account.queries + count > self.budget:
            left = self.budget - account.queries
            raise Refused(
                f"expected at most {self.budget:,} queries from a client, got {count:,} more where "
                f"{left:,} are left",
                _SPENT,
            )
        if self.rate is not None:
            if account.free_at > now:
                raise TooFast(self.rate, account.free_at - now)
            account.free_at = now + count / self.rate
        account.queries += count
        return ask(self.inner, sequences)
