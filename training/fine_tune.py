"""Fine-tune a model on SST-2, HellaSwag, DREAM or your own table, for the benchmarks.

    python training/fine_tune.py --model MINILM --data hellaswag/train.jsonl --task
    choice --out hs

The model gets a new head. `keyhole harden MODEL --method plain` trains a model that has
one.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from keyhole import harden
from keyhole.data import read_examples
from keyhole.models import load_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--dev", type=Path)
    parser.add_argument(
        "--task", choices=["classification", "choice"], default="classification"
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--examples", type=int)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rate", type=float, default=1e-4)
    parser.add_argument("--longest", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu"
    )
    args = parser.parse_args()
    torch.manual_seed(args.seed)  # the head's first weights
    examples = read_examples(args.data, limit=args.examples)
    classes = max(example.label for example in examples) + 1
    loaded = load_model(
        args.model, task=args.task, device=args.device, new_head=classes
    )
    done = harden.train(
        loaded.model,
        loaded.tokenizer,
        examples,
        harden.Plain(),
        epochs=args.epochs,
        rate=args.rate,
        batch=args.batch,
        seed=args.seed,
        device=args.device,
        amp=args.device == "cuda",
        max_length=args.longest,
        pool=16,
    )
    print(
        f"{len(examples)} examples, {done.steps} steps in {done.seconds:.0f} s {done.reason}"
    )
    if args.dev:
        found = harden.evaluate(
            loaded.model,
            loaded.tokenizer,
            read_examples(args.dev),
            attacks={},
            max_length=args.longest,
        )
        print(f"{args.dev}: {found.accuracy:.1%}", flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    loaded.model.half().cpu().save_pretrained(args.out)
    loaded.tokenizer.save_pretrained(args.out)


if __name__ == "__main__":
    main()
