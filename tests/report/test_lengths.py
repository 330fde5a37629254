"""Texts of a store by length: counted by hand, and the same on the page and the terminal."""

from __future__ import annotations

import json

import pytest

from exposures import called
from keyhole import report
from keyhole.core import Audit, Finding, Piece, Reading, Readings, Status
from keyhole.report import readings as lengths

# Tokens, exact, F1, cosine.
READ = [
    (3, True, 1.0, 1.0),
    (9, False, 0.5, 0.97),
    (10, True, 1.0, 1.0),
    (16, True, 1.0, 1.0),
    (25, False, 0.2, 0.81),
    (40, False, 0.4, 0.99999),
]


def reading(tokens, exact, overlap, similarity, original="a text"):
    pieces = (Piece(" a", "verified" if exact else "unknown", exact),)
    return Reading(original, pieces, exact, exact, "", tokens, overlap, similarity)


def audit(readings):
    cell = Readings("pooled", 1, "as stored", tuple(readings))
    finding = Finding(
        called("stored embedding"),
        "EmbeddingReader",
        Status.INEXACT,
        "",
        "",
        None,
        1,
        0.0,
        sought="text",
        texts=(cell,),
    )
    return Audit("a store", "identity", (finding,))


def test_spans_are_counted_by_length():
    (finding,) = audit(reading(*row) for row in READ).findings
    assert [(span.name, span.tried, span.exact) for span in lengths.spans(finding)] == [
        ("1–9", 2, 1),
        ("10–16", 2, 2),
        ("25 or more", 2, 0),
    ]
    first, second, last = lengths.spans(finding)
    assert (first.overlap, first.similarity) == (0.5, 0.97)
    assert (second.overlap, second.similarity) == (None, None)  # no others
    assert last.overlap == pytest.approx(0.3)
    assert last.similarity == pytest.approx((0.81 + 0.99999) / 2)


def test_what_is_verified_but_not_the_text_is_not_exact():
    piece = Piece(" a", "verified", True)
    cut_off = Reading("a text", (piece,), False, True, "cut off", 3, 1.0, 1.0)
    (finding,) = audit([cut_off]).findings
    assert lengths.spans(finding)[0].exact == 0


def test_the_page_has_them():
    page = report.render(audit(reading(*row) for row in READ))
    whose = "tokens of the store&#39;s own texts"
    for cell in ('<th scope="row">10–16</th>', "50% read exactly", whose):
        assert cell in page
    assert "cosine 0.9999, F1 of tokens 0.40" in page  # not 1.0000: it is not the text


def test_whose_lengths_they_are_is_said():
    known = reading(3, True, 1.0, 1.0)
    unknown = reading(3, True, None, 1.0, original="")
    cases = ([known], [unknown], [known, unknown])
    captions = [lengths.whose(audit(readings).findings[0]) for readings in cases]
    assert captions[0] == "tokens of the store's own texts"
    assert "what was read" in captions[1]
    assert "(1)" in captions[2]


def test_a_page_shows_some_of_very_many():
    page = report.render(
        audit(reading(*READ[0], original=f"text {n}!") for n in range(150))
    )
    assert "The first 100 of 150 texts; the JSON file has all of them." in page
    assert "text 99!" in page
    assert "text 100!" not in page


def test_a_finding_without_lengths_has_no_table():
    bare = Reading("a text", (Piece(" a", "verified", True),), True, True)
    audited = audit([bare])
    assert lengths.spans(audited.findings[0]) == []
    assert "by length" not in report.render(audited)
    assert Audit.from_dict(json.loads(json.dumps(audited.to_dict()))) == audited


def test_the_page_opens_with_a_number_an_example_and_the_texts():
    page = report.render(
        audit([reading(*READ[0], original="a secret of mine"), reading(*READ[1])])
    )
    head, body = page.split('<ul class="cards">')
    assert "1 of 2 texts were read word for word" in head
    assert "<q>a secret of mine</q>" in head
    assert (
        body.count("<details") == body.count(" open>") == 1
    )  # one finding, and it is unfolded
    cards = body.split("</ul>")[0]
    assert "<h2><a" in cards
    assert "Predictions" not in cards  # what was not tried has no card
    assert "Not tried: weights, inputs, predictions." in body
