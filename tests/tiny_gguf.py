"""A tiny random llama as a GGUF file, and the real server of llama.cpp on it."""

from __future__ import annotations

import importlib.util
import socket
from contextlib import contextmanager
from pathlib import Path

import gguf
import numpy as np
import pytest
from transformers.convert_slow_tokenizer import bytes_to_unicode

from command_line import PYTHON, started

WIDTH = 64
LAYERS = 2
HEADS = 4
KEY_HEADS = 2
INNER = 128
SERVER = Path(__file__).parent.parent / "benchmarks" / "peers" / "llama_cpp_server.py"


def write(
    path, seed=0, kind=gguf.GGMLQuantizationType.Q4_1, heads=HEADS, key_heads=KEY_HEADS
):
    """Write a model in blocks of four bits, with weights so large that layers have an effect."""
    draw = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(256)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(heads)
    writer.add_head_count_kv(key_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(WIDTH // heads)
    writer.add_rope_freq_base(10000.0)
    words = _tokenizer(writer)
    writer.add_vocab_size(words)
    size = WIDTH // heads * key_heads
    shapes = {"token_embd": (words, WIDTH), "output": (words, WIDTH)}
    for layer in range(LAYERS):
        shapes |= {
            f"blk.{layer}.attn_q": (WIDTH, WIDTH),
            f"blk.{layer}.attn_k": (size, WIDTH),
            f"blk.{layer}.attn_v": (size, WIDTH),
            f"blk.{layer}.attn_output": (WIDTH, WIDTH),
            f"blk.{layer}.ffn_gate": (INNER, WIDTH),
            f"blk.{layer}.ffn_up": (INNER, WIDTH),
            f"blk.{layer}.ffn_down": (WIDTH, INNER),
        }
    for name, shape in shapes.items():
        numbers = draw.normal(0, 1 / np.sqrt(shape[1]), shape).astype(np.float32)
        writer.add_tensor(
            f"{name}.weight", gguf.quants.quantize(numbers, kind), raw_dtype=kind
        )
    norms = [
        "output_norm",
        *(f"blk.{n}.{name}_norm" for n in range(LAYERS) for name in ("attn", "ffn")),
    ]
    for name in norms:
        writer.add_tensor(f"{name}.weight", np.ones(WIDTH, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _tokenizer(writer):
    """Add a token for each byte, an end of text, and the one merge that the format requires."""
    letters = list(bytes_to_unicode().values())
    tokens = [*letters, "th", "<|endoftext|>"]
    kinds = [gguf.TokenType.NORMAL] * (len(tokens) - 1) + [gguf.TokenType.CONTROL]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(["t h"])
    for add in (
        writer.add_bos_token_id,
        writer.add_eos_token_id,
        writer.add_pad_token_id,
    ):
        add(len(tokens) - 1)
    writer.add_add_bos_token(False)
    return len(tokens)


def expect_server():
    if importlib.util.find_spec("xllamacpp") is None:
        pytest.skip("xllamacpp is not installed")


@contextmanager
def serving(path, *settings):
    """Run llama.cpp's server for the length of a block, and yield its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [PYTHON[0], SERVER, path, port, *settings]
    with started(command, stdin=-1, stderr=-3) as process:
        assert process.stdout.readline().strip() == "listening"
        yield f"http://127.0.0.1:{port}"
