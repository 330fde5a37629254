"""Blocks of checkpoints answer as the modules of transformers do."""

from __future__ import annotations

import pytest
import torch

import tiny_architectures as tiny
from keyhole.core.errors import InputError
from keyhole.endpoints import open_endpoint
from keyhole.models.block import block


def test_an_encoder_to_rounding():
    model = tiny.model("bert", seed=1)
    with torch.no_grad():
        for name, part in model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(part)
    stream = torch.Generator().manual_seed(0)
    X = torch.randn(2, 6, tiny.WIDTH, generator=stream, dtype=torch.float64)
    target = block(model, 1)
    given = model.double().encoder.layer[1](X)
    given = given[0] if isinstance(given, tuple) else given
    assert (target.norm, target.activation) == ("behind", "gelu")
    assert torch.allclose(target(X), given[:, -1], rtol=0, atol=1e-11)


def test_a_decoder_has_gates_and_norms_in_front():
    target = block(tiny.model("llama", seed=2), 0)  # held against the model's own states there
    assert (target.norm, target.activation) == ("rms", "silu")
    assert len(target.G) == len(target.A)


def test_a_target_names_a_block():
    assert open_endpoint("demo:block.0").norm == "behind"
    with pytest.raises(InputError, match=r"must end in :block\.LAYER"):
        open_endpoint("demo:block.x")
    with pytest.raises(InputError, match="not read here"):
        block(tiny.model("gpt2"), 0)
