"""Checks made side by side: in processes of our own, or by the workers of a Dask cluster.

Checks need nothing from each other, so they come back in any order. Where a worker dies, the pool
is made again (disrupt/workers.py) and what was under way is made once more; an audit whose workers
keep dying ends with one line, and what was finished is in its journal.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, CancelledError, Future, wait

from keyhole.audit.check import Checked
from keyhole.disrupt.workers import Pool
from keyhole.errors import KeyholeError

Work = Callable[[], Checked]
_DEATHS = 3  # of workers in a row, without a check that came back between them


def sweep(works: Mapping[str, Work], pool: Pool) -> Iterator[tuple[str, Checked, float]]:
    """Each check by its key with what it gave and the seconds it took, as they come back."""
    queue, under_way, deaths = deque(works), dict[Future[tuple[Checked, float]], str](), 0
    while queue or under_way:
        try:
            while queue and len(under_way) < pool.window:
                future = pool.executor().submit(_timed, works[queue[0]])
                under_way[future] = queue.popleft()
            for future in wait(under_way, return_when=FIRST_COMPLETED).done:
                checked, seconds = future.result()
                yield under_way.pop(future), checked, seconds
                deaths = 0
        except (BrokenExecutor, CancelledError) as error:
            deaths += 1
            if not pool.broke() or deaths >= _DEATHS:  # forgotten in any case: nobody waits for it
                reason = f"{error}".splitlines()[0] if f"{error}" else type(error).__name__
                raise KeyholeError(
                    f"expected workers that stay, got {reason}: finished checks are kept, and the "
                    "same command goes on"
                ) from error
            queue.extendleft(reversed(under_way.values()))
            under_way.clear()


def _timed(work: Work) -> tuple[Checked, float]:
    started = time.perf_counter()
    return work(), time.perf_counter() - started
