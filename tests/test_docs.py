"""What the documents say is what the code does."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

import warm_process
from command_line import parts
from keyhole.cli.app import ORDER

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
OPTIONS = {
    name: {word for parameter in command.params for word in parameter.opts}
    for top in ORDER
    for name, command in parts(top).items()
}


def test_the_options_can_be_kept_in_mind():
    """Nine commands, and at most 63 names of options, with --help, over all of them."""
    reference = runpy.run_path(str(ROOT / "docs" / "commands.py"))
    assert len(ORDER) == 9
    assert len(reference["option_names"]()) <= 63


def snippets(language: str) -> list[tuple[str, str]]:
    found = []
    for path in DOCUMENTS:
        text = path.read_text("utf-8")
        blocks = re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.M | re.S)
        found += [
            (f"{path.name} {number}", block) for number, block in enumerate(blocks)
        ]
    return found


PYTHON = snippets("python")


def test_the_readme_has_an_example():
    assert any(name.startswith("README") for name, _ in PYTHON)


@pytest.mark.release
@pytest.mark.parametrize(("name", "code"), PYTHON, ids=[name for name, _ in PYTHON])
def test_python_examples_run(name, code, tmp_path):
    done = warm_process.finished(warm_process.code, code, cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr
    promised = re.findall(r"# prints (.*)", code)
    for line in promised:
        assert line in done.stdout


def anchors(path: Path) -> set[str]:
    """The places that a link into a document may name, as forges and the site make them."""
    text = re.sub(r"^```.*?^```", "", path.read_text("utf-8"), flags=re.M | re.S)
    titles = re.findall(r"^#+ (.*)$", text, flags=re.M)
    plain = [
        re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", title).lower() for title in titles
    ]
    return {re.sub(r"[^\w\- ]", "", title).strip().replace(" ", "-") for title in plain}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path):
    text = re.sub(r"^```.*?^```", "", path.read_text("utf-8"), flags=re.M | re.S)
    for target, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", text):
        if target.startswith("http"):
            continue
        place = path.parent / target if target else path
        assert place.exists(), f"{path.name}: {target}"
        if anchor:
            assert anchor in anchors(place), f"{path.name}: {target}#{anchor}"


def test_a_link_to_nowhere_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# The `best` k, *and* why\n\n[here](#the-best-k-and-why)\n")
    test_links_lead_somewhere(page)
    for link in ("#the-best", "other.md", "page.md#why"):
        page.write_text(f"# The `best` k\n\n[there]({link})\n")
        with pytest.raises(AssertionError):
            test_links_lead_somewhere(page)


def test_what_is_generated_is_up_to_date():
    generate = runpy.run_path(str(ROOT / "docs" / "generate.py"))
    for name, text in generate["TEXTS"].items():
        made = (ROOT / "docs" / name).read_text("utf-8")
        assert made == text(), f"docs/{name} is out of date: run `make docs`"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_files_that_documents_name_exist(path):
    folders = "benchmarks|ci|docs|src|tests|training"
    for name in re.findall(
        rf"`((?:{folders})/[\w/.-]+\.\w+)`", path.read_text("utf-8")
    ):
        assert (ROOT / name).exists(), f"{path.name}: {name}"


def shown_commands(text: str) -> list[str]:
    """The `keyhole …` lines of fenced blocks, and those within a sentence."""
    text = re.sub(r"\\\n\s*", " ", text)
    blocks = re.findall(r"^```(?:console|sh|text)\n(.*?)^```", text, flags=re.M | re.S)
    lines = re.findall(r"^(?:\$ )?(keyhole [a-z].*)$", "".join(blocks), flags=re.M)
    prose = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    return [re.split(r" #| \| ", line)[0] for line in lines] + [
        " ".join(span.split()) for span in re.findall(r"`(keyhole\s[a-z][^`]*)`", prose)
    ]


def unknown_options(line: str) -> list[str]:
    """Of a command that a document shows, the options that it does not have."""
    words = line.split()[1:]
    names = (" ".join(words[:2]), words[0])
    known = next((OPTIONS[name] for name in names if name in OPTIONS), {})
    options = [word for word in words if re.match(r"--\w", word)]
    return [option for option in options if option not in {*known, "--help"}]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_commands_that_documents_show_have_these_options(path):
    for line in shown_commands(path.read_text("utf-8")):
        assert not unknown_options(line), f"{path.name}: {line}"


def test_an_option_that_a_command_does_not_have_is_seen():
    fence = "```sh\n$ keyhole lab certify demo --wide 8  # here\n```\n"
    shown = shown_commands(f"Try `keyhole recover\ndemo FILE --noise 1`.\n\n{fence}")
    assert [unknown_options(line) for line in shown] == [["--wide"], []]


# every numbered statement that the papers' texts hold or refer to as their own
NUMBERED = {
    "Provably Learning Attention with Queries": (
        "Theorem 4.1",
        "Theorem 5.1",
        "Theorem 6.1",
        "Proposition 7.1",
        "Lemma A.1",
        "Theorem A.2",
        "Theorem B.1",
        "Assumption C.1",
        "Proposition C.2",
    ),
    "Unmasking Transformers": (
        "Definition 1.1",
        "Definition 1.2",
        "Theorem 1.3",
        "Definition 4.1",
        "Definition 4.2",
        "Definition 4.3",
        "Lemma 4.4",
        "Lemma 4.5",
        "Definition 4.6",
        "Definition B.8",
        "Definition B.9",
        "Assumption G.1",
        "Lemma H.10",
        "Theorem J.1",
    ),
}


HEADER = ["in the paper", "as published", "ours", "measured", "departure"]


def statements(paper: str) -> list[list[str]]:
    """The rows of the table of a paper's statements."""
    text = (ROOT / "docs" / "papers.md").read_text("utf-8")
    section = text.split(f"\n## {paper}\n")[1].split("\n## ")[0]
    table = section.split(f"| {' | '.join(HEADER)} |\n")[1].split("\n\n")[0]
    return [
        [cell.strip() for cell in row.strip().strip("|").split("|")]
        for row in table.splitlines()[1:]
    ]


@pytest.mark.parametrize("paper", NUMBERED)
def test_every_numbered_statement_is_told_in_full(paper):
    """As published with its module and test, ours, what was measured; a cell for departures."""
    rows = statements(paper)
    assert all(len(row) == len(HEADER) for row in rows)
    for statement in NUMBERED[paper]:
        named = re.compile(rf"\b{re.escape(statement)}(?![\d.]*\d)")
        row = next((row for row in rows if named.search(row[0])), None)
        assert row is not None, statement
        assert "`src/" in row[1], statement
        assert "`tests/" in row[1], statement
        assert row[2], statement
        assert row[3], statement


def test_every_open_question_has_a_line():
    """Three of Section 7.1, and the three that the second paper leaves to others."""
    for paper in NUMBERED:
        lines = [row for row in statements(paper) if row[0].startswith("Open question")]
        assert len(lines) == 3
        assert all(any(row[1:4]) for row in lines)
