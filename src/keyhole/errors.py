"""The ways a run can be refused. Everything else is a Status (see results/status.py)."""

from __future__ import annotations


class KeyholeError(Exception):
    """A failure whose message is one line a person can act on."""


class InputError(KeyholeError, ValueError):
    """What the caller gave cannot be used: `expected …, got …`. The CLI exits with 2."""


class MissingExtra(InputError):
    """A package that only some of Keyhole needs is not installed; the message names the extra."""
