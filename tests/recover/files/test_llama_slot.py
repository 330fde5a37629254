"""Slots that llama.cpp's server saved: ids in plain text, and the text from the rest alone."""

from __future__ import annotations

import json

import httpx
import pytest
import torch

import tiny_gguf
import tiny_models as tiny
from keyhole import recover
from keyhole.core.errors import InputError
from keyhole.models.anatomy import anatomy
from keyhole.models.capture import as_multiplied, eight_bit_activations, in_blocks
from keyhole.models.demo import open_model
from keyhole.models.loading import STORED
from keyhole.recover.files.arrays import arrays_of_slot, read_slot
from keyhole.recover.files.readings import role_of

TEXT = "the doctor says no"


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    return tiny_gguf.write(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture(scope="module")
def loaded(weights):
    return open_model(str(weights))


@pytest.fixture(scope="module")
def slot(weights):
    return saved_slot(weights)


def saved_slot(weights, *settings):
    tiny_gguf.expect_server()
    with tiny_gguf.serving(weights, f"slots={weights.parent}/", *settings) as url:
        asked = {"prompt": TEXT, "n_predict": 1, "temperature": 0}
        httpx.post(f"{url}/completion", json=asked, timeout=60).raise_for_status()
        saved = httpx.post(
            f"{url}/slots/0?action=save", json={"filename": "slot.bin"}, timeout=60
        )
        saved.raise_for_status()
    return weights.parent / "slot.bin"


def test_the_ids_are_read_and_checked(slot, loaded):
    (result,) = recover.run(loaded, slot)
    assert (result.method, result.text, result.verified) == ("WrittenIds", TEXT, True)
    assert (
        result.ids == loaded.tokenizer(TEXT)["input_ids"] == list(read_slot(slot).ids)
    )


def test_a_slot_on_the_command_line(slot, weights, keyhole):
    done = keyhole("recover", weights.name, "slot.bin --json", cwd=slot.parent)
    assert done.returncode == 1, done.stderr
    assert json.loads(done.stdout)["text"] == TEXT


@pytest.mark.parametrize("layer", [0, 1])
def test_keys_and_values_alone_give_the_text(layer, slot, loaded):
    (result,) = recover.run(loaded, slot, method="cached-keys", expose=f"kv:{layer}")
    assert (result.method, result.text, result.verified) == ("CachedKeys", TEXT, True)


def test_ids_of_another_text_do_not_fit(slot, loaded, tmp_path):
    content = bytearray(slot.read_bytes())
    place = 8 + 4 * (1 + 3) + 4 * 5  # the sixth id
    assert (
        int.from_bytes(content[place : place + 4], "little") == read_slot(slot).ids[5]
    )
    content[place] ^= 1
    (tmp_path / "changed.bin").write_bytes(content)
    (result,) = recover.run(loaded, tmp_path / "changed.bin")
    assert not result.verified


def test_incomplete_slots_are_refused(slot, tmp_path):
    content = slot.read_bytes()
    for size in (8, 12, 40, 200, len(content) // 2, len(content) - 1):
        (tmp_path / "cut.bin").write_bytes(content[:size])
        with pytest.raises(InputError, match=r"slot of llama\.cpp: only its beginning"):
            read_slot(tmp_path / "cut.bin")
    (tmp_path / "long.bin").write_bytes(content + b"more")
    with pytest.raises(InputError, match="4 bytes after the last layer"):
        read_slot(tmp_path / "long.bin")


@pytest.mark.parametrize(("kind", "heads"), [("Q8_0", 1), ("Q8_0", 2), ("F32", 4)])
def test_other_types_of_caches(kind, heads, tmp_path):
    """Heads of 64 numbers are turned before they are rounded, shorter ones are not."""
    path = tiny_gguf.write(tmp_path / "tiny.gguf", heads=heads, key_heads=1)
    slot = saved_slot(path, f"cache={kind}")
    (result,) = recover.run(open_model(str(path)), slot, method="cached-keys")
    assert (result.method, result.text, result.verified) == ("CachedKeys", TEXT, True)
    assert (read_slot(slot).error > 0) == (kind == "Q8_0")


def test_layers_with_a_window_come_after_the_others(tmp_path):
    """As a real server saved Gemma's: two caches, one after the other."""
    words = lambda *numbers: b"".join(n.to_bytes(4, "little") for n in numbers)  # noqa: E731

    def cache(layers, first):
        content = words(1, 2, 0, 1, 0, 1, 1, 0, 0, layers)  # two cells, not transposed
        for number in range(2 * layers):  # keys, then values
            rows = torch.full((2, 4), first + number, dtype=torch.float16)
            content += words(1) + (8).to_bytes(8, "little") + rows.numpy().tobytes()
        return content

    (tmp_path / "two.bin").write_bytes(
        b"qsgg" + words(2, 2, 7, 8) + cache(1, 0) + cache(2, 10)
    )
    slot = read_slot(tmp_path / "two.bin")
    assert (slot.ids, len(slot.cache.keys), len(slot.sliding.keys)) == ((7, 8), 1, 2)
    model = tiny.language_model("gemma3", num_hidden_layers=3)
    parts = anatomy(model)
    model.config.layer_types[:] = [
        "sliding_attention",
        "full_attention",
        "sliding_attention",
    ]
    first = {
        name: float(rows[0, 0])
        for name, rows in arrays_of_slot(slot).items()
        if "g" in name
    }
    assert {role_of(name, parts)[1:]: number for name, number in first.items()} == {
        (0, "paired"): 10,
        (1, "paired"): 0,
        (2, "paired"): 11,
        (0, "rows"): 12,
        (1, "rows"): 1,
        (2, "rows"): 13,
    }


def test_the_precision_of_a_file_s_weights(loaded):
    linear = [
        each for each in loaded.model.modules() if isinstance(each, torch.nn.Linear)
    ]
    assert {getattr(each, STORED) for each in linear} == {"Q4_1"}


def test_older_files_and_transposed_values(tmp_path):
    """As servers before the words around the ids wrote them, and without flash attention."""
    ids = [7, 8, 9]
    cells = 3
    width = 4
    keys = torch.arange(12, dtype=torch.float16).reshape(cells, width)
    words = [
        3,
        *ids,
        1,
        cells,
        *(word for at in range(cells) for word in (at, 1, 0)),
        1,
        1,
    ]
    content = b"qsgg" + b"".join(word.to_bytes(4, "little") for word in (2, *words))
    content += (
        (1).to_bytes(4, "little")
        + (2 * width).to_bytes(8, "little")
        + keys.numpy().tobytes()
    )
    content += b"".join(word.to_bytes(4, "little") for word in (1, 2, width))
    content += (keys + 100).T.contiguous().numpy().tobytes()
    (tmp_path / "old.bin").write_bytes(content)
    slot = read_slot(tmp_path / "old.bin")
    assert slot.ids == (7, 8, 9)
    assert torch.equal(slot.cache.keys[0], keys)
    assert torch.equal(slot.cache.values[0], keys + 100)
    other = content.replace(
        (1).to_bytes(4, "little") + (8).to_bytes(8, "little"),
        (99).to_bytes(4, "little") + (8).to_bytes(8, "little"),
    )
    (tmp_path / "other.bin").write_bytes(other)
    with pytest.raises(InputError, match="Q4_0, not of type 99"):
        read_slot(tmp_path / "other.bin")


def test_the_arithmetic_of_the_server(slot, loaded):
    """At the first layer, where nothing adds up yet, rounding explains the difference."""
    read = read_slot(slot)
    ids = torch.tensor([read.ids])
    leak = recover.leak_of(loaded.model, loaded.tokenizer, list(read.ids), "kv:0")
    with eight_bit_activations(loaded.model), torch.no_grad():
        rounded = loaded.model(ids, use_cache=True).past_key_values.layers[0].values[0]
    served = (
        read.cache.values[0]
        .float()
        .unflatten(-1, (tiny_gguf.KEY_HEADS, -1))
        .transpose(0, 1)
    )
    off = (served - rounded).norm() / served.norm()
    assert off < 1e-3 < 3e-3 < (served - leak.values).norm() / served.norm()


def test_blocks_of_eight_bits():
    numbers = torch.linspace(-3, 5, 64)
    given = in_blocks(numbers)
    steps = numbers.reshape(2, 32).abs().amax(-1) / 127
    assert (
        (given - numbers).reshape(2, 32).abs().amax(-1) <= 0.51 * steps + 2e-3
    ).all()
    assert (given != numbers).any()
    assert torch.equal(in_blocks(numbers[:31]), numbers[:31])
    assert torch.equal(in_blocks(torch.zeros(32)), torch.zeros(32))


@pytest.mark.parametrize(
    ("stored", "size"), [("Q4_0", 32), ("IQ4_NL", 32), ("Q4_K", 256), ("IQ2_XXS", 256)]
)
def test_blocks_are_as_large_as_the_type_of_the_weights_says(stored, size):
    numbers = torch.randn(512, generator=torch.Generator().manual_seed(0))
    given = as_multiplied(numbers, stored)
    for start in range(0, 512, size):
        step = float(numbers[start : start + size].abs().max()) / 127
        for before, after in zip(
            numbers[start : start + size].tolist(),
            given[start : start + size].tolist(),
            strict=True,
        ):
            assert after == pytest.approx(
                round(before / step) * step, rel=1e-3, abs=1e-6
            )
    assert torch.equal(as_multiplied(numbers, "F32"), numbers)
    assert torch.equal(as_multiplied(numbers, "F16"), numbers.half().float())
