"""The command line: one module per command, each of which parses, makes one library call, prints.

Command modules load torch inside their functions, so that `--help` need not wait for it.
"""

from keyhole.cli import (
    audit,
    check_config,
    disrupt,
    extract,
    harden,
    invert,
    lab,
    lab_targets,
    policy,
    recover,
    report,
)
from keyhole.cli.app import app, main

# Registered with the application as they are imported.
COMMANDS = (
    audit, extract, recover, invert, disrupt, harden, report, check_config, policy, lab,
    lab_targets,
)  # fmt: skip

__all__ = ["app", "main"]
