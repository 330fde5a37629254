"""Tiny models with random weights and a head for a task, and batches for them."""

from __future__ import annotations

import torch
import transformers as hf

import tiny_architectures
from tiny_architectures import WORDS

CLS = 2
SEP = 3
HEADS = {
    "classes": hf.AutoModelForSequenceClassification,
    "choice": hf.AutoModelForMultipleChoice,
    "causal": hf.AutoModelForCausalLM,
    "seq2seq": hf.AutoModelForSeq2SeqLM,
    "image": hf.AutoModelForImageClassification,
}


def model(family, task, classes=2, seed=0, scale=0.3):
    config = tiny_architectures.CONFIGS[family]()
    config._attn_implementation = "eager"
    config.num_labels = classes
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        made = HEADS[task].from_config(config)
        for weight in made.parameters():
            if weight.ndim > 1:
                torch.nn.init.normal_(weight, std=scale)
    return made.eval().requires_grad_(False)


def texts(count=4, length=11, seed=0, framed=True, choices=0, left=False):
    """Return padded texts of random words, framed in [CLS] … [SEP], of different lengths."""
    stream = torch.Generator().manual_seed(seed)
    rows = count * max(1, choices)
    ids = torch.randint(5, WORDS, (rows, length), generator=stream)
    mask = torch.ones_like(ids)
    for row in range(rows):
        pad = row % 3
        real = slice(pad, length) if left else slice(0, length - pad)
        mask[row] = 0
        mask[row, real] = 1
        if framed:
            ids[row, real.start] = CLS
            ids[row, real.stop - 1] = SEP
    ids = ids * mask
    special = ((ids == CLS) | (ids == SEP) | (ids == 0)).long()
    batch = {"input_ids": ids, "attention_mask": mask, "special_tokens_mask": special}
    if choices:
        batch = {
            name: value.unflatten(0, (count, choices)) for name, value in batch.items()
        }
    return batch


def own_labels(model, batch):
    """Return the model's own answers as labels, so that it gets every example right."""
    inputs = {
        name: value for name, value in batch.items() if name != "special_tokens_mask"
    }
    with torch.no_grad():
        return model(**inputs).logits.argmax(-1)
