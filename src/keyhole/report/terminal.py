"""An audit as a table for the terminal."""

from __future__ import annotations

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from keyhole.report import lengths, wording
from keyhole.results import Audit


def table(audit: Audit) -> Group:
    """The verdict, and exposures in rows under the part of the target that they are of."""
    view = Table(box=box.SIMPLE)
    for heading in ("exposure", "outcome"):
        view.add_column(heading)
    for heading in ("error", "queries", "floor", "seconds"):
        view.add_column(heading, justify="right", no_wrap=True)
    surface = ""
    for finding in audit.findings:
        if finding.surface != surface:
            surface = finding.surface
            view.add_row(Text(surface, style="bold"))
        style = {"bad": "red", "part": "yellow", "good": "green"}[wording.colour(finding)]
        indent = "  " if surface else ""
        view.add_row(
            # Text: what came from a target is never taken for markup.
            Text(f"{indent}{finding.exposure}"),
            Text(wording.outcome(finding), style=style),
            wording.error(finding),
            f"{finding.queries:,}",
            wording.floor(finding),
            f"{finding.seconds:.2f}",
        )
    for skip in audit.skips:
        view.add_row(Text(skip.exposure), "skipped", *"––––", style="dim")
    return Group(Text(wording.verdict(audit), style="bold"), view, *_by_length(audit))


def _by_length(audit: Audit) -> list[Text]:
    """For each store, how many texts of which length were read exactly."""
    lines: list[Text] = []
    for finding in audit.findings:
        spans = lengths.spans(finding)
        if spans:
            heading = f"{finding.exposure}, read exactly, by length ({lengths.whose(finding)})"
            lines += [Text(f"  {heading}"), *(Text(f"    {span}") for span in spans), Text()]
    return lines
