"""The command line: a module for each command, which parses, makes one library call and prints.

A command's module is loaded only when the command is used (app.py), and imports torch
inside its functions, so that `--help` is quick.
"""

from keyhole.cli.app import app, main

__all__ = ["app", "main"]
