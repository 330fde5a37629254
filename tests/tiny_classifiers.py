"""Tiny classifiers with random weights, a batch for them, and a task that they can learn."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers

import tiny_models as tiny
from keyhole.data import Example
from keyhole.disrupt import HackAttend, Rerank

KINDS = {
    "classes": transformers.BertForSequenceClassification,
    "choices": transformers.BertForMultipleChoice,
}


def model(kind="classes", seed=0, attention="eager", dropout=0.1, labels=3, **changes):
    config = transformers.BertConfig(
        **{**tiny.SHAPE, "num_hidden_layers": 2, **changes},
        pad_token_id=0,
        num_labels=labels,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    config.initializer_range = 0.2
    config._attn_implementation = attention
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return KINDS[kind](config).train()


def batch(kind="classes", texts=4, length=10, seed=0):
    """Return padded tokens, with the mask of special tokens that a tokenizer gives."""
    stream = torch.Generator().manual_seed(seed)
    shape = (texts, length) if kind == "classes" else (texts, 2, length)
    ids = torch.randint(
        len(tiny.SPECIAL), tiny.SHAPE["vocab_size"], shape, generator=stream
    )
    ids[..., 0] = 2
    ids[..., -1] = 3
    mask = torch.ones_like(ids)
    ids[1, ..., -3] = 3
    ids[1, ..., -2:] = 0
    mask[1, ..., -2:] = 0
    labels = torch.randint(2, (texts,), generator=stream)
    special = (ids < len(tiny.SPECIAL)).long()
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "special_tokens_mask": special,
    }, labels


def examples(count=24, seed=0, choices=False):
    """Return examples of a task: does the text, or which choice, hold a word below w20?"""
    stream = torch.Generator().manual_seed(seed)
    made = []
    for number in range(count):
        label = int(torch.randint(2, (), generator=stream))
        words = torch.randint(20, 195, (7,), generator=stream).tolist()
        marked = [*words[:3], int(torch.randint(20, (), generator=stream)), *words[3:]]
        texts = [" ".join(f"w{word}" for word in chosen) for chosen in (words, marked)]
        if choices:
            ordered = (texts[1], texts[0]) if label == 0 else (texts[0], texts[1])
            made.append(Example(str(number), label, "w30 w31", choices=ordered))
        else:
            made.append(Example(str(number), label, texts[label]))
    return made


def total(defence, model, batch, labels, seed=0):
    """The sum of a defence's losses, with the gradients that they leave at the weights."""
    model.zero_grad()
    stream = torch.Generator().manual_seed(seed)
    found = 0.0
    for loss in defence.losses(model, batch, labels, stream):
        loss.backward()
        found += float(loss.detach())
    weights = model.get_input_embeddings().weight
    return found, weights.grad.clone()


def classifier(folder: Path, count: int = 12) -> Path:
    """A small classifier with files to train it and to flip it."""
    name = folder / "my-classifier"
    model(labels=2).save_pretrained(name)
    tiny.tokenizer().save_pretrained(name)
    for seed, file in enumerate(("train.tsv", "dev.tsv")):
        rows = [
            f"{example.text}\t{example.label}\n" for example in examples(count, seed)
        ]
        (folder / file).write_text("sentence\tlabel\n" + "".join(rows))
    return name


LIGHTLY = "--share 0.2 -o rounds=2 -o prefixes=2 -o refine=1 -o restarts=0"


def attack_lightly(monkeypatch) -> None:
    """Harden's stronger attack with few rounds, at a share at which eight words lose some units.

    LIGHTLY are the same as options of `keyhole disrupt`.
    """

    def light(share=0.01, scope="head", *, seed=0):
        del share
        return HackAttend(0.2, scope=scope, schedule=Rerank(2, 2, 1), seed=seed)

    monkeypatch.setattr(HackAttend, "strongest", light)
