"""Statistics of a corpus, counted rather than learnt: seconds on a GPU, a minute or two on a CPU.

The encoder is run once over the lines of the corpus. This gives the log-odds of each
token for a vector (`TokenOdds`), n-grams (`NGrams`), and the lines themselves, the
nearest of which a search begins with (sum_search.py). On a GPU the encoder is also run
on the lines with some tokens replaced at random, so that the odds have seen every token
of the vocabulary in some text. For last states every token is also run at the end of a
text (`Endings`), and a search begins with these texts too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from keyhole.core.errors import InputError
from keyhole.core.numerics import with_ridge
from keyhole.core.tensors import append_ones, normalized, row_numbers, seeded
from keyhole.data import read_texts
from keyhole.recover.attack import Target
from keyhole.recover.embeddings.encoder import Encoder, Texts

SHIPPED = Path(__file__).with_name("corpus.txt")  # English sentences
_LINES = {"cuda": 200_000, "cpu": 50_000}  # lines that the encoder is run on
_ALTERED = {"cuda": 4, "cpu": 0}  # times that it is run on them with tokens replaced
_ALONE = {"cuda": math.inf, "cpu": 4_000}  # tokens that it is run on by themselves
_SMALL = 1.2e7  # parameters of a small encoder, the embedding table left out
_SIMPLE = 0.1  # ridge of the regression on rows of the embedding table
_REPLACED = 0.3  # largest share of a line's tokens that is replaced
_ENOUGH = 64  # lines from which on vectors are whitened by how they vary


class Counted(NamedTuple):
    """Token odds, n-grams, and lines with their vectors (lines, d) as the encoder compares them."""

    encoder: Encoder
    token_odds: TokenOdds
    ngrams: NGrams
    lines: Texts
    vectors: Tensor
    special: Tensor  # tokens that no text has
    endings: Endings | None = None  # for last states only

    @classmethod
    def of(
        cls,
        encoder: Encoder,
        lines: Sequence[Sequence[int]],
        max_length: int,
        seed: int = 0,
    ) -> Counted:
        """Count a corpus of token lists, for texts of up to `max_length` tokens.

        From then on, the encoder compares vectors whitened by their covariance over the
        corpus.
        """
        device = encoder.device
        pieces = {
            tuple(line[start : start + max_length])
            for line in lines
            for start in range(0, len(line), max_length)
        }
        order = torch.randperm(len(pieces), generator=seeded(seed)).tolist()
        pieces = sorted(pieces)
        chosen = [pieces[number] for number in order[: _LINES[device.type]]]
        texts = Texts.of(chosen, max_length, device)
        if len(texts) >= _ENOUGH:
            vectors = encoder.whiten(texts)
        else:
            vectors = encoder.vectors(texts, fast=True)
        frame = {*encoder.before, *encoder.after, encoder.pad}
        special = torch.tensor(sorted(frame), device=device)
        seen = _altered(encoder, texts, vectors, special, seed)
        endings = None
        if encoder.exposure.pooling == "last":
            endings = Endings.of(encoder, texts, seed)
        own = endings.of_tokens if endings else alone(encoder)
        size = len(encoder.table)
        kinds = token_kinds(encoder.target.tokenizer, size).to(device)
        return cls(
            encoder,
            TokenOdds.of(*seen, own),
            NGrams.of(lines, size, kinds),
            texts,
            vectors,
            special,
            endings,
        )

    def nearest(
        self,
        goals: Tensor,
        count: int,
        max_length: int,
    ) -> tuple[Texts, Tensor]:
        """Return the `count` lines nearest to each vector (v, d), and the number of its vector.

        For last states, add as many endings. No text has more than `max_length` tokens.
        """
        cosines = (goals @ self.vectors.T).where(self.lines.lengths <= max_length, -2.0)
        best = cosines.topk(min(count, len(self.lines)), dim=1)
        vector, place = (best.values > -2).nonzero().unbind(1)
        lines = self.lines[best.indices[vector, place]].padded(max_length)
        if self.endings is None:
            return lines, vector
        ends, owner = self.endings.nearest(goals, self.special, count, max_length)
        return Texts.cat([lines, ends]), torch.cat([vector, owner])


def _altered(
    encoder: Encoder,
    texts: Texts,
    vectors: Tensor,
    special: Tensor,
    seed: int,
) -> tuple[Texts, Tensor]:
    """Return texts with their vectors, and the same texts with tokens replaced at random."""
    device = encoder.device
    generator = seeded(seed, device)
    tokens = row_numbers(encoder.table)
    words = tokens[~torch.isin(tokens, special)]
    parts = [texts]
    runs = [vectors]
    times = _ALTERED[device.type]
    # that a large encoder has time for
    lines = _LINES[device.type] * _smallness(encoder.target)
    shape = texts.ids.shape
    for _ in range(min(times, math.ceil(times * lines / len(texts)))):
        share = torch.rand(len(texts), 1, generator=generator, device=device)
        chance = torch.rand(shape, generator=generator, device=device)
        drawn = torch.randint(len(words), shape, generator=generator, device=device)
        kept = (chance >= _REPLACED * share) | ~texts.mask
        parts.append(Texts(texts.ids.where(kept, words[drawn]), texts.lengths))
        runs.append(encoder.vectors(parts[-1], fast=True))
    return Texts.cat(parts), torch.cat(runs)


# Which tokens are in the text behind a vector, at whatever place? (ours)
#
# Linear discriminant analysis, one token against the rest. The vectors of texts with
# token t are modelled as Gaussian around μ + δ_t, all with one covariance C, so the
# log-odds that t is in the text behind the vector e are linear in e:
#
#     log odds_t(e) = δ_tᵀC⁻¹(e − μ) − δ_tᵀC⁻¹δ_t / 2 + log(share of the texts with t)
#
# δ_t is a mean over the texts of a corpus with t. Most tokens are in few texts or in
# none, so it is shrunk towards a prediction from the token alone: B·(vector of the text
# "t"; for last states, of texts that end in t), where the linear map B is fitted to the
# frequent tokens. Everything follows from one run of the encoder over corpus and
# vocabulary. Because the odds are linear, they also apply to differences: `missing`
# finds in e − e′ the tokens that a text with vector e′ lacks.

_DRAWN = 8.0  # texts that the prediction from the token alone is worth
_SEEN = 0.1  # added to the number of texts with a token
_AT_ONCE = 1 << 20  # tokens whose texts' vectors are added up in one step
_RIDGE = 0.05  # of the mean variance, added to C


class TokenOdds(NamedTuple):
    """The log-odds of every token: vectors (b, d) @ `weights` (d, V) + `offset` (V,)."""

    weights: Tensor
    offset: Tensor

    def odds(self, vectors: Tensor) -> Tensor:
        return vectors @ self.weights + self.offset

    def missing(self, differences: Tensor) -> Tensor:
        return differences @ self.weights

    @classmethod
    def of(
        cls,
        texts: Texts,
        vectors: Tensor,
        own: Tensor,
    ) -> TokenOdds:
        """Fit the odds to texts and their vectors, and to the vector `own` (V, d) of each token."""
        # Every distinct token of every text.
        size = len(own)
        owners = row_numbers(texts.ids)[:, None].expand_as(texts.ids)
        keys = (owners * size + texts.ids)[texts.mask].unique()
        tokens = keys % size
        held = torch.bincount(tokens, minlength=size).double()
        vectors = vectors.double()
        middle = vectors.mean(0)
        centred = vectors - middle
        sums = centred.new_zeros(size, centred.shape[1])
        for some in keys.split(_AT_ONCE):
            sums.index_add_(0, some % size, centred[some // size])
        means = sums / held.clamp(min=1)[:, None]
        # Predicted from the tokens' own vectors, by a regression on frequent tokens.
        inputs = append_ones(own.double())
        trusted = inputs * (held / (held + _DRAWN))[:, None]
        square = trusted.T @ inputs
        square.diagonal().add_(1.0)
        expected = inputs @ torch.linalg.solve(square, trusted.T @ means)
        offsets = (sums + _DRAWN * expected) / (held + _DRAWN)[:, None]
        covariance = with_ridge(centred.T @ centred / len(centred), _RIDGE)
        weights = torch.linalg.solve(covariance, offsets.T)
        share = ((held + _SEEN) / len(texts)).log()
        offset = share - (offsets.T * weights).sum(0) / 2 - middle @ weights
        return cls(weights.float(), offset.float())


def alone(encoder: Encoder) -> Tensor:
    """Return the vector (V, d) of each token as a text of its own.

    On a CPU only a few thousand words are run, the first of the vocabulary, which are
    the frequent ones. A ridge regression on the rows of the embedding table predicts
    the vectors of the others. For tokens of the corpus, the right ones then rank as
    high as with all of them run (median 9 of 30,522 in 60 sentences, 14 with all), for
    others lower (8, and 4 with all), in a seventh of the time.
    """
    tokens = row_numbers(encoder.table)
    most = _ALONE[encoder.device.type] * effort(encoder.target)
    if len(tokens) > most:
        names = encoder.target.tokenizer.convert_ids_to_tokens(tokens.tolist())
        words = [k for k, name in enumerate(names) if _bare(name).isalpha()]
        tokens = tokens[words[: round(most)]]
    own = encoder.vectors(Texts.filled(tokens[:, None]), fast=True)
    if len(own) == len(encoder.table):
        return own
    rows = append_ones(normalized(encoder.table.double()))
    square = rows[tokens].T @ rows[tokens]
    square.diagonal().add_(_SIMPLE)
    products = rows[tokens].T @ own.double()
    predicted = (rows @ torch.linalg.solve(square, products)).to(own)
    predicted[tokens] = own
    return predicted


def _bare(name: str | None) -> str:
    """Return a token's name without the signs that say where it may stand."""
    return (name or "").strip("#▁Ġ")


def effort(target: Target) -> float:
    """Return the share of a small encoder's runs to spend: on a CPU, less for a large one."""
    return _smallness(target) if target.parts.device.type == "cpu" else 1.0


def _smallness(target: Target) -> float:
    """Return 1 for a small encoder, and less for a large one."""
    numbers = sum(each.numel() for each in target.model.parameters())
    return min(1.0, _SMALL / max(1, numbers - target.parts.table.numel()))


# Which token follows which in a corpus: interpolated bigrams (Kneser and Ney, 1995).
#
#     p(b | a) = max(c(ab) − D, 0) / c(a) + D·(tokens seen after a) / c(a) · q(b)
#
# c counts pairs of neighbours, and q(b) is the share of the distinct pairs that end in
# b: a word that follows many others is likely after a new one. A mark of its own, V,
# stands before the first token and after the last. Without any lines, all tokens are
# equally likely everywhere.
#
# Names, numbers and passwords are made of tokens that are neighbours in no corpus. But
# a corpus shows which kind of token follows which: a word's beginning or a later piece;
# letters, digits or signs. So q depends on both kinds: q(b | a) = q(b)·p(kind of b |
# kind of a) / p(kind of b).

_DISCOUNT = 0.75
_NGRAMS_SEEN = 0.05  # added to the number of distinct pairs that end in a token
_KINDS = 7  # three of beginnings, three of later pieces, and the mark
_KIND_SEEN = 1.0  # added to the number of pairs of two kinds


class NGrams(NamedTuple):
    """The pairs that were seen, as sorted keys a·(V + 1) + b, and the terms of p(b | a)."""

    keys: Tensor  # (pairs,)
    seen: Tensor  # (pairs,) max(c(ab) − D, 0) / c(a)
    left: Tensor  # (V + 1,) D·(tokens seen after a) / c(a)
    ends: Tensor  # (V + 1,) q(b)
    kinds: Tensor  # (V + 1,)
    ratios: Tensor  # (kinds, kinds) p(kind of b | kind of a) / p(kind of b)

    @property
    def mark(self) -> int:
        """The token before the first of a text and after the last."""
        return len(self.ends) - 1

    @classmethod
    def of(
        cls,
        lines: Iterable[Sequence[int]],
        vocabulary: int,
        kinds: Tensor | None = None,
    ) -> NGrams:
        """Count token lists; `kinds` (V,) are the kinds of tokens, by default all the same."""
        size = vocabulary + 1
        if kinds is None:
            kinds = torch.zeros(size, dtype=torch.long)
        else:
            kinds = torch.nn.functional.pad(kinds, (0, 1), value=_KINDS - 1)
        marked = chain.from_iterable((*line, vocabulary) for line in lines)
        row = kinds.new_tensor([vocabulary, *marked])
        keys, counts = (row[:-1] * size + row[1:]).unique(return_counts=True)
        first = keys // size
        second = keys % size
        totals = torch.bincount(first, counts.double(), size)
        followers = torch.bincount(first, minlength=size)
        left = (_DISCOUNT * followers / totals).where(totals > 0, 1.0)
        seen = (counts - _DISCOUNT) / totals[first]
        ends = torch.bincount(second, minlength=size) + _NGRAMS_SEEN
        ends = (ends / ends.sum()).float()
        # How often a token of each kind follows one of each kind, and stands at all.
        pairs = torch.bincount(
            kinds[first] * _KINDS + kinds[second], minlength=_KINDS**2
        )
        share = torch.bincount(kinds, ends, _KINDS)
        there = share > 0
        after = (pairs.view(_KINDS, _KINDS) + _KIND_SEEN) * there
        ratios = (after / after.sum(1, keepdim=True) / share).where(there, 0.0)
        return cls(keys, seen.float(), left.float(), ends, kinds, ratios)

    def pairs(self, first: Tensor, second: Tensor) -> Tensor:
        """Return log p(b | a), for tokens or marks a and b in two tensors of one shape."""
        ratios = self.ratios[self.kinds[first], self.kinds[second]]
        p = self.left[first] * self.ends[second] * ratios
        if len(self.keys):
            wanted = first * len(self.ends) + second
            place = torch.searchsorted(self.keys, wanted).clamp(max=len(self.keys) - 1)
            p = p + self.seen[place].where(self.keys[place] == wanted, 0.0)
        return p.log()

    def framed(self, texts: Texts) -> Tensor:
        """Return the tokens (b, n + 2) with a mark before them, and marks after them."""
        ids = texts.ids.where(texts.mask, self.mark)
        ends = ids.new_full((len(ids), 1), self.mark)
        return torch.cat([ends, ids, ends], 1)

    def log_p(self, texts: Texts, own: Tensor | None = None) -> Tensor:
        """Return log p (b,) of whole texts with their ends.

        `own` (b, n) is a language model's log p of each token. Where it is a number, p
        is the mean of the n-grams' and the model's.
        """
        row = self.framed(texts)
        terms = self.pairs(row[:, :-1], row[:, 1:])
        if own is not None:
            terms[:, :-1] = mixed(terms[:, :-1], own)
        inside = Texts(terms, texts.lengths + 1).mask
        return terms.where(inside, 0.0).sum(-1)


def token_kinds(tokenizer: Any, size: int) -> Tensor:
    """Return each token's kind (V,): does it begin a word, and is it letters, digits or signs?"""
    names = [name or "" for name in tokenizer.convert_ids_to_tokens(range(size))]
    # a word's beginning is marked
    spaced = any(name.startswith(("▁", "Ġ")) for name in names)
    kinds: list[int] = []
    for name in names:
        later = not name.startswith(("▁", "Ġ")) if spaced else name.startswith("##")
        kind = 3 * later
        if not _bare(name).isalpha():
            kind += 1 if _bare(name).isdigit() else 2
        kinds.append(kind)
    return torch.tensor(kinds)


def mixed(counted: Tensor, own: Tensor) -> Tensor:
    """Return log(½p + ½q) of two log-probabilities, and the first one where the second is NaN."""
    both = torch.logaddexp(counted, own.to(counted)) - math.log(2)
    return counted.where(own.isnan(), both)


# Every token of the vocabulary at the end of a short text: where a search by last
# states starts.
#
# The last state of a causal model depends most on the last token, and in nearly the
# same way whatever came before. So when each token is run once at the end of some
# beginning, the right one gives the nearest state. A token alone finds only prompts of
# one token, because models give the first token of a text a state of a special kind.

Before = tuple[
    tuple[int, int], ...
]  # for each run, the least and the most tokens before the last
_BEFORE: dict[str, Before] = {"cuda": ((0, 0), (1, 3), (4, 8)), "cpu": ((0, 0),)}


class Endings(NamedTuple):
    """k runs over V tokens: their `texts` (k·V), run after run, and `vectors` (k, V, d)."""

    texts: Texts
    vectors: Tensor

    @classmethod
    def of(
        cls,
        encoder: Encoder,
        lines: Texts,
        seed: int = 0,
        before: Before | None = None,
    ) -> Endings:
        """Run every token after random beginnings of lines, of lengths in `before` for each run."""
        device = encoder.device
        tokens = row_numbers(encoder.table)
        size = tokens.shape
        width = lines.ids.shape[1]
        generator = seeded(seed, device)
        parts: list[Texts] = []
        for least, most in before or _BEFORE[device.type]:
            rows = torch.randint(len(lines), size, generator=generator, device=device)
            count = torch.randint(
                least, most + 1, size, generator=generator, device=device
            )
            count = torch.minimum(count, lines.lengths[rows]).clamp(max=width - 1)
            ids = lines.ids[rows].scatter(1, count[:, None], tokens[:, None])
            parts.append(Texts(ids, count + 1).clean())
        texts = Texts.cat(parts)
        if len(parts) == 1 and texts.lengths.max() == 1:
            return cls(texts, alone(encoder)[None])
        vectors = encoder.vectors(texts, fast=True)
        return cls(texts, vectors.unflatten(0, (len(parts), -1)))

    @property
    def of_tokens(self) -> Tensor:
        """The mean vector (V, d) of each token's texts, if possible without the token alone."""
        first = 1 if len(self.vectors) > 1 else 0
        return self.vectors[first:].mean(0)

    def nearest(
        self,
        goals: Tensor,
        barred: Tensor,
        count: int,
        max_length: int,
    ) -> tuple[Texts, Tensor]:
        """Return texts that end in the nearest tokens to each vector (v, d), and its number."""
        best = torch.stack([goals @ run.T for run in self.vectors]).max(0)
        cosines = best.values.index_fill(1, barred, -2.0)
        tokens = cosines.topk(min(count, cosines.shape[1]), dim=1).indices
        places = best.indices.gather(1, tokens) * cosines.shape[1] + tokens
        texts = self.texts[places.flatten()]
        vector = row_numbers(goals).repeat_interleave(places.shape[1])
        fits = texts.lengths <= max_length
        return texts[fits].padded(max_length), vector[fits]


def corpus_texts(corpus: str | Path | Sequence[str]) -> list[str]:
    """Return the texts of a corpus that are not empty; it is a file, or the texts themselves."""
    texts = read_texts(corpus) if isinstance(corpus, str | Path) else corpus
    texts = [text.strip() for text in texts if text.strip()]
    if not texts:
        raise InputError(f"the corpus holds no text: {corpus}")
    return texts
