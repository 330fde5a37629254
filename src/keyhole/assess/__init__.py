"""What an audit means: rules, severities, families and a verdict, computed once for all formats.

`assess(audit)` reads an `Audit` and nothing else; pages, tables and files for pipelines are made
from the `Assessment` that it gives, so no two of them can disagree.
"""

from keyhole.assess.assessment import (
    Assessment,
    Card,
    Decision,
    FleetAssessment,
    Ignore,
    Item,
    Level,
    Ruled,
    Ruling,
    State,
    assess,
    assess_fleet,
    compared,
)
from keyhole.assess.policy import Policy, decided, find_policy, read_policy
from keyhole.assess.severity import Score, Severity, score
from keyhole.core.exposure import RULES, Family, Rule

__all__ = [
    "RULES", "Assessment", "Card", "Decision", "Family", "FleetAssessment", "Ignore", "Item",
    "Level", "Policy", "Rule", "Ruled", "Ruling", "Score", "Severity", "State", "assess",
    "assess_fleet", "compared", "decided", "find_policy", "read_policy", "score",
]  # fmt: skip
