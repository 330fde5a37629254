"""Checks of configurations for settings that open what attacks need: no torch, no network.

    configs.check(["deploy/", "config.json"])
        -> Checked: .findings .recognised .skipped .unread .exit_code()

Nothing is run. registry.py lists the kinds of configuration with the files that each
reads.
"""

from keyhole.configs.finding import (
    Checked,
    Finding,
    Level,
    Recognised,
    Rule,
    Skipped,
    Unread,
)
from keyhole.configs.registry import check

__all__ = [
    "Checked",
    "Finding",
    "Level",
    "Recognised",
    "Rule",
    "Skipped",
    "Unread",
    "check",
]
