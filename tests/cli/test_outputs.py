"""`--output FORMAT=FILE`, any number of times, checked before any work; `-` is stdout."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest

from keyhole import oracle
from keyhole.core import Audit
from keyhole.report import json_form
from keyhole.report.formats import FORMATS
from sample_audits import whole


@pytest.fixture
def keyhole(tmp_path, keyhole):
    whole().save(tmp_path / "audit.json")
    return keyhole


def test_every_format_from_a_saved_audit(keyhole, tmp_path):
    words = [f"--output={name}=out.{name}" for name in FORMATS]
    done = keyhole("report audit.json", *words)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines() == [f"{name}: out.{name}" for name in FORMATS]
    for name in ("json", "sarif", "sarif-github"):
        json.loads((tmp_path / f"out.{name}").read_text())
    ElementTree.parse(tmp_path / "out.junit")
    assert (tmp_path / "out.markdown").read_text("utf-8").startswith("## 🔴 Keyhole: ")
    assert (tmp_path / "out.html").read_text("utf-8").startswith("<!")
    assert Audit.load(tmp_path / "out.json") == whole()
    assert not (tmp_path / "audit.html").exists()  # only what was asked for


def test_a_page_and_other_formats(keyhole, tmp_path):
    done = keyhole("report audit.json --output=junit=x --output=html=p.html")
    assert done.returncode == 0
    assert (tmp_path / "p.html").exists()
    assert (tmp_path / "x").exists()


@pytest.mark.parametrize("name", ["sarif", "junit", "markdown"])
def test_stdout_has_the_document_and_nothing_else(keyhole, tmp_path, name):
    done = keyhole(f"report audit.json --output={name}=- --output={name}=file")
    assert done.returncode == 0
    assert done.stdout == (tmp_path / "file").read_text("utf-8")


def test_an_audit_writes_them_too(keyhole, tmp_path):
    oracle.save(oracle.plant(dim=4, seed=1), tmp_path / "t.safetensors")
    done = keyhole("audit t.safetensors --output=sarif=a.sarif --output=junit=a.xml")
    assert done.returncode == 1, done.stderr
    (run,) = json.loads((tmp_path / "a.sarif").read_text())["runs"]
    assert run["invocations"][0]["exitCode"] == 1
    saved = json.loads((tmp_path / "keyhole-t.safetensors.json").read_text())
    assert saved["$schema"] == json_form.SCHEMA
    assert saved["assessment"]["exit_code"] == 1
    cases = list(ElementTree.parse(tmp_path / "a.xml").iter("testcase"))
    assert len(cases) == len(saved["assessment"]["findings"]) + len(saved["skips"])


WRONG = {
    "--output=x": "--output takes FORMAT=FILE with one of html, json, sarif",
    "--output=sarif=": "--output takes FORMAT=FILE",
    "--output=pdf=x": "got 'pdf=x'",
    "--output=\udcff\x1b=x": "got '\\udcff\\x1b=x'",
    "--output=sarif=no/x": "there is no such folder",
    "--output=sarif=.": "it is a folder",
    "--output=sarif=x --output=junit=./x": "name a file for each",
    "--output=sarif=p --output=html=p": "name a file for each",
    "--output=sarif=- --output=junit=-": "only one result can be printed",
    "--output=sarif=- --json": "only one result can be printed",
    "--output=sarif=audit.json": "give --force to replace it",
}


@pytest.mark.parametrize(("words", "message"), WRONG.items())
@pytest.mark.parametrize("command", ["report", "audit"])
def test_wrong_outputs_are_refused_before_the_work_starts(
    keyhole, tmp_path, command, words, message
):
    before = sorted(path.name for path in tmp_path.iterdir())
    done = keyhole(command, "there-is-no-such-input.json", words)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_force_replaces_a_file(keyhole, tmp_path):
    (tmp_path / "x").write_text("mine")
    assert keyhole("report audit.json --output=junit=x").returncode == 2
    assert keyhole("report audit.json --output=junit=x --force").returncode == 0
    assert (tmp_path / "x").read_text("utf-8").startswith("<?xml")


def test_the_schema_is_printed_without_an_audit(keyhole):
    done = keyhole("report --schema")
    assert done.returncode == 0
    assert json.loads(done.stdout)["$id"] == json_form.SCHEMA
