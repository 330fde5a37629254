"""The sliders in a real browser show what `keyhole.cost.head` says."""

from __future__ import annotations

import base64
import hashlib
import os
import re
import shutil

import pytest
from playwright.sync_api import sync_playwright

from keyhole import cost
from keyhole.cost.widget import FORMULAS, render


def test_nothing_that_a_policy_would_refuse():
    html = render()
    assert not re.search(r"\son\w+\s*=|style=|eval\(|https?:|new Function", html)
    assert html.count("<script") == html.count("<style") == 1
    assert '<script nonce="a&quot;b">' in render('a"b')


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("no chromium on the PATH")
    html = render()
    script, style = (
        re.search(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)[1] for tag in ("script", "style")
    )
    policy = f"default-src 'none'; script-src '{digest(script)}'; style-src '{digest(style)}'"
    file = tmp_path_factory.mktemp("widget") / "page.html"
    file.write_text(
        f'<!doctype html><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}"><body>{html}</body>',
        "utf-8",
    )
    flags = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=flags)
        opened = browser.new_page()
        complaints = []
        opened.on("console", lambda message: complaints.append(message.text))
        opened.on("pageerror", lambda error: complaints.append(str(error)))
        opened.on("request", lambda request: complaints.append(request.url))
        opened.goto(file.as_uri())
        yield opened
        browser.close()
        assert complaints == [file.as_uri()]


def digest(text):
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def shown(page, **settings):
    for name, value in settings.items():
        slider = page.locator(f'[name="{name}"]')
        if name == "exposure":
            slider.select_option(value)
        elif slider.is_enabled():  # the others do not count
            slider.fill(str(value))
    cells = page.locator("[data-shown]").all()
    return {cell.get_attribute("data-shown"): cell.text_content() for cell in cells}


@pytest.mark.parametrize("exposure", FORMULAS)
@pytest.mark.parametrize("exponent", [3, 6, 11])
def test_a_slider_moves_what_is_shown(page, exposure, exponent):
    rank = 4 if exposure == "scores, low rank" else None
    name = exposure.partition(",")[0]
    estimate = cost.head(2**exponent, rank=rank, exposure=name, accuracy=1e-4)
    bill = cost.Prices(rate=1000, price=0.01, daily=10_000).of(estimate)
    cells = shown(
        page, exposure=exposure, width=exponent, rank=2, digits=4, rate=3, price=1, daily=4
    )
    queries = f"{estimate.queries:,}"
    if name == "signs":
        queries += f" ({estimate.low:,} to {estimate.high:,})"
    assert (cells["queries"], cells["floor"]) == (queries, f"{estimate.floor:,}")
    assert cells["tokens"] == f"{estimate.tokens:,}"
    for cell, number in (
        ("hours", bill.hours), ("money", bill.money), ("days", bill.days),
        ("least-days", bill.least_days),
    ):  # fmt: skip
        assert float(cells[cell].replace(",", "")) == pytest.approx(number, rel=6e-3), cell
