"""What `keyhole audit demo` says, as a record (docs/figures/demo.json) and on the start page.

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

import quoted

DOCS = Path(__file__).parent
SHOWN = (  # the rows that the start page shows
    "full scores", "scores rounded to 3 decimals", "signs", "a causal layer's output",
    "hidden states of layer 3", "attention maps of layer 1", "pooled embedding",
    "gradient of a batch of texts", "1% of each head's attention cut", "1% of all attention cut",
)  # fmt: skip
COLUMNS = ("exposure", "outcome", "error", "queries", "floor", "seconds")


def record() -> str:
    """What `keyhole audit demo` prints, as a record; the start page shows some of its rows."""
    sys.path.insert(0, str(DOCS.parent / "benchmarks"))
    import show

    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "keyhole", "audit", "demo"]
        done = subprocess.run(command, cwd=folder, check=False, capture_output=True, text=True)
    if done.returncode != 1:
        raise SystemExit(f"expected the demo to give something away, got {done.stderr}")
    headline, table = re.split(r"\n\s*\n", done.stdout, maxsplit=1)
    surface, rows = "", []
    for line in table.splitlines():
        cells = re.split(r"\s{2,}", line.strip())
        if len(cells) == len(COLUMNS) and cells[0] != COLUMNS[0]:
            rows.append({"surface": surface, **dict(zip(COLUMNS, cells, strict=True))})
        surface = cells[0] if len(cells) == 1 else surface
    verdict = " ".join(headline.split())
    data = {
        "title": "The demo target, audited",
        "command": "keyhole audit demo",
        "commit": show.commit(),
        "machine": show.machine(),
        "kept": quoted.WRITTEN,
        "note": "The scoring head has width 64.",
        "rows": [{"surface": "all", "outcome": verdict}, *rows],
    }
    page = DOCS / "index.md"
    place = re.compile(r"(```text\n)The weights can .*?(```)", re.DOTALL)
    shown = block(verdict, rows)
    page.write_text(place.sub(lambda m: f"{m[1]}{shown}{m[2]}", page.read_text("utf-8")), "utf-8")
    return json.dumps(data, indent=1, ensure_ascii=False) + "\n"


def block(verdict: str, rows: Sequence[dict[str, str]]) -> str:
    """The verdict and the chosen rows, as a terminal shows them."""
    form = "  {:<38} {:<17} {:>9} {:>9} {:>8} {:>9}".format
    lines = [*textwrap.wrap(verdict, 98), "", form(*COLUMNS), " " + "─" * 97]
    surface = ""
    for row in rows:
        if row["exposure"] in SHOWN:
            if row["surface"] != surface:
                lines.append(f"  {row['surface']}")
            surface = row["surface"]
            lines.append(form(f"  {row['exposure']}", *(row[column] for column in COLUMNS[1:])))
    return "\n".join(lines) + "\n"
