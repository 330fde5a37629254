"""Moves against lists: every child is its parent with one change, and every change is there."""

from __future__ import annotations

import torch

from keyhole.recover.embedding import moves
from keyhole.recover.embedding.scoring import Texts

PARENTS = Texts.of([[5, 6, 7], [8], [1, 2, 3, 4]], 4)
LISTS = [PARENTS.tokens(row) for row in range(3)]


def children(made):
    texts, rows = made
    return sorted((int(rows[k]), texts.clean().tokens(k)) for k in range(len(texts)))


def test_replaced():
    tokens = torch.arange(100, 100 + 3 * 4 * 2).view(3, 4, 2)
    expected = [
        (row, [*parent[:place], int(token), *parent[place + 1 :]])
        for row, parent in enumerate(LISTS)
        for place in range(len(parent))
        for token in tokens[row, place]
    ]
    assert children(moves.replaced(PARENTS, tokens)) == sorted(expected)


def test_inserted():
    tokens = torch.arange(100, 100 + 3 * 4 * 2).view(3, 4, 2)
    expected = [
        (row, [*parent[:place], int(token), *parent[place:]])
        for row, parent in enumerate(LISTS)
        if len(parent) < 4
        for place in range(len(parent) + 1)
        for token in tokens[row, place]
    ]
    assert children(moves.inserted(PARENTS, tokens)) == sorted(expected)


def test_left_out():
    expected = [
        (row, parent[:place] + parent[place + 1 :])
        for row, parent in enumerate(LISTS)
        if len(parent) > 1
        for place in range(len(parent))
    ]
    assert children(moves.left_out(PARENTS)) == sorted(expected)


def pieces_changed(parent):
    n = range(len(parent) + 1)
    return {
        tuple(parent[:a] + parent[b:c] + parent[a:b] + parent[c:])
        for a in n for b in n for c in n if a <= b <= c
    }  # fmt: skip


def pairs_changed(parent):
    made = set()
    for a in range(len(parent)):
        for b in range(len(parent)):
            other = list(parent)
            other[a], other[b] = other[b], other[a]
            made.add(tuple(other))
    return made


def test_moved_and_swapped():
    generator = torch.Generator().manual_seed(0)
    for move, naive in ((moves.moved, pieces_changed), (moves.swapped, pairs_changed)):
        texts, rows = move(PARENTS, 400, generator)
        for row, parent in enumerate(LISTS):
            made = {tuple(texts.tokens(int(k))) for k in (rows == row).nonzero()}
            assert made == naive(parent)


def test_crossed():
    others = Texts.of([[9, 9, 9, 10], [11, 12], [13]], 4)
    texts, rows = moves.crossed(PARENTS, others)
    assert rows.tolist() == [0, 1, 2]
    assert texts.tokens(0) == [5, 6, 9, 10]
    assert texts.tokens(1) == [8, 12]
    assert texts.tokens(2) == [1, 2, 13]
