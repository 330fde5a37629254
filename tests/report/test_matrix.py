"""The matrix against a table written down by hand; runs of tokens."""

from __future__ import annotations

import pytest

from exposures import called
from keyhole.assess import assess
from keyhole.core import Audit, Finding, Piece, Reading, Readings, Status
from keyhole.report import page, readings


def cell(
    layer: int, precision: str, right: int, of: int = 4, exact: bool = False
) -> Readings:
    pieces = tuple(Piece(f" w{n}", "verified", n < right) for n in range(of))
    return Readings("hidden", layer, precision, (Reading("a", pieces, exact, exact),))


def finding(
    exposure: str, *cells: Readings, part: str = "it", attack: str = "A"
) -> Finding:
    known = cells[0].known if cells else 1.0
    sought = "text" if cells else "weights"
    return Finding(
        called(exposure, part),
        attack,
        Status.INEXACT,
        "",
        "",
        None,
        1,
        0.0,
        known=known,
        sought=sought,
        texts=cells,
    )


def test_what_leaks_by_layer_and_precision():
    whole = finding(
        "hidden states of layer 10",
        cell(10, "float32", 4, exact=True),
        cell(10, "int8", 2),
    )
    second = finding("hidden states of layer 2", cell(2, "float32", 1))
    pooled = finding("pooled embedding", cell(12, "float32", 0))
    scores = finding("full scores", part="a head")
    seen = assess(Audit("t", "i", (second, pooled, whole, scores)))
    by_name = {part.name: part for part in page.parts(seen)}
    model = by_name["it"]
    assert model.columns == ["2", "10", page.WHOLE]
    labels = {
        (kind, precision, column): (cell.words, cell.shade)
        for kind, rows in model.kinds.items()
        for precision, row in rows.items()
        for column, cell in row.items()
    }
    assert labels == {
        ("hidden states", "float32", "2"): ("25%", 2),
        ("hidden states", "float32", "10"): ("exact", 5),
        ("hidden states", "int8", "10"): ("50%", 3),
        ("pooled embedding", "float32", page.WHOLE): ("0%", 0),
    }
    assert [item.finding for item in by_name["a head"].chips] == [scores]
    assert not model.chips


def test_of_two_attacks_on_one_leak_the_better_counts():
    worse = finding("hidden states of layer 1", cell(1, "float32", 1), attack="worse")
    better = finding("hidden states of layer 1", cell(1, "float32", 3), attack="better")
    for order in ((worse, better), (better, worse)):
        (part,) = page.parts(assess(Audit("t", "i", order)))
        assert part.kinds["hidden states"]["float32"]["1"].item.finding is better


@pytest.mark.parametrize(
    ("share", "shade"), [(-1, 0), (0, 0), (0.01, 1), (0.2, 2), (1, 5), (9, 5)]
)
def test_shades(share, shade):
    assert page.shade(share) == shade


def test_tokens_alike_are_one_run_and_precisions_alike_one_row():
    pieces = (
        Piece("a", "verified", True),
        Piece(" b", "verified", None),
        Piece(" c", "likely", False),
        Piece(" d", "no such mark", True),
    )
    assert readings.runs(pieces) == (
        readings.Run("a b", "verified", wrong=False),
        readings.Run(" c", "likely", wrong=True),
        readings.Run(" d", "unread", wrong=False),
    )
    first = Reading("x", pieces, False, False)
    other = Reading("x", pieces[:1], True, True)
    read = {"float32": first, "int8": other, "bfloat16": first}
    cells = [Readings("hidden", 1, name, (reading,)) for name, reading in read.items()]
    (text,) = readings.shown(finding("hidden states of layer 1", *cells))
    assert [row.precisions for row in text.rows] == [("float32", "bfloat16"), ("int8",)]
    assert text.rows[0].marks == "2 verified, 1 likely, 1 no such mark, 1 wrong"
