"""Type checkers know the library, although its packages are imported on demand."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from command_line import finished

pytestmark = pytest.mark.release  # a process that reads all of the source

RIGHT = """
from typing import assert_type
import keyhole
from keyhole import extract, recover
from keyhole.audit import Target, open_target

audit = keyhole.audit("demo")
assert_type(audit, keyhole.core.Audit)
assert_type(open_target("demo"), Target)
assert_type(keyhole.report.render(audit), str)
assert_type(keyhole.extract.run("target.safetensors"), extract.Extraction)
assert_type(extract.LowRank()(keyhole.oracle.plant(dim=3)), extract.Extraction)
assert_type(keyhole.invert.run("problem.safetensors"), keyhole.invert.Inversion)
assert_type(keyhole.recover.run("demo", ["leak.safetensors"]), list[recover.TextRecovery])
assert_type(keyhole.invert.recover_text(None, None, None), recover.TextRecovery)
assert_type(keyhole.disrupt.run("demo"), keyhole.disrupt.Disruption)
assert_type(keyhole.harden.run("demo", "train.tsv", "out"), keyhole.harden.Hardening)
assert_type(keyhole.__version__, str)
"""
WRONG = """
import keyhole
keyhole.nothing
keyhole.invert.nothing
keyhole.audit(3.5)
keyhole.report.render("audit.json", 3)
"""


@pytest.fixture(scope="module")
def complaints(tmp_path_factory) -> dict[str, list[int]]:
    """The lines of two programs in which pyright, in strict mode, finds errors."""
    folder = tmp_path_factory.mktemp("programs")
    source = Path(__file__).parent.parent / "src"
    for name, code in (("right", RIGHT), ("wrong", WRONG)):
        (folder / f"{name}.py").write_text(code, "utf-8")
    settings = {
        "include": ["."],
        "extraPaths": [str(source)],
        "typeCheckingMode": "strict",
    }
    (folder / "pyrightconfig.json").write_text(json.dumps(settings), "utf-8")
    command = [sys.executable, "-m", "pyright", "--outputjson", "-p", folder]
    done = finished([*command, "--pythonpath", sys.executable], cwd=folder)
    report = json.loads(done.stdout)
    assert report["summary"]["filesAnalyzed"] == 2
    lines: dict[str, list[int]] = {"right": [], "wrong": []}
    for fault in report["generalDiagnostics"]:
        lines[Path(fault["file"]).stem].append(fault["range"]["start"]["line"])
    return lines


def test_types_survive(complaints):
    assert complaints["right"] == []


def test_mistakes_are_seen(complaints):
    assert set(complaints["wrong"]) == {2, 3, 4, 5}
