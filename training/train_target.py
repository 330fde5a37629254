"""Train the classifier that ships with Keyhole: a small sentiment model with its own tokenizer.

    python training/train_target.py --data SST2_FOLDER --out
    src/keyhole/models/classifier

SST2_FOLDER holds train.tsv and dev.tsv (`sentence<TAB>label`, with a header). One GPU
trains it in about two minutes, two CPU cores in a few hours. Written are the
configuration, the weights in half precision (safetensors), the tokenizer, and a card
with the measurements of this run.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import time
from pathlib import Path

import torch
from tokenizers import BertWordPieceTokenizer
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    PreTrainedTokenizerFast,
    get_cosine_schedule_with_warmup,
)


def rows(path: Path) -> tuple[list[str], list[int]]:
    with path.open(encoding="utf-8", newline="") as file:
        table = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    return [row["sentence"].strip() for row in table], [
        int(row["label"]) for row in table
    ]


def make_tokenizer(sentences: list[str], size: int) -> PreTrainedTokenizerFast:
    trained = BertWordPieceTokenizer(lowercase=True)
    trained.train_from_iterator(
        sentences, vocab_size=size, min_frequency=2, show_progress=False
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=_with_special_tokens(trained),
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_max_length=128,
    )


def _with_special_tokens(trained: BertWordPieceTokenizer):
    """Return the tokenizer with [CLS] sentence [SEP], as BERT's."""
    from tokenizers.processors import BertProcessing

    tokenizer = trained._tokenizer
    ends = [
        ("[SEP]", tokenizer.token_to_id("[SEP]")),
        ("[CLS]", tokenizer.token_to_id("[CLS]")),
    ]
    tokenizer.post_processor = BertProcessing(*ends)
    return tokenizer


def batches(
    ids: list[list[int]], labels: list[int], size: int, pad: int, device: str, mix=None
):
    order = list(range(len(ids)))
    if mix is not None:
        mix.shuffle(order)
        # Sorted within large pools: little padding, still random from step to step.
        pools = [order[i : i + 50 * size] for i in range(0, len(order), 50 * size)]
        order = [i for pool in pools for i in sorted(pool, key=lambda i: len(ids[i]))]
    groups = [order[i : i + size] for i in range(0, len(order), size)]
    if mix is not None:
        mix.shuffle(groups)
    for group in groups:
        longest = max(len(ids[i]) for i in group)
        block = torch.full((len(group), longest), pad)
        for row, i in enumerate(group):
            block[row, : len(ids[i])] = torch.tensor(ids[i])
        yield (
            block.to(device),
            (block != pad).to(device),
            torch.tensor([labels[i] for i in group], device=device),
        )


@torch.no_grad()
def accuracy(model, ids, labels, pad: int, device: str) -> float:
    model.eval()
    right = 0
    for block, mask, truth in batches(ids, labels, 256, pad, device):
        right += int(
            (model(block, attention_mask=mask).logits.argmax(-1) == truth).sum()
        )
    return right / len(ids)


def train(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    mix = random.Random(args.seed)
    sentences, labels = rows(args.data / "train.tsv")
    held_out, held_labels = rows(args.data / "dev.tsv")
    tokenizer = make_tokenizer(sentences, args.vocabulary)
    pad = tokenizer.pad_token_id
    ids = tokenizer(sentences, truncation=True, max_length=128)["input_ids"]
    held_ids = tokenizer(held_out, truncation=True, max_length=128)["input_ids"]
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=args.width,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        intermediate_size=4 * args.width,
        max_position_embeddings=128,
        num_labels=2,
        hidden_dropout_prob=args.dropout,
        attention_probs_dropout_prob=args.dropout,
        pad_token_id=pad,
        id2label={0: "negative", 1: "positive"},
        label2id={"negative": 0, "positive": 1},
    )
    model = BertForSequenceClassification(config).to(args.device)
    steps = args.epochs * (len(ids) // args.batch + 1)
    optimiser = torch.optim.AdamW(model.parameters(), lr=args.rate, weight_decay=0.05)
    schedule = get_cosine_schedule_with_warmup(optimiser, steps // 10, steps)
    started = time.perf_counter()
    for epoch in range(args.epochs):
        model.train()
        for block, mask, truth in batches(
            ids, labels, args.batch, pad, args.device, mix
        ):
            # Hide some words each time, against overfitting.
            hidden = torch.rand(block.shape, device=block.device) < args.forget
            block = torch.where(hidden & (block > 4), tokenizer.mask_token_id, block)
            logits = model(block, attention_mask=mask).logits
            torch.nn.functional.cross_entropy(
                logits, truth, label_smoothing=0.1
            ).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            schedule.step()
            optimiser.zero_grad()
        dev = accuracy(model, held_ids, held_labels, pad, args.device)
        print(f"epoch {epoch + 1}: dev accuracy {dev:.4f}", flush=True)
    seconds = time.perf_counter() - started
    halved = model.half().float()  # measured in the precision that ships
    write(
        args,
        halved,
        tokenizer,
        accuracy(halved, held_ids, held_labels, pad, args.device),
        seconds,
    )


def write(args, model, tokenizer, dev: float, seconds: float) -> None:
    args.out.mkdir(parents=True, exist_ok=True)
    model.half().cpu().save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    parameters = sum(p.numel() for p in model.parameters())
    settings = {
        k: str(v) if isinstance(v, Path) else v
        for k, v in vars(args).items()
        if k not in ("data", "out")
    }
    card = f"""# The classifier that ships with Keyhole

A small sentiment classifier to audit: BERT architecture, {args.layers} layers of width
{args.width}, {args.heads} heads, {parameters:,} parameters in half precision, a vocabulary of
{len(tokenizer):,} word pieces. Trained on SST-2 by `training/train_target.py`; not meant for
anything else.

- accuracy on the 872 sentences of SST-2's dev set: {dev:.1%} (as shipped, in half precision)
- settings: `{json.dumps(settings)}`
- training took {seconds:.0f} s
"""
    (args.out / "README.md").write_text(card, "utf-8")
    print(
        f"{args.out}: dev accuracy {dev:.4f}, {parameters:,} parameters, {seconds:.0f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--data", type=Path, required=True, help="folder with train.tsv, dev.tsv"
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="folder to write the model to"
    )
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--dropout", type=float, default=0.2)
    parser.add_argument(
        "--forget", type=float, default=0.2, help="share of words hidden"
    )
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu"
    )
    train(parser.parse_args())


if __name__ == "__main__":
    main()
