"""Checks of text: how much of it can be read from each exposure of a model with public weights?

The auditor runs the model on texts and takes what would leak, in float32 and in the
precisions of real leaks. The attack gets the model and the leak, nothing else. The
auditor knows the texts and compares them with what was read, so that a wrong claim of
the judge would show.

recover/registry.py lists which attack is tried on which kind of leak, and at which
layers. A file that holds leaks is a target of its own (`LeakTarget`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from functools import partial
from itertools import islice, starmap
from operator import eq
from pathlib import Path
from typing import Any, Literal

import torch

from keyhole.audit.check import Check, Checked, Part, one_finding, skipped_check
from keyhole.audit.options import AuditOptions
from keyhole.core import OUTCOMES, Outcome, Skip, Status
from keyhole.core.errors import InputError
from keyhole.core.exposure import Exposure
from keyhole.core.finding import Piece, Reading, Readings
from keyhole.core.progress import Track
from keyhole.core.text import percent
from keyhole.data import Example
from keyhole.models.anatomy import Anatomy, anatomy
from keyhole.models.capture import KINDS
from keyhole.models.capture import Exposure as Captured
from keyhole.models.loading import Loaded
from keyhole.models.pieces import unknown_token, written
from keyhole.recover import Mark, TextRecovery, recover_text, recover_texts
from keyhole.recover.attack import Attack
from keyhole.recover.embeddings.counts import SHIPPED, corpus_texts
from keyhole.recover.files.contents import Opened, Sealed, WrittenIds
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

PARTLY = (
    0.5  # the share of right tokens from which on a text counts as recovered in part
)
# About how many seconds a check takes on a small model; of hidden states, as many as
# there are layers below them.
_SECONDS = {"maps": 6, "attention": 5, "kv": 5, "pooled": 16, "logits": 16}
_MAX_NOTES = 3  # notes of texts that a reason repeats


@dataclass(frozen=True, eq=False)
class TextTarget:
    """A model and the texts to try it with.

    - `layers`: the layers to attack, or "all"; None for those of the registry.
    - `notes`: short texts in addition, for attacks that read only such texts.
    - `corpus`: a file of similar texts, for attacks that learn from one.
    - `examples`: what a classifier's predictions are flipped on; by default the texts. `about` says
      how they were chosen. `hardened` is the same model trained against flips, for
      comparison.
    - `encoder`: states (m, e) of an encoder; then the model is its decoder.
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
            raise InputError(
                f"precisions must be one or more of {', '.join(PRECISIONS)}"
            )

    def tried(self, precisions: Sequence[str]) -> list[str]:
        """Return those of an attack's precisions that are asked for."""
        return [name for name in precisions if name in self.precisions]


def checks(
    part: str,
    target: TextTarget,
    seed: int,
) -> list[Check]:
    """Return a check for every exposure of a model from which text may be read."""
    parts = anatomy(target.loaded.model)
    checks: list[Check] = []
    for name, row in _attacks_by_kind():
        wanted = not row.permuted or PERMUTED in target.precisions
        if row.causal == parts.causal and wanted:
            for layer in layers_of(row, target.layers, parts):
                try:
                    Captured(row.kind, layer or 0).block(parts)
                except InputError as error:  # this model does not have it
                    skip = Skip(
                        replace(row.exposure, layer=layer, part=part),
                        "none",
                        str(error),
                    )
                    checks.append(skipped_check(skip))
                else:
                    checks.append(_check_of(row, layer, part, name, target, seed))
    return [*checks, *map(skipped_check, _skips(parts))]


def _check_of(
    row: Row,
    layer: int | None,
    part: str,
    name: str,
    target: TextTarget,
    seed: int,
) -> Check:
    """Return the check of one exposure by the attack of this name."""
    exposure = replace(row.exposure, layer=layer, part=part)
    if not target.tried(row.precisions):
        return skipped_check(no_precision(exposure))
    settings = dict(row.settings)
    if "corpus" in ATTACKS[name].options:
        settings["corpus"] = target.corpus
    attack = ATTACKS.make(name, **settings)
    run = partial(_check, row, attack, exposure, target, seed)
    return Check(exposure, run, name, weight=_SECONDS.get(row.kind, 1 + (layer or 0)))


def no_precision(exposure: Exposure) -> Skip:
    reason = "no precision asked for is tried"
    return Skip(exposure, "none", reason, unchecked=True)


def checks_of(
    part: str,
    target: TextTarget,
    leak: Captured,
    precision: str,
    seed: int,
) -> list[Check]:
    """Return the checks of one exposure in one precision, by the attacks that an audit tries.

    If an audit tries none, by those that learn from the target's corpus, or else by the
    first.
    """
    parts = anatomy(target.loaded.model)
    leak.block(parts)  # raises if there is no such layer
    exposure = exposure_of_leak(leak)
    wanted = (leak.kind, parts.causal, precision == PERMUTED)
    reading = [
        (name, row)
        for name, row in _attacks_by_kind()
        if (row.kind, row.causal, row.permuted) == wanted
    ]
    if not reading:
        return [skipped_check(Skip(exposure, "none", _unread_of(parts)))]
    tried = [pair for pair in reading if pair[1].layers(parts)]
    if not tried and target.corpus:
        tried = [pair for pair in reading if "corpus" in ATTACKS[pair[0]].options]
    target = replace(target, precisions=(precision,))
    return [
        _check_of(
            replace(row, precisions=(precision,)),
            exposure.layer,
            part,
            name,
            target,
            seed,
        )
        for name, row in tried or reading[:1]
    ]


def _attacks_by_kind() -> list[tuple[str, Row]]:
    """Return the names and rows of the registry, ordered by the kind of leak."""
    rows = [(entry.name, row) for entry, row in ATTACKS.rows()]
    kinds = list(dict.fromkeys(row.kind for _, row in rows))
    return sorted(rows, key=lambda pair: kinds.index(pair[1].kind))


def exposure_of(kind: str) -> Exposure:
    """Return what a kind of leak exposes."""
    return next(
        row.exposure
        for _, row in ATTACKS.rows()
        if row.kind == kind and not row.permuted
    )


def exposure_of_leak(leak: Captured) -> Exposure:
    """Return what a leak exposes, with its layer if it comes from one."""
    exposure = exposure_of(leak.kind)
    if leak.kind in ("pooled", "logits"):
        return exposure
    return replace(exposure, layer=leak.layer)


def _unread_of(parts: Anatomy) -> str:
    if parts.causal:
        return "no attack reads it of a causal model"
    return "no attack reads it of an encoder"


def _skips(parts: Anatomy) -> list[Skip]:
    """Return what no attack reads of such a model, and what takes longer than an audit."""
    kinds = [kind for kind in KINDS if parts.causal or kind != "logits"]
    skips: list[Skip] = []
    for kind in kinds:
        reading = [
            row
            for _, row in ATTACKS.rows()
            if (row.kind, row.causal) == (kind, parts.causal)
        ]
        names = " or ".join(readers(kind, parts.causal))
        reason = (
            f"takes longer than an audit: keyhole lab capture, recover --method {names}"
        )
        if not reading:
            reason = _unread_of(parts)
        if not any(row.layers(parts) for row in reading):
            skips.append(Skip(exposure_of(kind), "none", reason))
    return skips


def _check(
    row: Row,
    attack: Attack,
    exposure: Exposure,
    target: TextTarget,
    seed: int,
    track: Track,
) -> Checked:
    model = target.loaded.model
    tokenizer = target.loaded.tokenizer
    leaking = Captured(row.kind, exposure.layer or 0)
    texts = list(target.texts)
    if row.short:
        texts += target.notes
    exact = [
        leak_of(model, tokenizer, text, leaking, encoder=target.encoder)
        for text in texts
    ]
    originals = originals_of(target.loaded, texts)
    layer = exposure.layer
    if layer is None:  # a pooled embedding, for example, comes from the last one
        layer = anatomy(model).layers
    results: list[Readings] = []
    first: list[TextRecovery] = []
    for precision in target.tried(row.precisions):
        leaks = [
            _degraded(leak, precision, seed + number)
            for number, leak in enumerate(exact)
        ]
        progress = track(f"{words.exposure(exposure)}, {precision}")
        recoveries = recover_texts(
            model, tokenizer, leaks, method=attack, progress=progress
        )
        readings = readings_of(tokenizer, originals, recoveries)
        results.append(Readings(row.kind, layer, precision, readings))
        first = first or recoveries
    chance = share_by_chance(tokenizer, originals, first, max_length_of(model))
    results[0] = replace(results[0], chance=chance)
    status, reason = verdict(results, getattr(attack, "note", ""))
    if status is Status.UNSOLVED:
        status, reason = unread(first, reason)
    if row.short and target.notes:
        reason = f"{reason}; {len(target.notes)} of the texts are short ones, chosen to show it"
    return one_finding(
        exposure,
        type(attack).__name__,
        status,
        reason,
        row.remedy,
        queries=len(texts),
        known=results[0].known,
        sought="text",
        texts=tuple(results),
    )


def max_length_of(model: Any) -> int:
    """Return after how many tokens the texts of an audit are cut off."""
    return min(MAX_LENGTH, anatomy(model).max_length)


def originals_of(loaded: Loaded, texts: Sequence[str]) -> list[Original]:
    max_length = max_length_of(loaded.model)
    return [Original.of(loaded.tokenizer, text, max_length) for text in texts]


def unread(recoveries: Sequence[TextRecovery], reason: str) -> tuple[Status, str]:
    """Return the status and reason of texts that were not read, as the attack states them."""
    unfinished = [r for r in recoveries if OUTCOMES[r.status] is Outcome.UNCHECKED]
    if unfinished:  # a search that did not end does not show that the text is safe
        return unfinished[0].status, f"{reason}; {unfinished[0].reason}"
    if all(recovery.status is Status.NOT_IDENTIFIABLE for recovery in recoveries):
        return Status.NOT_IDENTIFIABLE, f"{reason}; {recoveries[0].reason}"
    return Status.UNSOLVED, reason


def _degraded(
    leak: Leak,
    precision: str,
    seed: int,
) -> Leak:
    if precision == NOISE:
        return replace(degrade(leak, noise=0.1, seed=seed), precision=None)
    if precision in (NORMALISED, PERMUTED):
        return degrade(leak, seed=seed, forms=[precision])
    return degrade(leak, precision)


def special_ids(tokenizer: Any) -> set[int]:
    """Return the ids of tokens that stand for no text; the unknown token stands for some."""
    return set(tokenizer.all_special_ids) - {unknown_token(tokenizer)}


Token = tuple[str, Mark, int]  # its text, the judge's mark, its id


def tokens_read(tokenizer: Any, recovery: TextRecovery) -> list[Token]:
    """Return the tokens that were read, without special ones."""
    special = special_ids(tokenizer)
    pieces = written(tokenizer, recovery.ids)
    tokens = zip(pieces, recovery.marks, recovery.ids, strict=True)
    return [token for token in tokens if token[2] not in special]


def reading_alone(
    tokenizer: Any,
    recovery: TextRecovery,
    note: str = "",
    similarity: float | None = None,
) -> Reading:
    """Return what was read of an unknown text: a verified token counts as right."""
    tokens = tokens_read(tokenizer, recovery)
    return Reading(
        original="",
        pieces=tuple(Piece(piece, mark.value, None) for piece, mark, _ in tokens),
        exact=recovery.status is Status.RECOVERED,
        verified=recovery.verified,
        note=note,
        tokens=len(tokens),
        similarity=similarity,
    )


def reading_of(
    tokenizer: Any,
    original: Original,
    recovery: TextRecovery,
) -> Reading:
    """Compare what was read with the text, token by token."""
    truth = original.ids
    special = special_ids(tokenizer)
    note = "; ".join(original.notes)
    read = tokens_read(tokenizer, recovery)
    exact = original.is_exactly(tokenizer, recovery.ids)
    if exact and list(recovery.ids) != list(truth):
        # The first word as another token, with the space before it: no mistake.
        pieces = tuple(Piece(piece, mark.value, True) for piece, mark, _ in read)
    elif len(recovery.ids) == len(truth):
        every = zip(
            written(tokenizer, recovery.ids), recovery.marks, recovery.ids, strict=True
        )
        pieces = tuple(
            # A special token read in place of a word is shown, though it is not part of
            # a text.
            Piece(
                f" {tokenizer.convert_ids_to_tokens(id_)}" if id_ in special else piece,
                mark.value,
                id_ == true,
            )
            for (piece, mark, id_), true in zip(every, truth, strict=True)
            if true not in special
        )
    else:  # another length than the text's, or no proposal at all
        pieces = tuple(aligned(read, without_special(tokenizer, truth)))
    return Reading(original.text, pieces, exact, recovery.verified, note)


def readings_of(
    tokenizer: Any,
    originals: Sequence[Original],
    recoveries: Sequence[TextRecovery],
) -> tuple[Reading, ...]:
    pairs = zip(originals, recoveries, strict=True)
    return tuple(reading_of(tokenizer, *pair) for pair in pairs)


def verdict(results: Sequence[Readings], read_with: str) -> tuple[Status, str]:
    """Return the status of an exposure in its first precision, and a reason that lists all.

    `read_with` says what the attack used besides the leak.
    """
    first = results[0]
    notes = list(
        dict.fromkeys(reading.note for reading in first.readings if reading.note)
    )
    if len(notes) > _MAX_NOTES:
        notes[_MAX_NOTES:] = [f"{len(notes) - _MAX_NOTES} more texts are not whole"]
    reason = "; ".join(filter(None, [summary(results), *notes, read_with]))
    status = status_of(first)
    if status is Status.RECOVERED:
        return status, reason
    if first.kind == "pooled":
        reason += f"; {NOT_ARRIVED}: {LEARN_MORE}"
    elif not first.exact and 0 < first.known < PARTLY:
        reason += f"; guesses without the leak have {percent(first.chance or 0)} right"
    return status, reason


def status_of(result: Readings) -> Status:
    """Return whether all, some or none of the texts of an exposure were read."""
    if result.exact == len(result.readings):
        return Status.RECOVERED
    if result.exact or result.known >= PARTLY:
        return Status.INEXACT
    if result.kind == "pooled":
        return Status.BUDGET
    if result.known and not explained(result):
        return Status.INEXACT
    return Status.UNSOLVED


def summary(results: Sequence[Readings]) -> str:
    first = results[0]
    shares = [f"{result.precision} {percent(result.known)}" for result in results]
    return (
        f"{first.exact} of {len(first.readings)} texts exact and verified; "
        f"tokens right: {', '.join(shares)}"
    )


# The layers of a model that an audit attacks, and those that it leaves out.

Layers = Sequence[int] | Literal["all"]
_WITH_LAYERS = ("hidden", "kv")  # the kinds of leaks that --layers applies to


def layers_of(
    row: Row,
    chosen: Layers | None,
    parts: Anatomy,
) -> Sequence[int | None]:
    """Return the layers to attack: the `chosen` ones, or those of the registry."""
    if chosen is None or row.kind not in _WITH_LAYERS:
        return row.layers(parts)
    if chosen == "all":
        return _all_layers(row.kind, parts)
    for layer in chosen:
        Captured(row.kind, layer).block(parts)  # raises if there is no such layer
    return list(chosen)


def _all_layers(kind: str, parts: Anatomy) -> range:
    """Return the numbers of all layers: of a causal model's cache from 0, of all else from 1."""
    if kind == "kv" and parts.causal:
        return range(parts.layers)
    return range(1, 1 + parts.layers)


def left_out(
    part: str,
    model: Any,
    chosen: Layers | None,
) -> tuple[Skip, ...]:
    """Return a skip for each exposure of which some layers are tried and others are not."""
    try:
        parts = anatomy(model)
    except InputError:  # the checks of texts report it
        return ()
    tried: dict[str, set[int | None]] = {}
    for _, row in ATTACKS.rows():
        if row.causal == parts.causal and not row.permuted:
            numbers = layers_of(row, chosen, parts)
            tried.setdefault(row.kind, set()).update(numbers)
    skips: list[Skip] = []
    for kind, layers in tried.items():
        every = _all_layers(kind, parts)
        missing = [layer for layer in every if layer not in layers]
        if missing and layers - {None}:
            how = f"these take longer: keyhole lab capture --expose {kind}:{missing[0]}, then "
            how += "keyhole recover"
            if kind in _WITH_LAYERS:
                how = "--layers all tries every one"
            count = len(every) - len(missing)
            reason = f"{count} of {parts.layers} layers were tried; {how}"
            exposure = replace(exposure_of(kind), part=part)
            skips.append(Skip(exposure, "none", reason, layers=tuple(missing)))
    return tuple(skips)


# How many tokens of a reading are right by chance.
#
# Without any leak, guesses such as "the" and "." at usual positions are sometimes
# right. So a reading is also compared with texts that it was not read from: the others
# of the audit, and ordinary English sentences. If more tokens are right for its own
# text than for those, by odds of a thousand to one, then something was given away, even
# if it was not verified.

_SENTENCES = 64  # of the corpus that ships with Keyhole
_BY_CHANCE = 1e-3  # the least probability of a result that chance explains


def share_by_chance(
    tokenizer: Any,
    originals: Sequence[Original],
    recoveries: Sequence[TextRecovery],
    max_length: int,
) -> float:
    """Return the share of tokens that agree with other texts or with ordinary sentences.

    Of these two shares it is the larger one.
    """
    texts = [without_special(tokenizer, original.ids) for original in originals]
    read = [without_special(tokenizer, recovery.ids) for recovery in recoveries]
    ordinary = [
        without_special(tokenizer, Original.of(tokenizer, line, max_length).ids)
        for line in islice(corpus_texts(SHIPPED), _SENTENCES)
    ]
    shares: list[float] = []
    for others in (texts, ordinary):
        tallies = [
            _agreeing(ids, other, in_place=len(ids) == len(own))
            for number, (ids, own) in enumerate(zip(read, texts, strict=True))
            for place, other in enumerate(others)
            if others is ordinary or place != number
        ]
        right = sum(right for right, _ in tallies)
        total = sum(total for _, total in tallies)
        if total:  # add one, because a small sample may understate chance
            shares.append((right + 1) / (total + 1))
    return max(shares, default=1.0)


def explained(result: Readings) -> bool:
    """Whether chance can explain how many tokens are right."""
    if result.chance is None:
        return True
    from scipy.stats import binom  # on demand: it takes a second to load

    pieces = [piece for reading in result.readings for piece in reading.pieces]
    right = sum(piece.counts for piece in pieces)
    # The probability that so many or more are right, if each is right with probability
    # `chance`.
    return float(binom.sf(right - 1, len(pieces), result.chance)) > _BY_CHANCE


def without_special(tokenizer: Any, ids: Sequence[int]) -> list[int]:
    special = special_ids(tokenizer)
    return [id_ for id_ in ids if id_ not in special]


def _agreeing(
    ids: Sequence[int],
    truth: Sequence[int],
    *,
    in_place: bool,
) -> tuple[int, int]:
    """Return how many tokens are right, and of how many; they are aligned unless `in_place`.

    In place, the first half is compared from the beginning and the rest from the end:
    guesses know the length, and so where the last full stop is.
    """
    if in_place:
        middle = len(ids) // 2
        fronts = zip(ids[:middle], truth, strict=False)
        pairs = [*fronts, *zip(ids[middle:][::-1], truth[::-1], strict=False)]
        return sum(starmap(eq, pairs)), len(pairs)
    blocks = SequenceMatcher(None, truth, ids, autojunk=False).get_matching_blocks()
    return sum(block.size for block in blocks), max(len(ids), len(truth))


def aligned(tokens: Sequence[Token], truth: Sequence[int]) -> Iterator[Piece]:
    """Yield tokens as right or wrong after an alignment with the text, and "?" for missing ones.

    Needed if the length of the text did not leak: without an alignment, one missing
    token would make all that follow it wrong.
    """
    ids = [id_ for _, _, id_ in tokens]
    matcher = SequenceMatcher(None, truth, ids, autojunk=False)
    for kind, from_, to, start, end in matcher.get_opcodes():
        for place, (piece, mark, _) in enumerate(tokens[start:end], start):
            # The first token has no space before it, but tokens may be missing in front
            # of it.
            if place == 0 and from_ > 0:
                piece = f" {piece}"
            yield Piece(piece, mark.value, kind == "equal")
        for _ in range(max(0, (to - from_) - (end - start))):
            yield Piece(" ?", Mark.UNKNOWN.value, False)


# Files that hold leaks.

_UNFITTING = (
    0.5  # the share of a leak's spread that a text of the right model would explain
)
_REMEDY_OF_IDS = (
    "Treat the file as the prompt: it holds the token ids as they are. Keep it "
    "encrypted."
)


@dataclass(frozen=True, eq=False)
class LeakTarget(Part):
    """The leaks in a file, and the model that they come from."""

    name: str
    loaded: Loaded
    leaks: Sequence[Opened]
    observed = True

    @property
    def identity(self) -> str:
        digests = " ".join(opened.leak.digest for opened in self.leaks)
        return f"{digests}; {self.loaded.identity}"

    def checks(self, options: AuditOptions) -> list[Check]:  # noqa: ARG002
        """Return the checks of each text in the file: of its token ids, if any, and of its leak."""
        checks: list[Check] = []

        def add(
            exposure: Exposure,
            opened: Opened,
            attack: Attack | None,
        ) -> None:
            exposure = replace(exposure, name=opened.name)
            checks.append(
                Check(exposure, partial(self._check, exposure, opened.leak, attack))
            )

        for opened in self.leaks:
            if opened.ids is not None:
                add(Exposure("KH-TEXT-TOKEN-IDS"), opened, WrittenIds([opened.ids]))
            exposure = replace(exposure_of_leak(opened.leak.exposure), variant="file")
            sealed = Sealed(opened.sealed) if opened.sealed else None
            add(exposure, opened, sealed)
        return checks

    def _check(
        self,
        exposure: Exposure,
        leak: Leak,
        attack: Attack | None,
        track: Track,
    ) -> Checked:
        tokenizer = self.loaded.tokenizer
        given = leak.exposure
        progress = track(f"tokens from {given}", leak.length)
        recovery = recover_text(
            self.loaded.model, tokenizer, leak, method=attack, progress=progress
        )
        readings = (reading_alone(tokenizer, recovery),)
        result = Readings(
            given.kind, given.layer, leak.precision or "float32", readings
        )
        kind = "mixed" if recovery.method == MixedKeys.__name__ else leak.kind
        remedy = next(row.remedy for _, row in ATTACKS.rows() if row.kind == kind)
        if isinstance(attack, WrittenIds):
            remedy = _REMEDY_OF_IDS
        status = recovery.status
        reason = recovery.reason
        known = result.known
        unfitting = recovery.residual is None or recovery.residual > _UNFITTING
        if status is Status.UNSOLVED and leak.model is None and unfitting:
            status = Status.MISMATCH
            reason += "; nothing fits, and the file does not name its model: is it that of --model?"
        if status is Status.MISMATCH:
            known = 0.0
        return one_finding(
            exposure,
            recovery.method,
            status,
            reason,
            remedy,
            queries=0,
            known=known,
            sought="text",
            texts=(result,),
        )
