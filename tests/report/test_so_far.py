"""The interval that is shown while a store is read holds whatever the rest is."""

from __future__ import annotations

import pytest

from keyhole.core.finding import Estimate, Piece, Reading
from keyhole.report import words


def reading(text: str, exact: bool = True) -> Reading:
    pieces = (Piece(text, "verified" if exact else "unread", exact),)
    return Reading(original=text, pieces=pieces, exact=exact, verified=exact)


@pytest.mark.parametrize(
    ("read", "tried"), [(0, 1), (3, 3), (3, 9), (12, 20), (20, 20)]
)
def test_the_share_holds_for_all_and_for_none_of_the_rest(read, tried):
    readings = [reading(f"text {k}", k < read) for k in range(tried)]
    said = words.so_far(readings[:1], readings, 20, 60)
    least = Estimate.of(read, 20, 60).least
    most = Estimate.of(read + 20 - tried, 20, 60).most
    share = Estimate(read, 20, 60, least, most).share
    assert said.startswith(f"read {read} of 20 ({tried} tried); {share} of your texts")
    assert said.endswith(": text 0") == (read > 0)


def test_a_text_does_not_steer_the_terminal():
    said = words.so_far([reading("a\x1b[2Jb")], [reading("a\x1b[2Jb")], 1, 1)
    assert "\x1b" not in said


def test_what_begins():
    assert (
        words.begins(20, 60)
        == "reading 20 of 60 texts, chosen at random, the shortest first"
    )
    assert words.begins(5, 5) == "reading all of 5 texts, the shortest first"
