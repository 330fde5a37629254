"""The table of defences: its noise is as private as it says, and its rows are measured."""

from __future__ import annotations

from functools import cache

import pytest

import defences
from defences import Leaks, stand_in, stated
from keyhole.models.capture import Exposure
from keyhole.models.demo import load_demo
from keyhole.recover.gradients.update import noise_for

pytestmark = pytest.mark.release  # what belongs to benchmarks


@pytest.fixture(autouse=True)
def few_public_texts(monkeypatch):
    monkeypatch.setattr(defences, "PUBLIC", defences.PUBLIC[:2])


@cache
def caches():
    return Leaks("cache", stand_in(load_demo()), Exposure("kv", 0))


def test_privacy_that_says_nothing_is_no_proof():
    assert "2.98e+03/N" in stated(noise_for(8), 1.0, 10, 4096)[1]
    assert stated(0.001, 1.0, 10, 4096)[1] == ""


ROWS = {
    "rotation": (lambda: caches().behind("rotated", own=0), "broken"),
    "shield": (lambda: caches().behind("shielded", own=1), "broken"),
    "one nonce": (lambda: caches().encrypted(twice=True), "broken"),
    "nonces": (lambda: caches().encrypted(twice=False), "proved: no better than AES"),
    "noise": (lambda: caches().noisy(8.0), "proved: of N equally likely texts"),
}


@pytest.mark.parametrize("name", ROWS)
def test_what_an_attack_that_knows_it_reads_of_a_cache(name):
    make, verdict = ROWS[name]
    assert make().run["verdict"].startswith(verdict)


@pytest.mark.parametrize(
    ("part", "verdicts"),
    [
        ("gradient", ["broken", "not read", "broken", "not read", "proved: of N"]),
        ("logits", ["broken", "broken", "partly broken", "not read; no proof"]),
    ],
)
def test_gradients_and_logits(part, verdicts):
    rows = [
        row.run["verdict"] for row in defences.TABLE[part](load_demo("classification"))
    ]
    assert len(rows) == len(verdicts)
    for found, verdict in zip(rows, verdicts, strict=True):
        assert found.startswith(verdict)


def test_a_budget_below_the_unknowns_is_a_proof():
    rows = {row.run["defence"]: row.run for row in defences.weights_rows(dim=4)}
    budget = rows["a budget of half the unknowns"]
    assert budget["verdict"] == "proved: 10 numbers do not settle 20 unknowns"
    assert rows["unusual inputs refused"]["verdict"] == "broken"
