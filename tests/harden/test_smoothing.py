"""Certificates by smoothing, against every mask and every cut of tiny attention."""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace
from fractions import Fraction
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

import reference
import tiny_heads
from keyhole.core.errors import InputError
from keyhole.data import NO_LABEL
from keyhole.harden import Smoothed, Smoothing
from keyhole.harden.smoothing import Ballot, Kept, at_least
from keyhole.models.masking import rewriting

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from smoothing import SmoothedQueries, ours, removed

WAYS = [
    Smoothing(0.1),
    Smoothing(0.25),
    Smoothing(0.1, "partition"),
    Smoothing(0.34, "partition"),
]


def head(seed, classes=2, tokens=3, spared=3):
    """One head of random numbers that answers by the mean of its outputs, and six units of nine.

    The last three are spared: always kept.
    """
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(tokens, 4))
    W = rng.normal(size=(4, 4))
    V = rng.normal(size=(4, classes))
    bias = rng.normal(size=classes) / 4
    units = list(itertools.product(range(tokens), repeat=2))

    @cache
    def classify(kept):
        whole = kept | set(units[-spared:])
        return int(
            (reference.attention_of_kept(X, W, V, whole).mean(0) + bias).argmax()
        )

    return classify, units[:-spared]


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("keep", [0.03, 0.1, 0.2])
def test_no_cut_within_the_radius_changes_the_smoothed_answer(classes, keep):
    """The radius of the exact vote is sound for all 64 masks of six units and every cut."""
    radii = []
    for seed in range(12):
        classify, units = head(seed, classes)

        @cache
        def vote(cut, classify=classify, units=units):
            return int(reference.smoothed(classify, units, keep, cut, classes).argmax())

        chances = reference.smoothed(classify, units, keep, frozenset(), classes)
        votes = tuple(round(10**7 * chance) for chance in chances)
        radius = Smoothing(keep).radius(votes, int(chances.argmax()))
        if radius > 0:
            near = [cut for cut in reference.subsets(units) if len(cut) <= radius]
            assert {vote(cut) for cut in near} == {int(chances.argmax())}
        radii.append(radius)
    assert max(radii) > 1, "some of it is worth something"


@pytest.mark.parametrize("parts", [3, 5, 6])
def test_no_cut_within_the_radius_changes_the_vote_of_a_partition(parts):
    radii = []
    for seed in range(12):
        classify, units = head(seed)
        rng = np.random.default_rng(seed)
        own = rng.permutation(len(units)) % parts
        masks = [
            frozenset(u for u, n in zip(units, own, strict=True) if n == p)
            for p in range(parts)
        ]

        def votes(cut, classify=classify, masks=masks):
            answers = [classify(kept - cut) for kept in masks]
            return (answers.count(0), answers.count(1))

        before = votes(frozenset())
        answer = before.index(max(before))
        way = Smoothing(1 / parts, "partition")
        assert way.masks == len(masks)
        radius = way.radius(before, answer)
        least = reference.least_flip(
            lambda cut: votes(cut).index(max(votes(cut))), units
        )
        assert radius < least
        radii.append(radius)
    assert max(radii) == (parts - 1) // 2


def test_the_radius_is_the_largest_that_the_theorem_gives():
    way = Smoothing(0.02, confidence=0.999)
    votes = (990, 10)
    least = at_least(990, 1000, 0.001)
    deltas = [1 - (1 - 0.02) ** k for k in range(60)]
    assert way.radius(votes, 0) == max(k for k in range(60) if least > 0.5 + deltas[k])
    # With three classes, the lower and both upper bounds share the doubt.
    low = at_least(600, 1000, 0.001 / 3)
    high = 1 - at_least(750, 1000, 0.001 / 3)
    wide = max(k for k in range(60) if low - high > 2 * deltas[k])
    assert way.radius((150, 600, 250), 1) == wide
    assert (
        way.radius((450, 550), 0) == -1
    )  # the first masks chose a class that loses the vote
    assert Smoothing(1.0).radius((1, 0), 0) == 0
    assert Smoothing(0.0).radius((1, 0), 0) > 10**9


@pytest.mark.parametrize(("hits", "drawn"), [(1, 20), (19, 20), (20, 20), (180, 200)])
def test_clopper_and_pearson_against_fractions(hits, drawn):
    doubt = Fraction(1, 1000)
    bound = Fraction(at_least(hits, drawn, float(doubt)))
    assert reference.binomial_tail(hits, drawn, bound - Fraction(1, 10**9)) < doubt
    assert reference.binomial_tail(hits, drawn, bound + Fraction(1, 10**9)) > doubt


def one_layer(seed):
    """Return a BERT with one head and one layer, and a text of three tokens: nine units."""
    config = transformers.BertConfig(
        vocab_size=60,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        intermediate_size=16,
        max_position_embeddings=8,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = transformers.BertForSequenceClassification(config)
        for weight in model.parameters():
            if weight.ndim > 1:
                torch.nn.init.normal_(weight, std=0.5)
    ids = torch.randint(5, 60, (1, 3), generator=torch.Generator().manual_seed(seed))
    return model.eval().requires_grad_(False), {"input_ids": ids}


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_real_model_against_every_mask_and_every_pair_of_units(way):
    certified = 0
    for seed in range(3):
        model, batch = one_layer(seed)
        ballot = replace(way, samples=400).ballot(model, batch, NO_LABEL)
        assert ballot.units == 9
        assert (
            ballot.label == ballot.answer
        )  # without a label, the answer counts as right
        if ballot.radius < 1:
            continue
        certified += 1
        question, units = way.asked(model, batch, 0)
        everything = torch.tensor(list(itertools.product([False, True], repeat=9)))
        with torch.no_grad(), rewriting(model, Kept(units, everything)):
            answers = (
                question.part(torch.zeros(512).long()).logits(model)[:, 0].argmax(-1)
            )
        table = {
            frozenset(mask.nonzero().flatten().tolist()): int(answer)
            for mask, answer in zip(everything, answers, strict=True)
        }
        for cut in reference.subsets(range(9)):
            if len(cut) > min(ballot.radius, 2):
                break
            gone = torch.tensor([unit in cut for unit in range(9)])
            if way.exact:
                votes = way.votes(
                    model, question, units, 0, way.stream(question), gone
                ).tolist()
            else:
                votes = reference.smoothed(
                    table.get, range(9), way.keep, cut, 2
                ).tolist()
            assert votes.index(max(votes)) == ballot.answer, cut
    assert certified


@pytest.mark.parametrize("seed", [0, 3, 22])
def test_units_whose_probability_underflows_are_masked_too(seed):
    """Without their rivals they carry the row: cutting them must not change a certified vote."""
    model, batch = one_layer(seed)
    attention = model.bert.encoder.layer[0].attention.self
    with torch.no_grad():
        attention.query.weight.mul_(8)
        attention.key.weight.mul_(8)
    way = Smoothing(0.2, "partition")
    ballot = way.ballot(model, batch, NO_LABEL)
    question, units = way.asked(model, batch, 0)
    assert ballot.units == units.total == 9
    for cut in reference.subsets(range(9)):
        if len(cut) > 2:
            break
        gone = torch.tensor([unit in cut for unit in range(9)])
        votes = way.votes(model, question, units, 0, way.stream(question), gone)
        changed = (votes - torch.tensor(ballot.votes)).abs().sum() / 2
        assert changed <= len(cut), "each unit is in one part, so it changes one vote"
        if len(cut) <= ballot.radius:
            assert int(votes.argmax()) == ballot.answer


def test_units_that_the_model_masks_stay_out():
    model = tiny_heads.model("gpt2", "classes")
    batch = tiny_heads.texts(1, 6)
    layers = model.config.num_hidden_layers
    heads = model.config.num_attention_heads
    _, units = Smoothing().asked(model, batch, 0)
    assert int(units.free.sum()) == layers * heads * 6 * 7 // 2


def test_masks_keep_units_at_the_rate_and_all_spared_units():
    model = tiny_heads.model("bert", "classes")
    batch = tiny_heads.texts(1, 8)
    way = Smoothing(0.2, spare="special", batch=64)
    question, units = way.asked(model, batch, 0)
    kept = torch.cat(list(way.drawn(units, 1, 200, way.stream(question))))
    assert bool(kept[:, ~units.free[0]].all())
    inner = kept[:, units.free[0]].double()
    assert float(inner.mean()) == pytest.approx(0.2, abs=0.01)
    other = torch.cat(list(way.drawn(units, 1, 200, way.stream(question))))
    assert torch.equal(kept, other), "the same text and seed, the same masks"
    parts = replace(way, kind="partition", spare="padding")
    question, units = parts.asked(model, batch, 0)
    own = torch.cat(list(parts.drawn(units, 1, 0, parts.stream(question))))
    assert torch.equal(own.sum(0), torch.ones(units.total).long()), (
        "each unit in one of the parts"
    )
    assert len(own) == 5


@pytest.mark.parametrize("kind", ["random", "partition"])
def test_multiple_choice_is_one_classifier_over_all_its_sequences(kind):
    model = tiny_heads.model("bert", "choice")
    batch = tiny_heads.texts(1, 6, choices=3)
    way = Smoothing(0.05, kind, samples=60, batch=30)
    ballot = way.ballot(model, batch, 1)
    layers = model.config.num_hidden_layers
    heads = model.config.num_attention_heads
    assert len(ballot.votes) == 3
    assert sum(ballot.votes) == (60 if kind == "random" else 20)
    assert ballot.units == layers * heads * sum(n * n for n in (6, 5, 4))
    # With all units cut every choice is its first token alone, and every mask leaves
    # the same.
    batch["input_ids"][0, :, 0] = torch.tensor([20, 30, 40])
    question, units = way.asked(model, batch, 1)
    everything = torch.ones(units.total, dtype=torch.bool)
    nothing = way.votes(model, question, units, 5, way.stream(question), everything)
    assert sorted(nothing.tolist()) == [0, 0, 5 if kind == "random" else 20]


def test_votes_are_counted_saved_and_loaded(tmp_path):
    ballots = (
        Ballot("a", 1, 1, (10, 90), 400, 6),
        Ballot("b", 0, 0, (60, 40), 400, 0),
        Ballot("c", 0, 1, (30, 70), 400, 3),
        Ballot("d", 1, 1, (0, 1), 2, 2),
    )
    found = Smoothed(ballots, Smoothing(0.05), 4, 1.0)
    assert found.accuracy == 0.75
    assert [found.certified(k) for k in (1, 4, 7)] == [0.5, 0.5, 0.25]
    assert found.certified(0.01) == 0.5  # 4 of 400 units, and 1 of 2
    assert list(found.curve()) == ["1 unit", "2 units", "4 units", "1% of the units"]
    found.save(tmp_path / "votes.json")
    assert Smoothed.load(tmp_path / "votes.json") == found
    assert (
        "2 of 4 answers are right and unchanged by any cut of 4 units"
        in found.summary()
    )


def test_the_benchmarks_attack_ranks_by_the_effect_of_removal():
    """For a loss linear in a row the effect is exact: renormalised, or zero if no unit is left."""
    stream = torch.Generator().manual_seed(0)
    a = torch.rand(6, 5, generator=stream, dtype=torch.float64)
    a[0, 1:] = 0  # a unit that is alone in its row
    a[1, 2] = 0
    a = a / a.sum(-1, keepdim=True)
    g = torch.randn(6, 5, generator=stream, dtype=torch.float64)
    for row, key in itertools.product(range(6), range(5)):
        left = a[row].clone()
        left[key] = 0
        left = left / left.sum() if left.sum() else left
        moved = float(g[row] @ (left - a[row]))
        assert float(removed(a, g)[row, key]) == pytest.approx(moved, abs=1e-12)


def test_the_benchmarks_attack_lowers_the_vote_within_its_budget():
    model = tiny_heads.model("bert", "classes", seed=3)
    batch = tiny_heads.texts(1, 8, seed=3)
    way = Smoothing(0.3, samples=100)
    question, units = way.asked(model, batch, way.ballot(model, batch, NO_LABEL).answer)
    kept = torch.cat(list(way.drawn(units, 1, 24, way.stream(question))))
    queries = SmoothedQueries(model, question, units, kept, 24)
    cuts = ours(queries, 40)
    assert [int(cut.sum()) for cut in cuts] == [1, 4, 16, 40]
    assert all(
        bool((small <= large).all()) for small, large in itertools.pairwise(cuts)
    )
    label = int(question.labels[0, 0])
    found = queries.votes(torch.stack([torch.zeros_like(cuts[0]), *cuts]))[
        :, label
    ].tolist()
    assert found[-1] < found[0] - 0.1
    at_random = torch.zeros_like(cuts[0])
    at_random[
        torch.randperm(len(at_random), generator=torch.Generator().manual_seed(0))[:40]
    ] = True
    assert found[-1] < float(queries.votes(at_random[None])[0, label])


def test_wrong_settings_are_refused():
    for wrong in (
        {"keep": 1.5},
        {"kind": "all"},
        {"spare": "words"},
        {"samples": 3},
    ):
        with pytest.raises(InputError, match=next(iter(wrong))):
            Smoothing(**wrong)
    with pytest.raises(InputError, match="one text of a classifier"):
        Smoothing().ballot(tiny_heads.model("bert", "classes"), tiny_heads.texts(2), 0)
