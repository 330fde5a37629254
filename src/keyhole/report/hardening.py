"""What training gave, as a table for the terminal: each figure before, and after over the seeds."""

from __future__ import annotations

from statistics import mean
from typing import TYPE_CHECKING

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from keyhole.core.text import percent

if TYPE_CHECKING:  # a report is made without what trains
    from keyhole.harden.evaluate import Evaluation
    from keyhole.harden.run import Hardening


def hardening(result: Hardening) -> Group:
    """Figures in rows; of several seeds the mean, and the range behind it."""
    after = result.after
    seeds = f"after, {len(after)} seeds" if len(after) > 1 else "after"
    title = _title(after[-1]) if after else "nothing was measured"
    view = Table(box=box.SIMPLE)
    view.add_column("")
    for heading in ("before", seeds):
        view.add_column(heading, justify="right", no_wrap=True)
    old = {} if result.before is None else result.before.figures()
    new = [evaluation.figures() for evaluation in after]
    for name in dict.fromkeys([*old, *(name for figures in new for name in figures)]):
        values = [figures[name] for figures in new if name in figures]
        was = percent(old[name], 1) if name in old else "–"
        view.add_row(name, was, _spread(values))
    return Group(Text(title, style="italic"), view)


def _title(evaluation: Evaluation) -> str:
    """What the shares are shares of."""
    disruptions = evaluation.disruptions.values()
    tried = max((len(disruption.outcomes) for disruption in disruptions), default=0)
    shares = {f"{100 * disruption.method['share']:g}%" for disruption in disruptions}
    cut = f", {'/'.join(sorted(shares))} of each head cut" if shares else ""
    flips = f", flips of the right answers among {tried}{cut}" if tried else ""
    return f"accuracy on {evaluation.examples} texts{flips}"


def _spread(values: list[float]) -> str:
    if not values:
        return "–"
    whole = percent(mean(values), 1)
    if len(values) == 1:
        return whole
    return f"{whole} ({percent(min(values), 1)}–{percent(max(values), 1)})"
