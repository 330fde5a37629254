"""Texts from files: lines, tables, objects; anything else is one clear line."""

from __future__ import annotations

import pytest

from keyhole.data import read_texts
from keyhole.errors import InputError

FILES = {
    "lines": ("t.txt", 'one "text"\n\n two \n', ['one "text"', "two"]),
    "tsv": ("t.tsv", 'sentence\tlabel\na "quoted" one\t1\ntwo\t0\n', ['a "quoted" one', "two"]),
    "csv": ("t.csv", 'text,label\n"a, b",1\nc,0\n', ["a, b", "c"]),
    "jsonl": ("t.jsonl", '{"text": "a"}\n\n{"text": "b"}\n', ["a", "b"]),
}


@pytest.mark.parametrize(("name", "content", "texts"), FILES.values(), ids=FILES)
def test_what_is_there_is_read(tmp_path, name, content, texts):
    (tmp_path / name).write_text(content)
    assert read_texts(tmp_path / name) == texts
    assert read_texts(tmp_path / name, limit=1) == texts[:1]


def test_a_column_by_name(tmp_path):
    (tmp_path / "t.csv").write_text("question,text\nwhy,x\n")
    assert read_texts(tmp_path / "t.csv", "question") == ["why"]


WRONG = {
    "nothing": ("t.txt", "\n\n", "expected texts in"),
    "no column": (
        "t.tsv",
        "a\tb\nx\ty\n",
        "expected a column sentence or text in t.tsv:2, got a, b",
    ),
    "no object": ("t.jsonl", '"a"\n', None),
    "broken": ("t.jsonl", '{"text": "a"}\n{"text\n', r"expected JSON in t.jsonl:2"),
    "a number": ("t.jsonl", '{"text": 3}\n', "expected a column"),
}


@pytest.mark.parametrize(("name", "content", "words"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_said(tmp_path, name, content, words):
    (tmp_path / name).write_text(content)
    if words is None:
        assert read_texts(tmp_path / name) == ["a"]  # a line that is a string is a text
        return
    with pytest.raises(InputError, match=words):
        read_texts(tmp_path / name)


def test_no_file(tmp_path):
    with pytest.raises(InputError, match="expected a file with texts"):
        read_texts(tmp_path / "none.txt")
