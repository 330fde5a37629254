"""The findings of `keyhole audit demo`, as a record (docs/figures/demo.json) and on the start page.

`python docs/generate.py figures/demo.json` audits the demo and writes both.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import show
from keyhole.assess import Item, assess
from keyhole.assess.severity import cost
from keyhole.core import Audit
from keyhole.report import words

DOCS = Path(__file__).parent
SHOWN = (  # the rows that the start page shows
    "full scores",
    "signs",
    "a causal layer's output",
    "hidden states of layer 3",
    "pooled embedding",
    "gradient of a batch of texts",
    "1% of all attention cut",
)
FORM = "  {:<9} {:<31} {:<22} {:>7} {:>24}".format


def record() -> str:
    """Return the record of `keyhole audit demo`, and write some of its rows on the start page."""
    with tempfile.TemporaryDirectory() as folder:
        file = audited(Path(folder), "--output", "json=demo.json") / "demo.json"
        assessment = assess(Audit.load(file))
    rows = [row(item) for item in assessment.items]
    cards = [
        {
            "family": card.family,
            "given away": card.level,
            "exposed": card.exposed,
            "checked": card.checked,
            "fix": words.brief(card.fix),
        }
        for card in assessment.families
    ]
    data = {
        **show.origin("The demo target, audited", "keyhole audit demo"),
        "note": "The scoring head has width 64.",
        "rows": [{"part": "all", "outcome": assessment.verdict}, *cards, *rows],
    }
    page = DOCS / "index.md"
    place = re.compile(r"(```text\n)The weights can .*?(```)", re.DOTALL)
    shown = block(assessment.verdict, cards, rows)
    page.write_text(
        place.sub(lambda m: f"{m[1]}{shown}{m[2]}", page.read_text("utf-8")), "utf-8"
    )
    return json.dumps(data, indent=1, ensure_ascii=False) + "\n"


def audited(folder: Path, *options: str) -> Path:
    """Run `keyhole audit demo` in a folder, and return the folder with what it wrote."""
    command = [sys.executable, "-m", "keyhole", "audit", "demo", *options]
    done = subprocess.run(
        command, cwd=folder, check=False, capture_output=True, text=True
    )
    if done.returncode != 1:
        raise SystemExit(
            f"the demo gave nothing away, or could not be audited: {done.stderr}"
        )
    return folder


def row(item: Item) -> dict[str, str]:
    finding = item.finding
    return {
        "part": f"{item.family} of {finding.part}",
        "severity": item.severity.value,
        "exposure": words.exposure(finding.exposure),
        "outcome": words.outcome(finding),
        "error": words.error(finding),
        "cost": cost(finding),
        "lower bound": "–"
        if finding.lower_bound is None
        else f"{finding.lower_bound:,}",
        "seconds": f"{finding.seconds:.2f}",
    }


def block(
    verdict: str, cards: Sequence[dict[str, Any]], rows: Sequence[dict[str, str]]
) -> str:
    """Return the verdict, the families and the chosen rows as a terminal shows them."""
    lines = [*textwrap.wrap(verdict, 98), ""]
    for card in cards:
        exposed = f"{card['exposed']} of {card['checked']}"
        fix = textwrap.shorten(card["fix"], 65, placeholder=" …")
        lines.append(
            f"  {card['family']:<13} {card['given away']:<8} {exposed:<10} {fix}"
        )
    lines += ["", FORM("severity", "exposure", "outcome", "error", "cost")]
    part = ""
    for each in rows:
        if each["exposure"] in SHOWN:
            if each["part"] != part:
                lines.append(each["part"])
            part = each["part"]
            columns = ("severity", "exposure", "outcome", "error", "cost")
            lines.append(FORM(*(each[column] for column in columns)).rstrip())
    return "\n".join(lines) + "\n"
