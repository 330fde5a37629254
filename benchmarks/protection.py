"""What protects stored vectors: texts read and retrieval lost, for each defence and strength.

Sentences of SST-2's dev set (`--tokens` long, none of them a line of the corpus) are
stored with a defence. The attacker has the store, the encoder, SST-2's training set and
the defence, all but its secret. The cost of the defence is recall@10 among `--docs`
sentences, for other sentences as queries. `--parts` selects:

    defences  every defence; `--only rounding,truncation` selects some
    near      texts close to the true one, given to the judge: none may be verified
    nobody    `--nobody` vectors that belong to no text: none may be verified
    packages  packages that promise to protect vectors, by their own code, installed with `pip
              install --target FOLDER --no-deps turboquant-vectors ironcore-alloy` for
              `--packages FOLDER`

No text may be verified wrongly. On a GPU all vectors of an encoder are searched
together. `--quick` takes a model with random weights.
"""

from __future__ import annotations

import asyncio
import importlib
import math
import random
import statistics
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

import show
import subjects
from keyhole.data import read_texts
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
from keyhole.recover.gradients.update import DELTA, noise_for
from keyhole.recover.layers.unordered import assigned
from keyhole.recover.protection import (
    DISTANCE,
    Change,
    Defence,
    gaussian_noise,
    noisy_by,
    recall,
    rounding,
)
from keyhole.recover.secrets import Alignment, random_rotation, undo_rotation
from keyhole.recover.simulate import ROUNDINGS
from show import Row

WAY = Exposure("pooled")
PRIVATE = 8.0  # ε that is called private
PAIRS = (0, 1, 10)  # known texts; for a rotation also d / 4 and d


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


def run(
    quick: bool,
    data: Path = subjects.DATA,
    encoder: Path | None = None,
    another: Path | None = None,
    packages: Path | None = None,
    device: str = subjects.DEVICE,
    texts: int = 20,
    passes: int | None = None,
    lines: int = 20_000,
    docs: int = 2_000,
    nobody: int = 1_000,
    tokens: str = "4-9",
    only: list[str] = [],  # noqa: B006 - read, never changed
    parts: list[str] = ["defences", "near", "nobody", "packages"],  # noqa: B006 - read only
) -> Iterator[Row]:
    if packages is not None:
        sys.path.insert(0, str(packages))
    if quick:
        loaded = subjects.tiny("bert", words=96)
        words = subjects.random_lines(loaded, 160, 2, 4)
        setting = prepared(loaded, words[:2], words[2:], 60, SumSearch(passes=300), 5)
        yield from defended(
            setting, [no_defence(), rounding("int4"), projection(16, 32)]
        )
        yield from near_rows(setting, 2)
        drawn = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
        yield nobody_row(setting, "random directions", drawn, SumSearch(passes=60))
        return
    loaded = subjects.minilm(encoder, device)
    reviews = set(read_texts(data / "sst2" / "train.tsv"))
    corpus = random.Random(0).sample(sorted(reviews), lines)
    ((least, most),) = subjects.lengths(tokens)
    fresh = subjects.sentences(data, loaded.tokenizer, least, most, set(corpus))
    search = SumSearch(passes=passes)
    setting = prepared(loaded, fresh[:texts], corpus, docs, search, most + 3)
    if "defences" in parts:
        named = [
            each for each in own_defences(setting.docs) if not only or each.name in only
        ]
        yield from defended(setting, named)
    if "near" in parts:
        yield from near_rows(setting, texts)
    if "nobody" in parts:
        yield from nobody_rows(
            setting, another, device, nobody, replace(search, passes=1_000)
        )
    if "packages" in parts:
        for package in (turboquant, ironcore):
            yield from packaged(setting, package)


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


def own_defences(docs: Tensor) -> list[Defence]:
    d = docs.shape[1]
    return [
        no_defence(),
        *(gaussian_noise(share, d) for share in (0.05, 0.1, 0.2, 0.5, 1.0)),
        private_noise(PRIVATE),
        *(metric_noise(share, d) for share in (0.1, 0.3, 1.0)),
        *(rounding(precision) for precision in ("int8", "int4", "binary")),
        *(product_quantisation(d // size, docs) for size in (4, 8, 16)),
        *(rotation(pairs, d) for pairs in (*PAIRS, d // 4, d)),
        *(projection(d // part, d) for part in (2, 4, 8)),
        *(truncation(d // part, d) for part in (2, 4, 8)),
    ]


def defended(setting: Setting, defences: Sequence[Defence]) -> Iterator[Row]:
    read = reading(
        setting.loaded, defences, setting.vectors, setting.reader, setting.known, WAY
    )
    for defence, recoveries in read:
        yield row_of(setting, defence, recoveries)


def row_of(
    setting: Setting, defence: Defence, recoveries: Sequence[TextRecovery]
) -> Row:
    special = set(setting.loaded.tokenizer.all_special_ids)
    pairs = list(zip(recoveries, setting.secrets, strict=True))
    exact = sum(made.ids == ids for made, ids in pairs)
    verified = sum(made.verified for made, _ in pairs)
    wrong = sum(made.verified and made.ids != ids for made, ids in pairs)
    f1 = statistics.mean(
        subjects.f1(
            *([id_ for id_ in ids if id_ not in special] for ids in (made.ids, secret))
        )
        for made, secret in pairs
    )
    found = retrieval(defence, setting.docs, setting.queries)
    what = f"{setting.name}, {defence.name}, {defence.strength}"
    passes = statistics.mean(made.passes for made, _ in pairs)
    kept = {
        "row": what,
        "encoder": setting.name,
        "defence": defence.name,
        "strength": defence.strength,
        "exact": exact,
        "texts": len(pairs),
        "f1": f1,
        "verified": verified,
        "wrong": wrong,
        "recall": found,
    }
    return Row(
        what,
        f"{exact} of {len(pairs)} exact, recall@10 {found:.3f}",
        "0 verified wrongly",
        wrong == 0,
        f"token F1 {f1:.3f}; {verified} verified, {wrong} wrongly; {passes:,.0f} passes",
        run=kept,
    )


# The defences of vectors f (d numbers, length one), besides the noise and the rounding
# that an audit tries (recover/protection.py):
#
#     private noise     f + σ g, (ε, δ)-private for σ = Δ·noise(ε), Δ = 2 the largest distance
#                       (Balle and Wang, arXiv 1805.06530)
#     metric privacy    f + z with density ∝ e^(−ε‖z‖): a random direction, and a length that is
#                       Gamma(d, 1/ε); texts at distance D are ε·D-private (Feyisetan et al., 2020)
#     projection        f P / ‖f P‖, P (d, k) of random numbers, known to everybody
#     truncation        the first k numbers, normalised to length one
#     product quant.    one of 256 centroids in each block (Jégou et al., 2011)
#     secret rotation   f R; m known texts with their vectors give m numbers of f (secrets.py)
#
# The attacker adapts. Noise is stated to the judge, and a stored form is judged in its
# own precision (embeddings/judge.py). If k numbers f P of a vector are known, the
# attacker uses the encoder with its last states multiplied by P (`mapped`): pooling by
# the mean commutes with a linear map.

_ROUNDS = 15  # of Lloyd's algorithm
_CODES = 256
_MIN_NUMBERS = 3  # of a vector that must be known for its direction to say anything


@dataclass(frozen=True, eq=False)
class Adapted(Defence):
    """A defence that also changes queries (`ask`), and what an attacker does about it.

    `map` (d, k) is a public linear map that `keep` applies. `undo` finds a secret from
    the plain and the stored vectors of `pairs` known texts.
    """

    ask: Change = lambda queries: queries
    map: Tensor | None = None
    pairs: int = 0
    undo: Callable[[Tensor, Tensor], Alignment] | None = None


def no_defence() -> Defence:
    return Defence("none", "as it is", lambda vectors: vectors)


def private_noise(epsilon: float, seed: int = 0) -> Defence:
    """Noise that is (ε, 1e-5)-private."""
    return noisy_by(
        DISTANCE * noise_for(epsilon), f"ε = {epsilon:g}, δ = {DELTA:g}", seed
    )


def metric_noise(share: float, d: int, seed: int = 0) -> Defence:
    """Metric privacy with noise of average length `share` of a vector's: ε = d / share."""
    epsilon = d / share
    stream = torch.Generator().manual_seed(seed)

    def keep(vectors: Tensor) -> Tensor:
        # The sum of d exponential numbers is Gamma(d, 1).
        drawn = torch.rand(*vectors.shape, generator=stream, dtype=torch.float64)
        lengths = -drawn.clamp(min=1e-300).log().sum(-1, keepdim=True) / epsilon
        along = normalize(torch.randn(vectors.shape, generator=stream), dim=-1)
        return vectors + (lengths * along).to(vectors)

    each = math.sqrt(d + 1) / epsilon  # E‖z‖² = d (d + 1) / ε²
    return Defence("metric privacy", f"ε = {epsilon:.2g}", keep, {"noise": each})


def projection(width: int, d: int, seed: int = 0) -> Defence:
    stream = torch.Generator().manual_seed(seed)
    drawn = torch.randn(d, width, generator=stream) * width**-0.5

    def keep(vectors: Tensor) -> Tensor:
        return normalize(vectors @ drawn.to(vectors), dim=-1)

    return Adapted(
        "random projection", f"{width} of {d} numbers", keep, ask=keep, map=drawn
    )


def truncation(width: int, d: int) -> Defence:
    def keep(vectors: Tensor) -> Tensor:
        return normalize(vectors[:, :width], dim=-1)

    stated = {"width": width, "unit": True}
    return Adapted("truncation", f"{width} of {d} numbers", keep, stated, ask=keep)


def product_quantisation(blocks: int, vectors: Tensor) -> Defence:
    """Product quantisation with centroids of these vectors (n, d), by Lloyd's algorithm."""
    points = vectors.unflatten(1, (blocks, -1)).transpose(0, 1)
    book = points[:, :_CODES].clone()
    for _ in range(_ROUNDS):
        nearest = torch.cdist(points, book).argmin(-1)
        sums = torch.zeros_like(book).scatter_add_(
            1, nearest[..., None].expand_as(points), points
        )
        counts = torch.zeros_like(book[..., 0])
        counts.scatter_add_(1, nearest, torch.ones_like(nearest, dtype=book.dtype))
        book = torch.where(
            counts[..., None] > 0, sums / counts.clamp(min=1)[..., None], book
        )

    def keep(given: Tensor) -> Tensor:
        parts = given.unflatten(1, (blocks, -1)).transpose(0, 1)
        codes = torch.cdist(parts, book.to(given)).argmin(-1)
        found = book.to(given).gather(1, codes[..., None].expand_as(parts))
        return found.transpose(0, 1).flatten(1)

    strength = f"{blocks} codes of {book.shape[1]}"
    return Defence("product quantisation", strength, keep, {"codebook": book.cpu()})


def rotation(pairs: int, d: int, seed: int = 0) -> Defence:
    secret = random_rotation(d, torch.Generator().manual_seed(seed))

    def keep(vectors: Tensor) -> Tensor:
        return (vectors.double() @ secret.to(vectors.device)).to(vectors)

    known = f"{pairs} known text{'s' * (pairs != 1)}"
    undo = undo_rotation if pairs else None
    return Adapted("secret rotation", known, keep, ask=keep, pairs=pairs, undo=undo)


def retrieval(defence: Defence, docs: Tensor, queries: Tensor) -> float:
    """Return the recall that a defence leaves, of texts (n, d) to queries (q, d)."""
    asked = defence.ask(queries) if isinstance(defence, Adapted) else queries
    return recall(docs, defence.keep(docs), queries, asked)


def reading(
    loaded: Loaded,
    defences: Sequence[Defence],
    vectors: Tensor,
    reader: CountedReader,
    known: Tensor,
    way: Exposure,
) -> Iterator[tuple[Defence, list[TextRecovery]]]:
    """Yield each defence with what is read of vectors (b, d) that it protects.

    The attacker knows the plain vectors `known` (m, d) of some texts; `way` is how the
    encoder pools. Defences that keep all numbers are attacked in one batch, and come
    first.
    """
    made: list[tuple[Defence, list[Pooled], Tensor | None]] = []
    for defence in defences:
        stored, map_ = _known_numbers(defence, vectors, known)
        if map_ is not None:
            stated = {"width": map_.shape[1], "unit": True}
        else:
            stated = defence.stated
        about = (way.pooling, way.normalised)
        leaks = [Pooled(row, *about, **stated) for row in stored.float().cpu()]
        made.append((defence, leaks, map_))
    whole = [(defence, leaks) for defence, leaks, _ in made if leaks[0].exposure == way]
    read = iter(_read(loaded, [leak for _, leaks in whole for leak in leaks], reader))
    for defence, leaks in whole:
        yield defence, [next(read) for _ in leaks]
    for defence, leaks, map_ in made:
        if leaks[0].exposure != way:
            with nullcontext() if map_ is None else mapped(loaded.model, map_):
                # What was counted of the corpus is about whole vectors: it is counted
                # anew.
                recoveries = _read(loaded, leaks, replace(reader, counted=None))
            yield defence, recoveries


def _known_numbers(
    defence: Defence, vectors: Tensor, known: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Return the numbers that the attacker knows, and the map (d, k) that plain vectors took."""
    stored = defence.keep(vectors)
    if not isinstance(defence, Adapted):
        return stored, None
    if defence.undo is None:
        return stored, defence.map
    pairs = known[: defence.pairs]
    found = defence.undo(pairs.cpu(), defence.keep(pairs).cpu())
    rank = found.own.shape[1]
    stored = stored.cpu()
    if _MIN_NUMBERS <= rank < vectors.shape[1]:
        return normalize(found.numbers(stored), dim=-1), found.own
    return found.undo(stored), None


def _read(
    loaded: Loaded, leaks: Sequence[Pooled], reader: CountedReader
) -> list[TextRecovery]:
    if leaks and reader.counted is None:
        target = Target.of(loaded.model, loaded.tokenizer)
        reader = reader.ready(target, leaks[0].exposure)
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


# Packages that promise to protect vectors, by their own code.


def packaged(
    setting: Setting, package: Callable[[Setting], list[Defence]]
) -> Iterator[Row]:
    try:
        defences = package(setting)
    except ImportError as error:
        yield Row(f"{setting.name}, {package.__name__}", f"not run: {error}")
        return
    yield from defended(setting, defences)


def turboquant(setting: Setting) -> list[Defence]:
    """turboquant-vectors: `PrivateEncoder` (a secret rotation), and compression to 4 bits."""
    module: Any = importlib.import_module("turboquant_vectors")
    docs = setting.docs
    d = setting.docs.shape[1]
    secret = module.PrivateEncoder.generate(d)
    store = module.TurboQuantVectors(d)

    def rotated(vectors: Tensor) -> Tensor:
        return torch.from_numpy(secret.rotate(vectors.cpu().numpy())).to(vectors)

    def compressed(vectors: Tensor) -> Tensor:
        given = store.decompress(store.compress(vectors.cpu().numpy()))
        return torch.from_numpy(given).to(vectors)

    name = "turboquant-vectors"
    off = compressed(docs) - docs
    return [
        *(
            Adapted(
                name,
                f"PrivateEncoder, {pairs} known",
                rotated,
                ask=rotated,
                pairs=pairs,
                undo=undo_rotation if pairs else None,
            )
            for pairs in (*PAIRS, d)
        ),
        Defence(name, "compressed, 4 bits", compressed, {"noise": float(off.std())}),
    ]


def ironcore(setting: Setting) -> list[Defence]:
    """ironcore-alloy (Cloaked AI): noise, and a secret permutation of the numbers.

    The noise is uniform in a ball of radius factor / 4 (Fuchsbauer et al., 2021).
    Without a known text the permutation follows from statistics of all stored vectors
    (`reordered`).
    """
    module: Any = importlib.import_module("ironcore_alloy")
    d = setting.docs.shape[1]
    made = list[Defence]()
    for factor in (1.0, 2.0, 4.0):
        secret = module.StandaloneSecret(1, module.Secret(bytes(range(64))))
        vector = module.VectorSecret(factor, module.RotatableSecret(secret, None))
        standard = module.StandardSecrets(1, [secret])
        sdk = module.Standalone(
            module.StandaloneConfiguration(standard, {}, {"": vector})
        )
        keep = cache(partial(_encrypted, module, sdk))
        stated = {"noise": factor / 4 * (d + 2) ** -0.5}
        statistics_alone = partial(_by_statistics, setting, keep)
        made += [
            Adapted(
                "ironcore-alloy",
                f"factor {factor:g}, {pairs} known",
                keep,
                stated,
                ask=keep,
                pairs=pairs,
                undo=in_order if pairs else statistics_alone,
            )
            for pairs in PAIRS
        ]
    return made


def _by_statistics(
    setting: Setting, keep: Change, _known: Tensor, _stored: Tensor
) -> Alignment:
    return reordered(setting.known, keep(setting.docs))


def _encrypted(module: Any, sdk: Any, vectors: Tensor) -> Tensor:
    rows = {
        str(number): module.PlaintextVector(
            plaintext_vector=row, secret_path="", derivation_path=""
        )
        for number, row in enumerate(vectors.tolist())
    }

    async def encrypt() -> Any:
        return await sdk.vector().encrypt_batch(
            rows, module.AlloyMetadata.new_simple("tenant")
        )

    made = asyncio.run(encrypt()).successes
    return torch.tensor([made[number].encrypted_vector for number in rows]).to(vectors)


def in_order(known: Tensor, stored: Tensor) -> Alignment:
    """Find a secret permutation of d numbers from vectors known (m, d) and stored (m, d)."""
    order = assigned(torch.cdist(stored.T.double(), known.T.double()))
    eye = torch.eye(len(order), dtype=torch.float64)
    return Alignment(eye[:, order], eye)


def reordered(own: Tensor, stored: Tensor, rounds: int = 30) -> Alignment:
    """Find it from statistics of vectors (n, d) of the attacker's own texts and of the stored ones.

    Numbers are matched first by mean and standard deviation, then repeatedly by their
    covariances with all others in the order so far. Noise changes none of these but
    each number's variance.
    """
    own = own.double().cpu()
    stored = stored.double().cpu()
    found = in_order(
        *(torch.stack([each.mean(0), each.std(0)]) for each in (own, stored))
    )
    ours, theirs = (torch.cov(each.T).fill_diagonal_(0) for each in (own, stored))
    for _ in range(rounds):
        found = in_order(ours, (theirs @ found.stored).T)
    return found


# Texts close to the true one, and vectors of no text: none may be verified.

FORMS = ("float32", "float16", "int8", "int4", "binary")


def near_rows(setting: Setting, texts: int) -> Iterator[Row]:
    """Give texts close to the true one to the judge of its vector, in each stored form."""
    target = setting.target
    stream = random.Random(0)
    kinds: dict[str, list[int]] = {}
    written = same = 0
    for ids, vector in zip(
        setting.secrets[:texts], setting.vectors.cpu(), strict=False
    ):
        vectors = Vectors(target, WAY, ids)
        frame = (vectors.before, vectors.after)
        misses = near_misses(setting, vectors, vectors.inside(ids), stream)
        text = target.decode(vectors.inside(ids))
        for other in (text.upper(), text.title(), text.replace(" ", "  "), f" {text} "):
            again = setting.loaded.tokenizer(other)["input_ids"]
            written = written + 1
            same = same + (again == ids)
            if again != ids:
                misses.append(("case or spaces, other tokens", vectors.inside(again)))
        for form in FORMS:
            leak = Pooled(ROUNDINGS[form](vector))
            for kind, miss in misses:
                count = kinds.setdefault(kind, [0, 0, 0])
                made = [*frame[0], *miss, *frame[1]]
                fits = may_be(target, leak, made, vectors)
                wrong = fits and judge_vector(target, leak, made, vectors).verified
                for place, more in enumerate((1, fits, wrong)):
                    count[place] += more
    for kind, (tried, fit, wrong) in kinds.items():
        what = f"{setting.name}, near misses: {kind}"
        yield show.exactly(
            what,
            f"{wrong} of {tried} verified",
            f"0 of {tried} verified",
            f"{fit} fit the vector",
        )
    what = f"{setting.name}, texts that differ only in case or spaces"
    yield Row(what, f"{same} of {written} have the same tokens, and so the same vector")


def near_misses(
    setting: Setting, vectors: Vectors, text: Tokens, stream: random.Random
) -> list[tuple[str, Tokens]]:
    """Return the nearest texts one edit away, random replacements, and swapped neighbours."""
    own = vectors([text])[0]
    edits = alternatives_to(vectors, text, own, False)
    order = (edits.vectors @ own).argsort(descending=True)[:20].tolist()
    misses = [("one edit, the nearest", edits.texts[place]) for place in order]
    for _ in range(5):
        place = stream.randrange(len(text))
        token = stream.choice(setting.secrets[stream.randrange(len(setting.secrets))])
        misses.append(
            ("one token replaced", (*text[:place], token, *text[place + 1 :]))
        )
    for place in range(len(text) - 1):
        pair = (text[place + 1], text[place])
        misses.append(
            ("neighbours swapped", (*text[:place], *pair, *text[place + 2 :]))
        )
    return [(kind, miss) for kind, miss in misses if miss != text]


def nobody_rows(
    setting: Setting, another: Path | None, device: str, count: int, search: SumSearch
) -> Iterator[Row]:
    each = count // 4
    stream = torch.Generator().manual_seed(0)
    docs = setting.docs.cpu()
    d = setting.docs.shape[1]
    noise = torch.randn(each, d, generator=stream) * d**-0.5
    kinds = {
        "random directions": torch.randn(each, d, generator=stream),
        "means of two texts": docs[:each] + docs[each : 2 * each],
        "texts with noise of 2% that nobody stated": docs[:each] + 0.02 * noise,
    }
    if another is not None:
        other = load_model(another, device=device)
        lines = read_texts(SHIPPED)[:each]
        vectors = embedded(Target.of(other.model, other.tokenizer), lines).cpu()
        kinds["vectors of another encoder"] = torch.nn.functional.pad(
            vectors[:, :d], (0, max(0, d - vectors.shape[1]))
        )
    for kind, vectors in kinds.items():
        right = setting.texts[:each] if "noise" in kind else []
        yield nobody_row(setting, kind, vectors, search, right)


def nobody_row(
    setting: Setting,
    kind: str,
    vectors: Tensor,
    search: SumSearch,
    right: Sequence[str] = (),
) -> Row:
    """Read vectors of no text; `right` are texts so close to them that reading those is right."""
    vectors = normalize(vectors, dim=-1)
    target = setting.target
    reader = replace(setting.reader, search=search)
    leaks = [Pooled(vector) for vector in vectors]
    read = recover_texts(
        setting.loaded.model, setting.loaded.tokenizer, leaks, method=reader
    )
    truths = [setting.loaded.tokenizer(text)["input_ids"] for text in right] or [
        []
    ] * len(read)
    wrong = true = 0
    for made, vector, truth in zip(read, vectors, truths, strict=True):
        verdicts = [made.verified]
        run = Vectors(target, WAY, made.ids)
        for form in ("int8", "binary"):
            leak = Pooled(ROUNDINGS[form](vector))
            fits = may_be(target, leak, made.ids, run)
            verdicts.append(fits and judge_vector(target, leak, made.ids, run).verified)
        wrong += sum(verdicts) * (made.ids != truth)
        true += sum(verdicts) * (made.ids == truth)
    cosine = statistics.median(made.similarity or 0.0 for made in read)
    return show.exactly(
        f"{setting.name}, {len(vectors)} {kind}",
        f"{wrong} verified wrongly",
        "0 verified wrongly",
        f"as float32, 8 bits and signs; {true} verified with the text that the noise was added to; "
        f"cosine of what was found {cosine:.3f}, median",
    )


if __name__ == "__main__":
    show.main(run)
