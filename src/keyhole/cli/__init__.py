"""The command line, one module per command. Importing a module registers its command."""

from keyhole.cli import audit, extract, invert, report, rehearse  # noqa: F401, I001 - the order of --help
from keyhole.cli.frame import app, main

__all__ = ["app", "main"]
