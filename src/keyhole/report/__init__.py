"""Findings to page, terminal and JSON: pure functions of an Audit, or of what a training gave."""

from keyhole.report.hardening import hardening
from keyhole.report.page import render
from keyhole.report.plots import figure
from keyhole.report.terminal import table

__all__ = ["figure", "hardening", "render", "table"]
