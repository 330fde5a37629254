"""Attacks on attention: cut a small share of it to flip predictions (docs/disrupt.md)."""

from keyhole.disrupt.disruption import Attacker, Control, Disruption, Outcome
from keyhole.disrupt.greedy import Greedy
from keyhole.disrupt.hack_attend import HackAttend
from keyhole.disrupt.rankings import RANKINGS
from keyhole.disrupt.registry import ATTACKERS
from keyhole.disrupt.released import ReleasedProgram
from keyhole.disrupt.rerank import Rerank
from keyhole.disrupt.run import run
from keyhole.disrupt.sweep import ModelSource, sweep
from keyhole.disrupt.units import Unit

__all__ = [
    "ATTACKERS",
    "RANKINGS",
    "Attacker",
    "Control",
    "Disruption",
    "Greedy",
    "HackAttend",
    "ModelSource",
    "Outcome",
    "ReleasedProgram",
    "Rerank",
    "Unit",
    "run",
    "sweep",
]
