"""Every command's help ends with examples, which can be run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import tiny_models as tiny
from command_line import parts
from keyhole.cli.app import ORDER
from tiny_classifiers import classifier

# what these attack is given away
SUCCEED = ("audit", "extract", "recover", "invert", "policy")
SLOW = (
    "keyhole audit demo",
    "keyhole harden",
    "keyhole disrupt demo",
)


def codes_of(line):
    """The exit codes that an example may end with on tiny files."""
    if line.split()[1] in SUCCEED:
        return {1}
    if line.startswith("keyhole lab certify"):
        # an untrained model may be right about both texts or not, as it rounds
        return {0, 3}
    if line.startswith(("keyhole disrupt ./my-class", "keyhole disrupt ./hardened")):
        return {3}  # 1% of so few tokens is no unit at all: nothing could be checked
    return {0}


EXAMPLES = {
    title: [line.strip() for line in (made.epilog or "").splitlines()[1:]]
    for name in ORDER
    for title, made in parts(name).items()
}


def test_every_help_ends_with_an_example(keyhole):
    assert all(EXAMPLES.values())
    for words in ("audit", "lab plant"):
        shown = keyhole(words, "--help").stdout.split()  # lines may be broken
        assert " ".join(shown).endswith(EXAMPLES[words][-1])


def run_all(lines, folder, keyhole):
    tiny.save("bert", folder / "my-model")  # the examples' own
    tiny.save("llama", folder / "language-model", head="AutoModelForCausalLM")
    classifier(folder)
    (folder / "texts.txt").write_text("w1 w2 w3\nw4 w5 w6 w7\n")
    (folder / "texts.tsv").write_text("sentence\tlabel\nw1 w2 w3\t0\nw4 w5\t1\n")
    for line in lines:
        done = keyhole(line.removeprefix("keyhole "))
        assert done.returncode in codes_of(line), f"{line}: {done.stderr}"
        if line.startswith("keyhole audit demo"):
            assert_said_on_the_start_page(done.stdout)


@pytest.mark.release
@pytest.mark.parametrize("name", EXAMPLES)
def test_the_examples_run(name, tmp_path, keyhole):
    fast = [line for line in EXAMPLES[name] if not line.startswith(SLOW)]
    run_all([] if "hardened" in "".join(fast) else fast, tmp_path, keyhole)


@pytest.mark.release
@pytest.mark.timeout(600)  # the demo is audited whole
@pytest.mark.parametrize("name", ["audit", "disrupt", "harden"])
def test_the_slow_examples_run(name, tmp_path, keyhole):
    run_all(EXAMPLES[name], tmp_path, keyhole)


def assert_said_on_the_start_page(printed):
    """Return its verdict, and each row without the error."""
    page = (Path(__file__).parents[2] / "docs" / "index.md").read_text("utf-8")
    (block,) = re.findall(r"```text\n(The weights can .*?)```", page, flags=re.DOTALL)
    verdict, table = block.split("\n\n", 1)
    assert " ".join(verdict.split()) in " ".join(printed.split())
    shown = columns(table)
    rows = columns(printed)
    assert len(shown) > 5
    for exposure, (severity, outcome, _, cost) in shown.items():
        measured, found, _, spent = rows[exposure]
        assert (severity, outcome, cost) == (measured, found, spent), exposure


def columns(table):
    rows = [re.split(r"\s{2,}", line.strip()) for line in table.splitlines()]
    return {
        row[1]: (row[0], *row[2:])
        for row in rows
        if len(row) == 5 and row[0] != "severity"
    }
