"""The page: whole, escaped, and looked at by a real browser."""

from __future__ import annotations

import io
import os
import shutil
from dataclasses import replace

import pytest
from markupsafe import escape
from rich.console import Console

from keyhole import oracle, report
from keyhole.audit import Audit, Target, audit
from keyhole.oracle.target import demo
from keyhole.report import wording as sentences
from keyhole.results import Finding, Skip, Status
from keyhole.results.readings import Piece, Reading, Readings

HOSTILE = "<script>window.stolen = 1</script><img src=x onerror='window.stolen = 1'>"


@pytest.fixture(scope="module")
def found() -> Audit:
    return audit(Target("a planted head", {"": oracle.plant(dim=8, rank=2, seed=1)}))


def hostile(found: Audit) -> Audit:
    read = Reading(HOSTILE, (Piece(HOSTILE, "verified", True),), True, True)
    texts = (Readings("hidden", 1, HOSTILE, (read,)),)
    bad = [
        replace(finding, exposure=HOSTILE, reason=HOSTILE, surface=HOSTILE, texts=texts)
        for finding in found.findings
    ]
    skips = (Skip(HOSTILE, HOSTILE, HOSTILE),)
    return replace(found, target=HOSTILE, findings=tuple(bad), skips=skips)


def words(found: Audit) -> str:
    console = Console(width=200, file=io.StringIO())
    console.print(report.table(found))
    return console.file.getvalue()


def test_the_table_takes_nothing_for_markup(found):
    shout = replace(found.findings[0], exposure="[red]scores[/red]")
    assert "[red]scores[/red]" in words(replace(found, findings=(shout,)))


def test_the_page_says_what_was_found(found):
    page = report.render(found)
    assert "The weights can be read back through 5 of 6 exposures checked." in page
    for finding in found.findings:
        assert finding.exposure in page
        assert f"{finding.queries:,}" in page
        assert finding.reason in page
    assert "https://" not in page.split("plotly.js")[0]


def test_what_came_from_a_target_is_escaped(found):
    page = report.render(hostile(found))
    assert "<script>window.stolen" not in page
    assert "<img src=x" not in page


@pytest.mark.parametrize(
    ("findings", "sentence"),
    [
        ((), "Nothing was checked"),
        ((Status.NOT_IDENTIFIABLE,), "None of the 1 exposures checked gave anything away"),
        ((Status.ORACLE_FAILED,), "Could not check"),
        ((Status.INEXACT, Status.MISMATCH), "through 1 of 2 exposures"),
    ],
)
def test_verdicts(found, findings, sentence):
    made = tuple(
        Finding("scores", "SingleHead", status, "", "", None, 0, 0.0) for status in findings
    )
    empty = replace(found, findings=made)
    assert sentence in report.render(empty)
    assert sentence in words(empty)


def test_a_skip_is_shown(found):
    page = report.render(replace(found, skips=(Skip("vectors", "FullOutput", "no vectors"),)))
    assert "Not checked" in page
    assert "no vectors" in page


def read(found: Audit, right: int, of: int) -> Audit:
    """An audit with one finding: a text of which `right` tokens of `of` came back."""
    pieces = tuple(Piece(f" w{number}", "likely", number < right) for number in range(of))
    texts = (Readings("hidden", 1, "float32", (Reading("a text", pieces, False, False),)),)
    made = Finding(
        "hidden states of layer 1", "EncoderStates", Status.INEXACT,
        "chosen near its boundary: --data measures it", "train: keyhole harden --method sattend",
        None, 1, 0.0, known=texts[0].known, surface="the classifier in the box", sought="text",
        texts=texts,
    )  # fmt: skip
    return replace(found, findings=(made,))


@pytest.mark.parametrize(
    ("right", "of", "share"), [(8, 9, "89%"), (399, 400, ">99%"), (1, 400, "<1%"), (0, 4, "0%")]
)
def test_a_share_is_the_same_in_the_terminal_and_on_the_page(found, right, of, share):
    made = read(found, right, of)
    page = report.render(made)
    assert f" {share} of tokens" in words(made)
    assert f">{escape(share)} of tokens<" in page
    assert f"<b>{escape(share)}</b>" in page


def test_a_surface_brings_its_own_article(found):
    assert "EncoderStates on the classifier in the box<" in report.render(read(found, 1, 2))
    for name in demo():
        assert name.startswith("the ")


def test_an_option_in_a_sentence_is_escaped_and_kept_in_one_piece():
    written = sentences.unbroken("<b>: --json-file, a--b, -- c --data")
    assert written == (
        '&lt;b&gt;: <span class="option">--json-file</span>, a--b, -- c '
        '<span class="option">--data</span>'
    )


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


@pytest.mark.parametrize("kind", ["honest", "hostile"])
def test_a_browser_shows_it_without_errors_or_network(browser, found, tmp_path, kind):
    path = tmp_path / "page.html"
    path.write_text(report.render(found if kind == "honest" else hostile(found)))
    page = browser.new_page()
    trouble: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: trouble.append(message.text))
    page.on("pageerror", lambda error: trouble.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(path.as_uri())
    page.wait_for_selector("#error-against-queries .main-svg")
    assert trouble == []
    assert asked == [path.as_uri()]
    assert page.locator("#findings tbody tr").count() == len(found.findings)
    assert page.evaluate("window.stolen") is None
    lines = page.locator("#error-against-queries .scatterlayer .trace")
    assert lines.count() == len(found.findings)
    page.close()


_LINES = r"""() => {
  const found = [];
  const walker = document.createTreeWalker(document.querySelector("main"), NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    for (const match of walker.currentNode.data.matchAll(/--[a-z-]+/g)) {
      const range = document.createRange();
      range.setStart(walker.currentNode, match.index);
      range.setEnd(walker.currentNode, match.index + match[0].length);
      const lines = new Set([...range.getClientRects()].map(one => Math.round(one.top)));
      found.push([match[0], lines.size]);
    }
  }
  return found;
}"""


def test_a_browser_breaks_no_option(browser, found, tmp_path):
    path = tmp_path / "page.html"
    path.write_text(report.render(read(found, 1, 2)))
    page = browser.new_page()
    page.goto(path.as_uri())
    for width in range(400, 1300, 20):
        page.set_viewport_size({"width": width, "height": 600})
        assert page.evaluate(_LINES) == [["--data", 1], ["--method", 1]]
    page.close()
