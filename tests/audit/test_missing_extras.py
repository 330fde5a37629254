"""A base install runs what it can; what it cannot is said, with the name of the extra."""

from __future__ import annotations

import sys

import pytest

import keyhole
from keyhole.errors import MissingExtra
from keyhole.results import Status
from keyhole.resume import Journal

LAYER = keyhole.oracle.plant("attention", dim=3, every_token=True, seed=1)


@pytest.fixture
def without(monkeypatch):
    """Python finds a package no longer."""
    return lambda name: monkeypatch.setitem(sys.modules, name, None)


def test_the_demo_without_transformers_checks_its_endpoints(without, monkeypatch):
    without("transformers")
    monkeypatch.setattr(
        "keyhole.audit.targets.open_surfaces", lambda _: {"head": keyhole.oracle.plant(dim=3)}
    )
    audit = keyhole.audit("demo")
    assert audit.exposed
    assert "pip install 'keyhole[models]'" in audit.skips[0].reason
    assert audit.unchecked == 1
    assert audit.exit_code == 1


def test_nothing_found_is_not_clean_where_a_part_was_not_opened(without):
    without("transformers")
    opened = keyhole.audit.open_target("demo")
    assert not opened.models
    silent = keyhole.oracle.Head(LAYER.W[0], 0 * LAYER.W[0, 0])  # v = 0 gives nothing away
    audit = keyhole.audit(keyhole.audit.Target("t", {"": silent}, skips=opened.skips))
    assert not audit.exposed
    assert audit.exit_code == 3


def test_an_audit_without_flint_has_findings_without_proofs(without):
    without("flint")
    inputs = [finding for finding in keyhole.audit(LAYER).findings if finding.sought == "input"]
    assert inputs[0].status is Status.RECOVERED
    assert "not proved: expected python-flint" in inputs[0].reason
    assert "pip install 'keyhole[proofs]'" in inputs[0].reason


@pytest.mark.parametrize(
    ("package", "extra", "use"),
    [
        ("cvxpy", "convex", lambda: keyhole.extract.run(LAYER, "nuclear-norm", rank=1)),
        ("transformers", "models", lambda: keyhole.recover.capture("demo", "a", "hidden:1")),
        ("flint", "proofs", lambda: keyhole.invert.run(
            keyhole.invert.plant(2, 2)[0], starts=1, certify=True
        )),
        ("distributed", "cluster", lambda: keyhole.disrupt.run("demo", dask="tcp://localhost:1")),
    ],
)  # fmt: skip
def test_what_needs_a_package_names_its_extra(package, extra, use, without, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    without(package)
    with pytest.raises(MissingExtra, match=rf"pip install 'keyhole\[{extra}\]'"):
        use()


def test_what_is_written_is_for_its_owner_alone(tmp_path):
    head = keyhole.oracle.plant(dim=2)
    keyhole.extract.run(head, ledger=tmp_path / "ledger.db").save(tmp_path / "stolen.json")
    keyhole.audit(head).save(tmp_path / "audit.json")
    with Journal(tmp_path / "run.jsonl", {"run": "test"}):
        pass
    written = [path for path in tmp_path.iterdir() if path.suffix != ".db-shm"]
    assert {path.name for path in written} >= {
        "ledger.db", "stolen.json", "stolen.safetensors", "audit.json", "run.jsonl",
    }  # fmt: skip
    for path in written:
        assert path.stat().st_mode & 0o077 == 0, path
