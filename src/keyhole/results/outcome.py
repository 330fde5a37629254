"""What a status means for whoever has to decide: given away, kept, or could not be checked.

One table for all commands, for the page's headline and for exit codes: 0 nothing was given away,
1 something was, 3 something could not be checked. What could not be checked is never clean, even
where everything else is. (2 is for wrong input, which never gets as far as a status.)

`kept` is said where an attack ran to its end and the secret is not known: the attack did not find
it (unsolved), or nothing could have (not identifiable). It is no proof of safety. A search for the
text behind one vector is never run to its end: one that did not arrive has used up its budget, and
could not check.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from keyhole.results.status import Status


class Outcome(StrEnum):
    GIVEN_AWAY = "given away"
    KEPT = "kept"
    UNCHECKED = "could not check"


OUTCOMES = {
    Status.RECOVERED: Outcome.GIVEN_AWAY,
    Status.WITHIN: Outcome.GIVEN_AWAY,
    Status.INEXACT: Outcome.GIVEN_AWAY,
    Status.NOT_IDENTIFIABLE: Outcome.KEPT,
    Status.UNSOLVED: Outcome.KEPT,
    Status.BUDGET: Outcome.UNCHECKED,
    Status.UNVERIFIED: Outcome.UNCHECKED,
    Status.MISMATCH: Outcome.UNCHECKED,
    Status.NOT_APPLICABLE: Outcome.UNCHECKED,
    Status.SATURATED: Outcome.UNCHECKED,
    Status.ORACLE_FAILED: Outcome.UNCHECKED,
    Status.INTERRUPTED: Outcome.UNCHECKED,
}


def exit_code(statuses: Iterable[Status | Outcome]) -> int:
    """0, 1 or 3 for all that was checked together; nothing at all is nothing checked."""
    outcomes = [OUTCOMES[status] if isinstance(status, Status) else status for status in statuses]
    if Outcome.GIVEN_AWAY in outcomes:
        return 1
    return 3 if not outcomes or Outcome.UNCHECKED in outcomes else 0
