"""DAGER and Keyhole on the same gradients of the same batches: exact texts, ROUGE, seconds.

DAGER (arXiv 2405.15586) is run from its authors' repository, which is not part of this one:

    git clone https://github.com/insait-institute/dager-gradient-inversion
    git -C dager-gradient-inversion checkout 4383e25
    python -m venv dager-env
    dager-env/bin/pip install torch==2.13.0 transformers==4.45.1 peft==0.13.0 scipy rouge-score
    python benchmarks/peers/dager.py --checkout dager-gradient-inversion \
        --python dager-env/bin/python

It is run with the settings of its scripts (bert.sh, gpt2.sh) and the rank tolerance that
its page advises for each size. Batches are drawn from SST-2's training phrases, as DAGER draws
them, each text once. Models: all-MiniLM-L6-v2 by DAGER's code for BERT, and a GPT-2 with random
weights and SmolLM2's tokens. Both get a new head of two classes. Gradients of embeddings, which
DAGER does not read, are hidden from Keyhole. Each batch is read by both, one after the other, with
as many threads each, and on the same device.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

sys.path.append(str(Path(__file__).resolve().parent.parent))

import show
import subjects
from keyhole.data import Example, read_examples
from keyhole.models import Loaded, identity
from keyhole.models.loading import load_tokenizer
from keyhole.recover.gradients import batch_of, recover_batch, update_of
from show import Row

REPOSITORY = "https://github.com/insait-institute/dager-gradient-inversion"
COMMIT = "4383e2535f2aef75a0902ee967b8be89dc66a2ff"
SIDE = Path(__file__).with_name("dager_side.py")


@dataclass(frozen=True)
class Subject:
    """A model, the name that DAGER knows its kind by, and the settings of DAGER's script for it."""

    what: str
    kind: str
    settings: tuple[str, ...]


SUBJECTS = {
    "minilm": Subject("all-MiniLM-L6-v2", "bert-base-uncased", ("--l1_filter", "maxB")),
    "gpt2": Subject("GPT-2, random weights", "gpt2", ("--l1_filter", "all")),
}


def run(
    quick: bool,
    checkout: Path | None = None,
    python: Path = Path(sys.executable),
    data: Path = subjects.DATA,
    encoder: Path | None = None,
    model: Path | None = None,
    device: str = subjects.DEVICE,
    models: list[str] = list(SUBJECTS),  # noqa: B006 - read, never changed
    sizes: list[int] = [1, 2, 4, 8],  # noqa: B006 - read, never changed
    batches: int = 10,
    limit: int = 600,
) -> Iterator[Row]:
    if checkout is None:
        raise SystemExit(f"clone {REPOSITORY} at {COMMIT[:7]} and give its folder as --checkout")
    at = subprocess.run(
        ["git", "-C", checkout, "rev-parse", "HEAD"], capture_output=True, text=True
    )
    if at.stdout.strip() != COMMIT:
        raise SystemExit(f"{checkout} is not at commit {COMMIT[:7]}")
    examples = read_examples(data / "sst2" / "train.tsv")
    random.Random(0).shuffle(examples)
    for name in models:
        subject, loaded = SUBJECTS[name], opened(name, encoder, model, device)
        with tempfile.TemporaryDirectory() as folder:
            peer = Peer(Path(folder), subject, loaded, checkout.resolve(), python, limit)
            for size in sizes[:1] if quick else sizes:
                yield compared(subject, loaded, peer, examples, size, 2 if quick else batches)
            peer.close()


def opened(name: str, encoder: Path | None, model: Path | None, device: str) -> Loaded:
    """A model with a new head of two classes, for decoders as small as DAGER makes it."""
    torch.manual_seed(0)
    if name == "minilm":
        return subjects.minilm(encoder, device, task="classification", new_head=2)
    from transformers import AutoModelForSequenceClassification, GPT2Config

    words = load_tokenizer(subjects.smollm2_file(model))
    ends = {"bos_token_id": words.eos_token_id, "eos_token_id": words.eos_token_id}
    config = GPT2Config(vocab_size=len(words), num_labels=2, **ends)
    made = AutoModelForSequenceClassification.from_config(config)
    made = made.eval().requires_grad_(False).to(device)
    loaded = Loaded(made, words, identity(made), "gpt2")
    loaded.model.config.pad_token_id = words.eos_token_id
    torch.nn.init.normal_(loaded.model.score.weight, std=1e-3)
    return loaded


class Peer:
    """DAGER in its own Python, with the same model in its working folder."""

    def __init__(
        self,
        folder: Path,
        subject: Subject,
        loaded: Loaded,
        checkout: Path,
        python: Path,
        limit: int,
    ) -> None:
        home = folder / subject.kind
        loaded.model.save_pretrained(home)
        loaded.tokenizer.save_pretrained(home)
        # Names of classes that the older library does not know.
        kind = "BertTokenizerFast" if subject.kind.startswith("bert") else "GPT2TokenizerFast"
        settings = json.loads((home / "tokenizer_config.json").read_text("utf-8"))
        kept = {key: settings[key] for key in settings if key.endswith("_token")}
        kept |= {"tokenizer_class": kind}
        (home / "tokenizer_config.json").write_text(json.dumps(kept), "utf-8")
        self._file = folder / "gradients.safetensors"
        command = [
            python, SIDE, checkout, str(limit), "--dataset", "sst2", "--split", "val",
            "--n_inputs", "1", "--task", "seq_class", "--device", loaded.model.device.type,
            "--model_path", subject.kind, "--l2_filter", "non-overlap", *subject.settings,
        ]  # fmt: skip
        threads = str(torch.get_num_threads())
        self._process = subprocess.Popen(
            command, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "OMP_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""},
        )  # fmt: skip
        self._read = self._answer()

    def __call__(self, texts: list[str], gradients: dict[str, torch.Tensor]) -> dict[str, Any]:
        save_file({name: gradients[name].contiguous() for name in self._read}, self._file)
        tolerance = 1e-7 if len(texts) <= 2 else 1e-8  # as DAGER's page advises
        item = {"texts": texts, "gradients": str(self._file), "rank_tol": tolerance}
        assert self._process.stdin
        self._process.stdin.write(json.dumps(item) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout
        if line := self._process.stdout.readline():
            return json.loads(line)
        raise SystemExit("DAGER's process has ended: is its environment complete?")

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()


def compared(
    subject: Subject,
    loaded: Loaded,
    peer: Peer,
    examples: Sequence[Example],
    size: int,
    batches: int,
) -> Row:
    items = [
        one(loaded, peer, examples[number * size : (number + 1) * size])
        for number in range(batches)
    ]
    total = size * batches
    exact, rouge, seconds = {}, {}, {}
    for side in ("dager", "keyhole"):
        exact[side] = sum(item[side]["exact"] for item in items)
        rouge[side] = [statistics.mean(item[side]["rouge"][n] for item in items) for n in (0, 1)]
        seconds[side] = statistics.median(item[side]["seconds"] for item in items)
    ratios = [item["dager"]["seconds"] / item["keyhole"]["seconds"] for item in items]
    stopped = sum(bool(item["dager"]["failure"]) for item in items)
    tokens = [item["tokens"] for item in items]
    return Row(
        f"{subject.what}, batch of {size}, {batches} batches",
        f"exact: DAGER {exact['dager']}, Keyhole {exact['keyhole']} of {total}; seconds: DAGER "
        f"{seconds['dager']:.1f}, Keyhole {seconds['keyhole']:.1f}, ratio "
        f"{statistics.median(ratios):.1f}",
        "as many exact, faster",
        exact["keyhole"] >= exact["dager"] and statistics.median(ratios) >= 1,
        f"medians, ratios from {min(ratios):.1f} to {max(ratios):.1f}; ROUGE-1 and -2: DAGER "
        f"{rouge['dager'][0]:.3f} {rouge['dager'][1]:.3f}, Keyhole {rouge['keyhole'][0]:.3f} "
        f"{rouge['keyhole'][1]:.3f}; {min(tokens)}–{max(tokens)} tokens; DAGER ended without an "
        f"answer {stopped} times",
        promise=False,
        run={"peer": REPOSITORY, "peer_commit": COMMIT, "model": subject.what, "size": size,
             "settings": [subject.kind, *subject.settings], "items": items},
    )  # fmt: skip


def one(loaded: Loaded, peer: Peer, chosen: Sequence[Example]) -> dict[str, Any]:
    """One batch, read by both."""
    chosen = [Example(each.id, each.label, each.text.strip()) for each in chosen]
    batch = batch_of(loaded.model, loaded.tokenizer, chosen, 128)
    update = update_of(loaded.model, batch, hide=("embeddings",))
    recovery, seconds = show.timed(lambda: recover_batch(loaded.model, loaded.tokenizer, update))
    ours = [list(text.ids) for text in recovery.texts]
    answer = peer([each.text for each in chosen], dict(update.values))
    theirs = [
        loaded.tokenizer(text, add_special_tokens=False)["input_ids"] for text in answer["texts"]
    ]
    sides = {
        "keyhole": (ours, seconds, ""),
        "dager": (theirs, answer["seconds"], answer["failure"]),
    }
    found: dict[str, Any] = {
        "texts": [loaded.tokenizer.decode(text) for text in batch.texts],
        "tokens": sum(map(len, batch.texts)),
    }
    for side, (read, took, failure) in sides.items():
        best = [
            max(((subjects.rouge(text, each, 1), subjects.rouge(text, each, 2)) for each in read),
                default=(0.0, 0.0))
            for text in batch.texts
        ]  # fmt: skip
        found[side] = {
            "exact": sum(list(text) in read for text in batch.texts),
            "rouge": [statistics.mean(score) for score in zip(*best, strict=True)],
            "seconds": round(took, 3),
            "read": [loaded.tokenizer.decode(text) for text in read],
            "failure": failure,
        }
    found["keyhole"]["verified"] = recovery.verified
    return found


if __name__ == "__main__":
    show.main(run)
