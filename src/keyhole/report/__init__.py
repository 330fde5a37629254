"""Findings to page, terminal and JSON: pure functions of an Audit."""

from keyhole.report.page import render
from keyhole.report.terminal import table

__all__ = ["render", "table"]
