"""What MkDocs is told besides mkdocs.yml: pages that lie elsewhere, and links that lead there.

The documents are read on a forge too, where links go to any file of the repository. In the site a
link to a document of the root (CONTRIBUTING.md) leads to its page under project/, one to a source
file to a copy of it under source/; the Python reference (api.py) is made while the site is built.
A document in docs/ that mkdocs.yml does not name joins the section "In depth" by itself.
"""

from __future__ import annotations

import posixpath
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

DOCS = Path(__file__).parent
ROOT = DOCS.parent
sys.path.insert(0, str(DOCS))
import api  # beside this file, wherever MkDocs was started

LINK = re.compile(r"(\]\()([^)#\s]+)(#[^)\s]*)?(\))")


def on_config(config: Any) -> Any:
    sections = {title: pages for entry in config.nav for title, pages in entry.items()}
    named = set(re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text("utf-8")))
    unnamed = sorted(path.name for path in DOCS.glob("*.md") if path.name not in named)
    sections["In depth"].extend(unnamed)
    reference = sections["Reference"]
    where = next(number for number, entry in enumerate(reference) if "Python" in entry)
    modules = [{f"keyhole.{name}": f"api/{name}.md"} for name in api.PACKAGES]
    reference[where] = {"Python": ["api/index.md", *modules]}
    return config


def on_files(files: Files, config: Any) -> Files:
    for place, text in api.pages().items():
        files.append(File.generated(config, place, content=text))
    for path in sorted(ROOT.glob("*.md")):
        if path.name != "README.md":  # whose place the start page takes
            place = f"project/{path.name}"
            files.append(File.generated(config, place, content=path.read_text("utf-8")))
    sources = {
        target
        for file in files.documentation_pages()
        for target in linked(file.src_uri, file.content_string)
        if place_of(target).startswith("source/")
    }
    for target in sorted(sources):
        text = (ROOT / target).read_text("utf-8")
        files.append(File.generated(config, place_of(target), content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links as they are in the repository, led to where the target is in the site."""
    here = page.file.src_uri

    def led(found: re.Match[str]) -> str:
        if (target := in_repository(here, found[2])) is None:
            return found[0]
        there = posixpath.relpath(place_of(target), posixpath.dirname(here) or ".")
        return f"{found[1]}{there}{found[3] or ''}{found[4]}"

    return LINK.sub(led, markdown)


def linked(here: str, markdown: str) -> Iterator[str]:
    for found in LINK.finditer(markdown):
        if target := in_repository(here, found[2]):
            yield target


def in_repository(here: str, link: str) -> str | None:
    """The file that a link of a page means, from the root; None for addresses."""
    if re.match(r"[a-z]+:", link) or here.startswith("api/"):
        return None
    home = "" if here.startswith("project/") else posixpath.join("docs", posixpath.dirname(here))
    return posixpath.normpath(posixpath.join(home, link))


def place_of(target: str) -> str:
    """Where a file of the repository is in the site."""
    if target.startswith("docs/"):
        return target.removeprefix("docs/")
    if target == "README.md":
        return "index.md"
    if target.endswith(".md") and "/" not in target:
        return f"project/{target}"
    return f"source/{target}.txt"
