"""Shares and foreign text as people read them, in one way everywhere."""

from __future__ import annotations

import re


def percent(share: float, decimals: int = 0) -> str:
    """0.888 is "89%" or "88.8%"; 0.999 is ">99%" and 0.001 "<1%": neither all nor nothing."""
    step = 10.0**-decimals
    written = f"{share:.{decimals}%}"
    if share < 1 and written == f"{100:.{decimals}f}%":
        return f">{100 - step:.{decimals}f}%"
    if share > 0 and written == f"{0:.{decimals}f}%":
        return f"<{step:.{decimals}f}%"
    return written


# Text that came from a target, made harmless to look at: what cannot be seen is spelled out.
#
# Whoever controls a model's name, a text or a server's error writes into files that other programs
# show. Control characters steer terminals, and marks of direction make a line read as another than
# it is.

_UNSEEN = re.compile(
    "[\0-\x08\x0b-\x1f\x7f-\x9f"  # control characters, all but the ends of lines and tabs
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # marks of direction
    "\u2028\u2029\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\ufffe\uffff]"  # no characters at all
)


def visible(text: str) -> str:
    """For a terminal: everything that is not printed is spelled out, but ends of lines and tabs."""
    if text.isprintable():
        return text
    return "".join(
        letter if letter.isprintable() or letter in "\n\t" else _spelled(letter) for letter in text
    )


def legible(text: str) -> str:
    """For a page, where letters may be joined by signs of no width, as Persian and emoji are."""
    return _UNSEEN.sub(lambda match: _spelled(match.group()), text)


def _spelled(letter: str) -> str:
    return ascii(letter)[1:-1]


_MAX_LENGTH = 1000  # letters of one field; the JSON file has all of them


def inert(text: str, max_length: int = _MAX_LENGTH) -> str:
    """One line of printable characters, cut off where it is too long."""
    start = text[: 4 * max_length]  # cut first: it may have a million letters
    shown = visible(" ".join(start.split()))
    whole = len(shown) <= max_length and start == text
    return shown if whole else f"{shown[:max_length]}…"


def as_code(text: str, max_length: int = _MAX_LENGTH) -> str:
    """The same for Markdown: a code span, in which no mention, link, reference or tag works.

    Neither a backslash nor an entity keeps GitHub from taking @name for a person or #1 for an
    issue; inside code nothing looks for them. The two characters that could end the span or the
    cell of a table around it are replaced by others that look alike.
    """
    shown = inert(text, max_length).replace("`", "'").replace("|", "¦")
    return f"`{shown}`" if shown else "–"
