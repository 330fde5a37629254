"""Tiny models of each family with random weights, and a tokenizer for them."""

from __future__ import annotations

from functools import cache

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing

from keyhole.models import Loaded, identity

WORDS = [f"w{number}" for number in range(195)]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
SHAPE = {
    "vocab_size": len(WORDS) + len(SPECIAL),
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 80,
}
ENCODERS = ("bert", "roberta", "distilbert", "albert")
DECODERS = ("gpt2", "llama", "qwen3")


def tokenizer(causal=False):
    """Return a tokenizer with one token per word, and [CLS] … [SEP] unless it is causal."""
    table = {word: number for number, word in enumerate(SPECIAL + WORDS)}
    words = Tokenizer(WordLevel(table, unk_token="[UNK]"))
    words.pre_tokenizer = Whitespace()
    if not causal:
        words.post_processor = TemplateProcessing(
            single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
        )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
    )


def model(family, seed=0, head="AutoModel", **changes):
    """Return a model with weights so large that layers and heads have an effect."""
    shape = {**SHAPE, "pad_token_id": 0, **changes}
    match family:
        case "bert":
            config = transformers.BertConfig(**shape)
        case "roberta":
            config = transformers.RobertaConfig(**shape)
        case "distilbert":
            config = transformers.DistilBertConfig(
                vocab_size=shape["vocab_size"],
                dim=shape["hidden_size"],
                n_layers=shape["num_hidden_layers"],
                n_heads=shape["num_attention_heads"],
                hidden_dim=shape["intermediate_size"],
                max_position_embeddings=shape["max_position_embeddings"],
                pad_token_id=0,
            )
        case "albert":
            config = transformers.AlbertConfig(**{"embedding_size": 24, **shape})
        case "gpt2":
            config = transformers.GPT2Config(
                vocab_size=shape["vocab_size"],
                n_embd=shape["hidden_size"],
                n_layer=shape["num_hidden_layers"],
                n_head=shape["num_attention_heads"],
                n_positions=shape["max_position_embeddings"],
                bos_token_id=2,
                eos_token_id=3,
            )
        case "llama":
            config = transformers.LlamaConfig(
                **{
                    "num_key_value_heads": 2,
                    "bos_token_id": 2,
                    "eos_token_id": 3,
                    **shape,
                }
            )
        case _:
            config = transformers.Qwen3Config(
                **{
                    "num_key_value_heads": 2,
                    "head_dim": 8,
                    "bos_token_id": 2,
                    "eos_token_id": 3,
                    **shape,
                }
            )
    config.initializer_range = changes.get("initializer_range", 0.12)
    config._attn_implementation = "eager"
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        made = getattr(transformers, head).from_config(config)
    return made.eval().requires_grad_(False)


def shared(family, seed=0, **changes):
    """Return one model for all tests that do not change it, so that its parts are found once."""
    made, before = _shared(family, seed, **changes)
    assert torch.equal(_sums(made), before), (
        "a test has changed a model that others share"
    )
    return made


@cache
def _shared(family, seed, **changes):
    made = model(family, seed, **changes)
    return made, _sums(made)


def _sums(made):
    return torch.stack([weight.double().sum() for weight in made.parameters()])


def loaded(made, causal=False, name="tiny"):
    """Return a model with its tokenizer and its name, as if it was opened."""
    return Loaded(made, tokenizer(causal), identity(made), name)


def ids(texts=3, length=12, seed=0, causal=False):
    """Return the ids of random words, framed as by the tokenizer."""
    stream = torch.Generator().manual_seed(seed)
    words = torch.randint(
        len(SPECIAL), SHAPE["vocab_size"], (texts, length), generator=stream
    )
    if not causal:
        words[:, 0] = 2
        words[:, -1] = 3
    return words


def language_model(family, seed=0, bias=False, **changes):
    """Return a causal model with its output head, with or without a bias."""
    made = model(family, seed, "AutoModelForCausalLM", **changes)
    if bias:
        head = made.get_output_embeddings()
        stream = torch.Generator().manual_seed(seed)
        head.bias = torch.nn.Parameter(torch.randn(len(head.weight), generator=stream))
    return made.requires_grad_(False)


def save(family, folder, head="AutoModel"):
    """Save a model and its tokenizer in a folder, as from the hub."""
    model(family, head=head).save_pretrained(folder)
    tokenizer(family in DECODERS).save_pretrained(folder)
