"""A GGUF file of NomicBERT gives the model that it was written from."""

from __future__ import annotations

import gguf
import pytest
import torch
import transformers

from keyhole.core.errors import InputError
from keyhole.models.loading import load_model, task_of

TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdef", "##b", "##c"]


@pytest.fixture(scope="module")
def model():
    config = transformers.NomicBertConfig(
        vocab_size=len(TOKENS),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        head_dim=8,
        intermediate_size=48,
        max_position_embeddings=64,
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
    )
    torch.manual_seed(0)
    return transformers.NomicBertModel(config).eval()


@pytest.fixture(scope="module")
def file(model, tmp_path_factory):
    """As llama.cpp converts it: one matrix for queries, keys and values, `▁` before words."""
    path = tmp_path_factory.mktemp("nomic") / "tiny.gguf"
    out = gguf.GGUFWriter(path, "nomic-bert")
    weights = model.state_dict()
    out.add_block_count(2)
    out.add_context_length(64)
    out.add_embedding_length(32)
    out.add_feed_forward_length(48)
    out.add_head_count(4)
    out.add_layer_norm_eps(1e-12)
    out.add_rope_freq_base(1000.0)
    out.add_tokenizer_model("bert")
    out.add_token_list(
        [
            token
            if token[0] == "["
            else token[2:]
            if token[:2] == "##"
            else f"▁{token}"
            for token in TOKENS
        ]
    )
    names = {
        "token_embd": "embeddings.word_embeddings",
        "token_embd_norm": "embeddings.LayerNorm",
        "token_types": "embeddings.token_type_embeddings",
    }
    for layer in (0, 1):
        inside = f"layers.{layer}"
        blk = f"blk.{layer}"
        names |= {
            f"{blk}.attn_output": f"{inside}.self_attn.o_proj",
            f"{blk}.attn_output_norm": f"{inside}.post_attention_layernorm",
            f"{blk}.layer_output_norm": f"{inside}.post_mlp_layernorm",
            **{
                f"{blk}.ffn_{name}": f"{inside}.mlp.{name}_proj"
                for name in ("gate", "up", "down")
            },
        }
        parts = [
            weights[f"{inside}.self_attn.{letter}_proj.weight"] for letter in "qkv"
        ]
        out.add_tensor(f"{blk}.attn_qkv.weight", torch.cat(parts).numpy())
    for theirs, ours in names.items():
        for ending in ("weight", "bias"):
            if f"{ours}.{ending}" in weights:
                out.add_tensor(
                    f"{theirs}.{ending}", weights[f"{ours}.{ending}"].numpy()
                )
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return path


def test_it_computes_what_the_model_computes(model, file):
    loaded = load_model(file)
    batch = loaded.tokenizer(["a bc f", "d"], return_tensors="pt", padding=True)
    words = loaded.tokenizer.convert_ids_to_tokens(batch["input_ids"][0])
    assert words == ["[CLS]", "a", "b", "##c", "f", "[SEP]"]
    with torch.no_grad():
        theirs, ours = (
            each(**batch).last_hidden_state for each in (model, loaded.model)
        )
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_it_has_no_head(file):
    assert task_of(file) == "base"
    with pytest.raises(InputError, match="no head for causal"):
        load_model(file, task="causal")
