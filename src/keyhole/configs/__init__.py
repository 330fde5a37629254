"""Configurations that open what attacks need, read without running anything: no torch, no network.

    configs.check(["deploy/", "config.json"])
        -> Checked: .findings .recognised .skipped .unread .exit_code()

One module per kind of configuration; registry.py lists them with the files that each reads.
"""

from keyhole.configs.finding import Checked, Finding, Level, Recognised, Rule, Skipped, Unread
from keyhole.configs.registry import check

__all__ = ["Checked", "Finding", "Level", "Recognised", "Rule", "Skipped", "Unread", "check"]
