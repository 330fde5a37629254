"""The ways to train against attacks on attention, by name.

To add a defence, write it in its own module and add one entry to DEFENCES.
"""

from __future__ import annotations

from keyhole.core.registry import Entry, Registry
from keyhole.harden.defences.asa import ASA
from keyhole.harden.defences.attack_masks import AttackMasks
from keyhole.harden.defences.augmented import Augmented
from keyhole.harden.defences.combined import Combined
from keyhole.harden.defences.creat import CreAT
from keyhole.harden.defences.defence import Defence, Plain
from keyhole.harden.defences.freelb import FreeLB
from keyhole.harden.defences.r3f import R3F
from keyhole.harden.defences.sattend import SAttend
from keyhole.harden.defences.smart import SMART

DEFENCES: Registry[Defence, None] = Registry(
    Entry("strongest", Combined.strongest, method=Combined),
    Entry("plain", Plain, note="Plain fine-tuning: the baseline of every comparison."),
    Entry("sattend", SAttend),
    Entry("freelb", FreeLB),
    Entry("smart", SMART),
    Entry("r3f", R3F),
    Entry("asa", ASA),
    Entry("creat", CreAT),
    Entry("augmented", Augmented),
    Entry("attack-masks", AttackMasks),
)
