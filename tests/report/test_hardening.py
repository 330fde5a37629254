"""The table of a training: every figure once, with mean and range over seeds."""

from __future__ import annotations

import io

from rich.console import Console

from keyhole.harden import Evaluation, Hardening, Measured, Trained, Training
from keyhole.report import hardening


def evaluation(accuracy, flips, **kinds):
    measured = {"stronger": Measured(10, flips, 5.0, 1.0)}
    return Evaluation(accuracy, 20, measured, kinds.get("transferred", {}), {}, 0.0)


def lines(before, after):
    training = Training(1, 0.1, 2**20, (0.5,))
    runs = [
        Trained(seed, ".", training, evaluation)
        for seed, evaluation in enumerate(after)
    ]
    result = Hardening(
        "m", "plain", "Plain()", "d.tsv", 20, {}, "cpu", before=before, runs=tuple(runs)
    )
    console = Console(file=io.StringIO(), width=100)
    console.print(hardening(result))
    return [" ".join(line.split()) for line in console.file.getvalue().splitlines()]


def test_one_seed_before_and_after():
    after = evaluation(
        0.85, 2, transferred={"the model before": Measured(10, 1, 1.0, 0.1)}
    )
    text = lines(evaluation(0.9, 7), [after])
    assert "clean accuracy 90.0% 85.0%" in text
    assert "flips, stronger 70.0% 20.0%" in text
    assert "flips, masks found on the model before – 10.0%" in text
    assert "before after" in text


def test_several_seeds_have_a_mean_and_a_range():
    text = lines(None, [evaluation(0.8, 2), evaluation(0.9, 4), evaluation(1.0, 3)])
    assert "before after, 3 seeds" in text
    assert "clean accuracy – 90.0% (80.0%–100.0%)" in text
    assert "flips, stronger – 30.0% (20.0%–40.0%)" in text
