"""Certificates: texts that no mask of up to k units can flip, next to those that the attack flips.

The classifier that ships with Keyhole and its hardened version (or `--models`, folders of BERT
classifiers) on the first `--texts` of SST-2's dev set of at most `--tokens` tokens: one unit is
exact, by trying all; more are a proof. What is proved is tried: anywhere in the model by the
strongest attack at the same number of units, in each layer by cutting, again and again, the unit
that leaves the least margin of all that are left there. A margin below its bound, or a text that is
certified and flipped all the same, breaks the promise. `--quick` takes two texts.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import show
import subjects
import trained
from keyhole.data import Batch, Example, encode, read_examples
from keyhole.disrupt import HackAttend
from keyhole.disrupt.tasks import ask
from keyhole.disrupt.units import survey
from keyhole.lab.certificates import Certificate, certify_each
from keyhole.lab.written_out import Classifier, embedded, written_out
from keyhole.models import Loaded, load_model
from keyhole.models.demo import FOLDER, HARDENED
from show import Row

AT_ONCE = 128  # masks in one pass
ROUNDING = 1e-9  # of float64, in logits
SHORT = (Example("praise", 1, "a warm and funny film ."), Example("blame", 0, "a dull mess ."))


@dataclass(frozen=True)
class Tried:
    """One text and one number of units: what is proved, and what was tried against it.

    `flipped` by the strongest attack anywhere; `left` the least margin found in each layer.
    """

    proof: Certificate
    flipped: bool
    left: tuple[float, ...] = ()

    @property
    def below(self) -> int:
        """How many bounds were passed: the exact one of a single unit, and those of the layers."""
        if not self.proof.right or not self.proof.units:
            return 0
        if self.proof.k == 1:
            return int(min(self.left) < self.proof.alone - ROUNDING)
        pairs = zip(self.left, self.proof.layers, strict=True)
        return sum(bound is not None and left < bound - ROUNDING for left, bound in pairs)

    @property
    def broken(self) -> bool:
        return self.below > 0 or (self.flipped and self.proof.holds)


def least_in_layers(model: Any, batch: Batch, label: int, most: int) -> list[list[float]]:
    """The margin that 1, 2, … `most` units of each layer leave, each the worst after the others."""
    question = ask(model, batch, torch.tensor([label]))
    units = survey(model, question)
    free = torch.stack([units.at(units.free, place)[0, 0] for place in units.places])
    types = batch.get("token_type_ids")
    x = embedded(model, question.inputs["input_ids"][0], None if types is None else types[0])
    classifier = written_out(model)
    with torch.no_grad():
        _, traces = classifier.passed(x)
        return [
            _one_by_one(classifier, trace.x, free[number], label, number, most)
            for number, trace in enumerate(traces)
        ]


def _one_by_one(
    classifier: Classifier, x: Tensor, free: Tensor, label: int, layer: int, most: int
) -> list[float]:
    cut, left = torch.zeros_like(free), list[float]()
    for _ in range(most):
        best: tuple[float, Tensor] = (torch.inf, cut)
        for part in (free & ~cut).nonzero().split(AT_ONCE):
            masks = cut.repeat(len(part), 1, 1, 1)
            masks[torch.arange(len(part)), part[:, 0], part[:, 1], part[:, 2]] = True
            logits, _ = classifier.passed(x, masks, layer)
            lead = logits[:, label, None] - logits
            lead[:, label] = torch.inf
            margins = lead.amin(1)
            best = min(best, (float(margins.min()), masks[margins.argmin()]), key=lambda b: b[0])
        cut = best[1]
        left.append(min([best[0], *left]))  # up to so many: fewer may do more
    return left


def tried(loaded: Loaded, example: Example, ks: Sequence[int], quick: bool) -> list[Tried]:
    """For each number of units, of one text."""
    batch, labels = encode(loaded.tokenizer, [example])
    proofs = certify_each(loaded.model, batch, example.label, ks, name=example.id)
    config, n = loaded.model.config, batch["input_ids"].shape[1]
    everything = config.num_hidden_layers * config.num_attention_heads * n * n
    results: list[Tried] = []
    right = proofs[0].right
    left = least_in_layers(loaded.model, batch, example.label, max(ks)) if right else []
    for proof in proofs:
        attack = HackAttend.strongest((proof.k + 0.5) / everything, "model")
        if quick:
            attack = trained.shortened(attack)
        (outcome,) = attack(loaded.model, batch, labels).outcomes
        if outcome.masked > proof.k:
            raise SystemExit(f"the attack cut {outcome.masked} units, more than {proof.k}")
        tried_in = tuple(margins[proof.k - 1] for margins in left)
        results.append(Tried(proof, outcome.flipped, tried_in))
    return results


def row(model: str, k: int, results: Sequence[Tried], seconds: float) -> Row:
    right = [result for result in results if result.proof.right]
    proofs = [result.proof for result in right]
    certified = sum(proof.holds for proof in proofs)
    flipped = sum(result.flipped or result.proof.flipped for result in right)
    broken = sum(result.broken for result in right)
    tried = sum(1 if k == 1 else sum(b is not None for b in r.proof.layers) for r in right)
    below = sum(result.below for result in right)
    details = f"{certified} of {len(right)} right; the attack flips {flipped}"
    if k > 1:
        within = sum(proof.holds_within_layers() for proof in proofs)
        layers = max((len(proof.layers) for proof in proofs), default=0)
        each = ", ".join(
            f"{sum(proof.holds_in(n) for proof in proofs) / len(right):.0%}" for n in range(layers)
        )
        share = within / max(1, len(right))
        details += f"; all of them in one layer {share:.0%}, layer by layer {each}"
    in_layer = sum(min(result.left) < 0 for result in right)
    details += (
        f"; cut one by one in one layer {in_layer} flip, {below} of {tried} margins below their "
        f"bound; {broken} broken; {seconds / max(1, len(results)):.1f} s a text, all rows"
    )
    what = "whichever unit is cut, exact" if k == 1 else f"whichever {k} units are cut, proved"
    share = certified / max(1, len(right))
    row = Row(f"{model}: {what}", f"{share:.0%}", "none broken", broken == 0, details)
    return show.itemised(row, [
        {"right": each.proof.right, "holds": each.proof.right and each.proof.holds,
         "layers": each.proof.layers, "flipped": each.flipped, "left": each.left}
        for each in results
    ])  # fmt: skip


def run(
    quick: bool,
    models: list[Path] = [FOLDER, HARDENED],  # noqa: B006 - read, never changed
    data: Path = subjects.DATA,
    texts: int = 20,
    tokens: int = 20,
    units: list[int] = [1, 2, 4],  # noqa: B006
    device: str = subjects.DEVICE,
) -> Iterator[Row]:
    ks = [1, 2] if quick else units
    given = SHORT if quick else read_examples(data / "sst2/dev.tsv")
    for folder in models:
        loaded = load_model(folder, task="classification", device=device)
        short = [e for e in given if len(loaded.tokenizer(e.text)["input_ids"]) <= tokens]
        started = time.perf_counter()
        results = [tried(loaded, example, ks, quick) for example in short[:texts]]
        seconds = time.perf_counter() - started
        for k, column in zip(ks, zip(*results, strict=True), strict=True):
            yield row(folder.name, k, column, seconds)


if __name__ == "__main__":
    show.main(run)
