"""Is a text read from one stored vector that text? How often the judge says so, and is right.

Sentences of SST-2 of 4 to 32 tokens on all-MiniLM-L6-v2 (mean-pooled, length not known), stored in
each precision that stores use. The true text is judged: how many are verified. So are the texts
nearest to it by cosine, one and two edits away: none may be. Then vectors that are nobody's
(Gaussian noise, the mean of two texts, the same encoder at two other poolings) against the text
that a search finds, in every precision: none may be. `--texts` for each row, `--nobody` vectors of
all kinds together; `--parts stored,nobody` takes some. `--quick` takes a random-weight model.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import normalize

import show
import subjects
from keyhole.core import Status
from keyhole.models import Exposure, Loaded
from keyhole.recover import Mark, Pooled
from keyhole.recover.attack import Target
from keyhole.recover.embeddings.counts import Counted
from keyhole.recover.embeddings.edits import Alternatives, Tokens, Vectors, alternatives_to
from keyhole.recover.embeddings.encoder import Encoder, matrix_half
from keyhole.recover.embeddings.judge import judge_vector, may_be
from keyhole.recover.embeddings.sum_search import SumSearch
from show import Row
from stored_forms import WAY, Change, changes, sentences, vectors_of


@dataclass(frozen=True, eq=False)
class Setting:
    """A model, the texts that are judged, the vectors of others, and how much is tried."""

    loaded: Loaded
    secrets: list[list[int]]
    others: list[list[int]]
    nobody: int
    blocks: tuple[int, ...] = (96, 48, 16)
    widths: tuple[int, ...] = (256, 128, 64, 32)
    codes: int = 256
    misses: int = 20
    passes: int = 3000
    judged: int = 5

    @property
    def target(self) -> Target:
        return Target.of(self.loaded.model, self.loaded.tokenizer)


def run(
    quick: bool,
    data: Path = subjects.DATA,
    encoder: Path | None = None,
    device: str = subjects.DEVICE,
    texts: int = 100,
    nobody: int = 1000,
    parts: list[str] = ["stored", "nobody"],  # noqa: B006 - read, never changed
) -> Iterator[Row]:
    if quick:
        ids = [text.tolist() for text in subjects.tiny_texts(60, 6, framed=True)]
        tiny = subjects.tiny("bert")
        setting = Setting(tiny, ids[:1], ids[1:], 4, (8,), (24,), codes=32, misses=4, passes=200)
    else:
        loaded = replace(subjects.minilm(encoder, device), name="all-MiniLM-L6-v2")
        some = sentences(loaded, data, texts)
        setting = Setting(loaded, *some, nobody)
    known = vectors_of(setting.target, setting.others)
    stored = changes(known, setting.blocks, setting.codes, setting.widths)
    if "stored" in parts:
        near = [NearMisses.of(setting, ids) for ids in setting.secrets]
        yield near_row(setting, near)
        for name, change in stored.items():
            yield stored_row(setting, name, change, near)
    if "nobody" in parts:
        yield from nobody_rows(setting, known, stored)


# True texts and near misses.


@dataclass(frozen=True, eq=False)
class NearMisses:
    """A text, and the texts one and two edits away whose vectors come nearest to its own.

    `runs` are the vectors that were run before, by exposure.
    """

    ids: list[int]
    misses: list[list[int]]
    cosine: float
    runs: dict[Exposure, Vectors]

    @classmethod
    def of(cls, setting: Setting, ids: list[int]) -> NearMisses:
        vectors = Vectors(setting.target, WAY, ids)
        text = vectors.inside(ids)
        own = vectors([text])[0]
        once = alternatives_to(vectors, text, own, False)
        near = nearest(once, own, setting.misses)
        twice = alternatives_to(vectors, near[0], own, False)
        chosen = dict.fromkeys([*near, *nearest(twice, own, setting.misses)])
        misses = [[*vectors.before, *edit, *vectors.after] for edit in chosen if edit != text]
        return cls(ids, misses, float((once.vectors @ own).max()), {WAY: vectors})

    def vectors(self, leak: Pooled) -> Vectors:
        way = leak.exposure
        if way not in self.runs:
            self.runs[way] = self.runs[WAY].of_part(way)
        return self.runs[way]


def near_row(setting: Setting, near: list[NearMisses]) -> Row:
    row = Row(
        f"{setting.loaded.name}: the nearest text one edit away",
        f"cosine {statistics.median(case.cosine for case in near):.6f}, median of {len(near)}",
        details=f"largest {max(case.cosine for case in near):.6f}",
    )
    return show.itemised(row, [{"cosine": case.cosine} for case in near])


def nearest(alternatives: Alternatives, own: Tensor, count: int) -> list[Tokens]:
    order = (alternatives.vectors @ own).argsort(descending=True)
    return [alternatives.texts[place] for place in order[:count].tolist()]


def stored_row(setting: Setting, name: str, change: Change, near: list[NearMisses]) -> Row:
    started = time.perf_counter()
    statuses, wrong, fit, judged, tried, likely = Counter[str](), 0, 0, 0, 0, [0, 0]
    items: list[dict[str, Any]] = []
    for case in near:
        leak = changed(setting, change, case.ids)
        vectors = case.vectors(leak)
        verdict = judge_vector(setting.target, leak, case.ids, vectors)
        whole = Mark.UNKNOWN not in verdict.marks
        statuses["verified" if verdict.verified else "likely" if whole else "partly"] += 1
        fitting = 0
        for number, miss in enumerate(case.misses):
            fits = may_be(setting.target, leak, miss, vectors)
            tried, fit, fitting = tried + 1, fit + fits, fitting + fits
            due = fits and fitting <= setting.judged
            judged += due
            if due or (number < 2 and not verdict.verified):
                other = judge_vector(setting.target, leak, miss, vectors)
                wrong += other.verified
                good = right(case.ids, miss, other.marks)
                likely = [sum(pair) for pair in zip(likely, good, strict=True)]
        items.append({"tokens": len(case.ids) - 2, "verified": verdict.verified, "whole": whole,
                      "misses": len(case.misses), "fit": fitting})  # fmt: skip
    seconds = (time.perf_counter() - started) / len(near)
    row = Row(
        f"{setting.loaded.name}, {name}",
        f"{statuses['verified']} of {len(near)} verified; {wrong} of {tried:,} near misses",
        "0 near misses",
        wrong == 0,
        f"{statuses['likely']} likely, {statuses['partly']} in part; {fit} near misses fit, the "
        f"nearest {judged} were judged; of likely tokens in wrong texts {likely[0]} of {likely[1]} "
        f"right; {seconds:.1f} s a text",
    )
    return show.itemised(row, items)


def right(truth: list[int], ids: list[int], marks: Sequence[Mark]) -> tuple[int, int]:
    """How many tokens that are marked likely are the truth's, and how many there are."""
    blocks = SequenceMatcher(None, truth, ids, autojunk=False).get_matching_blocks()
    same = {block.b + step for block in blocks for step in range(block.size)}
    likely = [place for place, mark in enumerate(marks) if mark is Mark.LIKELY]
    inside = [place for place in likely if 0 < place < len(ids) - 1]
    return len(same & set(inside)), len(inside)


def changed(setting: Setting, change: Change, ids: list[int], way: Exposure = WAY) -> Pooled:
    leak = cast("Pooled", subjects.leak_of(setting.loaded, ids, way))
    return change(replace(leak, tokens=None))


# Vectors that are no text's.


def nobody_rows(setting: Setting, known: Tensor, forms: dict[str, Change]) -> Iterator[Row]:
    each = max(1, setting.nobody // 4)
    stream = torch.Generator().manual_seed(0)
    kinds = {
        "Gaussian noise": torch.randn(each, known.shape[1], generator=stream).to(known),
        "the mean of two texts": known[:each] + known[each : 2 * each],
        "the same encoder's [CLS]": vectors_of(
            setting.target, setting.others[-each:], Exposure("pooled", 0, "cls")
        ),
        "the same encoder's maxima": vectors_of(
            setting.target, setting.others[-each:], Exposure("pooled", 0, "max")
        ),
    }
    for name, vectors in kinds.items():
        yield nobody_row(setting, forms, name, normalize(vectors, dim=-1))


def nobody_row(setting: Setting, forms: dict[str, Change], name: str, goals: Tensor) -> Row:
    started = time.perf_counter()
    answers, cosines, passes = searched(setting, goals)
    verified = fit = likely = 0
    for goal, ids in zip(goals.cpu(), answers, strict=True):
        whole = Vectors(setting.target, WAY, ids)
        for change in forms.values():
            leak = change(Pooled(goal))
            vectors = whole if leak.exposure == WAY else whole.of_part(leak.exposure)
            if may_be(setting.target, leak, ids, vectors):
                fit += 1
                verdict = judge_vector(setting.target, leak, ids, vectors)
                verified += verdict.verified
                likely += verdict.status is Status.INEXACT
    seconds = (time.perf_counter() - started) / len(goals)
    return Row(
        f"{setting.loaded.name}, {name}: {len(goals)} vectors in {len(forms)} precisions",
        f"{verified} verified",
        "0",
        verified == 0,
        f"{fit} fit, {likely} likely; cosine of the nearest text, median "
        f"{statistics.median(cosines):.3f}, largest {max(cosines):.3f}; {passes // len(goals)} "
        f"passes and {seconds:.1f} s a vector",
    )


def searched(setting: Setting, goals: Tensor) -> tuple[list[list[int]], list[float], int]:
    """The nearest texts that a search finds, with counts of the texts that the attacker has."""
    encoder = Encoder(setting.target, half=matrix_half())
    first, last = len(encoder.before), len(encoder.after)
    inside = [ids[first : len(ids) - last] for ids in setting.others]
    max_length = max(map(len, inside))
    counted = Counted.of(encoder, inside, max_length)
    search, wanted = SumSearch(passes=setting.passes), encoder.directions(goals)
    groups = wanted.split(256 if wanted.is_cuda else 1)
    readings = [read for some in groups for read in search(encoder, some, counted, max_length)]
    answers = [[*encoder.before, *reading.tokens, *encoder.after] for reading in readings]
    plain = (vectors_of(setting.target, answers) * goals).sum(-1)  # not whitened
    return answers, plain.tolist(), sum(reading.passes for reading in readings)


if __name__ == "__main__":
    show.main(run)
