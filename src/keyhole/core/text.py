"""Percentages, counts, and text from a target made safe for terminals, pages and Markdown.

Whoever controls a model's name, a stored text or a server's error message writes into
files that other programs show. Control characters steer terminals, and direction marks
make a line read differently from what it is; other format characters hide text inside
of text. So such characters are spelled out: on a terminal all that Python does not
print, on a page a list of the dangerous.
"""

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


def number(
    count: int,
    single: str,
    several: str,
) -> str:
    """Return a count with its noun, in singular or plural."""
    if count == 1:
        return f"1 {single}"
    return f"{count:,} {several}"


# such as Wales's
_FLAG = "\U0001f3f4[\U000e0030-\U000e0039\U000e0061-\U000e007a]{3,6}\U000e007f"
_INVISIBLE = re.compile(
    f"{_FLAG}|"
    "[\0-\x08\x0b-\x1f\x7f-\x9f"  # control characters except newlines and tabs
    # direction marks, joiners, invisible operators
    "\u061c\u200e\u200f\u202a-\u202e\u2060-\u206f"
    # breaks, shorthand, music
    "\xad\u180e\u200b\U0001bca0-\U0001bca3\U0001d173-\U0001d17a"
    "\u2028\u2029\ufeff\ufff9-\ufffb\U000e0000-\U000e007f"  # separators, marks, tags
    "\ud800-\udfff\ufffe\uffff]"  # code points that are no characters
)


def visible(text: str) -> str:
    """For a terminal: spell out whatever is not printable, except newlines and tabs."""
    if text.isprintable():
        return text
    return "".join(
        letter if letter.isprintable() or letter in "\n\t" else _escaped(letter)
        for letter in text
    )


def legible(text: str) -> str:
    """For a page: spell out `_INVISIBLE` characters, but keep what Persian and emoji need.

    These are zero-width joiners and non-joiners, which are not in the list, and the
    tags of a flag: a code of up to six letters and digits.
    """
    return _INVISIBLE.sub(
        lambda match: (
            match.group() if len(match.group()) > 1 else _escaped(match.group())
        ),
        text,
    )


def _escaped(letter: str) -> str:
    return ascii(letter)[1:-1]


_MAX_LENGTH = 1000  # characters of one field; the JSON file has all of them


def inert(text: str, max_length: int = _MAX_LENGTH) -> str:
    """One line of printable characters, shortened to `max_length`."""
    start = text[
        : 4 * max_length
    ]  # before the rest: the text may have a million characters
    shown = visible(" ".join(start.split()))
    is_whole = len(shown) <= max_length and start == text
    return shown if is_whole else f"{shown[:max_length]}…"


def as_code(text: str, max_length: int = _MAX_LENGTH) -> str:
    """Like `inert`, as a Markdown code span, in which no mention, link, reference or tag works.

    GitHub finds @name and #1 even after a backslash or as an entity, but not inside
    code. The two characters that could end the code span, or the table cell around it,
    become others that look like them.
    """
    shown = inert(text, max_length).replace("`", "'").replace("|", "¦")
    return f"`{shown}`" if shown else "–"
