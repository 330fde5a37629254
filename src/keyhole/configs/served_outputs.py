"""Model repositories of MLServer and Triton: what an endpoint returns, by the names of its outputs.

A name is a claim and no proof: `keyhole audit` of the endpoint tells what really comes back.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, cast

from keyhole.configs.finding import Hit, Level, Rule, Source, Unreadable
from keyhole.core.files import parse

_AUDIT = "keyhole audit http://HOST:8080/v2/models/NAME --model MODEL"
_SCORE = "return a score or a label"

STATES = Rule(
    "KH-CONFIG-SERVED-STATES", "An endpoint returns a vector for every token", Level.HIGH,
    "texts are read back from hidden states of any layer",
    f"leave that output out; {_SCORE}", _AUDIT,
)  # fmt: skip
MAPS = Rule(
    "KH-CONFIG-SERVED-MAPS", "An endpoint returns attention maps", Level.HIGH,
    "texts are read back from attention maps, those of the first layer in closed form",
    f"leave that output out; {_SCORE}", _AUDIT,
)  # fmt: skip
CACHE = Rule(
    "KH-CONFIG-SERVED-CACHE", "An endpoint returns keys and values", Level.HIGH,
    "texts are read back from keys and values, those of the first layer by a table",
    "keep the cache inside the server", _AUDIT,
)  # fmt: skip
VECTOR = Rule(
    "KH-CONFIG-SERVED-EMBEDDING", "An endpoint returns a vector for a text", Level.MEDIUM,
    "short texts are read back from their embeddings",
    "treat embeddings as the texts, wherever they are kept", _AUDIT,
)  # fmt: skip
LOGITS = Rule(
    "KH-CONFIG-SERVED-LOGITS", "An endpoint returns logits", Level.LOW,
    "scores of full precision are what attacks on weights read",
    f"{_SCORE}; count queries per client", _AUDIT,
)  # fmt: skip
RULES = (STATES, MAPS, CACHE, VECTOR, LOGITS)
# By the names that exporters and the libraries themselves give; the first that matches counts.
_NAMES = (
    (re.compile(r"(past|present)[._]?key|key_values|kv_?cache|^(past|present)\.\d"), CACHE),
    (re.compile(r"attentions?([._]\d+|_?(maps?|probs?|weights|scores))?$"), MAPS),
    (re.compile(r"hidden_?states?|token_?(embed|vector)|encoder_out(put)?s?$"), STATES),
    (re.compile(r"embeddings?$|pooler_output|sentence_vector"), VECTOR),
    (re.compile(r"logits|logprobs|log_probs"), LOGITS),
)
WORDS = ("hidden", "attention", "key", "past", "present", "cache", "embed", "pool", "vector",
         "encoder_out", "logits", "prob", "feature-extraction")  # fmt: skip


def look_at_mlserver(source: Source) -> Iterator[Hit]:
    """model-settings.json: the outputs it lists, and the task of the Hugging Face runtime."""
    try:
        settings: Any = parse(source.text)
    except ValueError as error:
        raise Unreadable(f"expected JSON, got {error}") from error
    outputs = _at(settings, "outputs")
    for output in cast("list[Any]", outputs) if isinstance(outputs, list) else []:
        name = _at(output, "name")
        if isinstance(name, str) and (rule := rule_for(name)):
            yield Hit(rule, _line(source, name), f"output {name}")
    task = _at(settings, "parameters", "extra", "task")
    if task == "feature-extraction":
        yield Hit(STATES, _line(source, task), "task feature-extraction")


def look_at_triton(source: Source) -> Iterator[Hit]:
    """config.pbtxt: the names inside `output` blocks."""
    text = re.sub(r"#[^\n]*", lambda match: " " * len(match[0]), source.text)
    opening, at = re.compile(r"\boutput\s*:?\s*(?=[\[{])"), 0
    while start := opening.search(text, at):
        block = _block(text, start.end())
        for match in re.finditer(r"\bname\s*:\s*[\"']([^\"'\n]*)[\"']", block):
            if rule := rule_for(match[1]):
                line = source.line_at(start.end() + match.start())
                yield Hit(rule, line, f"output {match[1]}")
        at = start.end() + len(block)


def rule_for(name: str) -> Rule | None:
    """What an output of this name gives away."""
    return next((rule for pattern, rule in _NAMES if pattern.search(name.lower())), None)


def _block(text: str, at: int) -> str:
    """From an opening bracket to the one that closes it."""
    depth = 0
    for match in re.compile(r"[\[\]{}]").finditer(text, at):
        depth += 1 if match[0] in "[{" else -1
        if depth == 0:
            return text[at : match.end()]
    return text[at:]


def _at(settings: Any, *names: str) -> Any:
    for name in names:
        if not isinstance(settings, dict):
            return None
        settings = cast("dict[str, Any]", settings).get(name)
    return settings


def _line(source: Source, text: str) -> int:
    place = source.text.find(f'"{text}"')
    return source.line_at(max(place, 0))
