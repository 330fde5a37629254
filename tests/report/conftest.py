"""A real browser for what people look at."""

from __future__ import annotations

import os
import shutil

import pytest


@pytest.fixture(scope="module")
def browser():
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("no chromium on the PATH: the page was not opened in a browser")
    from playwright.sync_api import sync_playwright

    # As root, Chromium has no sandbox to offer; and it must not telephone home.
    flags = ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
    flags += ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=chromium, args=flags)
        yield launched
        launched.close()
