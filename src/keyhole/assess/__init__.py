"""What an audit means: rules, severities, families and a verdict, computed once for all formats.

`assess(audit)` reads an `Audit` and nothing else; pages, tables and files for pipelines are made
from the `Assessment` that it gives, so no two of them can disagree.
"""

from keyhole.assess.assessment import Assessment, Card, Item, Level, assess
from keyhole.assess.rules import RULES, Family, Rule, family_of, rule_of
from keyhole.assess.severity import Scale, Score, Severity, score

__all__ = [
    "RULES", "Assessment", "Card", "Family", "Item", "Level", "Rule", "Scale", "Score", "Severity",
    "assess", "family_of", "rule_of", "score",
]  # fmt: skip
