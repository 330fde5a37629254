"""Checks of a vector store: how many of its texts can be read exactly from their embeddings?

A random sample of the vectors is read back. The attack has the encoder's weights, and
counts of a corpus, which are made once. The share of texts that were read gives an
interval for the whole store (`Estimate` in core/finding.py).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import filterfalse, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from keyhole.audit.check import Check, Checked, Part, one_finding
from keyhole.audit.defences import NEAREST, recall, store_defences
from keyhole.audit.options import AuditOptions
from keyhole.audit.texts import (
    PARTLY,
    aligned,
    reading_alone,
    tokens_read,
    without_special,
)
from keyhole.core import Estimate, Finding, Readings, Status
from keyhole.core.errors import InputError
from keyhole.core.exposure import Exposure
from keyhole.core.finding import Reading
from keyhole.core.journal import digest
from keyhole.core.progress import Track
from keyhole.defence import Defence
from keyhole.models import demo
from keyhole.models.anatomy import anatomy
from keyhole.models.capture import capture
from keyhole.models.loading import Loaded, identity
from keyhole.recover import Pooled, TextRecovery
from keyhole.recover.attack import Target as Attacked
from keyhole.recover.embeddings.counts import SHIPPED, corpus_texts, effort
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
from keyhole.recover.texts import LEARN_MORE, NOT_ARRIVED, recover_texts, recovering
from keyhole.report import words
from keyhole.stores import Store

EXPOSURE = Exposure("KH-TEXT-EMBEDDING", "stored")
_REMEDY = (
    "Guard stored embeddings like the texts themselves: the same access, encryption and retention; "
    "deleting a text means deleting its vector."
)
_NO_ESTIMATE = (Status.MISMATCH, Status.NOT_APPLICABLE, Status.BUDGET)
_SAME_FOR_ALL = (Status.MISMATCH, Status.NOT_APPLICABLE, Status.NOT_IDENTIFIABLE)
AT_ONCE = {"cpu": 1, "cuda": 256}  # vectors that one check reads
# The most runs of the encoder for one text. On a CPU, few texts are read after more of
# them.
_PASSES = {"cpu": 5_000, "cuda": 1_000_000}
# Texts of no store.
ORDINARY = (*demo.TEXTS, *(example.text for example in demo.EXAMPLES))
_USUAL_LENGTH = 40  # characters of a text that the store does not have
_KNOWN_TEXTS = 8  # from which the pooling is determined
_STORE_SAMPLE = 256  # vectors of the store for statistics
_ENCODER_SAMPLE = 100  # texts of the corpus whose vectors give the encoder's statistics
_BEHIND_DEFENCES = 4  # texts that are read behind each defence, the shortest
_RETRIEVED = 1_000  # vectors that retrieval is measured on, a tenth of them as queries


@dataclass(frozen=True, eq=False, kw_only=True)
class StoreTarget(Part):
    """A sample of a store's vectors, with the encoder to read them; the store itself is closed.

    - `rows` are the row numbers of the sample in the store, and `texts` their texts, None for a row
      without a text.
    - `max_length` is the number of tokens after which the encoder cuts a text off.
    - `method` is the attack; the default counts the corpus that ships with Keyhole.
    - `others` are vectors of the store that retrieval is measured on.
    """

    name: str
    source: Store
    source_identity: str
    loaded: Loaded
    rows: tuple[int, ...]
    vectors: Tensor
    texts: tuple[str | None, ...]
    pooling: Pooling
    max_length: int
    method: CountedReader = field(default_factory=CountedReader)
    others: Tensor | None = None
    observed = True

    @classmethod
    def of(
        cls,
        store: Store,
        loaded: Loaded,
        *,
        texts: int,
        known: Sequence[str] = (),
        seed: int = 0,
    ) -> StoreTarget:
        """Sample an open store, and determine how its vectors were made."""
        if store.packed is not None and store.packed.dim == anatomy(loaded.model).width:
            store = store.packed
        if store.dim > anatomy(loaded.model).width:
            raise _another_width(store, loaded)
        rows = sample(store.count, texts, seed)
        own_texts: Sequence[str | None] = [None] * len(rows)
        if store.texts is not None:
            own_texts = store.texts(rows)
        # The shortest texts first, which are read soonest.
        order = sorted(range(len(rows)), key=lambda place: len(own_texts[place] or ""))
        vectors = store.read(rows)[order]
        rows = [rows[place] for place in order]
        own_texts = [own_texts[place] for place in order]
        max_length = min(
            encoder_max_length(loaded.name), anatomy(loaded.model).max_length
        )
        pooling = _pooling(store, loaded, vectors, own_texts, known, max_length)
        if pooling.exposure.width is not None:
            pooling = _expect_truncated(store, loaded, pooling)
        return cls(
            name=store.name,
            source=store,
            source_identity=store.identity,
            loaded=loaded,
            rows=tuple(rows),
            vectors=vectors,
            texts=tuple(own_texts),
            pooling=pooling,
            max_length=max_length,
            others=store.read(sample(store.count, _RETRIEVED, seed)),
        )

    @property
    def identity(self) -> str:
        return f"{self.source_identity}; {self.loaded.identity}"

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

    def checks(self, options: AuditOptions) -> list[Check]:
        """Return a check for every few vectors, so that a stopped audit keeps what it has read."""
        if self.pooling.error is not None and not self.pooling.sure:
            reason = (
                f"{self.pooling.reason}; was it another encoder? Name it with --model"
            )
            mismatch = Finding(
                EXPOSURE, "", Status.MISMATCH, reason, _REMEDY, sought="text"
            )
            return [Check(EXPOSURE, lambda _: Checked((mismatch,)))]
        count = len(self.rows)
        step = AT_ONCE[anatomy(self.loaded.model).device.type]
        pooled = self.pooling.exposure
        ready: list[CountedReader] = []
        checks: list[Check] = []

        def attack(track: Track) -> CountedReader:  # the first check counts the corpus
            if not ready:
                attacked = Attacked.of(self.loaded.model, self.loaded.tokenizer)
                attacked = replace(attacked, track=track)
                ready.append(self.method.ready(attacked, pooled, self.pooling.prefix))
            return ready[0]

        for start in range(0, count, step):
            part = self.part(start, start + step)
            name = f"{start + len(part.rows)} of {count}"
            if step > 1:
                name = f"{start + 1}–{name}"
            run = partial(_check, part, attack)
            checks.append(Check(EXPOSURE, run, name, weight=_seconds(part.texts)))
        whole = pooled.normalised and pooled.width is None and not self.source.rounding
        if options.against_defences and whole:
            for defence in store_defences(self.vectors.shape[1], options.seed):
                exposure = replace(EXPOSURE, variant="defended", name=defence.name)
                run = partial(_read_behind, self, exposure, defence, attack)
                weight = _seconds(self.texts[:_BEHIND_DEFENCES])
                checks.append(Check(exposure, run, weight=weight))
        return checks

    def part(self, start: int, end: int) -> StoreTarget:
        """Return the target with a part of its sample."""
        few = slice(start, end)
        return replace(
            self, rows=self.rows[few], vectors=self.vectors[few], texts=self.texts[few]
        )


def _seconds(texts: Sequence[str | None]) -> float:
    """Estimate the time to read texts: a short one is read early, a longer one takes all runs."""
    lengths = [len(text or "") or _USUAL_LENGTH for text in texts]
    return sum(min(length, _USUAL_LENGTH) * (length + 12) / 400 for length in lengths)


def _expect_truncated(
    store: Store,
    loaded: Loaded,
    pooling: Pooling,
) -> Pooling:
    """Raise unless vectors that are too short hold the first numbers of the encoder's.

    Known texts show whether they do, or else the correlations between the numbers.
    """
    if pooling.error is not None:
        if not pooling.sure:
            raise _another_width(store, loaded, ", which are not its first ones")
        return pooling
    lines = corpus_texts(SHIPPED)
    some = lines[:: len(lines) // _ENCODER_SAMPLE]
    own = embeddings(loaded.model, loaded.tokenizer, some, pooling.exposure)
    if not same_numbers(own, store.read(sample(store.count, _STORE_SAMPLE, 0))):
        raise _another_width(
            store,
            loaded,
            ", which do not look like its first ones",
            " (or texts of the store with --known, which show it)",
        )
    return replace(
        pooling,
        reason=f"{pooling.reason}; they vary together as the encoder's first numbers do",
    )


def _another_width(
    store: Store,
    loaded: Loaded,
    but: str = "",
    fix: str = "",
) -> InputError:
    width = anatomy(loaded.model).width
    return InputError(
        f"{loaded.name} makes vectors of {width} numbers, and those in {store.name} have "
        f"{store.dim}{but}: give the encoder that made them with --model{fix}"
    )


def sample(
    count: int,
    texts: int,
    seed: int,
) -> list[int]:
    """Return the numbers of `texts` random rows out of `count`, in ascending order."""
    return sorted(random.Random(seed).sample(range(count), min(texts, count)))  # noqa: S311


def _pooling(
    store: Store,
    loaded: Loaded,
    vectors: Tensor,
    texts: Sequence[str | None],
    known: Sequence[str],
    max_length: int,
) -> Pooling:
    """Determine the pooling from known texts, else the encoder's own settings, else statistics."""
    width = store.dim if store.dim < anatomy(loaded.model).width else None
    agrees = AGREES_QUANTISED if Path(loaded.name).suffix == ".gguf" else AGREES
    encoder = (loaded.model, loaded.tokenizer)
    alone = partial(loaded.tokenizer, add_special_tokens=False, verbose=False)
    with_tokens = (
        (row, text) for row, text in enumerate(texts) if text and alone(text).input_ids
    )
    own_texts = dict(islice(with_tokens, _KNOWN_TEXTS))

    def by_texts(prefixes: Sequence[str]) -> Pooling:
        rest = (max_length, agrees, width, prefixes)
        if own_texts:
            own_vectors = vectors[list(own_texts)]
            return from_texts(*encoder, list(own_texts.values()), own_vectors, *rest)
        return from_known(*encoder, known[:_KNOWN_TEXTS], store.batches(), *rest)

    if own_texts or known:
        plain = by_texts(("",))
        if not plain.sure:
            prefixed = by_texts(PREFIXES)
            if prefixed.sure:
                return prefixed
        return plain
    many = store.read(sample(store.count, _STORE_SAMPLE, 0))
    guess = from_settings(loaded.name, many, width)
    guess = guess or from_statistics(*encoder, ORDINARY, many, width)
    prefix = likely_prefix(*encoder, ORDINARY, many, guess.exposure)
    reason = guess.reason
    if prefix:
        reason += f'; texts seem to begin with "{prefix.strip()}"'
    return replace(guess, prefix=prefix, reason=reason)


def quick(method: CountedReader, loaded: Loaded) -> CountedReader:
    """Return the method with the number of runs of the encoder that an audit takes for a text."""
    attacked = Attacked.of(loaded.model, loaded.tokenizer)
    passes = round(_PASSES[attacked.parts.device.type] * effort(attacked))
    return replace(method, search=replace(method.search, passes=passes))


def readings_in(findings: Iterable[Finding]) -> list[Reading]:
    """Return the texts that were read as they are stored, not behind a defence."""
    stored = filter(_is_part, findings)
    return [reading for each in stored for reading in each.texts[0].readings]


def _is_part(finding: Finding) -> bool:
    return bool(finding.texts) and finding.exposure == EXPOSURE


def merged(
    store: StoreTarget | None, findings: Sequence[Finding]
) -> tuple[Finding, ...]:
    """Return the findings, with those about parts of a store's sample merged into one."""
    parts = list(filter(_is_part, findings))
    if store is None or not parts:
        return tuple(findings)
    result = replace(parts[0].texts[0], readings=tuple(readings_in(parts)))
    status = _status(result, [part.status for part in parts])
    count = len(result.readings)
    estimate = None
    summary = parts[0].reason
    if status is Status.BUDGET:
        summary = (
            f"none of the {count} texts tried was read: {NOT_ARRIVED}; {LEARN_MORE}"
        )
    if status not in _NO_ESTIMATE:
        estimate = Estimate.of(result.exact, count, store.source.count)
        summary = str(estimate)
        if result.exact < count:
            summary += f"; {LEARN_MORE}"
    notes = (summary, store.pooling.reason, store.source.note, store.method.note)
    merged = replace(
        parts[0],
        status=status,
        reason="; ".join(filter(None, notes)),
        estimate=estimate,
        seconds=sum(part.seconds for part in parts),
        queries=count,
        known=result.known,
        texts=(result,),
    )
    return (*filterfalse(_is_part, findings), merged)


# One check: a part of the sample is read.
#
# If the store still has the texts, what was read is compared with them. If not, a text
# counts as read if the encoder gives the same vector for it
# (recover/embeddings/judge.py).


def _check(
    part: StoreTarget,
    attack: Callable[[Track], CountedReader],
    track: Track,
) -> Checked:
    return read(replace(part, method=attack(track)), track)


def read(part: StoreTarget, track: Track) -> Checked:
    """Read all vectors of a part of the sample."""
    pooled = part.pooling.exposure
    quantiser: Mapping[str, Any] = part.source.rounding
    leaks = [
        Pooled(
            vector,
            pooled.pooling,
            pooled.normalised,
            width=pooled.width,
            unit=pooled.unit,
            **quantiser,
        )
        for vector in part.vectors
    ]
    progress = track(words.exposure(EXPOSURE), total=len(leaks))
    found: dict[int, TextRecovery] = {}
    for number, recovery in recovering(
        part.loaded.model, part.loaded.tokenizer, leaks, method=part.method, track=track
    ):
        found[number] = recovery
        progress(len(found))
    recoveries = [found[number] for number in range(len(leaks))]
    result, status = _readings(part, recoveries)
    return _finding(EXPOSURE, recoveries, status, recoveries[0].reason, result)


def _finding(
    exposure: Exposure,
    recoveries: Sequence[TextRecovery],
    status: Status,
    reason: str,
    result: Readings,
) -> Checked:
    return one_finding(
        exposure,
        recoveries[0].method,
        status,
        reason,
        _REMEDY,
        queries=len(recoveries),
        known=result.known,
        sought="text",
        texts=(result,),
    )


def _status(result: Readings, statuses: Sequence[Status]) -> Status:
    """Return the status of several texts; `statuses` are those of each, or of groups of them."""
    if len(set(statuses)) == 1 and statuses[0] in _SAME_FOR_ALL:
        return statuses[0]
    if result.exact == len(result.readings):
        return Status.RECOVERED
    if result.exact or Status.INEXACT in statuses or result.known >= PARTLY:
        return Status.INEXACT
    return Status.BUDGET


def _readings(
    part: StoreTarget, recoveries: Sequence[TextRecovery]
) -> tuple[Readings, Status]:
    """Return what was read from the vectors of a part, and their status."""
    readings = tuple(
        _reading(part, place, recovery) for place, recovery in enumerate(recoveries)
    )
    layers = anatomy(part.loaded.model).layers
    result = Readings("pooled", layers, "as stored", readings)
    return result, _status(result, [recovery.status for recovery in recoveries])


def _reading(
    part: StoreTarget,
    place: int,
    recovery: TextRecovery,
) -> Reading:
    """Return what was read from one vector, compared with the store's own text if it has one."""
    tokenizer = part.loaded.tokenizer
    text = part.texts[place]
    similarity = _similarity(part, place, recovery)
    if text is None or not text.strip():
        note = f"vector {part.rows[place]}: the store has no text of it"
        return reading_alone(tokenizer, recovery, note, similarity)
    original = Original.of(tokenizer, part.pooling.prefix + text, part.max_length)
    tokens = tokens_read(tokenizer, recovery)
    truth = without_special(tokenizer, original.ids)
    common = (Counter(id_ for _, _, id_ in tokens) & Counter(truth)).total()
    f1 = 2 * common / max(1, len(tokens) + len(truth))  # of the tokens as multisets
    return Reading(
        original=original.text,
        pieces=tuple(aligned(tokens, truth)),
        exact=original.is_exactly(tokenizer, recovery.ids),
        verified=recovery.verified,
        note="; ".join(original.notes),
        tokens=len(truth),
        overlap=f1,
        similarity=similarity,
    )


def _similarity(
    part: StoreTarget,
    place: int,
    recovery: TextRecovery,
) -> float | None:
    """Return the cosine of a vector and that of the text that was read; None if none was."""
    if not recovery.ids:
        return None
    model = part.loaded.model
    ids = torch.tensor([recovery.ids], device=anatomy(model).device)
    with torch.no_grad():
        vector = (
            capture(model, part.pooling.exposure, ids=ids)["values"][0].cpu().double()
        )
    return float(
        torch.cosine_similarity(vector, part.vectors[place].cpu().double(), dim=0)
    )


def _read_behind(
    target: StoreTarget,
    exposure: Exposure,
    defence: Defence,
    attack: Callable[[Track], CountedReader],
    track: Track,
) -> Checked:
    """Read some vectors behind a defence, and measure what it costs retrieval."""
    method = attack(track)
    part = target.part(0, _BEHIND_DEFENCES)
    pooled = part.pooling.exposure
    about = (pooled.pooling, pooled.normalised)
    stream = torch.Generator().manual_seed(defence.seed)
    stored = defence.change(part.vectors.float(), stream).cpu()
    leaks = [Pooled(vector, *about, noise=defence.noise) for vector in stored]
    recoveries = recover_texts(
        part.loaded.model, part.loaded.tokenizer, leaks, method=method
    )
    result, status = _readings(part, recoveries)
    if status is Status.BUDGET:
        status = Status.UNSOLVED
    count = f"{len(recoveries)} texts"
    if len(recoveries) < len(target.rows):
        count += f", the shortest of the {len(target.rows)} tried,"
    others = target.others
    if others is None:
        others = part.vectors
    queries, docs = others.float().tensor_split([-(-len(others) // 10)])
    price = "needs a store of two vectors or more"
    if len(docs):
        lost = 1 - recall(docs, defence.change(docs, stream), queries, queries)
        price = f"falls by {lost:.1%} (of {len(queries)} queries among {len(docs)} vectors of the "
        price += "store)"
    reason = (
        f"{result.exact} of {count} were read exactly, and recall@{NEAREST} {price}"
    )
    return _finding(exposure, recoveries, status, reason, result)
