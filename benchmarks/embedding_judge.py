"""Is a text read from one stored vector that text? How often the judge says so, and is right.

Sentences of SST-2 of 4 to 32 tokens on all-MiniLM-L6-v2 (mean-pooled, length not known), stored in
each precision that stores use. The true text is judged: how many are verified. So are the texts
nearest to it by cosine, one and two edits away: none may be. Then vectors that are nobody's
(Gaussian noise, the mean of two texts, the same encoder at two other poolings) against the text
that a bounded climb by single edits finds for each, in every precision: none may be. Last, vectors
behind a secret rotation or linear map of which some pairs are known: what comes back, and whether
the true text is verified. `--texts` for each row, `--nobody` vectors of all kinds together.
`--parts stored,nobody,secret` are those; `nearest`, for a GPU, runs every text one edit away from
`--all` short ones and looks whether the judge would have met the nearest. `--quick` takes a
random-weight model.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from functools import partial
from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import normalize

import show
import texts
from keyhole import invert
from keyhole.models import Exposure, Loaded
from keyhole.recover import Mark, Pooled
from keyhole.recover.attack import Target
from keyhole.recover.embedding import moves
from keyhole.recover.embedding.edits import Rivals, Tokens, Vectors, rivals_of
from keyhole.recover.embedding.judge import bits_needed, judge_vector
from keyhole.recover.embedding.scoring import Encoder, Texts
from keyhole.recover.embedding.stored import Stored
from keyhole.recover.rotation import undo_linear, undo_rotation
from keyhole.results import Status
from show import Row

OPTIONS = texts.options(texts=100)
OPTIONS.add_argument("--nobody", type=int, default=1000)
OPTIONS.add_argument("--misses", type=int, default=20, help="near misses of each text")
OPTIONS.add_argument("--all", type=int, default=4)
OPTIONS.add_argument("--behind", type=int, default=20, help="texts behind a rotation or map")
OPTIONS.add_argument("--judged", type=int, default=5, help="near misses of a text that are judged")
OPTIONS.add_argument("--parts", default="stored,nobody,secret")
OPTIONS.add_argument("--forms", default="", help="only those whose names hold one of these; …; …")
CHOSEN = texts.chosen(OPTIONS)
WAY = Exposure("pooled")
Change = Callable[[Pooled], Pooled]


@dataclass(frozen=True, eq=False)
class Setting:
    """A model, the texts that are judged, the vectors of others, and how much is tried."""

    loaded: Loaded
    secrets: list[list[int]]
    others: list[list[int]]
    nobody: int
    blocks: tuple[int, ...] = (96, 48, 16)
    widths: tuple[int, ...] = (256, 128, 64, 32)
    pairs: tuple[int, ...] = (16, 32, 64, 128, 256, 383, 384, 512, 1024, 4096)
    codes: int = 256
    misses: int = CHOSEN.misses

    @property
    def target(self) -> Target:
        return Target.of(self.loaded.model, self.loaded.tokenizer)


def run(quick: bool) -> list[Row]:
    return texts.collect(small() if quick else full(), strict=quick)


def full() -> Iterator[texts.Part]:
    loaded = replace(texts.minilm(CHOSEN), name="all-MiniLM-L6-v2")
    secrets = fitting(loaded, texts.sst2(CHOSEN.data)[: 8 * CHOSEN.texts], CHOSEN.texts)
    others = fitting(loaded, texts.sst2(CHOSEN.data, 20_000)[1000:], 4608)
    yield from parts(Setting(loaded, secrets, others, CHOSEN.nobody))


def fitting(loaded: Loaded, sentences: Sequence[str], count: int) -> list[list[int]]:
    encoded = loaded.tokenizer(list(dict.fromkeys(sentences)))["input_ids"]
    chosen = [ids for ids in encoded if 4 <= len(ids) - 2 <= 32]
    random.Random(0).shuffle(chosen)
    return chosen[:count]


def small() -> Iterator[texts.Part]:
    ids = [text.tolist() for text in texts.tiny_texts(60, 6, framed=True)]
    yield from parts(
        Setting(texts.tiny("bert"), ids[:1], ids[1:], 4, (8,), (24,), (48,), codes=32, misses=4)
    )


def parts(setting: Setting) -> Iterator[texts.Part]:
    wanted = CHOSEN.parts.split(",")
    known = vectors_of(setting, setting.others)
    chosen = CHOSEN.forms.split(";")
    forms = {
        name: change
        for name, change in changes(setting, known).items()
        if any(part in name for part in chosen)
    }
    if "stored" in wanted:
        near: list[NearMisses] = []
        yield "near misses", lambda: [near_row(setting, near)]
        for name, change in forms.items():
            yield name, lambda n=name, c=change: [stored_row(setting, n, c, near)]
    if "nearest" in wanted:
        yield "the nearest of all edits", lambda: [nearest_row(setting)]
    if "nobody" in wanted:
        yield "nobody's vectors", lambda: nobody_rows(setting, known, forms)
    if "secret" in wanted:
        few = replace(setting, secrets=setting.secrets[: CHOSEN.behind])
        runs = [Vectors(few.target, WAY, ids) for ids in few.secrets]
        for count in setting.pairs:
            yield f"{count} pairs", lambda c=count: secret_rows(few, known, c, runs)


def vectors_of(setting: Setting, lists: list[list[int]], way: Exposure = WAY) -> Tensor:
    vectors = Vectors(setting.target, way, lists[0])
    return vectors([vectors.inside(ids) for ids in lists])


# How vectors are stored.


def changes(setting: Setting, known: Tensor) -> dict[str, Change]:
    """Each form that a store may keep a vector in; told is what cannot be seen in it."""
    floating = {name: partial(rounded, name) for name in ("float32", "float16", "bfloat16")}
    low, high = known.amin(0).cpu(), known.amax(0).cpu()
    books = {count: codebook(known, count, setting.codes) for count in setting.blocks}
    return {
        **floating,
        "8 bits, a scale for each vector": partial(rounded, "int8"),
        "8 bits, a range for each dimension (stated)": partial(in_ranges, low, high),
        "4 bits, a scale for each vector": partial(rounded, "int4"),
        "1 bit (signs)": partial(rounded, "binary"),
        **{
            f"product quantisation, {count} codes of {setting.codes} (codebook known)": partial(
                in_codes, book
            )
            for count, book in books.items()
        },
        **{f"the first {k} numbers, normalised": partial(cut, k) for k in setting.widths},
        f"the first {setting.widths[-1]} numbers, 8 bits": lambda leak: rounded(
            "int8", cut(setting.widths[-1], leak)
        ),
        **{f"noise of {share:.0%}, stated": noisy(share, True) for share in (0.01, 0.05, 0.1)},
        **{f"noise of {share:.0%}, not stated": noisy(share, False) for share in (0.01, 0.05, 0.1)},
    }


def rounded(name: str, leak: Pooled) -> Pooled:
    """As the library does it; what was done is not said, the numbers have to tell."""
    return replace(invert.degrade(leak, name), precision=None)


def in_ranges(low: Tensor, high: Tensor, leak: Pooled) -> Pooled:
    """256 levels between the least and the largest of each dimension."""
    steps = (high - low) / 255
    levels = ((leak.values - low) / steps).round().clamp(0, 255)
    return replace(leak, values=low + levels * steps, steps=steps, ends=torch.stack([low, high]))


def in_codes(book: Tensor, leak: Pooled) -> Pooled:
    blocks = leak.values.unflatten(0, (len(book), -1))
    codes = torch.cdist(blocks[:, None], book)[:, 0].argmin(-1)
    return replace(leak, values=book[torch.arange(len(book)), codes].flatten(), codebook=book)


def codebook(vectors: Tensor, blocks: int, codes: int, rounds: int = 25) -> Tensor:
    """Centroids (blocks, codes, numbers) by Lloyd's algorithm, as product quantisation has them."""
    points = vectors.double().unflatten(1, (blocks, -1)).transpose(0, 1)
    book = points[:, :codes].clone()
    for _ in range(rounds):
        nearest = torch.cdist(points, book).argmin(-1)
        sums = torch.zeros_like(book).scatter_add_(1, nearest[..., None].expand_as(points), points)
        counts = torch.zeros_like(book[..., 0]).scatter_add_(
            1, nearest, torch.ones_like(nearest, dtype=book.dtype)
        )
        book = torch.where(counts[..., None] > 0, sums / counts.clamp(min=1)[..., None], book)
    return book.float().cpu()


def cut(width: int, leak: Pooled) -> Pooled:
    return replace(invert.degrade(leak, forms=[f"truncated:{width}", "normalised"]), precision=None)


def noisy(share: float, stated: bool) -> Change:
    stream = torch.Generator().manual_seed(0)

    def change(leak: Pooled) -> Pooled:
        loud = replace(invert.degrade(leak, noise=share, seed=stream), precision=None)
        return replace(loud, noise=share * float(leak.values.std())) if stated else loud

    return change


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
        once = rivals_of(vectors, text, own, False)
        near = nearest(once, own, setting.misses)
        twice = rivals_of(vectors, near[0], own, False)
        chosen = dict.fromkeys([*near, *nearest(twice, own, setting.misses)])
        misses = [[*vectors.before, *edit, *vectors.after] for edit in chosen if edit != text]
        return cls(ids, misses, float((once.vectors @ own).max()), {WAY: vectors})

    def vectors(self, leak: Pooled) -> Vectors:
        way = leak.exposure
        if way not in self.runs:
            self.runs[way] = self.runs[WAY].of_part(way)
        return self.runs[way]


def near_row(setting: Setting, near: list[NearMisses]) -> Row:
    """Find the near misses of all texts."""
    near += [NearMisses.of(setting, ids) for ids in setting.secrets]
    return Row(
        f"{setting.loaded.name}: the nearest text one edit away",
        f"cosine {statistics.median(case.cosine for case in near):.6f}, median of {len(near)}",
        details=f"largest {max(case.cosine for case in near):.6f}",
    )


def nearest(rivals: Rivals, own: Tensor, count: int) -> list[Tokens]:
    order = (rivals.vectors @ own).argsort(descending=True)
    return [rivals.texts[place] for place in order[:count].tolist()]


def nearest_row(setting: Setting) -> Row:
    """Every substitution, insertion, deletion and exchange, against the rivals that are tried."""
    short = sorted(setting.secrets, key=len)[: CHOSEN.all]
    met, tried, ratios = 0, 0, list[float]()
    for ids in short:
        encoder = Encoder(setting.target)
        vectors = Vectors(setting.target, WAY, ids)
        text = vectors.inside(ids)
        own = vectors([text])[0]
        parent = Texts.of([list(text)], len(text) + 1, encoder.device)
        least, closest = float("inf"), text
        tokens = [t for t in range(setting.target.vocabulary) if t not in setting.target.pads()]
        for some in torch.tensor(tokens, device=encoder.device).split(2048):
            every = some.expand(1, len(text) + 1, -1)
            children, _ = moves.together(
                moves.replaced(parent, every), moves.inserted(parent, every)
            )
            tried += len(children)
            apart = (encoder.vectors(children).double() - own.double()).norm(dim=-1)
            apart[[tuple(children.tokens(row)) == text for row in range(len(children))]] = torch.inf
            if float(apart.min()) < least:
                least = float(apart.min())
                closest = tuple(children.tokens(int(apart.argmin())))
        rivals = rivals_of(vectors, text, own, False)
        best = float((rivals.vectors.double() - own.double()).norm(dim=-1).min())
        met += closest in rivals.texts or best <= least
        ratios.append(best / least)
    return Row(
        f"{setting.loaded.name}: the nearest of all texts one edit away is among the rivals",
        f"{met} of {len(short)} texts",
        details=f"{tried:,} texts run; distance of the nearest rival over the nearest of all, "
        f"largest {max(ratios):.2f}",
    )


def stored_row(setting: Setting, name: str, change: Change, near: list[NearMisses]) -> Row:
    started = time.perf_counter()
    statuses, wrong, fit, judged, tried, likely = Counter[str](), 0, 0, 0, 0, [0, 0]
    for case in near:
        leak = changed(setting, change, case.ids)
        vectors = case.vectors(leak)
        verdict = judge_vector(setting.target, leak, case.ids, vectors)
        whole = Mark.UNKNOWN not in verdict.marks
        statuses["verified" if verdict.verified else "likely" if whole else "partly"] += 1
        here = 0
        for number, miss in enumerate(case.misses):
            fitting = could_be(leak, vectors, miss)
            tried, fit, here = tried + 1, fit + fitting, here + fitting
            told = fitting and here <= CHOSEN.judged
            judged += told
            if told or (number < 2 and not verdict.verified):
                other = judge_vector(setting.target, leak, miss, vectors)
                wrong += other.verified
                good = right(case.ids, miss, other.marks)
                likely = [sum(pair) for pair in zip(likely, good, strict=True)]
    seconds = (time.perf_counter() - started) / len(near)
    return Row(
        f"{setting.loaded.name}, {name}",
        f"{statuses['verified']} of {len(near)} verified; {wrong} of {tried:,} near misses",
        "0 near misses",
        wrong == 0,
        f"{statuses['likely']} likely, {statuses['partly']} in part; {fit} near misses fit, the "
        f"nearest {judged} were judged; of likely tokens in wrong texts {likely[0]} of {likely[1]} "
        f"right; {seconds:.1f} s a text",
    )


def right(truth: list[int], ids: list[int], marks: Sequence[Mark]) -> tuple[int, int]:
    """How many tokens that are marked likely are the truth's, and how many there are."""
    blocks = SequenceMatcher(None, truth, ids, autojunk=False).get_matching_blocks()
    same = {block.b + step for block in blocks for step in range(block.size)}
    likely = [place for place, mark in enumerate(marks) if mark is Mark.LIKELY]
    inside = [place for place in likely if 0 < place < len(ids) - 1]
    return len(same & set(inside)), len(inside)


def changed(setting: Setting, change: Change, ids: list[int], way: Exposure = WAY) -> Pooled:
    leak = cast("Pooled", texts.leak_of(setting.loaded, ids, way))
    return change(replace(leak, tokens=None))


def could_be(leak: Pooled, vectors: Vectors, ids: list[int]) -> bool:
    """The judge's tests but that against rivals: without them nothing is verified."""
    own = vectors([vectors.inside(ids)])[0]
    stored = Stored.of(leak, own)
    fits = float(stored.misfit(own[None])) <= stored.limit(own)
    return fits and stored.bits >= bits_needed(vectors.target, len(vectors.inside(ids)))


# Vectors that are no text's.


def nobody_rows(setting: Setting, known: Tensor, forms: dict[str, Change]) -> Iterator[Row]:
    each = max(1, setting.nobody // 4)
    stream = torch.Generator().manual_seed(0)
    kinds = {
        "Gaussian noise": torch.randn(each, known.shape[1], generator=stream).to(known),
        "the mean of two texts": known[:each] + known[each : 2 * each],
        "the same encoder's [CLS]": vectors_of(
            setting, setting.others[-each:], Exposure("pooled", 0, "cls")
        ),
        "the same encoder's maxima": vectors_of(
            setting, setting.others[-each:], Exposure("pooled", 0, "max")
        ),
    }
    for name, vectors in kinds.items():
        yield nobody_row(setting, known, forms, name, normalize(vectors, dim=-1))


def nobody_row(
    setting: Setting, known: Tensor, forms: dict[str, Change], name: str, goals: Tensor
) -> Row:
    started = time.perf_counter()
    answers, cosines, passes = climbed(setting, known, goals)
    verified = fit = likely = 0
    for goal, ids in zip(goals.cpu(), answers, strict=True):
        whole = Vectors(setting.target, WAY, ids)
        for change in forms.values():
            leak = change(Pooled(goal))
            vectors = whole if leak.exposure == WAY else whole.of_part(leak.exposure)
            if could_be(leak, vectors, ids):
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


def climbed(
    setting: Setting, known: Tensor, goals: Tensor, rounds: int = 4
) -> tuple[list[list[int]], list[float], int]:
    """From the nearest known text uphill by the best single edit of each round."""
    encoder = Encoder(setting.target)
    first, last = len(encoder.before), len(encoder.after)
    inside = [ids[first : len(ids) - last] for ids in setting.others]
    longest = max(map(len, inside)) + rounds
    start = (goals @ known.T).argmax(1).tolist()
    best = Texts.of([inside[row] for row in start], longest, encoder.device)
    generator = torch.Generator(encoder.device).manual_seed(0)
    cosines = (encoder.vectors(best) * goals).sum(-1)
    for _ in range(rounds):
        for some in torch.arange(len(goals), device=goals.device).split(64):
            parents = best[some]
            _, slopes = encoder.slopes(parents, goals[some])
            uphill = (slopes @ encoder.table.T).topk(3, dim=-1).indices
            children, born = moves.together(
                moves.replaced(parents, uphill), moves.inserted(parents, uphill[..., :1]),
                moves.left_out(parents), moves.swapped(parents, 8, generator),
            )  # fmt: skip
            scores = (encoder.vectors(children) * goals[some][born]).sum(-1)
            for row in range(len(some)):
                mine = (born == row).nonzero().flatten()
                top = mine[scores[mine].argmax()]
                if scores[top] > cosines[some[row]]:
                    best.ids[some[row]] = children.ids[top]
                    best.lengths[some[row]] = children.lengths[top]
                    cosines[some[row]] = scores[top]
    answers = [[*encoder.before, *best.tokens(row), *encoder.after] for row in range(len(goals))]
    return answers, cosines.tolist(), encoder.passes


# Secret rotations and linear maps.


def secret_rows(setting: Setting, known: Tensor, count: int, runs: list[Vectors]) -> Iterator[Row]:
    """`count` known pairs, of which a tenth is held back to measure how exact the rest makes it."""
    stream = torch.Generator().manual_seed(1)
    d = known.shape[1]
    gaussian = torch.randn(d, d, generator=stream, dtype=torch.float64)
    rotation = torch.linalg.qr(gaussian).Q
    count = min(count, 10 * len(known) // 11)
    known = known[: count + max(8, count // 10)].double().cpu()
    secret = vectors_of(setting, setting.secrets).double().cpu()
    for name, matrix, change in (
        ("a secret rotation", rotation, partial(rounded, "float32")),
        ("a secret rotation, 8 bits", rotation, partial(rounded, "int8")),
        ("a secret linear map", gaussian, partial(rounded, "float32")),
    ):
        stored = [change(Pooled(v, normalised=False)).values for v in (known @ matrix).float()]
        hidden = [change(Pooled(v, normalised=False)).values for v in (secret @ matrix).float()]
        yield secret_row(
            setting, name, known, torch.stack(stored), torch.stack(hidden), secret, count, runs
        )


def secret_row(
    setting: Setting, name: str, known: Tensor, stored: Tensor, hidden: Tensor, secret: Tensor,
    count: int, runs: list[Vectors],
) -> Row:  # fmt: skip
    held = slice(count, None)
    seen: Tensor | None = None
    if name == "a secret linear map":
        back = undo_linear(known[:count], stored[:count])
        undone, numbers, check = hidden.double() @ back, None, stored[held].double() @ back
        off = check - known[held]
    else:
        pairs = undo_rotation(known[:count], stored[:count])
        undone, numbers, seen = pairs.undo(hidden), pairs.numbers(hidden), pairs.own
        off = pairs.numbers(stored[held]) - known[held] @ pairs.own
    values = undone if numbers is None else numbers
    noise = float(off.square().mean().sqrt())
    verified = 0
    for row, ids in enumerate(setting.secrets):
        leak = Pooled(values[row].float(), noise=noise)
        vectors = runs[row].of_part(WAY, seen)
        verified += judge_vector(setting.target, leak, ids, vectors).verified
    cosines = torch.cosine_similarity(undone, secret).tolist()
    return Row(
        f"{setting.loaded.name}, {name}, {count} pairs known",
        f"cosine {statistics.median(cosines):.6f}; {verified} of {len(hidden)} texts verified",
        details=f"{values.shape[1]} numbers, each off by {noise / float(known.std()):.1e} of its "
        "spread, measured on pairs held back",
    )


if __name__ == "__main__":
    show.main(run, __doc__)
