"""Leaks: wrong input is refused, and files are read back bit for bit or refused."""

from __future__ import annotations

import pytest
import torch

from keyhole import invert
from keyhole.core.errors import InputError
from keyhole.recover.leaks import TYPES, HiddenStates, MixedCache, Pooled, load_leak
from keyhole.recover.simulate import degrade

RANDOM = torch.Generator().manual_seed(0)


def normal(*shape):
    return torch.randn(*shape, generator=RANDOM)


def leaks():
    about = {"model": "abc", "precision": "int8", "noise": 0.1}
    mask = torch.tensor([1, 1, 1, 0])
    missing = normal(4, 6)
    missing[1] = torch.nan
    return [
        invert.HiddenStates(missing, 3, mask=mask, **about),
        invert.KeyValues(normal(2, 4, 3), normal(2, 4, 3), 0, mask=mask, **about),
        invert.AttentionMaps(normal(2, 4, 4), 1, mask=mask, **about),
        invert.AttentionOutput(normal(4, 6), 1),
        invert.Pooled(normal(6), pooling="cls", normalised=False, tokens=4),
        invert.Logits(
            normal(2, 9), log_probabilities=True, tokens=4, precision="bfloat16"
        ),
        MixedCache(normal(2, 4, 3), normal(2, 4, 3), 2, block=4, known=[5, 7], **about),
    ]


def test_every_type_is_there():
    assert {leak.kind for leak in leaks()} == set(TYPES)


@pytest.mark.parametrize("leak", leaks(), ids=lambda leak: leak.kind)
def test_files_come_back_bit_for_bit(leak, tmp_path):
    path = tmp_path / "a.safetensors"
    leak.save(path)
    back = invert.load_leak(path)
    assert type(back) is type(leak)
    for name, tensor in leak.tensors.items():
        assert torch.equal(back.tensors[name].nan_to_num(7), tensor.nan_to_num(7))
    for name in ("model", "precision", "noise", "exposure", "length"):
        assert getattr(back, name) == getattr(leak, name)
    assert (back.mask is None) == (leak.mask is None)
    assert leak.mask is None or torch.equal(back.mask, leak.mask)
    assert [file.name for file in tmp_path.iterdir()] == ["a.safetensors"]


@pytest.mark.parametrize("leak", leaks()[:3], ids=lambda leak: leak.kind)
def test_cut_and_rows(leak):
    short = leak.cut(3)
    assert short.length == 3
    assert torch.equal(short.mask, torch.ones(3, dtype=torch.long))
    assert len(leak.rows(leak.tensors)) == 4


def test_rows_stand_side_by_side():
    keys = invert.KeyValues(normal(2, 4, 3), normal(2, 4, 3), 0)
    rows = keys.rows(keys.tensors)
    assert rows.shape == (4, 12)
    assert torch.equal(rows[1, :3], keys.keys[0, 1])
    assert torch.equal(rows[1, 3:6], keys.values[0, 1])
    assert torch.equal(rows[1, 6:9], keys.keys[1, 1])


def test_a_batch_of_one_and_other_dtypes():
    leak = invert.HiddenStates(normal(1, 4, 6).bfloat16(), 3)
    assert leak.values.shape == (4, 6)
    assert leak.values.dtype == torch.float32
    assert leak.precision == "bfloat16"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (normal(2, 4, 6), "of one text with 2 axes"),
        (normal(4), "of one text with 2 axes"),
        (normal(0, 6), "of one text with 2 axes"),
        (torch.ones(4, 6, dtype=torch.long), "floating-point"),
        ("text", "floating-point"),
        (torch.full((4, 6), torch.nan), "only NaN"),
        (torch.full((4, 6), torch.inf), "must be finite"),
    ],
)
def test_what_is_no_leak(values, message):
    with pytest.raises(InputError, match=message):
        invert.HiddenStates(values, 1)


def test_a_mask_or_precision_that_does_not_belong():
    with pytest.raises(InputError, match="the mask must have 4 positions, not 3"):
        invert.HiddenStates(normal(4, 6), 1, mask=torch.ones(3))
    with pytest.raises(InputError, match=r"precision .*float32"):
        invert.HiddenStates(normal(4, 6), 1, precision="int3")


def test_files_that_are_none(tmp_path):
    path = tmp_path / "a.safetensors"
    with pytest.raises(InputError, match="there is no such file"):
        invert.load_leak(path)
    leaks()[0].save(path)
    whole = path.read_bytes()
    for broken in (whole[: len(whole) // 2], whole[:5], b"", b"PK\x03\x04" + whole):
        path.write_bytes(broken)
        with pytest.raises(InputError, match="a leak file") as caught:
            invert.load_leak(path)
        assert "\n" not in str(caught.value)


def test_a_foreign_file(tmp_path):
    from safetensors.torch import save_file

    path = tmp_path / "a.safetensors"
    save_file({"values": normal(3, 4)}, path)
    with pytest.raises(InputError, match="written by Keyhole"):
        invert.load_leak(path)
    save_file(
        {"x": normal(3, 4)}, path, {"keyhole": "1", "leak": "hidden", "about": "{}"}
    )
    with pytest.raises(InputError, match="written by Keyhole"):
        invert.load_leak(path)


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16", "int8"])
def test_rows_of_length_one_are_recognised_from_their_numbers(precision):
    values = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    leak = degrade(HiddenStates(values, 1), precision, forms=["normalised"])
    assert HiddenStates(leak.values, 1).normalised
    assert not HiddenStates(values, 1).normalised
    assert not HiddenStates(leak.values, 1, normalised=False).normalised


def test_all_that_is_known_of_rows_is_in_their_file(tmp_path):
    leak = HiddenStates(torch.randn(3, 4), 2)
    changed = HiddenStates(
        torch.randn(3, 4), 2, permuted=True, width=4, normalised=True
    )
    changed.save(tmp_path / "leak.safetensors")
    read = load_leak(tmp_path / "leak.safetensors")
    assert isinstance(read, HiddenStates)
    assert (read.permuted, read.width, read.normalised) == (True, 4, True)
    assert read.digest == changed.digest != leak.digest
    unit = HiddenStates(torch.eye(3, 4), 2, normalised=False)
    unit.save(tmp_path / "leak.safetensors")
    read = load_leak(tmp_path / "leak.safetensors")
    assert isinstance(read, HiddenStates)
    assert (read.normalised, read.digest) == (False, unit.digest)


def test_how_a_vector_was_stored_goes_into_its_file(tmp_path):
    values = normal(6)
    book = normal(2, 4, 3)
    for stored in (
        Pooled(values, width=6, noise=0.1),
        Pooled(values, steps=values.abs()),
        Pooled(book[:, 1].flatten(), codebook=book),
        Pooled(values.sign(), precision="binary"),
    ):
        stored.save(tmp_path / "leak.safetensors")
        read = load_leak(tmp_path / "leak.safetensors")
        assert isinstance(read, Pooled)
        assert (read.facts, read.digest) == (stored.facts, stored.digest)
        for name in ("steps", "codebook"):
            given = getattr(stored, name)
            back = getattr(read, name)
            assert (given is None) == (back is None)
            assert given is None or torch.equal(given, back)
    assert Pooled(values, steps=values.abs()).digest != Pooled(values).digest
    with pytest.raises(InputError, match=r"precision .*float32, .* int4"):
        HiddenStates(values[None], 1, precision="binary")


def test_a_cut_vector_was_normalised_again_if_its_length_is_one():
    values = torch.nn.functional.normalize(normal(6), dim=0)
    assert Pooled(values, width=6).exposure.unit
    assert not Pooled(values / 2, width=6).exposure.unit
    assert Pooled(values).exposure == Pooled(values / 2).exposure
    nearly = torch.nn.functional.normalize(normal(400), dim=0)[:380]
    assert not Pooled(nearly, width=380).exposure.unit  # cut, and still 0.97 long
    step = nearly.abs().max() / 7
    assert Pooled((nearly / step).round() * step, width=380).exposure.unit


def test_a_vector_with_holes_is_refused():
    with pytest.raises(InputError, match="must be finite"):
        Pooled(torch.tensor([0.1, torch.nan, 0.2]))


def test_what_is_said_of_rows_has_to_agree_with_them():
    values = torch.randn(3, 4)
    with pytest.raises(InputError, match="width is 5, but the rows"):
        HiddenStates(values, 1, width=5)
    with pytest.raises(InputError, match="permuted rows take no mask"):
        HiddenStates(values, 1, permuted=True, mask=torch.tensor([1, 1, 0]))
    with pytest.raises(InputError, match="normalised"):
        Pooled(values[0], normalised=None)
