"""Texts compared with their originals where the length did not leak."""

from __future__ import annotations

from keyhole.audit.texts import aligned
from keyhole.recover import Mark


def shown(ids, truth):
    tokens = [
        (f" w{id_}" if place else f"w{id_}", Mark.LIKELY, id_)
        for place, id_ in enumerate(ids)
    ]
    pieces = list(aligned(tokens, truth))
    return "".join(piece.text for piece in pieces), [piece.right for piece in pieces]


def test_a_missing_token_does_not_make_those_behind_it_wrong():
    assert shown([1, 3], [1, 2, 3]) == ("w1 ? w3", [True, False, True])
    assert shown([2, 3], [1, 2, 3]) == (" ? w2 w3", [False, True, True])


def test_a_token_too_many_is_wrong_alone():
    assert shown([1, 9, 2], [1, 2]) == ("w1 w9 w2", [True, False, True])


def test_nothing_was_read():
    assert shown([], [1, 2]) == (" ? ?", [False, False])
