"""The Tab key: commands, options and methods; where it has nothing to say, names of files."""

from __future__ import annotations

import json
import os
import runpy
import shutil

import pytest
from keyhole.cli.completion import proposals, table

from command_line import KEYHOLE, PYTHON, finished
from keyhole.cli import COMMANDS
from keyhole.extract.registry import METHODS

BASH = shutil.which("bash")


def completed(line, shell, tmp_path, **environment):
    """What a shell is told where the cursor stands at the end of a line."""
    words = line.split(" ")
    asked = {
        "_KEYHOLE_COMPLETE": f"complete_{shell}", "COMP_WORDS": line,
        "COMP_CWORD": str(len(words) - 1), "_TYPER_COMPLETE_ARGS": line,
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }  # fmt: skip
    done = finished(KEYHOLE, cwd=tmp_path, env=os.environ | asked | environment)
    assert not done.stderr
    return done


def test_the_table_is_up_to_date(root):
    made = json.loads(runpy.run_path(str(root / "docs" / "commands.py"))["completion_table"]())
    assert made == table(), "cli/completion.json is out of date: run `make docs`"


def test_every_command_is_there():
    assert {name.partition(" ")[0] for name in table()} == set(COMMANDS)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("extract --method sin", ["single-head"]),
        ("extract --method = sin", ["single-head"]),
        ("extract t.safetensors --against", ["--against-defences"]),
        ("extract --json --against", ["--against-defences"]),
        ("extract --ledger ", []),
        ("audit de", []),
        ("audit --texts ", ["all"]),
        ("invert te", ["text"]),
        ("invert text --method cached", ["cached-keys"]),
        ("invert problem.safetensors --method newt", ["newton-cg"]),
        ("invert layers stack.safetensors --bra", ["--branches"]),
        ("harden --mode ", ["unit", "token"]),
    ],
)
def test_proposals(line, words):
    name, *before, incomplete = line.split(" ")
    assert proposals(name, before, incomplete) == words


def test_all_methods_are_proposed():
    assert proposals("extract", ["--method"], "") == list(METHODS)


@pytest.mark.parametrize(
    ("shell", "told"),
    [
        ("bash", "single-head\n"),
        ("zsh", "_arguments '*: :((\"single-head\"))'\n"),
        ("fish", "single-head\n"),
    ],
)
def test_shells_are_told(shell, told, tmp_path):
    assert completed("keyhole extract --method sin", shell, tmp_path).stdout == told


@pytest.mark.parametrize(("shell", "told"), [("bash", "\n"), ("zsh", "_files\n")])
def test_names_of_files_are_left_to_the_shell(shell, told, tmp_path):
    assert completed("keyhole audit mod", shell, tmp_path).stdout == told


def test_fish_completes_names_of_files_itself(tmp_path):
    done = completed("keyhole audit m", "fish", tmp_path, _TYPER_COMPLETE_FISH_ACTION="is-args")
    assert done.returncode == 1


@pytest.mark.skipif(BASH is None, reason="bash is not installed")
def test_in_bash(tmp_path):
    """The script that --show-completion prints, in the shell that it is for."""
    script = f"""


mkdir bin
printf '#!/bin/sh\\nexec {" ".join(KEYHOLE)} "$@"' > bin/keyhole
chmod +x bin/keyhole
export PATH="$PWD/bin:$PATH"
eval "$(_KEYHOLE_COMPLETE=source_bash keyhole)"
COMP_WORDS=(keyhole disrupt demo --meth) COMP_CWORD=3
_keyhole_completion keyhole
echo "${{COMPREPLY[@]}}"
complete -p keyhole
"""
    done = finished([BASH, "-c", script], cwd=tmp_path)
    assert done.stdout.splitlines() == [
        "--method", "complete -o default -F _keyhole_completion keyhole"
    ], done.stderr  # fmt: skip


def test_nobody_waits_for_torch(tmp_path):
    code = "import sys; from keyhole.cli import main\ntry: main()\nfinally: "
    code += "print('torch' in sys.modules)"
    words = "keyhole extract --method sin"
    asked = {"_KEYHOLE_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": "3"}
    done = finished([*PYTHON, "-c", code], cwd=tmp_path, env=os.environ | asked)
    assert done.stdout == "single-head\nFalse\n", done.stderr
