"""The audit: every attack that applies, skips with reasons, and nothing global."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch

from exposures import by_name
from keyhole import oracle
from keyhole.assess import State, assess, compared
from keyhole.audit import Audit, audit
from keyhole.audit.check import Check, Part, one_finding
from keyhole.audit.target import Target, open_target
from keyhole.core import Status
from keyhole.core.errors import InputError, KeyholeError
from keyhole.core.exposure import Exposure
from keyhole.endpoints import demo_endpoints
from keyhole.extract import registry as extraction
from keyhole.extract.auto import Kind
from keyhole.invert import registry as inversion
from keyhole.report import words
from keyhole.target import TargetKind, kind_of

ATTACKS = [row for _, row in extraction.METHODS.rows()]
LEAKS = [row for _, row in inversion.METHODS.rows()]


def test_targets_like_the_demos_give_their_weights_away():
    """Its kinds of endpoints, each narrower than there."""
    endpoints = {
        "head": oracle.plant("head", dim=24, rank=3, seed=2601),
        "heads": oracle.plant("multi-head", dim=16, heads=2, rank=4, seed=2601),
        "one-layer": oracle.plant("one-layer", dim=8, width=16, seed=2601),
        "last token": oracle.plant("attention", dim=16, seed=2601),
        "every token": oracle.plant(
            "attention", dim=16, every_token=True, causal=True, seed=2601
        ),
        "no mask": oracle.plant("attention", dim=16, every_token=True, seed=2601),
    }
    assert [each.kind for each in endpoints.values()] == [
        each.kind for each in demo_endpoints().values()
    ]
    found = audit(endpoints)
    by_exposure = by_name(found.findings)
    full = by_exposure["full scores"]
    low = by_exposure["full scores, low-rank head"]
    assert full.queries == 24 * 24 + 24
    assert low.queries < full.queries / 3
    limited = by_exposure["scores under a budget"]
    assert limited.status is Status.UNSOLVED  # the budget held
    assert limited.queries == full.queries // 2
    assert (
        limited.error > 0.01
    )  # judged all the same: half the queries are worth nothing
    clipped = by_exposure["scores rounded to 3 decimals, inputs of norm 10 at most"]
    assert clipped.status is Status.INEXACT
    others = [each for each in found.findings if each not in (limited, clipped)]
    others = [each for each in others if each.sought == "weights"]
    assert len(others) == 9
    assert all(finding.status is Status.RECOVERED for finding in others)
    assert all(
        finding.error < 1e-8
        for finding in others
        if finding.exposure.rule != "KH-WEIGHTS-SIGNS"
    )
    assert {finding.part for finding in found.findings} == set(endpoints)
    assert not found.skips
    given_away(found)


def given_away(found):
    """Through each layer's output the input itself came back, with and without maps, proved."""
    inputs = [each for each in found.findings if each.sought == "input"]
    assert len(inputs) == 2 * len(LEAKS)
    for finding in inputs:
        if finding.exposure.defences:
            continue
        assert finding.status is Status.RECOVERED, finding.reason
        assert finding.error < 1e-8
        assert "is the one put in" in finding.reason
        assert "proved" in finding.reason
    rounded = [each for each in inputs if each.exposure.defences]
    assert all(each.status is not Status.RECOVERED for each in rounded)


KINDS = {
    "head": (oracle.plant(dim=5, seed=1), 6),
    "heads": (oracle.plant("multi-head", dim=6, heads=2, seed=1), 1),
    "layer": (oracle.plant("one-layer", dim=5, width=4, seed=1), 1),
    "rounded": (oracle.Rounded(oracle.plant(dim=5, seed=1), 4), 1),
    "signs": (oracle.SignOnly(oracle.plant(dim=4, seed=1)), 1),
    "last": (oracle.plant("attention", dim=4), 1),
    "every": (oracle.plant("attention", dim=4, every_token=True), 1),
}


@pytest.mark.parametrize(("target", "count"), KINDS.values(), ids=KINDS)
def test_what_applies_is_run_and_the_rest_skipped_with_a_reason(target, count):
    found = audit(target)
    weights = [finding for finding in found.findings if finding.sought == "weights"]
    assert len(weights) == count
    assert sum(finding.exposed for finding in weights) == (5 if count == 6 else 1)
    inputs = len(found.findings) - count
    assert inputs == (len(LEAKS) if getattr(target, "every_token", False) else 0)
    assert len(found.skips) == len(ATTACKS) - count + len(LEAKS) - inputs
    reasons = {skip.reason for skip in found.skips if skip.attack != "Auto"}
    assert all("; this target gives " in reason for reason in reasons)


def test_a_silent_target_is_not_a_clean_one():
    class Silent:
        dim = 3
        calls = 0

        def __call__(self, sequences: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            answers = sequences[:, 0, 0] ** 3
            return answers if self.calls <= 2 else answers * torch.nan

    found = audit(Silent())
    assert found.exit_code == 3
    assert all(finding.status is Status.ORACLE_FAILED for finding in found.findings)
    both = audit({"silent": Silent(), "talkative": oracle.plant(dim=3)})
    assert both.exposed
    assert (both.exit_code, both.unchecked) == (1, 1)


def test_an_audit_reads_back_equal():
    found = audit(oracle.plant(dim=5, seed=1))
    assert Audit.from_dict(json.loads(json.dumps(found.to_dict()))) == found


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "this Keyhole reads format 1, not None"),
        ({"format": 1, "kind": "audit"}, "target is missing in a saved audit"),
        ({"format": 1, "kind": "other"}, "expected a saved audit, got other"),
    ],
)
def test_what_is_no_audit_is_refused(data, message):
    with pytest.raises(InputError, match=f"^{message}$"):
        Audit.from_dict(data)


def test_every_attack_is_followed():
    counts: dict[str, int] = {}

    def track(name, total=None):
        return lambda done, total=None, note="": counts.update({name: done})

    found = audit(oracle.plant(dim=5), track=track)
    exposures = {
        words.exposure(attack.exposure)
        for attack in ATTACKS
        if attack.reads is Kind.HEAD
    }
    assert set(counts) == {"audit", *exposures}
    assert counts["audit"] == len(ATTACKS) + len(LEAKS)
    for finding in found.findings:
        assert (
            counts[words.exposure(finding.exposure)] >= finding.queries
        )  # the judge asks too


def test_targets_as_people_write_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    oracle.save(oracle.plant(dim=3), tmp_path / "t.safetensors")
    (tmp_path / "model").mkdir()
    (tmp_path / "slot.bin").write_bytes(b"qsgg\2\0\0\0")
    kinds = {
        "demo": "demo",
        "t.safetensors": "file",
        "model": "model",
        "owner/name": "model",
        "x.gguf": "model",
        "http://h:1": "server",
        "http://h:1/v2/models/m": "endpoint",
        "http://h:1/other": "route",
        "http://h/v1/embeddings": "vector store",
        "chroma:folder": "vector store",
        "x.npy": "vector store",
        "slot.bin": "leak",
        "model:attention.2": "attention",
        "model:block.2": "block",
        "nothing.safetensors": "unknown",
        "http://[::1": "route",
    }
    assert {name: str(kind_of(name)) for name in kinds} == kinds
    assert set(kinds.values()) == set(TargetKind)
    assert open_target("t.safetensors").name == "planted head, d = 3 (t.safetensors)"
    with pytest.raises(
        InputError, match="must have the form http://host:port/v2/models/NAME"
    ):
        open_target("http://127.0.0.1:1/other")
    with pytest.raises(InputError, match=r"there is no nothing\.safetensors"):
        open_target("nothing.safetensors")


class TwoAttacks(Part):
    """A part with two attacks on one exposure, of which the second may break."""

    name = ""
    identity = "two attacks"
    loaded = None

    def __init__(self, breaks):
        self.breaks = breaks

    def checks(self, options):
        def run(attack, track):
            if self.breaks and attack == "second":
                raise KeyholeError("no answer")
            return one_finding(SCORES, attack, Status.RECOVERED, "", "")

        return [
            Check(SCORES, partial(run, attack), attack)
            for attack in ("first", "second")
        ]


SCORES = Exposure("KH-WEIGHTS-SCORES", "full")


def test_an_attack_that_breaks_moves_no_other_id_and_is_not_gone():
    whole, broken = (
        assess(audit(Target("two attacks", (TwoAttacks(breaks),)), complete=False))
        for breaks in (False, True)
    )
    assert [item.id for item in whole.items] == [
        f"weights-scores-full-{n}" for n in ("first", "second")
    ]
    assert [item.id for item in broken.items] == ["weights-scores-full-first"]
    then = compared(broken, whole)
    assert [item.state for item in then.items] == [State.SAME]
    assert (then.gone, [item.id for item in then.untried]) == (
        (),
        ["weights-scores-full-second"],
    )
