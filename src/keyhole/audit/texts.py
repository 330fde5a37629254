"""The text from what a model exposes, its weights being public: one row for each exposure.

The auditor runs the model on texts, takes what would leak, in float32 and as leaks are in practice,
and hands the attacker the model and the leak: nothing else. Because the auditor knows the texts,
the verdict is about them, and a wrong claim of the judge would show.

Which leaks are tried with which attack stands in recover/registry.py.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from keyhole.audit.aligned import aligned
from keyhole.audit.chance import explained, share_by_chance
from keyhole.audit.check import Check, Checked, nothing_to_try
from keyhole.audit.layers import Layers, layers_of
from keyhole.core import OUTCOMES, Finding, Outcome, Skip, Status
from keyhole.core.errors import InputError
from keyhole.core.finding import Piece, Reading, Readings
from keyhole.core.progress import Track
from keyhole.core.text import percent
from keyhole.data import Example
from keyhole.models.anatomy import Anatomy, anatomy
from keyhole.models.capture import Exposure
from keyhole.models.loading import Loaded
from keyhole.recover import TextRecovery, recover_texts
from keyhole.recover.attack import Attack
from keyhole.recover.embeddings.reader import CountedReader
from keyhole.recover.leaks import Leak
from keyhole.recover.originals import Original
from keyhole.recover.pieces import unknown_token, written
from keyhole.recover.recover_text import LEARN_MORE, NOT_ARRIVED
from keyhole.recover.registry import (
    ATTACKS,
    NOISE,
    NORMALISED,
    PERMUTED,
    PRECISIONS,
    Line,
    readers,
)
from keyhole.recover.simulate import LONGEST, degrade, leak_of

_PARTLY = 0.5  # of the tokens: what is called nearly recovered
_WEIGHT = 40  # how long a check takes, as measured on the demo (check.py)
_NOTES = 3  # that a reason repeats, on what of the texts could not come back


@dataclass(frozen=True, eq=False)
class TextTarget:
    """A model and the texts to try it with; `layers`, or all, overrides which are looked at.

    `notes` are short texts besides, for attacks that read those alone; `corpus` is a file of texts
    like them, for attacks that learn from one. `examples` are what a classifier's predictions are
    flipped on, by default the texts; `about` says how they were chosen, where that matters; `twin`
    is the same model hardened, to be shown beside it.
    """

    loaded: Loaded
    texts: Sequence[str]
    layers: Layers | None = None
    precisions: Sequence[str] = field(default=PRECISIONS)
    examples: Sequence[Example] = ()
    twin: Loaded | None = None
    about: str = ""
    notes: Sequence[str] = ()
    corpus: Path | None = None

    def __post_init__(self) -> None:
        if not self.texts:
            raise InputError("expected one text or more, got none")
        unknown = [name for name in self.precisions if name not in PRECISIONS]
        if unknown or not self.precisions:
            raise InputError(f"expected precisions among {', '.join(PRECISIONS)}, got {unknown}")


def checks(surface: str, target: TextTarget, seed: int) -> list[Check]:
    """Every exposure of a model from which text may be read."""
    try:
        parts = anatomy(target.loaded.model)
    except InputError as error:  # a family whose parts are not known here
        return [nothing_to_try("text", Skip("the text", "none", str(error)))]
    made: list[Check] = []
    for entry, line in _ordered():
        asked = not line.permuted or PERMUTED in target.precisions
        if line.causal == parts.causal and asked:
            for layer in layers_of(line, target.layers, parts):
                attack = _attack(entry, line, target)
                run = partial(_check, line, attack, layer, surface, target, seed)
                made.append(Check(f"text from {_words(line, layer)}, {entry}", run, weight=_WEIGHT))
    return [*made, *(nothing_to_try(f"text from {skip.exposure}", skip) for skip in _skips(parts))]


def checks_of(
    surface: str, target: TextTarget, exposure: Exposure, precision: str, seed: int
) -> list[Check]:
    """One exposure in one precision: what an audit tries on it, or else the default attack."""
    parts = anatomy(target.loaded.model)
    exposure.block(parts)  # said before the check is made: there is such a layer
    layer = None if exposure.kind in ("pooled", "logits") else exposure.layer
    wanted = (exposure.kind, parts.causal, precision == PERMUTED)
    reading = [
        (entry, line)
        for entry, line in _ordered()
        if (line.kind, line.causal, line.permuted) == wanted
    ]
    if not reading:
        reason = f"no attack here reads it of {'a causal model' if parts.causal else 'an encoder'}"
        return [nothing_to_try(str(exposure), Skip(str(exposure), "none", reason))]
    counting = [pair for pair in reading if target.corpus and "corpus" in ATTACKS[pair[0]].options]
    tried = [pair for pair in reading if pair[1].layers(parts)] or counting or reading[:1]
    asked = replace(target, precisions=(precision,))
    made: list[Check] = []
    for entry, line in tried:
        one = replace(line, precisions=(precision,), steps=exposure.steps)
        run = partial(_check, one, _attack(entry, line, target), layer, surface, asked, seed)
        made.append(Check(f"text from {_words(line, layer)}, {entry}", run, weight=_WEIGHT))
    return made


def _attack(name: str, line: Line, target: TextTarget) -> Attack:
    corpus = target.corpus if "corpus" in ATTACKS[name].options else None
    return ATTACKS.make(name, **line.settings, corpus=corpus)


def _ordered() -> list[tuple[str, Line]]:
    """What the registry tries, kind by kind: attacks on the same leak stand together."""
    lines = [(entry.name, line) for entry, line in ATTACKS.lines()]
    kinds = list(dict.fromkeys(line.kind for _, line in lines))
    return sorted(lines, key=lambda pair: kinds.index(pair[1].kind))


def _skips(parts: Anatomy) -> tuple[Skip, ...]:
    """What no attack reads of such a model, and what takes longer than an audit."""
    model = "a causal model" if parts.causal else "an encoder"
    lines = [line for _, line in ATTACKS.lines()]
    exposures = {line.kind: line.exposure for line in lines}
    if not parts.causal:
        exposures.pop("logits", None)  # an encoder has none
    skips: list[Skip] = []
    for kind, exposure in exposures.items():
        reading = [line for line in lines if (line.kind, line.causal) == (kind, parts.causal)]
        if not reading:
            skips.append(Skip(exposure, "none", f"no attack here reads it of {model}"))
        elif not any(line.layers(parts) for line in reading):
            names = " or ".join(readers(kind, parts.causal))
            reason = f"takes longer than an audit: keyhole lab capture, recover --method {names}"
            skips.append(Skip(exposure, "none", reason))
    return tuple(skips)


def _words(line: Line, layer: int | None) -> str:
    return line.exposure if layer is None else f"{line.exposure} of layer {layer}"


def _check(
    line: Line,
    attack: Attack,
    layer: int | None,
    surface: str,
    target: TextTarget,
    seed: int,
    track: Track,
) -> Checked:
    model, tokenizer = target.loaded.model, target.loaded.tokenizer
    words = _words(line, layer)
    started = time.perf_counter()
    exposure = Exposure(line.kind, layer or 0, steps=line.steps)
    texts = [*target.texts, *(target.notes if line.short else ())]
    exact = [leak_of(model, tokenizer, text, exposure) for text in texts]
    parts = anatomy(model)
    longest = min(LONGEST, parts.longest)
    originals = [Original.of(tokenizer, text, longest) for text in texts]
    above = parts.layers if layer is None else layer  # pooling is done at the top
    cells: list[Readings] = []
    first: list[TextRecovery] = []
    for precision in [name for name in line.precisions if name in target.precisions]:
        leaks = [_degraded(leak, precision, seed + number) for number, leak in enumerate(exact)]
        progress = track(f"{words}, {precision}")
        recoveries = recover_texts(model, tokenizer, leaks, method=attack, progress=progress)
        readings = tuple(
            reading_of(tokenizer, original, recovery)
            for original, recovery in zip(originals, recoveries, strict=True)
        )
        chance = None
        if not cells:
            first = recoveries
            chance = share_by_chance(tokenizer, originals, recoveries, longest)
        cells.append(Readings(line.kind, above, precision, readings, chance))
    status, reason = _verdict(cells, attack.note if isinstance(attack, CountedReader) else "")
    if status is Status.UNSOLVED:
        status, reason = _unread(first, reason)
    if line.short and target.notes:
        reason = f"{reason}; {len(target.notes)} of the texts are short ones, chosen to show it"
    finding = Finding(
        surface=surface,
        exposure=words,
        attack=type(attack).__name__ if cells else "",
        status=status,
        reason=reason,
        remedy=line.remedy,
        error=None,
        queries=len(texts),
        seconds=time.perf_counter() - started,
        known=cells[0].known if cells else 0.0,
        sought="text",
        texts=tuple(cells),
    )
    return Checked((finding,))


def _unread(recoveries: Sequence[TextRecovery], reason: str) -> tuple[Status, str]:
    """Why the texts were not read, where the attack says more than that."""
    unfinished = [r for r in recoveries if OUTCOMES[r.status] is Outcome.UNCHECKED]
    if unfinished:  # not kept: nobody came to the end of a search
        return unfinished[0].status, f"{reason}; {unfinished[0].reason}"
    if all(recovery.status is Status.NOT_IDENTIFIABLE for recovery in recoveries):
        return Status.NOT_IDENTIFIABLE, f"{reason}; {recoveries[0].reason}"
    return Status.UNSOLVED, reason


def _degraded(leak: Leak, precision: str, seed: int) -> Leak:
    if precision == NOISE:
        return replace(degrade(leak, noise=0.1, seed=seed), precision=None)
    if precision in (NORMALISED, PERMUTED):
        return degrade(leak, seed=seed, forms=[precision])
    return degrade(leak, precision)


def reading_of(tokenizer: Any, original: Original, recovery: TextRecovery) -> Reading:
    """A text beside what was read of it, token by token."""
    truth = original.ids
    special = set(tokenizer.all_special_ids) - {unknown_token(tokenizer)}
    note = "; ".join(original.notes)
    pieces = written(tokenizer, recovery.ids)
    tokens = list(zip(pieces, recovery.marks, recovery.ids, strict=True))
    if len(tokens) == len(truth):
        pieces = tuple(
            # A special token where a word was: it is not written, but it was read.
            Piece(
                f" {tokenizer.convert_ids_to_tokens(id_)}" if id_ in special else piece,
                mark.value,
                id_ == true,
            )
            for (piece, mark, id_), true in zip(tokens, truth, strict=True)
            if true not in special
        )
    else:  # another length than the text's, or no proposal at all
        inside = [id_ for id_ in truth if id_ not in special]
        pieces = tuple(aligned([token for token in tokens if token[2] not in special], inside))
    exact = original.is_exactly(tokenizer, recovery.ids)
    return Reading(original.text, pieces, exact, recovery.verified, note)


def _verdict(cells: list[Readings], read_with: str) -> tuple[Status, str]:
    """By the leak as it is; the other precisions are told beside it."""
    if not cells:
        return Status.NOT_APPLICABLE, "none of the precisions asked for is tried here"
    count = len(cells[0].readings)
    exact, known = cells[0].exact, cells[0].known
    shares = [f"{cell.precision} {percent(cell.known)}" for cell in cells]
    reason = f"{exact} of {count} texts exact and verified; tokens right: {', '.join(shares)}"
    notes = list(dict.fromkeys(reading.note for reading in cells[0].readings if reading.note))
    more = [f"{len(notes) - _NOTES} more texts are not whole"] if len(notes) > _NOTES else []
    reason = "; ".join([reason, *notes[:_NOTES], *more, *([read_with] if read_with else [])])
    if exact == count:
        return Status.RECOVERED, reason
    if cells[0].kind == "pooled":
        reason = f"{reason}; {NOT_ARRIVED}: {LEARN_MORE}"
    if exact or known >= _PARTLY:
        return Status.INEXACT, reason
    if cells[0].kind != "pooled" and known:
        reason = f"{reason}; guesses without the leak have {percent(cells[0].chance or 0)} right"
        if not explained(cells[0]):
            return Status.INEXACT, reason
    return Status.BUDGET if cells[0].kind == "pooled" else Status.UNSOLVED, reason
