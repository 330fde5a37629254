"""What `keyhole lab defences` measures, as a record (docs/figures/defences.json) and as a table.

`python docs/generate.py figures/defences.json` runs the command and writes both, the table into
docs/defences.md.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import quoted
from keyhole.lab.defences import DefenceTable, Row

DOCS = Path(__file__).parent
TABLE = re.compile(r"\| it guards \|.*?\n(?=\n)", re.DOTALL)


def record(measured: Path | None = None) -> str:
    """The record of a run that was saved, or of one that is made now."""
    sys.path.insert(0, str(DOCS.parent / "benchmarks"))
    import show

    with tempfile.TemporaryDirectory() as folder:
        if measured is None:
            measured = Path(folder) / "defences.json"
            command = [sys.executable, "-m", "keyhole", "lab", "defences", "--out", str(measured)]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        found = DefenceTable.load(measured)
    page, rows = DOCS / "defences.md", [cells(row) for row in found.rows]
    page.write_text(TABLE.sub(lambda _: shown(rows), page.read_text("utf-8")), "utf-8")
    data = {
        "title": "Every defence, attacked by somebody who knows it",
        "command": "keyhole lab defences",
        "commit": show.commit(),
        "machine": show.machine(),
        "kept": quoted.WRITTEN,
        "note": f"{len(rows)} rows in {found.seconds:.0f} s.",
        "rows": rows,
        "runs": [
            {"row": f"{row.guards}: {row.defence}, {row.setting}", "items": [row.raw]}
            for row in found.rows
        ],
    }
    return json.dumps(data, indent=1, ensure_ascii=False) + "\n"


def shown(rows: list[dict[str, str]]) -> str:
    """The table of the page: each defence; what is read without one is left to the record."""
    lines = [["it guards", "defence", "attacker", "honest users lose", "verdict"]]
    before = ""
    for row in rows:
        if row["defence"] in ("none", "no defence"):
            continue
        guards, verdict = row["it guards"], re.split("[:;]", row["verdict"])[0]
        setting = "" if guards == "weights" else row["parameters"].replace("δ = 1e-05, ", "")
        defence = ": ".join(filter(None, [row["defence"], setting]))
        named = "" if guards == before else guards
        lines.append([named, defence, row["attacker"], row["honest users lose"], verdict])
        before = guards
    head, *rest = (f"| {' | '.join(line)} |\n" for line in lines)
    return "".join([head, "|---" * len(lines[0]) + "|\n", *rest])


def cells(row: Row) -> dict[str, str]:
    return {
        "it guards": row.guards, "defence": row.defence, "parameters": row.setting,
        "attack": row.attack, "attacker": row.attacker,
        "honest users lose": row.honest, "time": f"×{row.factor:.1f}",
        "verdict": f"{row.verdict}: {row.proof}" if row.proof else str(row.verdict),
    }  # fmt: skip
