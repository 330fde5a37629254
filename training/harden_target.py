"""Train the hardened version of the classifier that ships.

    python training/harden_target.py --data SST2_FOLDER --out
    src/keyhole/models/hardened

Training continues from the shipped weights with `harden.AttackMasks`. Written are the
configuration, the weights in half precision, the tokenizer, and a card with the
measurements of both models.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict
from pathlib import Path

import torch

from keyhole import harden
from keyhole.data import read_examples
from keyhole.disrupt import HackAttend
from keyhole.models.demo import load_demo


def measured(model, tokenizer, dev, attacked: int) -> tuple[float, float, float]:
    """Return clean accuracy on all of dev, and flips at 1% of each head and of the model."""
    attacks = {
        "head": HackAttend(0.01, batch=256),
        "model": HackAttend(0.01, scope="model", batch=256),
    }
    found = harden.evaluate(
        model,
        tokenizer,
        dev,
        attacks=attacks,
        attacked=attacked,
        batch_size=64,
        donors={},
        wrong_label=None,
    )
    return found.accuracy, found.attacks["head"].success, found.attacks["model"].success


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--data", type=Path, required=True, help="folder with train.tsv, dev.tsv"
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="folder to write the model to"
    )
    parser.add_argument("--sentences", type=int)
    parser.add_argument("--attacked", type=int, default=200)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--rate", type=float, default=2e-4)
    parser.add_argument("--weight", type=float, default=2.0)
    parser.add_argument("--share", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu"
    )
    args = parser.parse_args()
    dev = read_examples(args.data / "dev.tsv")
    train = read_examples(args.data / "train.tsv", limit=args.sentences)
    loaded = load_demo("classification", device=args.device)
    before = measured(loaded.model, loaded.tokenizer, dev, args.attacked)
    print(
        f"as shipped: clean {before[0]:.1%}, flips {before[1]:.1%}, {before[2]:.1%}",
        flush=True,
    )
    method = harden.AttackMasks(share=args.share, weight=args.weight)
    started = time.perf_counter()
    harden.train(
        loaded.model,
        loaded.tokenizer,
        train,
        method,
        epochs=args.epochs,
        rate=args.rate,
        batch=args.batch,
        seed=args.seed,
        device=args.device,
        pool=32,
    )
    seconds = time.perf_counter() - started
    model = loaded.model.half().float()  # measured in the precision that ships
    after = measured(model, loaded.tokenizer, dev, args.attacked)
    print(
        f"hardened: clean {after[0]:.1%}, flips {after[1]:.1%}, {after[2]:.1%}",
        flush=True,
    )
    args.out.mkdir(parents=True, exist_ok=True)
    model.half().cpu().save_pretrained(args.out)
    loaded.tokenizer.save_pretrained(args.out)
    card = f"""# The hardened version of the classifier that ships with Keyhole

The classifier of `../classifier`, trained further with `{method}` by
`training/harden_target.py` ({args.epochs} epochs, rate {args.rate:g}, batch {args.batch}, seed
{args.seed}; {seconds:.0f} s). Measured by that run on SST-2's dev set, flips of the answers
to its first {args.attacked} sentences that each gets right, by `HackAttend` at 1%:

| | clean accuracy | flips, 1% of each head | flips, 1% of the model |
|---|---|---|---|
| as shipped | {before[0]:.1%} | {before[1]:.1%} | {before[2]:.1%} |
| hardened | {after[0]:.1%} | {after[1]:.1%} | {after[2]:.1%} |
"""
    (args.out / "README.md").write_text(card, "utf-8")
    print(asdict(method))


if __name__ == "__main__":
    main()
