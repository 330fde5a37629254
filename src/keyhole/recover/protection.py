"""Defences of stored vectors: what each costs retrieval, and what is still read (ours).

A store may change the vectors f (d numbers, length one) that it keeps. Two measurements on the same
vectors say what a change is worth:

    recall@10   the share of the ten texts nearest to a query by plain vectors that are among the
                ten nearest by stored vectors
    reads       the number of texts read by an attacker who has the store, the encoder and a corpus,
                and knows the defence except for its secret

    Gaussian noise    f + σ g; one release is (ε, δ)-private for σ = Δ·noise(ε), Δ = 2 the largest
                      distance (Balle and Wang, arXiv 1805.06530)
    metric privacy    f + z with density ∝ e^(−ε‖z‖): a random direction, and a length that is
                      Gamma(d, 1/ε); texts at distance D are ε·D-private (Feyisetan et al., 2020)
    projection        f P / ‖f P‖, P (d, k) of random numbers, known to everybody
    truncation        the first k numbers, normalised to length one
    rounding          8 or 4 bits and a scale for each vector, or signs
    product quant.    one of 256 centroids in each block (Jégou et al., 2011)
    secret rotation   f R; m known texts with their vectors give m numbers of f (secrets.py)

The attacker adapts. Noise is stated to the judge, and a stored form is judged in its own precision
(embeddings/judge.py). If k numbers f P of a vector are known, the attacker uses the encoder with
its last states multiplied by P (`mapped`): pooling by the mean commutes with a linear map.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from keyhole.models.anatomy import anatomy
from keyhole.models.capture import Exposure
from keyhole.models.hooks import hooks
from keyhole.models.loading import Loaded
from keyhole.recover.attack import Target
from keyhole.recover.embeddings.reader import CountedReader
from keyhole.recover.gradients.update import DELTA, epsilon_of, noise_for
from keyhole.recover.leaks import Pooled
from keyhole.recover.recovery import TextRecovery
from keyhole.recover.secrets import Alignment, random_rotation, undo_rotation
from keyhole.recover.simulate import ROUNDINGS
from keyhole.recover.texts import recover_texts

NEAREST = 10
_DISTANCE = 2.0  # the largest distance of two vectors of length one
_ROUNDS = 15  # of Lloyd's algorithm
_CODES = 256
_MIN_NUMBERS = 3  # of a vector that must be known for its direction to say anything

Change = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Defence:
    """A defence: `keep` maps vectors (b, d) to stored ones (b, k), `ask` does so for queries.

    `stated` is what the attacker knows of the stored form, as fields of `Pooled`. `map` (d, k) is a
    public linear map that `keep` applies. `undo` finds a secret from the plain and the stored
    vectors of `pairs` known texts.
    """

    name: str
    strength: str
    keep: Change
    ask: Change = lambda queries: queries
    stated: Mapping[str, Any] = field(default_factory=dict[str, Any])
    map: Tensor | None = None
    pairs: int = 0
    undo: Callable[[Tensor, Tensor], Alignment] | None = None


def no_defence() -> Defence:
    return Defence("none", "as it is", lambda vectors: vectors)


def gaussian_noise(share: float, d: int, seed: int = 0) -> Defence:
    """Noise whose length is `share` of a vector's; its ε is reported."""
    sigma = share * d**-0.5
    return _noisy_by(sigma, f"ε = {epsilon_of(sigma / _DISTANCE):.2g}, δ = {DELTA:g}", seed)


def private_noise(epsilon: float, seed: int = 0) -> Defence:
    """Noise that is (ε, 1e-5)-private."""
    return _noisy_by(_DISTANCE * noise_for(epsilon), f"ε = {epsilon:g}, δ = {DELTA:g}", seed)


def _noisy_by(sigma: float, strength: str, seed: int) -> Defence:
    stream = torch.Generator().manual_seed(seed)

    def keep(vectors: Tensor) -> Tensor:
        return vectors + sigma * torch.randn(vectors.shape, generator=stream).to(vectors)

    return Defence("Gaussian noise", strength, keep, stated={"noise": sigma})


def metric_noise(share: float, d: int, seed: int = 0) -> Defence:
    """Metric privacy with noise of average length `share` of a vector's: ε = d / share."""
    epsilon, stream = d / share, torch.Generator().manual_seed(seed)

    def keep(vectors: Tensor) -> Tensor:
        # The sum of d exponential numbers is Gamma(d, 1).
        drawn = torch.rand(*vectors.shape, generator=stream, dtype=torch.float64)
        lengths = -drawn.clamp(min=1e-300).log().sum(-1, keepdim=True) / epsilon
        along = normalize(torch.randn(vectors.shape, generator=stream), dim=-1)
        return vectors + (lengths * along).to(vectors)

    each = math.sqrt(d + 1) / epsilon  # E‖z‖² = d (d + 1) / ε²
    return Defence("metric privacy", f"ε = {epsilon:.2g}", keep, stated={"noise": each})


def projection(width: int, d: int, seed: int = 0) -> Defence:
    stream = torch.Generator().manual_seed(seed)
    drawn = torch.randn(d, width, generator=stream) * width**-0.5

    def keep(vectors: Tensor) -> Tensor:
        return normalize(vectors @ drawn.to(vectors), dim=-1)

    return Defence("random projection", f"{width} of {d} numbers", keep, keep, map=drawn)


def truncation(width: int, d: int) -> Defence:
    def keep(vectors: Tensor) -> Tensor:
        return normalize(vectors[:, :width], dim=-1)

    stated = {"width": width, "unit": True}
    return Defence("truncation", f"{width} of {d} numbers", keep, keep, stated)


def rounding(precision: str) -> Defence:
    words = {"int8": "8 bits", "int4": "4 bits", "binary": "signs"}
    return Defence("rounding", words[precision], ROUNDINGS[precision])


def product_quantisation(blocks: int, vectors: Tensor) -> Defence:
    """Product quantisation with centroids of these vectors (n, d), by Lloyd's algorithm."""
    points = vectors.unflatten(1, (blocks, -1)).transpose(0, 1)
    book = points[:, :_CODES].clone()
    for _ in range(_ROUNDS):
        nearest = torch.cdist(points, book).argmin(-1)
        sums = torch.zeros_like(book).scatter_add_(1, nearest[..., None].expand_as(points), points)
        counts = torch.zeros_like(book[..., 0])
        counts.scatter_add_(1, nearest, torch.ones_like(nearest, dtype=book.dtype))
        book = torch.where(counts[..., None] > 0, sums / counts.clamp(min=1)[..., None], book)

    def keep(given: Tensor) -> Tensor:
        parts = given.unflatten(1, (blocks, -1)).transpose(0, 1)
        codes = torch.cdist(parts, book.to(given)).argmin(-1)
        found = book.to(given).gather(1, codes[..., None].expand_as(parts))
        return found.transpose(0, 1).flatten(1)

    strength = f"{blocks} codes of {book.shape[1]}"
    return Defence("product quantisation", strength, keep, stated={"codebook": book.cpu()})


def rotation(pairs: int, d: int, seed: int = 0) -> Defence:
    secret = random_rotation(d, torch.Generator().manual_seed(seed))

    def keep(vectors: Tensor) -> Tensor:
        return (vectors.double() @ secret.to(vectors.device)).to(vectors)

    known = f"{pairs} known text{'s' * (pairs != 1)}"
    undo = undo_rotation if pairs else None
    return Defence("secret rotation", known, keep, keep, pairs=pairs, undo=undo)


def recall(docs: Tensor, kept: Tensor, queries: Tensor, asked: Tensor) -> float:
    """Return the share of the texts nearest by plain vectors that are nearest by stored ones too.

    `docs` are the plain vectors of texts and `queries` those of queries; `kept` and `asked` are
    what the defence makes of them.
    """
    near = [
        (normalize(left, dim=-1) @ normalize(right, dim=-1).T).topk(min(NEAREST, len(docs))).indices
        for left, right in ((queries, docs), (asked, kept))
    ]
    return float((near[0][:, :, None] == near[1][:, None]).any(-1).float().mean())


def retrieval(defence: Defence, docs: Tensor, queries: Tensor) -> float:
    """Return the recall that a defence leaves, of texts (n, d) to queries (q, d)."""
    return recall(docs, defence.keep(docs), queries, defence.ask(queries))


def reading(
    loaded: Loaded, defences: Sequence[Defence], vectors: Tensor, reader: CountedReader,
    known: Tensor, way: Exposure,
) -> Iterator[tuple[Defence, list[TextRecovery]]]:  # fmt: skip
    """Yield each defence with what is read of vectors (b, d) that it protects.

    The attacker knows the plain vectors `known` (m, d) of some texts; `way` is how the encoder
    pools. Defences that keep all numbers are attacked in one batch, and come first.
    """
    made: list[tuple[Defence, list[Pooled], Tensor | None]] = []
    for defence in defences:
        stored, map_ = _known_numbers(defence, vectors, known)
        stated = {"width": map_.shape[1], "unit": True} if map_ is not None else defence.stated
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
                # What was counted of the corpus is about whole vectors: it is counted anew.
                recoveries = _read(loaded, leaks, replace(reader, counted=None))
            yield defence, recoveries


def _known_numbers(
    defence: Defence, vectors: Tensor, known: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Return the numbers that the attacker knows, and the map (d, k) that plain vectors took."""
    stored = defence.keep(vectors)
    if defence.undo is None:
        return stored, defence.map
    pairs = known[: defence.pairs]
    found = defence.undo(pairs.cpu(), defence.keep(pairs).cpu())
    rank, stored = found.own.shape[1], stored.cpu()
    if _MIN_NUMBERS <= rank < vectors.shape[1]:
        return normalize(found.numbers(stored), dim=-1), found.own
    return found.undo(stored), None


def _read(loaded: Loaded, leaks: Sequence[Pooled], reader: CountedReader) -> list[TextRecovery]:
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
