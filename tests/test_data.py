"""Examples and texts from files of every kind, and one clear line for a wrong one."""

from __future__ import annotations

import json
import sys

import pytest

import tiny_models
from keyhole.core.errors import InputError
from keyhole.data import Example, encode, from_rows, read_examples, read_texts


def write(folder, name, text):
    path = folder / name
    path.write_text(text, "utf-8")
    return path


def test_sst2_keeps_quotation_marks(tmp_path):
    path = write(
        tmp_path, "dev.tsv", 'sentence\tlabel\na "fine film \t1\nbad\x85 one\t0\n'
    )
    first, second = read_examples(path)
    assert first == Example("dev.tsv:2", 1, 'a "fine film ')
    assert (second.label, second.text) == (0, "bad\x85 one")


def test_csv_with_names_and_two_texts(tmp_path):
    path = write(tmp_path, "a.csv", 'p,h,gold\n"one, two",three,no\nx,y,yes\n')
    found = read_examples(path, text=("p", "h"), label="gold", names=("no", "yes"))
    assert [(example.text, example.second, example.label) for example in found] == [
        ("one, two", "three", 0),
        ("x", "y", 1),
    ]


def test_jsonl_table_and_limit(tmp_path):
    lines = "".join(json.dumps({"text": f"t{i}", "label": i}) + "\n" for i in range(4))
    assert [
        example.label
        for example in read_examples(write(tmp_path, "a.jsonl", lines), limit=2)
    ] == [
        0,
        1,
    ]


def test_hellaswag(tmp_path):
    row = {"ctx": "He", "endings": ["a", "b", "c", "d"], "label": "3"}
    (example,) = read_examples(write(tmp_path, "h.jsonl", json.dumps(row) + "\n"))
    assert (example.text, example.choices, example.label) == (
        "He",
        ("a", "b", "c", "d"),
        3,
    )


def test_examples_of_one_id_are_told_apart(tmp_path):
    row = {
        "context": "c",
        "question": "q?",
        "answers": ["a", "b"],
        "label": 0,
        "id_string": "val",
    }
    rows = [row, {**row, "label": 1}, {**row, "id_string": "other"}]
    found = read_examples(write(tmp_path, "val.json", json.dumps(rows)))
    assert [example.id for example in found] == ["val", "val (2)", "other"]
    assert [example.label for example in found] == [0, 1, 0]


def test_dream_is_one_example_a_question(tmp_path):
    asked = [
        {"question": "Q?", "choice": ["a", "b", "c"], "answer": "b"},
        {"question": "R?", "choice": ["d", "e", "f"], "answer": "d"},
    ]
    entry = [["M: hi", "W: ho"], asked, "7-1"]
    first, second = read_examples(write(tmp_path, "dev.json", json.dumps([entry])))
    assert first == Example("7-1#0", 1, "M: hi\nW: ho", "", ("Q? a", "Q? b", "Q? c"))
    assert second.label == 0


def test_reclor(tmp_path):
    row = {
        "context": "C",
        "question": "Q",
        "answers": ["a", "b", "c", "d"],
        "label": 2,
        "id_string": "val_0",
    }
    (example,) = read_examples(write(tmp_path, "val.json", json.dumps([row])))
    assert (example.id, example.label, example.choices[2]) == ("val_0", 2, "Q c")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.tsv", "sentence\tlabel\nfine\t1\nbad\n", "a.tsv:3"),
        ("a.tsv", "sentence\tlabel\nfine\tyes\n", "number in a.tsv:2, got 'yes'"),
        ("a.tsv", "words\tlabel\nfine\t1\n", "a.tsv:2 has no text in a column"),
        ("a.tsv", "sentence\tclass\nfine\t1\n", "'label' in a.tsv:2"),
        ("a.jsonl", '{"text": "a", "label": 1}\n{"text"\n', "a.jsonl:2"),
        ("a.jsonl", "3\n", "a.jsonl:1"),
        (
            "a.jsonl",
            '{"ctx": "a", "endings": ["b", "c"], "label": 2}\n',
            "from 0 to 1, not 2",
        ),
        ("a.jsonl", '{"ctx": "a", "endings": ["b", "c"], "label": -1}\n', "from 0"),
        ("a.jsonl", '{"text": "a", "label": 0.5}\n', "a.jsonl:1"),
        ("a.json", '[{"context": "a"}]', "'answers' in a.json[1]"),
        ("a.json", "[[[], []]]", "a.json[1]"),
        (
            "a.json",
            '[[["x"], [{"question": "q", "choice": ["a", "b"], "answer": "c"}], "1"]]',
            "none of the choices",
        ),
        ("a.json", "[1, ", "expected JSON"),
        ("a.tsv", "sentence\tlabel\n", "there are no texts"),
    ],
)
def test_a_wrong_file_is_one_line_with_the_place(tmp_path, name, text, message):
    with pytest.raises(InputError) as error:
        read_examples(write(tmp_path, name, text))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_no_file_and_no_datasets(tmp_path, monkeypatch):
    with pytest.raises(InputError, match="no such file"):
        read_examples(tmp_path / "none.tsv")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InputError, match=r"pip install 'keyhole\[hub\]'"):
        read_examples("glue:sst2")


def test_rows_of_the_hub():
    rows = [{"sentence": "fine", "label": 1, "idx": 0}]
    assert list(from_rows(rows, "glue")) == [Example("glue[1]", 1, "fine")]


def test_encoding_texts_pairs_and_choices():
    tokenizer = tiny_models.tokenizer()
    batch, labels = encode(tokenizer, [Example("a", 1, "w1 w2"), Example("b", 0, "w3")])
    assert batch["input_ids"].shape == (2, 4)
    assert batch["special_tokens_mask"].tolist() == [[1, 0, 0, 1], [1, 0, 1, 1]]
    assert labels.tolist() == [1, 0]
    choices = [Example("c", 1, "w1", choices=("w2", "w3 w4"))]
    batch, _ = encode(tokenizer, choices)
    assert batch["input_ids"].shape[:2] == (1, 2)
    with pytest.raises(InputError, match="as many choices"):
        encode(tokenizer, [Example("a", 1, "w1"), *choices])


TEXT_FILES = {
    "lines": ("t.txt", 'one "text"\n\n two \n', ['one "text"', "two"]),
    "tsv": (
        "t.tsv",
        'sentence\tlabel\na "quoted" one\t1\ntwo\t0\n',
        ['a "quoted" one', "two"],
    ),
    "csv": ("t.csv", 'text,label\n"a, b",1\nc,0\n', ["a, b", "c"]),
    "csv, other line ends": (
        "t.csv",
        "text\na\u2028b\nc\x85d\n",
        ["a\u2028b", "c\x85d"],
    ),
    "csv, unnamed index": ("t.csv", ",text\nrow 7,a\nrow 8,b\n", ["a", "b"]),
    "csv, mark of Excel": ("t.csv", "\ufefftext\na\n", ["a"]),
    "lines, mark of Excel": ("t.txt", "\ufeffa\n", ["a"]),
    "strings": ("t.jsonl", '"a"\n', ["a"]),
    "jsonl": ("t.jsonl", '{"text": "a"}\n\n{"text": "b"}\n', ["a", "b"]),
}


@pytest.mark.parametrize(
    ("name", "content", "texts"), TEXT_FILES.values(), ids=TEXT_FILES
)
def test_texts_are_read(tmp_path, name, content, texts):
    (tmp_path / name).write_text(content, "utf-8")
    assert read_texts(tmp_path / name) == texts
    assert read_texts(tmp_path / name, limit=1) == texts[:1]


def test_texts_of_a_column(tmp_path):
    (tmp_path / "t.csv").write_text("question,text\nwhy,x\n")
    assert read_texts(tmp_path / "t.csv", "question") == ["why"]


WRONG_TEXTS = {
    "nothing": ("t.txt", "\n\n", "there are no texts in"),
    "no column": (
        "t.tsv",
        "a\tb\nx\ty\n",
        "t.tsv:2 has no text in a column sentence or text, only a, b",
    ),
    "broken": ("t.jsonl", '{"text": "a"}\n{"text\n', r"expected JSON in t.jsonl:2"),
    "a number": ("t.jsonl", '{"text": 3}\n', "has no text in a column"),
}


@pytest.mark.parametrize(
    ("name", "content", "words"), WRONG_TEXTS.values(), ids=WRONG_TEXTS
)
def test_what_is_wrong_with_texts_is_said(tmp_path, name, content, words):
    (tmp_path / name).write_text(content)
    with pytest.raises(InputError, match=words):
        read_texts(tmp_path / name)


def test_no_file_of_texts(tmp_path):
    with pytest.raises(
        InputError, match=r"^cannot read .*none\.txt as a file with texts"
    ):
        read_texts(tmp_path / "none.txt")


@pytest.mark.parametrize("others", [[], [Example("b", 0, "w1 w2")]])
def test_a_text_without_a_token_is_refused(others):
    with pytest.raises(InputError, match="a text must have at least one token: ' '"):
        encode(tiny_models.tokenizer(causal=True), [*others, Example("a", 0, " ")])
