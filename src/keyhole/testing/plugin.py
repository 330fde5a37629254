"""The plugin that pytest loads: the fixture `keyhole_audit`, and a section of the summary.

It is loaded in every run of pytest, so it imports neither torch nor anything of Keyhole that does.
What a test audited travels with the test's report: workers of pytest-xdist send reports to the
process that writes the summary, which is then the same with workers and without.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from keyhole.testing.sessions import notify, sessions

if TYPE_CHECKING:
    from keyhole.core import Audit

_KEY = "keyhole"  # of what reports carry, and of the section


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Session(), "keyhole-session")


class Session:
    """What the tests of one session audited."""

    def __init__(self) -> None:
        self._pending: list[str] = []  # of the phase that is running
        self._lines: dict[str, list[str]] = {}  # by test; an audit stands where it was made

    def pytest_sessionstart(self) -> None:
        sessions.append(self.add)

    def pytest_unconfigure(self) -> None:
        if self.add in sessions:  # not where the session never began, as with --help
            sessions.remove(self.add)

    def add(self, audit: Audit) -> None:
        from keyhole.testing.withstands import lines

        self._pending += lines(audit)

    @pytest.hookimpl(hookwrapper=True)  # the older form: it is loaded by whichever pytest there is
    def pytest_runtest_makereport(self) -> Generator[None, Any, None]:
        outcome = yield
        if self._pending:
            setattr(outcome.get_result(), _KEY, self._pending)
            self._pending = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if lines := getattr(report, _KEY, []):
            self._lines.setdefault(report.nodeid, []).extend(lines)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._lines:
            terminalreporter.section(_KEY)
        for test, lines in self._lines.items():
            for line in lines:
                terminalreporter.line(f"{line} [{test}]")


@pytest.fixture(scope="session")
def keyhole_audit() -> Callable[..., Audit]:
    """`keyhole_audit(target, **options)` is `keyhole.audit`, run once a session for each target."""
    from keyhole.audit.run import audit

    made: dict[Any, tuple[Any, Audit]] = {}  # targets are held, so that an id stays their own

    def audited(target: Any, **options: Any) -> Audit:
        target = str(target) if isinstance(target, Path) else target
        key = target if isinstance(target, str) else id(target), repr(sorted(options.items()))
        if key not in made:
            made[key] = target, audit(target, **options)
            notify(made[key][1])
        return made[key][1]

    return audited
