"""A server that counts what each client asks: a budget, a rate, or both.

Who a client is, is what the server can see of it: over HTTP its address. An attacker with k
addresses has k budgets and k times the rate.

What is remembered of clients is bounded, or a client with many addresses could fill the memory. A
debt to the rate is forgotten once it is paid, and a budget never is. Clients beyond the most that
are remembered by name share one ration, so nobody has a fresh one by being forgotten.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Collection

from torch import Tensor

from keyhole.core.errors import expect_count, expect_number
from keyhole.oracle.http import Refused
from keyhole.oracle.protocol import Oracle, ask
from keyhole.oracle.wrapper import Wrapper

_SPENT = 403
_TOO_FAST = 429
_CLIENTS = 1 << 16  # remembered by name: about 10 MB
_OTHERS = "\0"  # the name of all clients beyond those: no address


class TooFast(Refused):
    """Come back in `wait` seconds."""

    def __init__(self, rate: float, wait: float) -> None:
        super().__init__(
            f"expected at most {rate:g} queries a second, got more: wait {wait:.3g} s", _TOO_FAST
        )
        self.wait = wait


class Rationed(Wrapper):
    """Each client may ask `budget` queries in all, and `rate` of them a second.

    A batch that exceeds the budget is refused as a whole. A batch is answered when nothing is owed;
    a batch of m queries then owes m / `rate` seconds, so batches of any size are held to the rate.
    So many `clients` have rations of their own at a time; all others share one.
    """

    def __init__(
        self,
        inner: Oracle,
        budget: int | None = None,
        rate: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        clients: int = _CLIENTS,
    ) -> None:
        expect_count("a client's budget", budget, 0)
        expect_number("a client's rate", rate, above=0)
        expect_count("the clients with rations of their own", clients, 1)
        super().__init__(inner, "rationed")
        self.budget, self.rate, self.clients = budget, rate, clients
        self._clock = clock
        self._spent: dict[str, int] = {}
        self._owing: dict[str, float] = {}  # until when
        self._ends: list[tuple[float, str]] = []  # of what is owed, a heap

    @property
    def identity(self) -> str:  # rations change no answer
        return super().identity.removesuffix("|rationed")

    def __call__(self, sequences: Tensor, client: str = "") -> Tensor:
        count = len(sequences)
        payer = self._within_budget(client, count)
        self._charge_rate(client, count)
        if self.budget is not None and count:
            self._spent[payer] = self._spent.get(payer, 0) + count
        return ask(self.inner, sequences)

    def _within_budget(self, client: str, count: int) -> str:
        """Who pays for so many queries, if they are still there."""
        payer = self._name(client, self._spent)
        if self.budget is not None and self._spent.get(payer, 0) + count > self.budget:
            left = self.budget - self._spent.get(payer, 0)
            raise Refused(
                f"expected at most {self.budget:,} queries from a client, got {count:,} more where "
                f"{left:,} are left",
                _SPENT,
            )
        return payer

    def _charge_rate(self, client: str, count: int) -> None:
        """Nothing may be owed; then so many queries are. Only those who owe are remembered."""
        if self.rate is None:
            return
        now = self._clock()
        while self._ends and self._ends[0][0] <= now:
            del self._owing[heapq.heappop(self._ends)[1]]
        debtor = self._name(client, self._owing)
        if debtor in self._owing:
            raise TooFast(self.rate, self._owing[debtor] - now)
        self._owing[debtor] = now + count / self.rate
        heapq.heappush(self._ends, (self._owing[debtor], debtor))

    def _name(self, client: str, remembered: Collection[str]) -> str:
        """Under what name a client is remembered.

        Nobody can tell who of the others shares a ration: while it lasts, every newcomer does.
        """
        full = len(remembered) >= self.clients or _OTHERS in remembered
        return _OTHERS if full and client not in remembered else client
