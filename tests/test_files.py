import os
import resource
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from keyhole.core.errors import InputError, KeyholeError
from keyhole.core.files import read_tensors, read_text, write_tensors, write_text
from keyhole.core.journal import Journal


def test_tensors_and_what_is_said_of_them_come_back(tmp_path):
    path = tmp_path / "a.safetensors"
    table = torch.arange(6.0).view(2, 3)
    write_tensors(path, {"x": table.T}, {"layer": "3"})
    metadata, tensors = read_tensors(path)
    assert metadata == {"layer": "3"}
    assert torch.equal(tensors["x"], table.T)


@pytest.mark.parametrize("kind", ["text", "tensors"])
def test_nothing_half_written(tmp_path, monkeypatch, kind):
    path = tmp_path / "a"

    def write(number):
        if kind == "text":
            write_text(path, str(number))
        else:
            write_tensors(path, {"x": torch.tensor(number)})

    write(1)
    before = path.read_bytes()

    def fail(where, *_, **__):
        where.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(
        "safetensors.torch.save_file", lambda _, where, **__: fail(where)
    )
    monkeypatch.setattr("pathlib.Path.write_text", fail)
    with pytest.raises(InputError, match="disk full"):
        write(2)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["a"]


def test_what_a_killed_process_had_begun_is_removed(tmp_path):
    ended = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    mine = f"a.{os.getppid()}.partial"
    others = ("a.b.partial", "b.1.partial", f"ab.{ended}.partial")
    for name in (f"a.{ended}.partial", mine, *others):
        (tmp_path / name).touch()
    write_text(tmp_path / "a", "whole")
    assert {file.name for file in tmp_path.iterdir()} == {"a", mine, *others}


def test_no_folder_to_write_in_and_no_file_to_read(tmp_path):
    nowhere = tmp_path / "no" / "such"
    for write in (lambda: write_text(nowhere, ""), lambda: write_tensors(nowhere, {})):
        with pytest.raises(InputError, match=r"cannot write .*such"):
            write()
    with pytest.raises(
        InputError, match=r"cannot read .*such as a leak: there is no such file"
    ):
        read_tensors(nowhere, "a leak")
    (tmp_path / "text").write_text("words")
    with pytest.raises(InputError, match=r"cannot read .*text as a leak"):
        read_tensors(tmp_path / "text", "a leak")


@contextmanager
def files_of_at_most(size):
    """Let no file of this process grow beyond `size` bytes, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


WRITERS = {
    "text": lambda path: write_text(path, "x" * 10_000),
    "tensors": lambda path: write_tensors(path, {"x": torch.zeros(10_000)}),
}


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_a_full_disk_is_the_machines_fault_and_the_old_file_stays(tmp_path, write):
    path = tmp_path / "a"
    path.write_bytes(b"old")
    with (
        files_of_at_most(1000),
        pytest.raises(KeyholeError, match="cannot write") as failure,
    ):
        write(path)
    assert not isinstance(failure.value, InputError)
    assert path.read_bytes() == b"old"
    assert [file.name for file in tmp_path.iterdir()] == ["a"]


def test_a_journal_on_a_full_disk_keeps_what_it_has(tmp_path):
    path = tmp_path / "run.jsonl"
    with Journal(path, {"run": "this"}) as journal:
        journal.add({"a": {}})
    with (
        files_of_at_most(200),
        pytest.raises(KeyholeError, match="cannot write"),
        Journal(path, {"run": "this"}) as journal,
    ):
        journal.add({"b": {"text": "x" * 10_000}})
    with Journal(path, {"run": "this"}) as journal:
        assert list(journal.records) == ["a"]


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_devices_and_pipes_are_written_to_and_stay_what_they_are(tmp_path, write):
    (tmp_path / "full").symlink_to("/dev/full")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(KeyholeError, match="No space left"):
        write(tmp_path / "full")
    with pytest.raises(InputError, match="No such device"):  # nobody reads from it
        write(tmp_path / "pipe")
    assert (tmp_path / "full").is_char_device()
    assert (tmp_path / "pipe").is_fifo()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["full", "pipe"]


def test_only_plain_files_are_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(InputError, match="it is a device or a pipe"):
            read_text(path, "a text")
    with pytest.raises(InputError, match="it is a folder"):
        read_text(tmp_path, "a text")
    for name in ("x" * 300, "a\0b"):
        with pytest.raises(InputError, match="there is no such file"):
            read_text(tmp_path / name, "a text")
