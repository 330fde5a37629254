"""Texts drawn from a causal language model, for whoever has none like those looked for (ours).

Embeddings are read with a corpus (counts.py): which tokens texts hold, and in which
order. A language model knows both for texts in general. It is used as it is, through what it
writes: sentences that begin with a few given words and go on as the model's own probabilities have
it, token by token. The file of them is a corpus like any other, to be looked at, and to be put
together with others.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

import torch

from keyhole.core.errors import InputError, KeyholeError, expect_count, expect_seed
from keyhole.core.journal import Journal, digest
from keyhole.core.progress import Track, untracked
from keyhole.models import Loaded
from keyhole.models.anatomy import anatomy
from keyhole.models.demo import open_model
from keyhole.recover.embeddings.counts import SHIPPED, corpus_texts

_BATCH_SIZE = {"cuda": 4096, "cpu": 64}  # texts that are written side by side
_NOTHING_NEW = 20  # times in a row, after which there are no more
_ENDS = re.compile(r"(?<=[.!?])\s+|\s*\n+\s*")


def draw_texts(
    model: str | Loaded,
    count: int,
    *,
    begins: Sequence[str] = (),
    max_length: int = 40,
    device: str = "cpu",
    allow_pickle: bool = False,
    journal: str | Path | None = None,
    seed: int = 0,
    track: Track = untracked,
) -> list[str]:
    """`count` different sentences of at most `max_length` tokens.

    `begins` are words that they begin with, by default the first words of sentences of the corpus
    that ships. `journal` keeps what was drawn so far; the same call goes on from there.
    """
    expect_count("count", count)
    expect_count("max_length", max_length)
    expect_seed(seed)
    if not all(map(str.strip, begins)):
        raise InputError("begins must not hold empty words")
    loaded = model
    if isinstance(loaded, str):
        loaded = open_model(loaded, task="causal", device=device, allow_pickle=allow_pickle)
    if not begins:  # one to three words that sentences of the corpus begin with
        lines = [line.split() for line in corpus_texts(SHIPPED)]
        begins = sorted({" ".join(line[:n]) for line in lines for n in (1, 2, 3) if len(line) > n})
    encoded = _encoded(loaded, begins)
    run = {
        "run": "texts drawn", "model": loaded.identity, "begins": digest(list(begins)),
        "max_length": max_length, "seed": seed, "device": anatomy(loaded.model).device.type,
    }  # fmt: skip
    drawn: dict[str, None] = {}
    progress = track("corpus", count)
    idle = number = 0
    with Journal(journal, run) as kept:
        while len(drawn) < count and idle < _NOTHING_NEW:
            key = str(number)
            if key not in kept:
                stream = int(digest([seed, number])[:12], 16)  # no other seed's
                kept.add({key: {"texts": _batch(loaded, encoded, max_length, stream)}})
            before = len(drawn)
            drawn.update(dict.fromkeys(cast("list[str]", kept.records[key]["texts"])))
            idle = 0 if len(drawn) > before else idle + 1
            number += 1
            progress(min(count, len(drawn)))
    if not drawn:
        raise KeyholeError(
            f"{loaded.name} wrote no whole sentence in {number} tries: use a language model"
        )
    return list(drawn)[:count]


def _encoded(loaded: Loaded, begins: Sequence[str]) -> list[list[int]]:
    """The tokens of each beginning, without one that ends a text."""
    encoded = loaded.tokenizer(list(begins))["input_ids"]
    ends = _ends(loaded)
    return [ids[:-1] if len(ids) > 1 and ids[-1] in ends else ids for ids in encoded]


def _ends(loaded: Loaded) -> set[int]:
    return {loaded.tokenizer.eos_token_id, loaded.tokenizer.sep_token_id} - {None}


def _batch(loaded: Loaded, begins: Sequence[list[int]], max_length: int, seed: int) -> list[str]:
    """The whole sentences of some texts that the model writes.

    They begin with equally many tokens: nothing is padding, which some models read, and all are
    written in one go.
    """
    tokenizer, device = loaded.tokenizer, anatomy(loaded.model).device
    generator = torch.Generator().manual_seed(seed)
    length = len(begins[int(torch.randint(len(begins), (), generator=generator))])
    alike = [ids for ids in begins if len(ids) == length]
    chosen = torch.randint(len(alike), (_BATCH_SIZE[device.type],), generator=generator).tolist()
    rows = torch.tensor([alike[number] for number in chosen], device=device)
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.no_grad():
        torch.manual_seed(seed)
        written = loaded.model.generate(
            input_ids=rows, attention_mask=torch.ones_like(rows), do_sample=True,
            temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=max_length,
            pad_token_id=tokenizer.pad_token_id or tokenizer.eos_token_id or 0,
        )  # fmt: skip
    ends, sentences = _ends(loaded), list[str]()
    texts = tokenizer.batch_decode(written, skip_special_tokens=True)
    for text, row in zip(texts, written[:, length:].tolist(), strict=True):
        sentences += whole_sentences(text, ended=not ends.isdisjoint(row))
    return sentences


def whole_sentences(text: str, ended: bool) -> Iterator[str]:
    """The sentences of a text, no headlines; a text of one that has `ended` needs no full stop."""
    parts = [" ".join(part.split()) for part in _ENDS.split(text)]
    for part in parts:
        if (part.endswith((".", "!", "?")) or (ended and len(parts) == 1)) and any(
            map(str.isalpha, part)
        ):
            yield part
