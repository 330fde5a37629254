"""How fast a server is asked: at most so many requests a second, and not before it says."""

from __future__ import annotations

import threading
import time


class Pace:
    """Turns for requests, evenly spaced; threads that share one share its rate."""

    def __init__(self, per_second: float | None = None) -> None:
        self._apart = 0.0 if per_second is None else 1.0 / per_second
        self._next = 0.0  # as time.monotonic() has it
        self._lock = threading.Lock()

    def wait(self) -> None:
        """Until it is this request's turn."""
        with self._lock:
            turn = max(self._next, time.monotonic())
            self._next = turn + self._apart
        time.sleep(max(0.0, turn - time.monotonic()))

    def hold(self, seconds: float) -> None:
        """Nobody asks for so long: the server said so."""
        with self._lock:
            self._next = max(self._next, time.monotonic() + seconds)
