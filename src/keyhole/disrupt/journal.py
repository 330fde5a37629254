"""Outcomes on disk as they come, so that a killed run resumes and attacks nothing twice.

The file is a journal (resume.py): a first line that says which attack on which model, then one
record an example. An example is known by what it says, not by its number, so a longer list of
examples continues a shorter one.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from keyhole.core.errors import InputError
from keyhole.core.journal import Journal, digest
from keyhole.core.result import restored
from keyhole.data import Example
from keyhole.disrupt.disruption import Control, Outcome


def key(example: Example) -> str:
    """Sixteen hexadecimal digits of everything that the model and the judge see."""
    return digest([example.id, example.label, example.text, example.second, list(example.choices)])


class Outcomes:
    """What a journal remembers of a sweep: outcomes by example, the control, the seconds."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.known: dict[str, Outcome] = {}
        self.control = Control(0.0, 0.0, 0)
        self.seconds = 0.0
        for name, record in journal.records.items():
            self._recall(name, record)

    def add(self, outcomes: dict[str, Outcome], control: Control, seconds: float) -> None:
        """Outcomes of one batch by key, on disk before this returns."""
        self.known |= outcomes
        self.control = self.control.joined(control)
        self.seconds += seconds
        self.journal.add(
            {
                name: {
                    "outcome": outcome.to_dict(), "control": asdict(control),
                    "seconds": 0.0 if number else seconds,
                }
                for number, (name, outcome) in enumerate(outcomes.items())
            }
        )  # fmt: skip

    def _recall(self, name: str, record: dict[str, Any]) -> None:
        try:
            remembered = restored(_Record, record)
            self.known[name] = Outcome.from_dict(remembered.outcome)
        except InputError as error:
            raise InputError(f"{error} under {name} in {self.journal.path}") from error
        self.control = self.control.joined(remembered.control)
        self.seconds += remembered.seconds


@dataclass(frozen=True)
class _Record:
    """One line of the journal, but for its key."""

    outcome: dict[str, Any]
    control: Control
    seconds: float
