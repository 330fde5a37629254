"""The meaning of an audit: rules, severities, families and a verdict.

`assess(audit)` reads an `Audit` and nothing else. All pages, tables and files are made
from the `Assessment` that it returns, so that no two of them can disagree.
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
    assessed,
    compared,
)
from keyhole.assess.policy import Policy, decided, find_policy, read_policy
from keyhole.assess.severity import Score, Severity, score
from keyhole.core.exposure import RULES, Family, Rule

__all__ = [
    "RULES",
    "Assessment",
    "Card",
    "Decision",
    "Family",
    "FleetAssessment",
    "Ignore",
    "Item",
    "Level",
    "Policy",
    "Rule",
    "Ruled",
    "Ruling",
    "Score",
    "Severity",
    "State",
    "assess",
    "assess_fleet",
    "assessed",
    "compared",
    "decided",
    "find_policy",
    "read_policy",
    "score",
]
