"""Memory grows with the length of a text, not with its square."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import tiny_models as tiny
from keyhole.invert import HiddenStates, recover_text
from keyhole.models import Exposure, capture
from keyhole.recover import DecoderStates, EncoderStates

SMALL = {"num_hidden_layers": 2, "initializer_range": 0.05}


class Largest(TorchDispatchMode):
    """Records the size in bytes of the largest tensor that any operation returns."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(given):
            # A view takes no memory: an expanded mask counts as its storage.
            if isinstance(leaf, torch.Tensor):
                self.bytes = max(self.bytes, leaf.untyped_storage().nbytes())
        return given


def long_model(family, positions):
    model = tiny.model(family, max_position_embeddings=positions, **SMALL)
    model.config._attn_implementation = "sdpa"  # as load_model sets it
    return model


def recovered(model, ids, method, words):
    """Return the recovery of a text from layer 2, and the size of the largest tensor."""
    leak = HiddenStates(capture(model, Exposure("hidden", 2), ids=ids)["values"], 2)
    with Largest() as largest:
        result = recover_text(model, words, leak, method=method)
    return result, largest.bytes


def test_a_thousand_tokens_of_a_decoder():
    model = long_model("llama", 1024)
    ids = tiny.ids(texts=1, length=1000, causal=True)
    method = DecoderStates(samples=600, draft=64)
    words = tiny.tokenizer(causal=True)
    result, most = recovered(model, ids, method, words)
    assert result.ids == ids[0].tolist()
    assert result.verified
    assert most < 4 * 1000 * 1000  # one attention map in float32


def test_512_tokens_of_an_encoder():
    model = long_model("bert", 512)
    ids = tiny.ids(texts=1, length=512)
    method = EncoderStates(samples=2000)
    words = tiny.tokenizer()
    result, most = recovered(model, ids, method, words)
    assert result.ids == ids[0].tolist()
    assert result.verified
    assert most < 4 * 512 * 512
