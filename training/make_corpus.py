"""Make the corpus that ships: what a pooled embedding is read with where nobody gives another.

    python training/make_corpus.py

writes src/keyhole/recover/embeddings/corpus.txt, one sentence a line: the everyday sentences
(everyday.txt, written for this purpose), then the sentences of our own documents,
without code, tables, pictures and what `make docs` generates. A sentence that has three words in a
row with a text that the demo reads back is left out: the demo must not find its answers there.
"""

from __future__ import annotations

import re
from pathlib import Path

from keyhole.models import demo
from keyhole.recover.embeddings.counts import SHIPPED

HERE = Path(__file__).parent
ROOT = HERE.parent
GENERATED = {"cli.md", "methods.md"}
SHORTEST, LONGEST, RUN = 3, 40, 3  # words


def main() -> None:
    everyday = (HERE / "everyday.txt").read_text("utf-8").splitlines()
    documents = [path for path in documents_of(ROOT) if path.name not in GENERATED]
    written = [line for path in documents for line in sentences(path.read_text("utf-8"))]
    secret = {run for text in (*demo.TEXTS, *demo.NOTES) for run in runs(text)}
    lines = [line for line in dict.fromkeys([*everyday, *written]) if not runs(line) & secret]
    SHIPPED.write_text("\n".join(lines) + "\n", "utf-8")
    print(f"{SHIPPED}: {len(lines):,} sentences")


def documents_of(root: Path) -> list[Path]:
    return [*sorted(root.glob("*.md")), *sorted((root / "docs").glob("*.md"))]


def sentences(document: str) -> list[str]:
    """The sentences of a document in Markdown, as they are read aloud."""
    text = re.sub(r"^```.*?^```", "", document, flags=re.M | re.S)
    text = re.sub(r"^(\||#|!\[|\$).*$", "", text, flags=re.M)
    text = re.sub(r"^( *[-*]| *\d+\.) ", "\n\n", text, flags=re.M)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"[`*]", "", text)
    paragraphs = (" ".join(part.split()) for part in re.split(r"\n\s*\n", text))
    split = (line for part in paragraphs for line in re.split(r"(?<=[.?!])\s+(?=[A-Z])", part))
    return [line for line in split if SHORTEST <= len(line.split()) <= LONGEST and plain(line)]


def plain(line: str) -> bool:
    """A sentence in words: it ends like one, and next to nothing in it is a sign or a path."""
    signs = sum(not (sign.isalpha() or sign in " ,.'’-?!") for sign in line)
    return line[-1] in ".?!" and line[0].isalpha() and signs <= len(line) / 20


def runs(text: str) -> set[tuple[str, ...]]:
    """All runs of so many words, whatever their case."""
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[start : start + RUN]) for start in range(len(words) - RUN + 1)}


if __name__ == "__main__":
    main()
