"""Flip a prediction by cutting a little attention: Part IV. One module per idea."""

from keyhole.disrupt.disruption import Control, Disruption, Outcome
from keyhole.disrupt.hack_attend import HackAttend
from keyhole.disrupt.rankings import RANKINGS
from keyhole.disrupt.sweep import ModelSource, sweep
from keyhole.disrupt.units import Unit

__all__ = [
    "RANKINGS",
    "Control",
    "Disruption",
    "HackAttend",
    "ModelSource",
    "Outcome",
    "Unit",
    "sweep",
]
