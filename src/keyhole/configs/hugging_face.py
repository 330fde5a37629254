"""Settings of a Hugging Face model that make every pass return more than its answer."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, cast

from keyhole.configs.finding import Hit, Level, Rule, Source, Unreadable
from keyhole.core.files import parse

HIDDEN_STATES = Rule(
    "KH-CONFIG-HF-HIDDEN-STATES", "A model returns its hidden states", Level.HIGH,
    "every pass returns the hidden states of all layers; texts are read back from any of them",
    "set output_hidden_states to false, and ask for it where it is needed",
    "keyhole audit FOLDER --data TEXTS.txt",
)  # fmt: skip
ATTENTIONS = Rule(
    "KH-CONFIG-HF-ATTENTIONS", "A model returns its attention maps", Level.HIGH,
    "every pass returns the attention maps of all layers; those of the first give the text away",
    "set output_attentions to false, and ask for it where it is needed",
    "keyhole audit FOLDER --data TEXTS.txt",
)  # fmt: skip
SCORES = Rule(
    "KH-CONFIG-HF-SCORES", "Generation returns scores of the whole vocabulary", Level.MEDIUM,
    "generate() returns scores for every token of the vocabulary; the last layer is read from them",
    "set output_scores and output_logits to false",
    "keyhole extract FOLDER --method output-layer",
)  # fmt: skip
RULES = (HIDDEN_STATES, ATTENTIONS, SCORES)
WORDS = ("output_hidden_states", "output_attentions", "output_scores", "output_logits")
_ALONE = {"output_hidden_states": HIDDEN_STATES, "output_attentions": ATTENTIONS}


def look(source: Source) -> Iterator[Hit]:
    """Settings that are on, wherever they stand: parts of a model have settings of their own."""
    try:
        settings: Any = parse(source.text)
    except ValueError as error:
        raise Unreadable(f"expected JSON, got {error}") from error
    on = set(_names_that_are_on(settings))
    told = isinstance(settings, dict) and cast("dict[str, Any]", settings).get(
        "return_dict_in_generate"
    )
    for match in re.finditer(r'"(\w+)"\s*:\s*true\b', source.text):
        name, line = match[1], source.line_at(match.start())
        if name in on and name in _ALONE:
            yield Hit(_ALONE[name], line, f"{name}: true")
        elif name in on and name in WORDS and told is True:
            yield Hit(SCORES, line, f"{name}: true, with return_dict_in_generate")


def _names_that_are_on(settings: Any) -> Iterator[str]:
    waiting = [settings]
    while waiting:
        here = waiting.pop()
        if isinstance(here, dict):
            for name, value in cast("dict[str, Any]", here).items():
                if value is True:
                    yield name
                waiting.append(value)
        elif isinstance(here, list):
            waiting += cast("list[Any]", here)
