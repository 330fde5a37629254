"""Reports of audits, fleets and trainings, as pages, tables and files: pure functions."""

from keyhole.report.fleet import fleet_table, render_fleet
from keyhole.report.page import render
from keyhole.report.terminal import hardening, table

__all__ = ["fleet_table", "hardening", "render", "render_fleet", "table"]
