"""A real browser for tests of pages, without network, and without a sandbox if root runs it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any

import pytest


@contextmanager
def chromium() -> Generator[Any]:
    found = shutil.which("chromium")
    if found is None:
        pytest.skip("no chromium on the PATH: the page was not opened in a browser")
    from playwright.sync_api import sync_playwright

    # It must not telephone home, either.
    flags = [
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
    ]
    flags += ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=found, args=flags)
        yield launched
        launched.close()


@contextmanager
def opened(
    launched: Any, path: Path, fragment: str = "", **options: Any
) -> Generator[Any]:
    """Open a page that must request nothing but itself and log no error."""
    trouble: list[str] = []
    asked: list[str] = []
    context = launched.new_context(offline=True, **options)
    page = context.new_page()
    page.on("console", lambda message: trouble.append(message.text))
    page.on("pageerror", lambda error: trouble.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(path.as_uri() + fragment)
    yield page
    context.close()
    assert trouble == []
    assert asked == [path.as_uri()]


def axe() -> str:
    """The script of axe-core, from the file in AXE_CORE or from a package."""
    if named := os.environ.get("AXE_CORE"):
        return Path(named).read_text("utf-8")
    try:
        return (resources.files("axe_playwright_python") / "axe.min.js").read_text(
            "utf-8"
        )
    except ModuleNotFoundError:
        pytest.skip(
            "no axe-core (pip install axe-playwright-python, or AXE_CORE=axe.min.js)"
        )
