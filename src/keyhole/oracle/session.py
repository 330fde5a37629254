"""Oracles made ready to be asked: a counter that knows the budget, and a ledger around it."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from keyhole.oracle.completions import Completions
from keyhole.oracle.counted import Counted
from keyhole.oracle.ledger import Ledger
from keyhole.oracle.open_inference import OpenInference
from keyhole.oracle.protocol import Oracle


@contextmanager
def session(
    surfaces: Mapping[str, Oracle], *, budget: int | None = None, ledger: str | Path | None = None
) -> Generator[dict[str, Oracle]]:
    """Each surface of a target, counted; remembered too where there is a ledger.

    A ledger belongs to one surface: the second has one of its own beside it, and so on.
    Connections and ledgers are closed at the end.
    """
    ready: dict[str, Oracle] = {}
    with ExitStack() as stack:
        for number, (name, surface) in enumerate(surfaces.items()):
            if isinstance(surface, OpenInference | Completions):
                stack.callback(surface.close)
            ready[name] = Counted(surface, budget)
            if ledger is not None:
                path = ledger_of(Path(ledger), number)
                ready[name] = stack.enter_context(Ledger(ready[name], path))
        yield ready


def ledger_of(ledger: Path, number: int) -> Path:
    """The file that remembers surface `number`."""
    return ledger.with_stem(f"{ledger.stem}-{number + 1}") if number else ledger
