"""The command line, one module per command. Importing a module registers its command."""

from keyhole.cli import audit, extract, invert, text, disrupt, harden, report, rehearse  # noqa: I001 - as in --help
from keyhole.cli.frame import app, main

__all__ = [
    "app", "audit", "disrupt", "extract", "harden", "invert", "main", "rehearse", "report", "text",
]  # fmt: skip
