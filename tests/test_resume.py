"""Resumed runs lose nothing, repeat nothing, and never use another run's results."""

from __future__ import annotations

import json
import os
import signal
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from command_line import started
from keyhole.core.errors import InputError
from keyhole.core.journal import Journal, digest, expect_same_run

RUN = {"model": "bert", "method": {"name": "greedy", "share": 0.01, "layers": (1, 2)}}


def test_finished_pieces_come_back(tmp_path):
    path = tmp_path / "run.jsonl"
    with Journal(path, RUN) as journal:
        assert not journal.records
        journal.add({"a": {"flips": 1}, "b": {"flips": 0}})
        journal.add({"c": {"flips": 2}})
    with Journal(path, RUN) as journal:
        assert journal.records == {
            "a": {"flips": 1},
            "b": {"flips": 0},
            "c": {"flips": 2},
        }
        assert "b" in journal
        assert "d" not in journal
        journal.add({"d": {"flips": 3}})
    lines = path.read_text().splitlines()
    assert json.loads(lines[0]) == json.loads(json.dumps(RUN))
    assert [json.loads(line)["key"] for line in lines[1:]] == ["a", "b", "c", "d"]


def test_without_a_file_it_remembers_in_memory():
    with Journal(None, RUN) as journal:
        journal.add({"a": {"flips": 1}})
        assert journal.records == {"a": {"flips": 1}}


@given(st.data())
def test_a_line_that_a_crash_cut_off_is_dropped(tmp_path_factory, data):
    """Wherever the file was cut off, whole lines are kept and the run resumes."""
    path = tmp_path_factory.mktemp("cut") / "run.jsonl"
    with Journal(path, RUN) as journal:
        journal.add({"a": {"text": "ä\u2028b"}, "b": {}})
    whole = path.read_bytes()
    end = data.draw(st.integers(0, len(whole)))
    path.write_bytes(whole[:end])
    kept = max(0, whole[:end].count(b"\n") - 1)
    with Journal(path, RUN) as journal:
        assert list(journal.records) == ["a", "b"][:kept]
        journal.add({"c": {}})
    with Journal(path, RUN) as journal:
        assert list(journal.records) == [*["a", "b"][:kept], "c"]


KILLED = """
import os, signal, sys
from keyhole.core.journal import Journal
journal = Journal(sys.argv[1], {"model": "bert"})
journal.add({"a": {"flips": 1}})
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_was_added_survives_a_kill(tmp_path):
    with started(
        [sys.executable, "-c", KILLED, tmp_path / "run.jsonl"], env=os.environ
    ) as process:
        assert process.wait(60) == -signal.SIGKILL
    with Journal(tmp_path / "run.jsonl", {"model": "bert"}) as journal:
        assert journal.records == {"a": {"flips": 1}}


def changed(**changes):
    return {**RUN, "method": {**RUN["method"], **changes}}


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({**RUN, "model": "gpt2"}, "has model gpt2, that of .* has model bert"),
        (
            changed(share=0.02),
            "has method share 0.02, that of .* has method share 0.01",
        ),
        (
            changed(layers=(1, 3)),
            r"has method layers \[1, 3\], that of .* has method layers \[1, 2",
        ),
        (changed(seed=1), "has method seed 1, that of .* has method seed None"),
        ({"model": "bert"}, "has method None, that of .* has method {'name': 'greedy'"),
    ],
)
def test_a_file_of_another_run_is_refused_and_left_alone(tmp_path, other, words):
    path = tmp_path / "run.jsonl"
    with Journal(path, RUN) as journal:
        journal.add({"a": {}})
    before = path.read_bytes()
    with pytest.raises(InputError, match=rf"^this run {words}"):
        Journal(path, other)
    assert path.read_bytes() == before


def test_tuples_and_lists_are_the_same_run(tmp_path):
    expect_same_run("file", {"layers": (1, 2)}, {"layers": [1, 2]})
    with pytest.raises(InputError, match=r"this run has layers .*, that of .* has"):
        expect_same_run("file", {"layers": (1, 2)}, "no run at all")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "my own notes\n",
            r"^expected JSON in .*run\.jsonl:1, got 'my own notes': choose another",
        ),
        (
            "[1]\n",
            r"^expected an object in .*run\.jsonl:1, got '\[1\]': choose another",
        ),
        (
            '{"model": "bert"}\nnotes\n',
            r"^expected JSON in .*run\.jsonl:2, got 'notes': remove",
        ),
        (
            '{"model": "bert"}\n{"flips": 1}\n',
            r"run\.jsonl:2 has no key .*: remove this line",
        ),
    ],
)
def test_files_that_are_no_journal_are_refused_and_left_alone(tmp_path, text, words):
    path = tmp_path / "run.jsonl"
    path.write_text(text)
    with pytest.raises(InputError, match=words):
        Journal(path, {"model": "bert"})
    assert path.read_text() == text


def test_force_begins_anew_where_the_file_is_of_no_run_and_never_drops_a_damaged_record(
    tmp_path,
):
    path = tmp_path / "run.jsonl"
    path.write_text("my own notes\n")
    with Journal(path, RUN, force=True) as journal:
        journal.add({"a": {"flips": 1}, "b": {}})
    path.write_text(path.read_text().replace('"flips"', "flips"))
    with pytest.raises(
        InputError, match=r"run\.jsonl:2, .*: remove this line, and only what it"
    ):
        Journal(path, RUN, force=True)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([lines[0], lines[2]]))
    with Journal(path, RUN, force=True) as journal:
        assert list(journal.records) == ["b"]


@pytest.mark.parametrize("seconds", ["1" + "0" * 400, "[]", '"x"', "null"])
def test_a_record_that_cannot_be_read_says_what_to_do(tmp_path, seconds):
    path = tmp_path / "run.jsonl"
    path.write_text(f'{json.dumps(RUN)}\n{{"key": "a", "seconds": {seconds}}}\n')
    with (
        Journal(path, RUN) as journal,
        pytest.raises(InputError, match=r"under a .*: remove this"),
    ):
        journal.recall("a", lambda record: float(record["seconds"]))


def test_no_folder_and_no_text(tmp_path):
    with pytest.raises(InputError, match=r"^cannot (read|write) .*run\.jsonl"):
        Journal(tmp_path / "no" / "run.jsonl", RUN)
    (tmp_path / "image").write_bytes(b"\xff\xfe\n")
    with pytest.raises(InputError, match=r"^cannot (read|write) .*image"):
        Journal(tmp_path / "image", RUN)


def test_nan_is_not_written(tmp_path):
    with (
        Journal(tmp_path / "run.jsonl", RUN) as journal,
        pytest.raises(ValueError, match="Out of range float values"),
    ):
        journal.add({"a": {"error": float("nan")}})


def test_a_digest_tells_things_apart():
    assert digest("a", {"b": 1, "c": 2}) == digest("a", {"c": 2, "b": 1})
    assert (
        len({digest("a"), digest("b"), digest(b"a"), digest(["a"]), digest("a", "b")})
        == 5
    )
    assert len(digest("a")) == 16
    assert set(digest("a")) <= set("0123456789abcdef")
