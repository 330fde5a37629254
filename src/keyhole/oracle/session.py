"""Oracles made ready to be asked: a counter that knows the budget, and a ledger around it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from keyhole.oracle.completions import Completions
from keyhole.oracle.counted import Counted
from keyhole.oracle.ledger import Ledger
from keyhole.oracle.open_inference import OpenInference
from keyhole.oracle.protocol import Oracle

Notice = Callable[[str], None]  # told in one line what a person should know


def unheard(line: str) -> None:
    """A notice to nobody."""


@contextmanager
def session(
    surfaces: Mapping[str, Oracle],
    *,
    budget: int | None = None,
    ledger: str | Path | None = None,
    answer_error: float | None = None,
    notice: Notice = unheard,
) -> Generator[dict[str, Oracle]]:
    """Each surface of a target, counted; remembered too where there is a ledger.

    A ledger belongs to one surface: the second has one of its own beside it, and so on.
    `answer_error` is how far an answer may be off when it is asked again, `notice` is told where
    another model answers than the ledger remembers. Connections and ledgers are closed at the end.
    """
    ready: dict[str, Oracle] = {}
    with ExitStack() as stack:
        for number, (name, surface) in enumerate(surfaces.items()):
            if isinstance(surface, OpenInference | Completions):
                stack.callback(surface.close)
            ready[name] = Counted(surface, budget)
            if ledger is not None:
                path = ledger_of(Path(ledger), number)
                ready[name] = stack.enter_context(
                    Ledger(ready[name], path, answer_error=answer_error or 0.0, notice=notice)
                )
        yield ready


def ledger_of(ledger: Path, number: int) -> Path:
    """The file that remembers surface `number`."""
    return ledger.with_stem(f"{ledger.stem}-{number + 1}") if number else ledger
