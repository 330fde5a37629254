"""The plugin that pytest loads: `--keyhole-report`, `keyhole_audit`, and a section of the summary.

It is loaded in every run of pytest, so it imports neither torch nor anything of Keyhole that does.
What a test audited travels with the test's report, as JSON: workers of pytest-xdist send reports to
the process that writes the summary, which is then the same with workers and without.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest

from keyhole.testing import notify, sessions

if TYPE_CHECKING:
    from keyhole.core import Audit

_KEY = "keyhole"  # of what reports carry, and of the section
_OPTION = "--keyhole-report"
# Those of report/formats.py, by name: the module itself loads all that they are made with.
FORMATS = ("html", "json", "sarif", "sarif-github", "markdown", "junit")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("keyhole").addoption(
        _OPTION, action="append", default=[], metavar="FILE",
        help="Write what the tests' audits found to FILE.html or FILE.json, or to FORMAT=FILE with "
        f"one of {', '.join(FORMATS)}; may be repeated.",
    )  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    files = [_report(word) for word in cast("list[str]", config.getoption(_OPTION))]
    config.pluginmanager.register(Session(files), "keyhole-session")


def _report(word: str) -> tuple[str, Path]:
    """The format and the file that somebody asked for."""
    name, equals, file = word.partition("=")
    if not equals and Path(word).suffix in (".html", ".json"):
        return Path(word).suffix[1:], Path(word)
    if not file or name not in FORMATS:
        raise pytest.UsageError(
            f"{_OPTION} takes FILE.html, FILE.json, or FORMAT=FILE with one of "
            f"{', '.join(FORMATS)}; {word} is none of these"
        )
    return name, Path(file)


class Session:
    """What the tests of one session audited."""

    def __init__(self, files: list[tuple[str, Path]]) -> None:
        self.files = files
        self._pending: list[str] = []  # of the phase that is running
        self._lines: dict[str, list[str]] = {}  # by test; an audit stands where it was made
        self._sent: list[dict[str, Any]] = []  # different audits, with their lines

    def pytest_sessionstart(self) -> None:
        sessions.append(self.add)

    def pytest_unconfigure(self) -> None:
        if self.add in sessions:  # not where the session never began, as with --help
            sessions.remove(self.add)

    def add(self, audit: Audit) -> None:
        from keyhole.testing.withstands import lines

        self._pending.append(json.dumps({"lines": lines(audit), "audit": audit.to_dict()}))

    @pytest.hookimpl(hookwrapper=True)  # the older form: it is loaded by whichever pytest there is
    def pytest_runtest_makereport(self) -> Generator[None, Any, None]:
        outcome = yield
        if self._pending:
            setattr(outcome.get_result(), _KEY, self._pending)
            self._pending = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for text in cast("list[str]", getattr(report, _KEY, [])):
            sent = json.loads(text)
            self._lines.setdefault(report.nodeid, []).extend(sent["lines"])
            # Workers that audit the same target report it once each.
            if all(sent["lines"] != known["lines"] for known in self._sent):
                self._sent.append(sent)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self._lines and not self.files:
            return
        terminalreporter.section(_KEY)
        for test, lines in self._lines.items():
            for line in lines:
                terminalreporter.line(f"{line} [{test}]")
        for name, file in self.files:
            terminalreporter.line(f"{name}: {file}")

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        is_worker = hasattr(session.config, "workerinput")
        if self.files and not is_worker:
            self._write()

    def _write(self) -> None:
        """All audits of the session as one, each file as `keyhole audit --output` writes it."""
        from keyhole.assess import assess
        from keyhole.core import Audit
        from keyhole.core.audit import combined
        from keyhole.core.files import write_text
        from keyhole.report.formats import FORMATS

        audits = [Audit.from_dict(sent["audit"]) for sent in self._sent]
        audit = combined(audits, "a test session")
        for name, file in self.files:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_text(file, FORMATS[name](assess(audit)))


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
