"""`keyhole check-config` as people and pipelines call it."""

from __future__ import annotations

import json
from functools import partial

import pytest

from command_line import inside
from keyhole.report.configurations import CONFIG_FORMATS


@pytest.fixture
def keyhole(tmp_path, monkeypatch, capsys):
    return partial(
        inside, "check-config", cwd=tmp_path, monkeypatch=monkeypatch, capsys=capsys
    )


def test_words_for_people(tmp_path, keyhole):
    (tmp_path / "run.sh").write_text(
        "\nllama-server --slot-save-path /slots --metrics\n"
    )
    done = keyhole(".")
    assert done.returncode == 1
    assert done.stdout.startswith("run.sh:2: KH-CONFIG-LLAMA-METRICS (low) --metrics: ")
    assert "fix: leave --slot-save-path out" in done.stdout
    assert "try: keyhole audit SLOT.bin" in done.stdout
    assert done.stdout.endswith("read 1 file, 1 server, 0 not recognised; 2 findings\n")


def test_json_and_levels(tmp_path, keyhole):
    (tmp_path / "run.sh").write_text("llama-server --metrics")
    done = keyhole("run.sh", "--json")
    data = json.loads(done.stdout)
    assert (done.returncode, data["exit_code"], data["fail_on"]) == (0, 0, "medium")
    (finding,) = data["findings"]
    assert (finding["rule"], finding["path"], finding["line"]) == (
        "KH-CONFIG-LLAMA-METRICS",
        "run.sh",
        1,
    )
    assert keyhole("run.sh", "--fail-on", "low").returncode == 1
    ignored = keyhole(
        "run.sh", "--fail-on", "low", "--ignore", "KH-CONFIG-LLAMA-METRICS"
    )
    assert ignored.returncode == 0


def test_what_could_not_be_read_and_what_is_wrong(tmp_path, keyhole):
    (tmp_path / "config.json").write_text('{"output_scores": ')
    done = keyhole(".")
    assert done.returncode == 3
    assert "config.json: could not be read" in done.stdout
    for words in (
        ["missing.yaml"],
        [".", "--fail-on", "worst"],
        [".", "--ignore", "KH-X"],
        [],
    ):
        assert keyhole(*words).returncode == 2


def test_what_a_file_says_does_not_steer_the_terminal(tmp_path, keyhole):
    (tmp_path / "run.sh").write_text("llama-server --slot-save-path '\x1b[2J'")
    assert "\x1b" not in keyhole(".").stdout


def test_reports_for_pipelines(tmp_path, keyhole):
    (tmp_path / "run.sh").write_text(
        "\nllama-server --slot-save-path /slots --metrics\n"
    )
    words = [f"--output={name}=out.{name}" for name in CONFIG_FORMATS]
    done = keyhole("run.sh", *words)
    assert done.returncode == 1
    assert done.stdout.endswith("read 1 file, 1 server, 0 not recognised; 2 findings\n")
    assert done.stderr.splitlines() == [
        f"{name}: out.{name}" for name in CONFIG_FORMATS
    ]
    (run,) = json.loads((tmp_path / "out.sarif-github").read_text())["runs"]
    places = [result["locations"][0]["physicalLocation"] for result in run["results"]]
    assert places == [
        {"artifactLocation": {"uri": "run.sh"}, "region": {"startLine": 2}}
        for _ in range(2)
    ]
    again = keyhole("run.sh", "--output=sarif=out.sarif")
    assert again.returncode == 2
    assert "give --force to replace it" in again.stderr
    printed = keyhole("run.sh", "--output=sarif=-")
    assert printed.stdout == (tmp_path / "out.sarif").read_text("utf-8")


def test_formats_that_say_nothing_of_a_configuration(tmp_path, keyhole):
    (tmp_path / "run.sh").write_text("llama-server --metrics")
    for name in ("html",):
        done = keyhole("run.sh", f"--output={name}=x")
        assert done.returncode == 2
        assert "--output takes FORMAT=FILE with one of json, sarif" in done.stderr
