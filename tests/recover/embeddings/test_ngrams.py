"""N-grams against the formula, counted with dictionaries."""

from __future__ import annotations

import math
from collections import Counter, defaultdict

import pytest
import torch

from keyhole.recover.embeddings.counts import NGrams, token_kinds
from keyhole.recover.embeddings.encoder import Texts

SIZE = 6
LINES = [[0, 1, 2], [0, 1], [3, 1, 2, 2], [0, 4]]


def naive(a, b):
    pairs = Counter(
        pair
        for line in LINES
        for pair in zip([SIZE, *line], [*line, SIZE], strict=True)
    )
    total = sum(count for (first, _), count in pairs.items() if first == a)
    kinds = sum(first == a for first, _ in pairs)
    ends: dict[int, float] = defaultdict(lambda: 0.05)
    for _, second in pairs:
        ends[second] += 1
    q = ends[b] / (len(pairs) + 0.05 * (SIZE + 1))
    if not total:
        return math.log(q)
    return math.log(max(pairs[a, b] - 0.75, 0) / total + 0.75 * kinds / total * q)


@pytest.fixture(scope="module")
def ngrams():
    return NGrams.of(LINES, SIZE)


def test_pairs_are_those_of_the_formula(ngrams):
    places = torch.arange(SIZE + 1)
    first, second = torch.meshgrid(places, places, indexing="ij")
    expected = torch.tensor(
        [[naive(a, b) for b in range(SIZE + 1)] for a in range(SIZE + 1)]
    )
    assert torch.allclose(ngrams.pairs(first, second), expected, atol=1e-5)
    assert torch.allclose(expected.exp().sum(-1), torch.ones(SIZE + 1), atol=1e-5)


def test_texts_are_as_likely_as_their_pairs(ngrams):
    texts = Texts.of([[0, 1, 2], [5], [3, 3]], 4)
    expected = [
        sum(naive(a, b) for a, b in zip([SIZE, *text], [*text, SIZE], strict=True))
        for text in ([0, 1, 2], [5], [3, 3])
    ]
    assert ngrams.log_p(texts).tolist() == pytest.approx(expected, abs=1e-4)


def test_a_language_model_counts_half(ngrams):
    texts = Texts.of([[0, 1], [5]], 2)
    own = torch.tensor([[math.nan, -0.5], [-3.0, math.nan]])
    first = (
        naive(SIZE, 0)
        + math.log((math.exp(naive(0, 1)) + math.exp(-0.5)) / 2)
        + naive(1, SIZE)
    )
    second = math.log((math.exp(naive(SIZE, 5)) + math.exp(-3.0)) / 2) + naive(5, SIZE)
    assert ngrams.log_p(texts, own).tolist() == pytest.approx([first, second], abs=1e-4)


def test_without_lines_all_tokens_are_equally_likely():
    places = torch.arange(SIZE + 1)
    first, second = torch.meshgrid(places, places, indexing="ij")
    pairs = NGrams.of([], SIZE).pairs(first, second)
    assert torch.allclose(pairs, torch.full((SIZE + 1, SIZE + 1), -math.log(SIZE + 1)))


def test_kinds_of_tokens_change_the_probability_of_the_next():
    kinds = torch.tensor([0, 0, 0, 3, 3, 3])  # words, and later pieces
    ngrams = NGrams.of([[0, 3], [1, 3, 4], [2]], SIZE, kinds)
    places = torch.arange(SIZE + 1)
    first, second = torch.meshgrid(places, places, indexing="ij")
    p = ngrams.pairs(first, second).exp()
    assert torch.allclose(p.sum(-1), torch.ones(SIZE + 1), atol=1e-5)
    # Of pairs that were not seen, a piece is likelier behind a word, and not at the
    # beginning.
    plain = NGrams.of([[0, 3], [1, 3, 4], [2]], SIZE).pairs(first, second).exp()
    assert p[0, 5] / p[0, 1] > plain[0, 5] / plain[0, 1]
    assert p[SIZE, 5] < plain[SIZE, 5]


@pytest.mark.parametrize(
    ("names", "kinds"),
    [
        (["the", "##min", "123", "##45", "&", "##."], [0, 3, 1, 4, 2, 5]),
        (["\u0120the", "min", "\u0120123", "45", "\u0120&", "."], [0, 3, 1, 4, 2, 5]),
    ],
)
def test_the_kinds_of_a_tokenizer(names, kinds):
    class Named:
        def convert_ids_to_tokens(self, ids):
            return [names[number] for number in ids]

    assert token_kinds(Named(), len(names)).tolist() == kinds
