"""Every defence in front of a small head: what the thief gets, what is left to honest clients."""

from __future__ import annotations

import pytest

from keyhole import extract, oracle
from keyhole.core import Status
from keyhole.extract.defences import HonestClient, server_defences, try_defence
from keyhole.oracle import Defence, defended

DIM = 5
TARGET = oracle.plant(dim=DIM, seed=6)
CLIENT = HonestClient.of(TARGET)
PLANNED = {defence.name: defence for defence in server_defences(DIM)}
EXACT = (
    "no defence",
    "rounding",
    "norms clipped",
    "short sequences refused",
    "unusual inputs refused",
    "short and unusual inputs refused",
    "one query a second",
)
NEARLY = (
    "rounding, norms clipped",
    "noise, the same for a question, norms clipped",
    "label only",
    "noise, anew each time, norms clipped",
    "short and unusual inputs refused, rounding",
)
SLOW = "short and unusual inputs refused, label only"
HELD = ("a budget of half the unknowns",)


def test_all_are_expected_to_end_in_some_way():
    assert sorted((*EXACT, *NEARLY, SLOW, *HELD)) == sorted(PLANNED)


@pytest.mark.parametrize("name", EXACT)
def test_defences_that_give_everything_away(name):
    tried = try_defence(PLANNED[name], TARGET, CLIENT, seed=0)
    assert tried.status is Status.RECOVERED, tried.extraction.reason
    assert tried.error <= 1e-10


@pytest.mark.parametrize(
    "name", [*NEARLY, pytest.param(SLOW, marks=pytest.mark.release)]
)
def test_defences_that_cost_the_thief_digits(name):
    tried = try_defence(PLANNED[name], TARGET, CLIENT, seed=0)
    assert tried.status is Status.INEXACT
    assert 1e-8 < tried.error <= 2e-2
    assert tried.error <= tried.service.error, "the honest client loses more"
    assert tried.service.error > 1e-3


@pytest.mark.parametrize("name", HELD)
def test_defences_that_hold(name):
    tried = try_defence(PLANNED[name], TARGET, CLIENT, seed=0)
    assert tried.status is Status.UNSOLVED
    assert tried.error is None or tried.error > 0.1
    assert tried.extraction.queries <= PLANNED[name].max_queries == 15


def test_more_repetition_averages_more_noise_out():
    defence = PLANNED["noise, anew each time, norms clipped"]
    errors = []
    for repeats in (1, 12):
        result = extract.Adapted(defence, repeats)(defended(TARGET, defence))
        errors.append(CLIENT.error_of(result.model))
    assert errors[1] < errors[0] / 2


def test_what_honest_clients_lose():
    def served(**change):
        defence = Defence(**change)
        return CLIENT.served(defended(TARGET, defence), defence.sign_only)

    assert served().error == 0
    scale = float(CLIENT.truth.square().mean().sqrt())
    noisy = served(noise=0.1)
    assert noisy.error == pytest.approx(0.1 / 3**0.5 / scale, rel=0.2)
    assert served(max_norm=100.0).error == 0
    # ±1 at the best scale leaves 1 − (mean |f|)² / mean f².
    left = 1 - float(CLIENT.truth.abs().mean() / scale) ** 2
    assert served(sign_only=True).error == pytest.approx(left**0.5, abs=1e-9)
    refused = served(min_tokens=8)
    assert refused.refused == pytest.approx(1 / 3)
    assert refused.error > 0.3
    # A copy that is the target at another scale is as good as the target: one score
    # tells which.
    copy = oracle.Head(TARGET.W, 3 * TARGET.v)
    assert CLIENT.error_of(copy) <= 1e-15
    assert CLIENT.error_of(oracle.Head(TARGET.W, TARGET.v.flip(0))) > 0.1


def test_the_attack_follows_from_the_defence():
    def attack(**change):
        return str(extract.Adapted(Defence(**change)))

    assert attack() == "SingleHead"
    assert (
        attack(decimals=1) == attack(noise=0.1) == attack(fresh_noise=0.1) == "Tolerant"
    )
    assert attack(sign_only=True) == "SignOnly"
    assert attack(max_norm=1.0) == attack(usual_norm=1.0) == "OrdinaryQuestions"
    assert attack(min_tokens=3) == "SingleHead, tokens copied"
    assert attack(min_tokens=3, decimals=2) == "Tolerant, tokens copied"
    assert attack(usual_norm=1.0, sign_only=True, min_tokens=4) == "OrdinaryLabels"
    method = extract.Adapted(Defence(decimals=0, noise=0.25, max_norm=3.0)).method
    assert method == extract.Tolerant(0.75, max_norm=3.0, repeats=16)


def test_labels_of_long_sequences():
    defence = Defence(sign_only=True, min_tokens=5)
    tried = try_defence(defence, TARGET, CLIENT, seed=0)
    assert tried.attack == "SignOnly, tokens copied"
    assert tried.status is Status.INEXACT
    assert tried.error <= 1e-3
