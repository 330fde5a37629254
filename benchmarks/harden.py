"""What each defence is worth: SST-2, clean accuracy, every attack, masks of another model, cost.

Each method (`--methods`, see trained.py) is trained with each seed from `--encoder` (MiniLM) on
sentences of `--data`, and then evaluated on the dev set: clean accuracy on all of it, attacks on
the first `--dev` sentences. One process may do one method and one seed; `--join FILE FILE …` reads
what they wrote with `--json` and makes the table with mean and range over seeds.

Transferred masks come from a plain model of another seed, trained first. To look around,
`--no-donor --attacks stronger` leaves out everything but the attack that counts. `--save FOLDER`
keeps the models, `--average` is how much of their running mean the weights keep. Time and memory
are those of the same few batches, plain and defended in turn. Without a GPU the defaults are a
reduced size, for which no figure is promised.

`--released` trains plain and `sattend-token` as S-Attend's released program does (docs/papers.md):
its grid of rates and warm-ups, or the one `--rate` with its `--warmup`; the best epoch on the dev
set is kept and attacked.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import torch

import show
import subjects
import trained
from keyhole import harden
from keyhole.data import encode
from keyhole.disrupt import Disruption, HackAttend
from keyhole.harden import Evaluation, Training
from keyhole.models import Loaded
from show import Row
from trained import Options, Run, log, spread

DONOR = "plain, another seed"  # whose masks are transferred
ATTACKS = ["stronger", "as-released", "random", "wrong-label"]
FULL: dict[str, Any] = {
    "methods": ["plain", "sattend:0.1", "sattend:0.2", "sattend:0.5", "sattend-token:0.2",
                "freelb", "smart", "r3f", "asa"],
    "seeds": [0, 1, 2], "examples": 67349, "epochs": 2, "batch": 128, "rate": 1e-4, "dev": 100,
}  # fmt: skip
REDUCED: dict[str, Any] = {  # what two processor cores do in about ten minutes
    "methods": ["plain", "sattend:0.2", "freelb+attack-masks:1:0.01"], "seeds": [0],
    "examples": 256, "epochs": 1, "batch": 32, "rate": 1e-4, "dev": 6,
}  # fmt: skip
QUICK: dict[str, Any] = {
    "methods": ["plain", "freelb+attack-masks"], "seeds": [0], "examples": 96, "epochs": 2,
    "batch": 16, "rate": 3e-3, "dev": 4, "share": 0.03, "device": "cpu",
}  # fmt: skip
# S-Attend's own for SST-2 (run_sattend.py and its sweep).
RELEASED: dict[str, Any] = {
    "epochs": 4, "batch": 32, "rate": (2e-5, 3e-5, 1e-5), "warmup": (0.06, 0.1),
}  # fmt: skip
SETTINGS = ("examples", "epochs", "batch", "rate", "dev", "share")  # stored with each run


def run(
    quick: bool,
    options: Options = Options(  # noqa: B008 - read, never changed
        methods=[], seeds=[], attacks=ATTACKS, warmup=0.06, queries=256
    ),
    average: float = 0.0,
    no_donor: bool = False,
    save: Path | None = None,
    released: bool = False,
) -> Iterator[Row]:
    trained.expect_known("attacks", options.attacks, ATTACKS)
    if options.join:
        joined = trained.joined(options.join)
        yield from trained.kept(joined)
        yield from table(joined)
        return
    on_gpu = options.device.startswith("cuda")
    small = quick or not (on_gpu or options.examples)
    usual = FULL if on_gpu else REDUCED
    missing = {name: value for name, value in usual.items() if not getattr(options, name)}
    if released:
        if quick or not all(
            m == "plain" or m.startswith("sattend-token:") for m in options.methods
        ):
            raise SystemExit(
                "--released trains plain and sattend-token:RATE, and has no quick mode"
            )
        given = {"epochs": RELEASED["epochs"], "batch": RELEASED["batch"], "rate": None}
        missing |= {name: value for name, value in given.items() if name in missing}
    options = replace(options, **(QUICK if quick else missing))
    bench = Bench(options, quick, small, average, not no_donor, released)
    runs: list[Run] = []
    for method, seed in options.trainings:
        folder = save
        if save and len(options.trainings) > 1:
            folder = save / f"{method.replace(':', '-')}-{seed}"
        row = bench.run(method, seed, folder)
        runs += [row.run] if row.run else []
        yield row
    for row in table(runs) if runs else ():
        # A few sentences and a model that learnt little say nothing about the figures to be met.
        yield replace(row, target="", met=None) if small else row


class Bench:
    """Trains, evaluates, compares; what another model's masks are is found out once a seed."""

    def __init__(
        self, options: Options, quick: bool, small: bool, average: float, donor: bool,
        released: bool = False,
    ) -> None:  # fmt: skip
        self.options, self.quick, self.small, self.released = options, quick, small, released
        self.average, self.donor = average, donor
        self.donors: dict[int, Disruption] = {}
        texts = [subjects.with_a_word(number) for number in range(240)] if quick else []
        self.train, self.dev = (texts[:160], texts[160:]) if quick else options.sst2()
        attacks = {"wrong label": HackAttend(options.share, batch=options.queries)}
        attacks |= harden.standard(options.share, batch=options.queries)
        self.attacks = {
            name: trained.shortened(attack) if quick else attack for name, attack in attacks.items()
        }

    def run(self, method: str, seed: int, save: Path | None) -> Row:
        options, what = self.options, f"{method}, seed {seed}"
        loaded = self.fresh(seed)
        grid: dict[str, list[float]] = {}
        if self.released:
            training, grid = self.fit_as_released(loaded, method, seed)
        else:
            training = self.fit(loaded, method, seed, options.examples, options.epochs)
        log(f"{what}: {training.steps} steps in {training.seconds:.0f} s {training.reason}")
        if save:  # in half precision
            copy.deepcopy(loaded.model).half().save_pretrained(save)
            loaded.tokenizer.save_pretrained(save)
        names = [name.replace("-", " ") for name in options.attacks]
        found = harden.evaluate(
            loaded.model, loaded.tokenizer, self.dev, seed=seed, attacked=options.dev,
            attacks={name: self.attacks[name] for name in names if name != "wrong label"},
            donors={DONOR: self.donor_of(seed)} if self.donor else {},
            wrong_label=self.attacks["wrong label"] if "wrong label" in names else None,
            keep=lambda found: log(f"{what}: {words(found)}"),
        )  # fmt: skip
        known: Run = {
            "method": method, "seed": seed, "defence": repr(trained.defence(method)),
            "settings": {name: getattr(options, name) for name in SETTINGS},
            "training": training.to_dict(), "evaluation": found.to_dict(),
            "outcomes": {
                name: [[each.id, each.flipped, each.masked] for each in disruption.outcomes]
                for name, disruption in found.disruptions.items()
            },
        }  # fmt: skip
        if self.released:
            known |= {"settings": known["settings"] | {"released": True}, "grid": grid}
        details = words(found)
        if method != "plain" and not self.released:
            known["time"], known["memory"] = self.cost(method, seed)
            details += f"; time ×{known['time']:.2f}"
        return Row(what, f"clean {found.accuracy:.1%}", details=details, run=known)

    def fresh(self, seed: int) -> Loaded:
        """The encoder with a new head, drawn from the seed."""
        if not self.quick:
            return self.options.minilm(seed)
        import transformers

        loaded = subjects.tiny("bert")
        config = copy.deepcopy(loaded.model.config)
        config.num_labels, config.initializer_range = 2, 0.1
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = transformers.BertForSequenceClassification(config)
        return replace(loaded, model=model.eval())

    def fit(
        self, loaded: Loaded, method: str, seed: int, count: int | None, epochs: int | None
    ) -> Training:
        """Trained on so many sentences, drawn from the seed."""
        stream, options = torch.Generator().manual_seed(seed), self.options
        chosen = torch.randperm(len(self.train), generator=stream)[:count].tolist()
        examples = [self.train[number] for number in chosen]
        return trained.fit(
            loaded, examples, method, options.device, seed=seed,
            epochs=epochs, rate=options.rate, batch=options.batch, warmup=options.warmup, pool=32,
            average=self.average,
        )  # fmt: skip

    def fit_as_released(
        self, loaded: Loaded, method: str, seed: int
    ) -> tuple[Training, dict[str, list[float]]]:
        """The best of the released grid on dev, and what each rate and warm-up gave by epoch."""
        start, best, kept = copy.deepcopy(loaded.model.state_dict()), -1.0, None
        grid: dict[str, list[float]] = {}
        for rate in (self.options.rate and [self.options.rate]) or RELEASED["rate"]:
            for warmup in (self.options.rate and [self.options.warmup]) or RELEASED["warmup"]:
                loaded.model.load_state_dict(start)
                curve = grid[f"{rate:g}, {warmup:g}"] = []
                for done in self.epochs_as_released(loaded, method, seed, rate, warmup):
                    curve.append(
                        trained.Batches(
                            loaded.model, loaded.tokenizer, self.dev, 256, 128
                        ).accuracy()
                    )
                    log(f"{method}, seed {seed}, {rate:g}, {warmup:g}: {curve[-1]:.1%}; {done}")
                    if curve[-1] > best:
                        best, kept = curve[-1], (done, copy.deepcopy(loaded.model.state_dict()))
        assert kept is not None
        loaded.model.load_state_dict(kept[1])
        return kept[0], grid

    def epochs_as_released(
        self, loaded: Loaded, method: str, seed: int, rate: float, warmup: float
    ) -> Iterator[Training]:
        """AdamW without decay or clipping in float16, random batches; yields after each epoch.

        Keys are dropped where the released code drops them, in the attention mask.
        """
        model, device, started = loaded.model, self.options.device, time.perf_counter()
        batch, epochs = self.options.batch or 0, self.options.epochs or 0
        examples = self.train[: self.options.examples]
        model.to(device).requires_grad_(True)
        on_gpu = device.startswith("cuda")
        optimizer = torch.optim.AdamW(model.parameters(), rate, weight_decay=0.0, fused=on_gpu)
        scaler = torch.amp.GradScaler(enabled=on_gpu)
        steps = epochs * math.ceil(len(examples) / batch)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer,
            lambda step: min(step / (warmup * steps), (steps - step) / ((1 - warmup) * steps)),
        )
        dropped = 0.0 if method == "plain" else float(method.removeprefix("sattend-token:"))
        inputs, labels = encode(loaded.tokenizer, examples)
        lengths = inputs["attention_mask"].sum(1)
        inputs = {name: value.to(device) for name, value in inputs.items()}
        spared = inputs.pop("special_tokens_mask").bool()  # no [UNK] in SST-2
        labels = labels.to(device)
        torch.manual_seed(seed)
        losses = list[float]()
        for epoch in range(epochs):
            model.train()
            total = torch.zeros((), device=device)
            order = torch.randperm(len(examples)).split(batch)
            for chosen in order:
                width, numbers = int(lengths[chosen].max()), chosen.to(device)
                given = {name: value[numbers, :width] for name, value in inputs.items()}
                if dropped:
                    drawn = torch.rand(given["attention_mask"].shape, device=device) < dropped
                    given["attention_mask"] *= spared[numbers, :width] | ~drawn
                with torch.autocast(torch.device(device).type, torch.float16, on_gpu):
                    loss = model(**given, labels=labels[numbers]).loss
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                schedule.step()
                total += loss.detach()
            model.eval()
            losses.append(float(total) / len(order))
            yield Training(
                (epoch + 1) * len(order), time.perf_counter() - started,
                torch.cuda.max_memory_allocated(device) if on_gpu else 0, tuple(losses),
            )  # fmt: skip

    def donor_of(self, seed: int) -> Disruption:
        """The units that the stronger attack cuts on the dev sentences of a plain model."""
        if seed not in self.donors:
            loaded = self.fresh(seed + 100)
            self.fit(loaded, "plain", seed + 100, max(1, (self.options.examples or 0) // 3), 1)
            self.donors[seed] = harden.attack(
                loaded.model, loaded.tokenizer, self.dev[: self.options.dev],
                self.attacks["stronger"],
            )  # fmt: skip
        return self.donors[seed]

    def cost(self, method: str, seed: int) -> tuple[float, float | None]:
        """Time and memory of training steps against plain ones, in turn, on the same batches."""
        seconds: dict[str, list[float]] = {"plain": [], method: []}
        memory = {"plain": 0, method: 0}
        loaded, on_gpu = self.fresh(seed), self.options.device.startswith("cuda")
        size = (self.options.batch or 0) * (2 if self.small else 8)
        for repeat in range(1 if self.small else 4):
            for name in seconds:
                used = replace(loaded, model=copy.deepcopy(loaded.model))
                before = torch.cuda.memory_allocated(self.options.device) if on_gpu else 0
                done = self.fit(used, name, seed, size, 1)
                if repeat or self.small:  # the first is a warm-up
                    seconds[name].append(done.seconds)
                memory[name] = max(memory[name], done.peak - before)
        ratio = min(seconds[method]) / min(seconds["plain"])
        return ratio, memory[method] / memory["plain"] if on_gpu else None


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


# The table over seeds: a mean with its range; what a run did not measure is left out of it.
FIGURES = {"clean": (), "stronger": ("attacks", "stronger"),
           "as released": ("attacks", "as released"), "random": ("attacks", "random"),
           "transferred": ("transferred", DONOR), "wrong label lowered": ("wrong_label", "lowered"),
           "wrong label raised": ("wrong_label", "raised")}  # fmt: skip


def values(runs: Sequence[Run], method: str, figure: str) -> list[float]:
    own = [run["evaluation"] for run in runs if run["method"] == method]
    if figure == "clean":
        return [evaluation["accuracy"] for evaluation in own]
    kind, name = FIGURES[figure]
    found = [evaluation[kind][name] for evaluation in own if name in evaluation[kind]]
    return [each["flips"] / max(1, each["examples"]) for each in found]


def table(runs: Sequence[Run]) -> Iterator[Row]:
    names = list(dict.fromkeys(run["method"] for run in runs))
    names.sort(key=lambda name: name != "plain")
    for name in names:
        own = [run for run in runs if run["method"] == name]
        shown = [f"{figure} {spread(values(runs, name, figure))}" for figure in FIGURES]
        shown += [paid(own), "seeds " + ", ".join(str(run["seed"]) for run in own)]
        measured = f"stronger {spread(values(runs, name, 'stronger'))}"
        yield Row(name, measured, details="; ".join([*shown, *trained.settings(own)]))
    yield from verdicts(runs, names)


def paid(runs: Sequence[Run]) -> str:
    times = [run["time"] for run in runs if run.get("time")]
    sizes = [run["memory"] for run in runs if run.get("memory")]
    seconds = mean(run["training"]["seconds"] for run in runs)
    peak = max(run["training"]["peak"] for run in runs) / 2**20
    ratios = f"time ×{mean(times):.2f}" if times else "time ×1"
    ratios += f", memory ×{mean(sizes):.2f}" if sizes else ""
    return f"{ratios} of plain; trained in {seconds:.0f} s, peak {peak:.0f} MiB"


def verdicts(runs: Sequence[Run], names: list[str]) -> Iterator[Row]:
    """The best defence that keeps clean accuracy (or, where none does, the best) against plain."""
    average = {
        name: {figure: mean(values(runs, name, figure) or [float("nan")]) for figure in FIGURES}
        for name in names
    }
    plain = average.get("plain")
    hardened = [name for name in names if name != "plain" and values(runs, name, "stronger")]
    if plain is None or not hardened:
        yield Row("hardened against plain", "not measured", met=False)
        return
    holding = [name for name in hardened if average[name]["clean"] >= plain["clean"] - 0.01]
    best = min(holding or hardened, key=lambda name: average[name]["stronger"])
    half, own = plain["stronger"] / 2, average[best]
    lost = plain["clean"] - own["clean"]
    yield Row(f"{best}: stronger attack", f"{plain['stronger']:.1%} → {own['stronger']:.1%}",
              "cut at least by half", own["stronger"] <= half)  # fmt: skip
    yield Row(f"{best}: clean accuracy", f"{plain['clean']:.1%} → {own['clean']:.1%}",
              "within 1 point", lost <= 0.01)  # fmt: skip
    for figure in ("transferred", "wrong label lowered", "wrong label raised"):
        known = all(values(runs, name, figure) for name in ("plain", best))
        shown = f"{plain[figure]:.1%} → {own[figure]:.1%}" if known else "not measured"
        goal = f"at most half of plain's stronger: {half:.1%}"
        yield Row(f"{best}: {figure}", shown, goal, own[figure] <= half)
    seeds = min(len(values(runs, name, "stronger")) for name in ("plain", best))
    yield Row(f"{best}: seeds", str(seeds), "3", seeds >= 3)


if __name__ == "__main__":
    show.main(run)
