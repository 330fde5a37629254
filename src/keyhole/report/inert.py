"""Text from targets, servers and saved files, made to do nothing wherever it is shown.

Whoever controls a model's name, a text or a server's error writes into files that other programs
show. What cannot be seen (control characters, escapes of terminals, marks that turn the direction
of writing, halves of surrogate pairs) is spelled out, so that it reads as what it is.
"""

from __future__ import annotations

from keyhole.core.text import visible

LONGEST = 1000  # letters of one field; the JSON file has all of them


def inert(text: str, longest: int = LONGEST) -> str:
    """One line of printable characters, cut off where it is too long."""
    shown = visible(
        " ".join(text[: 4 * longest].split())
    )  # cut first: it may have a million letters
    return shown if len(shown) <= longest and len(text) <= 4 * longest else f"{shown[:longest]}…"


def as_code(text: str, longest: int = LONGEST) -> str:
    """The same for Markdown: a code span, in which no mention, link, reference or tag works.

    Neither a backslash nor an entity keeps GitHub from taking @name for a person or #1 for an
    issue; inside code nothing looks for them. The two characters that could end the span or the
    cell of a table around it are replaced by others that look alike.
    """
    shown = inert(text, longest).replace("`", "'").replace("|", "¦")
    return f"`{shown}`" if shown else "–"
