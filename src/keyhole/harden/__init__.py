"""Training against attacks on attention (docs/disrupt.md). It needs the extra `models`.

A defence is a frozen dataclass of hyperparameters. `train` trains with it, and so does
any loop that differentiates its `losses`.
"""

from keyhole.harden.defences import DEFENCES
from keyhole.harden.defences.asa import ASA
from keyhole.harden.defences.attack_masks import AttackMasks
from keyhole.harden.defences.augmented import Augmented
from keyhole.harden.defences.combined import Combined, PlainFirst
from keyhole.harden.defences.creat import CreAT
from keyhole.harden.defences.defence import Defence, Plain
from keyhole.harden.defences.freelb import FreeLB
from keyhole.harden.defences.r3f import R3F
from keyhole.harden.defences.sattend import SAttend
from keyhole.harden.defences.smart import SMART
from keyhole.harden.evaluate import Evaluation, Measured, attack, evaluate, standard
from keyhole.harden.run import Hardening, Trained, run
from keyhole.harden.smoothing import Smoothed, Smoothing
from keyhole.harden.train import Training, train

__all__ = [
    "ASA",
    "DEFENCES",
    "R3F",
    "SMART",
    "AttackMasks",
    "Augmented",
    "Combined",
    "CreAT",
    "Defence",
    "Evaluation",
    "FreeLB",
    "Hardening",
    "Measured",
    "Plain",
    "PlainFirst",
    "SAttend",
    "Smoothed",
    "Smoothing",
    "Trained",
    "Training",
    "attack",
    "evaluate",
    "run",
    "standard",
    "train",
]
