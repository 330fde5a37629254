"""How much code there is, and that no line was won by packing it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))
import weight

ROOT = Path(__file__).parent.parent

MAX_TOKENS = {"src": 450_000, "tests": 360_000, "benchmarks": 72_000}
MAX_PAIRS = {"src": 20, "tests": 20, "benchmarks": 20}
MAX_DENSITY = 8.7  # tokens a line of src that holds code
MAX_CONDITIONALS = 2.0  # conditional expressions per 1,000 tokens of src
MAX_MODULE = 6_500  # tokens: one idea, whole
FOLDERS = ("src", "tests", "benchmarks", "docs", "training")


@pytest.fixture(scope="module")
def counts():
    return {folder: weight.weigh(ROOT / folder) for folder in FOLDERS}


def test_nobody_overrules_the_formatter(counts):
    assert {
        folder: count["overruled"] for folder, count in counts.items()
    } == dict.fromkeys(FOLDERS, 0)


def test_the_weight_stays_within_its_limits(counts):
    over = {
        folder: counts[folder]["tokens"]
        for folder, limit in MAX_TOKENS.items()
        if counts[folder]["tokens"] > limit
    }
    assert not over


def test_one_statement_assigns_one_value(counts):
    over = {
        folder: counts[folder]["pairs"]
        for folder, limit in MAX_PAIRS.items()
        if counts[folder]["pairs"] > limit
    }
    assert not over


def test_lines_of_the_source_are_not_packed(counts):
    assert weight.density(counts["src"]) <= MAX_DENSITY
    assert weight.conditionals(counts["src"]) <= MAX_CONDITIONALS


def test_a_module_holds_one_idea():
    heavy = {
        str(path.relative_to(ROOT)): tokens
        for path in (ROOT / "src").rglob("*.py")
        if (tokens := weight.weigh_file(path)["tokens"]) > MAX_MODULE
    }
    assert not heavy


def test_layout_and_documentation_weigh_nothing(tmp_path):
    plain = tmp_path / "plain.py"
    plain.write_text("a, b = 1, 2\nc = a if b else 3\n", "utf-8")
    spread = tmp_path / "spread.py"
    spread.write_text(
        '"""What this is."""\n\n# why\na, b = 1, 2\nc = (\n    a if b else 3\n)\n',
        "utf-8",
    )
    first = weight.weigh_file(plain)
    second = weight.weigh_file(spread)
    assert (first["tokens"], first["pairs"], first["conditionals"]) == (14, 1, 1)
    assert second["tokens"] == first["tokens"] + 2  # the brackets
    assert (first["holding"], second["holding"]) == (2, 4)
    overruling = tmp_path / "overruling.py"
    overruling.write_text("a = 1  # fmt" + ": skip\n", "utf-8")
    assert weight.weigh_file(overruling)["overruled"] == 1
