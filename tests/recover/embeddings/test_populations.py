"""Populations of texts: what is kept, which text is changed next, which one starts again."""

from __future__ import annotations

import pytest
import torch

from keyhole.recover.embeddings.counts import NGrams
from keyhole.recover.embeddings.encoder import Texts
from keyhole.recover.embeddings.sum_search import Populations, best_of_each

SECRETS = [[10, 11, 12], [20, 21]]


@pytest.fixture
def populations(encoder):
    goals = encoder.vectors(Texts.of(SECRETS, 4))
    ngrams = NGrams.of([[10, 11], [11, 12]], len(encoder.table))
    trust = torch.tensor([0.0, 2.0])
    generator = torch.Generator().manual_seed(0)
    return Populations(encoder, ngrams, goals, trust, 3, 4, generator)


def take(
    populations: Populations, lists: list[list[int]], rows: list[int]
) -> torch.Tensor:
    return populations.take(Texts.of(lists, 4), torch.tensor(rows))[0]


def test_a_population_keeps_the_best_texts_once_each(populations, encoder):
    lists = [[10, 11], [10, 11, 13], [30], [31], [10, 11]]
    vectors = take(populations, lists, [0] * 5)
    take(populations, lists[:2], [0, 0])
    cosines = vectors @ populations.goals[0]
    expected = sorted(cosines[:4].tolist(), reverse=True)[:3]
    assert populations.cosines[0].tolist() == pytest.approx(expected, abs=1e-5)
    assert populations.passes.tolist() == [7, 0]
    assert populations.cosines[1:].max() == -2


def test_the_score_weighs_the_vector_and_the_order(populations):
    take(populations, [[10, 11], [13, 11]], [1, 1])
    cosines = populations.cosines[1, :2]
    likelihoods = populations.likelihoods[1, :2]
    trust = 2.0 * 2 / populations.goals.shape[1]
    scores = trust * likelihoods - (1 - cosines + 1e-4).log()
    assert scores[0] >= scores[1]
    assert populations.trust.tolist() == pytest.approx([0, trust, 0, trust])


def test_the_right_text_is_kept_as_the_best(populations):
    take(populations, [SECRETS[0], [30], SECRETS[1], [31]], [0, 1, 2, 3])
    assert (populations.best > 1 - 1e-6).all()
    assert [populations.best_texts.tokens(row) for row in range(2)] == SECRETS


def test_texts_of_the_same_tokens_take_turns(populations):
    take(populations, [[10, 11], [11, 10], [40]], [0, 0, 0])
    rows = torch.tensor([0])
    seen = []
    for _ in range(40):
        parents = populations.parents(rows)
        seen.append((tuple(sorted(parents.texts.tokens(0))), int(parents.turns)))
    assert seen[0][1] == 0
    assert {tokens for tokens, _ in seen} == {(10, 11), (40,)}


def test_a_population_that_does_not_improve_starts_again_but_not_the_nearest(
    populations,
):
    take(populations, [[10, 11], [30, 31, 32]], [0, 1])
    rows = torch.tensor([0, 1])
    nearest = populations.cosines[0].max()
    far = populations.cosines[1].max()
    assert nearest > far
    for _ in range(4):
        populations.renew(rows)
    assert populations.cosines[0].max() == nearest
    begun = populations.texts[1].tokens(0)
    assert set(begun) <= {10, 11} or set(begun) <= {30, 31, 32}
    assert populations.cosines[1, 1] == -2


def test_no_texts_can_be_taken(populations):
    assert (
        populations.take(Texts.of([], 4), torch.zeros(0, dtype=torch.long))[0].shape[0]
        == 0
    )


def test_best_of_each_row():
    rows = torch.tensor([2, 0, 2, 2])
    scores = torch.tensor([1.0, 5.0, 3.0, 2.0])
    touched, places = best_of_each(rows, scores, 2)
    assert touched.tolist() == [0, 2]
    assert places.tolist() == [[1, -1], [2, 3]]
