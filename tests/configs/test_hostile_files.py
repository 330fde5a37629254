"""Huge, broken, endless or deeply nested files cost little time and run nothing."""

from __future__ import annotations

import os
import time

import pytest

from keyhole import configs
from keyhole.configs.finding import MAX_PARSED, MAX_SEARCHED
from keyhole.core.errors import InputError

WORD = "# qdrant\n"


def unread(path):
    checked = configs.check([path])
    assert checked.findings == ()
    return [file.reason for file in checked.unread]


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("config.json", '{"output_scores": ' + "[" * 100_000, "nesting"),
        ("config.json", '{"output_scores": 1, "output_scores": 2}', "twice"),
        ("config.json", "output_scores", "JSON"),
        ("config.json", '{"output_scores": "\0"}', "NUL"),
        ("big.yaml", WORD + "x" * MAX_PARSED, "more than"),
    ],
)
def test_an_unreadable_file_is_reported_with_the_reason(tmp_path, name, text, reason):
    (tmp_path / name).write_text(text)
    (message,) = unread(tmp_path / name)
    assert reason in message
    assert configs.check([tmp_path]).exit_code() == 3


@pytest.mark.parametrize(
    "text",
    [
        WORD + "[" * 100_000,
        WORD + "- " * 20_000,
        WORD + "{a: " * 10_000,
        "a: &a [qdrant, qdrant]\n"
        + "".join(f"b{n}: &b{n} [*a, *a]\n" for n in range(2_000)),
        "&a [qdrant, *a]",
        "!!python/object/apply:os.system ['touch qdrant-was-run']",
        "? [qdrant]\n: x\n",
        WORD + "\\" * 100_000,
        WORD + "'" * 99_999,
    ],
)
def test_hostile_yaml_is_handled_quickly(tmp_path, text, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.yaml").write_text(text)
    started = time.process_time()
    assert configs.check([tmp_path]).findings == ()
    assert time.process_time() - started < 2
    assert [path.name for path in tmp_path.iterdir()] == ["x.yaml"]


@pytest.mark.parametrize("name", ["Dockerfile", "x.service", "x.sh", "config.pbtxt"])
def test_hostile_texts_are_handled_quickly(tmp_path, name):
    for text in (
        "CMD " + "\\\n" * 40_000,
        "output [" * 10_000,
        "ExecStart=" + "\\a" * 40_000,
    ):
        (tmp_path / name).write_text("# qdrant hidden\n" + text)
        started = time.process_time()
        assert configs.check([tmp_path]).findings == ()
        assert time.process_time() - started < 2, text[:20]


def test_a_large_file_without_words_of_its_kind_is_skipped(tmp_path):
    (tmp_path / "large.yaml").write_bytes(b"a: b\n" * 600_000)
    assert unread(tmp_path) == []


def test_a_huge_file_is_not_read_to_its_end(tmp_path):
    with (tmp_path / "sparse.yaml").open("wb") as file:
        file.truncate(MAX_SEARCHED * 1000)
    (reason,) = unread(tmp_path)
    assert "more than" in reason


def test_links_in_folders_are_not_followed(tmp_path):
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "around").symlink_to(tmp_path)
    (inside / "loop.yaml").symlink_to("loop.yaml")
    (inside / "zero.yaml").symlink_to("/dev/zero")
    os.mkfifo(inside / "pipe.yaml")
    checked = configs.check([tmp_path])
    assert (checked.files, checked.unread) == (0, ())


@pytest.mark.parametrize(
    "name", ["missing.yaml", "pipe.yaml", "loop.yaml", "a\0b", "n" * 300]
)
def test_a_named_path_must_be_a_file(tmp_path, name):
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "loop.yaml").symlink_to("loop.yaml")
    with pytest.raises(InputError, match="cannot read "):
        configs.check([tmp_path / name])


def test_a_named_file_of_unknown_kind_is_not_clean(tmp_path):
    (tmp_path / "notes.md").write_text("localhost")
    assert configs.check([tmp_path / "notes.md"]).exit_code() == 3
    checked = configs.check([tmp_path])
    assert (checked.exit_code(), checked.others) == (0, {".md": 1})


def test_unknown_rules_are_refused(tmp_path):
    with pytest.raises(InputError, match="choose among KH-CONFIG-"):
        configs.check([tmp_path], ignore=["KH-CONFIG-NOTHING"])
