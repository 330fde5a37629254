"""Flips by cutting attention: as released, stronger, and at random, exactly counted.

The full run attacks a fine-tuned classifier (`--model`, a folder; without it the classifier in the
box, for which no figure is promised) on SST-2's dev set, and with
`--task hellaswag` or `--task dream` a multiple-choice model, with `--task next-token` a causal
one (`--model` may be a .gguf file). `--data` is the folder that holds sst2/, hellaswag/ and dream/,
by default ../shared/data beside the repository. `--quick` takes random weights instead.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

import show
from keyhole import disrupt
from keyhole.core.progress import Progress
from keyhole.data import read_examples
from keyhole.disrupt import HackAttend, Rerank
from keyhole.models.demo import FOLDER
from show import Row

ROOT = Path(__file__).resolve().parent.parent
FILES = {"sst2": "sst2/dev.tsv", "hellaswag": "hellaswag/dev.jsonl", "dream": "dream/dev.json",
         "next-token": "sst2/dev.tsv"}  # fmt: skip
HEADS = {"sst2": "classification", "hellaswag": "choice", "dream": "choice", "next-token": "causal"}
OPTIONS = argparse.ArgumentParser(add_help=False)
OPTIONS.add_argument("--model")
OPTIONS.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data")
OPTIONS.add_argument("--task", choices=sorted(FILES), default="sst2")
OPTIONS.add_argument("--examples", type=int)
OPTIONS.add_argument("--share", type=float, default=0.01)
OPTIONS.add_argument("--longest", type=int, help="tokens of a text, where it is cut off")
OPTIONS.add_argument("--batch", type=int, default=64)
OPTIONS.add_argument("--together", type=int, default=16, help="examples in one call")
OPTIONS.add_argument("--only", default="", help="rows to run, by a part of their names")
OPTIONS.add_argument("--workers", type=int, default=0, help="processes; 0: this one")
OPTIONS.add_argument("--resume", type=Path, help="folder for files that remember finished examples")
OPTIONS.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
CHOSEN, REST = OPTIONS.parse_known_args()


def attacks(share: float, batch: int) -> dict[str, HackAttend]:
    per, model = f"{share:.0%} of each head", f"{share:.0%} of the model"
    return {
        f"as released, {per}": HackAttend.as_released(share, batch=batch),
        f"as released, half scale, {per}": HackAttend.as_released(share, "half", batch=batch),
        f"attention score, {per}": HackAttend.as_released(share, ranking="attention", batch=batch),
        f"random, {per}": HackAttend.random(share, batch=batch),
        f"stronger, {per}": HackAttend.strongest(share, batch=batch),
        f"stronger, {model}": HackAttend.strongest(share, "model", batch=batch),
        **{
            f"stronger, {scope}, sparing {words}": HackAttend.strongest(
                share, "model" if scope == model else "head", spare=spare, batch=batch
            )
            for scope in (per, model)
            for spare, words in (("special keys", "special keys only"), ("padding", "padding only"))
        },
    }


TARGETS = {"random": ("<= 2%", lambda rate: rate <= 0.02),
           "stronger, 1% of each head": (">= 75%", lambda rate: rate >= 0.75),
           "stronger, 1% of the model": (">= 98%", lambda rate: rate >= 0.98),
           "stronger, 1% of the model, sparing padding only": (
               ">= 98%", lambda rate: rate >= 0.98)}  # fmt: skip


def row(name: str, found: disrupt.Disruption, seconds: float) -> Row:
    worst = max((outcome.worst_head for outcome in found.attacked), default=0.0)
    most = max((outcome.share for outcome in found.attacked), default=0.0)
    details = (
        f"{found.flips} of {len(found.attacked)} right ({found.skipped} skipped); flips took "
        f"{found.share:.2%} of all units; most {most:.2%} of all, {worst:.2%} of a head; "
        f"{found.queries:.0f} queries, {seconds / max(1, len(found.attacked)):.2f} s an example; "
        f"k = 0 changed {found.control.change:g}"
    )
    goal, met = TARGETS.get(name, TARGETS.get(name.split(",")[0], ("", None)))
    asked = CHOSEN.task == "sst2" and CHOSEN.model is not None
    judged = None if met is None or not asked else met(found.success)
    return Row(name, f"{found.success:.1%}", goal if judged is not None else "", judged, details)


def run(quick: bool) -> list[Row]:
    if quick:
        return quickly()
    if CHOSEN.model is None and CHOSEN.task != "sst2":
        raise SystemExit(f"expected --model FOLDER for {CHOSEN.task}")
    examples = read_examples(CHOSEN.data / FILES[CHOSEN.task], limit=CHOSEN.examples)
    source = disrupt.ModelSource(
        CHOSEN.model or str(FOLDER), HEADS[CHOSEN.task], CHOSEN.device, max_length=CHOSEN.longest
    )
    rows: list[Row] = []
    for name, method in attacks(CHOSEN.share, CHOSEN.batch).items():
        if CHOSEN.only not in name:
            continue
        memory = None
        if CHOSEN.resume:
            CHOSEN.resume.mkdir(parents=True, exist_ok=True)
            memory = CHOSEN.resume / f"{CHOSEN.task} {name}.jsonl".replace(" ", "-")
        started = time.perf_counter()
        found = disrupt.sweep(
            method, source, examples, workers=CHOSEN.workers, batch_size=CHOSEN.together,
            resume=memory, progress=show_progress(name),
        )  # fmt: skip
        rows.append(row(name, found, time.perf_counter() - started))
        print(f"\n{rows[-1].what}: {rows[-1].measured}; {rows[-1].details}", file=sys.stderr)
    return rows


def show_progress(name: str) -> Progress:
    def progress(done: int, total: int | None = None, note: str = "") -> None:
        print(f"\r{name}: {done}/{total} {note}", end="", file=sys.stderr)

    return progress


def quickly() -> list[Row]:
    """A random-weight BERT: nothing to be proud of flips, but every row is made."""
    import transformers

    config = transformers.BertConfig(
        vocab_size=60, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=64, max_position_embeddings=40, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.BertForSequenceClassification(config).eval().requires_grad_(False)
    for weight in model.parameters():
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, std=0.3)
    ids = torch.randint(5, 60, (2, 14))
    ids[:, 0], ids[:, -1] = 2, 3
    labels = model(input_ids=ids).logits.argmax(-1)
    rows: list[Row] = []
    for name, method in attacks(0.01, 32).items():
        started = time.perf_counter()
        short = method
        if isinstance(method.schedule, Rerank):
            short = replace(
                method, schedule=replace(method.schedule, rounds=2, refine=1, restarts=0)
            )
        found = short(model, {"input_ids": ids}, labels)
        rows.append(row(name, found, time.perf_counter() - started))
    return [Row(made.what, made.measured, details=made.details) for made in rows]


if __name__ == "__main__":
    sys.argv[1:] = REST
    show.main(run, __doc__)
