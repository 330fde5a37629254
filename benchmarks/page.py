"""The page of an audit, and of one with 500 findings: how large it is, how soon a browser shows it.

The demo's findings, repeated on parts of other names until there are 500. Opened in Chromium from a
file with the network off; the seconds are those from the address to the load event, the best of
three, since what is asked is what the page costs and not what the machine does besides.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from playwright.sync_api import sync_playwright

import show
from keyhole import audit, oracle, report
from keyhole.audit.target import target_of
from keyhole.core import Audit
from show import Row

FINDINGS = 500
LARGEST_ALONE, LARGEST, SLOWEST = 1.5e6, 15e6, 3.0


def run(quick: bool) -> Iterator[Row]:
    small = target_of({"the head": oracle.plant(dim=8, rank=2, seed=1)}, "a head")
    found = audit(small if quick else "demo")
    for made, largest in ((found, LARGEST_ALONE), (repeated(found), LARGEST)):
        page, seconds = show.timed(lambda: report.render(made))  # noqa: B023
        size = len(page.encode())
        what = f"page of {len(made.findings)} findings"
        yield Row(f"{what}, size", f"{size / 1e6:.2f} MB", f"< {largest / 1e6:g} MB",
                  size < largest, f"made in {seconds:.2f} s")  # fmt: skip
        if (opens := opened(page)) is not None:
            target = f"< {SLOWEST:g} s"
            yield show.ratio(f"{what}, opens", f"{opens:.2f} s", target, opens < SLOWEST)


def repeated(found: Audit) -> Audit:
    """The same findings on many parts, as a target with many endpoints has them."""
    copies = -(-FINDINGS // len(found.findings))
    many = [
        replace(finding, exposure=replace(finding.exposure, part=f"{finding.part} {copy}"))
        for copy in range(copies)
        for finding in found.findings
    ]
    return replace(found, findings=tuple(many[:FINDINGS]))


def opened(page: str) -> float | None:
    """Seconds until a browser has loaded it; None where there is no Chromium."""
    chromium = shutil.which("chromium")
    if chromium is None:
        return None
    flags = ["--no-sandbox"] if os.geteuid() == 0 else []
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        file = Path(folder) / "page.html"
        file.write_text(page, "utf-8")
        browser = playwright.chromium.launch(executable_path=chromium, args=flags)
        context = browser.new_context(offline=True, viewport={"width": 1400, "height": 900})
        context.new_page().goto("about:blank")  # the browser's own start is not the page's
        seconds = []
        for _ in range(3):
            tab = context.new_page()
            began = time.perf_counter()
            tab.goto(file.as_uri(), wait_until="load")
            tab.evaluate("new Promise(done => requestAnimationFrame(() => setTimeout(done)))")
            seconds.append(time.perf_counter() - began)
            tab.close()
        browser.close()
    return min(seconds)


if __name__ == "__main__":
    show.main(run)
