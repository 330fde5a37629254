"""`keyhole lab cost` as people call it."""

from __future__ import annotations

import json
from functools import partial

import pytest

from command_line import inside


@pytest.fixture
def keyhole(tmp_path, monkeypatch, capsys):
    return partial(inside, "lab", "cost", cwd=tmp_path, monkeypatch=monkeypatch, capsys=capsys)


def test_words_and_json(keyhole):
    words = ("head", "-o", "width=64", "-o", "rank=8", "-o", "rate=50", "-o", "price=0.01",
             "-o", "daily=100")  # fmt: skip
    assert "100 queries a day hold it for 10.2 days" in keyhole(*words).stdout
    data = json.loads(keyhole(*words, "--json").stdout)
    assert (data["queries"], data["lower_bound"], data["money"]) == (1024, 1024, 10.24)
    layer = keyhole("layer", "-o", "width=384", "-o", "heads=12", "--json")
    assert json.loads(layer.stdout)["lower_bound"] == 1474
    text = keyhole("text", "-o", "tokens=12", "-o", "texts=10", "--json")
    assert json.loads(text.stdout)["passes"] == 196_700


@pytest.mark.parametrize(
    "words",
    [
        ("head", "-o", "width=0"),
        ("head", "-o", "width=8", "-o", "exposure=smell"),
        ("layer", "-o", "width=8", "-o", "exposure=log-probabilities"),
        ("text", "-o", "tokens=1000"),
    ],
)
def test_wrong_input_is_one_line(keyhole, words):
    done = keyhole(*words)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("keyhole: ")
