"""What texts cost, from the figures in measured.json."""

from __future__ import annotations

import pytest

from keyhole.core.errors import InputError
from keyhole.lab import cost


def test_many_texts():
    bill = cost.TextCost(cost.text(12), texts=1000, price=2.0)
    assert bill.hours == pytest.approx(1000 * 0.18 / 3600, rel=1e-12)
    assert bill.money == pytest.approx(2 * 1000 * 0.18 / 3600, rel=1e-12)
    assert "990 expected" in bill.summary()
    slower = cost.TextCost(cost.text(12), texts=10, seconds=36.0)
    assert slower.hours == pytest.approx(10 * 19.67 * 36 / 3600, rel=1e-12)


def test_what_was_not_measured_is_not_made_up():
    bill = cost.TextCost(cost.text(2, exposure="logits"), price=1.0)
    assert (bill.hours, bill.money) == (None, None)
    assert "not measured" in bill.summary()
    for ask in (
        lambda: cost.text(100),
        lambda: cost.text(12, exposure="logits"),
        lambda: cost.text(30, processor="cpu"),
        lambda: cost.text(5, exposure="hidden", processor="cpu"),
    ):
        with pytest.raises(InputError, match="tokens were not measured: choose a length"):
            ask()
    with pytest.raises(InputError, match="choose among gpu, cpu"):
        cost.text(5, processor="tpu")
