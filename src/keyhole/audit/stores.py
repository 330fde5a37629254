"""Texts from the embeddings that a vector store keeps: how many of them can be read exactly.

A sample of the vectors, chosen at random, is read back with the encoder's weights and nothing else
but counts of a corpus, which are made once. The share of the sample gives an interval for all
(`Estimate` in core/finding.py).
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from keyhole.audit.check import Check, Checked, Part, found
from keyhole.audit.texts import PARTLY, aligned, reading_alone, shortest, special_ids, tokens_read
from keyhole.core import Estimate, Finding, Readings, Status
from keyhole.core.errors import InputError
from keyhole.core.exposure import Exposure
from keyhole.core.finding import Reading
from keyhole.core.journal import digest
from keyhole.core.progress import Track
from keyhole.models import demo
from keyhole.models.anatomy import anatomy
from keyhole.models.capture import capture
from keyhole.models.loading import Loaded, identity
from keyhole.recover import Pooled, TextRecovery
from keyhole.recover.attack import Target as Attacked
from keyhole.recover.embeddings.counts import SHIPPED, corpus_texts, effort
from keyhole.recover.embeddings.encoder import Encoder, Texts, matrix_half
from keyhole.recover.embeddings.pooling import (
    AGREES,
    AGREES_QUANTISED,
    PREFIXES,
    Pooling,
    embeddings,
    encoder_max_length,
    from_known,
    from_settings,
    from_statistics,
    from_texts,
    likely_prefix,
    same_numbers,
)
from keyhole.recover.embeddings.reader import CountedReader
from keyhole.recover.originals import Original
from keyhole.recover.protection import (
    NEAREST,
    Defence,
    gaussian_noise,
    reading,
    retrieval,
    rounding,
)
from keyhole.recover.texts import LEARN_MORE, NOT_ARRIVED, recovering
from keyhole.report import words
from keyhole.stores import Store

_NO_SHARE = (Status.MISMATCH, Status.NOT_APPLICABLE, Status.BUDGET)  # the rest is not estimated
AT_ONCE = {"cpu": 1, "cuda": 256}  # vectors that one check reads
# Runs of the encoder for one text, at most: on a CPU what is read after more of them is little.
_PASSES = {"cpu": 5_000, "cuda": 1_000_000}
_TYPICAL = 0.85  # of those: what a text of usual length takes on average
_COUNTED = 35_000  # tokens that are run to count the corpus that ships
ORDINARY = (*demo.TEXTS, *(example.text for example in demo.EXAMPLES))  # texts of no store
_USUAL, _CHARACTERS = 10, 4  # tokens of a text that nobody knows, and characters of a token
_WITNESSES = 8  # texts with known vectors that the pooling is found out by
_MANY = 256  # vectors whose statistics stand for the store's
_OWN = 100  # texts of the corpus that ships whose vectors' statistics stand for the encoder's
_BEHIND = 4  # texts that are read behind each defence, the shortest
_RETRIEVED = 1_000  # vectors that retrieval is measured on, a tenth of them as queries
_NOISE = (0.1, 0.3, 1.0)  # of a vector's length: how long noise is


@dataclass(frozen=True, eq=False, kw_only=True)
class StoreTarget(Part):
    """A sample of a store's vectors, and the encoder to read them with; the store is closed again.

    `texts` are those that the store still has of them, None where it has none; `max_length` is
    after how many tokens the encoder cuts a text off; `rounding` is what the store says of how
    numbers were rounded (recover/leaks.py: Pooled). `method` is the attack, by default the one that
    counts the corpus that ships.
    """

    name: str
    store_identity: str
    count: int
    loaded: Loaded
    rows: tuple[int, ...]
    vectors: Tensor
    texts: tuple[str | None, ...]
    pooling: Pooling
    max_length: int
    rounding: Mapping[str, Any] = field(default_factory=dict[str, Any])
    method: CountedReader = field(default_factory=CountedReader)
    note: str = ""
    others: Tensor | None = None  # some vectors of the store, which retrieval is measured on
    observed = True

    @classmethod
    def of(
        cls, store: Store, loaded: Loaded, *, texts: int, known: Sequence[str] = (), seed: int = 0
    ) -> StoreTarget:
        """Sample an open store, and find out how its vectors were made."""
        if store.packed is not None and store.packed.dim == anatomy(loaded.model).width:
            store = store.packed
        if store.dim > anatomy(loaded.model).width:
            raise _another_width(store, loaded)
        rows = sample(store.count, texts, seed)
        if store.texts is not None:  # the shortest first: they are read soonest
            lengths = dict(zip(rows, (len(text or "") for text in store.texts(rows)), strict=True))
            rows = sorted(rows, key=lambda row: lengths[row])
        vectors = store.read(rows)
        kept = [None] * len(rows) if store.texts is None else store.texts(rows)
        max_length = min(encoder_max_length(loaded.name), anatomy(loaded.model).max_length)
        pooling = _pooling(store, loaded, vectors, kept, known, max_length)
        if pooling.exposure.width is not None:
            pooling = _truncated(store, loaded, pooling)
        return cls(
            name=store.name, store_identity=store.identity, count=store.count, loaded=loaded,
            rows=tuple(rows), vectors=vectors, texts=tuple(kept), pooling=pooling,
            max_length=max_length, rounding=store.rounding, note=store.note,
            others=store.read(sample(store.count, _RETRIEVED, seed)),
        )  # fmt: skip

    @property
    def identity(self) -> str:
        return f"{self.store_identity}; {self.loaded.identity}"

    @property
    def settings(self) -> dict[str, Any]:
        values = self.vectors.double().contiguous()
        return {
            "weights": identity(self.loaded.model),
            "pooling": str(self.pooling),
            "max_length": self.max_length,
            "method": self.method.settings,
            "texts": len(self.rows),
            "data": digest(list(self.rows), list(self.texts), values.numpy().tobytes()),
            "device": next(self.loaded.model.parameters()).device.type,
        }

    def checks(self, seed: int, *, against_defences: bool = False) -> list[Check]:
        """One for a few vectors each, so that an audit that is stopped keeps what it has read."""
        if self.pooling.error is not None and not self.pooling.sure:
            reason = f"{self.pooling.reason}; was it another encoder? Name it with --model"
            mismatch = Finding(EXPOSURE, "", Status.MISMATCH, reason, _REMEDY, sought="text")
            return [Check(EXPOSURE, lambda _: Checked((mismatch,)))]
        count, pace = len(self.rows), self._pace()
        step = AT_ONCE[anatomy(self.loaded.model).device.type]
        ready: list[CountedReader] = []
        made: list[Check] = []

        def attack(track: Track) -> CountedReader:  # counts the corpus in the first check
            if not ready:
                attacked = replace(self._attacked, track=track)
                way = self.pooling
                ready.append(self.method.ready(attacked, way.exposure, way.prefix))
            return ready[0]

        def read_some(few: StoreTarget, track: Track) -> Checked:
            return read(replace(few, method=attack(track)), track)

        for start in range(0, count, step):
            end = min(start + step, count)
            few = self.some(slice(start, end))
            run = partial(read_some, few)
            name = f"{start + 1}–{end} of {count}" if step > 1 else f"{end} of {count}"
            made.append(Check(EXPOSURE, run, name, weight=pace * self._work(start, end)))
        way = self.pooling.exposure
        if against_defences and way.normalised and way.width is None and not self.rounding:
            for defence in _defences(self.vectors.shape[1], seed):
                name = f"{defence.name}, {defence.strength}"
                exposure = replace(EXPOSURE, variant="defended", name=name)
                run = partial(_behind, self, exposure, defence, attack)
                made.append(Check(exposure, run, weight=pace * self._work(0, _BEHIND)))
        return made

    @property
    def _attacked(self) -> Attacked:
        return Attacked.of(self.loaded.model, self.loaded.tokenizer)

    def _work(self, start: int, end: int) -> float:
        """About how many tokens are run to read these texts, the first with the counting."""
        attacked = self._attacked
        passes = self.method.search.passes or _PASSES[attacked.parts.device.type]
        lengths = [_USUAL if text is None else len(text) // _CHARACTERS for text in self.texts]
        # A short text is read early, and all runs are spent on one that is not; 3 special tokens.
        tokens = sum(min(1.0, length / _USUAL) * (length + 3) for length in lengths[start:end])
        return _TYPICAL * passes * tokens + (0 if start else _COUNTED * effort(attacked))

    def _pace(self) -> float:
        """Seconds for a token of a run of the encoder, measured now."""
        encoder = Encoder(self._attacked, self.pooling.exposure, matrix_half())
        texts = Texts.filled(torch.full((128, 8), len(encoder.table) // 2, device=encoder.device))
        seconds = shortest(lambda: encoder.vectors(texts, fast=True))
        return seconds / encoder.framed(texts)[0].numel()

    def some(self, few: slice) -> StoreTarget:
        return replace(self, rows=self.rows[few], vectors=self.vectors[few], texts=self.texts[few])


def _truncated(store: Store, loaded: Loaded, pooling: Pooling) -> Pooling:
    """Refuse vectors of fewer numbers than the encoder gives, unless they are its first.

    Known texts show it, or else how the numbers vary together.
    """
    if pooling.error is not None:
        if not pooling.sure:
            raise _another_width(store, loaded, ", which are not its first ones")
        return pooling
    lines = corpus_texts(SHIPPED)
    some = lines[:: len(lines) // _OWN]
    own = embeddings(loaded.model, loaded.tokenizer, some, pooling.exposure)
    if not same_numbers(own, store.read(sample(store.count, _MANY, 0))):
        raise _another_width(
            store, loaded, ", which do not look like its first ones", " (or texts of the "
            "store with --known, which show it)"
        )  # fmt: skip
    return replace(
        pooling, reason=f"{pooling.reason}; they vary together as the encoder's first numbers do"
    )


def _another_width(store: Store, loaded: Loaded, but: str = "", fix: str = "") -> InputError:
    width = anatomy(loaded.model).width
    return InputError(
        f"{loaded.name} makes vectors of {width} numbers, and those in {store.name} have "
        f"{store.dim}{but}: give the encoder that made them with --model{fix}"
    )


def sample(count: int, texts: int, seed: int) -> list[int]:
    """So many of the rows, each as likely as any other, in ascending order."""
    return sorted(random.Random(seed).sample(range(count), min(texts, count)))  # noqa: S311


def _pooling(
    store: Store,
    loaded: Loaded,
    vectors: Tensor,
    texts: Sequence[str | None],
    known: Sequence[str],
    max_length: int,
) -> Pooling:
    """By texts whose vectors are known, by what the encoder says of itself, or by statistics."""
    width = store.dim if store.dim < anatomy(loaded.model).width else None
    encoder = (loaded.model, loaded.tokenizer)
    agrees = AGREES_QUANTISED if Path(loaded.name).suffix == ".gguf" else AGREES
    pairs = [(row, text) for row, text in enumerate(texts) if text and text.strip()][:_WITNESSES]
    rows, witnesses = [row for row, _ in pairs], [text for _, text in pairs]

    def by_texts(prefixes: Sequence[str]) -> Pooling:
        rest = (max_length, agrees, width, prefixes)
        if pairs:
            return from_texts(*encoder, witnesses, vectors[rows], *rest)
        return from_known(*encoder, known[:_WITNESSES], store.batches(), *rest)

    if pairs or known:
        plain = by_texts(("",))
        begun = plain if plain.sure else by_texts(PREFIXES)
        return begun if begun.sure else plain
    many = store.read(sample(store.count, _MANY, 0))
    guess = from_settings(loaded.name, many, width)
    guess = guess or from_statistics(*encoder, ORDINARY, many, width)
    prefix = likely_prefix(*encoder, ORDINARY, many, guess.exposure)
    reason = (
        f'{guess.reason}; texts seem to begin with "{prefix.strip()}"' if prefix else guess.reason
    )
    return replace(guess, prefix=prefix, reason=reason)


def quick(method: CountedReader, loaded: Loaded) -> CountedReader:
    """The same with as many runs of the encoder as an audit takes for a text."""
    attacked = Attacked.of(loaded.model, loaded.tokenizer)
    passes = round(_PASSES[attacked.parts.device.type] * effort(attacked))
    return replace(method, search=replace(method.search, passes=passes))


_Ready = Callable[[Track], CountedReader]


def texts_read(findings: Iterable[Finding]) -> list[Reading]:
    """The texts that were read, each finding's in its first precision."""
    return [reading for each in findings for cell in each.texts[:1] for reading in cell.readings]


def whole(store: StoreTarget | None, findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """The findings, with those about a few vectors of a store each put together."""
    if store is None:
        return tuple(findings)
    few = [each for each in findings if each.texts and each.exposure == EXPOSURE]
    others = [each for each in findings if not (each.texts and each.exposure == EXPOSURE)]
    return (*others, *([_joined(store, few)] if few else []))


def _joined(store: StoreTarget, parts: Sequence[Finding]) -> Finding:
    result = replace(parts[0].texts[0], readings=tuple(texts_read(parts)))
    status = status_of(result, [part.status for part in parts])
    count = len(result.readings)
    estimate, about = None, parts[0].reason
    if status is Status.BUDGET:
        about = f"none of the {count} texts tried was read: {NOT_ARRIVED}; {LEARN_MORE}"
    if status not in _NO_SHARE:
        estimate = Estimate.of(result.exact, count, store.count)
        about = str(estimate) if result.exact == count else f"{estimate}; {LEARN_MORE}"
    notes = (about, store.pooling.reason, store.note, store.method.note)
    reason = "; ".join(part for part in notes if part)
    seconds = sum(part.seconds for part in parts)
    return Finding(
        EXPOSURE, parts[0].attack, status, reason, _REMEDY, seconds=seconds, estimate=estimate,
        **_about(result),
    )  # fmt: skip


# A few of a store's vectors read back: one check of an audit.
#
# Where the store still has the texts, what was read is compared with them; where it does not, a
# text counts as read if running the encoder on it gives the vector again (recover/layers/judge.py).

EXPOSURE = Exposure("KH-TEXT-EMBEDDING", "stored")
_REMEDY = (
    "Guard stored embeddings like the texts themselves: the same access, encryption and retention; "
    "deleting a text means deleting its vector."
)
_SAME = (Status.MISMATCH, Status.NOT_APPLICABLE, Status.NOT_IDENTIFIABLE)  # of all, or of none


def read(part: StoreTarget, track: Track) -> Checked:
    """Read all vectors of a part, and say what became of each."""
    started = time.perf_counter()
    recoveries = _recover(part, track)
    readings = tuple(_reading(part, place, recovery) for place, recovery in enumerate(recoveries))
    result = Readings("pooled", anatomy(part.loaded.model).layers, "as stored", readings)
    status = status_of(result, [recovery.status for recovery in recoveries])
    first = recoveries[0]
    return found(EXPOSURE, first.method, status, first.reason, _REMEDY, started, **_about(result))


def _about(result: Readings) -> dict[str, Any]:
    return {
        "queries": len(result.readings), "known": result.known, "sought": "text",
        "texts": (result,),
    }  # fmt: skip


def status_of(result: Readings, statuses: Sequence[Status]) -> Status:
    """What became of all texts; `statuses` are those of each, or of some of them together."""
    if len(set(statuses)) == 1 and statuses[0] in _SAME:
        return statuses[0]
    if result.exact == len(result.readings):
        return Status.RECOVERED
    partly = result.exact or Status.INEXACT in statuses or result.known >= PARTLY
    return Status.INEXACT if partly else Status.BUDGET


def _recover(part: StoreTarget, track: Track) -> list[TextRecovery]:
    way = part.pooling.exposure
    leaks = [
        Pooled(vector, way.pooling, way.normalised, width=way.width, unit=way.unit, **part.rounding)
        for vector in part.vectors
    ]
    progress = track(words.exposure(EXPOSURE), total=len(leaks))
    recoveries: dict[int, TextRecovery] = {}
    for number, recovery in recovering(
        part.loaded.model, part.loaded.tokenizer, leaks, method=part.method, track=track
    ):
        recoveries[number] = recovery
        progress(len(recoveries))
    return [recoveries[number] for number in range(len(leaks))]


def _reading(part: StoreTarget, place: int, recovery: TextRecovery) -> Reading:
    """What was read of one vector, next to the store's own text where it has one."""
    tokenizer, text = part.loaded.tokenizer, part.texts[place]
    near = _similarity(part, place, recovery)
    if text is None or not text.strip():
        note = f"vector {part.rows[place]}: the store has no text of it"
        return reading_alone(tokenizer, recovery, note, near)
    original = Original.of(tokenizer, part.pooling.prefix + text, part.max_length)
    tokens, special = tokens_read(tokenizer, recovery), special_ids(tokenizer)
    truth = [id_ for id_ in original.ids if id_ not in special]
    return Reading(
        original=original.text,
        pieces=tuple(aligned(tokens, truth)),
        exact=original.is_exactly(tokenizer, recovery.ids),
        verified=recovery.verified,
        note="; ".join(original.notes),
        tokens=len(truth),
        overlap=_overlap([id_ for _, _, id_ in tokens], truth),
        similarity=near,
    )


def _similarity(part: StoreTarget, place: int, recovery: TextRecovery) -> float | None:
    """The cosine of a vector with that of the text that was read; None where none was."""
    if not recovery.ids:
        return None
    model = part.loaded.model
    ids = torch.tensor([recovery.ids], device=anatomy(model).device)
    with torch.no_grad():
        made = capture(model, part.pooling.exposure, ids=ids)["values"][0].cpu().double()
    return float(torch.cosine_similarity(made, part.vectors[place].cpu().double(), dim=0))


def _overlap(ids: Sequence[int], truth: Sequence[int]) -> float:
    """F1 of the tokens as multisets: twice those in common, over all of both."""
    common = (Counter(ids) & Counter(truth)).total()
    return 2 * common / max(1, len(ids) + len(truth))


# What a defence would change: some of the store's own vectors behind it, and what retrieval loses.


def _defences(d: int, seed: int) -> list[Defence]:
    return [*(gaussian_noise(share, d, seed) for share in _NOISE), rounding("binary")]


def _behind(
    target: StoreTarget, exposure: Exposure, defence: Defence, attack: _Ready, track: Track
) -> Checked:
    method, part = attack(track), target.some(slice(0, _BEHIND))
    started = time.perf_counter()
    way, vectors = part.pooling.exposure, part.vectors.float()
    ((_, recoveries),) = reading(target.loaded, [defence], vectors, method, vectors, way)
    read = [_reading(part, place, recovery).exact for place, recovery in enumerate(recoveries)]
    others = vectors if target.others is None else target.others.float()
    queries, docs = others.tensor_split([-(-len(others) // 10)])
    count, lost = sum(read), 1 - retrieval(defence, docs, queries)
    status = Status.INEXACT if count else Status.UNSOLVED
    status = Status.RECOVERED if count == len(read) else status
    reason = (
        f"{count} of {len(read)} texts were read, and recall@{NEAREST} falls by {lost:.1%} (of "
        f"{len(queries)} queries among {len(docs)} vectors of the store)"
    )
    return found(
        exposure, recoveries[0].method, status, reason, _REMEDY, started, queries=len(read),
        known=count / len(read), sought="text",
    )  # fmt: skip
