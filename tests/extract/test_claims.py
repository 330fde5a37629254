"""What a result says of itself holds against the planted truth, under every budget.

Whatever the method and wherever its budget ends: no more is known than was answered,
what is known is right, what is recovered is known whole, and guarantees hold. Every
budget and more seeds with KEYHOLE_FULL=1, a sample otherwise.
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass

import pytest
import torch
from planted_logits import PlantedLogits
from planted_sub_layers import planted

from keyhole import extract, oracle
from keyhole.core.text import percent
from keyhole.extract import Status
from keyhole.extract.ordinary_questions import OrdinaryLabels, OrdinaryQuestions
from keyhole.oracle.storage import plant_orthogonal
from keyhole.oracle.token_questions import Logits

FULL = os.environ.get("KEYHOLE_FULL") == "1"
SEEDS = range(4 if FULL else 1)
DIMS = (1, 2, 3, 5) if FULL else (1, 3)
SHARES = (0.3, 0.6, 0.9) if FULL else (0.6,)  # of what is needed
EXACT = 1e-6
COARSE = 1e-2


@dataclass
class Case:
    """A method with a target of its kind, and what is true of that.

    `unknowns` are numbers, or bits where an answer is one; an answer holds `numbers` of
    them. `error` is how far off a model may be of which everything is known.
    """

    method: object
    target: object
    truth: object
    unknowns: float
    numbers: int = 1
    error: float = EXACT
    unit: bool = False  # the length of v stays open, and is taken for 1


def low_rank(d: int, r: int) -> int:
    return d + 2 * r * d - r * r


def relu(d: int, width: int) -> int:
    """In one dimension all neurons together are two slopes."""
    return width * d if d > 1 else 2


def head(d, seed, rank=None):
    return oracle.plant(dim=d, rank=rank, seed=seed)


def single(method, d, seed, rank=None, view=lambda truth: truth, **more):
    truth = head(d, seed, rank)
    return Case(
        method, view(truth), truth, low_rank(d, d if rank is None else rank), **more
    )


def signs(method, d, seed, accuracy, **more):
    truth = head(d, seed)
    bits = math.log2(1 / accuracy)
    return Case(
        method,
        oracle.SignOnly(truth),
        truth,
        (d * d + d - 1) * bits,
        error=COARSE,
        unit=True,
        **more,
    )


def sign_only_as_published(d, seed):
    truth = head(d, seed)
    v = truth.v / torch.linalg.vector_norm(truth.v)
    bound = float(torch.linalg.matrix_norm(truth.W, 2))
    method = extract.SignOnlyAsPublished(
        bound, 0.9 * float(v.abs().min()), 0.9, seed=seed
    )
    bits = (d * d + d - 1) * math.log2(1 / 0.9)
    return Case(method, oracle.SignOnly(truth), truth, bits, error=math.inf, unit=True)


def tolerant_as_published(d, seed):
    truth = head(d, seed)
    bound = float(torch.linalg.matrix_norm(truth.W, 2))
    method = extract.TolerantAsPublished(
        1e-6, bound, 0.9 * float(truth.v.abs().min()), seed=seed
    )
    return Case(method, oracle.Noisy(truth, 1e-6), truth, low_rank(d, d), error=COARSE)


def heads(method, d, seed, count, rank=None):
    truth = oracle.plant("multi-head", dim=d, heads=count, rank=rank, seed=seed)
    return Case(method, truth, truth, count * low_rank(d, d if rank is None else rank))


def orthogonal(d, seed, given):
    truth, bases = plant_orthogonal(d, min(d, 2), seed=seed)
    method = extract.OrthogonalHeads(bases if given else None, seed=seed)
    return Case(
        method, truth, truth, sum(k * k + k for k in (b.shape[1] for b in bases))
    )


def planted_as(kind, method, d, seed, unknowns, **settings):
    truth = oracle.plant(kind, dim=d, seed=seed, **settings)
    return Case(method, truth, truth, unknowns)


def vectors(d, seed, count, every_token=False):
    truth = oracle.plant(
        "attention", dim=d, heads=count, every_token=every_token, seed=seed
    )
    # one sequence may hold everything
    if every_token:
        numbers = 2 * count * d * d
    else:
        numbers = d
    return Case(extract.FullOutput(seed=seed), truth, truth, 2 * count * d * d, numbers)


def sub_layer(seed):
    truth = planted(d=8, heads=2, groups=2, seed=seed)
    return Case(extract.AttentionSubLayer(seed=seed), truth, truth, truth.unknowns, 8)


def layers(d, seed):
    truth = oracle.plant("attention-layers", dim=d, seed=seed)
    return Case(extract.AttentionLayers(seed=seed), truth, truth, truth.unknowns, d)


def clipped(truth):
    return oracle.Rounded(oracle.Clipped(truth, 3.0), 3)


CASES = {
    "SingleHead": lambda d, s: single(extract.SingleHead(seed=s), d, s),
    "LowRank": lambda d, s: single(extract.LowRank(seed=s), d, s, (d + 1) // 2),
    "LowRank, full": lambda d, s: single(extract.LowRank(seed=s), d, s),
    "LowRank, rank given": lambda d, s: single(extract.LowRank(1, seed=s), d, s, 1),
    "NuclearNorm": lambda d, s: single(
        extract.NuclearNorm(1, seed=s), d, s, 1, error=1e-4
    ),
    "Tolerant": lambda d, s: single(
        extract.Tolerant(5e-4, seed=s),
        d,
        s,
        view=lambda truth: oracle.Rounded(truth, 3),
    ),
    "Tolerant, clipped": lambda d, s: single(
        extract.Tolerant(5e-4, max_norm=3.0, repeats=2, seed=s),
        d,
        s,
        view=clipped,
        error=0.1,
    ),
    "TolerantAsPublished": tolerant_as_published,
    "SignOnly": lambda d, s: signs(extract.SignOnly(1e-3, seed=s), d, s, 1e-3),
    "SignOnlyAsPublished": sign_only_as_published,
    "MultiHead": lambda d, s: heads(extract.MultiHead(seed=s), d, s, 3),
    "MultiHead, heads given": lambda d, s: heads(extract.MultiHead(2, seed=s), d, s, 2),
    "MultiHead, low rank": lambda d, s: heads(extract.MultiHead(seed=s), d, s, 2, 1),
    "OrthogonalHeads": lambda d, s: orthogonal(d, s, given=False),
    "OrthogonalHeads, bases given": lambda d, s: orthogonal(d, s, given=True),
    "Fitted": lambda d, s: single(extract.Fitted(seed=s), d, s),
    "OrdinaryQuestions": lambda d, s: single(OrdinaryQuestions(seed=s), d, s),
    "OneLayerTransformer": lambda d, s: planted_as(
        "one-layer",
        extract.OneLayerTransformer(seed=s),
        d,
        s,
        d * d + relu(d, 4),
        width=4,
    ),
    "ReluNetwork": lambda d, s: planted_as(
        "relu", extract.ReluNetwork(seed=s), d, s, relu(d, 6), width=6
    ),
    "FullOutput": lambda d, s: vectors(d, s, 1),
    "FullOutput, heads": lambda d, s: vectors(d, s, 2),
    "FullOutput, every token": lambda d, s: vectors(d, s, 2, every_token=True),
    "AttentionSubLayer": lambda d, s: sub_layer(s),
    "AttentionLayers": lambda d, s: layers(d, s),
    "Auto": lambda d, s: single(extract.Auto(seed=s), d, s, (d + 1) // 2),
    "Auto, heads": lambda d, s: heads(extract.Auto(seed=s), d, s, 3),
}
SLOW = {
    "NuclearNorm": (1, 3),
    "SignOnlyAsPublished": (2,),
    "OneLayerTransformer, heads": (4,),
    "SignOnly": (2,),
    "AttentionSubLayer": (8,),
    "AttentionLayers": (3,),
    "Auto, heads": (2,),
}


def error(model, case: Case) -> float:
    """How far a model is off on fresh questions, relative to the largest answer of a kind."""
    truth = case.truth
    stream = torch.Generator().manual_seed(77)
    if case.unit:
        truth = oracle.Head(truth.W, truth.v / torch.linalg.vector_norm(truth.v))
    worst = 0.0
    for length in (1, 2, 4):
        X = torch.randn(8, length, truth.dim, generator=stream, dtype=torch.float64)
        X /= math.sqrt(truth.dim)
        wanted = truth(X)
        worst = max(worst, float((model(X) - wanted).abs().max() / wanted.abs().max()))
    return worst


def settled(model: oracle.Head, truth: oracle.Head) -> int:
    """The most numbers of one head that can be settled where W is wrong by a matrix of rank s.

    Whatever was measured, s² or more are open in the d − r dimensions beside W's own
    and s of them.
    """
    d = truth.dim
    r = int(torch.linalg.matrix_rank(truth.W, rtol=1e-9))
    wrong = torch.linalg.svdvals(model.W - truth.W)
    s = min(r, int((wrong > 1e-7 * torch.linalg.svdvals(truth.W)[0]).sum()))
    return low_rank(d, r) - 2 * s * (d - r) - s * s


def check(result: extract.Extraction, case: Case, budget: int | None) -> None:
    assert 0 <= result.known <= 1
    assert result.known * case.unknowns <= result.queries * case.numbers + 1
    off = math.inf if result.model is None else error(result.model, case)
    if result.known == 1:
        assert off <= case.error
    elif isinstance(case.truth, oracle.Head) and case.error == EXACT and result.known:
        assert result.known * case.unknowns <= settled(result.model, case.truth) + 1
    if result.status in (Status.RECOVERED, Status.WITHIN):
        assert off <= case.error
        assert result.known == 1
        assert abs(result.lower_bound * case.numbers - case.unknowns) < case.numbers + 1
    if result.status is Status.MISMATCH:
        assert result.known == 0
    if result.status is Status.BUDGET:
        assert result.queries == budget
        shares = re.findall(r"([0-9.]+%) of the unknowns are known", result.reason)
        assert shares == [percent(result.known)] or not (shares or result.known)
    if result.guarantee is not None:
        v = case.truth.v / (torch.linalg.vector_norm(case.truth.v) if case.unit else 1)
        assert float((result.model.W - case.truth.W).abs().max()) <= result.guarantee
        assert float((result.model.v - v).abs().max()) <= result.guarantee_v


def budgets(needed: int, d: int) -> list[int]:
    """From one question to just enough."""
    if FULL and needed <= 60:
        return list(range(1, needed + 45))
    few = (1, d + 1, 2 * d + 1, needed - 1, needed)
    return sorted(
        {
            count
            for count in (*few, *(int(share * needed) for share in SHARES))
            if count > 0
        }
    )


@pytest.mark.parametrize("name", CASES)
def test_what_is_claimed_is_true_under_every_budget(name):
    for d in SLOW.get(name, DIMS):
        for seed in SEEDS:
            case = CASES[name](d, seed)
            whole = case.method(case.target)
            check(whole, case, None)
            for budget in budgets(whole.queries, d):
                check(
                    case.method(oracle.Counted(case.target, budget=budget)),
                    case,
                    budget,
                )


def test_labels_are_known_little_by_little():
    target = oracle.SignOnly(head(4, 1))
    method = OrdinaryLabels(rounds=2)
    shares = []
    for budget in (79, 81):  # 4 labels for each of 20 unknowns, then 2 of them
        result = method(oracle.Counted(target, budget=budget))
        assert result.status is Status.BUDGET
        shares.append(result.known)
    assert shares == [0, pytest.approx(2 / 3, abs=0.05)]


def test_the_span_of_a_last_layer_is_known_as_far_as_its_answers_go():
    target = Logits(PlantedLogits(words=120, width=12))
    method = extract.OutputLayer()
    whole = method(target)
    assert whole.status is Status.RECOVERED
    assert whole.known == 1
    for budget in (1, 2, 5, 11, whole.queries - 1):
        result = method(oracle.Counted(target, budget=budget))
        assert result.known * 12 <= budget
        assert (result.known == 1) == (result.width == 12)


def test_a_wrong_rank_is_not_known_at_all():
    result = extract.LowRank(rank=1)(head(4, 1, 3))
    assert result.status is Status.MISMATCH
    assert result.known == 0


def test_fewer_measurements_than_unknowns_settle_no_more_than_there_are():
    method = extract.NuclearNorm(rank=2, oversampling=1.0)
    result = method(oracle.Counted(head(5, 1, 2), budget=5 + 10))
    assert result.status is Status.UNVERIFIED
    assert result.known == pytest.approx(15 / low_rank(5, 2))
