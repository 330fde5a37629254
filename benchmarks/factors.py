"""What flipping depends on: margin, tokens and entropy of attention of the right answers.

For each model, each factor and each attack that flips some answers and not others: the share that
flipped in each quarter of the answers by that factor, how often an answer that flipped has the
larger value than one that stands (ties count half; 50%: the factor tells nothing), and its weight
in a logistic regression on all factors, in standard deviations. (`tasks.py --parts factors`)

What makes tasks differ: the regression is then fitted on the other tasks' plain models alone and
asked how many of this task's answers flip. Where it is right, tasks differ because their margins,
lengths and entropies do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from show import Row

FACTORS = ("margin", "tokens", "entropy")
OUTCOMES = ("strongest", "strongest-tenth", "as-released")
_RIDGE = 1e-2  # keeps a weight finite where a factor tells all answers apart
_STEPS = 100


def table(runs: Sequence[dict[str, Any]]) -> list[Row]:
    rows: list[Row] = []
    for what, method in dict.fromkeys((run["what"], run["method"]) for run in runs):
        own = [run for run in runs if (run["what"], run["method"]) == (what, method)]
        for outcome in OUTCOMES:
            values, flipped = answers(own, outcome)
            if len(flipped):
                rows += described(f"{what}, {method}, {outcome}", values, flipped)
    return rows + [row for outcome in OUTCOMES for row in across(runs, outcome)]


def answers(runs: Sequence[dict[str, Any]], outcome: str) -> tuple[Tensor, Tensor]:
    """Factors (answers, 3) and flips (answers,), float64, of all right answers attacked so."""
    known = [answer for run in runs for answer in run.get("answers", [])]
    known = [answer for answer in known if outcome in answer["flipped"]]
    values = [[float(answer[name]) for name in FACTORS] for answer in known]
    flips = [float(answer["flipped"][outcome]) for answer in known]
    return (
        torch.tensor(values, dtype=torch.float64).view(-1, len(FACTORS)),
        torch.tensor(flips, dtype=torch.float64),
    )


def described(name: str, values: Tensor, flipped: Tensor) -> list[Row]:
    if flipped.min() == flipped.max():
        what = "all flip" if flipped[0] else "none flips"
        return [Row(name, f"{what}: nothing to tell apart", details=f"{len(flipped)} answers")]
    weights = regression(standard(values, values), flipped)[1:]
    rows: list[Row] = []
    for number, factor in enumerate(FACTORS):
        shares = ", ".join(f"{share:.0%}" for share in quarters(values[:, number], flipped))
        details = (
            f"larger where flipped: {larger(values[:, number], flipped):.0%}; weight "
            f"{weights[number]:+.2f}; median {values[:, number].median():.3g}; "
            f"{len(flipped)} answers"
        )
        rows.append(Row(f"{name}: flips by quarter of {factor}", shares, details=details))
    return rows


def quarters(values: Tensor, flipped: Tensor) -> list[float]:
    """The share that flipped in each quarter of the answers, from the smallest values up."""
    parts = flipped[values.argsort(stable=True)].tensor_split(4)
    return [float(part.mean()) for part in parts if len(part)]


def larger(values: Tensor, flipped: Tensor) -> float:
    """How often an answer that flipped has the larger value than one that stands."""
    ones, zeros = values[flipped > 0], values[flipped == 0]
    gaps = ones[:, None] - zeros[None, :]
    return float((gaps > 0).double().mean() + (gaps == 0).double().mean() / 2)


def standard(values: Tensor, of: Tensor) -> Tensor:
    """In standard deviations from the mean of `of`, with a column of ones for the intercept."""
    scale = of.std(0).clamp(min=1e-12)
    return torch.cat([torch.ones_like(values[:, :1]), (values - of.mean(0)) / scale], 1)


def regression(inputs: Tensor, flipped: Tensor) -> Tensor:
    """Logistic, by Newton's method; all weights but the intercept's are held back a little."""
    ridge = torch.full((inputs.shape[1],), _RIDGE * len(flipped), dtype=torch.float64)
    ridge[0] = 0
    weights = torch.zeros(inputs.shape[1], dtype=torch.float64)
    for _ in range(_STEPS):
        expected = torch.sigmoid(inputs @ weights)
        slope = inputs.T @ (expected - flipped) + ridge * weights
        curvature = (inputs.T * (expected * (1 - expected))) @ inputs + torch.diag(ridge)
        step = torch.linalg.solve(curvature, slope)
        weights = weights - step / max(1.0, float(step.norm()))  # no longer than 1: it converges
        if float(step.norm()) < 1e-12:
            break
    return weights


def across(runs: Sequence[dict[str, Any]], outcome: str) -> list[Row]:
    """Each task's flips as the other tasks' plain models foretell them."""
    plain = [run for run in runs if run["method"] == "plain"]
    names = list(dict.fromkeys(run["what"] for run in plain))
    rows: list[Row] = []
    for name in names:
        values, flipped = answers([run for run in plain if run["what"] == name], outcome)
        others, known = answers([run for run in plain if run["what"] != name], outcome)
        if not len(flipped) or not len(known) or known.min() == known.max():
            continue
        weights = regression(standard(others, others), known)
        expected = float(torch.sigmoid(standard(values, others) @ weights).mean())
        rows.append(
            Row(f"{name}, {outcome}: flips foretold by the other tasks", f"{expected:.1%}",
                details=f"measured {flipped.mean():.1%} of {len(flipped)}")
        )  # fmt: skip
    return rows
