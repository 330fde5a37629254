"""Defences of stored vectors, and the attacker who knows them, for the table in defences.py.

Sentences are stored with a defence. The attacker has the store, the encoder, a corpus
of the same domain and the defence, all but its secret. The cost of the defence is
recall@10 among other sentences, for further ones as queries. Besides the noise and the
rounding that an audit tries (keyhole.audit.defences), for vectors f (d numbers, length
one):

    private noise     f + σ g, (ε, δ)-private for σ = Δ·noise(ε), Δ = 2 the largest distance
                      (Balle and Wang, arXiv 1805.06530)
    metric privacy    f + z with density ∝ e^(−ε‖z‖): a random direction, and a length that is
                      Gamma(d, 1/ε); texts at distance D are ε·D-private (Feyisetan et al., 2020)
    projection        f P / ‖f P‖, P (d, k) of random numbers, known to everybody
    truncation        the first k numbers, normalised to length one
    product quant.    one of 256 centroids in each block (Jégou et al., 2011)
    secret rotation   f R; m known texts with their vectors give m numbers of f (secrets.py)

The attacker adapts. Noise is stated to the judge, and a stored form is judged in its
own precision (embeddings/judge.py). If k numbers f P of a vector are known, the
attacker uses the encoder with its last states multiplied by P (`mapped`): pooling by
the mean commutes with a linear map.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize, one_hot

import show
from keyhole.audit.defences import DISTANCE, gaussian_noise, recall
from keyhole.data import read_texts
from keyhole.defence import ROUNDINGS, Changes, Defence
from keyhole.models import Exposure, Loaded, load_model
from keyhole.models.anatomy import anatomy
from keyhole.models.hooks import hooks
from keyhole.recover import Pooled, TextRecovery, recover_texts
from keyhole.recover.attack import Target
from keyhole.recover.embeddings.counts import SHIPPED
from keyhole.recover.embeddings.edits import Tokens, Vectors, alternatives_to
from keyhole.recover.embeddings.encoder import Encoder, Texts
from keyhole.recover.embeddings.judge import judge_vector, may_be
from keyhole.recover.embeddings.reader import CountedReader
from keyhole.recover.embeddings.sum_search import SumSearch
from keyhole.recover.gradients.update import noise_for
from keyhole.recover.secrets import random_rotation, undo_rotation
from show import Row

WAY = Exposure("pooled")
PRIVATE = 8.0  # ε that is called private
PAIRS = (0, 1, 10)  # known texts; for a rotation also d / 4 and d
ROUNDS = 15  # of Lloyd's algorithm
CODES = 256
MIN_NUMBERS = 3  # of a vector that must be known for its direction to say anything
Change = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Setting:
    """An encoder, the secret texts, the attacker's texts, and the stored ones."""

    loaded: Loaded
    secrets: list[list[int]]
    reader: CountedReader
    vectors: Tensor  # of the secret texts
    known: Tensor  # of texts that the attacker knows to be stored
    docs: Tensor
    queries: Tensor
    texts: Sequence[str]  # of the docs

    @property
    def name(self) -> str:
        path = Path(self.loaded.name)
        return path.parent.name if path.name == "model" else path.stem

    @property
    def target(self) -> Target:
        return Target.of(self.loaded.model, self.loaded.tokenizer)


def prepared(
    loaded: Loaded,
    secrets: Sequence[str],
    corpus: Sequence[str],
    docs: int,
    search: SumSearch,
    max_length: int,
) -> Setting:
    target = Target.of(loaded.model, loaded.tokenizer)
    reader = CountedReader(corpus, max_length, search).ready(target, WAY)
    ids = [loaded.tokenizer(text)["input_ids"] for text in secrets]
    half = len(corpus) // 2
    return Setting(
        loaded,
        ids,
        reader,
        embedded(target, secrets),
        embedded(target, corpus[-1_000:]),
        embedded(target, corpus[:docs]),
        embedded(target, corpus[half : half + 200]),
        corpus,
    )


def embedded(target: Target, lines: Sequence[str]) -> Tensor:
    """Return vectors (lines, d) of unit length."""
    ids = target.tokenizer(list(lines), add_special_tokens=False)["input_ids"]
    encoder = Encoder(target, WAY)
    return encoder.vectors(Texts.of(ids, max(map(len, ids)), encoder.device))


@dataclass(frozen=True, eq=False)
class Stored:
    """A defence: `keep` maps vectors (b, d), and with `asks` queries, to stored ones.

    `stated` is what the attacker knows of the stored form, as fields of `Pooled`. `map`
    (d, k) is a public linear map that `keep` applies. The attacker knows the plain and
    the stored vectors of `pairs` texts, if `keep` is a secret rotation.
    """

    name: str
    keep: Change
    stated: Mapping[str, Any] = field(default_factory=dict[str, Any])
    asks: bool = False
    map: Tensor | None = None
    pairs: int = 0


def of(defence: Defence) -> Stored:
    stream = torch.Generator().manual_seed(defence.seed)
    keep = partial(defence.change, stream=stream)
    return Stored(defence.name, keep, {"noise": defence.noise})


def no_defence() -> Stored:
    return Stored("none, as it is", torch.clone)


def noise(share: float, d: int) -> Stored:
    return of(gaussian_noise(share, d))


def private_noise(d: int) -> Stored:
    """Noise that is (8, 1e-5)-private."""
    return noise(DISTANCE * noise_for(PRIVATE) * d**0.5, d)


def rounding(precision: str) -> Stored:
    words = {"int8": "8 bits", "int4": "4 bits", "binary": "signs"}
    name = f"rounding, {words[precision]}"
    return of(Defence(name=name, changes=Changes.VECTORS, precision=precision))


def metric_noise(share: float, d: int, seed: int = 0) -> Stored:
    """Metric privacy with noise of average length `share` of a vector's: ε = d / share."""
    epsilon = d / share
    stream = np.random.default_rng(seed)

    def keep(vectors: Tensor) -> Tensor:
        along = torch.from_numpy(stream.normal(size=vectors.shape))
        lengths = torch.from_numpy(stream.gamma(d, 1 / epsilon, (len(vectors), 1)))
        return vectors + (lengths * normalize(along, dim=-1)).to(vectors)

    each = math.sqrt(d + 1) / epsilon  # E‖z‖² = d (d + 1) / ε²
    return Stored(f"metric privacy, ε = {epsilon:.2g}", keep, {"noise": each})


def projection(width: int, d: int, seed: int = 0) -> Stored:
    stream = torch.Generator().manual_seed(seed)
    drawn = torch.randn(d, width, generator=stream) * width**-0.5

    def keep(vectors: Tensor) -> Tensor:
        return normalize(vectors @ drawn.to(vectors), dim=-1)

    name = f"random projection, {width} of {d} numbers"
    return Stored(name, keep, asks=True, map=drawn)


def truncation(width: int, d: int) -> Stored:
    def keep(vectors: Tensor) -> Tensor:
        return normalize(vectors[:, :width], dim=-1)

    stated = {"width": width, "unit": True}
    return Stored(f"truncation, {width} of {d} numbers", keep, stated, asks=True)


def product_quantisation(blocks: int, vectors: Tensor) -> Stored:
    """Product quantisation with centroids of these vectors (n, d), by Lloyd's algorithm."""
    points = vectors.unflatten(1, (blocks, -1)).transpose(0, 1)
    book = points[:, :CODES].clone()
    for _ in range(ROUNDS):
        nearest = torch.cdist(points, book).argmin(-1)
        chosen = one_hot(nearest, book.shape[1]).to(points)
        counts = chosen.sum(1)[..., None]
        means = chosen.mT @ points / counts.clamp(min=1)
        book = torch.where(counts > 0, means, book)

    def keep(given: Tensor) -> Tensor:
        parts = given.unflatten(1, (blocks, -1)).transpose(0, 1)
        codes = torch.cdist(parts, book.to(given)).argmin(-1)
        found = book.to(given).gather(1, codes[..., None].expand_as(parts))
        return found.transpose(0, 1).flatten(1)

    name = f"product quantisation, {blocks} codes of {book.shape[1]}"
    return Stored(name, keep, {"codebook": book.cpu()})


def rotation(pairs: int, d: int, seed: int = 0) -> Stored:
    secret = random_rotation(d, torch.Generator().manual_seed(seed))

    def keep(vectors: Tensor) -> Tensor:
        return (vectors.double() @ secret.to(vectors.device)).to(vectors)

    name = f"secret rotation, {pairs} known text{'s' * (pairs != 1)}"
    return Stored(name, keep, asks=True, pairs=pairs)


def every(docs: Tensor) -> list[Stored]:
    """Return every defence in several strengths."""
    d = docs.shape[1]
    return [
        no_defence(),
        *(noise(share, d) for share in (0.05, 0.1, 0.2, 0.5, 1.0)),
        private_noise(d),
        *(metric_noise(share, d) for share in (0.1, 0.3, 1.0)),
        *(rounding(precision) for precision in ("int8", "int4", "binary")),
        *(product_quantisation(d // size, docs) for size in (4, 8, 16)),
        *(rotation(pairs, d) for pairs in (*PAIRS, d // 4, d)),
        *(projection(d // part, d) for part in (2, 4, 8)),
        *(truncation(d // part, d) for part in (2, 4, 8)),
    ]


def retrieval(defence: Stored, docs: Tensor, queries: Tensor) -> float:
    """Return the recall that a defence leaves, of texts (n, d) to queries (q, d)."""
    asked = defence.keep(queries) if defence.asks else queries
    return recall(docs, defence.keep(docs), queries, asked)


def reading(
    setting: Setting, defences: Sequence[Stored]
) -> Iterator[tuple[Stored, list[TextRecovery]]]:
    """Yield each defence with what is read of the secret vectors that it protects."""
    model = setting.loaded.model
    for defence in defences:
        stored, map_ = known_numbers(setting, defence)
        stated = defence.stated
        if map_ is not None:
            stated = {"width": map_.shape[1], "unit": True}
        leaks = [Pooled(row, **stated) for row in stored.float().cpu()]
        way = leaks[0].exposure
        reader = setting.reader
        with nullcontext() if map_ is None else mapped(model, map_):
            if way != WAY:  # what was counted of the corpus is about whole vectors
                reader = replace(reader, counted=None).ready(setting.target, way)
            yield defence, read_with(setting, leaks, reader)


def known_numbers(setting: Setting, defence: Stored) -> tuple[Tensor, Tensor | None]:
    """Return the numbers that the attacker knows, and the map (d, k) that plain vectors took."""
    stored = defence.keep(setting.vectors)
    if not defence.pairs:
        return stored, defence.map
    pairs = setting.known[: defence.pairs]
    found = undo_rotation(pairs.cpu(), defence.keep(pairs).cpu())
    rank = found.own.shape[1]
    stored = stored.cpu()
    if MIN_NUMBERS <= rank < stored.shape[1]:
        return normalize(found.numbers(stored), dim=-1), found.own
    return found.undo(stored), None


def read_with(
    setting: Setting, leaks: Sequence[Pooled], reader: CountedReader
) -> list[TextRecovery]:
    loaded = setting.loaded
    return recover_texts(loaded.model, loaded.tokenizer, leaks, method=reader)


@contextmanager
def mapped(model: nn.Module, map_: Tensor) -> Generator[None]:
    """Multiply the model's last states (…, d) by a map (d, k) inside a `with` block."""

    def multiply(_m: nn.Module, _i: Any, output: Any) -> Any:
        states = output.last_hidden_state
        output.last_hidden_state = states @ map_.to(states)
        return output

    with hooks((anatomy(model).base.register_forward_hook, multiply)):
        yield


# Texts close to the true one, and vectors of no text: none may be verified.

FORMS = ("float32", "float16", "int8", "int4", "binary")


def near_rows(setting: Setting) -> Iterator[Row]:
    """Give texts close to the true one to the judge of its vector, in each stored form."""
    verdicts: dict[str, list[bool | None]] = {}
    for ids, vector in zip(setting.secrets, setting.vectors.cpu(), strict=True):
        run = Vectors(setting.target, WAY, ids)
        for kind, miss in near_misses(run, run.inside(ids)):
            made = [*run.before, *miss, *run.after]
            judged = [judge(setting, vector, form, made, run) for form in FORMS]
            verdicts.setdefault(kind, []).extend(judged)
    for kind, given in verdicts.items():
        yield show.exactly(
            f"{setting.name}, near misses: {kind}",
            f"{given.count(True)} of {len(given)} verified",
            f"0 of {len(given)} verified",
            f"{len(given) - given.count(None)} fit the vector",
        )


def judge(
    setting: Setting, vector: Tensor, form: str, ids: Sequence[int], run: Vectors
) -> bool | None:
    """Return whether a text is verified for a vector in a stored form, None if it cannot fit."""
    leak = Pooled(ROUNDINGS[form](vector))
    if not may_be(setting.target, leak, ids, run):
        return None
    return judge_vector(setting.target, leak, ids, run).verified


def near_misses(run: Vectors, text: Tokens) -> Iterator[tuple[str, Tokens]]:
    """Yield the nearest texts one edit away, and those with swapped neighbours."""
    own = run([text])[0]
    edits = alternatives_to(run, text, own, False)
    for place in (edits.vectors @ own).argsort(descending=True)[:20].tolist():
        yield "one edit, the nearest", edits.texts[place]
    for place, (left, right) in enumerate(pairwise(text)):
        if left != right:
            yield "neighbours swapped", (*text[:place], right, left, *text[place + 2 :])


def nobody_rows(
    setting: Setting, another: Path | None, device: str, count: int
) -> Iterator[Row]:
    each = count // 4
    stream = torch.Generator().manual_seed(0)
    docs = setting.docs.cpu()
    d = docs.shape[1]
    close = docs[:each] + 0.02 * d**-0.5 * torch.randn(each, d, generator=stream)
    yield nobody_row(setting, "texts with unstated noise of 2%", close, setting.texts)
    drawn = torch.randn(each, d, generator=stream)
    yield nobody_row(setting, "random directions", drawn)
    means = docs[:each] + docs[each : 2 * each]
    yield nobody_row(setting, "means of two texts", means)
    if another is not None:
        other = load_model(another, device=device)
        target = Target.of(other.model, other.tokenizer)
        vectors = embedded(target, read_texts(SHIPPED)[:each]).cpu()[:, :d]
        wide = torch.nn.functional.pad(vectors, (0, d - vectors.shape[1]))
        yield nobody_row(setting, "vectors of another encoder", wide)


def nobody_row(
    setting: Setting, kind: str, vectors: Tensor, texts: Sequence[str] = ()
) -> Row:
    """Read vectors of no text; `texts` are so close to them that reading those is right."""
    vectors = normalize(vectors, dim=-1)
    reader = replace(setting.reader, search=SumSearch(passes=1_000))
    read = read_with(setting, [Pooled(vector) for vector in vectors], reader)
    right = wrong = 0
    for number, (made, vector) in enumerate(zip(read, vectors, strict=True)):
        run = Vectors(setting.target, WAY, made.ids)
        verdicts = [made.verified]
        verdicts += [
            bool(judge(setting, vector, form, made.ids, run))
            for form in ("int8", "binary")
        ]
        if texts and made.ids == setting.loaded.tokenizer(texts[number])["input_ids"]:
            right += sum(verdicts)
        else:
            wrong += sum(verdicts)
    cosine = statistics.median(made.similarity or 0.0 for made in read)
    return show.exactly(
        f"{setting.name}, {len(vectors)} {kind}",
        f"{wrong} verified wrongly",
        "0 verified wrongly",
        f"as float32, 8 bits and signs; {right} verified with the text that they are close to; "
        f"cosine of what was found {cosine:.3f}, median",
    )
