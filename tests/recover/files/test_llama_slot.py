"""Slots that llama.cpp's own server saved: ids in the clear, and the text from the rest alone."""

from __future__ import annotations

import json

import httpx
import pytest
import torch

import tiny_gguf
from command_line import inside
from keyhole import recover
from keyhole.core.errors import InputError
from keyhole.models.capture import eight_bit_activations, in_blocks
from keyhole.models.demo import open_model
from keyhole.recover.files.arrays import read_slot

TEXT = "the doctor says no"


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    return tiny_gguf.write(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture(scope="module")
def loaded(weights):
    return open_model(str(weights))


@pytest.fixture(scope="module")
def slot(weights):
    tiny_gguf.expect_server()
    with tiny_gguf.serving(weights, f"slots={weights.parent}/") as url:
        asked = {"prompt": TEXT, "n_predict": 1, "temperature": 0}
        httpx.post(f"{url}/completion", json=asked, timeout=60).raise_for_status()
        saved = httpx.post(f"{url}/slots/0?action=save", json={"filename": "slot.bin"}, timeout=60)
        saved.raise_for_status()
    return weights.parent / "slot.bin"


def test_the_ids_are_read_and_checked(slot, loaded):
    (result,) = recover.run(loaded, slot)
    assert (result.method, result.text, result.verified) == ("WrittenIds", TEXT, True)
    assert result.ids == loaded.tokenizer(TEXT)["input_ids"] == list(read_slot(slot).ids)


def test_a_slot_on_the_command_line(slot, weights, monkeypatch, capsys):
    arguments = ["recover", weights.name, "slot.bin", "--json"]
    done = inside(*arguments, cwd=slot.parent, monkeypatch=monkeypatch, capsys=capsys)
    assert done.returncode == 1, done.stderr
    assert json.loads(done.stdout)["text"] == TEXT


@pytest.mark.parametrize("layer", [0, 1])
def test_keys_and_values_alone_give_the_text(layer, slot, loaded):
    (result,) = recover.run(loaded, slot, method="cached-keys", expose=f"kv:{layer}")
    assert (result.method, result.text, result.verified) == ("CachedKeys", TEXT, True)


def test_ids_of_another_text_do_not_fit(slot, loaded, tmp_path):
    content = bytearray(slot.read_bytes())
    place = 8 + 4 * (1 + 3) + 4 * 5  # the sixth id
    assert int.from_bytes(content[place : place + 4], "little") == read_slot(slot).ids[5]
    content[place] ^= 1
    (tmp_path / "changed.bin").write_bytes(content)
    (result,) = recover.run(loaded, tmp_path / "changed.bin")
    assert not result.verified


def test_what_is_no_whole_slot(slot, tmp_path):
    content = slot.read_bytes()
    for size in (8, 12, 40, 200, len(content) // 2, len(content) - 1):
        (tmp_path / "cut.bin").write_bytes(content[:size])
        with pytest.raises(InputError, match=r"slot of llama\.cpp: only its beginning"):
            read_slot(tmp_path / "cut.bin")
    (tmp_path / "long.bin").write_bytes(content + b"more")
    with pytest.raises(InputError, match="4 bytes after the last layer"):
        read_slot(tmp_path / "long.bin")


def test_older_files_and_transposed_values(tmp_path):
    """As servers before the words around the ids wrote them, and without flash attention."""
    ids, cells, width = [7, 8, 9], 3, 4
    keys = torch.arange(12, dtype=torch.float16).reshape(cells, width)
    words = [3, *ids, 1, cells, *(word for at in range(cells) for word in (at, 1, 0)), 1, 1]
    content = b"qsgg" + b"".join(word.to_bytes(4, "little") for word in (2, *words))
    content += (
        (1).to_bytes(4, "little") + (2 * width).to_bytes(8, "little") + keys.numpy().tobytes()
    )
    content += b"".join(word.to_bytes(4, "little") for word in (1, 2, width))
    content += (keys + 100).T.contiguous().numpy().tobytes()
    (tmp_path / "old.bin").write_bytes(content)
    slot = read_slot(tmp_path / "old.bin")
    assert slot.ids == (7, 8, 9)
    assert torch.equal(slot.keys[0], keys)
    assert torch.equal(slot.values[0], keys + 100)
    quantised = content.replace((1).to_bytes(4, "little") + (8).to_bytes(8, "little"),
                                (8).to_bytes(4, "little") + (8).to_bytes(8, "little"))  # fmt: skip
    (tmp_path / "quantised.bin").write_bytes(quantised)
    with pytest.raises(InputError, match="f32, f16 or bf16, not type 8"):
        read_slot(tmp_path / "quantised.bin")


def test_the_arithmetic_of_the_server(slot, loaded):
    """At the first layer, where nothing adds up yet, rounding explains the difference."""
    read = read_slot(slot)
    ids = torch.tensor([read.ids])
    leak = recover.leak_of(loaded.model, loaded.tokenizer, list(read.ids), "kv:0")
    with eight_bit_activations(loaded.model), torch.no_grad():
        rounded = loaded.model(ids, use_cache=True).past_key_values.layers[0].values[0]
    served = read.values[0].float().unflatten(-1, (tiny_gguf.KEY_HEADS, -1)).transpose(0, 1)
    off = (served - rounded).norm() / served.norm()
    assert off < 1e-3 < 3e-3 < (served - leak.values).norm() / served.norm()


def test_blocks_of_eight_bits():
    numbers = torch.linspace(-3, 5, 64)
    given = in_blocks(numbers)
    steps = numbers.reshape(2, 32).abs().amax(-1) / 127
    assert ((given - numbers).reshape(2, 32).abs().amax(-1) <= 0.51 * steps + 2e-3).all()
    assert (given != numbers).any()
    assert torch.equal(in_blocks(numbers[:31]), numbers[:31])
    assert torch.equal(in_blocks(torch.zeros(32)), torch.zeros(32))
