"""The documentation site: what is gathered, what is built of it, what a browser makes of that."""

from __future__ import annotations

import html.parser
import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import api
import pages
import tiny_models as tiny

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"


def pinned(name: str) -> dict[str, str]:
    lines = (ROOT / name).read_text("utf-8").splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {package.lower().replace("_", "-"): version for package, version in pairs}


def test_the_lock_of_the_site_adds_to_the_lock_and_changes_nothing():
    assert "mkdocs-material" in pinned("requirements-docs.lock")
    assert (
        not pinned("requirements-docs.lock").keys() & pinned("requirements.lock").keys()
    )


def test_every_document_is_in_the_navigation_or_linked():
    text = (ROOT / "mkdocs.yml").read_text("utf-8").split("\nnot_in_nav:")[1]
    aside, nav = text.split("\nnav:\n")
    named = re.findall(r"[\w/-]+\.md", nav)
    assert len(re.findall(r"^  - ", nav, re.M)) <= 15
    for path in pages.documents():
        place = pages.place_of(path.relative_to(ROOT).as_posix())
        assert place in named or place in aside or f"{place.split('/')[0]}/" in aside, (
            place
        )


@pytest.mark.release
def test_gathered_links_lead_to_gathered_files(tmp_path):
    pages.gather(tmp_path)
    for path in tmp_path.rglob("*.md"):
        if path.relative_to(tmp_path).parts[0] == "api":
            continue  # docstrings, in which brackets are no links
        for target, _ in re.findall(
            r"\]\(([^)#\s]+)(#[^)]*)?\)", path.read_text("utf-8")
        ):
            if not target.startswith("http"):
                assert (path.parent / target).is_file(), f"{path.name}: {target}"
    assert not [*tmp_path.rglob("*.py"), *tmp_path.rglob("*.pyc")]
    assert (tmp_path / "source/src/keyhole/extract/single_head.py.txt").is_file()


@pytest.mark.parametrize("package", api.PACKAGES)
def test_the_python_reference_has_every_public_name(package):
    module = importlib.import_module(f"keyhole.{package}")
    page = api.page(package)
    names = getattr(module, "__all__", None) or api.exported(f"keyhole.{package}")
    for name in names:
        assert hasattr(module, name)
        assert f"\n## {name}\n" in page
    for name in api.public_names(package):
        if name.node is not None:  # and each leads to what the name really is
            assert getattr(module, name.name).__name__ == name.node.name


def test_the_python_reference_shows_signatures_and_docstrings():
    page = api.page("extract")
    assert "class SingleHead" in page
    assert "seed: int = 0" in page
    assert "- `steps(oracle: Oracle) -> Iterator[Step]`" in page
    assert "- `exposed: int`" in api.page("audit")  # a property
    assert "- `known` The share of the secret that is known." in api.page("core")
    assert "`src/keyhole/extract/single_head.py`" in page
    long = api.page("audit").split("## audit\n")[1]
    assert "audit(\n    target" in long
    assert "\n    processes: int = 0,\n" in long
    assert " Mapping[str, Oracle] " in long  # a comma that parts no parameters


@pytest.mark.release
def test_the_python_reference_imports_nothing_heavy():
    code = "import sys, api; api.pages(); print({'torch', 'keyhole', 'numpy'} & {*sys.modules})"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=DOCS,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "set()"


def threats() -> dict[str, str]:
    """The sections of the page of threats, by title."""
    parts = (DOCS / "threats.md").read_text("utf-8").split("\n## ")[1:]
    return {title: text for title, _, text in (part.partition("\n") for part in parts)}


def test_every_threat_has_a_picture_a_command_a_figure_and_a_fix():
    for title, text in threats().items():
        assert re.search(r"!\[.+\]\(drawings/[\w-]+\.svg\)", text), title
        for part in (
            "What the attacker needs.",
            "Try it",
            "Measured",
            "What helps, and how far.",
        ):
            assert f"**{part}" in text, f"{title}: {part}"
        assert "<!-- figures:" in text, title
        assert "\n$ keyhole " in text, title


@pytest.mark.release
@pytest.mark.parametrize("title", threats())
def test_the_commands_of_the_threats_run(title, tmp_path, keyhole):
    tiny.save("llama", tmp_path / "language-model", head="AutoModelForCausalLM")
    lines = re.findall(r"^\$ keyhole (.*)$", threats()[title], flags=re.M)
    codes = {line: keyhole(line).returncode for line in lines}
    for line, code in codes.items():
        tiny_stand_in = "./language-model" in line  # whose random weights say little
        assert code in ((0, 1, 3) if tiny_stand_in else (0, 1)), line
    if not title.startswith("Logits"):
        assert 1 in codes.values(), "nothing was given away"


class Resources(html.parser.HTMLParser):
    """What a page would fetch by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = {"link": "href", "script": "src", "img": "src", "iframe": "src"}
        if address := dict(attrs).get(names.get(tag, "")):
            self.fetched.append(address)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, built as `make docs` builds it, in another folder."""
    pytest.importorskip("mkdocs", reason="`make docs` installs MkDocs")
    folder = tmp_path_factory.mktemp("site")
    pages.gather(folder / "build" / "pages")
    shutil.copy(ROOT / "mkdocs.yml", folder)
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder / "site"


@pytest.mark.release
def test_no_page_of_the_site_fetches_anything(site):
    for path in site.rglob("*.html"):
        parser = Resources()
        parser.feed(path.read_text("utf-8"))
        assert parser.fetched
        assert not [address for address in parser.fetched if "//" in address], path.name


@pytest.mark.release
@pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium on the PATH")
def test_the_site_is_read_and_searched_from_a_disk(site):
    from playwright.sync_api import sync_playwright

    flags = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=flags
        )
        page = browser.new_page(viewport={"width": 1300, "height": 900})
        requests: list[str] = []
        errors: list[str] = []
        page.on("request", lambda request: requests.append(request.url))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto((site / "gradients.html").as_uri())
        page.keyboard.press("/")
        page.keyboard.type("clipping")
        page.wait_for_selector(".md-search-result__item")
        assert "gradients" in page.inner_text(".md-search-result__list").lower()
        picture = page.locator("img[src$='drawings/gradients.svg']")
        assert picture.evaluate("image => image.naturalWidth") > 300
        browser.close()
    assert not errors
    assert all(address.startswith("file:") for address in requests)
