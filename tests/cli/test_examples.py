"""Every command's help ends with an example, and the examples run."""

from __future__ import annotations

import shlex

import pytest

import tiny_models as tiny
from command_line import inside, keyhole
from keyhole.cli import app
from tiny_classifiers import classifier

COMMANDS = sorted(
    [command.name or command.callback.__name__ for command in app.registered_commands]
    + [f"{group.name} {command.name}" for group in app.registered_groups
       for command in group.typer_instance.registered_commands]
)  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_help_ends_with_an_example(command, tmp_path):
    done = keyhole(*command.split(), "--help", cwd=tmp_path)
    assert done.returncode == 0
    assert "Example:" in done.stdout.rstrip().rsplit("\n\n", 1)[-1]


@pytest.mark.timeout(600)  # the demo is audited whole
@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "serve"])
def test_the_examples_run(command, tmp_path, monkeypatch, capsys):
    tiny.save("bert", tmp_path / "my-model")  # the examples' own
    classifier(tmp_path)
    (tmp_path / "texts.txt").write_text("w1 w2 w3\nw4 w5 w6 w7\n")
    (tmp_path / "texts.tsv").write_text("sentence\tlabel\nw1 w2 w3\t0\nw4 w5\t1\n")

    def run(*arguments):
        return inside(*arguments, cwd=tmp_path, monkeypatch=monkeypatch, capsys=capsys)

    text = run(*command.split(), "--help").stdout
    lines = [shlex.split(line)[1:] for line in text.rsplit("Example:", 1)[1].strip().splitlines()]
    assert lines
    for arguments in lines:
        done = run(*arguments)
        assert done.returncode in (0, 1), done.stderr
