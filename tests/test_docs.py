"""What the documents say is what the code does."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

import warm_process
from command_line import parts
from keyhole.cli.app import COMMANDS

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


def test_the_command_line_reference_is_up_to_date():
    generate = runpy.run_path(str(ROOT / "docs" / "generate.py"))
    assert set(generate["ORDER"]) == {
        *COMMANDS,
        *(part for name in COMMANDS for part in parts(name)),
    }
    assert (ROOT / "docs" / "cli.md").read_text("utf-8") == generate["cli_reference"](), (
        "docs/cli.md is out of date: run `make docs`"
    )


def snippets(language: str) -> list[tuple[str, str]]:
    found = []
    for path in DOCUMENTS:
        text = path.read_text("utf-8")
        blocks = re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.M | re.S)
        found += [(f"{path.name} {number}", block) for number, block in enumerate(blocks)]
    return found


PYTHON = snippets("python")


def test_the_readme_has_an_example():
    assert any(name.startswith("README") for name, _ in PYTHON)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "code"), PYTHON, ids=[name for name, _ in PYTHON])
def test_python_examples_run(name, code, tmp_path):
    done = warm_process.finished(warm_process.code, code, cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr
    promised = re.findall(r"# prints (.*)", code)
    for line in promised:
        assert line in done.stdout


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", path.read_text("utf-8")):
        if not target.startswith("http"):
            assert (path.parent / target).exists(), f"{path.name}: {target}"


def test_files_named_in_the_papers_table_exist():
    text = (ROOT / "docs" / "papers.md").read_text("utf-8")
    for name in re.findall(r"`((?:src|tests|benchmarks)/[\w/.]+)`", text):
        assert (ROOT / name).exists(), name
