"""`keyhole COMMAND --help`: what the command says of itself, without waiting for torch."""

from __future__ import annotations

import json
import runpy
import sys
from functools import cache

import pytest
from keyhole.cli.described import Described, DescribedGroup, described, table

from command_line import PYTHON, finished, inside
from keyhole.cli import COMMANDS, app
from keyhole.cli.app import command

HEAVY = ("torch", "transformers", "numpy", "plotly", "jinja2")
SAID = """
import contextlib, io, json, sys
from keyhole.cli import app
said = {}
for title in json.loads(sys.argv[1]):
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        app([*title.split(), "--help"], prog_name="keyhole")
    said[title] = [out.getvalue(), [name for name in sys.argv[2:] if name in sys.modules]]
print(json.dumps(said))
"""


@cache
def loaded(name):
    return command(name)


def real(title):
    """The command itself, loaded."""
    name, _, part = title.partition(" ")
    return loaded(name).commands[part] if part else loaded(name)


def helped(stand_in, title, width):
    context = stand_in.context_class(stand_in, info_name=f"keyhole {title}", terminal_width=width)
    return stand_in.get_help(context)


def test_the_table_is_up_to_date(root):
    made = runpy.run_path(str(root / "docs" / "commands.py"))["help_table"]()
    assert json.loads(made) == table(), "cli/help.json is out of date: run `make docs`"
    assert {title.partition(" ")[0] for title in table()} == set(COMMANDS)


@pytest.mark.parametrize("title", table())
def test_a_command_is_described_as_it_describes_itself(title):
    stand_in = (DescribedGroup if table()[title]["Commands"] else Described)(title)
    for width in (40, 80, 160):
        assert helped(stand_in, title, width) == helped(real(title), title, width)


def test_no_help_loads_torch(tmp_path, monkeypatch):
    """All of them in a fresh process: none is loaded when the next is asked."""
    monkeypatch.setenv("COLUMNS", "80")
    done = finished([*PYTHON, "-c", SAID, json.dumps(list(table())), *HEAVY], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for title, (said, heavy) in json.loads(done.stdout).items():
        assert heavy == [], title
        assert said.startswith(f"Usage: keyhole {title} ["), title


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("report --help", "report"),
        ("report x.json --force --help", "report"),
        ("report -- --help", None),
        ("report x.json", None),
        ("policy --help", "policy"),
        ("policy check --help", "policy check"),
        ("policy check x.json --json --help", "policy check"),
        ("policy --nonsense --help", None),  # the command says what is wrong with that
        ("invert x.safetensors --help", None),  # which is `invert problem`
    ],
)
def test_what_asks_for_help(words, name, monkeypatch):
    command_name, *others = words.split()
    monkeypatch.delitem(sys.modules, f"keyhole.cli.{command_name}", raising=False)
    stand_in = described(command_name, others)
    assert (None if stand_in is None else stand_in.name) == name


def test_a_command_that_is_loaded_speaks_for_itself(tmp_path, monkeypatch, capsys):
    command("report")
    assert described("report", ["--help"]) is None
    done = inside("report", "--help", cwd=tmp_path, monkeypatch=monkeypatch, capsys=capsys)
    assert done.returncode == 0
    assert done.stdout.startswith("Usage: keyhole report [OPTIONS]")
    with pytest.raises(SystemExit) as end:
        app(["report", "--no-such-option"])
    assert end.value.code == 2
