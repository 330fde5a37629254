"""Shell text as simple commands of words, each with the line it stands on; nothing is expanded.

Quotes, comments, continued lines and the operators between commands are understood; variables stay
as they are written.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_SPACE, _ENDS = " \t", ";&|()\n"


@dataclass(frozen=True)
class Word:
    text: str
    line: int


def simple_commands(text: str, line: int = 1) -> list[list[Word]]:
    """The words of each command of a script; `line` is that of the text's first line."""
    return _Reader(text, line).commands()


def quoted_items(text: str, line: int) -> list[Word]:
    """The strings of a list such as ["a", "b"], as Dockerfiles have them."""
    return [
        Word(re.sub(r"\\(.)", r"\1", match[1]), line + text.count("\n", 0, match.start()))
        for match in re.finditer(r'"((?:[^"\\]|\\.)*)"', text, re.DOTALL)
    ]


class _Reader:
    def __init__(self, text: str, line: int) -> None:
        self.text, self.at, self.line = text, 0, line
        self.made: list[list[Word]] = [[]]

    def commands(self) -> list[list[Word]]:
        while self.at < len(self.text):
            sign = self.text[self.at]
            if sign in _SPACE or self.text.startswith("\\\n", self.at):
                self._skip(2 if sign == "\\" else 1)
            elif sign in _ENDS:
                self._skip(1)
                if self.made[-1]:
                    self.made.append([])
            elif sign == "#":
                end = self.text.find("\n", self.at)
                self.at = len(self.text) if end < 0 else end
            else:
                self.made[-1].append(self._word())
        return [words for words in self.made if words]

    def _skip(self, count: int) -> str:
        part = self.text[self.at : self.at + count]
        self.line += part.count("\n")
        self.at += count
        return part

    def _word(self) -> Word:
        line, parts = self.line, list[str]()
        while self.at < len(self.text):
            sign = self.text[self.at]
            opens = sign == "(" and bool(parts) and parts[-1] == "$"
            if sign in _SPACE or (sign in _ENDS and not opens):
                break
            if sign in "'\"":
                parts.append(self._quoted(sign))
            elif sign == "\\":
                escaped = self._skip(2)[1:]
                parts.append("" if escaped == "\n" else escaped)
            else:
                parts.append(self._skip(1))
        return Word("".join(parts), line)

    def _quoted(self, mark: str) -> str:
        self._skip(1)
        parts = list[str]()
        while self.at < len(self.text) and self.text[self.at] != mark:
            if self.text[self.at] == "\\" and mark == '"':
                escaped = self._skip(2)[1:]
                parts.append("" if escaped == "\n" else escaped)
            else:
                parts.append(self._skip(1))
        self._skip(1)
        return "".join(parts)
