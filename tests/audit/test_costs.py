"""What is left is learnt from what was done: by kind of check, and by target."""

from __future__ import annotations

import pytest

from keyhole.audit.costs import Costs


def test_a_check_costs_its_kind_times_its_targets_pace():
    costs = Costs({"small": 10, "large": 40, "new": 20})
    assert not costs.known
    assert costs.of_target("large") > costs.of_target("small")  # by size, before all else
    costs.learn("small", "1. text from layer 1", 1.0)
    costs.learn("small", "2. flips", 4.0)
    costs.learn("large", "1. text from layer 3", 3.0)
    assert costs.known
    # Texts take 2 on average, of which the large one takes 3: half as much again.
    assert costs.of_check("large", "9. flips") == pytest.approx(4.0 * 1.5)
    assert costs.of_check("small", "7. text from layer 2") == pytest.approx(2.0 * 5 / 6)
    assert costs.of_check("new", "3. flips") == pytest.approx(4.0)
    assert costs.of_check("new", "4. gradients") == pytest.approx(8 / 3)  # as any check
    # 4 seconds a target of 25 bytes on average, by its 20.
    assert costs.of_target("new") == pytest.approx(4.0 * 20 / 25)
