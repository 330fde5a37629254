"""The rules for Semgrep find what is open in their cases, and accuse nothing else."""

from __future__ import annotations

import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
RULES = sorted(
    path
    for path in (ROOT / "semgrep").glob("*.yaml")
    if not path.name.endswith(".test.yaml")
)
VERSION = "1.182.0"  # in semgrep/README.md, too


def test_every_rule_has_a_severity_a_fix_and_a_page():
    rules = [
        rule
        for path in RULES
        for rule in path.read_text("utf-8").split("\n  - id: ")[1:]
    ]
    ids = [rule.split("\n", 1)[0] for rule in rules]
    assert len(set(ids)) == len(ids) <= 60
    for rule in rules:
        assert rule.startswith("KH-CONFIG-")
        assert re.search(r"\n    severity: (ERROR|WARNING|INFO)\n", rule), rule
        assert re.search(r"\bFix:\s", rule), rule


def test_every_page_that_rules_name_is_there():
    for path in RULES:
        for page in re.findall(r"references: \[([^\]#]*)", path.read_text("utf-8")):
            assert (ROOT / page).is_file()


@pytest.mark.release
@pytest.mark.timeout(600)
def test_the_rules_find_open_configurations_and_accuse_no_closed_ones(tmp_path, capsys):
    assert f"rev: v{VERSION}" in (ROOT / "semgrep/README.md").read_text("utf-8")
    venv.create(tmp_path / "semgrep", with_pip=True)
    binaries = tmp_path / "semgrep/bin"
    pip = [binaries / "python", "-m", "pip", "install", "-q", f"semgrep=={VERSION}"]
    subprocess.run(pip, check=True, timeout=250)
    measured = subprocess.run(
        [sys.executable, ROOT / "semgrep/measure.py", binaries / "semgrep"],
        capture_output=True,
        text=True,
        timeout=250,
    )
    with capsys.disabled():
        print(f"\n{measured.stdout}")
    assert measured.returncode == 0, measured.stdout + measured.stderr
    (first, *_) = measured.stdout.splitlines()
    assert first in (ROOT / "semgrep/README.md").read_text("utf-8")
