"""The table in docs/defences.md, from the record that benchmarks/defences.py writes.

`python docs/generate.py figures/defences.json` measures it again, and writes the record
(docs/figures/defences.json) and the table.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

DOCS = Path(__file__).parent
TABLE = re.compile(r"\| it guards \|.*?\n(?=\n)", re.DOTALL)
COLUMNS = ("attacker", "honest users lose", "verdict")


def record() -> str:
    """Run the benchmark, return its record, and write the table into the page."""
    with tempfile.TemporaryDirectory() as folder:
        measured = Path(folder) / "defences.json"
        program = DOCS.parent / "benchmarks" / "defences.py"
        command = [sys.executable, str(program), "--json", str(measured)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        text = measured.read_text("utf-8")
    page = DOCS / "defences.md"
    made = table(json.loads(text)["runs"])
    page.write_text(TABLE.sub(lambda _: made, page.read_text("utf-8")), "utf-8")
    return text


def table(runs: Sequence[dict[str, str]]) -> str:
    """Return the page's table of defences; rows without a defence are only in the record."""
    lines = [["it guards", "defence", *COLUMNS]]
    before = ""
    for run in runs:
        if run["defence"] in ("none", "no defence"):
            continue
        guards = run["it guards"]
        setting = "" if guards == "weights" else run["parameters"]
        setting = setting.replace("δ = 1e-05, ", "").removesuffix(", δ = 1e-05")
        defence = ": ".join(filter(None, [run["defence"], setting]))
        cells = {**run, "verdict": re.split("[:;]", run["verdict"])[0]}
        named = "" if guards == before else guards
        lines.append([named, defence, *(cells[column] for column in COLUMNS)])
        before = guards
    head, *rest = (f"| {' | '.join(line)} |\n" for line in lines)
    return "".join([head, "|---" * len(lines[0]) + "|\n", *rest])
