"""Chunks of caches as LMCache's and vLLM's own code names and lays them out, plain and encrypted.

`benchmarks/peers/lmcache_files.py` has LMCache write them; here the same bytes are put
together.
"""

from __future__ import annotations

import json
import struct

import pytest
import torch
from safetensors.torch import save_file

import tiny_models as tiny
from keyhole import audit, recover
from keyhole.core.errors import InputError
from keyhole.models.anatomy import anatomy

TEXT = "w1 w20 w3 w4 w99 w7 w8 w30"
ENGINE = "org-model@1@0@1f2e3d@{}.pt"
SERVER = "org-SEP-model@0x01000100@0@1f2e3d{}.data"


@pytest.fixture(scope="module")
def subject():
    model = tiny.model("llama")
    return tiny.loaded(model, True, "llama")


def kept(subject, text):
    """Keys and values (2, layers, tokens, heads · numbers)."""
    ids = subject.tokenizer(text, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        layers = subject.model(ids, use_cache=True).past_key_values.layers
    both = [
        torch.stack([getattr(layer, side)[0] for layer in layers])
        for side in ("keys", "values")
    ]
    return torch.stack(both).transpose(2, 3).flatten(3)


@pytest.fixture(scope="module")
def chunk(subject):
    return kept(subject, TEXT)


def content(numbers):
    return numbers.contiguous().flatten().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        (ENGINE.format("half"), torch.float16),
        (ENGINE.format("bfloat16"), torch.bfloat16),
        (ENGINE.format("float@tag%value"), torch.float32),
        (SERVER.format(""), torch.bfloat16),
        (SERVER.format("@tenant"), torch.float16),
        (SERVER.format("@tenant"), torch.float8_e4m3fn),
    ],
)
def test_a_chunk_gives_its_text(name, dtype, subject, chunk, tmp_path):
    (tmp_path / name).write_bytes(content(chunk.to(dtype)))
    (result,) = recover.run(subject, tmp_path)
    assert (result.text, result.verified) == (TEXT, True)


def test_sizes_may_come_first(subject, chunk, tmp_path):
    numbers = chunk.to(torch.float16)
    words = [len(content(numbers)), 1, 2, *numbers.shape]  # KV_2LTD, float16
    path = (
        tmp_path / "org-SEP-model@1@0@-1f@bfloat16.data"
    )  # they count, and not the name
    path.write_bytes(struct.pack("<7i", *words) + content(numbers))
    (result,) = recover.run(subject, path)
    assert (result.text, result.verified) == (TEXT, True)


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("tokens_first", [False, True])
def test_a_layer_by_itself(layer, tokens_first, subject, chunk, tmp_path):
    numbers = chunk[:, layer].transpose(0, 1) if tokens_first else chunk[:, layer]
    path = tmp_path / ENGINE.format(f"half@{layer}")
    path.write_bytes(content(numbers.to(torch.float16)))
    (result,) = recover.run(subject, path)
    assert (result.text, result.verified) == (TEXT, True)


@pytest.mark.parametrize("layer", [0, 1])
def test_a_layer_that_vllm_put_into_a_shared_folder(layer, subject, chunk, tmp_path):
    path = tmp_path / f"model.layers.{layer}.self_attn.attn.safetensors"
    save_file({"kv_cache": chunk[:, layer].to(torch.bfloat16).contiguous()}, path)
    (result,) = recover.run(subject, path)
    assert (result.text, result.verified) == (TEXT, True)


@pytest.mark.parametrize("name", [ENGINE.format("bfloat16"), SERVER.format("")])
def test_a_chunk_from_the_middle_of_a_text(name, subject, tmp_path):
    words = " ".join(f"w{number}" for number in range(2, 26))
    numbers = kept(subject, words)[:, :, 16:24].to(torch.bfloat16)
    (tmp_path / name).write_bytes(content(numbers))
    (result,) = recover.run(subject, tmp_path / name)
    assert (result.text, result.verified) == (" ".join(words.split()[16:24]), True)


@pytest.fixture
def sealed(chunk, tmp_path):
    """Version, nonce, ciphertext and tag: bytes as even as those of AES."""
    size = 12 + len(content(chunk.to(torch.float16))) + 16
    drawn = torch.randint(256, (size,), generator=torch.Generator().manual_seed(0))
    path = tmp_path / SERVER.format("@tenant")
    path.write_bytes(b"\1" + bytes(drawn.tolist()))
    return path


def test_an_encrypted_chunk_is_reported_and_not_read(sealed, subject):
    (result,) = recover.run(subject, sealed)
    assert (result.status, result.ids, result.verified) == ("not applicable", [], False)
    assert "encrypted" in result.reason
    assert f"{len(TEXT.split())} tokens" in result.reason


def test_plain_and_encrypted_chunks_side_by_side(sealed, subject, chunk):
    plain = sealed.with_name(SERVER.format(""))
    plain.write_bytes(content(chunk.to(torch.bfloat16)))
    results = recover.run(subject, sealed.parent)
    assert [result.text for result in results] == [TEXT, ""]


def test_an_encrypted_chunk_could_not_be_checked(sealed, subject, keyhole):
    subject.model.save_pretrained(sealed.parent / "model")
    subject.tokenizer.save_pretrained(sealed.parent / "model")
    done = keyhole("recover model --json", sealed.name, cwd=sealed.parent)
    assert done.returncode == 3, done.stderr
    assert "encrypted" in json.loads(done.stdout)["reason"]
    (finding,) = audit(str(sealed), model=str(sealed.parent / "model")).findings
    assert (finding.status, finding.known) == ("not applicable", 0.0)


def test_a_chunk_of_other_sizes_is_refused(subject, chunk, tmp_path):
    path = tmp_path / SERVER.format("")
    path.write_bytes(content(chunk.to(torch.float16))[:-2])
    numbers = 2 * anatomy(subject.model).layers * chunk.shape[-1]
    with pytest.raises(InputError, match=f"expected {numbers} numbers for each token"):
        recover.run(subject, path)
    path.write_bytes(b"")
    with pytest.raises(InputError, match="is empty"):
        recover.run(subject, path)


def test_another_models_chunk_is_not_misread(subject, chunk, tmp_path):
    path = tmp_path / SERVER.format("")
    path.write_bytes(content(torch.randn(chunk.shape).to(torch.bfloat16)))
    with pytest.raises(InputError, match="no text explains these numbers"):
        recover.run(subject, path)
