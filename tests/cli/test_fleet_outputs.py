"""`keyhole audit --targets` with --output and --baseline."""

from __future__ import annotations

import json
from functools import partial

import pytest

from keyhole import oracle
from keyhole.core import Fleet
from keyhole.report.fleet import FLEET_FORMATS
from published_schemas import audit_errors

NAMES = ("a b", "a-b")  # one name of files for both, but for a number
TARGET = '[[target]]\nname = "{}"\ntarget = "{}.safetensors"\n'


@pytest.fixture
def keyhole(tmp_path, keyhole):
    for seed, name in enumerate(NAMES):
        oracle.save(oracle.plant(dim=2, seed=seed), tmp_path / f"{name}.safetensors")
    lines = [TARGET.format(name, name) for name in NAMES]
    (tmp_path / "fleet.toml").write_text("".join(lines))
    (tmp_path / "turned.toml").write_text("".join(reversed(lines)))
    return partial(keyhole, "audit --only=weights")


def test_reports_and_a_baseline_of_a_whole_fleet(keyhole, tmp_path):
    words = [f"--output={name}=all.{name}" for name in FLEET_FORMATS]
    done = keyhole("--targets=fleet.toml --out=old", *words)
    assert done.returncode == 1, done.stderr
    runs = json.loads((tmp_path / "all.sarif").read_text())["runs"]
    assert [run["invocations"][0]["exitCode"] for run in runs] == [1, 1]
    assert list(Fleet.load(tmp_path / "all.json").audits) == list(NAMES)
    saved = json.loads((tmp_path / "old" / "a-b-2.json").read_text())
    assert saved["name"] == "a-b"
    assert audit_errors(saved) == []

    # Nothing is worse than it was, in whatever order: targets are known by their names.
    for number, file in enumerate(("fleet.toml", "turned.toml")):
        same = keyhole(f"--targets={file} --out=new{number} --baseline=old")
        assert same.returncode == 0, same.stderr
        rows = json.loads((tmp_path / f"new{number}" / "a-b.json").read_text())[
            "assessment"
        ]
        assert {row["state"] for row in rows["findings"]} == {"same"}

    # A target that the baseline has not is new, and fails.
    (tmp_path / "old" / "a-b-2.json").unlink()
    done = keyhole("--targets=fleet.toml --out=x --baseline=old --output=sarif=-")
    assert done.returncode == 1
    assert "not in the baseline: a-b\n" in done.stderr
    first, second = json.loads(done.stdout)["runs"]
    assert {result["baselineState"] for result in first["results"]} == {"unchanged"}
    assert "new" in {result["baselineState"] for result in second["results"]}

    # No file of the baseline is replaced.
    (old, *_) = (tmp_path / "old").glob("*.json")
    words = f"--out=y --baseline=old --output=json=old/{old.name} --force"
    done = keyhole(f"--targets={file}", words)
    assert done.returncode == 2
    assert "is the baseline" in done.stderr


WRONG = {
    "--output=html=x": "with one of json, sarif;",
    "--output=json=out/a-b.json": "two outputs go to",
    "--output=sarif=- --json": "only one result can be printed",
    "--baseline=none": "none is no folder",
    "--baseline=fleet.toml": "--baseline takes the folder",
    "--baseline=empty": "empty holds no findings of these targets",
    "--baseline=out": "--baseline and --out are both",
    "--baseline=odd": "odd/x.json is not a JSON file",
}


@pytest.mark.parametrize(("words", "message"), WRONG.items())
def test_wrong_words_are_refused_before_the_work_starts(
    keyhole, tmp_path, words, message
):
    for name in ("empty", "out", "odd"):
        (tmp_path / name).mkdir()
    (tmp_path / "odd" / "x.json").write_text("{")
    done = keyhole("--targets=fleet.toml --out=out", words)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert not list((tmp_path / "out").iterdir())
