"""Checks of predictions: how many are flipped by cutting about 1% of the attention?

The text stays unchanged. The attacker can change the model's attention: through a mask
that clients may send, a pruned cache, or a fault in memory. There is a check for each
attacker in disrupt/registry.py; one of them cuts at random, as a control. If an example
has no label, the model's own answer counts as right.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from keyhole.audit.check import Check, Checked, one_finding, one_skip, skipped_check
from keyhole.core import Cut, Remedied, Skip
from keyhole.core.errors import InputError
from keyhole.core.exposure import Exposure
from keyhole.core.progress import Progress, Track, silent
from keyhole.core.text import percent
from keyhole.data import NO_LABEL, Example, encode
from keyhole.disrupt import ATTACKERS, Attacker, Disruption, Outcome
from keyhole.disrupt.batches import Batches
from keyhole.disrupt.hack_attend import HackAttend
from keyhole.disrupt.tasks import settled
from keyhole.models import Loaded
from keyhole.models.loading import GENERATES, head_of
from keyhole.models.pieces import decoded, labels
from keyhole.report import words

if TYPE_CHECKING:
    from keyhole.audit.texts import TextTarget

SHOWN = 3  # flipped inputs that a finding shows
_BATCH_SIZE = 16  # examples in one batch
_MAX_LENGTH = 128  # tokens of a text

_EXPOSURE = Exposure("KH-PREDICTIONS-CUTS")
_REMEDY = "Take no attention masks from clients; train with keyhole harden, and measure again."
_CONTROL_REMEDY = "Nothing: this is the control, what random cuts would do."


def checks(
    part: str,
    target: TextTarget,
    seed: int,
    share: float | None = None,
) -> list[Check]:
    """Return a check for each attacker; models that neither classify nor generate are skipped.

    `share` is how much of the attention may be cut; None for each attacker's default.
    """
    loaded = target.loaded
    task = head_of(loaded.model)
    if task not in ("classification", *GENERATES):
        name = type(loaded.model).__name__
        reason = f"{name} has no head for classes or text: try keyhole disrupt"
        return [skipped_check(Skip(_EXPOSURE, "HackAttend", reason))]
    texts = enumerate(target.texts, 1)
    examples = target.examples or [
        Example(f"text {n}", NO_LABEL, text) for n, text in texts
    ]
    if task == "classification":
        classes = int(loaded.model.config.num_labels)
        largest = max(each.label for each in examples)
        if largest >= classes:
            raise InputError(
                f"the model has the labels 0 to {classes - 1}, not {largest}"
            )

    @cache
    def labelled() -> Sequence[Example]:
        if task == "classification":
            return _labelled(loaded, examples)
        return examples

    checks: list[Check] = []
    for name, exposure, attacker in attackers(seed, share):
        exposure = replace(exposure, part=part)
        run = partial(_check, exposure, target, attacker, labelled)
        checks.append(Check(exposure, run, name, weight=6))
    return checks


def _check(
    exposure: Exposure,
    target: TextTarget,
    attacker: Attacker,
    examples: Callable[[], Sequence[Example]],
    track: Track,
) -> Checked:
    """Run one attacker on the model, and on its hardened version if there is one."""
    hardened = target.hardened

    def attack(model: Loaded, name: str) -> Disruption:
        labelled = examples()
        return _batches(model, labelled, track(name, len(labelled))).attack(attacker)

    name = words.exposure(exposure)
    remedied = tuple[Remedied, ...]()
    # An InputError: the model's attention cannot be cut, or it answers NaN.
    try:
        disruption = attack(target.loaded, name)
        reason = _reason(disruption)
        if hardened is not None:
            other = attack(hardened, f"{name}, {hardened.name}")
            flipped = f"{other.flips} of {len(other.attacked)}"
            if other.control.flips:
                shown = f"could not check: {other.obstacle}"
            else:
                shown = f"{flipped} ({percent(other.success)})"
                left = f"{flipped} right answers flipped"
                remedied = (
                    Remedied(f"keyhole harden: {hardened.name}", other.success, left),
                )
            reason += f"; of {hardened.name}: {shown}"
    except InputError as error:
        return one_skip(_EXPOSURE, type(attacker).__name__, str(error))
    if target.about:
        reason += f"; {target.about}"
    remedy = _REMEDY
    control = bool(disruption.method["control"])
    if control:
        remedy = _CONTROL_REMEDY
    known = 0.0
    cuts = tuple[Cut, ...]()
    if not disruption.obstacle:
        known = disruption.success
        cuts = _cuts(target.loaded, disruption)
    return one_finding(
        exposure,
        disruption.method["attack"],
        disruption.status,
        reason,
        remedy,
        queries=sum(outcome.queries for outcome in disruption.attacked),
        known=known,
        tried=len(disruption.attacked),
        sought="prediction",
        cuts=cuts,
        control=control,
        remedied=remedied,
    )


def attackers(
    seed: int, share: float | None = None
) -> list[tuple[str, Exposure, Attacker]]:
    """Return the attackers of the registry with their names and exposures."""
    named: list[tuple[str, Exposure, Attacker]] = []
    for entry, row in ATTACKERS.rows():
        settings = {**row.settings, "share": share}
        if "seed" in entry.options:  # an attacker that draws nothing needs none
            settings["seed"] = seed
        attacker = ATTACKERS.make(entry.name, **settings)
        exposure = row.exposure
        if isinstance(attacker, HackAttend):
            exposure = replace(exposure, name=f"{100 * attacker.share:g}%")
        named.append((entry.name, exposure, attacker))
    return named


def _batches(
    loaded: Loaded,
    examples: Sequence[Example],
    progress: Progress = silent,
) -> Batches:
    return Batches(
        loaded.model,
        loaded.tokenizer,
        examples,
        _BATCH_SIZE,
        _MAX_LENGTH,
        alike=False,
        progress=progress,
    )


def _labelled(loaded: Loaded, examples: Sequence[Example]) -> list[Example]:
    """Return the examples, with the model's own answer as the label of those without one."""
    return [
        replace(example, label=int(label))
        for part, batch, labels in _batches(loaded, examples)
        for example, label in zip(
            part, settled(loaded.model, batch, labels), strict=True
        )
    ]


def _reason(disruption: Disruption) -> str:
    """Say how many right answers flipped, or why none was tried."""
    if disruption.obstacle:
        return disruption.obstacle
    answers = "right answers"
    if disruption.own_answers:
        answers = "of the model's own answers"
    reason = f"{disruption.flips} of {len(disruption.attacked)} {answers} flipped"
    if disruption.flips:
        reason += f", by {percent(disruption.share, 2)} of all units on average"
    return f"{reason}; {disruption.queries:.0f} passes an example"


def _cuts(loaded: Loaded, disruption: Disruption) -> tuple[Cut, ...]:
    """Return the flipped inputs to show: those that the model was most confident of."""
    by_id = {example.id: example for example in disruption.examples}
    flipped = [
        outcome
        for outcome in disruption.attacked
        if outcome.flipped and outcome.id in by_id
    ]
    flipped.sort(key=lambda outcome: -outcome.confidence_before)
    return tuple(
        _cut(loaded, by_id[outcome.id], outcome, disruption.task)
        for outcome in flipped[:SHOWN]
    )


def _cut(
    loaded: Loaded,
    example: Example,
    outcome: Outcome,
    task: str,
) -> Cut:
    config = loaded.model.config
    units = [(each.layer, each.head, each.query, each.key) for each in outcome.cut]
    layers, heads, queries, keys = zip((0, 0, 0, 0), *units, strict=True)
    least = max(*queries, *keys) + 1
    return Cut(
        tokens=_tokens(loaded.tokenizer, example, outcome.before, least),
        before=_answer(loaded, outcome.before, task),
        after=_answer(loaded, outcome.after, task),
        sure_before=outcome.confidence_before,
        sure_after=outcome.confidence_after,
        share=outcome.share,
        layers=max(getattr(config, "num_hidden_layers", 1), max(layers) + 1),
        heads=max(getattr(config, "num_attention_heads", 1), max(heads) + 1),
        units=tuple(units),
    )


def _tokens(
    tokenizer: Any,
    example: Example,
    continued: tuple[int, ...],
    least: int,
) -> tuple[str, ...]:
    """Return at least `least` tokens: the text's, then those that the model generated."""
    batch, _ = encode(tokenizer, [example])
    kept = batch["input_ids"][0][batch["attention_mask"][0].bool()].tolist()
    missing = max(0, least - len(kept))
    more = [token for token in continued if token >= 0][:missing]
    tokens = labels(tokenizer, kept + more)
    return (*tokens, *["?"] * (least - len(tokens)))


def _answer(
    loaded: Loaded,
    answer: tuple[int, ...],
    task: str,
) -> str:
    """Return the name of a class, or generated tokens as text."""
    if task == "classification":
        names: Mapping[int, str] = getattr(loaded.model.config, "id2label", None) or {}
        return str(names.get(answer[0], answer[0]))
    return decoded(loaded.tokenizer, [token for token in answer if token >= 0])
