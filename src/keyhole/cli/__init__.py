"""The command line: one module per command, imported when it is called."""

from keyhole.cli.app import app, main

__all__ = ["app", "main"]
