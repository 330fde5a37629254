"""Checks of text: what can be read of it from each exposure of a model with public weights.

The auditor runs the model on texts, takes what would leak, in float32 and as leaks are in practice,
and gives the attack the model and the leak: nothing else. The auditor knows the texts and compares,
so that a wrong claim of the judge would show.

recover/registry.py has rows: which attack is tried on which kind of leak, and at which layers. A
file that holds leaks, or the token ids themselves, is a target of its own (`LeakTarget`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch

from keyhole.audit.check import Check, Checked, Part, found, nothing_to_try
from keyhole.core import OUTCOMES, Outcome, Skip, Status
from keyhole.core.errors import InputError
from keyhole.core.exposure import Exposure
from keyhole.core.finding import Piece, Reading, Readings
from keyhole.core.progress import Track
from keyhole.core.text import percent
from keyhole.data import Example
from keyhole.models.anatomy import Anatomy, anatomy
from keyhole.models.capture import KINDS, capture
from keyhole.models.capture import Exposure as Captured
from keyhole.models.loading import Loaded
from keyhole.models.pieces import unknown_token, written
from keyhole.recover import Mark, TextRecovery, recover_text, recover_texts
from keyhole.recover.attack import Attack
from keyhole.recover.embeddings.counts import SHIPPED, corpus_texts
from keyhole.recover.embeddings.reader import CountedReader
from keyhole.recover.files.sources import Opened, Sealed, WrittenIds
from keyhole.recover.layers.mixed import MixedKeys
from keyhole.recover.leaks import Leak
from keyhole.recover.originals import Original
from keyhole.recover.registry import (
    ATTACKS,
    NOISE,
    NORMALISED,
    PERMUTED,
    PRECISIONS,
    Row,
    readers,
)
from keyhole.recover.simulate import MAX_LENGTH, degrade, leak_of
from keyhole.recover.texts import LEARN_MORE, NOT_ARRIVED
from keyhole.report import words

PARTLY = 0.5  # the share of tokens from which on a text is recovered in part
# How long a check takes, as seconds plus passes of 512 tokens: measured on the demo's classifier
# and on MiniLM. For hidden states it is multiplied by the number of layers.
_HIDDEN = (0.2, 22)
_OTHERS = {"maps": (5.0, 20), "attention": (5.0, 10), "kv": (0.5, 95), "pooled": (3.0, 270),
           "logits": (3.0, 270)}  # fmt: skip
_RUNS = 4  # of a pass, to time it
_SECONDS = 6e-9  # for each parameter, about: what 512 tokens take on two cores
_NOTES = 3  # notes of texts that a reason repeats


@dataclass(frozen=True, eq=False)
class TextTarget:
    """A model and the texts to try it with; `layers`, or all, overrides which are looked at.

    `notes` are short texts besides, for attacks that read those alone; `corpus` is a file of texts
    like them, for attacks that learn from one. `examples` are what a classifier's predictions are
    flipped on, by default the texts; `about` says how they were chosen, where that matters;
    `hardened` is the same model trained against flips, to be shown next to it. With `encoder`
    states (m, e) the model is a decoder, which is read behind them.
    """

    loaded: Loaded
    texts: Sequence[str]
    layers: Layers | None = None
    precisions: Sequence[str] = field(default=PRECISIONS)
    examples: Sequence[Example] = ()
    hardened: Loaded | None = None
    about: str = ""
    notes: Sequence[str] = ()
    corpus: Path | None = None
    encoder: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if not self.texts:
            raise InputError("there are no texts to read back: give one or more")
        if not self.precisions or not set(self.precisions) <= set(PRECISIONS):
            raise InputError(f"precisions must be one or more of {', '.join(PRECISIONS)}")

    @cached_property
    def seconds(self) -> float:
        """What the model takes for 512 tokens, measured now, to estimate how long checks take."""
        return seconds_of(self.loaded.model)


def seconds_of(model: Any) -> float:
    """What a model takes for 512 tokens, measured now; by its size where it reads no text alone."""
    try:
        parts = anatomy(model)
    except InputError:
        return _SECONDS * sum(weight.numel() for weight in model.parameters())
    ids = torch.full((32, 16), 1, device=parts.device)
    with torch.no_grad():
        return shortest(lambda: capture(model, Captured("hidden", parts.layers), ids=ids))


def shortest(run: Callable[[], object]) -> float:
    """The seconds of the shortest of a few runs: the first takes longer, any may be disturbed."""
    taken: list[float] = []
    for _ in range(_RUNS):
        started = time.perf_counter()
        run()
        taken.append(time.perf_counter() - started)
    return min(taken)


def checks(part: str, target: TextTarget, seed: int) -> list[Check]:
    """Every exposure of a model from which text may be read."""
    parts = anatomy(target.loaded.model)
    made: list[Check] = []
    for entry, row in _ordered():
        asked = not row.permuted or PERMUTED in target.precisions
        if row.causal == parts.causal and asked:
            for layer in layers_of(row, target.layers, parts):
                try:
                    Captured(row.kind, layer or 0).block(parts)
                except InputError as error:  # this model does not show it
                    skip = Skip(replace(row.exposure, layer=layer, part=part), "none", str(error))
                    made.append(nothing_to_try(skip))
                else:
                    made.append(_made(row, layer, part, entry, target, seed))
    return [*made, *map(nothing_to_try, _skips(parts))]


def _made(
    row: Row, layer: int | None, part: str, name: str, target: TextTarget, seed: int
) -> Check:
    exposure = replace(row.exposure, layer=layer, part=part)
    corpus = target.corpus if "corpus" in ATTACKS[name].options else None
    attack = ATTACKS.make(name, **row.settings, corpus=corpus)
    run = partial(_check, row, attack, exposure, target, seed)
    times = 1 if row.kind in _OTHERS else 1 + (layer or 0)
    seconds, passes = _OTHERS.get(row.kind, _HIDDEN)
    return Check(exposure, run, name, weight=times * (seconds + passes * target.seconds))


def checks_of(
    part: str, target: TextTarget, leak: Captured, precision: str, seed: int
) -> list[Check]:
    """One exposure in one precision: by the attacks that an audit tries on it.

    If it tries none, by those that learn from the target's corpus, or else by the first of all.
    """
    parts = anatomy(target.loaded.model)
    leak.block(parts)  # refused before the check is made: there is such a layer
    layer = None if leak.kind in ("pooled", "logits") else leak.layer
    wanted = (leak.kind, parts.causal, precision == PERMUTED)
    reading = [
        (entry, row) for entry, row in _ordered() if (row.kind, row.causal, row.permuted) == wanted
    ]
    if not reading:
        reason = f"no attack reads it of {'a causal model' if parts.causal else 'an encoder'}"
        exposure = replace(exposure_of(leak.kind), layer=layer)
        return [nothing_to_try(Skip(exposure, "none", reason))]
    learning = [pair for pair in reading if target.corpus and "corpus" in ATTACKS[pair[0]].options]
    tried = [pair for pair in reading if pair[1].layers(parts)] or learning or reading[:1]
    asked = replace(target, precisions=(precision,))
    return [
        _made(replace(row, precisions=(precision,)), layer, part, entry, asked, seed)
        for entry, row in tried
    ]


def _ordered() -> list[tuple[str, Row]]:
    """The rows of the registry with their attacks, ordered by the kind of leak."""
    rows = [(entry.name, row) for entry, row in ATTACKS.rows()]
    kinds = list(dict.fromkeys(row.kind for _, row in rows))
    return sorted(rows, key=lambda pair: kinds.index(pair[1].kind))


def exposure_of(kind: str) -> Exposure:
    """What a kind of leak exposes, by the registry of attacks on it."""
    return next(row.exposure for _, row in ATTACKS.rows() if row.kind == kind and not row.permuted)


def _skips(parts: Anatomy) -> list[Skip]:
    """What no attack reads of such a model, and what takes longer than an audit."""
    model = "a causal model" if parts.causal else "an encoder"
    rows = [row for _, row in ATTACKS.rows() if row.kind in KINDS]  # no model gives the others
    exposures = {row.kind: row.exposure for row in rows if not row.permuted}
    if not parts.causal:
        exposures.pop("logits", None)  # an encoder has none
    skips: list[Skip] = []
    for kind, exposure in exposures.items():
        reading = [row for row in rows if (row.kind, row.causal) == (kind, parts.causal)]
        if not reading:
            skips.append(Skip(exposure, "none", f"no attack reads it of {model}"))
        elif not any(row.layers(parts) for row in reading):
            names = " or ".join(readers(kind, parts.causal))
            reason = f"takes longer than an audit: keyhole lab capture, recover --method {names}"
            skips.append(Skip(exposure, "none", reason))
    return skips


def _check(
    row: Row, attack: Attack, exposure: Exposure, target: TextTarget, seed: int, track: Track
) -> Checked:
    model, tokenizer = target.loaded.model, target.loaded.tokenizer
    started = time.perf_counter()
    leaking = Captured(row.kind, exposure.layer or 0)
    texts = [*target.texts, *(target.notes if row.short else ())]
    exact = [leak_of(model, tokenizer, text, leaking, encoder=target.encoder) for text in texts]
    parts = anatomy(model)
    max_length = min(MAX_LENGTH, parts.max_length)
    originals = [Original.of(tokenizer, text, max_length) for text in texts]
    # What has no layer, such as a pooled embedding, comes from the last one.
    layer = parts.layers if exposure.layer is None else exposure.layer
    results: list[Readings] = []
    first: list[TextRecovery] = []
    for precision in [name for name in row.precisions if name in target.precisions]:
        leaks = [_degraded(leak, precision, seed + number) for number, leak in enumerate(exact)]
        progress = track(f"{words.exposure(exposure)}, {precision}")
        recoveries = recover_texts(model, tokenizer, leaks, method=attack, progress=progress)
        readings = readings_of(tokenizer, originals, recoveries)
        chance = None
        if not results:
            first = recoveries
            chance = share_by_chance(tokenizer, originals, recoveries, max_length)
        results.append(Readings(row.kind, layer, precision, readings, chance))
    status, reason = verdict(results, attack.note if isinstance(attack, CountedReader) else "")
    if status is Status.UNSOLVED:
        status, reason = _unread(first, reason)
    if row.short and target.notes:
        reason = f"{reason}; {len(target.notes)} of the texts are short ones, chosen to show it"
    return found(
        exposure, type(attack).__name__ if results else "", status, reason, row.remedy, started,
        queries=len(texts), known=results[0].known if results else 0.0, sought="text",
        texts=tuple(results),
    )  # fmt: skip


def _unread(recoveries: Sequence[TextRecovery], reason: str) -> tuple[Status, str]:
    """The status and reason of texts that were not read, as the attack states them."""
    unfinished = [r for r in recoveries if OUTCOMES[r.status] is Outcome.UNCHECKED]
    if unfinished:  # a search that did not end does not show that the text is safe
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


def special_ids(tokenizer: Any) -> set[int]:
    """Tokens that stand for no text; the unknown one does."""
    return set(tokenizer.all_special_ids) - {unknown_token(tokenizer)}


def tokens_read(tokenizer: Any, recovery: TextRecovery) -> list[tuple[str, Mark, int]]:
    """The tokens that were read, without special ones: as text, the judge's mark, the id."""
    special = special_ids(tokenizer)
    pieces = written(tokenizer, recovery.ids)
    tokens = zip(pieces, recovery.marks, recovery.ids, strict=True)
    return [token for token in tokens if token[2] not in special]


def reading_alone(
    tokenizer: Any, recovery: TextRecovery, note: str = "", similarity: float | None = None
) -> Reading:
    """What was read of a text that nobody has: a verified token counts as right."""
    tokens = tokens_read(tokenizer, recovery)
    return Reading(
        original="", pieces=tuple(Piece(piece, mark.value, None) for piece, mark, _ in tokens),
        exact=recovery.status is Status.RECOVERED, verified=recovery.verified, note=note,
        tokens=len(tokens), similarity=similarity,
    )  # fmt: skip


def reading_of(tokenizer: Any, original: Original, recovery: TextRecovery) -> Reading:
    """A text next to what was read of it, token by token."""
    truth = original.ids
    special = special_ids(tokenizer)
    note = "; ".join(original.notes)
    pieces = written(tokenizer, recovery.ids)
    tokens = list(zip(pieces, recovery.marks, recovery.ids, strict=True))
    exact = original.is_exactly(tokenizer, recovery.ids)
    if exact and list(recovery.ids) != list(truth):
        # Another token for the first word, with the space before it: no mistake.
        read = tokens_read(tokenizer, recovery)
        pieces = tuple(Piece(piece, mark.value, True) for piece, mark, _ in read)
    elif len(tokens) == len(truth):
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
        pieces = tuple(aligned(tokens_read(tokenizer, recovery), _inside(tokenizer, truth)))
    return Reading(original.text, pieces, exact, recovery.verified, note)


def readings_of(
    tokenizer: Any, originals: Sequence[Original], recoveries: Sequence[TextRecovery]
) -> tuple[Reading, ...]:
    pairs = zip(originals, recoveries, strict=True)
    return tuple(reading_of(tokenizer, *pair) for pair in pairs)


def verdict(results: Sequence[Readings], read_with: str) -> tuple[Status, str]:
    """The status of one exposure by its first precision; the reason lists the others as well.

    `read_with` says what the attack used besides the leak.
    """
    if not results:
        return Status.NOT_APPLICABLE, "no precision asked for is tried"
    count = len(results[0].readings)
    exact, known = results[0].exact, results[0].known
    shares = [f"{result.precision} {percent(result.known)}" for result in results]
    reason = f"{exact} of {count} texts exact and verified; tokens right: {', '.join(shares)}"
    notes = list(dict.fromkeys(reading.note for reading in results[0].readings if reading.note))
    more = [f"{len(notes) - _NOTES} more texts are not whole"] if len(notes) > _NOTES else []
    reason = "; ".join([reason, *notes[:_NOTES], *more, *([read_with] if read_with else [])])
    if exact == count:
        return Status.RECOVERED, reason
    if results[0].kind == "pooled":
        reason = f"{reason}; {NOT_ARRIVED}: {LEARN_MORE}"
    if exact or known >= PARTLY:
        return Status.INEXACT, reason
    if results[0].kind != "pooled" and known:
        reason = f"{reason}; guesses without the leak have {percent(results[0].chance or 0)} right"
        if not explained(results[0]):
            return Status.INEXACT, reason
    return Status.BUDGET if results[0].kind == "pooled" else Status.UNSOLVED, reason


# Which layers of a model an audit looks at, and which it leaves out.

Layers = Sequence[int] | Literal["all"]
_CHOSEN = ("hidden", "kv")  # the kinds of leaks whose layers --layers chooses


def layers_of(row: Row, chosen: Layers | None, parts: Anatomy) -> Sequence[int | None]:
    """The layers that are looked at: the registry's own choice, or a person's."""
    if chosen is None or row.kind not in _CHOSEN:
        return row.layers(parts)
    if chosen == "all":
        return _every_layer(row.kind, parts)
    for layer in chosen:
        Captured(row.kind, layer).block(parts)  # refused before the first check
    return list(chosen)


def _every_layer(kind: str, parts: Anatomy) -> range:
    """Counted as the exposure counts them: a causal model's cache from 0, all others from 1."""
    first = 0 if kind == "kv" and parts.causal else 1
    return range(first, first + parts.layers)


def left_out(part: str, model: Any, chosen: Layers | None) -> tuple[Skip, ...]:
    """Layers that were not tried, of each exposure of which other layers were."""
    try:
        parts = anatomy(model)
    except InputError:  # the checks of texts say so
        return ()
    rows = [row for _, row in ATTACKS.rows() if row.causal == parts.causal]
    tried: dict[str, set[int]] = {}
    for row in rows:
        if not row.permuted:
            numbers = (layer for layer in layers_of(row, chosen, parts) if layer is not None)
            tried.setdefault(row.kind, set()).update(numbers)
    exposures = {row.kind: row.exposure for row in reversed(rows) if not row.permuted}
    return tuple(
        _untried(replace(exposures[kind], part=part), kind, layers, parts)
        for kind, layers in tried.items()
        if layers and not layers.issuperset(_every_layer(kind, parts))
    )


def _untried(exposure: Exposure, kind: str, tried: set[int], parts: Anatomy) -> Skip:
    every = _every_layer(kind, parts)
    missing = [layer for layer in every if layer not in tried]
    inside = sum(layer in every for layer in tried)  # hidden states of layer 0 are the embeddings
    other = f"keyhole lab capture --expose {kind}:{missing[0]}, then keyhole recover"
    how = "--layers all tries every one" if kind in _CHOSEN else f"these take longer: {other}"
    reason = f"{inside} of {parts.layers} layers were tried; {how}"
    return Skip(exposure, "none", reason, layers=tuple(missing))


# How many tokens of a reading are right by chance.
#
# A guess of "the" and "." at usual positions is sometimes right, without any leak. So a reading is
# also compared with texts that it was not read from: the others of the audit, and ordinary English
# sentences. Where no more of it is right for its own text than for those, nothing was given away;
# where more is, by odds of a thousand to one, something was, although it was not verified.

_SENTENCES = 64  # of the corpus that ships
_BY_CHANCE = 1e-3  # the probability of as much by chance, above which chance explains it


def share_by_chance(
    tokenizer: Any,
    originals: Sequence[Original],
    recoveries: Sequence[TextRecovery],
    max_length: int,
) -> float:
    """The share of tokens that agree with other texts, or with ordinary sentences if more."""
    texts = [_inside(tokenizer, original.ids) for original in originals]
    read = [_inside(tokenizer, recovery.ids) for recovery in recoveries]
    lines = islice(corpus_texts(SHIPPED), _SENTENCES)
    ordinary = [_inside(tokenizer, Original.of(tokenizer, line, max_length).ids) for line in lines]
    shares: list[float] = []
    for others in (texts, ordinary):
        tallies = [
            _agreeing(ids, other, in_place=len(ids) == len(own))
            for number, (ids, own) in enumerate(zip(read, texts, strict=True))
            for place, other in enumerate(others)
            if others is ordinary or place != number
        ]
        right, total = sum(right for right, _ in tallies), sum(total for _, total in tallies)
        if total:  # one more than were right: a small sample may understate chance
            shares.append((right + 1) / (total + 1))
    return max(shares, default=1.0)


def explained(result: Readings) -> bool:
    """Can chance explain how many tokens are right?"""
    if result.chance is None:
        return True
    from scipy.stats import binom  # on demand: it takes a second to load

    pieces = [piece for reading in result.readings for piece in reading.pieces]
    right = sum(piece.counts for piece in pieces)
    # The probability of so many right or more, each by itself with the probability `chance`.
    return float(binom.sf(right - 1, len(pieces), result.chance)) > _BY_CHANCE


def _inside(tokenizer: Any, ids: Sequence[int]) -> list[int]:
    """Without special tokens, which stand in every text."""
    special = special_ids(tokenizer)
    return [id_ for id_ in ids if id_ not in special]


def _agreeing(ids: Sequence[int], truth: Sequence[int], *, in_place: bool) -> tuple[int, int]:
    """How many tokens are right, of how many; unless `in_place`, after an alignment."""
    if in_place:
        both = list(zip(ids, truth, strict=False))
        return sum(read == true for read, true in both), len(both)
    blocks = SequenceMatcher(None, truth, ids, autojunk=False).get_matching_blocks()
    return sum(block.size for block in blocks), max(len(ids), len(truth))


# What was read next to the original, where a text's length did not leak with it.
#
# Positions alone say little then: a word that is missing would make all behind it wrong.


def aligned(tokens: Sequence[tuple[str, Mark, int]], truth: Sequence[int]) -> Iterator[Piece]:
    """Tokens (as text, the judge's mark, id) as right or wrong.

    There is a question mark for every one that is missing.
    """
    ids = [id_ for _, _, id_ in tokens]
    matcher = SequenceMatcher(None, truth, ids, autojunk=False)
    for kind, from_, to, start, end in matcher.get_opcodes():
        for place, (piece, mark, _) in enumerate(tokens[start:end], start):
            # The first token is written without a space before it, but others may be missing there.
            space = " " if place == 0 and from_ > 0 else ""
            yield Piece(f"{space}{piece}", mark.value, kind == "equal")
        for _ in range(max(0, (to - from_) - (end - start))):
            yield Piece(" ?", Mark.UNKNOWN.value, False)


_IDS = "Treat the file as the prompt: it holds the token ids as they are. Keep it encrypted."


@dataclass(frozen=True, eq=False)
class LeakTarget(Part):
    """Leaks in one file, and the model that they come from."""

    name: str
    loaded: Loaded
    leaks: Sequence[Opened]
    observed = True

    @property
    def identity(self) -> str:
        digests = " ".join(opened.leak.digest for opened in self.leaks)
        return f"{digests}; {self.loaded.identity}"

    def checks(self, seed: int, *, against_defences: bool = False) -> list[Check]:  # noqa: ARG002
        """For each text of the file: the ids that stand in it, and the attack on the rest."""
        made: list[Check] = []

        def add(exposure: Exposure, opened: Opened, attack: Attack | None) -> None:
            exposure = replace(exposure, name=opened.name)
            made.append(Check(exposure, partial(self._check, exposure, opened.leak, attack)))

        for opened in self.leaks:
            if opened.ids is not None:
                add(Exposure("KH-TEXT-TOKEN-IDS"), opened, WrittenIds([opened.ids]))
            leaking = opened.leak.exposure
            layer = None if leaking.kind in ("pooled", "logits") else leaking.layer
            sealed = Sealed(opened.sealed) if opened.sealed else None
            add(replace(exposure_of(leaking.kind), variant="file", layer=layer), opened, sealed)
        return made

    def _check(
        self, exposure: Exposure, leak: Leak, attack: Attack | None, track: Track
    ) -> Checked:
        started = time.perf_counter()
        model, tokenizer = self.loaded.model, self.loaded.tokenizer
        progress = track(f"tokens from {leak.exposure}", leak.length)
        recovery = recover_text(model, tokenizer, leak, method=attack, progress=progress)
        kind, layer = leak.exposure.kind, leak.exposure.layer
        readings = (reading_alone(tokenizer, recovery),)
        result = Readings(kind, layer, leak.precision or "float32", readings)
        return found(
            exposure, recovery.method, recovery.status, recovery.reason,
            _IDS if isinstance(attack, WrittenIds) else _remedy(leak, recovery.method), started,
            queries=0, known=result.known if recovery.status is not Status.MISMATCH else 0.0,
            sought="text", texts=(result,),
        )  # fmt: skip


def _remedy(leak: Leak, method: str) -> str:
    kind = "mixed" if method == MixedKeys.__name__ else leak.kind
    return next(row.remedy for _, row in ATTACKS.rows() if row.kind == kind)
