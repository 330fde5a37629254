"""A server that configurations start: how it is recognised in a command, and what it is told."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from keyhole.configs.command import Command, Options
from keyhole.configs.finding import Hit, Rule
from keyhole.configs.words import Word

# What may stand before a program that is run; other words are prose, or install or stop it.
_WRAPPERS = re.compile(
    r"python[\d.]*|numactl|taskset|nice|gosu|tini|dumb-init|chrt|stdbuf|timeout|env|exec|sudo|uv|uvx|"
    r"poetry|conda|srun|mpirun|torchrun|nsys|xvfb-run|if|while|until|then|do|else|!|\{"
)


@dataclass(frozen=True)
class Program:
    """`starts` are the ways to start it, as words in a row, the first without its folder; `image`
    matches the container image whose own program it is; `words` are in every such file."""

    name: str
    words: tuple[str, ...]
    starts: tuple[tuple[str, ...], ...]
    image: re.Pattern[str]
    rules: tuple[Rule, ...]
    look: Callable[[Options], Iterator[Hit]]

    def options(self, command: Command) -> Options | None:
        """What the command tells the program, if it starts it."""
        words = command.words
        for place, word in enumerate(words):
            here = (
                word.text.rpartition("/")[2],
                *(more.text for more in words[place + 1 : place + 3]),
            )
            for start in self.starts:
                if here[: len(start)] == start and _is_run(command, place, len(start)):
                    return self._told(command, word, place + len(start))
            if command.container and self.image.search(word.text) and word.text[0] != "-":
                return self._told(command, word, place + 1)
        if command.image is not None and self.image.search(command.image.text):
            return self._told(command, command.image, 0)
        return None

    def _told(self, command: Command, program: Word, place: int) -> Options:
        image = command.image or (program if self.image.search(program.text) else None)
        return Options(
            program, command.words[place:], command.env, command.local, image, command.mounts
        )


def _is_run(command: Command, place: int, length: int) -> bool:
    """Whether the words at a place are run, and not written about, installed or stopped.

    A program of one word takes options alone: other words after it make a sentence.
    """
    words = command.words
    first = words[0].text.rpartition("/")[2]
    after = words[place + length].text if place + length < len(words) else "-"
    runs = place == 0 or command.container or bool(_WRAPPERS.fullmatch(first))
    return runs and (length > 1 or after.startswith(("-", "$", "{{")))
