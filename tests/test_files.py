import os
import subprocess
import sys

import pytest
import torch

from keyhole.errors import InputError
from keyhole.files import read_tensors, write_tensors, write_text


def test_tensors_and_what_is_said_of_them_come_back(tmp_path):
    path = tmp_path / "a.safetensors"
    table = torch.arange(6.0).view(2, 3)
    write_tensors(path, {"x": table.T}, {"layer": "3"})
    told, tensors = read_tensors(path)
    assert told == {"layer": "3"}
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

    monkeypatch.setattr("keyhole.files.save_file", lambda _, where, **__: fail(where))
    monkeypatch.setattr("pathlib.Path.write_text", fail)
    with pytest.raises(InputError, match="disk full"):
        write(2)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["a"]


def test_what_a_killed_process_had_begun_is_removed(tmp_path):
    ended = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"],
                           capture_output=True, text=True, check=True).stdout.strip()  # fmt: skip
    mine, others = (
        f"a.{os.getppid()}.partial",
        ("a.b.partial", "b.1.partial", f"ab.{ended}.partial"),
    )
    for name in (f"a.{ended}.partial", mine, *others):
        (tmp_path / name).touch()
    write_text(tmp_path / "a", "whole")
    assert {file.name for file in tmp_path.iterdir()} == {"a", mine, *others}


def test_no_folder_to_write_in_and_no_file_to_read(tmp_path):
    nowhere = tmp_path / "no" / "such"
    for write in (lambda: write_text(nowhere, ""), lambda: write_tensors(nowhere, {})):
        with pytest.raises(InputError, match=r"expected a file to write, got .*such"):
            write()
    with pytest.raises(InputError, match=r"expected a leak, got .*such: there is no such file"):
        read_tensors(nowhere, "a leak")
    (tmp_path / "text").write_text("words")
    with pytest.raises(InputError, match=r"expected a leak, got .*text"):
        read_tensors(tmp_path / "text", "a leak")
