"""A base install runs what it can; what it cannot is said, with the name of the extra."""

from __future__ import annotations

import os
import sys
import tomllib
from dataclasses import replace

import pytest

import keyhole
from keyhole.audit import target as targets
from keyhole.audit.target import target_of
from keyhole.core import Audit, Status
from keyhole.core.errors import MissingExtra
from keyhole.core.journal import Journal

NAMES = {
    "python-flint": "flint",
    "faiss-cpu": "faiss",
    "psycopg[binary]": "psycopg",
}  # of modules, where a package's is another
LAYER = keyhole.oracle.plant("attention", dim=3, every_token=True, seed=1)


@pytest.fixture
def without(monkeypatch):
    """Python finds a package no longer."""
    return lambda name: monkeypatch.setitem(sys.modules, name, None)


def extras(root):
    """The modules behind each extra, from pyproject.toml."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    return {
        extra: [NAMES.get(name, name) for name in (n.split(">")[0] for n in needs)]
        for extra, needs in project["optional-dependencies"].items()
        if extra not in ("all", "dev", "docs")
    }


# What the audit of the demo says where an extra is missing; the others it can do
# without.
REASONS = {"proofs": "not proved: certificates need python-flint"}
EXTRAS = ("cluster", "convex", "hub", "models", "plots", "proofs", "stores")
FULL = bool(int(os.environ.get("KEYHOLE_FULL", "0")))
# One at a time in a full run; otherwise those that the demo can do without are missing
# together.
MISSING = (
    [(extra,) for extra in EXTRAS if extra != "models"]
    if FULL
    else [("proofs", "cluster", "convex", "hub", "plots", "stores")]
)


@pytest.fixture
def small_demo(monkeypatch):
    """The demo with one endpoint, text, example and layer, to be quick; whole in a full run."""
    real = targets.open_target

    def small(part):
        subject = part.target
        return replace(
            part,
            target=replace(
                subject,
                texts=subject.notes[:1],
                examples=subject.examples[:1],
                hardened=None,
                precisions=("float32",),
                notes=(),
            ),
        )

    def opened(name, options, **more):
        target = real(name, replace(options, layers=(1,)), **more)
        models = [
            small(part) for part in target.parts if isinstance(part, targets.ModelPart)
        ]
        layer = targets.EndpointPart("the attention layer", LAYER)
        return replace(target, parts=(layer, *models))

    if not FULL:
        monkeypatch.setattr(targets, "open_target", opened)


def test_every_extra_is_tried(root):
    assert set(extras(root)) == set(EXTRAS)


@pytest.mark.release
@pytest.mark.timeout(900)
@pytest.mark.parametrize("missing", MISSING, ids=" ".join)
@pytest.mark.usefixtures("small_demo")
def test_the_demo_is_audited_without(missing, root, without, tmp_path, keyhole):
    for extra in missing:
        for module in extras(root)[extra]:
            without(module)
    done = keyhole("audit demo")
    assert done.returncode == 1, done.stderr
    audit = Audit.load(tmp_path / "keyhole-demo.json")
    page = (tmp_path / "keyhole-demo.html").read_text()
    reasons = [part.reason for part in (*audit.findings, *audit.skips)]
    advised = [reason for reason in reasons if "pip install" in reason]
    advice = f"not all of it was tried or proved: pip install 'keyhole[{missing[0]}]' adds the rest"
    assert (advice in done.stderr) == bool(advised)
    assert bool(advised) == (missing[0] in REASONS) == ("pip install" in page)
    for reason in advised:
        assert REASONS[missing[0]] in reason
        assert f"pip install 'keyhole[{missing[0]}]'" in reason
    sought = {finding.sought for finding in audit.findings}
    assert sought >= {"weights", "input", "text"}


def test_without_torch_no_audit_is_made(root, without, keyhole):
    for module in extras(root)["models"]:
        without(module)
    done = keyhole("audit demo")
    assert done.returncode == 2
    assert "pip install 'keyhole[models]'" in done.stderr


def test_the_demo_without_transformers_checks_its_endpoints(without, monkeypatch):
    without("transformers")
    monkeypatch.setattr(
        "keyhole.audit.target.demo_endpoints",
        lambda: {"head": keyhole.oracle.plant(dim=3)},
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
    # v = 0 gives nothing away
    silent = keyhole.oracle.Head(LAYER.W[0], 0 * LAYER.W[0, 0])
    audit = keyhole.audit(replace(target_of(silent), name="t", skips=opened.skips))
    assert not audit.exposed
    assert audit.exit_code == 3


def test_an_audit_without_flint_has_findings_without_proofs(without):
    without("flint")
    inputs = keyhole.audit(LAYER, only=["inputs"]).findings
    assert inputs[0].status is Status.RECOVERED
    assert "not proved: certificates need python-flint" in inputs[0].reason
    assert "pip install 'keyhole[proofs]'" in inputs[0].reason


@pytest.mark.parametrize(
    ("package", "extra", "use"),
    [
        ("cvxpy", "convex", lambda: keyhole.extract.run(LAYER, "nuclear-norm", rank=1)),
        (
            "transformers",
            "models",
            lambda: keyhole.recover.capture("demo", "a", "hidden:1"),
        ),
        (
            "flint",
            "proofs",
            lambda: keyhole.invert.run(
                keyhole.invert.plant(2, 2)[0], starts=1, certify=True
            ),
        ),
        (
            "distributed",
            "cluster",
            lambda: keyhole.disrupt.run("demo", dask="tcp://localhost:1"),
        ),
        ("datasets", "hub", lambda: keyhole.disrupt.run("demo", data="nobody/nothing")),
    ],
)
def test_what_needs_a_package_names_its_extra(
    package, extra, use, without, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    without(package)
    with pytest.raises(MissingExtra, match=rf"pip install 'keyhole\[{extra}\]'"):
        use()


def test_what_is_written_is_for_its_owner_alone(tmp_path):
    head = keyhole.oracle.plant(dim=2)
    keyhole.extract.run(head, ledger=tmp_path / "ledger.db").save(
        tmp_path / "stolen.json"
    )
    keyhole.audit(head).save(tmp_path / "audit.json")
    with Journal(tmp_path / "run.jsonl", {"run": "test"}) as journal:
        journal.add({"a check": {}})
    written = [path for path in tmp_path.iterdir() if path.suffix != ".db-shm"]
    assert {path.name for path in written} >= {
        "ledger.db",
        "stolen.json",
        "stolen.safetensors",
        "audit.json",
        "run.jsonl",
    }
    for path in written:
        assert path.stat().st_mode & 0o077 == 0, path
