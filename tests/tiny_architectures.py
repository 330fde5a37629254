"""Tiny models of many architectures with random weights, and inputs for each."""

from __future__ import annotations

import torch
import transformers as hf

WIDTH = 32
HEADS = 4
LAYERS = 2
WORDS = 60
ENCODERS = ("bert", "roberta", "distilbert", "electra", "albert", "modernbert")
DECODERS = ("gpt2", "gpt_neox", "llama", "qwen3", "gemma2", "opt")
PAIRS = ("t5", "bart")
VISION = ("vit", "swin")
SIXTEEN = ENCODERS + DECODERS + PAIRS + VISION
REFUSED = ("deberta", "bloom", "gptj")

_PLAIN = {
    "vocab_size": WORDS,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": 64,
    "max_position_embeddings": 40,
    "pad_token_id": 0,
}
_ENDS = {"bos_token_id": 2, "eos_token_id": 3}
_GROUPED = {**_PLAIN, **_ENDS, "num_key_value_heads": 2, "head_dim": 8}
_OLD = {
    "vocab_size": WORDS,
    "n_embd": WIDTH,
    "n_layer": LAYERS,
    "n_head": HEADS,
    **_ENDS,
}
_IMAGE = {"image_size": 16, "patch_size": 2, "num_channels": 3}

CONFIGS = {
    "bert": lambda: hf.BertConfig(**_PLAIN),
    "roberta": lambda: hf.RobertaConfig(**_PLAIN),
    "distilbert": lambda: hf.DistilBertConfig(
        vocab_size=WORDS,
        dim=WIDTH,
        n_layers=LAYERS,
        n_heads=HEADS,
        hidden_dim=64,
        max_position_embeddings=40,
        pad_token_id=0,
    ),
    "electra": lambda: hf.ElectraConfig(**_PLAIN, embedding_size=24),
    "albert": lambda: hf.AlbertConfig(**_PLAIN, embedding_size=24),
    "modernbert": lambda: hf.ModernBertConfig(
        **{**_PLAIN, "num_hidden_layers": 3},
        local_attention=6,
        global_attn_every_n_layers=2,
        bos_token_id=2,
        eos_token_id=3,
        cls_token_id=2,
        sep_token_id=3,
    ),
    "gpt2": lambda: hf.GPT2Config(**_OLD, n_positions=40),
    "gpt_neox": lambda: hf.GPTNeoXConfig(**_PLAIN, **_ENDS),
    "llama": lambda: hf.LlamaConfig(**_GROUPED),
    "qwen3": lambda: hf.Qwen3Config(**_GROUPED),
    # A cap and a window small enough to have an effect.
    "gemma2": lambda: hf.Gemma2Config(
        **_GROUPED,
        attn_logit_softcapping=0.5,
        query_pre_attn_scalar=8,
        sliding_window=4,
    ),
    "opt": lambda: hf.OPTConfig(
        vocab_size=WORDS,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        ffn_dim=64,
        max_position_embeddings=40,
        word_embed_proj_dim=WIDTH,
        pad_token_id=0,
        **_ENDS,
    ),
    "t5": lambda: hf.T5Config(
        vocab_size=WORDS,
        d_model=WIDTH,
        d_kv=8,
        d_ff=64,
        num_layers=LAYERS,
        num_heads=HEADS,
        relative_attention_num_buckets=8,
        pad_token_id=0,
        decoder_start_token_id=0,
    ),
    "bart": lambda: hf.BartConfig(
        vocab_size=WORDS,
        d_model=WIDTH,
        encoder_layers=LAYERS,
        decoder_layers=LAYERS,
        encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_position_embeddings=40,
        pad_token_id=0,
        decoder_start_token_id=2,
        forced_eos_token_id=None,
        **_ENDS,
    ),
    "vit": lambda: hf.ViTConfig(
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=64,
        **_IMAGE,
    ),
    # Shifted windows need two blocks at one size, and images larger than a window.
    "swin": lambda: hf.SwinConfig(
        embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4, **_IMAGE
    ),
    "gpt_oss": lambda: hf.GptOssConfig(
        **_GROUPED, num_local_experts=2, num_experts_per_tok=1, sliding_window=4
    ),
    "whisper": lambda: hf.WhisperConfig(
        vocab_size=WORDS,
        d_model=WIDTH,
        encoder_layers=LAYERS,
        decoder_layers=LAYERS,
        encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_source_positions=20,
        max_target_positions=40,
        num_mel_bins=8,
        pad_token_id=0,
        decoder_start_token_id=2,
        **_ENDS,
    ),
    "deberta": lambda: hf.DebertaV2Config(**_PLAIN),
    "bloom": lambda: hf.BloomConfig(
        vocab_size=WORDS, hidden_size=WIDTH, n_layer=LAYERS, n_head=HEADS, **_ENDS
    ),
    "gptj": lambda: hf.GPTJConfig(**_OLD, n_positions=40, rotary_dim=4),
}


def model(family, seed=0):
    """Return a model in eval mode, eager, with weights so large that every head has an effect."""
    config = CONFIGS[family]()
    config.initializer_range = config.init_std = 0.3
    config._attn_implementation = "eager"
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        made = hf.AutoModel.from_config(config)
        for (
            weight
        ) in made.parameters():  # T5 ignores the range, and some tables start at zero
            if weight.ndim > 1:
                torch.nn.init.normal_(weight, std=0.3)
    return made.eval().requires_grad_(False)


def inputs(family, texts=2, length=9, seed=0):
    """Return tokens padded at the end (encoders) or the start (decoders), or noise as images."""
    stream = torch.Generator().manual_seed(seed)
    if family in VISION:
        return {"pixel_values": torch.randn(texts, 3, 16, 16, generator=stream)}
    ids = torch.randint(5, WORDS, (texts, length), generator=stream)
    mask = torch.ones_like(ids)
    left = family in (*DECODERS, "gpt_oss", "bloom", "gptj")
    padding = slice(0, 2) if left else slice(-2, None)
    ids[1, padding] = 0
    mask[1, padding] = 0
    given = {"input_ids": ids, "attention_mask": mask}
    if family in PAIRS:
        given["decoder_input_ids"] = torch.randint(
            5, WORDS, (texts, 6), generator=stream
        )
    return given
