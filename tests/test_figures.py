"""Every measured figure that a document quotes is in a record that can be made again."""

from __future__ import annotations

import json
import re
from decimal import Decimal
from pathlib import Path

import pytest

import quoted

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
# In these every paragraph with a number says where it comes from; in the others every
# table, and every paragraph that names a program of measurements or a commit.
STRICT = {
    ROOT / "README.md",
    ROOT / "docs" / "index.md",
    ROOT / "docs" / "threats.md",
}

# To be measured again on a GPU; each record says why it still stands.
NOT_YET_AGAIN = {"disrupt-minilm", "disrupt-smollm2"}
# Records of which every row is one run, one time or one count; or planted weights with
# fixed seeds, which need nothing but this repository: the command gives every item
# again, digit for digit.
ROWS_ARE_ITEMS = {
    "demo",
    "embeddings-secrets-minilm",
    "embeddings-secrets-mpnet",
    "embeddings-secrets-nomic",
    "embeddings-speed",
    "error_against_queries",
    "one_layer",
    "orthogonal_heads",
    "protection-nobody",
    "published_theorems",
}
# What the rows of a record were made from, by the command's --join.
JOINED = {
    "disrupt-ablations": "disrupt-ablations.json",
    "disrupt-ablations-minilm": "disrupt-ablations-minilm.json",
    "tasks": "disrupt-tasks-minilm.json",
    "tasks-factors": "disrupt-tasks-minilm.json",
}
WORDS = (
    "what",
    "details",
    "target",
    "fix",
    "part",
    "outcome",
)  # of a row, besides its figures

NAMED = re.compile(
    r"`[^`]*(?:(?:benchmarks|training)/\w+\.py|\w+\.py --)[^`]*`|commit [0-9a-f]{7}"
)


def lacking(block: quoted.Block) -> list[str]:
    """The numbers of a marked block that its records do not have. A row of a table must
    be in one row of a record that is itself a table, or somewhere in those that
    commands wrote.
    """
    records = [quoted.Record.load(name) for name in block.records]
    in_one_row = block.table and all(
        record.kept == quoted.TRANSCRIBED for record in records
    )
    missing = []
    for line in block.lines:
        for record in records:
            line = record.missing(line, in_one_row=in_one_row)
        missing += line
    return missing


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_quoted_figures_are_in_their_records(document):
    for block in quoted.blocks(document):
        if block.records:
            assert not lacking(block), (
                f"{block.place}: not in {', '.join(block.records)}"
            )


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_measurements_are_marked(document):
    for block in quoted.blocks(document):
        wanted = block.table or document in STRICT or NAMED.search(block.text)
        if wanted and block.measured:
            assert block.records or block.reason, (
                f"{block.place}: figures without a mark"
            )
        assert not block.reason or len(block.reason.split()) > 2, (
            f"{block.place}: no reason"
        )


def test_figures_that_people_read_rest_on_raw_rows():
    """What was measured before raw rows were kept is named, with a reason, and quoted
    at most by the page that compares with papers.
    """
    pages = [
        path for path in DOCUMENTS if path.name not in ("benchmarks.md", "papers.md")
    ]
    read = {
        name
        for path in pages
        for block in quoted.blocks(path)
        for name in block.records
    }
    records = {record.name: record for record in quoted.all_records()}
    old = {
        name for name, record in records.items() if record.kept == quoted.TRANSCRIBED
    }
    assert old == NOT_YET_AGAIN
    assert not old & read
    for name in old:
        assert len(records[name].reason.split()) > 5, (
            f"{name}: why is it not measured again?"
        )


@pytest.mark.parametrize("record", quoted.all_records(), ids=lambda record: record.name)
def test_records_have_raw_rows(record):
    """What each item gave is under `runs`, in a file that the command joins, or the rows are it."""
    if record.name in NOT_YET_AGAIN:
        return
    assert record.kept == quoted.WRITTEN
    if raw := JOINED.get(record.name):
        assert json.loads((ROOT / "docs" / raw).read_text("utf-8"))
    else:
        assert record.runs or record.name in ROWS_ARE_ITEMS
    assert not (record.runs and record.name in ROWS_ARE_ITEMS), "no longer needed"


@pytest.mark.parametrize("record", quoted.all_records(), ids=lambda record: record.name)
def test_rows_are_measurements_and_no_prose(record):
    for row in record.rows:
        for value in (str(value) for name, value in row.items() if name not in WORDS):
            assert len(value.split()) <= 20, f"{record.name}: {value}"


def test_records_name_no_place_of_a_machine():
    for path in quoted.FIGURES.glob("*.json"):
        text = path.read_text("utf-8")
        assert "/home/" not in text, path.name
        assert "/tmp/" not in text, path.name
        assert "/work/" not in text, path.name


def test_benchmarks_write_records(tmp_path, monkeypatch):
    """What `--json` writes can be copied into docs/figures as it is."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import show

    monkeypatch.setattr("sys.argv", ["toy.py", "--json", str(tmp_path / "toy.json")])
    items = [{"seed": 0, "error": 1.5e-12}]
    row = show.Row("error, d=8", "1.5e-12", "<= 1e-9", True, items=items)
    show.main(lambda quick: [row], "A toy")
    monkeypatch.setattr(quoted, "FIGURES", tmp_path)
    record = quoted.Record.load("toy")
    assert record.command == "python benchmarks/toy.py"
    assert not record.missing(["8", "1.5e-12"])
    assert record.runs == [{"row": row.what, "items": items}]
    words = [
        "/x/toy.py",
        "--model",
        "/somewhere/minilm",
        "--json=rows.json",
        "--texts",
        "3",
    ]
    assert show.command(words) == "python benchmarks/toy.py --model minilm --texts 3"
    assert show.command(["/x/peers/toy.py"]) == "python benchmarks/peers/toy.py"


def document(folder: Path, text: str) -> list[quoted.Block]:
    (folder / "document.md").write_text(text)
    return list(quoted.blocks(folder / "document.md"))


RECORD = {
    "title": "A toy",
    "command": "python toy.py",
    "commit": "1234567",
    "machine": "a machine",
    "kept": quoted.TRANSCRIBED,
    "rows": [
        {"tokens": "4–9", "exact": "71 of 72"},
        {"tokens": "10–16", "exact": "99 of 100"},
    ],
}


@pytest.mark.parametrize(
    ("table", "missing"),
    [
        ("| 4–9 | 71 of 72 |", []),
        (
            "| 4–9 | 72 of 72 |",
            [],
        ),  # the same numbers in another order: what this cannot see
        ("| 4–9 | 70 of 72 |", ["70"]),
        ("| 4–9 | 99 of 72 |", ["99"]),  # another row's figure
        ("| `10`, SST-2, arXiv 2402.16470 | 99 of 100 |", []),
    ],
)
def test_a_wrong_figure_is_found(table, missing, tmp_path, monkeypatch):
    monkeypatch.setattr(quoted, "FIGURES", tmp_path)
    (tmp_path / "toy.json").write_text(json.dumps(RECORD))
    text = f"<!-- figures: toy -->\n\n| tokens | exact |\n|---|---|\n{table}\n"
    (block,) = document(tmp_path, text)
    assert block.measured
    assert lacking(block) == missing


def test_a_table_without_a_mark_is_found(tmp_path):
    settings, marked, bare = document(
        tmp_path,
        "| option | what |\n|---|---|\n| `--rate 20` | how fast |\n\n"
        "<!-- not measured: defaults of the command -->\n\n"
        "| option | value |\n|---|---|\n| a | 3 |\n\n"
        "| attack | flips |\n|---|---|\n| ours | 77.0% |\n",
    )
    assert not settings.measured
    assert marked.measured
    assert marked.reason
    assert bare.measured
    assert not bare.reason
    assert not bare.records


@pytest.mark.parametrize(
    ("written", "value", "same"),
    [
        ("4160", "4160", True),
        ("4160", "4161", False),
        ("2.4e-15", "2.43e-15", True),
        ("2.4e-15", "2.46e-15", False),
        ("77.0", "76.98", True),
        ("77.0", "77.1", False),
        ("25", "25.2", True),
        ("3", "3.2", False),
        ("0", "0.4", False),
    ],
)
def test_numbers_agree_to_the_digits_written(written, value, same):
    assert quoted.agree(written, Decimal(value)) is same


def test_numbers_are_told_from_names_versions_and_papers():
    text = "SST-2, L6-v2, 0.1.0, d384d74, 60,000 of 1e-3 at 10–16, −0.38 and 3 min."
    assert quoted.numbers(text) == ["60000", "1e-3", "10", "16", "0.38", "3"]
