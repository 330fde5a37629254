"""Which pooling of an encoder made these embeddings?

With a text whose vector is known, the encoder is run on it and pooled in every way: the
way that gives the same numbers is the right one, and if none does, it is another
encoder. Without such a text the pooling is a guess, which a text that is verified later
confirms. Vectors of length 1 were normalised. If sentence-transformers wrote the
encoder's folder, the folder names the pooling. If not, it is the one whose mean over
some texts has the direction of the vectors' mean: sentence embeddings lie in a narrow
cone (Ethayarajh, 2019), which depends on the pooling more than on the texts.

Some encoders expect a prefix that says what a text is for (`PREFIXES`), and programs
add it before the text is embedded. The vector is then of prefix and text. Known texts
show the prefix too; without any, it is guessed from the mean of the vectors, for
encoders that are known to expect one.

Vectors of fewer numbers than the encoder gives may be the first `width` of them,
normalised again or not: some encoders are trained for that (Kusupati et al., 2022).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from keyhole.core.errors import InputError
from keyhole.core.files import exists, parse, read_text
from keyhole.core.tensors import row_numbers, seeded
from keyhole.models.anatomy import anatomy
from keyhole.models.capture import POOLINGS, Exposure
from keyhole.recover.embeddings.judge import two_valued
from keyhole.recover.simulate import MAX_LENGTH, leak_of

# of a vector's length: above the error of 8 bits, below that of another pooling
AGREES = 0.02
# The same for weights of a few bits: llama.cpp's arithmetic on SmolLM2 in Q4_1 differs
# by 0.02 to 0.04 from that of the same weights in float32, and another pooling by 0.5
# or more.
AGREES_QUANTISED = 0.1
_SURELY = 1e-4  # of a vector's length: float32 on both sides
_SURE = "--known with texts of the store makes sure"
_SETTINGS = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_lasttoken": "last",
}
_OF_NOMIC = ("search_document: ", "search_query: ", "clustering: ", "classification: ")
PREFIXES = (
    *_OF_NOMIC,
    "passage: ",
    "query: ",  # E5
    "Represent this sentence for searching relevant passages: ",  # BGE
)
# of 1 − cosine of the means without a prefix: wrong prefixes stay above it
_NEARER = 0.75
_WITNESSES = 8  # vectors that show whether only signs were stored
_UNIT = 0.01  # by which rounding may change the length of a vector of length 1


@dataclass(frozen=True)
class Pooling:
    """How embeddings were made: the `exposure` of the encoder that gives them.

    `error` is how far its vectors are off on known texts, and None for a guess; up to
    `agrees`, it is rounding.
    """

    exposure: Exposure
    error: float | None
    reason: str
    agrees: float = AGREES
    prefix: str = ""  # stands before every text

    @property
    def sure(self) -> bool:
        return self.error is not None and self.error <= self.agrees

    def __str__(self) -> str:
        return _words(self.exposure, self.prefix)


def ways(model: Any, width: int | None = None) -> list[Exposure]:
    """Return every way to pool this model's states into one vector, or its first numbers."""
    whole = [
        Exposure("pooled", 0, name, normalised, width)
        for name in POOLINGS
        if name != "pooler"
        for normalised in (True, False)
    ]
    if getattr(anatomy(model).base, "pooler", None) is not None:
        whole.append(Exposure("pooled", 0, "pooler", False, width))
    if width is None:
        return whole
    # Normalising at the end gives the same whether or not it was done before.
    again = [way for way in whole if way.normalised or way.pooling == "pooler"]
    return [*(replace(way, unit=True) for way in again), *whole]


def encoder_max_length(folder: str | Path) -> int:
    """Return the number of tokens after which sentence-transformers cuts an encoder's texts off.

    It may be less than the model takes: all-MiniLM-L6-v2 has 512 positions and reads
    256 tokens.
    """
    path = Path(folder) / "sentence_bert_config.json"
    settings = _settings(path, "the settings of an encoder")
    max_length = settings.get("max_seq_length", MAX_LENGTH)
    if max_length is None:
        return MAX_LENGTH
    if type(max_length) is not int or max_length < 1:
        reason = f"max_seq_length must be a number in {path}, not {max_length!r:.40}"
        raise InputError(reason)
    return min(max_length, MAX_LENGTH)


def embeddings(
    model: Any,
    tokenizer: Any,
    texts: Sequence[str],
    way: Exposure,
    max_length: int = MAX_LENGTH,
) -> Tensor:
    """Return the vectors (texts, d) of texts, cut off at `max_length` tokens, in float64."""
    rows = [
        leak_of(model, tokenizer, text, way, max_length=max_length).tensors["values"]
        for text in texts
    ]
    return torch.stack(rows).double()


_Made = tuple[Exposure, str]  # a way of pooling, and a prefix


def from_texts(
    model: Any,
    tokenizer: Any,
    texts: Sequence[str],
    vectors: Tensor,
    max_length: int = MAX_LENGTH,
    agrees: float = AGREES,
    width: int | None = None,
    prefixes: Sequence[str] = ("",),
) -> Pooling:
    """Return the pooling and prefix that turn each text into its vector, or come nearest."""
    given = vectors.double()
    errors: dict[_Made, float] = {}
    for prefix, way in product(prefixes, ways(model, width)):
        begun = [prefix + text for text in texts]
        made = _as_kept(embeddings(model, tokenizer, begun, way, max_length), given)
        apart = (made - given).norm(dim=1) / made.norm(dim=1)
        errors[way, prefix] = float(apart.median())
        if errors[way, prefix] <= _SURELY:
            break  # no other way does that
    return _nearest(errors, "the store's own texts", agrees)


def _as_kept(made: Tensor, given: Tensor) -> Tensor:
    """Return the signs of vectors if the given ones are signs, else the vectors."""
    if not all(two_valued(row) for row in given[:_WITNESSES]):
        return made
    return torch.where(made > 0, given.max().double(), given.min().double())


def from_known(
    model: Any,
    tokenizer: Any,
    texts: Sequence[str],
    batches: Iterable[tuple[range, Tensor]],
    max_length: int = MAX_LENGTH,
    agrees: float = AGREES,
    width: int | None = None,
    prefixes: Sequence[str] = ("",),
) -> Pooling:
    """Do the same for texts that are among the vectors, in unknown places."""
    made: dict[_Made, Tensor] = {}
    for prefix, way in product(prefixes, ways(model, width)):
        begun = [prefix + text for text in texts]
        made[way, prefix] = embeddings(model, tokenizer, begun, way, max_length)
    unknown = torch.full((len(texts),), torch.inf, dtype=torch.float64)
    least = dict.fromkeys(made, unknown)
    for _, vectors in batches:
        for way, each in made.items():
            wanted = _as_kept(each, vectors)
            apart = torch.cdist(wanted, vectors.double()).amin(1) / wanted.norm(dim=1)
            least[way] = torch.minimum(least[way], apart)
    errors = {way: float(each.median()) for way, each in least.items()}
    return _nearest(errors, "the known texts", agrees)


def from_settings(
    folder: str | Path,
    vectors: Tensor,
    width: int | None = None,
) -> Pooling | None:
    """Return the pooling that sentence-transformers wrote next to an encoder, or None."""
    path = Path(folder) / "1_Pooling" / "config.json"
    chosen = _settings(path, "the settings of a pooling")
    names = [name for key, name in _SETTINGS.items() if chosen.get(key) is True]
    named = chosen.get("pooling_mode")
    names = names or [name for name in POOLINGS if named in (name, f"{name}token")]
    if len(names) != 1:
        return None  # no file, several ways side by side, or an unknown one
    normalised, unit = _normalised(vectors, width)
    way = Exposure("pooled", 0, names[0], normalised, width, unit)
    reason = f"{_words(way)}: as {path.parent.name} of the encoder says; {_SURE}"
    return Pooling(way, None, reason)


def _settings(path: Path, what: str) -> dict[str, Any]:
    if not exists(path):
        return {}
    try:
        settings: object = parse(read_text(path, what))
    except ValueError as error:
        raise InputError(f"{path} does not hold {what}: {error}") from error
    return cast("dict[str, Any]", settings) if isinstance(settings, dict) else {}


def from_statistics(
    model: Any,
    tokenizer: Any,
    texts: Sequence[str],
    vectors: Tensor,
    width: int | None = None,
) -> Pooling:
    """Guess the pooling from vectors of unknown texts, and any texts of the same language."""
    normalised, unit = _normalised(vectors, width)
    cosines = {
        way: _cosine_of_means(embeddings(model, tokenizer, texts, way), vectors)
        for way in ways(model, width)
        if way.unit == unit
        and (way.normalised == normalised or way.pooling == "pooler")
    }
    order = sorted(cosines, key=lambda way: -cosines[way])
    ranking = ", ".join(f"{way.pooling} {cosines[way]:.2f}" for way in order)
    length = "other lengths than 1"
    if unit or (normalised and width is None):
        length = "length 1"
    reason = (
        f"guessed {_words(order[0])}: the vectors have {length}, and their "
        f"mean's cosine with the encoder's own is {ranking}; {_SURE}"
    )
    return Pooling(order[0], None, reason)


def _cosine_of_means(own: Tensor, vectors: Tensor) -> float:
    means = (each.double().mean(0) for each in (own, vectors))
    return float(torch.cosine_similarity(*means, dim=0))


def _normalised(vectors: Tensor, width: int | None) -> tuple[bool, bool]:
    """Return whether vectors were normalised, and whether their first numbers were again.

    It follows from their lengths: the first numbers of a vector of length 1 are
    shorter. Zeros stand for texts that were not embedded.
    """
    lengths = vectors.double().norm(dim=1)
    lengths = lengths[lengths > 0]
    unit = bool(((lengths - 1).abs() < _UNIT).all())
    if width is None:
        return unit, False
    return unit or bool((lengths < 1).all()), unit


def likely_prefix(
    model: Any,
    tokenizer: Any,
    texts: Sequence[str],
    vectors: Tensor,
    way: Exposure,
) -> str:
    """Guess the prefix of these vectors' texts, by their mean and the mean of any texts.

    Only encoders that expect a prefix are considered: Nomic's, and those whose folder
    names some.
    """
    wanted = _OF_NOMIC if "nomic" in str(model.config.model_type) else _prompts(model)
    if not wanted:
        return ""
    apart: dict[str, float] = {}
    for prefix in ("", *wanted):
        begun = [prefix + text for text in texts]
        own = embeddings(model, tokenizer, begun, way)
        apart[prefix] = 1 - _cosine_of_means(own, vectors)
    best = min(apart, key=apart.__getitem__)
    return best if apart[best] < _NEARER * apart[""] else ""


def _prompts(model: Any) -> list[str]:
    """Return the prefixes that sentence-transformers wrote next to an encoder."""
    path = Path(str(model.name_or_path)) / "config_sentence_transformers.json"
    prompts = _settings(path, "the settings of an encoder").get("prompts")
    if isinstance(prompts, dict):
        return [text for text in prompts.values() if text]
    return []


def _nearest(
    errors: Mapping[_Made, float],
    witness: str,
    agrees: float,
) -> Pooling:
    best, prefix = min(errors, key=errors.__getitem__)
    error = errors[best, prefix]
    words = _words(best, prefix)
    reason = (
        f"{words}: gives the vectors of {witness} within {error:.1e} of their length"
    )
    if error > agrees:
        reason = (
            f"no pooling of this encoder gives the vectors of {witness} (the nearest, {words}, is "
            f"{error:.1e} of their length off)"
        )
    return Pooling(best, error, reason, agrees, prefix)


def _words(way: Exposure, prefix: str = "") -> str:
    words = f"{way.pooling} pooling, {'' if way.normalised else 'not '}normalised"
    if way.pooling == "pooler":
        words = "the pooler's output"
    if way.width is not None:
        words += f", truncated to the first {way.width} numbers"
        words += ", normalised again" if way.unit else ""
    if prefix:
        words += f', of texts that begin with "{prefix.strip()}"'
    return words


# Are two sets of vectors, of other texts, made of the same numbers of one encoder?
# (Mantel, 1967)
#
# Which numbers of a vector are correlated depends on the encoder's weights more than on
# the texts. So the correlations r_ij of its numbers i and j over some texts correlate
# with those over other texts. Those of another encoder do not, nor do its own with the
# numbers in another order. The correlation of correlations must be larger than for all
# of many random orders.

_ORDERS = 1_999  # random orders: by chance alone, none is larger once in 2,000 times
_NUMBERS = 128  # numbers that are compared: enough, and quick


def same_numbers(
    own: Tensor,
    given: Tensor,
    seed: int = 0,
) -> bool:
    """Return whether the numbers of two sets of vectors (a, k), (b, k) correspond one by one."""
    if min(len(own), len(given)) < 3:
        return False  # two vectors have only correlations of 1 and -1
    # A number that never varies has the correlation NaN.
    ours, theirs = (
        torch.corrcoef(each[:, :_NUMBERS].double().T).nan_to_num(0.0)
        for each in (own, given)
    )
    count = len(ours)
    first, second = torch.triu_indices(count, count, 1)
    theirs = theirs[first, second] - theirs[first, second].mean()

    def agreement(order: Tensor) -> float:
        pairs = ours[order[first], order[second]]
        return float((pairs - pairs.mean()) @ theirs)

    actual = agreement(row_numbers(ours))
    stream = seeded(seed)
    orders = (torch.randperm(count, generator=stream) for _ in range(_ORDERS))
    return all(agreement(order) < actual for order in orders)
