"""What batches and processes bring: the same greedy asked singly, and two workers against one.

`--model` is a fine-tuned classifier's folder, `--data` the folder that holds sst2/ (by default
../shared/data beside the repository). `--quick` takes random weights.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import torch

import show
from keyhole import disrupt
from keyhole.data import Example, encode, read_examples
from keyhole.disrupt import HackAttend, Rerank
from keyhole.models import load_model
from keyhole.models.demo import FOLDER
from show import Row

ROOT = Path(__file__).resolve().parent.parent
OPTIONS = argparse.ArgumentParser(add_help=False)
OPTIONS.add_argument("--model")
OPTIONS.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data")
OPTIONS.add_argument("--examples", type=int, default=32)
OPTIONS.add_argument("--sweep-examples", type=int, default=400)
OPTIONS.add_argument("--batch", type=int, default=256)
OPTIONS.add_argument("--parts", default="singly,processes")
OPTIONS.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
CHOSEN, REST = OPTIONS.parse_known_args()


def run(quick: bool) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        if quick:
            tiny(Path(folder))
            model, examples = folder, INLINE
        else:
            model = CHOSEN.model or str(FOLDER)  # the classifier that ships with Keyhole
            examples = read_examples(CHOSEN.data / "sst2" / "dev.tsv")
        rows: list[Row] = []
        if "singly" in CHOSEN.parts:
            rows += singly(model, examples[: 4 if quick else CHOSEN.examples], quick)
        if "processes" in CHOSEN.parts and not quick:
            rows.append(processes(model, examples[: CHOSEN.sweep_examples]))
        return rows


def singly(model: str, examples: list[Example], quick: bool) -> list[Row]:
    """The released greedy, one query at a time and in batches: the same masks, less time."""
    loaded = load_model(model, task="classification", device=CHOSEN.device)
    ordered = sorted(examples, key=lambda example: len(example.text))
    seconds: list[float] = []
    found: list[list[disrupt.Outcome]] = []
    for single in (True, False):
        method = HackAttend.as_released(batch=CHOSEN.batch, one_at_a_time=single)
        outcomes: list[disrupt.Outcome] = []
        # Once unmeasured: the first pass on a device pays for what all share.
        method(loaded.model, *encode(loaded.tokenizer, ordered[:1]))
        started = time.perf_counter()
        for start in range(0, len(ordered), 16):
            batch, labels = encode(loaded.tokenizer, ordered[start : start + 16])
            outcomes += method(loaded.model, batch, labels).outcomes
        seconds.append((time.perf_counter() - started) / len(ordered))
        found.append(outcomes)
    same = sum(
        (a.flipped, a.steps, a.cut) == (b.flipped, b.steps, b.cut)
        for a, b in zip(*found, strict=True)
    )
    ratio = seconds[0] / seconds[1]
    times = f"{seconds[0]:.2f} s / {seconds[1]:.3f} s = {ratio:.1f}"
    goal = ("", None) if quick else (">= 10", ratio >= 10)
    return [
        Row(
            f"greedy one query at a time / in batches, an example, {CHOSEN.device}",
            times,
            *goal,
            promise=False,
        ),
        Row("  the same masks", f"{same} of {len(ordered)}", "all", same == len(ordered)),
    ]


def processes(model: str, examples: list[Example]) -> Row:
    """Examples a second of two workers against one, each with one thread.

    Over the second half of the examples: by then every worker has started and loaded its model.
    """
    rates: list[float] = []
    method = HackAttend(schedule=Rerank(refine=0, prefixes=4))
    source = disrupt.ModelSource(model)
    for workers in (1, 2):
        stamps: list[tuple[float, int]] = []
        disrupt.sweep(
            method, source, examples, workers=workers, batch_size=4,
            progress=lambda done, *_, stamps=stamps: stamps.append((time.perf_counter(), done)),
        )  # fmt: skip
        half = [stamp for stamp in stamps if stamp[1] >= len(examples) // 2]
        (first, before), (last, after) = half[0], half[-1]
        rates.append((after - before) / (last - first))
    ratio = rates[1] / rates[0]
    measured = f"{rates[1]:.2f} / {rates[0]:.2f} examples a second = {ratio:.2f}"
    return Row("two processes / one", measured, ">= 1.7", ratio >= 1.7, promise=False)


INLINE = [Example(str(i), i % 2, " ".join(f"w{(7 * i + 3 * j) % 50}" for j in range(8)))
          for i in range(8)]  # fmt: skip


def tiny(folder: Path) -> None:
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    table = {word: i for i, word in enumerate(special + [f"w{i}" for i in range(56)])}
    words = Tokenizer(models.WordLevel(table, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]",
        sep_token="[SEP]",
    )  # fmt: skip
    config = transformers.BertConfig(
        vocab_size=60, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=64, max_position_embeddings=40, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.BertForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    sys.argv[1:] = REST
    show.main(run, __doc__)
