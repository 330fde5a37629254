"""Text read back from every architecture of transformers, tiny and with random weights.

Every model type of `AutoModel` whose configuration has a vocabulary and contains no
other model is built in a small size. If it runs on token ids alone, a text of eight
tokens is read from the hidden states of its first and last layer and, if it is causal,
from the keys and values of both. A text counts as read if it is exact and verified.
`--models` selects model types.
"""

from __future__ import annotations

import logging
import re
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

import show
from keyhole.core.errors import InputError
from keyhole.models import Exposure, anatomy
from keyhole.recover import recover_text
from keyhole.recover.simulate import leak_of
from show import Row

sys.path.append(str(Path(__file__).parent.parent / "tests"))
import tiny_models

ALL = list(MODEL_MAPPING_NAMES)
NOT_SHOWN = "not shown"  # the cache of a model that keeps none
_LARGEST = 5_000_000  # parameters; a model whose sizes have other names may stay large
_SECONDS = 60  # for each leak
_QUICK = ["mpnet", "mistral", "gpt_neox", "modernbert", "bart"]
_WIDTH = 32
_LAYERS = 3
_HEADS = 4
_INNER = 64
_POSITIONS = 80
_SIZES: dict[str, Any] = {
    **dict.fromkeys(
        (
            "hidden_size",
            "d_model",
            "n_embd",
            "dim",
            "emb_dim",
            "embed_dim",
            "embedding_size",
            "word_embed_proj_dim",
            "projection_dim",
            "dim_model",
            "embedding_dim",
            "d_embed",
            "lru_width",
            "hidden_dim_size",
            "key_size",
        ),
        _WIDTH,
    ),
    **dict.fromkeys(
        (
            "num_hidden_layers",
            "n_layer",
            "n_layers",
            "num_layers",
            "encoder_layers",
            "decoder_layers",
            "num_decoder_layers",
            "num_encoder_layers",
        ),
        _LAYERS,
    ),
    **dict.fromkeys(
        (
            "num_attention_heads",
            "n_head",
            "n_heads",
            "num_heads",
            "encoder_attention_heads",
            "decoder_attention_heads",
            "num_encoder_attention_heads",
            "num_decoder_attention_heads",
        ),
        _HEADS,
    ),
    **dict.fromkeys(
        ("num_key_value_heads", "num_kv_heads", "multi_query_group_num"), 2
    ),
    **dict.fromkeys(
        ("head_dim", "d_kv", "dim_head", "attention_head_size"), _WIDTH // _HEADS
    ),
    **dict.fromkeys(
        (
            "intermediate_size",
            "ffn_dim",
            "d_ff",
            "encoder_ffn_dim",
            "decoder_ffn_dim",
            "hidden_dim",
            "n_inner",
            "d_inner",
            "dim_ff",
            "dff",
            "moe_intermediate_size",
            "ffn_hidden_size",
            "shared_intermediate_size",
            "shared_expert_intermediate_size",
            "intermediate_size_mlp",
            "feed_forward_size",
            "moe_shared_expert_intermediate_size",
            "expert_ffn_hidden_size",
        ),
        _INNER,
    ),
    **dict.fromkeys(
        (
            "max_position_embeddings",
            "n_positions",
            "max_seq_len",
            "max_encoder_position_embeddings",
            "max_2d_position_embeddings",
            "max_sequence_length",
        ),
        _POSITIONS,
    ),
    **dict.fromkeys(
        ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4
    ),
    **dict.fromkeys(
        ("num_experts_per_tok", "moe_k", "moe_topk", "num_experts_per_token"), 2
    ),
    **dict.fromkeys(
        ("n_group", "topk_group", "first_k_dense_replace", "n_shared_experts"), 1
    ),
    "vocab_size": tiny_models.SHAPE["vocab_size"],
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 3,
    "sep_token_id": 3,
    "cls_token_id": 2,
    "decoder_start_token_id": 2,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "sliding_window": 64,
    "type_vocab_size": 2,
    "mamba_d_ssm": 64,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "state_size": 16,
    "ssm_state_size": 16,
    "chunk_size": 16,
    "n_groups": 1,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_head_dim": 8,
    "linear_num_heads": 4,
}
_UNGROUPED = {"num_key_value_heads": _HEADS}
_MIXED = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
_PLANES = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [1, 1, 2],
    }
}
_ODD: dict[str, dict[str, Any]] = {  # further fields that some of them need
    **dict.fromkeys(
        (
            "axk1",
            "axk2",
            "deepseek_v2",
            "deepseek_v3",
            "deepseek_v32",
            "glm4_moe_lite",
            "glm_moe_dsa",
            "longcat_flash",
            "minicpm3",
            "mistral4",
            "mistral_large4_text",
            "youtu",
            "esmc",
        ),
        _UNGROUPED,
    ),
    **dict.fromkeys(
        ("granitemoehybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"), _MIXED
    ),
    "bailing_hybrid": {**_MIXED, **_UNGROUPED},
    "kimi_linear": {**_MIXED, **_UNGROUPED},
    **dict.fromkeys(
        (
            "glm4v_text",
            "glm_image_text",
            "glm_ocr_text",
            "qwen2_vl_text",
            "qwen2_5_vl_text",
        ),
        _PLANES,
    ),
    "bamba": {"attn_layer_indices": [1]},
    "codegen": {"rotary_dim": 4},
    "gemma3n_text": {
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "num_kv_shared_layers": 0,
        "vocab_size_per_layer_input": 200,
        "hidden_size_per_layer_input": 8,
        "activation_sparsity_pattern": [0.0] * _LAYERS,
    },
    "gemma4_text": {
        "vocab_size_per_layer_input": 200,
        "hidden_size_per_layer_input": 8,
    },
    "gpt_neo": {"attention_types": [[["global"], _LAYERS]]},
    "gptj": {"rotary_dim": 4},
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "use_mamba_kernels": False,
    },
    "led": {"attention_window": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "full_attention"]},
    "lilt": {"hidden_size": 48},
    "longformer": {"attention_window": 8},
    "luke": {"entity_vocab_size": 10, "entity_emb_size": 32},
    "reformer": {"axial_pos_embds_dim": [16, 16], "axial_pos_shape": [8, 10]},
    "roc_bert": {"pronunciation_vocab_size": 10, "shape_vocab_size": 10},
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
}


def run(quick: bool, models: list[str] = ALL) -> Iterator[Row]:
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGALRM, _late)
    logging.disable(logging.WARNING)
    tally: dict[str, list[bool]] = {}
    unmade: list[dict[str, str]] = []
    for name in _QUICK if quick else models:
        try:
            model = made(name)
            parts = anatomy(model)
        except (InputError, Unmade) as error:
            reason = re.sub(r" from '[^']*'", "", str(error))  # no path of this machine
            unmade.append({"model": name, "reason": reason})
            continue
        except Exception as error:  # a bug of Keyhole
            yield show.every(name, 0, 1, f"{type(error).__name__}: {error}")
            continue
        items = list(_read(model, parts.causal))
        shown = [item for item in items if item["status"] != NOT_SHOWN]
        for item in shown:
            tally.setdefault(item["exposure"].split(":")[0], []).append(item["read"])
        reasons = [
            f"{item['exposure']}: {item['reason']}"
            for item in items
            if not item["read"]
        ]
        count = sum(item["read"] for item in shown)
        yield show.every(name, count, len(shown), "; ".join(reasons), items=items)
    for kind, read in tally.items():
        yield Row(f"{kind} of all", f"{sum(read)} of {len(read)}")
    yield Row(
        "other architectures, not built or not of token ids",
        str(len(unmade)),
        items=unmade,
    )


def _late(*_: object) -> None:
    raise TimeoutError(f"not read within {_SECONDS} s")


class Unmade(Exception):
    """The reason why an architecture is not tried."""


def made(name: str) -> Any:
    """Return a tiny model of this type with random weights, in eval mode."""
    known = transformers.CONFIG_MAPPING[name]
    fields: dict[str, Any] = known.__dataclass_fields__
    if getattr(known, "sub_configs", None) or "vocab_size" not in fields:
        raise Unmade("contains other models, or has no vocabulary")
    sizes = {field: size for field, size in _SIZES.items() if field in fields}
    try:
        config = known(**{**sizes, **_ODD.get(name, {})})
        with torch.device("meta"):
            outline = transformers.AutoModel.from_config(config)
        count = sum(weight.numel() for weight in outline.parameters())
        model = _filled(config) if count <= _LARGEST else None
    except Exception as error:  # the small sizes may break a configuration in any way
        line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise Unmade(f"{type(error).__name__}: {line}") from error
    if model is None:
        raise Unmade(f"stays large: {count:,} parameters")
    return model


def _filled(config: Any) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModel.from_config(config)
        for weight in model.parameters():
            if weight.ndim > 1:
                torch.nn.init.normal_(weight, std=0.12)
    return model.eval().requires_grad_(False)


def _read(model: Any, causal: bool) -> Iterator[dict[str, Any]]:
    parts = anatomy(model)
    tokenizer = tiny_models.tokenizer(causal)
    stream = torch.Generator().manual_seed(1)
    count = 8 - len(tokenizer("")["input_ids"])
    numbers = torch.randint(len(tiny_models.WORDS), (count,), generator=stream).tolist()
    text = " ".join(tiny_models.WORDS[number] for number in numbers)
    exposures = [Exposure("hidden", layer) for layer in sorted({1, parts.layers})]
    if causal:
        exposures += [Exposure("kv", layer) for layer in sorted({0, parts.layers - 1})]
    for exposure in exposures:
        started = time.perf_counter()
        item = {"model": parts.family, "exposure": str(exposure)}
        signal.alarm(_SECONDS)
        try:
            leak = leak_of(model, tokenizer, text, exposure)
            found = recover_text(model, tokenizer, leak)
            exact = found.ids == tokenizer(text)["input_ids"]
            outcome = {
                "read": exact and found.verified,
                "exact": exact,
                "verified": found.verified,
                "status": str(found.status),
                "reason": found.reason,
                "passes": found.passes,
            }
        except InputError as error:
            outcome = {"read": False, "status": NOT_SHOWN, "reason": str(error)}
        except (
            Exception
        ) as error:  # a bug of Keyhole: recorded, and the others are still read
            outcome = {
                "read": False,
                "status": type(error).__name__,
                "reason": str(error)[:300],
            }
        finally:
            signal.alarm(0)
        yield {**item, **outcome, "seconds": round(time.perf_counter() - started, 3)}


if __name__ == "__main__":
    show.main(run)
