"""Answers that are not exact: intervals, least squares, half-spaces, exams that allow for it."""
