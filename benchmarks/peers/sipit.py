"""SipIt and Keyhole on the same hidden states of the same texts: exact texts, seconds.

SipIt (arXiv 2510.15511) runs from its authors' repository
(https://github.com/giorgosnikolaou/SIPIT, or its fork
https://github.com/pranjayyelkotwar/SIPIT, commit 4f343c8). It takes a GPU, or hours.

    python benchmarks/peers/sipit.py --checkout SIPIT

Its `SIPIT.find_prompt` has the settings of its README (step size 1.0, no schedule, seed
8) and at most `--limit` seconds per text. Texts are phrases of SST-2's training set of
4 to 10 tokens, the model is SmolLM2-135M-Instruct. Both programs get the same float32
states of one layer.
"""

from __future__ import annotations

import importlib
import random
import signal
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).resolve().parent.parent))

import show
import subjects
from keyhole import recover
from keyhole.data import read_examples
from keyhole.models import Exposure, Loaded
from show import Row

PEER = "https://github.com/pranjayyelkotwar/SIPIT, commit 4f343c8"


def run(
    quick: bool,
    checkout: Path | None = None,
    data: Path = subjects.DATA,
    model: Path | None = None,
    device: str = subjects.DEVICE,
    layers: list[int] = [1, 15],  # noqa: B006 - read, never changed
    texts: int = 10,
    limit: int = 120,
) -> Iterator[Row]:
    if checkout is None:
        raise SystemExit(f"clone {PEER}, and give its folder as --checkout")
    sys.path.insert(0, str(checkout))
    signal.signal(signal.SIGALRM, stop)
    loaded = subjects.smollm2(model, device)
    examples = read_examples(data / "sst2" / "train.tsv")
    random.Random(0).shuffle(examples)
    ids = subjects.encoded(loaded, (example.text.strip() for example in examples[:200]))
    chosen = [each for each in ids if 4 <= len(each) <= 10][: 1 if quick else texts]
    peer = importlib.import_module("src.algorithm.SIPIT").SIPIT(
        log_dir=".", log_name=None, use_scheduler=False
    )
    for layer in layers:
        items = [read_by_both(loaded, peer, text, layer, limit) for text in chosen]
        exact = {
            side: sum(item[side]["exact"] for item in items)
            for side in ("sipit", "keyhole")
        }
        seconds = {
            side: statistics.median(item[side]["seconds"] for item in items)
            for side in exact
        }
        ratios = [
            item["sipit"]["seconds"] / item["keyhole"]["seconds"] for item in items
        ]
        stopped = sum(bool(item["sipit"]["failure"]) for item in items)
        yield Row(
            f"SmolLM2-135M, states of layer {layer}, {len(items)} texts",
            f"exact: SipIt {exact['sipit']}, Keyhole {exact['keyhole']} of {len(items)}; seconds: "
            f"SipIt {seconds['sipit']:.1f}, Keyhole {seconds['keyhole']:.2f}, ratio "
            f"{statistics.median(ratios):.1f}",
            "as many exact, faster",
            exact["keyhole"] >= exact["sipit"] and statistics.median(ratios) >= 1,
            f"medians, ratios from {min(ratios):.1f} to {max(ratios):.1f}; SipIt stopped after "
            f"{limit} s {stopped} times",
            promise=False,
            run={"peer": PEER, "layer": layer, "limit": limit, "items": items},
        )


def stop(*_: object) -> None:
    raise TimeoutError


def read_by_both(
    loaded: Loaded, peer: Any, ids: torch.Tensor, layer: int, limit: int
) -> dict[str, Any]:
    """Read one text with both programs."""
    leak = subjects.leak_of(loaded, ids, Exposure("hidden", layer))
    ours, took = show.timed(
        lambda: recover.recover_text(loaded.model, loaded.tokenizer, leak)
    )
    torch.manual_seed(8)
    found: list[int] = []
    failure = ""
    started = time.perf_counter()
    signal.setitimer(signal.ITIMER_REAL, limit)
    try:
        with torch.enable_grad():
            _, answer, *_ = peer.find_prompt(
                model=loaded.model,
                tokenizer=loaded.tokenizer,
                layer_idx=layer,
                target_hidden_states=leak.values.squeeze(0).to(loaded.model.device),
                step_size=1.0,
            )
        found = answer or []
        failure = "" if answer else "diverged"
    except TimeoutError:
        failure = f"stopped after {limit} s"
    signal.setitimer(signal.ITIMER_REAL, 0)
    theirs = time.perf_counter() - started
    secret = ids.tolist()
    read = loaded.tokenizer.decode
    return {
        "text": read(secret),
        "tokens": len(secret),
        "sipit": {
            "exact": found == secret,
            "seconds": round(theirs, 3),
            "read": read(found),
            "failure": failure,
        },
        "keyhole": {
            "exact": list(ours.ids) == secret,
            "seconds": round(took, 3),
            "read": read(list(ours.ids)),
            "verified": ours.verified,
        },
    }


if __name__ == "__main__":
    show.main(run)
