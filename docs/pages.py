"""Gather the pages of the documentation site in build/pages: `python docs/pages.py`.

In the repository, documents link to any file. In the site, a link to a document of the
root (CONTRIBUTING.md) leads to its page under project/, and a link to a source file to
a copy under source/. api.py adds the Python reference. The pages are plain Markdown and
mkdocs.yml has plain settings, so that another site generator can use both: Zensical,
which Material for MkDocs names as its successor, builds them unchanged.
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
    """Write every page, picture and linked source file, with the links of the site."""
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
    """Yield all documents but the README, which the start page replaces."""
    yield from sorted(DOCS.rglob("*.md"))
    yield from (path for path in sorted(ROOT.glob("*.md")) if path.name != "README.md")


def led(document: str, markdown: str) -> str:
    """Return a document with links to the places of their targets in the site."""
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
    """Return the linked file, relative to the root of the repository; None for an address."""
    if re.match(r"[a-z]+:", link):
        return None
    return posixpath.normpath(posixpath.join(posixpath.dirname(document), link))


def place_of(target: str) -> str:
    """Return the path in the site of a file of the repository."""
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
