"""Every command's help ends with an example, and the examples run."""

from __future__ import annotations

import re
import shlex
from functools import partial
from pathlib import Path

import pytest

import tiny_models as tiny
from command_line import inside, parts
from keyhole.cli import COMMANDS
from tiny_classifiers import classifier

# What these attack gives something away.
SUCCEED = ("audit", "extract", "invert")


def code_of(line):
    """How an example ends here, where its files are tiny."""
    if line.split()[1:3] == ["lab", "bounds"]:
        return 0  # measures, and attacks nothing
    if line.split()[1] in SUCCEED or line.split()[1:3] == ["policy"]:
        return 1
    if "--certify 1" in line:
        return 0  # every unit is tried, and none flips these
    if line.strip().startswith(("keyhole disrupt ./my-class", "keyhole disrupt ./hardened")):
        return 3  # 1% of so few tokens is no unit at all: nothing could be checked
    return 0


@pytest.fixture
def here(tmp_path, monkeypatch, capsys):
    return partial(inside, cwd=tmp_path, monkeypatch=monkeypatch, capsys=capsys)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_ends_with_an_example(name, here):
    for words in parts(name):
        done = here(*words.split(), "--help")
        assert done.returncode == 0
        assert "Example:" in done.stdout.rstrip().rsplit("\n\n", 1)[-1]


@pytest.mark.timeout(600)  # the demo is audited whole
@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "serve"])
def test_the_examples_run(name, tmp_path, here):
    tiny.save("bert", tmp_path / "my-model")  # the examples' own
    tiny.save("llama", tmp_path / "language-model", head="AutoModelForCausalLM")
    classifier(tmp_path)
    (tmp_path / "texts.txt").write_text("w1 w2 w3\nw4 w5 w6 w7\n")
    (tmp_path / "texts.tsv").write_text("sentence\tlabel\nw1 w2 w3\t0\nw4 w5\t1\n")
    for words in parts(name):
        text = here(*words.split(), "--help").stdout
        lines = text.rsplit("Example:", 1)[1].strip().splitlines()
        assert lines
        for line in lines:
            done = here(*shlex.split(line)[1:])
            assert done.returncode == code_of(line), f"{line}: {done.stderr}"
            if line.strip().startswith("keyhole audit demo"):
                assert_said_on_the_start_page(done.stdout)


def assert_said_on_the_start_page(printed):
    """Its verdict, and of each row that it shows all but the error."""
    page = (Path(__file__).parents[2] / "docs" / "index.md").read_text("utf-8")
    (block,) = re.findall(r"```text\n(The weights can .*?)```", page, flags=re.DOTALL)
    verdict, table = block.split("\n\n", 1)
    assert " ".join(verdict.split()) in " ".join(printed.split())
    shown, rows = columns(table), columns(printed)
    assert len(shown) > 5
    for exposure, (severity, outcome, _, cost) in shown.items():
        measured, found, _, spent = rows[exposure]
        assert (severity, outcome, cost) == (measured, found, spent), exposure


def columns(table):
    rows = [re.split(r"\s{2,}", line.strip()) for line in table.splitlines()]
    return {row[1]: (row[0], *row[2:]) for row in rows if len(row) == 5 and row[0] != "severity"}
