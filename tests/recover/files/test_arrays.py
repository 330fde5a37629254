"""Files of other programs as tensors by name, and what is refused."""

from __future__ import annotations

import os
import pickle

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import tiny_models as tiny
from keyhole.core.errors import InputError
from keyhole.recover.files.arrays import arrays_of, read_dump

ROWS = torch.arange(12.0).reshape(3, 4)


def shapes(path):
    return {
        name: tuple(array.shape) for name, array in read_dump(path)[1].arrays.items()
    }


@pytest.fixture(scope="module")
def outputs():
    with torch.no_grad():
        return tiny.model("gpt2")(torch.tensor([[5, 6, 7]]), output_hidden_states=True)


def test_files_of_each_kind(tmp_path):
    np.save(tmp_path / "rows.npy", ROWS.numpy())
    np.savez(tmp_path / "rows.npz", a=ROWS.numpy(), b=ROWS.half().numpy())
    save_file({"a": ROWS}, tmp_path / "rows.safetensors")
    torch.save(
        {"a": ROWS, "about": "text", "inner": [ROWS, None]}, tmp_path / "rows.pt"
    )
    torch.save(ROWS, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert shapes(tmp_path / "rows.npy") == {"": (3, 4)}
    assert read_dump(tmp_path / "rows.npz")[1].arrays["b"].dtype == torch.float16
    assert shapes(tmp_path / "rows.safetensors") == {"a": (3, 4)}
    assert shapes(tmp_path / "rows.pt") == {"a": (3, 4), "inner.0": (3, 4)}
    assert torch.equal(read_dump(tmp_path / "old.pt")[1].arrays[""], ROWS)


def test_the_order_of_bytes_does_not_matter(tmp_path):
    np.save(tmp_path / "rows.npy", ROWS.numpy().astype(">f4"))
    assert torch.equal(read_dump(tmp_path / "rows.npy")[1].arrays[""], ROWS)


@pytest.mark.skipif(
    np.dtype(np.longdouble).itemsize == 8, reason="the same as float64 here"
)
def test_numbers_that_torch_lacks_are_refused():
    with pytest.raises(InputError, match=r"cannot read a of .*: save it as float32"):
        arrays_of({"a": ROWS.numpy().astype(np.longdouble)})


def test_the_suffix_does_not_matter(tmp_path):
    torch.save(ROWS, tmp_path / "rows.npy")
    assert shapes(tmp_path / "rows.npy") == {"": (3, 4)}


def test_objects_of_transformers_are_read_without_its_code(tmp_path, outputs):
    torch.save(outputs.past_key_values, tmp_path / "cache.pt")
    torch.save(outputs, tmp_path / "outputs.pt")
    assert shapes(tmp_path / "cache.pt")["layers.2.values"] == (1, 4, 3, 8)
    read = read_dump(tmp_path / "outputs.pt")[1].arrays
    assert torch.equal(read["hidden_states.1"], outputs.hidden_states[1])
    keys = outputs.past_key_values.layers[1].keys
    assert torch.equal(read["past_key_values.layers.1.keys"], keys)
    assert torch.equal(arrays_of(outputs.past_key_values)["layers.1.keys"], keys)


class Evil:
    def __reduce__(self):
        return os.mkdir, ("ran",)


def test_no_code_of_a_file_is_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"rows": ROWS, "more": Evil()}, "evil.pt")
    (tmp_path / "evil.pkl").write_bytes(pickle.dumps(Evil()))
    np.save("evil.npy", np.array([Evil()], dtype=object), allow_pickle=True)
    np.savez("evil.npz", a=np.array([Evil()], dtype=object))
    for name, words in {
        "evil.pt": r"mkdir, which would run code when loaded: save a dictionary",
        "evil.pkl": "cannot read evil.pkl as tensors saved with torch.save",
        "evil.npy": "cannot read evil.npy as arrays of numbers",
        "evil.npz": "cannot read evil.npz as arrays of numbers",
    }.items():
        with pytest.raises(InputError, match=words) as raised:
            read_dump(name)
        assert "\n" not in str(raised.value)
    assert not (tmp_path / "ran").exists()


def test_other_files_are_refused(tmp_path):
    (tmp_path / "words.txt").write_text("nothing but words, and more of them")
    (tmp_path / "cut.npy").write_bytes(b"\x93NUMPY\x01\x00v")
    (tmp_path / "cut.pt").write_bytes(b"PK\x03\x04 and no more")
    (tmp_path / "empty").write_bytes(b"")
    for file in tmp_path.iterdir():
        with pytest.raises(InputError, match=f"{file}"):
            read_dump(file)
    torch.save({"no": "arrays"}, tmp_path / "none.pt")
    with pytest.raises(InputError, match="no arrays or tensors in dict"):
        read_dump(tmp_path / "none.pt")
    with pytest.raises(InputError, match="more than 8 lists deep"):
        arrays_of([[[[[[[[[[ROWS]]]]]]]]]])
