"""DAGER and Keyhole on the same gradients of the same batches: exact texts, ROUGE, seconds.

DAGER (arXiv 2405.15586) runs from its authors' repository:

    git clone https://github.com/insait-institute/dager-gradient-inversion git -C
    dager-gradient-inversion checkout 4383e25 python -m venv dager-env dager-env/bin/pip
    install torch==2.13.0 transformers==4.45.1 peft==0.13.0 scipy rouge-score python
    benchmarks/peers/dager.py --checkout dager-gradient-inversion \
        --python dager-env/bin/python

It has the settings of its scripts (bert.sh, gpt2.sh; gpt2_dp.sh, fed_avg.sh and lora.sh
where they apply) and the rank tolerance that its README advises for each size. Batches
are drawn from SST-2's training phrases, as DAGER draws them, each text once. The models
are all-MiniLM-L6-v2 with DAGER's code for BERT, and a GPT-2 with random weights and
SmolLM2's tokens, each with a new head of two classes. Keyhole does not get the
gradients of embeddings, which DAGER does not use. Both read each batch in turn, with
the same number of threads and on the same device.

`--sizes` are batches of plain gradients. `--rules` adds every protocol of gradients.py
(`--only` selects by words in their names, such as LoRA): bfloat16, noise, more tokens
than the model is wide, and LoRA. Of an adapter DAGER gets A's gradient in place of the
map's, because its rows are combinations of the same inputs; in the first round, where A
has no gradient, it gets nothing. DAGER's mode for noise is not implemented for BERT,
where it runs without.
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

import gradients
import show
import subjects
from keyhole.data import Example, read_examples
from keyhole.models import Loaded, identity
from keyhole.models.loading import load_tokenizer
from keyhole.recover.gradients import Batch, Update, recover_batch, update_of
from keyhole.recover.gradients.update import ADAPTER
from show import Row

REPOSITORY = "https://github.com/insait-institute/dager-gradient-inversion"
COMMIT = "4383e2535f2aef75a0902ee967b8be89dc66a2ff"
SIDE = Path(__file__).with_name("dager_side.py")


@dataclass(frozen=True)
class Subject:
    """A model, DAGER's name for its kind, and the settings of DAGER's script for it."""

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
    rules: bool = False,
    only: list[str] = [""],  # noqa: B006 - read, never changed
) -> Iterator[Row]:
    folder = subjects.checkout(checkout, REPOSITORY, COMMIT)
    examples = read_examples(data / "sst2" / "train.tsv")
    random.Random(0).shuffle(examples)
    for name in models:
        subject = SUBJECTS[name]
        loaded = opened(name, encoder, model, device)
        with tempfile.TemporaryDirectory() as working:
            peer = Peer(Path(working), subject, loaded, folder, python, limit)
            rows = [gradients.Rules(f"batch of {size}", texts=size) for size in sizes]
            rows += gradients.RULES[1:] if rules else ()
            rows = [each for each in rows if any(word in each.name for word in only)]
            for each in rows[:1] if quick else rows:
                yield compared(
                    subject, loaded, peer, examples, each, 2 if quick else batches
                )
            peer.close()


def opened(name: str, encoder: Path | None, model: Path | None, device: str) -> Loaded:
    """Return a model with a new head of two classes, for GPT-2 initialised as small as DAGER's."""
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
    """DAGER's process in its own Python, with the same model in its working folder."""

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
        # The older transformers needs its own name of the class.
        if subject.kind.startswith("bert"):
            kind = "BertTokenizerFast"
        else:
            kind = "GPT2TokenizerFast"
        settings = json.loads((home / "tokenizer_config.json").read_text("utf-8"))
        kept = {key: settings[key] for key in settings if key.endswith("_token")}
        kept |= {"tokenizer_class": kind}
        (home / "tokenizer_config.json").write_text(json.dumps(kept), "utf-8")
        self._file = folder / "gradients.safetensors"
        command = [
            python,
            SIDE,
            checkout,
            str(limit),
            "--dataset",
            "sst2",
            "--split",
            "val",
            "--n_inputs",
            "1",
            "--task",
            "seq_class",
            "--device",
            loaded.model.device.type,
            "--model_path",
            subject.kind,
            "--l2_filter",
            "non-overlap",
            *subject.settings,
        ]
        threads = str(torch.get_num_threads())
        self._process = subprocess.Popen(
            command,
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "OMP_NUM_THREADS": threads,
                "HF_HUB_OFFLINE": "1",
                "PYTHONPATH": "",
            },
        )
        self._read = self._answer()
        self._inputs_first = not subject.kind.startswith("bert")

    def _as_weight(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows of inputs in the shape of a weight; GPT-2's have the inputs first."""
        return rows.mT if self._inputs_first else rows

    def __call__(self, texts: list[str], update: Update) -> dict[str, Any]:
        gradients = update.values
        protocol = update.protocol
        given = {name: gradients.get(name) for name in self._read}
        for (
            name
        ) in self._read:  # for an adapter A's gradient, whose rows span the same inputs
            of_a = gradients.get(name.removesuffix("weight") + ADAPTER[0])
            given[name] = self._as_weight(of_a) if of_a is not None else given[name]
        found = {
            name: each.float().contiguous()
            for name, each in given.items()
            if each is not None
        }
        if not found:
            return {
                "texts": [],
                "seconds": 0.0,
                "failure": "no gradient that DAGER reads",
            }
        save_file(found, self._file)
        tolerance = 1e-7 if len(texts) <= 2 else 1e-8  # as DAGER's page advises
        settings: dict[str, Any] = {"rank_tol": tolerance}
        if (
            protocol.multiplier and self._inputs_first
        ):  # gpt2_dp.sh; the noise is there already
            settings = {"defense_noise": 0.0, "n_incorrect": 0}
        elif protocol.steps > 1:  # fed_avg.sh
            settings = {
                "algo": "fedavg",
                "rank_tol": 5e-6,
                "l1_span_thresh": 5e-3,
                "l2_span_thresh": 5e-3,
            }
        elif protocol.lora:  # lora.sh
            settings = {
                "rank_tol": 5e-9,
                "l1_span_thresh": 0.05,
                "l2_span_thresh": 0.05,
            }
        item = {"texts": texts, "gradients": str(self._file), "settings": settings}
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
    rules: gradients.Rules,
    batches: int,
) -> Row:
    given = [Example(each.id, each.label, each.text.strip()) for each in examples]
    batches = batches if rules.widths is None else min(batches, 2)
    made = gradients.batches_of(loaded, given, rules, batches)
    items = [read_by_both(loaded, peer, rules, chosen, batch) for chosen, batch in made]
    total = sum(len(item["texts"]) for item in items)
    exact = {}
    rouge = {}
    seconds = {}
    for side in ("dager", "keyhole"):
        exact[side] = sum(item[side]["exact"] for item in items)
        rouge[side] = [
            statistics.mean(item[side]["rouge"][n] for item in items) for n in (0, 1)
        ]
        seconds[side] = statistics.median(item[side]["seconds"] for item in items)
    ratios = [item["dager"]["seconds"] / item["keyhole"]["seconds"] for item in items]
    false = sum(item["keyhole"]["false"] for item in items)
    stopped = sum(bool(item["dager"]["failure"]) for item in items)
    tokens = [item["tokens"] for item in items]
    return Row(
        f"{subject.what}, {rules.name}, {batches} batches",
        f"exact: DAGER {exact['dager']}, Keyhole {exact['keyhole']} of {total}, {false} falsely "
        f"verified; seconds: DAGER "
        f"{seconds['dager']:.1f}, Keyhole {seconds['keyhole']:.1f}, ratio "
        f"{statistics.median(ratios):.1f}",
        "as many exact, faster",
        exact["keyhole"] >= exact["dager"]
        and statistics.median(ratios) >= 1
        and not false,
        f"medians, ratios from {min(ratios):.1f} to {max(ratios):.1f}; ROUGE-1 and -2: DAGER "
        f"{rouge['dager'][0]:.3f} {rouge['dager'][1]:.3f}, Keyhole {rouge['keyhole'][0]:.3f} "
        f"{rouge['keyhole'][1]:.3f}; {min(tokens)}–{max(tokens)} tokens; DAGER ended without an "
        f"answer {stopped} times",
        promise=False,
        run={
            "peer": REPOSITORY,
            "peer_commit": COMMIT,
            "model": subject.what,
            "rules": rules.name,
            "texts": rules.texts,
            "settings": [subject.kind, *subject.settings],
            "items": items,
        },
    )


def read_by_both(
    loaded: Loaded,
    peer: Peer,
    rules: gradients.Rules,
    chosen: Sequence[Example],
    batch: Batch,
) -> dict[str, Any]:
    """Read one batch with both programs."""
    update = update_of(
        loaded.model,
        batch,
        rules.protocol,
        hide=("embeddings",),
        precision=rules.precision,
    )
    recovery, seconds = show.timed(
        lambda: recover_batch(loaded.model, loaded.tokenizer, update)
    )
    ours = [list(text.ids) for text in recovery.texts]
    answer = peer([each.text for each in chosen], update)
    theirs = [
        loaded.tokenizer(text, add_special_tokens=False)["input_ids"]
        for text in answer["texts"]
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
        best = gradients.rouges(loaded, batch.texts, read)
        found[side] = {
            "exact": sum(list(text) in read for text in batch.texts),
            "rouge": [statistics.mean(score) for score in zip(*best, strict=True)],
            "seconds": round(took, 3),
            "read": [loaded.tokenizer.decode(text) for text in read],
            "failure": failure,
        }
    found["keyhole"]["verified"] = recovery.verified
    found["keyhole"]["false"] = sum(
        text.verified and tuple(text.ids) not in batch.texts for text in recovery.texts
    )
    return found


if __name__ == "__main__":
    show.main(run)
