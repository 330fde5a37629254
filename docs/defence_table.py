"""The results of `keyhole lab defences`, as a record (docs/figures/defences.json) and as a table.

`python docs/generate.py figures/defences.json` runs the command, and writes the record
and the table in docs/defences.md.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import show
from keyhole.lab.defences import DefenceTable, Row

DOCS = Path(__file__).parent
TABLE = re.compile(r"\| it guards \|.*?\n(?=\n)", re.DOTALL)


def record() -> str:
    """Run the command, return its record, and write the table into the page."""
    with tempfile.TemporaryDirectory() as folder:
        measured = Path(folder) / "defences.json"
        command = [
            sys.executable,
            "-m",
            "keyhole",
            "lab",
            "defences",
            "--out",
            str(measured),
        ]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        found = DefenceTable.load(measured)
    page = DOCS / "defences.md"
    rows = [cells(row) for row in found.rows]
    page.write_text(TABLE.sub(lambda _: table(rows), page.read_text("utf-8")), "utf-8")
    data = {
        **show.origin(
            "Every defence, attacked by somebody who knows it", "keyhole lab defences"
        ),
        "note": f"{len(rows)} rows in {found.seconds:.0f} s.",
        "rows": rows,
        "runs": [
            {"row": f"{row.guards}: {row.defence}, {row.setting}", "items": [row.raw]}
            for row in found.rows
        ],
    }
    return json.dumps(data, indent=1, ensure_ascii=False) + "\n"


def table(rows: list[dict[str, str]]) -> str:
    """Return the page's table of defences; rows without a defence are only in the record."""
    lines = [["it guards", "defence", "attacker", "honest users lose", "verdict"]]
    before = ""
    for row in rows:
        if row["defence"] in ("none", "no defence"):
            continue
        guards = row["it guards"]
        verdict = re.split("[:;]", row["verdict"])[0]
        if guards == "weights":
            setting = ""
        else:
            setting = row["parameters"].replace("δ = 1e-05, ", "")
        defence = ": ".join(filter(None, [row["defence"], setting]))
        named = "" if guards == before else guards
        lines.append(
            [named, defence, row["attacker"], row["honest users lose"], verdict]
        )
        before = guards
    head, *rest = (f"| {' | '.join(line)} |\n" for line in lines)
    return "".join([head, "|---" * len(lines[0]) + "|\n", *rest])


def cells(row: Row) -> dict[str, str]:
    return {
        "it guards": row.guards,
        "defence": row.defence,
        "parameters": row.setting,
        "attack": row.attack,
        "attacker": row.attacker,
        "honest users lose": row.honest,
        "time": f"×{row.factor:.1f}",
        "verdict": f"{row.verdict}: {row.proof}" if row.proof else str(row.verdict),
    }
