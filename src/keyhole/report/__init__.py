"""Findings to page, terminal and JSON: pure functions of audits, or of what a training gave."""

from keyhole.report.fleet import fleet_table, render_fleet
from keyhole.report.page import render
from keyhole.report.terminal import hardening, table

__all__ = ["fleet_table", "hardening", "render", "render_fleet", "table"]
