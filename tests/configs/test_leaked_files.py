"""Files that hold leaks are recognised by their first bytes."""

from __future__ import annotations

import struct

import torch
from safetensors.torch import save_file

from keyhole import configs
from keyhole.core.files import SLOT_MAGIC
from keyhole.recover import HiddenStates


def found(path):
    return [finding.rule.id for finding in configs.check([path]).findings]


def test_a_leak_that_keyhole_saved(tmp_path):
    HiddenStates(torch.randn(3, 4), layer=1).save(tmp_path / "leak.safetensors")
    assert found(tmp_path) == ["KH-CONFIG-FILE-LEAK"]


def test_hidden_states_that_a_server_saved(tmp_path):
    tensors = {
        "hidden_states": torch.zeros(2, 1, 4),
        "token_ids": torch.zeros(2, dtype=torch.int64),
    }
    save_file(tensors, tmp_path / "states.safetensors")
    assert found(tmp_path) == ["KH-CONFIG-FILE-STATES"]


def test_a_saved_slot(tmp_path):
    (tmp_path / "slot.bin").write_bytes(SLOT_MAGIC + b"\2\0\0\0")
    assert found(tmp_path) == ["KH-CONFIG-FILE-SLOT"]


def test_weights_are_no_leak(tmp_path):
    save_file({"hidden_states.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK\3\4" + bytes(100))
    header = struct.pack("<Q", 2**62)
    (tmp_path / "claims.safetensors").write_bytes(header + b"{}")
    (tmp_path / "short.safetensors").write_bytes(b"abc")
    (tmp_path / "list.safetensors").write_bytes(struct.pack("<Q", 2) + b"[]")
    checked = configs.check([tmp_path])
    assert (checked.findings, checked.unread, checked.files) == ((), (), 5)
