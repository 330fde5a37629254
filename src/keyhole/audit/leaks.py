"""The text from a leak at hand: a saved slot, a file of keyhole lab capture or another program.

A file whose token ids stand in it gives two findings: the ids as they are, checked against the
rest, and what an attack reads of the rest alone.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from keyhole.audit.check import Check, Checked, Part
from keyhole.audit.texts import exposure_of, reading_alone
from keyhole.core import Finding, Status
from keyhole.core.exposure import Exposure
from keyhole.core.finding import Readings
from keyhole.core.progress import Track
from keyhole.models.loading import Loaded
from keyhole.recover import recover_text
from keyhole.recover.attack import Attack
from keyhole.recover.files.sources import Opened, Sealed, WrittenIds
from keyhole.recover.layers.mixed import MixedKeys
from keyhole.recover.leaks import Leak
from keyhole.recover.registry import ATTACKS

_IDS = "Treat the file as the prompt: it holds the token ids as they are. Keep it encrypted."
_WHOLE = "float32"


@dataclass(frozen=True, eq=False)
class LeakTarget(Part):
    """Leaks of one file, and the model whose they are."""

    name: str
    loaded: Loaded
    leaks: Sequence[Opened]

    @property
    def observed(self) -> bool:
        return True

    @property
    def identity(self) -> str:
        digests = " ".join(opened.leak.digest for opened in self.leaks)
        return f"{digests}; {self.loaded.identity}"

    def checks(self, seed: int, *, against_defences: bool = False) -> list[Check]:  # noqa: ARG002
        """For each text of the file: the ids that stand in it, and the attack on the rest."""
        made: list[Check] = []

        def add(exposure: Exposure, opened: Opened, attack: Attack | None = None) -> None:
            exposure = replace(exposure, name=opened.name)
            run = partial(_check, exposure, self.loaded, opened, attack)
            made.append(Check(exposure, run))

        for opened in self.leaks:
            if opened.ids is not None:
                add(Exposure("KH-TEXT-TOKEN-IDS"), opened, WrittenIds([opened.ids]))
            leaking = opened.leak.exposure
            layer = None if leaking.kind in ("pooled", "logits") else leaking.layer
            sealed = Sealed(opened.sealed) if opened.sealed else None
            add(replace(exposure_of(leaking.kind), variant="file", layer=layer), opened, sealed)
        return made


def _check(
    exposure: Exposure, loaded: Loaded, opened: Opened, attack: Attack | None, track: Track
) -> Checked:
    started = time.perf_counter()
    leak = opened.leak
    progress = track(f"tokens from {leak.exposure}", leak.length)
    recovery = recover_text(loaded.model, loaded.tokenizer, leak, method=attack, progress=progress)
    readings = (reading_alone(loaded.tokenizer, recovery),)
    result = Readings(leak.exposure.kind, leak.exposure.layer, leak.precision or _WHOLE, readings)
    finding = Finding(
        exposure=exposure,
        attack=recovery.method,
        status=recovery.status,
        reason=recovery.reason,
        remedy=_IDS if isinstance(attack, WrittenIds) else _remedy(leak, recovery.method),
        error=None,
        queries=0,
        seconds=time.perf_counter() - started,
        known=result.known if recovery.status is not Status.MISMATCH else 0.0,
        sought="text",
        texts=(result,),
    )
    return Checked((finding,))


def _remedy(leak: Leak, method: str) -> str:
    kind = "mixed" if method == MixedKeys.__name__ else leak.kind
    return next(row.remedy for _, row in ATTACKS.rows() if row.kind == kind)
