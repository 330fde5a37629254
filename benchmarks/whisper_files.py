"""Whisper as CTranslate2 keeps it (`model.bin`, what faster-whisper runs), as a transformers model.

CTranslate2 gives no hidden states and no caches, so nobody attacks such a folder as it is: the
benchmark needs its weights, in the class of the library that exposes them. The file is a list of
named arrays; queries, keys and values are one matrix, and keys have no bias of their own.
"""

from __future__ import annotations

import struct
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from keyhole.models import Loaded, identity

TYPES = {0: "<f4", 1: "<i1", 2: "<i2", 3: "<i4", 4: "<f2"}
NORMS = {"self_attention": "self_attn_layer_norm", "attention": "encoder_attn_layer_norm",
         "ffn": "final_layer_norm"}  # fmt: skip
LINEAR = {
    ("self_attention", 0): ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attention", 1): ("self_attn.out_proj",), ("attention", 0): ("encoder_attn.q_proj",),
    ("attention", 1): ("encoder_attn.k_proj", "encoder_attn.v_proj"),
    ("attention", 2): ("encoder_attn.out_proj",), ("ffn", 0): ("fc1",), ("ffn", 1): ("fc2",),
}  # fmt: skip
ENDS = {"gamma": "weight", "beta": "bias", "weight": "weight", "bias": "bias"}


def whisper(folder: Path) -> Loaded:
    import transformers

    arrays = read(folder / "model.bin")
    table = arrays["decoder/embeddings/weight"]
    sides = ("encoder", "decoder")
    layers = [len({name.split("/")[1] for name in arrays if name.startswith(f"{side}/layer_")
                   and name.split("/")[1] != "layer_norm"}) for side in sides]  # fmt: skip
    heads = [int(arrays[f"{side}/num_heads"]) for side in sides]
    inner = [len(arrays[f"{side}/layer_0/ffn/linear_0/weight"]) for side in sides]
    places = [len(arrays[f"{side}/position_encodings/encodings"]) for side in sides]
    words = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), pad_token="<|endoftext|>",
        eos_token="<|endoftext|>", bos_token="<|startoftranscript|>",
    )  # fmt: skip
    config = transformers.WhisperConfig(
        vocab_size=len(table), d_model=table.shape[1], encoder_layers=layers[0],
        decoder_layers=layers[1], encoder_attention_heads=heads[0],
        decoder_attention_heads=heads[1], encoder_ffn_dim=inner[0], decoder_ffn_dim=inner[1],
        max_source_positions=places[0], max_target_positions=places[1],
        num_mel_bins=arrays["encoder/conv1/weight"].shape[1],
        pad_token_id=words.pad_token_id, bos_token_id=words.bos_token_id,
        eos_token_id=words.eos_token_id, decoder_start_token_id=words.bos_token_id,
    )  # fmt: skip
    model = transformers.WhisperModel(config)
    missing, unknown = model.load_state_dict(renamed(arrays), strict=False)
    if unknown or missing:
        raise ValueError(f"unknown arrays {unknown[:3]}, missing ones {missing[:3]}")
    model = model.eval().requires_grad_(False)
    return Loaded(model, words, identity(model), folder.name)


def read(path: Path) -> dict[str, Any]:
    """The arrays of a file: names, shapes, types and numbers one after the other."""
    data, at = path.read_bytes(), 0

    def take(form: str) -> int:
        nonlocal at
        (value,) = struct.unpack_from(f"<{form}", data, at)
        at += struct.calcsize(f"<{form}")
        return value

    def text() -> str:
        nonlocal at
        size = take("H")
        at += size
        return data[at - size : at].rstrip(b"\0").decode()

    for skip in (partial(take, "I"), text, partial(take, "I")):  # versions, and the model's kind
        skip()
    arrays: dict[str, Any] = {}
    for _ in range(take("I")):
        name = text()
        shape = [take("I") for _ in range(take("B"))]
        kind, size = np.dtype(TYPES[take("B")]), take("I")
        arrays[name] = np.frombuffer(data, kind, size // kind.itemsize, at).reshape(shape)
        at += size
    return arrays


def renamed(arrays: dict[str, Any]) -> dict[str, Tensor]:
    """The weights under the library's names."""
    made: dict[str, Tensor] = {}
    for name, array in arrays.items():
        side, *path = name.split("/")
        if array.ndim == 0 or not path or path[0] == "projection":  # a setting, or the tied head
            continue
        values = torch.from_numpy(array.astype(np.float32))
        if path[0] == "embeddings":
            made[f"{side}.embed_tokens.weight"] = values
        elif path[0] == "position_encodings":
            made[f"{side}.embed_positions.weight"] = values
        elif not path[0].startswith("layer_") or path[0] == "layer_norm":
            made[f"{side}.{path[0]}.{ENDS[path[1]]}"] = values
        else:
            layer = f"{side}.layers.{path[0].removeprefix('layer_')}"
            if path[2] == "layer_norm":
                made[f"{layer}.{NORMS[path[1]]}.{ENDS[path[3]]}"] = values
                continue
            parts = LINEAR[path[1], int(path[2].removeprefix("linear_"))]
            for part, own in zip(parts, values.chunk(len(parts)), strict=True):
                if not (path[3] == "bias" and part.endswith("k_proj")):
                    made[f"{layer}.{part}.{path[3]}"] = own
    return made
