"""The audit: every attack that applies, skips with reasons, and nothing global."""

from __future__ import annotations

import json

import pytest
import torch

from keyhole import oracle
from keyhole.audit import ATTACKS, Audit, audit
from keyhole.errors import InputError
from keyhole.oracle.target import describe, open_target
from keyhole.results import Status


def test_the_demo_gives_its_weights_away():
    target = open_target("demo")
    found = audit(target, target=describe("demo", target))
    by_exposure = {finding.exposure: finding for finding in found.findings}
    full, low = by_exposure["full scores"], by_exposure["full scores, low-rank head"]
    limited = by_exposure["scores under a budget"]
    assert full.status is low.status is Status.RECOVERED
    assert full.queries == 64 * 64 + 64
    assert low.queries < full.queries / 3
    assert max(full.error, low.error) < 1e-11
    assert limited.status is Status.BUDGET
    assert limited.queries == full.queries // 2
    assert limited.error > 0.01  # judged all the same: half the queries are worth nothing
    assert found.exposed == 2
    assert not found.skips


def test_what_does_not_apply_is_skipped_with_a_reason():
    found = audit(oracle.plant("attention", dim=4))
    assert not found.findings
    assert len(found.skips) == len(ATTACKS)
    assert all("this target gives last-token answers" in skip.reason for skip in found.skips)


def test_a_silent_target_is_not_a_clean_one():
    class Silent:
        dim = 3
        calls = 0

        def __call__(self, sequences: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            answers = torch.zeros(len(sequences), dtype=torch.float64)
            return answers if self.calls == 1 else answers * torch.nan

    found = audit(Silent())
    assert found.failed
    assert all(finding.status is Status.ORACLE_FAILED for finding in found.findings)


def test_an_audit_reads_back_equal():
    found = audit(oracle.plant(dim=5, seed=1), target="t")
    assert Audit.from_dict(json.loads(json.dumps(found.to_dict()))) == found


@pytest.mark.parametrize("data", [{}, {"kind": "audit"}, {"kind": "other"}])
def test_what_is_no_audit_is_refused(data):
    with pytest.raises(InputError, match="expected an audit"):
        Audit.from_dict(data)


def test_watch_hears_every_attack():
    heard: dict[str, int] = {}
    audit(oracle.plant(dim=5), watch=lambda attack, count, _: heard.update({attack: count}))
    assert set(heard) == {attack.exposure for attack in ATTACKS}


def test_targets_as_people_write_them(tmp_path):
    oracle.save(oracle.plant(dim=3), tmp_path / "t.safetensors")
    target = open_target(str(tmp_path / "t.safetensors"))
    assert describe("t.safetensors", target) == "planted head, d = 3 (t.safetensors)"
    with pytest.raises(InputError, match="expected http://host:port/v2/models/NAME"):
        open_target("http://127.0.0.1:1/other")
    with pytest.raises(InputError, match="there is no such file"):
        open_target("nothing.safetensors")
