"""Files that Keyhole 0.1.0 wrote before pydantic read them load with all that they hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from keyhole.core import Audit, Fleet
from keyhole.disrupt.disruption import Disruption
from keyhole.extract import Extraction
from keyhole.harden.run import Hardening
from keyhole.harden.smoothing import Smoothed
from keyhole.invert import Inversion
from keyhole.invert.derivatives.bounds import Bounds
from keyhole.recover.gradients.recover_batch import BatchRecovery
from keyhole.recover.recovery import TextRecovery
from published_schemas import audit_errors

SAVED = Path(__file__).parent / "saved"
KINDS = {
    "audit": Audit,
    "fleet": Fleet,
    "extraction": Extraction,
    "extraction-budget": Extraction,
    "inversion": Inversion,
    "disruption": Disruption,
    "hardening": Hardening,
    "smoothed": Smoothed,
    "bounds": Bounds,
    "text-recovery": TextRecovery,
    "batch-recovery": BatchRecovery,
}
# What a result has no field for: what pipelines read, names of files, what a command adds.
BESIDES = {"$schema", "assessment", "weights", "inputs", "leak", "digest"}


def missing(saved: Any, loaded: Any, place: str = "") -> list[str]:
    """Return the places of all that was saved and not loaded; new fields may be there."""
    if isinstance(saved, dict) and isinstance(loaded, dict):
        return [
            each
            for key in saved
            for each in missing(saved[key], loaded.get(key), f"{place}.{key}")
        ]
    if isinstance(saved, list) and isinstance(loaded, list):
        pairs = zip(saved, loaded, strict=True)
        return [each for pair in pairs for each in missing(*pair, f"{place}[]")]
    return [] if saved == loaded else [place]


@pytest.mark.parametrize("name", KINDS)
def test_all_that_was_saved_is_loaded(name):
    path = SAVED / f"{name}.json"
    saved = json.loads(path.read_text("utf-8"))
    result = KINDS[name].load(path)
    loaded = json.loads(json.dumps(result.to_dict()))
    wanted = {key: saved[key] for key in saved.keys() - BESIDES}
    assert missing(wanted, loaded) == []
    assert bool(result.tensors()) is (name in ("extraction", "inversion"))


def test_an_audit_of_then_is_valid_now():
    assert audit_errors(json.loads((SAVED / "audit.json").read_text("utf-8"))) == []
