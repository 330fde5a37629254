"""Every method asks the same questions when it is run again: a ledger answers all of them."""

from __future__ import annotations

import pytest
from planted_logits import PlantedLogits

from keyhole import extract, oracle
from keyhole.oracle.token_questions import Logits

CASES = {
    "SingleHead": (extract.SingleHead(), oracle.plant(dim=6)),
    "LowRank": (extract.LowRank(), oracle.plant(dim=8, rank=2)),
    "NuclearNorm": (extract.NuclearNorm(rank=1), oracle.plant(dim=4, rank=1)),
    "Tolerant": (extract.Tolerant(5e-4), oracle.Rounded(oracle.plant(dim=5), 3)),
    "SignOnly": (extract.SignOnly(accuracy=1e-3), oracle.SignOnly(oracle.plant(dim=3))),
    "MultiHead": (extract.MultiHead(), oracle.plant("multi-head", dim=5, heads=2)),
    "OneLayerTransformer": (
        extract.OneLayerTransformer(),
        oracle.plant("one-layer", dim=4, width=4),
    ),
    "ReluNetwork": (extract.ReluNetwork(), oracle.plant("relu", dim=6, width=5)),
    "OrthogonalHeads": (extract.OrthogonalHeads(), oracle.plant(dim=6)),
    "FullOutput": (extract.FullOutput(), oracle.plant("attention", dim=6)),
    "FullOutput, heads": (
        extract.FullOutput(),
        oracle.plant("attention", dim=8, heads=2, every_token=True),
    ),
    "OutputLayer": (extract.OutputLayer(), Logits(PlantedLogits())),
    "OutputLayer, chosen tokens": (
        extract.OutputLayer(top=9),
        Logits(PlantedLogits(words=70, width=4)),
    ),
    "Auto": (extract.Auto(), oracle.plant(dim=6)),
}


@pytest.mark.parametrize("name", CASES)
def test_a_second_run_costs_nothing(name, tmp_path):
    method, target = CASES[name]
    paid = oracle.Counted(target)
    with oracle.Ledger(paid, tmp_path / "run.db") as ledger:
        first = method(ledger)
    once = paid.queries
    with oracle.Ledger(paid, tmp_path / "run.db") as ledger:
        again = method(ledger)
    assert again.queries == first.queries
    assert again.status == first.status == extract.Status.RECOVERED
    assert paid.queries == once
