"""Training against attacks on attention, Part V: one module per defence. Needs the extra `models`.

A defence is a frozen dataclass of hyperparameters; `train` trains with it, and so does any loop
that differentiates its `losses`.
"""

from keyhole.harden.asa import ASA
from keyhole.harden.attack_masks import AttackMasks
from keyhole.harden.defence import Defence
from keyhole.harden.evaluate import Evaluation, Measured, attack, evaluate, standard
from keyhole.harden.freelb import FreeLB
from keyhole.harden.plain import Plain
from keyhole.harden.r3f import R3F
from keyhole.harden.sattend import SAttend
from keyhole.harden.smart import SMART
from keyhole.harden.together import Together
from keyhole.harden.train import Progress, Training, train

__all__ = [
    "ASA", "R3F", "SMART", "AttackMasks", "Defence", "Evaluation", "FreeLB", "Measured", "Plain",
    "Progress", "SAttend", "Together", "Training", "attack", "evaluate", "standard", "train",
]  # fmt: skip
