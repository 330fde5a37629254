"""Texts from pooled sentence embeddings: how much is read, by encoder and length.

Sentences of SST-2's dev set (none of them a line of the corpus) are searched for from
their vectors of MiniLM (or another `--encoder`) alone, without knowing their length:
`--texts` for each length of `--tokens`, special tokens not counted. Exact means
identical tokens; BLEU, ROUGE-L and F1 are as in other papers. A different text with the
same vector (within 1e-6) is wrong. `--rows` selects:

    1  a corpus of the same domain: SST-2's training set, on a GPU also HellaSwag and DREAM
    3  the corpus that ships
    4  the two secrets of OWASP's lab for embedding inversion, which recovers neither, with the
       corpus that ships and the judge
    5  another domain, HellaSwag and DREAM, and the texts of `--drawn` (docs/embeddings.md)
    6  passages of `--passages` tokens from the dev sets of DREAM and HellaSwag, with their training
       sets and `--drawn` as corpus
    7  passes per second of the search, against plain encoding of such texts with transformers, both
       in half precision, on a GPU
    8  one round of sums: for how many of `--texts` texts with four wrong tokens and eight
       candidates at each position is the right set among those that are run?

On a GPU all vectors are searched together, on a CPU one by one. `--quick` takes a model
with random weights.
"""

from __future__ import annotations

import copy
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import normalize

import show
import subjects
from keyhole.data import read_texts
from keyhole.models import Exposure, Loaded
from keyhole.recover import Pooled, leak_of, recover_texts
from keyhole.recover.attack import Target
from keyhole.recover.embeddings.counts import SHIPPED, Counted
from keyhole.recover.embeddings.encoder import Encoder, Texts, matrix_half
from keyhole.recover.embeddings.reader import CountedReader
from keyhole.recover.embeddings.sum_search import Reading, SumSearch
from keyhole.recover.embeddings.sums import Effects, Sets
from show import Row

# targets on a GPU, by the width of the vector: MiniLM's, MPNet's and Nomic's …
PERCENT = {
    384: {(4, 9): 98, (10, 16): 95, (17, 24): 80, (25, 32): 60},
    768: {(10, 16): 90, (17, 24): 75, (25, 32): 55},
}
LONG = {(64, 64): 25, (128, 128): 10}
ON_CPU = {(4, 9): 80}  # … and on two cores
SECRETS = (
    "The secret code is 12345.",
    "Reset password for admin: Tr0ub4dor&3",
)  # of OWASP's lab
Lengths = tuple[int, int]
_TIMED = 6_000  # passes for each vector in row 7
# of row 8: tokens, tokens, lines
_WRONG = 4
_CANDIDATES = 8
_WHITENED = 1_000


@dataclass(frozen=True)
class Case:
    """A row: the corpus that is counted, and the share of texts to reach by length."""

    what: str
    corpus: Sequence[str]
    percent: dict[Lengths, int] | None = None
    passages: Sequence[str] = ()  # cut to length, instead of sentences


def run(
    quick: bool,
    data: Path = subjects.DATA,
    encoder: Path | None = None,
    device: str = subjects.DEVICE,
    texts: int = 100,
    passes: int | None = None,
    rows: list[int] = [1, 3, 4],  # noqa: B006 - read, never changed
    tokens: str = "4-9,10-16,17-24,25-32",
    passages: str = "32-32,64-64,128-128",
    drawn: Path | None = None,
) -> Iterator[Row]:
    if quick:
        loaded = subjects.tiny("bert", words=96)
        lines = subjects.random_lines(loaded, 120, 1, 3)
        cases = [Case("its own words", lines[4:])]
        search = SumSearch(passes=400)
        yield from searched(loaded, cases, lines[:4], [(1, 3)], search, texts)
        return
    loaded = subjects.minilm(encoder, device)
    on_gpu = device.startswith("cuda")
    reviews, secrets = (
        read_texts(data / "sst2" / f"{part}.tsv") for part in ("train", "dev")
    )
    search = SumSearch(passes=passes)
    percent = PERCENT.get(loaded.model.config.hidden_size)
    others = [*subjects.hellaswag(data), *subjects.turns(data)]
    more = [*others, *(read_texts(drawn) if drawn else ())]
    long = [*subjects.dialogues(data, 200), *subjects.hellaswag(data, "dev")]
    cases = {
        1: Case(
            "same domain",
            [*reviews, *others] if on_gpu else reviews,
            percent if on_gpu else ON_CPU,
        ),
        3: Case("the corpus that ships", read_texts(SHIPPED)),
        5: Case("another domain and texts drawn", more, percent),
        6: Case("passages", more, LONG, long),
    }
    for row in rows:
        if row == 4:
            yield from labelled(loaded, search)
        elif row == 7:
            yield from timed(loaded, others, secrets, subjects.lengths(tokens))
        elif row == 8:
            yield summed(loaded, reviews, texts)
        else:
            sizes = subjects.lengths(passages if row == 6 else tokens)
            yield from searched(loaded, [cases[row]], secrets, sizes, search, texts)


def labelled(loaded: Loaded, search: SumSearch) -> Iterator[Row]:
    """Yield a row for each secret of OWASP's lab, from the leak to the judge."""
    for text in SECRETS:
        leak = cast(
            "Pooled", leak_of(loaded.model, loaded.tokenizer, text, Exposure("pooled"))
        )
        reader = CountedReader(search=search)
        clock = _Clock()
        (made,) = recover_texts(
            loaded.model, loaded.tokenizer, [replace(leak, tokens=None)], method=reader
        )
        exact = made.ids == loaded.tokenizer(text)["input_ids"]
        words = f"{'exact' if exact else 'not read'}, {'' if made.verified else 'not '}verified"
        yield Row(
            f"{Path(loaded.name).name}: {text}",
            words,
            "exact, verified",
            exact and made.verified,
            f"{made.passes:,} passes, {clock.words()}",
        )


def summed(loaded: Loaded, corpus: Sequence[str], texts: int) -> Row:
    """Count the texts whose right set of changes is among those that a round of the search runs.

    The overlap, by which joint changes exceed or miss the sum of single ones, is the
    median over the right sets of all texts.
    """
    stream = random.Random(0)
    ids = token_lists(loaded, corpus)
    words = [token for line in ids for token in line]
    lines = stream.sample(
        [line for line in ids if 9 <= len(line) <= 12], texts + _WHITENED
    )
    encoder = Encoder(Target.of(loaded.model, loaded.tokenizer))
    search = SumSearch()
    encoder.whiten(Texts.of(lines[texts:], 12, encoder.device))
    rounds: list[tuple[Effects, Tensor, Tensor]] = []
    for text in lines[:texts]:
        places = sorted(stream.sample(range(len(text)), _WRONG))
        wrong = list(text)
        tokens = [stream.choices(words, k=_CANDIDATES) for _ in text]
        for place in places:
            wrong[place] = stream.choice(words)
            tokens[place][0] = text[place]
        single = [
            [*wrong[:p], token, *wrong[p + 1 :]]
            for p, some in enumerate(tokens)
            for token in some
        ]
        vectors = encoder.vectors(Texts.of([text, wrong, *single], 12, encoder.device))
        moves = (vectors[2:] - vectors[1])[None]
        slots = torch.arange(len(text), device=moves.device).repeat_interleave(
            _CANDIDATES
        )
        effects = Effects(moves, moves.square().sum(-1), slots, len(text))
        right = _CANDIDATES * torch.tensor(places, device=moves.device)
        rounds.append((effects, vectors[:1] - vectors[1], right))
    ran = torch.ones(1, 1, dtype=torch.bool, device=encoder.device)
    overlaps = [
        effects.overlap(right[None, None], off[None], ran)
        for effects, off, right in rounds
    ]
    overlap = torch.stack(overlaps).median(0).values
    items = [{"overlap": float(each)} for each in overlaps]
    for name, rho in (("plain sums", 0 * overlap), ("overlapping", overlap)):
        for item, (effects, off, right) in zip(items, rounds, strict=True):
            sets = effects.grown(
                Sets.none(off), search.width, search.depth, search.tried, rho
            )
            found = [
                sorted(change for change in one if change >= 0)
                for one in sets[0].tolist()
            ]
            item[name] = right.tolist() in found
    plain_sums, ours = (
        sum(item[name] for item in items) for name in ("plain sums", "overlapping")
    )
    return Row(
        f"{Path(loaded.name).name}, sums: the right set of {_WRONG} among {search.tried}",
        f"{ours} of {texts}, {plain_sums} without overlap",
        details=f"overlap {float(overlap):.2f}, the median",
        items=items,
    )


def timed(
    loaded: Loaded,
    corpus: Sequence[str],
    secrets: Sequence[str],
    lengths: Sequence[Lengths],
) -> Iterator[Row]:
    """Compare passes per second of the search with those of the encoder alone."""
    target = Target.of(loaded.model, loaded.tokenizer)
    lines = token_lists(loaded, corpus)
    longest = lengths[-1][1] + 2
    encoder = Encoder(target)
    counted = Counted.of(encoder, lines, longest)
    search = SumSearch(passes=_TIMED)
    for length, few in of_lengths(loaded, Case("", ()), secrets, lines, lengths, 100):
        texts = Texts.of(few, longest, encoder.device)
        rates: list[float] = []
        for once in (
            lambda texts=texts: sum(
                r.passes
                for r in search(encoder, encoder.vectors(texts), counted, longest)
            ),
            lambda texts=texts: plain(loaded, *encoder.framed(texts)),
        ):
            once()
            clock = _Clock()
            rates.append(once() / clock.seconds())
        yield Row(
            f"{Path(loaded.name).name}, speed, {length[0]}–{length[1]} tokens",
            f"{rates[0] / rates[1]:.2f} of plain encoding",
            ">= 0.8 of it",
            rates[0] >= 0.8 * rates[1],
            f"{rates[0]:,.0f} passes per second, plain encoding {rates[1]:,.0f}",
        )


@torch.no_grad()
def plain(loaded: Loaded, ids: Tensor, mask: Tensor) -> int:
    """Encode these texts (b, n) many times, batched by length, and return how many."""
    model = copy.deepcopy(loaded.model).half()
    rows = torch.arange(len(ids), device=ids.device).repeat(_TIMED // 2)
    lengths = mask.sum(1)
    for some in rows[lengths[rows].argsort()].split(8192):
        width = int(lengths[some].max())
        seen = mask[some, :width]
        states = model(
            input_ids=ids[some, :width], attention_mask=seen
        ).last_hidden_state
        normalize((states * seen[..., None]).sum(1), dim=-1)
    return len(rows)


def of_lengths(
    loaded: Loaded,
    case: Case,
    secrets: Sequence[str],
    corpus: Sequence[list[int]],
    lengths: Sequence[Lengths],
    texts: int,
) -> Iterator[tuple[Lengths, list[list[int]]]]:
    """Yield token lists of each range of lengths that are not lines of the corpus."""
    known = set(map(tuple, corpus))
    fresh = [
        ids
        for ids in token_lists(loaded, case.passages or secrets)
        if tuple(ids) not in known
    ]
    for least, most in lengths:
        cut = [ids[:most] for ids in fresh] if case.passages else fresh
        fitting = [ids for ids in cut if least <= len(ids) <= most]
        random.Random(0).shuffle(fitting)
        yield (least, most), fitting[:texts]


def token_lists(loaded: Loaded, lines: Sequence[str]) -> list[list[int]]:
    stripped = [line.strip() for line in lines if line.strip()]
    return loaded.tokenizer(stripped, add_special_tokens=False)["input_ids"]


def searched(
    loaded: Loaded,
    cases: Sequence[Case],
    secrets: Sequence[str],
    lengths: Sequence[Lengths],
    search: SumSearch,
    texts: int,
) -> Iterator[Row]:
    target = Target.of(loaded.model, loaded.tokenizer)
    name = Path(loaded.name).name
    for case in cases:
        lines = token_lists(loaded, case.corpus)
        encoder = Encoder(target, half=matrix_half())
        clock = _Clock()
        longest = max(most for _, most in lengths) + 2
        counted = Counted.of(encoder, lines, longest)
        words = f"{len(lines):,} lines, counted in {clock.words()}"
        yield Row(f"{name}, {case.what}: corpus", words)
        for length, few in of_lengths(loaded, case, secrets, lines, lengths, texts):
            what = f"{name}, {case.what}, {length[0]}–{length[1]} tokens"
            percent = (case.percent or {}).get(length)
            yield measure(what, counted, few, search, longest, percent)


def measure(
    what: str,
    counted: Counted,
    secrets: list[list[int]],
    search: SumSearch,
    max_length: int,
    percent: int | None,
) -> Row:
    encoder = counted.encoder
    clock = _Clock()
    goals = encoder.vectors(Texts.of(secrets, max_length, encoder.device))
    groups = [goals] if goals.is_cuda else goals.split(1)
    readings: list[Reading] = []
    for group in groups:
        readings += search(encoder, group, counted, max_length)
    took = clock.words(len(secrets))
    decode = encoder.target.tokenizer.decode
    items = [
        {
            "tokens": len(ids),
            "exact": reading.tokens == ids,
            "cosine": reading.cosine,
            "f1": subjects.f1(reading.tokens, ids),
            "passes": reading.passes,
            **subjects.scores(decode(reading.tokens), decode(ids)),
        }
        for reading, ids in zip(readings, secrets, strict=True)
    ]
    exact = sum(item["exact"] for item in items)
    arrived = sum(reading.cosine > 1 - search.arrived for reading in readings)
    mean = {name: statistics.mean(item[name] for item in items) for name in items[0]}
    enough = percent is None or exact >= percent / 100 * len(secrets)
    return Row(
        what,
        f"{exact} of {len(secrets)} exact, {arrived - exact} other texts with the same vector",
        f">= {percent}% exact, 0 wrong" if percent else "0 wrong",
        enough and arrived <= exact,
        f"token F1 {mean['f1']:.3f}, BLEU {100 * mean['bleu']:.1f}, ROUGE-L {mean['rouge_l']:.3f}, "
        f"cosine {mean['cosine']:.4f}; {mean['passes']:,.0f} passes and {took} per text",
        items=items,
    )


class _Clock:
    """Wall-clock and CPU seconds since it was created."""

    def __init__(self) -> None:
        self.began, self.cpu = time.perf_counter(), time.process_time()

    def seconds(self) -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter() - self.began

    def words(self, of: int = 1) -> str:
        wall = self.seconds()
        cpu = time.process_time() - self.cpu
        return f"{wall / of:.2f} s ({cpu / of:.2f} s of the CPU)"


if __name__ == "__main__":
    show.main(run)
