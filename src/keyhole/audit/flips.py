"""The prediction from a little attention cut, the text left alone: one row for each attacker.

Part IV of ALGORITHMS.md. Whoever can touch a model's attention (a mask that a client may send, a
pruned cache, a fault in memory) and cuts one unit in a hundred: how many right answers become
wrong? The last attacker cuts at random; what the others flip beyond that is the attack's own. Where
an example has no label, the model's own answer is held to be right.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from keyhole.audit.check import Checked, Watch
from keyhole.audit.texts import TextTarget
from keyhole.data import NO_LABEL, Example, encode
from keyhole.disrupt import Disruption, HackAttend, Outcome
from keyhole.disrupt.batches import Table
from keyhole.disrupt.labels import settled
from keyhole.errors import InputError
from keyhole.models.loading import SPEAKING, Loaded, head_of
from keyhole.percent import percent
from keyhole.results import Finding, Skip, Status
from keyhole.results.cuts import Cut

SHARE = 0.01
SHOWN = 3  # flipped inputs that a finding shows
_TOGETHER = 16  # examples in one batch
_LONGEST = 128  # tokens of a text
_BRIEF: dict[str, Any] = {"prefixes": 8, "refine": 4}  # an audit looks at many things


_REMEDY = "Take no attention masks from clients; train with keyhole harden, and measure again."
_CHANCE = "Nothing: this is the control, what cuts without any choice would do."

ATTACKERS: tuple[Callable[[int], HackAttend], ...] = (  # by seed
    lambda seed: HackAttend(SHARE, seed=seed, **_BRIEF),
    lambda seed: HackAttend(SHARE, scope="model", seed=seed, **_BRIEF),
    lambda seed: HackAttend.as_released(SHARE, seed=seed),
    lambda seed: HackAttend.as_released(SHARE, ranking="random", order="random", seed=seed),
)


def words_of(method: HackAttend) -> str:
    """How attention is cut, in people's words."""
    what = "each head's attention" if method.scope == "head" else "all attention"
    match method.schedule, method.ranking:
        case _, "random":
            how = " at random"
        case "greedy", "gradient":
            how = ", as in the paper"
        case _, "removal":
            how = ""
        case _:
            how = f", ranked by {method.ranking}"
    return f"{100 * method.share:g}% of {what} cut{how}"


def check(surface: str, target: TextTarget, seed: int, watch: Watch | None) -> Checked:
    """Flips of a classifier, or of the next token; models without such a head are skipped."""
    loaded, task = target.loaded, head_of(target.loaded.model)
    if task not in ("classification", *SPEAKING):
        name = type(loaded.model).__name__
        reason = f"expected a head for classes or text, got {name}: keyhole disrupt takes others"
        return Checked(skips=(Skip("attention cut", "HackAttend", reason),))
    texts = enumerate(target.texts, 1)
    given = target.examples or [Example(f"text {n}", NO_LABEL, text) for n, text in texts]
    examples = _labelled(loaded, given) if task == "classification" else given
    findings: list[Finding] = []
    for attacker in ATTACKERS:
        method, started = attacker(seed), time.perf_counter()
        try:
            found = _attack(method, loaded, examples, words_of(method), watch)
            twin = None
            if target.twin is not None:
                words = f"{words_of(method)}, {target.twin.name}"
                twin = (target.twin.name, _attack(method, target.twin, examples, words, watch))
        except InputError as error:  # attention that does not go where it can be cut
            return Checked(tuple(findings), (Skip("attention cut", "HackAttend", str(error)),))
        seconds = time.perf_counter() - started
        cuts = cuts_of(loaded.tokenizer, loaded.model.config, examples, found, task)
        made = finding(surface, found, cuts, seconds, twin)
        about = f"; {target.about}" if target.about else ""
        findings.append(replace(made, reason=made.reason + about))
    return Checked(tuple(findings))


def _table(
    loaded: Loaded, examples: Sequence[Example], watch: Callable[[int, int], None] | None = None
) -> Table:
    longest = min(_LONGEST, getattr(loaded.model.config, "max_position_embeddings", _LONGEST))
    return Table(
        loaded.model, loaded.tokenizer, examples, _TOGETHER, longest, alike=False, watch=watch
    )


def _labelled(loaded: Loaded, examples: Sequence[Example]) -> list[Example]:
    return [
        replace(example, label=int(label))
        for some, batch, labels in _table(loaded, examples).batches()
        for example, label in zip(some, settled(loaded.model, batch, labels), strict=True)
    ]


def _attack(
    method: HackAttend, loaded: Loaded, examples: Sequence[Example], words: str, watch: Watch | None
) -> Disruption:
    count = None if watch is None else partial(watch, words)
    return _table(loaded, examples, count).attack(method)


def finding(
    surface: str,
    found: Disruption,
    cuts: Sequence[Cut],
    seconds: float,
    twin: tuple[str, Disruption] | None = None,
) -> Finding:
    """What an attack achieved, in the words and numbers of an audit."""
    status, reason = verdict(found)
    method = HackAttend(**found.method)
    if twin is not None:
        name, other = twin
        reason += f"; of {name}: {other.flips} of {len(other.attacked)} ({percent(other.success)})"
    return Finding(
        exposure=words_of(method),
        attack="HackAttend",
        status=status,
        reason=reason,
        remedy=_CHANCE if method.ranking == "random" else _REMEDY,
        error=None,
        queries=sum(one.queries for one in found.attacked),
        seconds=seconds,
        known=found.success,
        surface=surface,
        sought="prediction",
        cuts=tuple(cuts),
    )


def verdict(found: Disruption) -> tuple[Status, str]:
    """All, some or none of the right answers flipped."""
    right = len(found.attacked)
    if right == 0:
        return Status.NOT_APPLICABLE, f"the model gets none of {len(found.outcomes)} right"
    reason = f"{found.flips} of {right} right answers flipped"
    if found.flips:
        reason += f", by {percent(found.share, 2)} of all units on average"
    reason += f"; {found.queries:.0f} queries an example"
    return status_of(found.flips, right), reason


def status_of(flips: int, right: int) -> Status:
    if flips == right:
        return Status.RECOVERED
    return Status.INEXACT if flips else Status.UNSOLVED


def cuts_of(
    tokenizer: Any, config: Any, examples: Sequence[Example], found: Disruption,
    task: str = "classification", most: int = SHOWN,
) -> tuple[Cut, ...]:  # fmt: skip
    """The flipped inputs to show: those that the model had been surest of."""
    by_id = {example.id: example for example in examples}
    flipped = [one for one in found.attacked if one.flipped and one.id in by_id]
    flipped.sort(key=lambda one: -one.confidence_before)
    return tuple(_cut(tokenizer, config, by_id[one.id], one, task) for one in flipped[:most])


def _cut(tokenizer: Any, config: Any, example: Example, outcome: Outcome, task: str) -> Cut:
    rows = [unit.sequence for unit in outcome.cut]
    row = max(set(rows), key=rows.count, default=0)  # of several choices, the one cut most
    units = [unit for unit in outcome.cut if unit.sequence == row]
    last = max((max(unit.query, unit.key) for unit in units), default=0)
    layers = [getattr(config, "num_hidden_layers", 1), *(unit.layer + 1 for unit in units)]
    heads = [getattr(config, "num_attention_heads", 1), *(unit.head + 1 for unit in units)]
    return Cut(
        tokens=_tokens(tokenizer, example, row, outcome.before, last + 1),
        before=_answer(tokenizer, config, example, outcome.before, task),
        after=_answer(tokenizer, config, example, outcome.after, task),
        sure_before=outcome.confidence_before,
        sure_after=outcome.confidence_after,
        share=outcome.share,
        layers=max(layers),
        heads=max(heads),
        units=tuple((unit.layer, unit.head, unit.query, unit.key) for unit in units),
    )


def _tokens(
    tokenizer: Any, example: Example, row: int, continued: tuple[int, ...], least: int
) -> tuple[str, ...]:
    """The tokens that positions stand for; a continuation of several stands behind the text."""
    batch, _ = encode(tokenizer, [example])
    ids = batch["input_ids"].flatten(0, -2)[row]
    kept = ids[batch["attention_mask"].flatten(0, -2)[row].bool()].tolist()
    missing = max(0, least - len(kept))
    more = [token for token in continued if token >= 0][:missing]
    tokens = tokenizer.convert_ids_to_tokens(kept + more)
    return tuple(map(str, [*tokens, *["?"] * (least - len(tokens))]))


def _answer(
    tokenizer: Any, config: Any, example: Example, answer: tuple[int, ...], task: str
) -> str:
    """A class by its name, a choice by its text, tokens as they are written."""
    if task == "choice":
        return example.choices[answer[0]]
    if task == "classification":
        names: Mapping[int, str] = getattr(config, "id2label", None) or {}
        return str(names.get(answer[0], answer[0]))
    return str(tokenizer.decode([token for token in answer if token >= 0]))
