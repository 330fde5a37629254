"""The page in a browser: first screens, folds, links, keys, print and accessibility."""

from __future__ import annotations

from dataclasses import replace

import pytest

import hostile_audit
from browser import axe, chromium, opened
from exposures import called
from keyhole import oracle, report
from keyhole.assess import assess
from keyhole.audit import Audit, audit
from keyhole.audit.target import target_of
from keyhole.core import Cut, Finding, Remedied, Skip, Status
from keyhole.core.finding import Piece, Reading, Readings

pytestmark = pytest.mark.release  # a browser takes seconds to start
DESK = {"width": 1400, "height": 900}
PHONE = {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def browser():
    with chromium() as launched:
        yield launched


BOX = "the classifier in the box"


def text_finding(layer: int) -> Finding:
    marks = [
        ("verified", True),
        ("likely", True),
        ("likely", False),
        ("unknown", False),
    ] * 3
    pieces = tuple(
        Piece(f" w{n}", mark, right) for n, (mark, right) in enumerate(marks)
    )
    read = Reading("a text as long as people write them", pieces, True, True)
    names = ("float32", "bfloat16", "int8", "noise of 10%")
    cells = tuple(Readings("hidden", layer, name, (read,) * 3) for name in names)
    return Finding(
        called(f"hidden states of layer {layer}", BOX),
        "EncoderStates",
        Status.INEXACT,
        "3 of 3 texts: --data measures it",
        "Do not return hidden states: --layers all",
        None,
        3,
        1.5,
        known=0.5,
        sought="text",
        texts=cells,
    )


def every_kind() -> Audit:
    """An audit with findings of all four families, a control and a skip."""
    head = {"the scoring head": oracle.plant(dim=8, rank=2, seed=1)}
    planted = audit(replace(target_of(head), name="it"))
    inverted = Finding(
        called("a layer's output", "the attention layer"),
        "Auto",
        Status.RECOVERED,
        "residual 1e-16",
        "Keep outputs inside.",
        1e-11,
        1,
        0.1,
        known=1.0,
        sought="input",
    )
    tokens = tuple(f"w{n}" for n in range(20))
    cut = Cut(
        tokens, "bad", "good", 0.9, 0.4, 0.01, 12, 12, ((0, 0, 1, 2), (3, 4, 5, 6))
    )
    flipped = Finding(
        called("1% of all attention cut", BOX),
        "HackAttend",
        Status.INEXACT,
        "7 of 12",
        "Take no masks.",
        None,
        652,
        2.0,
        known=0.58,
        sought="prediction",
        cuts=(cut,),
        remedied=(
            Remedied(
                "keyhole harden: a trained copy", 0.0, "0 of 8 right answers flipped"
            ),
        ),
    )
    control = replace(
        flipped,
        exposure=called("1% of all attention cut at random", BOX),
        control=True,
        remedied=(),
    )
    texts = [text_finding(layer) for layer in (1, 6, 12)]
    skip = Skip(
        called("hidden states"),
        "none",
        "3 of 12 layers were tried; --layers all",
        layers=(2, 3, 4, 5),
    )
    found = (*planted.findings, inverted, *texts, flipped, control)
    return replace(
        planted, target="a model and its server", findings=found, skips=(skip,)
    )


@pytest.fixture(scope="module")
def made():
    return every_kind()


@pytest.fixture(scope="module")
def path(made, tmp_path_factory):
    file = tmp_path_factory.mktemp("page") / "page.html"
    file.write_text(report.render(made), "utf-8")
    return file


_BOTTOM = "name => document.querySelector(name).getBoundingClientRect().bottom"
_WIDTH = "document.documentElement.scrollWidth"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [DESK, PHONE], ids=["desk", "phone"])
def test_the_first_screen_has_the_verdict_and_four_cards(
    browser, path, size, scheme, tmp_path
):
    with opened(browser, path, viewport=size, color_scheme=scheme) as page:
        picture = page.screenshot(path=tmp_path / "first.png")
        assert len(picture) > 10_000
        assert page.locator(".card").count() == 4
        assert 0 < page.evaluate(_BOTTOM, ".verdict") < page.evaluate(_BOTTOM, ".cards")
        assert page.evaluate(_BOTTOM, ".cards") <= size["height"]
        assert page.evaluate(_WIDTH) == size["width"]  # nothing to scroll sideways
        page.evaluate(
            "for (const fold of document.querySelectorAll('details')) fold.open = true"
        )
        assert page.evaluate(_WIDTH) == size["width"]
        dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (dark == "rgb(22, 21, 20)") == (scheme == "dark")


def test_long_names_and_remedies_leave_the_cards_on_a_phones_first_screen(
    browser, made, tmp_path
):
    long = "Treat it as the text itself: add noise or sum it over clients before anybody sees it."
    findings = tuple(
        replace(
            finding,
            remedy=long,
            exposure=replace(finding.exposure, part="what ships with Keyhole"),
        )
        for finding in made.findings
    )
    file = tmp_path / "page.html"
    file.write_text(report.render(replace(made, findings=findings)), "utf-8")
    with opened(browser, file, viewport=PHONE) as page:
        assert page.evaluate(_BOTTOM, ".cards") <= PHONE["height"]


@pytest.mark.parametrize("script", [True, False], ids=["script", "no script"])
def test_a_permalink_shows_its_finding(browser, path, made, script):
    item = assess(made).items[-1]
    options = {"viewport": DESK, "java_script_enabled": script}
    with opened(
        browser, path, **options
    ) as page:  # texts that were read are shown as it opens
        before = page.locator("details .reason:visible").count()
        assert before == 3
    with opened(browser, path, f"#{item.id}", **options) as page:
        fold = page.locator(f'details[id="{item.id}"]')
        assert fold.locator(".reason").is_visible()
        assert fold.bounding_box()["y"] < DESK["height"]
        assert page.locator("details .reason:visible").count() == before + 1
        assert fold.locator("button").is_visible() == script


def test_a_link_is_copied(browser, path, made):
    item = assess(made).items[0]
    permissions = ["clipboard-read", "clipboard-write"]
    with opened(browser, path, f"#{item.id}", permissions=permissions) as page:
        page.locator(f'details[id="{item.id}"] button').click()
        page.get_by_role("button", name="Copied").wait_for()
        assert page.evaluate("navigator.clipboard.readText()").endswith(
            f"page.html#{item.id}"
        )


def test_the_keyboard_is_enough(browser, path, made):
    with opened(browser, path, viewport=DESK) as page:
        reached = []
        for _ in range(300):
            page.keyboard.press("Tab")
            tag, place = page.evaluate(
                "(() => { const on = document.activeElement; return [on.tagName,"
                " on.tagName === 'SUMMARY' ? on.parentElement.id : on.getAttribute('href')]; })()"
            )
            reached.append(place)
            if tag == "SUMMARY":
                break
        assert reached[0] == "#findings"  # the way past everything
        assert {"#matrix", "#family-weights", "#family-text", "#about"} <= set(reached)
        fold = page.locator(f'details[id="{reached[-1]}"]')
        assert not fold.locator(".inside").is_visible()
        page.keyboard.press("Enter")
        assert fold.locator(".inside").is_visible()
        outline = "getComputedStyle(document.activeElement).outlineStyle"
        assert page.evaluate(outline) == "solid"  # where one is can be seen


def test_print_unfolds_everything(browser, path, made, tmp_path):
    with opened(browser, path, viewport=DESK) as page:
        page.emulate_media(media="print")
        visible = page.locator("details .reason:visible").count()
        assert visible == len(made.findings)
        assert not page.locator(".contents").is_visible()
        assert len(page.pdf(path=tmp_path / "print.pdf")) > 10_000


@pytest.mark.parametrize(("size", "scheme"), [(DESK, "light"), (PHONE, "dark")])
def test_axe_finds_no_fault(browser, made, size, scheme, tmp_path):
    script = axe()
    file = tmp_path / "page.html"
    some = {
        finding.sought: finding for finding in made.findings
    }  # one of each family is enough
    file.write_text(
        report.render(replace(made, findings=(*some.values(), text_finding(6))))
    )
    options = {"viewport": size, "color_scheme": scheme}
    with opened(browser, file, bypass_csp=True, **options) as page:
        page.evaluate(
            "for (const fold of document.querySelectorAll('details')) fold.open = true"
        )
        page.evaluate(script)
        result = page.evaluate("axe.run()")
        assert len(result["passes"]) > 20
        faults = result["violations"]
        found = [
            (f["impact"], f["id"], [n["html"][:200] for n in f["nodes"][:3]])
            for f in faults
        ]
        assert not found, found


def test_hostile_strings_stay_strings(browser, tmp_path):
    file = tmp_path / "page.html"
    hostile_audit.audit().save(tmp_path / "audit.json")
    file.write_text(report.render(Audit.load(tmp_path / "audit.json")), "utf-8")
    with opened(browser, file, viewport=PHONE) as page:
        assert page.evaluate("[window.stolen, document.images.length]") == [None, 0]
        links = page.eval_on_selector_all(
            "a", "all => all.map(a => a.getAttribute('href'))"
        )
        assert all(link.startswith("#") for link in links)
        page.evaluate(
            "for (const fold of document.querySelectorAll('details')) fold.open = true"
        )
        assert page.evaluate(_WIDTH) == PHONE["width"]


def test_the_policy_stops_what_would_get_in(browser, path, tmp_path):
    """A script that somehow got into the page is not run by a browser."""
    bad = tmp_path / "bad.html"
    text = path.read_text("utf-8")
    strange = "<script>window.stolen = 1</script><img src='https://example.org/x.png'>"
    bad.write_text(text.replace("<main>", f"<main>{strange}"), "utf-8")
    console: list[str] = []
    page = browser.new_page()
    page.on("console", lambda message: console.append(message.text))
    page.goto(bad.as_uri())
    assert page.evaluate("window.stolen") is None
    assert sum("Content Security Policy" in line for line in console) >= 2
    page.close()


def test_five_hundred_findings(browser, made, tmp_path):
    many = [
        replace(
            finding, exposure=replace(finding.exposure, part=f"{finding.part} {copy}")
        )
        for copy in range(-(-500 // len(made.findings)))
        for finding in made.findings
    ][:500]
    file = tmp_path / "page.html"
    file.write_text(report.render(replace(made, findings=tuple(many))), "utf-8")
    assert file.stat().st_size < 15_000_000
    with opened(browser, file, viewport=DESK) as page:
        assert page.locator("details").count() == 500
        ids = page.eval_on_selector_all("[id]", "all => all.map(e => e.id)")
        assert len(set(ids)) == len(ids)
        assert page.evaluate(_BOTTOM, ".cards") <= DESK["height"]


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


def test_no_option_is_broken(browser, made, tmp_path):
    file = tmp_path / "page.html"
    file.write_text(
        report.render(replace(made, findings=(text_finding(1),), skips=())), "utf-8"
    )
    with opened(browser, file) as page:
        page.evaluate(
            "for (const fold of document.querySelectorAll('details')) fold.open = true"
        )
        for width in range(400, 1300, 60):
            page.set_viewport_size({"width": width, "height": 600})
            assert page.evaluate(_LINES) == [["--data", 1], ["--layers", 1]]
