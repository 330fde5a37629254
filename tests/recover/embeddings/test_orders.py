"""Two pieces of a text change places, against slices of lists."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch

from keyhole.recover.embeddings.changes import apply, exchanged, likelier
from keyhole.recover.embeddings.counts import NGrams
from keyhole.recover.embeddings.encoder import Texts

NGRAMS = NGrams.of([[1, 2, 3, 4, 5], [5, 1, 2], [3, 4], [2, 2, 5]], 6)
TEXT = [1, 4, 2, 5, 3]


def by_hand(text: list[int], a: int, b: int, c: int, d: int) -> list[int]:
    return text[:a] + text[c:d] + text[b:c] + text[a:b] + text[d:]


def all_cuts(n: int) -> torch.Tensor:
    joined = [(a, b, b, d) for a, b, d in combinations(range(n + 1), 3)]
    return torch.tensor([*joined, *combinations(range(n + 1), 4)]).T


def test_every_exchange_is_that_of_slices():
    cuts = all_cuts(len(TEXT))
    texts = Texts.of([TEXT] * cuts.shape[1], 8)
    changed = apply(texts, cuts)
    for number, cut in enumerate(cuts.T.tolist()):
        assert changed.tokens(number) == by_hand(TEXT, *cut)


def test_the_change_of_log_p_is_that_of_the_whole_text():
    cuts = all_cuts(len(TEXT))
    original = Texts.of([TEXT], len(TEXT))
    changed = apply(Texts.of([TEXT] * cuts.shape[1], len(TEXT)), cuts)
    expected = NGRAMS.log_p(changed) - NGRAMS.log_p(original)
    torch.testing.assert_close(
        likelier(original, cuts, NGRAMS)[0], expected, rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("count", [3, 1000])
def test_texts_of_different_lengths_keep_their_tokens(count):
    lists = [TEXT, [2, 3], [5]]
    parents = Texts.of(lists, 7)
    texts, rows = exchanged(parents, NGRAMS, count, torch.Generator().manual_seed(0))
    for number, row in enumerate(rows.tolist()):
        assert sorted(texts.tokens(number)) == sorted(lists[row])
        assert texts.tokens(number) != lists[row] or len(set(lists[row])) < len(
            lists[row]
        )
    for row, n in enumerate(map(len, lists)):
        everything = len({tuple(cut) for cut in all_cuts(n).T.tolist()}) if n > 1 else 0
        assert int((rows == row).sum()) == min(count, everything)
