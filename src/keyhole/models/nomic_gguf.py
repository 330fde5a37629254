"""NomicBERT from a GGUF file, which the transformers library has as a model but not in that form.

nomic-embed-text is the embedding model that several local servers come with. llama.cpp keeps the
projections of queries, keys and values as one matrix, and marks tokens that begin a word with `▁`
where BERT's vocabulary marks those that go on with `##`.
"""

from __future__ import annotations

import importlib
import struct
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from keyhole.core.errors import InputError

ARCHITECTURE = "nomic-bert"
_STRING = struct.pack("<I", 8)  # the type of a value
_NAMED = (
    b"general.architecture" + _STRING + struct.pack("<Q", len(ARCHITECTURE)) + ARCHITECTURE.encode()
)
_FIRST = 4096  # bytes, in which a file says its architecture
_NAMES = {  # of a block
    "attn_output.weight": "self_attn.o_proj.weight",
    "attn_output_norm": "post_attention_layernorm",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
    "layer_output_norm": "post_mlp_layernorm",
}
_TABLES = {
    "token_embd.weight": "embeddings.word_embeddings.weight",
    "token_types.weight": "embeddings.token_type_embeddings.weight",
    "token_embd_norm": "embeddings.LayerNorm",
}


class NomicFile:
    """A GGUF file of this architecture: configuration, model and tokenizer."""

    def __init__(self, path: Path, library: Any) -> None:
        self.path, self.library = path, library

    @classmethod
    def of(cls, path: Path, library: Any) -> NomicFile | None:
        """The file, if it is one of these; no more of it is read yet."""
        with path.open("rb") as file:
            if _NAMED not in file.read(_FIRST):
                return None
        return cls(path, library)

    @cached_property
    def reader(self) -> Any:
        return importlib.import_module("gguf").GGUFReader(str(self.path))

    def _value(self, name: str) -> Any:
        field = self.reader.fields.get(f"{ARCHITECTURE}.{name}")
        if field is None:
            raise InputError(f"the GGUF file does not say {ARCHITECTURE}.{name}")
        return field.contents()

    @property
    def config(self) -> Any:
        tensors = {tensor.name: tensor.shape for tensor in self.reader.tensors}
        return self.library.NomicBertConfig(
            vocab_size=int(tensors["token_embd.weight"][1]),
            type_vocab_size=int(tensors["token_types.weight"][1]),
            hidden_size=self._value("embedding_length"),
            num_hidden_layers=self._value("block_count"),
            num_attention_heads=self._value("attention.head_count"),
            head_dim=self._value("embedding_length") // self._value("attention.head_count"),
            intermediate_size=self._value("feed_forward_length"),
            max_position_embeddings=self._value("context_length"),
            layer_norm_eps=self._value("attention.layer_norm_epsilon"),
            rope_parameters={"rope_type": "default", "rope_theta": self._value("rope.freq_base")},
            architectures=["NomicBertModel"],
        )

    def model(self, dtype: torch.dtype, device: str | torch.device) -> Any:
        with torch.random.fork_rng():
            model = self.library.NomicBertModel(self.config)
        model.load_state_dict(self._weights())  # every weight, or an error that names those missing
        return model.to(device, dtype)

    def _weights(self) -> dict[str, Tensor]:
        quants = importlib.import_module("gguf").quants
        found: dict[str, Tensor] = {}
        for tensor in self.reader.tensors:
            numbers = quants.dequantize(tensor.data, tensor.tensor_type)
            values = torch.from_numpy(np.array(numbers, dtype=np.float32))
            _, number, name = (
                tensor.name.split(".", 2) if tensor.name[:4] == "blk." else ("", "", "")
            )
            if name == "attn_qkv.weight":
                for letter, part in zip("qkv", values.chunk(3), strict=True):
                    found[f"layers.{number}.self_attn.{letter}_proj.weight"] = part.contiguous()
                continue
            names, given, inside = (
                (_NAMES, name, f"layers.{number}.") if name else (_TABLES, tensor.name, "")
            )
            stem, _, ending = given.rpartition(".")
            known = names.get(given) or (f"{names[stem]}.{ending}" if stem in names else None)
            if known is None:
                raise InputError(
                    f"the GGUF file has {tensor.name}, which {ARCHITECTURE} does not have"
                )
            found[inside + known] = values
        return found

    @property
    def tokenizer(self) -> Any:
        tokens: list[str] = self.reader.fields["tokenizer.ggml.tokens"].contents()
        return self.library.BertTokenizer(vocab={_written(t): n for n, t in enumerate(tokens)})


def _written(token: str) -> str:
    """A token as BERT's vocabulary has it."""
    if token.startswith("▁"):
        return token[1:]
    return token if token[:1] == "[" and token[-1:] == "]" else f"##{token}"
