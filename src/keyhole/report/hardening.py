"""What training gave, as a table for the terminal: each figure before, and after over the seeds."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean

from rich import box
from rich.table import Table

from keyhole.harden.evaluate import Evaluation
from keyhole.percent import percent


def figures(found: Evaluation) -> dict[str, float]:
    """Accuracy, and the share of right answers that each kind of mask flips."""
    return {
        "clean accuracy": found.accuracy,
        **{f"flips, {name}": one.success for name, one in found.attacks.items()},
        **{f"flips, masks found on {name}": one.success for name, one in found.transferred.items()},
        **{f"flips, wrong label {name}": one.success for name, one in found.wrong_label.items()},
    }


def hardening(before: Evaluation | None, after: Sequence[Evaluation]) -> Table:
    """Figures in rows; of several seeds the mean, and the range behind it."""
    seeds = f"after, {len(after)} seeds" if len(after) > 1 else "after"
    view = Table(title=_title(after[-1]), title_justify="left", box=box.SIMPLE)
    view.add_column("")
    for heading in ("before", seeds):
        view.add_column(heading, justify="right", no_wrap=True)
    old = {} if before is None else figures(before)
    new = [figures(one) for one in after]
    for name in dict.fromkeys([*old, *(name for one in new for name in one)]):
        values = [one[name] for one in new if name in one]
        was = percent(old[name], 1) if name in old else "–"
        view.add_row(name, was, _spread(values))
    return view


def _title(found: Evaluation) -> str:
    """What the shares are shares of."""
    tried = max((len(one.outcomes) for one in found.found.values()), default=0)
    shares = {f"{100 * one.method['share']:g}%" for one in found.found.values()}
    cut = f", {'/'.join(sorted(shares))} of each head cut" if shares else ""
    return f"accuracy on {found.examples} texts, flips of the right answers among {tried}{cut}"


def _spread(values: list[float]) -> str:
    if not values:
        return "–"
    whole = percent(mean(values), 1)
    if len(values) == 1:
        return whole
    return f"{whole} ({percent(min(values), 1)}–{percent(max(values), 1)})"
