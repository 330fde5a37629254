"""Certificates: texts that no mask of up to k units can flip, beside those that the attack flips.

The classifier that ships with Keyhole and its hardened version (or `--models`, folders of BERT
classifiers) on the first `--texts` of SST-2's dev set of at most `--tokens` tokens: one unit is
exact, by trying all; more are a proof. The attack is the strongest at the same number of units,
anywhere in the model. A text that is certified and flipped all the same breaks the promise.
`--quick` takes two texts.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

import show
from keyhole.data import Example, encode, read_examples
from keyhole.disrupt import Certificate, HackAttend, Rerank
from keyhole.disrupt.certificate import certify_each
from keyhole.models import Loaded, load_model
from keyhole.models.demo import FOLDER, HARDENED
from show import Row

ROOT = Path(__file__).resolve().parent.parent
OPTIONS = argparse.ArgumentParser(add_help=False)
OPTIONS.add_argument("--models", nargs="+", default=[str(FOLDER), str(HARDENED)])
OPTIONS.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data")
OPTIONS.add_argument("--texts", type=int, default=20)
OPTIONS.add_argument("--tokens", type=int, default=20, help="longer texts are left out")
OPTIONS.add_argument("--units", type=int, nargs="+", default=[1, 2, 4])
OPTIONS.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
CHOSEN, REST = OPTIONS.parse_known_args()
SHORT = (Example("praise", 1, "a warm and funny film ."), Example("blame", 0, "a dull mess ."))


@dataclass(frozen=True)
class Tried:
    """One text: what is proved of it, and how many units the attack flips it with, if it does."""

    proof: Certificate
    flipped: bool


def tried(loaded: Loaded, example: Example, ks: Sequence[int], quick: bool) -> list[Tried]:
    """For each number of units, of one text."""
    batch, labels = encode(loaded.tokenizer, [example])
    proofs = certify_each(loaded.model, batch, example.label, ks, name=example.id)
    config, n = loaded.model.config, batch["input_ids"].shape[1]
    everything = config.num_hidden_layers * config.num_attention_heads * n * n
    results: list[Tried] = []
    for proof in proofs:
        attack = HackAttend.strongest((proof.k + 0.5) / everything, "model")
        if quick:
            attack = replace(attack, schedule=Rerank(rounds=2, prefixes=2, refine=1))
        (outcome,) = attack(loaded.model, batch, labels).outcomes
        if outcome.masked > proof.k:
            raise SystemExit(f"expected at most {proof.k} units cut, got {outcome.masked}")
        results.append(Tried(proof, outcome.flipped))
    return results


def examples(loaded: Loaded, quick: bool) -> list[Example]:
    if quick:
        return list(SHORT)
    given = read_examples(CHOSEN.data / "sst2/dev.tsv")
    short = [e for e in given if len(loaded.tokenizer(e.text)["input_ids"]) <= CHOSEN.tokens]
    return short[: CHOSEN.texts]


def row(model: str, k: int, results: Sequence[Tried], seconds: float) -> Row:
    right = [result for result in results if result.proof.right]
    proofs = [result.proof for result in right]
    certified = sum(proof.holds for proof in proofs)
    flipped = sum(result.flipped or result.proof.flipped for result in right)
    broken = sum(result.flipped and result.proof.holds for result in right)
    details = f"{certified} of {len(right)} right; the attack flips {flipped}"
    if k > 1:
        within = sum(proof.holds_within_layers() for proof in proofs)
        layers = max((len(proof.layers) for proof in proofs), default=0)
        each = ", ".join(
            f"{sum(proof.holds_in(n) for proof in proofs) / len(right):.0%}" for n in range(layers)
        )
        share = within / max(1, len(right))
        details += f"; all of them in one layer {share:.0%}, layer by layer {each}"
    details += (
        f"; {broken} certified and flipped; {seconds / max(1, len(results)):.1f} s a text, all rows"
    )
    what = "whichever unit is cut, exact" if k == 1 else f"whichever {k} units are cut, proved"
    share = certified / max(1, len(right))
    return Row(f"{model}: {what}", f"{share:.0%}", "none flipped", broken == 0, details)


def run(quick: bool) -> list[Row]:
    rows: list[Row] = []
    for folder in CHOSEN.models:
        loaded = load_model(folder, task="classification", device=CHOSEN.device)
        texts = examples(loaded, quick)
        ks: list[int] = [1, 2] if quick else CHOSEN.units
        started = time.perf_counter()
        results = [tried(loaded, example, ks, quick) for example in texts]
        seconds = time.perf_counter() - started
        for k, column in zip(ks, zip(*results, strict=True), strict=True):
            rows.append(row(Path(folder).name, k, column, seconds))
            print(f"{rows[-1].what}: {rows[-1].measured}; {rows[-1].details}", file=sys.stderr)
    return rows


if __name__ == "__main__":
    sys.argv[1:] = REST
    show.main(run, __doc__ or "")
