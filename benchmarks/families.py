"""Attacks on other families of models than BERT: small ones, trained on SST-2.

Made for a GPU.

    bert        MiniLM's own family: for comparison
    roberta     BERT's layers, positions counted from 1, its own head of two layers
    distilbert  BERT's layers without token types and without a pooler, its own head
    electra     BERT's layers, its own head
    gpt2        causal, norms before the sublayers; the last token is read
    llama       causal, rotary positions, RMS norms, gated layers; the last token is read
    bart        an encoder and a decoder of half its layers; the decoder's last state is read
    t5          likewise, relative positions, RMS norms

All are as wide as MiniLM (`--encoder`: 6 layers, 384 wide, 12 heads) and have its tokenizer and its
table of embeddings. Of its other weights each takes what it has a place for: all layers where a
layer is BERT's (roberta, distilbert, electra, bart's encoder; bart's decoder begins with the first
ones, but for the attention to the encoder), positions where they are learnt (gpt2); the rest
begins at random. Each is trained on SST-2 with each method and seed, the accuracy on the dev set
printed after every epoch; then the first `--right` right answers are attacked (trained.py).
`--families` takes some of them; `--join FILE …` makes the table of many processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

import show
import subjects
import trained
from keyhole.models import Loaded
from show import Row
from trained import Options, Task


@dataclass(frozen=True)
class Family:
    """How its configuration calls BERT's sizes, and how its weights call BERT's.

    `names` are replacements made in turn in a name of BERT's. `offset` is the first position's
    place in its table; `folded` says that the first token type is added to the positions, `layers`
    that all of BERT's layers have a place: the encoder's states are then MiniLM's own.
    """

    kind: str
    sizes: dict[str, str]
    names: tuple[tuple[str, str], ...]
    extra: dict[str, Any] = field(default_factory=dict[str, Any])
    offset: int = 0
    folded: bool = True
    layers: bool = True
    epochs: int = 3
    rate: float = 1e-4


def _sizes(width: str, layers: str, heads: str, inner: str, positions: str) -> dict[str, str]:
    bert = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
            "max_position_embeddings")  # fmt: skip
    return dict(zip((width, layers, heads, inner, positions), bert, strict=True))


_BERT = _sizes("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
               "max_position_embeddings")  # fmt: skip
_WORDS, _PLACES = "embeddings.word_embeddings.", "embeddings.position_embeddings."
_BART_LAYER = (
    (_WORDS, "model.shared."), (_PLACES, "model.encoder.embed_positions."),
    ("embeddings.LayerNorm", "model.encoder.layernorm_embedding"),
    ("encoder.layer.", "model.encoder.layers."), ("attention.self.query", "self_attn.q_proj"),
    ("attention.self.key", "self_attn.k_proj"), ("attention.self.value", "self_attn.v_proj"),
    ("attention.output.dense", "self_attn.out_proj"),
    ("attention.output.LayerNorm", "self_attn_layer_norm"), ("intermediate.dense", "fc1"),
    ("output.dense", "fc2"), ("output.LayerNorm", "final_layer_norm"),
)  # fmt: skip
_DISTILBERT_LAYER = (
    ("encoder.layer.", "transformer.layer."), ("attention.self.query", "attention.q_lin"),
    ("attention.self.key", "attention.k_lin"), ("attention.self.value", "attention.v_lin"),
    ("attention.output.dense", "attention.out_lin"),
    ("attention.output.LayerNorm", "sa_layer_norm"), ("intermediate.dense", "ffn.lin1"),
    ("output.dense", "ffn.lin2"), ("output.LayerNorm", "output_layer_norm"),
    ("embeddings.", "distilbert.embeddings."), ("transformer.", "distilbert.transformer."),
)  # fmt: skip
FAMILIES = {
    "bert": Family("Bert", _BERT, (("embeddings.", "bert.embeddings."),
                   ("encoder.", "bert.encoder."), ("pooler.", "bert.pooler.")), folded=False),
    "roberta": Family("Roberta", _BERT, (("embeddings.", "roberta.embeddings."),
                      ("encoder.", "roberta.encoder.")), {"type_vocab_size": 1}, offset=1),
    "distilbert": Family("DistilBert", _sizes("dim", "n_layers", "n_heads", "hidden_dim",
                         "max_position_embeddings"), _DISTILBERT_LAYER),
    "electra": Family("Electra", _BERT, (("embeddings.", "electra.embeddings."),
                      ("encoder.", "electra.encoder.")), {"embedding_size": 0}, folded=False),
    "gpt2": Family("GPT2", _sizes("n_embd", "n_layer", "n_head", "n_inner", "n_positions"),
                   ((_WORDS, "transformer.wte."), (_PLACES, "transformer.wpe.")), layers=False,
                   epochs=4),
    "llama": Family("Llama", _BERT, ((_WORDS, "model.embed_tokens."),), layers=False, epochs=4),
    "bart": Family("Bart", _sizes("d_model", "encoder_layers", "encoder_attention_heads",
                   "encoder_ffn_dim", "max_position_embeddings"), _BART_LAYER, offset=2),
    "t5": Family("T5", _sizes("d_model", "num_layers", "num_heads", "d_ff", "n_positions"),
                 ((_WORDS, "transformer.shared."),), layers=False, epochs=4),
}  # fmt: skip


def made(name: str, source: Loaded, seed: int) -> tuple[Any, float]:
    """A classifier of the family with what fits of BERT's weights, and their share of its own."""
    import transformers

    family, bert = FAMILIES[name], source.model.config
    config = getattr(transformers, f"{family.kind}Config")(
        vocab_size=bert.vocab_size, num_labels=2, **_ends(source.tokenizer, name),
        **{own: getattr(bert, size) for own, size in family.sizes.items()}, **family.extra,
    )  # fmt: skip
    _complete(name, config, bert, family)
    torch.manual_seed(seed)
    model = getattr(transformers, f"{family.kind}ForSequenceClassification")(config)
    taken = _take(model, source.model.state_dict(), family)
    return model.eval(), taken / sum(weight.numel() for weight in model.parameters())


def _ends(words: Any, name: str) -> dict[str, int]:
    """A text ends with [SEP]: where decoders are read, and with what theirs begin."""
    ends = {"pad_token_id": words.pad_token_id, "bos_token_id": words.cls_token_id,
            "eos_token_id": words.sep_token_id}  # fmt: skip
    return ends | ({"decoder_start_token_id": words.sep_token_id} if name in ("bart", "t5") else {})


def _complete(name: str, config: Any, bert: Any, family: Family) -> None:
    """What has no counterpart of BERT's by name."""
    if name == "electra":
        config.embedding_size = bert.hidden_size
    if name == "roberta":
        config.max_position_embeddings += family.offset
    if name == "llama":
        config.num_key_value_heads = config.num_attention_heads
        config.head_dim = bert.hidden_size // bert.num_attention_heads
    if name == "t5":
        config.num_decoder_layers = bert.num_hidden_layers // 2
        config.d_kv = bert.hidden_size // bert.num_attention_heads
    if name == "bart":
        config.decoder_layers = bert.num_hidden_layers // 2
        config.decoder_attention_heads = bert.num_attention_heads
        config.decoder_ffn_dim = bert.intermediate_size


def _take(model: Any, weights: dict[str, Tensor], family: Family) -> int:
    """Copy what has a place; how many numbers found one."""
    own, placed = model.state_dict(), set[str]()
    first_type = weights["embeddings.token_type_embeddings.weight"][:1]
    for name, weight in weights.items():
        value = weight
        if name == "embeddings.position_embeddings.weight":
            value = weight + first_type if family.folded else weight
            value = torch.cat([value[:1].expand(family.offset, -1), value])
        if name == "embeddings.token_type_embeddings.weight" and family.folded:
            value = torch.zeros_like(first_type)
        renamed = name
        for old, new in family.names:
            renamed = renamed.replace(old, new, 1) if old in renamed else renamed
        for place in {renamed, renamed.replace(".encoder.", ".decoder.", 1)}:
            if place in own and own[place].shape == value.shape:
                own[place].copy_(value)
                placed.add(place)
    shared = {own[place].data_ptr(): own[place].numel() for place in placed}
    return sum(shared.values())


def same_states(name: str, model: Any, source: Loaded, text: str) -> Row:
    """The largest difference between the states of MiniLM and of a model with all its layers."""
    batch = source.tokenizer([text], return_tensors="pt")
    base = getattr(model, model.base_model_prefix)
    own = base.get_encoder() if model.config.is_encoder_decoder else base
    with torch.no_grad():
        states = own(**batch).last_hidden_state
        change = float((states - source.model(**batch).last_hidden_state).abs().max())
    most = 1e-3 if name == "bart" else 1e-5  # its norms add 1e-5 to a variance, BERT's 1e-12
    return Row(f"{name}: states before training against MiniLM's", f"{change:.0e}",
               f"<= {most:g}", change <= most)  # fmt: skip


def run(
    quick: bool,
    options: Options = Options(),  # noqa: B008 - read, never changed
    families: list[str] = list(FAMILIES),  # noqa: B006
) -> Iterator[Row]:
    trained.expect_known("families", families, FAMILIES)
    trained.expect_known("attacks", options.attacks, trained.ATTACKS)
    if options.join:
        yield from trained.table(trained.joined(options.join))
        return
    if quick:
        options = replace(
            options, methods=["plain"], epochs=2, batch=16, rate=3e-3, right=3, share=0.05,
            device="cpu", attacks=["random"],
        )  # fmt: skip
    source = subjects.tiny("bert") if quick else subjects.minilm(options.encoder, "cpu")
    # Families without token types would be handed them.
    source.tokenizer.model_input_names = ["input_ids", "attention_mask"]
    texts = [subjects.with_a_word(number) for number in range(120)] if quick else []
    train, dev = (texts[:80], texts[80:]) if quick else options.sst2()
    for name in families:
        family = FAMILIES[name]
        task = Task(name, train, dev, family.epochs, 128, family.rate).given(options)
        for method, seed in options.trainings:
            model, share = made(name, source, seed)
            if family.layers:
                yield same_states(name, model, source, dev[0].text)
            loaded = replace(source, model=model.to(options.device))
            row = trained.attack(
                loaded, task, trained.train(loaded, task, method, seed, options), options
            )
            details = f"{row.details}; {share:.0%} of its weights begin as MiniLM's"
            yield replace(row, details=details)


if __name__ == "__main__":
    show.main(run)
