"""Flips of a classifier that was not trained here: rxnfp's BERT of chemical reactions.

The package rxnfp (0.1.0) carries a BERT of 12 layers, 256 wide, 4 heads, that tells 50 kinds of
reactions apart (`--model FOLDER` where it is not installed; its weights are pickled). It brings no
reactions with labels. The texts are eight kinds of textbook reactions, each with every pair of its
building blocks; what the model answers counts as right. So flips are measured, not accuracy: how
many kinds it tells apart, and how alike it answers within a kind, is printed next to them.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import show
import subjects
import trained
from keyhole.data import Example
from keyhole.disrupt.batches import Batches
from keyhole.models import Loaded, load_model
from show import Row

INSIDE = "models/transformers/bert_ft_10k_25s"
ATTACKS = ("random", "as-released", "strongest")

_RINGS = ("c1ccccc1", "c1ccc(OC)cc1", "c1ccncc1")
_CHAINS = ("Cc1ccccc1", "CCCC", "C1CCCCC1")
_SMALL = ("F", "Cl", "OC")
# Reactants >> product, with two building blocks whose first atom is the one that is bound.
KINDS: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "amide from an acid": ("O=C(O){a}.N{b}>>O=C(N{b}){a}", _RINGS, _CHAINS),
    "ester from an acid chloride": ("O=C(Cl){a}.O{b}>>O=C(O{b}){a}", _RINGS, _CHAINS),
    "sulfonamide": ("O=S(=O)(Cl){a}.N{b}>>O=S(=O)(N{b}){a}", _RINGS, _CHAINS),
    "Suzuki coupling": ("Br{a}.OB(O)c1ccc({b})cc1>>c1cc({b})ccc1{a}", _RINGS, _SMALL),
    "Boc deprotection": ("CC(C)(C)OC(=O)N({a}){b}>>N({a}){b}", _CHAINS, _CHAINS),
    "reductive amination": ("O=C{a}.N{b}>>C(N{b}){a}", _RINGS, _CHAINS),
    "nitro reduction": ("O=[N+]([O-])c1ccc({a})c({b})c1>>Nc1ccc({a})c({b})c1", _SMALL, _SMALL),
    "ester hydrolysis": ("COC(=O)c1ccc({a})c({b})c1>>O=C(O)c1ccc({a})c({b})c1", _SMALL, _SMALL),
}


def reactions() -> list[Example]:
    """Every kind with every pair of its blocks; labels are to come from the model."""
    return [
        Example(f"{kind}: {a} {b}", 0, pattern.format(a=a, b=b))
        for kind, (pattern, firsts, seconds) in KINDS.items()
        for a in firsts
        for b in seconds
    ]


def rxnfp(model: Path | None, device: str) -> Loaded:
    """The classifier, with a tokenizer that splits a reaction as its own code does."""
    where = model or subjects._package("rxnfp", INSIDE, "--model")
    loaded = load_model(
        where, task="classification", allow_pickle=True, tokenizer=False, device=device
    )
    return reading(loaded, (where / "vocab.txt").read_text("utf-8").splitlines())


def tiny() -> Loaded:
    """Random weights that read the same symbols."""
    loaded = subjects.tiny("bert", head="AutoModelForSequenceClassification")
    text = "".join(example.text for example in reactions())
    symbols = sorted(set(re.findall(subjects._SMILES, text)))
    return reading(loaded, [*subjects.SPECIAL, *symbols])


def reading(loaded: Loaded, symbols: list[str]) -> Loaded:
    words = subjects._words(symbols, framed=True, split=subjects._SMILES)
    return replace(loaded, tokenizer=words)


def answered(loaded: Loaded, examples: list[Example], batch_size: int) -> list[Example]:
    """The same reactions, labelled with what the model says."""
    batches = Batches(loaded.model, loaded.tokenizer, examples, batch_size, alike=False)
    answers = [int(answer) for _, batch, _ in batches for answer in batches.predicted(batch)]
    return [
        replace(example, label=answer) for example, answer in zip(examples, answers, strict=True)
    ]


def consistency(examples: list[Example]) -> Row:
    """How many answers there are, and how many reactions get their kind's most frequent one."""
    kinds: dict[str, Counter[int]] = {}
    for example in examples:
        kinds.setdefault(example.id.split(":")[0], Counter())[example.label] += 1
    usual = [answers.most_common(1)[0] for answers in kinds.values()]
    return Row(
        "answers as usual for their kind", f"{sum(count for _, count in usual)} of {len(examples)}",
        details=f"{len({label for label, _ in usual})} answers for {len(kinds)} kinds",
    )  # fmt: skip


def run(
    quick: bool,
    model: Path | None = None,
    examples: int | None = None,
    share: float = 0.01,
    queries: int = 64,
    device: str = subjects.DEVICE,
) -> Iterator[Row]:
    """`queries` masked reactions in one pass; `examples` of the 72, all by default."""
    loaded = tiny() if quick else rxnfp(model, device)
    texts = answered(loaded, reactions()[: 2 if quick else examples], queries)
    yield consistency(texts)
    for name in ATTACKS:
        method = trained.ATTACKS[name](0.05 if quick else share, batch=queries)
        started = time.perf_counter()
        batches = Batches(loaded.model, loaded.tokenizer, texts, queries)
        found = batches.attack(trained.shortened(method) if quick else method)
        details = (
            f"{found.flips} of {len(found.attacked)}, by {found.share:.2%} of all "
            f"units; {found.queries:.0f} queries, {time.perf_counter() - started:.0f} s; "
            f"k = 0 changed {found.control.change:g}"
        )
        yield Row(name, f"{found.success:.1%}", details=details)


if __name__ == "__main__":
    show.main(run)
