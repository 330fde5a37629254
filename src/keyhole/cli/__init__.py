"""The command line: one module per command, each of which parses, makes one library call, prints.

A command's module is loaded when the command is asked for (app.py), and loads torch inside its
functions, so that `--help` need not wait for it.
"""

from keyhole.cli.app import app, main

__all__ = ["app", "main"]
