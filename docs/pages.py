"""The pages of the documentation site, gathered in build/pages: `python docs/pages.py`.

The documents are read on a forge too, where links go to any file of the repository. In the site a
link to a document of the root (CONTRIBUTING.md) leads to its page under project/, one to a source
file to a copy of it under source/; the Python reference is made here (api.py). What is gathered is
plain Markdown and mkdocs.yml plain settings, so that another generator of sites can take both:
Zensical, which Material for MkDocs names as its successor, builds them as they are.
"""

from __future__ import annotations

import posixpath
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import api

DOCS = Path(__file__).parent
ROOT = DOCS.parent
PAGES = ROOT / "build" / "pages"
LINK = re.compile(r"(\]\()([^)#\s]+)(#[^)\s]*)?(\))")


def gather(folder: Path = PAGES) -> None:
    """Every page, picture and linked source file, with links as they are in the site."""
    shutil.rmtree(folder, ignore_errors=True)
    for path in sorted(DOCS.rglob("*")):
        if path.is_file() and path.suffix not in (".md", ".py", ".pyc"):
            _copy(path, folder / path.relative_to(DOCS))
    for place, text in api.pages().items():
        _write(folder / place, text)
    for path in documents():
        target = path.relative_to(ROOT).as_posix()
        text = path.read_text("utf-8")
        _write(folder / place_of(target), led(target, text))
        for source in linked(target, text):
            if place_of(source).startswith("source/"):
                _copy(ROOT / source, folder / place_of(source))


def documents() -> Iterator[Path]:
    """All documents but the README, whose place the start page takes."""
    yield from sorted(DOCS.rglob("*.md"))
    yield from (path for path in sorted(ROOT.glob("*.md")) if path.name != "README.md")


def led(document: str, markdown: str) -> str:
    """A document whose links lead to where their targets are in the site."""
    here = posixpath.dirname(place_of(document)) or "."

    def lead(link: re.Match[str]) -> str:
        if (target := meant(document, link[2])) is None:
            return link[0]
        return f"{link[1]}{posixpath.relpath(place_of(target), here)}{link[3] or ''}{link[4]}"

    return LINK.sub(lead, markdown)


def linked(document: str, markdown: str) -> Iterator[str]:
    for link in LINK.finditer(markdown):
        if target := meant(document, link[2]):
            yield target


def meant(document: str, link: str) -> str | None:
    """The file that a document's link means, from the root of the repository; None: an address."""
    if re.match(r"[a-z]+:", link):
        return None
    return posixpath.normpath(posixpath.join(posixpath.dirname(document), link))


def place_of(target: str) -> str:
    """Where a file of the repository is in the site."""
    if target.startswith("docs/"):
        return target.removeprefix("docs/")
    if target == "README.md":
        return "index.md"
    if target.endswith(".md") and "/" not in target:
        return f"project/{target}"
    return f"source/{target}.txt"


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)


def _write(target: Path, text: str) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text, "utf-8")


if __name__ == "__main__":
    gather()
