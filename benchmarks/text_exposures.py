"""Text from attention maps, attention outputs and pooled embeddings of an encoder.

python text_exposures.py --model FOLDER --data FOLDER [--device cuda] [--layers 1 2 …]
`--model` is a folder with an encoder (all-MiniLM-L6-v2), `--data` one with SST-2's dev.tsv. Layer
1's maps are read in closed form from `--sentences` sentences; what has to be searched, from fewer.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import torch

import show
from keyhole.errors import InputError
from keyhole.invert.leaks import AttentionMaps, AttentionOutput, Leak, Pooled
from keyhole.invert.text import (
    EncoderMaps,
    PooledEmbedding,
    SubLayerOutput,
    TokenSearch,
    recover_texts,
)
from keyhole.invert.text.attack import Attack
from keyhole.models import Exposure, Loaded, capture, identity, load_model
from show import Row


def parse() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--data", type=Path, default=Path("../../shared/data/sst2"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--layers", type=int, nargs="*", default=[1, 2, 3, 4, 5, 6])
    parser.add_argument("--sentences", type=int, default=100)
    parser.add_argument("--searched", type=int, default=10)
    parser.add_argument("--outputs", type=int, default=5)
    parser.add_argument("--pooled", type=int, default=3)
    return parser.parse_known_args()


def run(quick: bool, options: argparse.Namespace) -> list[Row]:
    if quick:
        loaded, texts = tiny()
        options = argparse.Namespace(
            layers=[1, 2], sentences=4, searched=1, outputs=1, pooled=1, device="cpu"
        )
        search = TokenSearch(rounds=1, passes=20, candidates=4)
    else:
        if options.model is None:
            raise SystemExit("expected --model FOLDER (all-MiniLM-L6-v2)")
        loaded = load_model(options.model, device=options.device)
        texts = sentences(loaded, options.data, options.sentences)
        search = TokenSearch()
    rows: list[Row] = []
    for layer in options.layers:
        if layer == 1:
            rows += closed_form(loaded, texts[: options.sentences], quick)
        else:
            few = texts[: options.searched]
            rows.append(row(loaded, few, Exposure("maps", layer), EncoderMaps(deeper=search)))
    for layer in options.layers:
        count = options.searched if layer == 1 else options.outputs
        exposure = Exposure("attention", layer)
        rows.append(row(loaded, texts[:count], exposure, SubLayerOutput(search)))
    if options.pooled:
        few = texts[: options.pooled]
        rows.append(row(loaded, few, Exposure("pooled"), PooledEmbedding(search)))
    return rows


def closed_form(loaded: Loaded, texts: list[torch.Tensor], quick: bool) -> list[Row]:
    exposure, few = Exposure("maps", 1), texts[: max(2, len(texts) // 5)]
    exact = row(loaded, texts, exposure, EncoderMaps(), least=None if quick else 0.99)
    degraded = {
        "fp16": torch.Tensor.half,
        "3 decimals": lambda maps: (maps * 1e3).round() / 1e3,
        "2 decimals": lambda maps: (maps * 1e2).round() / 1e2,
        "1 decimal": lambda maps: (maps * 1e1).round() / 1e1,
    }
    return [
        exact,
        *(row(loaded, few, exposure, EncoderMaps(), how, f) for how, f in degraded.items()),
    ]


def row(
    loaded: Loaded,
    texts: list[torch.Tensor],
    exposure: Exposure,
    attack: Attack,
    how: str = "fp32",
    degrade: Any = torch.clone,
    least: float | None = None,
) -> Row:
    """Recover all texts from one exposure; tokens are counted without the special ones."""
    leaks = [leak_of(loaded, ids, exposure, degrade) for ids in texts]
    found = recover_texts(loaded.model, loaded.tokenizer, leaks, method=attack)
    pairs = [(one.ids, ids.tolist()) for one, ids in zip(found, texts, strict=True)]
    tokens = sum(a == b for one, ids in pairs for a, b in zip(one[1:-1], ids[1:-1], strict=False))
    share = tokens / sum(len(ids) - 2 for _, ids in pairs)
    exact = sum(one == ids for one, ids in pairs)
    verified = sum(one.verified for one in found)
    false = sum(one.verified and a != b for one, (a, b) in zip(found, pairs, strict=True))
    seconds = max(one.seconds for one in found) / len(found)
    measured = f"{share:.1%} of tokens, {exact} of {len(pairs)} exact, {verified} verified"
    if exposure.kind == "pooled":
        measured += f", token F1 {statistics.mean(f1(*pair) for pair in pairs):.2f}"
    work = statistics.median(one.passes - one.forwards for one in found)
    trials = statistics.median(one.forwards for one in found)
    details = f"median {work:.0f} passes, {trials:.0f} trials; {seconds:.1f} s a text"
    details += f"; {false} falsely verified" if false else ""
    target = "" if least is None else f">= {least:.0%} of tokens"
    met = None if least is None else share >= least
    return Row(f"{exposure}, {how}, {len(pairs)} texts", measured, target, met, details)


def leak_of(loaded: Loaded, ids: torch.Tensor, exposure: Exposure, degrade: Any) -> Leak:
    values = capture(loaded.model, exposure, ids=ids[None])["values"][0]
    if exposure.kind == "pooled":
        return Pooled(degrade(values), tokens=len(ids))
    kind = AttentionMaps if exposure.kind == "maps" else AttentionOutput
    return kind(degrade(values), exposure.layer)


def f1(found: list[int], truth: list[int]) -> float:
    """Of the bags of tokens, special ones left out."""
    common = sum((Counter(found[1:-1]) & Counter(truth[1:-1])).values())
    return 2 * common / max(1, len(found) - 2 + len(truth) - 2)


def sentences(loaded: Loaded, folder: Path, count: int) -> list[torch.Tensor]:
    path = folder / "dev.tsv"
    if not path.is_file():
        raise InputError(f"expected SST-2's dev.tsv in {folder}")
    lines = path.read_text().splitlines()[1 : count + 1]
    texts = [line.rsplit("\t", 1)[0] for line in lines]
    device = loaded.model.device
    return [torch.tensor(loaded.tokenizer(text)["input_ids"], device=device) for text in texts]


def tiny() -> tuple[Loaded, list[torch.Tensor]]:
    """A random BERT of 100 words, and random texts."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    words = special + [f"w{number}" for number in range(96)]
    inner = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]",
        sep_token="[SEP]",
    )  # fmt: skip
    config = transformers.BertConfig(
        vocab_size=len(words), hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=64, max_position_embeddings=32, initializer_range=0.12,
    )  # fmt: skip
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = transformers.BertModel(config).eval()
    model.requires_grad_(False)
    texts = torch.randint(4, len(words), (4, 8))
    texts[:, 0], texts[:, -1] = 2, 3
    return Loaded(model, tokenizer, identity(model), "tiny"), list(texts)


if __name__ == "__main__":
    options, sys.argv[1:] = parse()
    show.main(partial(run, options=options), __doc__)
