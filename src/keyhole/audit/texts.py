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
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

from keyhole.audit.aligned import aligned
from keyhole.audit.check import Check, Checked, nothing_to_try
from keyhole.data import Example
from keyhole.errors import InputError
from keyhole.models.anatomy import Anatomy, anatomy
from keyhole.models.capture import Exposure
from keyhole.models.loading import Loaded
from keyhole.percent import percent
from keyhole.progress import Track
from keyhole.recover import TextRecovery, recover_texts
from keyhole.recover.attack import Attack
from keyhole.recover.attacks.counted_reader import CountedReader
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
from keyhole.results import Finding, Skip, Status
from keyhole.results.readings import Piece, Reading, Readings

Layers = Sequence[int] | Literal["all"]
_CHOSEN = ("hidden", "kv")  # the kinds of leaks whose layers --layers chooses
_PARTLY = 0.5  # of the tokens: what is called nearly recovered
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
            for layer in _layers(line, target, parts):
                attack = _attack(entry, line, target)
                run = partial(_check, line, attack, layer, surface, target, seed)
                made.append(Check(f"text from {_words(line, layer)}, {entry}", run))
    return [*made, *(nothing_to_try(f"text from {skip.exposure}", skip) for skip in _skips(parts))]


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
            reason = f"takes longer than an audit: keyhole capture, invert text --method {names}"
            skips.append(Skip(exposure, "none", reason))
    return tuple(skips)


def _layers(line: Line, target: TextTarget, parts: Anatomy) -> Sequence[int | None]:
    if target.layers is None or line.kind not in _CHOSEN:
        return line.layers(parts)
    if target.layers == "all":
        return _every_layer(line.kind, parts)
    for layer in target.layers:
        Exposure(line.kind, layer).block(
            parts
        )  # said before the first check: there is such a layer
    return list(target.layers)


def _every_layer(kind: str, parts: Anatomy) -> range:
    """Counted as the exposure counts them: a causal model's cache from 0, all others from 1."""
    first = 0 if kind == "kv" and parts.causal else 1
    return range(first, first + parts.layers)


def left_out(surface: str, target: TextTarget) -> tuple[Skip, ...]:
    """The layers of which nothing was tried although others were: three of twelve are not all."""
    try:
        parts = anatomy(target.loaded.model)
    except InputError:  # said by `checks`
        return ()
    lines = [line for _, line in ATTACKS.lines() if line.causal == parts.causal]
    tried: dict[str, set[int]] = {}
    for line in lines:
        if not line.permuted:
            numbers = (layer for layer in _layers(line, target, parts) if layer is not None)
            tried.setdefault(line.kind, set()).update(numbers)
    names = {line.kind: line.exposure for line in reversed(lines) if not line.permuted}
    return tuple(
        _untried(names[kind], kind, layers, parts, surface)
        for kind, layers in tried.items()
        if layers and not layers.issuperset(_every_layer(kind, parts))
    )


def _untried(exposure: str, kind: str, tried: set[int], parts: Anatomy, surface: str) -> Skip:
    every = _every_layer(kind, parts)
    missing = [layer for layer in every if layer not in tried]
    inside = sum(layer in every for layer in tried)  # hidden states of layer 0 are the embeddings
    other = f"keyhole capture --expose {kind}:{missing[0]}, then keyhole invert text"
    how = "--layers all tries every one" if kind in _CHOSEN else f"these take longer: {other}"
    layers = f"layer{'' if len(missing) == 1 else 's'} {spans(missing)}"
    return Skip(
        f"{exposure} of {layers}{f', {surface}' if surface else ''}", "none",
        f"{inside} of {parts.layers} layers were tried; {how}",
    )  # fmt: skip


def spans(numbers: Sequence[int]) -> str:
    """Numbers in order as people write them: 2–5, 7–11."""
    parts: list[str] = []
    for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        row = [number for _, number in run]
        parts.append(f"{row[0]}–{row[-1]}" if len(row) > 1 else str(row[0]))
    return ", ".join(parts)


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
    exposure = Exposure(line.kind, layer or 0)
    texts = [*target.texts, *(target.notes if line.short else ())]
    exact = [leak_of(model, tokenizer, text, exposure) for text in texts]
    parts = anatomy(model)
    longest = min(LONGEST, parts.longest)
    originals = [Original.of(tokenizer, text, longest) for text in texts]
    above = parts.layers if layer is None else layer  # pooling is done at the top
    cells: list[Readings] = []
    for precision in [name for name in line.precisions if name in target.precisions]:
        leaks = [_degraded(leak, precision, seed + number) for number, leak in enumerate(exact)]
        progress = track(f"{words}, {precision}")
        recoveries = recover_texts(model, tokenizer, leaks, method=attack, progress=progress)
        readings = tuple(
            reading_of(tokenizer, original, recovery)
            for original, recovery in zip(originals, recoveries, strict=True)
        )
        cells.append(Readings(line.kind, above, precision, readings))
    status, reason = _verdict(cells, attack.note if isinstance(attack, CountedReader) else "")
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
    return Status.BUDGET if cells[0].kind == "pooled" else Status.UNSOLVED, reason
